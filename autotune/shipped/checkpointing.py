"""Modules whose activations are recomputed in the backward pass."""

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint


class Checkpointed(nn.Module):
    """`module` with its activations recomputed in the backward pass."""

    def __init__(self, module: nn.Module, *, context_fn: Callable[[], Any] | None = None) -> None:
        super().__init__()
        self.module = module
        self._options: dict[str, Any] = {} if context_fn is None else {"context_fn": context_fn}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(self.module, *args, use_reentrant=False, **self._options, **kwargs)

    def __getattr__(self, name: str) -> Any:
        """Looks up attributes in `module`, since models read them from their blocks."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)
