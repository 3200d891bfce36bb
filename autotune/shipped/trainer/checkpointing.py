"""Recomputes blocks without changing the names of their parameters."""

import functools
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint


@functools.cache
def checkpointed_class(
    kind: type[nn.Module], context_fn: Callable[[], Any] | None = None
) -> type[nn.Module]:
    """Returns a subclass of `kind` whose forward is recomputed in the backward pass."""
    options: dict[str, Any] = {} if context_fn is None else {"context_fn": context_fn}

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(
            functools.partial(kind.forward, self), *args, use_reentrant=False, **options, **kwargs
        )

    return type(kind.__name__, (kind,), {"forward": functools.wraps(kind.forward)(forward)})
