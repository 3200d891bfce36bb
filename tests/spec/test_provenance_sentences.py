"""The sentences that say where a perplexity or a result comes from are read back as facts."""

from dataclasses import asdict

import pytest

from autotune.spec.provenance import MEASURED, FailedSeed, PerplexitySource
from autotune.spec.provenance_sentences import with_facts
from autotune.spec.reading import parse
from tests.building.results import mean_of, shared_with, trial

SENTENCES = {
    "measured": MEASURED,
    "measured, mean of 3 seeds": mean_of(3),
    "measured, mean of 1 seeds, without seed 1: crashed": mean_of(
        1, FailedSeed(seed=1, reason="crashed")
    ),
    "measured, mean of 2 seeds, without seed 5: it\nfailed; twice; seed 6: timeout": mean_of(
        2, FailedSeed(seed=5, reason="it\nfailed; twice"), FailedSeed(seed=6, reason="timeout")
    ),
    "shared with trial 12": shared_with(12),
    "shared with trial 3 of study 'a-b'": shared_with(3, "a-b"),
    "evaluation loss of step 20": PerplexitySource(kind="unchecked_evaluation", step=20),
    "evaluation loss after step 20": PerplexitySource(kind="evaluation", step=20),
    "training loss of the last 5 steps": PerplexitySource(kind="training_loss", last_steps=5),
    "training loss of the last 5 steps, as no evaluation was seen after the last step": (
        PerplexitySource(kind="training_loss", last_steps=5, unused_evaluation="unseen")
    ),
    "training loss of the last 5 steps, as its evaluation does not follow the last step": (
        PerplexitySource(kind="training_loss", last_steps=5, unused_evaluation="not_last")
    ),
}


@pytest.mark.parametrize(("sentence", "source"), SENTENCES.items(), ids=str)
def test_a_sentence_gives_facts_that_give_the_sentence(sentence, source):
    found = parse(
        PerplexitySource, with_facts({"perplexity_source": sentence})["perplexity_source"]
    )
    assert (found, str(found)) == (source, sentence)


def test_a_sentence_on_a_reused_result_gives_its_trial():
    stored = {"reused_from": "trial 3 of study 'x'"}
    assert with_facts(stored)["reused_from"] == asdict(trial(3, "x"))


@pytest.mark.parametrize(
    "sentence",
    [
        "",
        "Measured",
        "measured, mean of some seeds",
        "measured, mean of 2 seeds, without any",
        "shared with trial 1 of study x",
        "shared with trial 1 of study 7",
        "evaluation loss of step 020",
        "training loss of the last 5 steps, as it is",
    ],
)
def test_another_sentence_stays_as_it_is(sentence):
    stored = {"perplexity": 1.0, "perplexity_source": sentence}
    assert with_facts(stored) == stored
