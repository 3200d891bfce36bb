"""Where a result comes from: the trial that measured it, and how its perplexity was obtained.

The database stores these facts, and code asks for them. Their sentences, which people and `--json`
get, are written here and only here; `provenance_sentences.py` reads them back.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from autotune.spec.limits import Count, Number, Seed
from autotune.spec.schema import Schema


@dataclass(frozen=True, kw_only=True)
class TrialReference(Schema):
    """A trial of this study or, where `study` is given, of the study of that name."""

    number: Number
    study: str | None = None

    def __str__(self) -> str:
        if self.study is None:
            return f"trial {self.number}"
        return f"trial {self.number} of study {self.study!r}"


@dataclass(frozen=True, kw_only=True)
class FailedSeed(Schema):
    """A repetition with another seed that gave no perplexity."""

    seed: Seed
    reason: str

    def __str__(self) -> str:
        return f"seed {self.seed}: {self.reason}"


PerplexityKind = Literal[
    "measured", "shared", "evaluation", "unchecked_evaluation", "training_loss"
]
"""How a perplexity was obtained.

`measured`: autotune evaluated the trained weights on held-out text. `shared`: it was measured in
another trial, which computes the same numbers. `evaluation`: a user's script evaluated after the
update of its last step. `unchecked_evaluation`: a user's script gave an evaluation loss, and the
release that ran it did not check when the script evaluated. `training_loss`: the mean training loss
of the last steps of a user's script.
"""

UnusedEvaluation = Literal["unseen", "not_last"]
"""Why the evaluation of a script was not used: `unseen` after the update of the last step or, as an
earlier release checked it, `not_last`: it was not reported with the last step."""

_UNUSED_EVALUATION: Mapping[UnusedEvaluation, str] = {
    "unseen": "no evaluation was seen after the last step",
    "not_last": "its evaluation does not follow the last step",
}


OVER_RANDOM_WEIGHTS = "; it says nothing, as the weights under the adapter are random"
"""Ends the sentence of such a source."""
OF_OTHER_SEEDS = "; not compared, as the study's first trial has another number of seeds"
"""The same of a source `of_other_seeds`."""


OF_OWN_LOSS = "exp(loss) of a model that gives no logits, which may be no perplexity"
"""Stands in the sentence of such a source, and explains it below tables."""


@dataclass(frozen=True, kw_only=True)
class PerplexitySource(Schema):
    """How the perplexity of a trial was obtained; which fields it has depends on `kind`.

    Raises ValueError where the fact that its kind needs is missing.
    """

    kind: PerplexityKind
    seeds: Count = 1
    """Of how many trainings of the trial, each with another seed, the perplexity is the mean."""
    failed_seeds: tuple[FailedSeed, ...] = ()
    """The repetitions that the mean lacks."""
    trial: TrialReference | None = None
    """Of `shared`: the trial that measured it."""
    step: Count | None = None
    """Of `evaluation` and `unchecked_evaluation`: the step that the loss was reported with."""
    last_steps: Count | None = None
    """Of `training_loss`: of how many steps it is the mean."""
    unused_evaluation: UnusedEvaluation | None = None
    """Of `training_loss`: why the script's evaluation was not used; None: it has none."""
    over_random_weights: bool = False
    """Whether an adapter was trained over random, frozen weights: the perplexity says nothing."""
    of_other_seeds: bool = False
    """Whether the study's other perplexities have another number of seeds. It is stored nowhere, as
    it follows from them."""
    of_own_loss: bool = False
    """Whether it is exp(loss) of a model that gives no logits, and whose loss may have more in it
    than the cross entropy: comparable within the study only."""

    def __post_init__(self) -> None:
        needed = {
            "shared": self.trial,
            "evaluation": self.step,
            "unchecked_evaluation": self.step,
            "training_loss": self.last_steps,
        }
        if self.kind in needed and needed[self.kind] is None:
            raise ValueError(f"a perplexity source {self.kind!r} lacks what belongs to it")

    @classmethod
    def shared_with(
        cls, trial: TrialReference, *, over_random_weights: bool = False, of_own_loss: bool = False
    ) -> "PerplexitySource":
        return cls(
            kind="shared",
            trial=trial,
            over_random_weights=over_random_weights,
            of_own_loss=of_own_loss,
        )

    @property
    def is_shared(self) -> bool:
        """Whether another trial measured it."""
        return self.kind == "shared"

    @property
    def is_plain(self) -> bool:
        """Whether the trial measured it itself, with one seed: nothing needs to be said of it."""
        return self == MEASURED

    def is_after_all_steps(self, steps: int) -> bool:
        """Returns whether the trial obtained it itself, after all of its `steps`."""
        match self.kind:
            case "measured" | "training_loss":
                return True
            case "evaluation":
                return self.step == steps
            case "shared" | "unchecked_evaluation":
                return False

    def __str__(self) -> str:
        match self.kind:
            case "measured":
                text = "measured"
            case "shared":
                text = f"shared with {self.trial}"
            case "evaluation":
                text = f"evaluation loss after step {self.step}"
            case "unchecked_evaluation":
                text = f"evaluation loss of step {self.step}"
            case "training_loss":
                text = f"training loss of the last {self.last_steps} steps"
                if self.unused_evaluation is not None:
                    text += f", as {_UNUSED_EVALUATION[self.unused_evaluation]}"
        if self.seeds_text:
            text += f", {self.seeds_text}"
        if self.of_other_seeds:
            text += OF_OTHER_SEEDS
        if self.of_own_loss:
            text += f": {OF_OWN_LOSS}"
        return text + OVER_RANDOM_WEIGHTS if self.over_random_weights else text

    @property
    def seeds_text(self) -> str:
        """`mean of 3 seeds`, with the seeds that failed; empty for a single seed."""
        if self.seeds == 1 and not self.failed_seeds:
            return ""
        text = f"mean of {self.seeds} seeds"
        if self.failed_seeds:
            text += f", without {'; '.join(map(str, self.failed_seeds))}"
        return text


MEASURED = PerplexitySource(kind="measured")
"""The trial measured it itself, with one seed."""
