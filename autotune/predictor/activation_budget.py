"""Chooses what each block of a user's training keeps, so that its predicted peak meets a budget.

The plan of `analysis/activation_budget.py` adds up sizes. Each plan is predicted as it would be
trained, and where the sum was off, planned again for a budget that is as much off.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from torch import nn

from autotune.analysis.activation_budget import BlockTrace, Moment, plan_activations
from autotune.errors import BudgetTooSmall, InvalidInput
from autotune.memory.recording import Recording
from autotune.predictor.block_traces import NOTHING_RUN, BlockMarks, BlockTraces, Rates
from autotune.predictor.fake_step import ChangeOfRun, FakeRun
from autotune.predictor.generated_code import is_compiled
from autotune.predictor.gpu import Gpu
from autotune.predictor.memory_fit import gpu_and_memory
from autotune.predictor.user_training import (
    Change,
    FakeUserTraining,
    UserTraining,
    blocks_to_recompute,
)
from autotune.shipped.granularity import Kept, recompute_but
from autotune.spec.kept_activations import KeptActivations
from autotune.spec.memory_fit import MemoryFitRequest
from autotune.spec.prediction import Prediction
from autotune.techniques.checkpointing import in_words
from autotune.units import format_enough, format_size

CPU_RATES = Rates(
    flops_per_second=100e9,
    bytes_per_second=6e9,
    operator_seconds=1e-5,
    choosing_seconds=1e-5,
    noting_seconds=2e-5,
)
"""Of one core, measured in the blocks of a Llama and a GPT of width 256 with 1,024 tokens in fp32,
and by `studies/activation_budget/choosing.py`: new results are written to pages not used before.
"""
GPU_RATES = Rates(
    flops_per_second=250e12,
    bytes_per_second=1.6e12,
    operator_seconds=5e-6,
    choosing_seconds=1e-5,
    noting_seconds=2e-5,
)
"""Those of an A100 in 16 bits, 0.8 of its data sheet."""
_CLOSE = 0.995
"""A peak of this share of the budget is close enough."""
_PLANS = 6
"""Most plans that are predicted."""
_TRIES = 16
"""Most plans that are made: one that is known already, for another budget, costs little."""
_CORRECTED = 2
"""Most plans over the budget, one after the other, after each of which the next is for as much less
as that was over."""
_UNITS_OF_BUDGET = 1000
"""Budgets that differ by less than one of so many parts have no other plans."""


def device_of(training: UserTraining) -> str:
    """Returns the kind of device that a training is on; a model without one trains on a GPU."""
    kinds = {one.device.type for model in training.models.values() for one in model.parameters()}
    return "cpu" if kinds == {"cpu"} else "cuda"


def checkpointing_within(
    training: UserTraining, request: MemoryFitRequest, *, say: Callable[[str], None]
) -> KeptActivations:
    """Makes the blocks of a training keep what the budget of a request allows; returns what.

    Raises InvalidInput, PredictionImpossible and IllegalConfiguration, and changes nothing then.
    """
    assert request.max_mem is not None
    gpu, _ = gpu_and_memory(request.device)
    blocks = blocks_to_plan(training)
    found = planner_of(training, gpu=gpu, say=say).find(request.max_mem)
    for block, kept in zip(blocks, found.kept, strict=True):
        recompute_but(block, kept)
    return KeptActivations(
        budget_bytes=request.max_mem,
        prediction=found.prediction,
        least_bytes=None if found.least is None else found.least.peak_memory_bytes,
        blocks=tuple(map(in_words, found.kept)),
    )


def too_small(budget_bytes: int, *, least_bytes: int) -> BudgetTooSmall:
    """Returns the error of a budget that is less than the least that is enough."""
    return BudgetTooSmall(
        f"a budget of {format_size(budget_bytes)} is less than the {format_enough(least_bytes)} "
        "that the training needs with every block recomputed",
        hint="give at least that much, or fewer rows",
    )


def blocks_to_plan(training: UserTraining) -> list[nn.Module]:
    """Returns the blocks of a user's training. Raises InvalidInput where nothing can be planned."""
    blocks = blocks_to_recompute(training.models.values())
    if not blocks:
        raise InvalidInput(
            "the model has no list of alike blocks of which activations could be recomputed",
            hint="put its layers into a torch.nn.ModuleList",
        )
    if any(getattr(block, "gradient_checkpointing", False) for block in blocks):
        raise InvalidInput(
            "the model recomputes its blocks already, by gradient_checkpointing_enable",
            hint="call its gradient_checkpointing_disable() first",
        )
    if any(is_compiled(part) for block in blocks for part in block.modules()):
        raise InvalidInput(
            "blocks that are compiled run as one operator each, of which nothing can be chosen",
            hint="call autotune.checkpoint first and torch.compile after it, or set "
            "torch._functorch.config.activation_memory_budget instead",
        )
    return blocks


def planner_of(
    training: UserTraining, *, gpu: Gpu | None, say: Callable[[str], None] = lambda _: None
) -> "ActivationPlanner":
    """Returns the planner of a user's training; without a `gpu` it is for this machine's CPU."""

    def run(change: ChangeOfRun) -> tuple[Prediction, Recording]:
        fake = FakeUserTraining(training, Change(), gpu=gpu, change_blocks=change)
        return fake.predict(), fake.recording

    return ActivationPlanner(run=run, say=say)


@dataclass(frozen=True, kw_only=True)
class BudgetedActivations:
    """What each block keeps, with the prediction of the training that does."""

    kept: tuple[Kept | None, ...]
    """For each block, in the order in which they run; None: all, without checkpointing."""
    prediction: Prediction
    seconds: float
    """What is recomputed takes so long, by the rates that the plan assumes."""
    least: Prediction | None
    """Of the training with every block recomputed; None where nothing has to be."""


@dataclass(kw_only=True)
class ActivationPlanner:
    """Finds plans for a training, and changes nothing."""

    run: Callable[[ChangeOfRun], tuple[Prediction, Recording]]
    """Predicts the training with its blocks changed; returns that and the recorded step, too."""
    say: Callable[[str], None] = lambda _: None

    def find(self, budget_bytes: int) -> BudgetedActivations:
        """Returns the fastest plan that is found for a budget.

        Raises BudgetTooSmall where not even recomputing every block is enough, and
        PredictionImpossible.
        """
        whole = self.whole
        if whole.peak_memory_bytes <= budget_bytes:
            return BudgetedActivations(
                kept=(None,) * len(self._whole[1]), prediction=whole, seconds=0.0, least=None
            )
        least = self.least
        if least.peak_memory_bytes > budget_bytes:
            raise too_small(budget_bytes, least_bytes=least.peak_memory_bytes)
        best = BudgetedActivations(
            kept=(frozenset(),) * len(self._traces),
            prediction=least,
            seconds=sum(trace.seconds * trace.passes for trace in self._traces),
            least=least,
        )
        wanted_bytes, seen = budget_bytes, {best.kept: least}
        # A plan for no more than the least recomputes every block, which is enough.
        too_little, too_much, stride, over_in_a_row = least.peak_memory_bytes, 0, 1, 0
        for _ in range(_TRIES):
            plan = plan_activations(self._traces, self._moments, budget_bytes=wanted_bytes)
            assert plan is not None, "a plan for the least recomputes every block"
            is_known = plan.kept in seen
            if not is_known:
                if len(seen) > _PLANS:
                    break
                self.say(f"predicting plan {len(seen)} for {format_size(budget_bytes)}")
                seen[plan.kept] = self._predicted(plan.kept)
            prediction = seen[plan.kept]
            peak_bytes = prediction.peak_memory_bytes
            if peak_bytes > budget_bytes:
                too_much = wanted_bytes
                over_in_a_row += 0 if is_known else 1
            else:
                too_little, over_in_a_row = wanted_bytes, 0
                if plan.seconds < best.seconds:
                    best = replace(
                        best, kept=plan.kept, prediction=prediction, seconds=plan.seconds
                    )
                if peak_bytes >= _CLOSE * budget_bytes:
                    break
            if too_much and too_much - too_little < budget_bytes // _UNITS_OF_BUDGET:
                break
            stride = 2 * stride if is_known or over_in_a_row > _CORRECTED else 1
            wanted_bytes += stride * (budget_bytes - peak_bytes)
            has_both = too_much and too_little > least.peak_memory_bytes
            if has_both or (too_much and not too_little < wanted_bytes < too_much):
                wanted_bytes = (too_little + too_much) // 2
        return best

    @property
    def whole(self) -> Prediction:
        """The prediction of the training as it is."""
        return self._whole[0]

    @property
    def least(self) -> Prediction:
        """That of the training with every block recomputed."""
        return self._least[0]

    def _predicted(self, kept: tuple[Kept | None, ...]) -> Prediction:
        def keep(_run: FakeRun, blocks: Sequence[nn.Module]) -> None:
            for block, of_block in zip(blocks, kept, strict=True):
                recompute_but(block, of_block)

        return self.run(keep)[0]

    @cached_property
    def _whole(self) -> tuple[Prediction, Sequence[BlockTrace | None]]:
        """The prediction with nothing recomputed, and what each block runs."""
        made: list[BlockTraces] = []

        def trace(run: FakeRun, blocks: Sequence[nn.Module]) -> None:
            made.append(BlockTraces(blocks, GPU_RATES if run.is_cuda else CPU_RATES))

        self.say("predicting a training step")
        prediction, _ = self.run(trace)
        return prediction, made[-1].traces

    @cached_property
    def _least(self) -> tuple[Prediction, BlockMarks]:
        """The prediction with every block recomputed, and the marks of its steady step."""
        made: list[BlockMarks] = []

        def mark(run: FakeRun, blocks: Sequence[nn.Module]) -> None:
            made.append(BlockMarks(run.watch, blocks))

        self.say("predicting it with every block recomputed")
        prediction, recording = self.run(mark)
        made[-1].read(recording)
        return prediction, made[-1]

    @property
    def _traces(self) -> list[BlockTrace]:
        _, traces = self._whole
        _, marks = self._least
        return [
            replace(trace or NOTHING_RUN, passes=passes)
            for trace, passes in zip(traces, marks.passes, strict=True)
        ]

    @property
    def _moments(self) -> list[Moment]:
        """Returns the moments, with what libraries hold besides."""
        prediction, marks = self._least
        besides = prediction.peak_memory_bytes - max(one.size_bytes for one in marks.moments)
        return [replace(one, size_bytes=one.size_bytes + besides) for one in marks.moments]
