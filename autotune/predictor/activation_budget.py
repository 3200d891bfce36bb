"""Chooses what each block of a user's training keeps, so that its predicted peak meets a budget.

The plan of `analysis/activation_budget.py` adds up sizes. Each plan is predicted as it would be
trained, and where the sum was off, planned again for a budget that is as much off.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from torch import nn

from autotune.analysis.activation_budget import BlockTrace, Moment, plan_activations
from autotune.errors import IllegalConfiguration, InvalidInput
from autotune.predictor.block_traces import NOTHING_RUN, BlockMarks, BlockTraces, Rates
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
from autotune.spec.kept_activations import KeptActivations, KeptOfBlock
from autotune.spec.memory_fit import MemoryFitRequest
from autotune.spec.prediction import Prediction
from autotune.units import format_size

CPU_RATES = Rates(
    flops_per_second=100e9,
    bytes_per_second=13e9,
    operator_seconds=1e-5,
    choosing_seconds=2e-5,
)
"""Of one core, measured in the blocks of a Llama and a GPT of width 256 with 1,024 tokens in fp32.
"""
GPU_RATES = Rates(
    flops_per_second=250e12,
    bytes_per_second=1.6e12,
    operator_seconds=5e-6,
    choosing_seconds=2e-5,
)
"""Those of an A100 in 16 bits, 0.8 of its data sheet."""
_CLOSE = 0.995
"""A peak of this share of the budget is close enough."""
_PLANS = 6
"""Most plans that are predicted."""


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
    planner = ActivationPlanner(training=training, gpu=gpu, say=say)
    found = planner.find(request.max_mem)
    for block, kept in zip(planner.blocks, found.kept, strict=True):
        recompute_but(block, kept)
    return KeptActivations(
        budget_bytes=request.max_mem,
        prediction=found.prediction,
        least_bytes=None if found.least is None else found.least.peak_memory_bytes,
        blocks=tuple(_in_words(kept) for kept in found.kept),
    )


def _in_words(kept: Kept | None) -> KeptOfBlock:
    if isinstance(kept, frozenset):
        operators = (f"{name.removeprefix('aten.')} {number}" for name, number in sorted(kept))
        return KeptOfBlock(operators=tuple(operators))
    return KeptOfBlock(recomputed_parts=kept or ())


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


class _TracedTraining(FakeUserTraining):
    """Nothing is recomputed."""

    def change_blocks(self, blocks: Sequence[nn.Module]) -> None:
        self.traces = BlockTraces(blocks, GPU_RATES if self.is_cuda else CPU_RATES)


class _MarkedTraining(FakeUserTraining):
    """Everything is recomputed."""

    def change_blocks(self, blocks: Sequence[nn.Module]) -> None:
        self.marks = BlockMarks(self.watch, blocks)


@dataclass(kw_only=True)
class ActivationPlanner:
    """Finds plans for a training, and changes nothing."""

    training: UserTraining
    gpu: Gpu | None
    """None for this machine's CPU."""
    say: Callable[[str], None] = lambda _: None
    blocks: list[nn.Module] = field(init=False)

    def __post_init__(self) -> None:
        self.blocks = blocks_to_recompute(self.training.models.values())
        if not self.blocks:
            raise InvalidInput(
                "the model has no list of alike blocks of which activations could be recomputed",
                hint="put its layers into a torch.nn.ModuleList",
            )
        if any(getattr(block, "gradient_checkpointing", False) for block in self.blocks):
            raise InvalidInput(
                "the model recomputes its blocks already, by gradient_checkpointing_enable",
                hint="call its gradient_checkpointing_disable() first",
            )
        if any(is_compiled(part) for block in self.blocks for part in block.modules()):
            raise InvalidInput(
                "blocks that are compiled run as one operator each, of which nothing can be chosen",
                hint="call autotune.checkpoint first and torch.compile after it, or set "
                "torch._functorch.config.activation_memory_budget instead",
            )

    def find(self, budget_bytes: int) -> BudgetedActivations:
        """Returns the fastest plan that is found for a budget.

        Raises IllegalConfiguration where not even recomputing every block is enough, and
        PredictionImpossible.
        """
        whole = self.whole
        if whole.peak_memory_bytes <= budget_bytes:
            return BudgetedActivations(
                kept=(None,) * len(self.blocks), prediction=whole, seconds=0.0, least=None
            )
        least = self.least
        if least.peak_memory_bytes > budget_bytes:
            raise IllegalConfiguration(
                f"a budget of {format_size(budget_bytes)} is less than the "
                f"{format_size(least.peak_memory_bytes)} that the training needs with every block "
                "recomputed",
                hint="give at least that much, or fewer rows",
            )
        best = BudgetedActivations(
            kept=(frozenset(),) * len(self.blocks),
            prediction=least,
            seconds=sum(trace.seconds * trace.passes for trace in self._traces),
            least=least,
        )
        wanted_bytes, seen = budget_bytes, {best.kept}
        too_little, too_much = 0, 0
        for number in range(1, _PLANS + 1):
            plan = plan_activations(self._traces, self._moments, budget_bytes=wanted_bytes)
            if plan is None or plan.kept in seen:
                break
            seen.add(plan.kept)
            self.say(f"predicting plan {number} for {format_size(budget_bytes)}")
            prediction = self._predicted(plan.kept)
            peak_bytes = prediction.peak_memory_bytes
            if peak_bytes > budget_bytes:
                too_much = wanted_bytes
            else:
                too_little = wanted_bytes
                if plan.seconds < best.seconds:
                    best = replace(
                        best, kept=plan.kept, prediction=prediction, seconds=plan.seconds
                    )
                if peak_bytes >= _CLOSE * budget_bytes:
                    break
            if too_little and too_much:
                wanted_bytes = (too_little + too_much) // 2
            else:
                wanted_bytes += budget_bytes - peak_bytes
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
        return FakeUserTraining(self.training, Change(kept=kept), gpu=self.gpu).predict()

    @cached_property
    def _whole(self) -> tuple[Prediction, Sequence[BlockTrace | None]]:
        self.say("predicting a training step")
        training = _TracedTraining(self.training, Change(), gpu=self.gpu)
        return training.predict(), training.traces.traces

    @cached_property
    def _least(self) -> tuple[Prediction, BlockMarks]:
        """The prediction with every block recomputed, and the marks of its steady step."""
        self.say("predicting it with every block recomputed")
        training = _MarkedTraining(self.training, Change(), gpu=self.gpu)
        prediction = training.predict()
        training.marks.read(training.recording)
        return prediction, training.marks

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
