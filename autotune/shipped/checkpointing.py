"""Recomputes the activations of modules in the backward pass."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from autotune.shipped.changed_method import Method, change_method
from autotune.shipped.recomputed_state import RecomputedForward


def recompute(module: nn.Module, *, context_fn: Callable[[], Any] | None = None) -> None:
    """Recomputes what happens between a call of the module and its output, but for its hooks."""
    change_method(module, "forward", _recomputing(context_fn))


@functools.cache
def _recomputing(context_fn: Callable[[], Any] | None) -> Callable[[Method], Method]:
    options: dict[str, Any] = {} if context_fn is None else {"context_fn": context_fn}
    # Compiled code needs contexts of torch.
    in_eager = {name: getattr(value, "in_eager", value) for name, value in options.items()}

    def change(forward: Method) -> Method:
        def recomputed(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return forward(self, *args, **kwargs)
            chosen = options if torch.compiler.is_compiling() else in_eager
            return run_recomputed((self,), functools.partial(forward, self), args, kwargs, chosen)

        return recomputed

    change.recomputes = True  # type: ignore[attr-defined]
    return change


def run_recomputed(
    modules: Sequence[nn.Module],
    run: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    options: dict[str, Any],
) -> Any:
    args = tuple(_without_cache(value) for value in args)
    keywords = {name: _without_cache(value) for name, value in kwargs.items()}
    # The arguments by name are bound: some may have the name of an option of `checkpoint`.
    if torch.compiler.is_compiling():
        return checkpoint(functools.partial(run, **keywords), *args, use_reentrant=False, **options)
    passed = RecomputedForward(modules, run, keywords)
    return checkpoint(passed, *args, use_reentrant=False, **options)


def _without_cache(value: Any) -> Any:
    """Returns None for a cache of keys and values, which would be filled a second time."""
    return None if type(value).__name__.endswith("Cache") else value
