"""Applies a configuration below learning-rate schedulers that exist already.

A trainer may be given an optimizer together with its scheduler. The optimizer that replaces it must
have what the scheduler keeps in the parameter groups, and the scheduler must change its rates.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from autotune.training.script.interface import apply

_INITIAL_RATE = "initial_lr"
"""What a scheduler adds to each parameter group: the rate that its factors refer to."""


def apply_below_schedulers(
    model: nn.Module, optimizer: Optimizer, schedulers: Sequence[Any]
) -> Optimizer:
    """Applies the run's configuration; returns the optimizer, which `schedulers` then control.

    Changes the model in place. Raises IllegalConfiguration as `autotune.apply`.
    """
    initial_rates = [group.pop(_INITIAL_RATE, None) for group in optimizer.param_groups]
    replacement = optimizer
    try:
        _, replacement = apply(model, optimizer)
    finally:
        for replaced in (optimizer, replacement):
            for group, rate in zip(replaced.param_groups, initial_rates, strict=True):
                if rate is not None:
                    group[_INITIAL_RATE] = rate
    if replacement is not optimizer:
        for scheduler in _with_inner_ones(schedulers):
            if getattr(scheduler, "optimizer", None) is optimizer:
                scheduler.optimizer = replacement
                _count_steps(replacement)
    return replacement


def _with_inner_ones(schedulers: Sequence[Any]) -> Iterator[Any]:
    """Yields the schedulers, and those that torch's SequentialLR and ChainedScheduler run."""
    for scheduler in schedulers:
        yield scheduler
        yield from _with_inner_ones(getattr(scheduler, "_schedulers", ()))


def _count_steps(optimizer: Optimizer) -> None:
    """Tells torch's schedulers that the optimizer steps before them, as their constructor does.

    Without it the first step of a scheduler warns of an optimizer that has not stepped.
    """
    if hasattr(optimizer.step, "_wrapped_by_lr_sched"):
        return
    step = optimizer.step

    def counted(*args: Any, **kwargs: Any) -> Any:
        optimizer._opt_called = True  # type: ignore[attr-defined]
        return step(*args, **kwargs)

    counted._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    optimizer.step = counted  # type: ignore[method-assign]
