"""Reads the sentences of `provenance.py` back: those of a server's JSON, and of older databases.

A sentence gives facts only where these give the same sentence again.
"""

import ast
import re
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from autotune.spec.provenance import (
    MEASURED,
    OVER_RANDOM_WEIGHTS,
    FailedSeed,
    PerplexitySource,
    TrialReference,
    UnusedEvaluation,
)

_TRIAL = re.compile(r"trial (\d{1,18})(?: of study (.{1,1000}))?", re.DOTALL)
"""Bounded, as a damaged sentence may have any length, and Python does not read every number."""
_SEEDS = re.compile(r"measured, mean of (\d{1,18}) seeds(?:, without (.+))?", re.DOTALL)
_FAILED_SEED = re.compile(r"(?:^|; )seed (\d{1,18}): ")
_AFTER_STEP = re.compile(r"evaluation loss after step (\d{1,18})")
_OF_STEP = re.compile(r"evaluation loss of step (\d{1,18})")
_TRAINING_LOSS = re.compile(r"training loss of the last (\d{1,18}) steps")
_UNUSED_EVALUATION: Mapping[str, UnusedEvaluation | None] = {
    "": None,
    ", as no evaluation was seen after the last step": "unseen",
    ", as its evaluation does not follow the last step": "not_last",
}


def with_facts(stored: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a measurement with facts where it has sentences, ready for JSON.

    A sentence that no release has written stays, for the reader of the measurement to reject.
    """
    facts = dict(stored)
    source, origin = facts.get("perplexity_source"), facts.get("reused_from")
    if isinstance(source, str):
        facts["perplexity_source"] = _facts(source, _parse_source(source))
    if isinstance(origin, str):
        facts["reused_from"] = _facts(origin, _parse_trial(origin))
    return facts


def _facts(sentence: str, parsed: PerplexitySource | TrialReference | None) -> Any:
    """Returns the facts for JSON if they give the same sentence again; else the sentence."""
    if parsed is None or str(parsed) != sentence:
        return sentence
    return asdict(parsed)


def _parse_source(sentence: str) -> PerplexitySource | None:
    if sentence.endswith(OVER_RANDOM_WEIGHTS):
        source = _parse_source(sentence.removesuffix(OVER_RANDOM_WEIGHTS))
        return None if source is None else replace(source, over_random_weights=True)
    if sentence == "measured":
        return MEASURED
    if sentence.startswith("shared with "):
        trial = _parse_trial(sentence.removeprefix("shared with "))
        return None if trial is None else PerplexitySource.shared_with(trial)
    if seeds := _SEEDS.fullmatch(sentence):
        return PerplexitySource(
            kind="measured", seeds=int(seeds[1]), failed_seeds=_parse_failed_seeds(seeds[2] or "")
        )
    if step := _AFTER_STEP.fullmatch(sentence):
        return PerplexitySource(kind="evaluation", step=int(step[1]))
    if step := _OF_STEP.fullmatch(sentence):
        return PerplexitySource(kind="unchecked_evaluation", step=int(step[1]))
    if steps := _TRAINING_LOSS.match(sentence):
        return PerplexitySource(
            kind="training_loss",
            last_steps=int(steps[1]),
            unused_evaluation=_UNUSED_EVALUATION.get(sentence[steps.end() :]),
        )
    return None


def _parse_failed_seeds(text: str) -> tuple[FailedSeed, ...]:
    """Parses `seed 1: reason; seed 2: reason`."""
    _, *found = _FAILED_SEED.split(text)
    return tuple(
        FailedSeed(seed=int(seed), reason=reason)
        for seed, reason in zip(found[::2], found[1::2], strict=True)
    )


def _parse_trial(sentence: str) -> TrialReference | None:
    found = _TRIAL.fullmatch(sentence)
    if found is None:
        return None
    number, quoted = int(found[1]), found[2]
    if quoted is None:
        return TrialReference(number=number)
    try:
        study = ast.literal_eval(quoted)
    except (ValueError, SyntaxError):
        return None
    if not isinstance(study, str):
        return None
    return TrialReference(number=number, study=study)
