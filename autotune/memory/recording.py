"""Data classes for what a training step allocated and freed.

A prediction creates a recording from fake tensors, `history.py` from a real step on CUDA;
`attribution.py` evaluates it.
"""

from dataclasses import dataclass, field

from autotune.spec.prediction import Category


@dataclass(slots=True, kw_only=True)
class Scope:
    """A forward pass or a recomputation. Blocks born in it that outlive it are activations."""

    ended: int | None = None
    """Number of events when the scope ended; None while it runs."""


@dataclass(slots=True, kw_only=True)
class Block:
    """One storage.

    `born` and `died` are indices of events; a block from before the recording has `born` = -1.
    """

    size_bytes: int
    module: str
    operator: str
    born: int
    died: int | None = None
    resident: Category | None = None
    """The category where it is known from the start; otherwise it follows from the lifetime."""
    is_gradient: bool = False
    scope: Scope | None = None
    in_phase: str = ""
    node: int | None = None
    """The number of the autograd node that ran when the block was born."""
    stream: int = 0
    """Identity of the stream that it was allocated on: CUDA's allocator does not give memory of one
    stream to another. Only of interest where there are several, as with FSDP2."""
    earlier: "Block | None" = None
    """The same storage in the recording before."""

    @property
    def category(self) -> Category:
        if self.resident is not None:
            return self.resident
        if self.is_gradient:
            return "gradients"
        if self.scope is not None:
            outlives = self.died is None or self.scope.ended is None or self.died > self.scope.ended
            return "activations" if outlives else "temporaries"
        return "temporaries" if self.in_phase else "inputs"


@dataclass(slots=True, kw_only=True)
class Phase:
    """A named range of events: the forward pass, the backward pass or the optimizer step."""

    name: str
    first_event: int
    last_event: int = -1


@dataclass(slots=True, kw_only=True)
class Recording:
    """What was allocated and freed; `events` are (+1 or -1, block) in order."""

    events: list[tuple[int, Block]] = field(default_factory=list)
    resident: list[Block] = field(default_factory=list)
    """The blocks that were alive when the recording began."""
    phases: list[Phase] = field(default_factory=list)
    workspaces: list[Block] = field(default_factory=list)
    """What libraries allocate and never free; not in `events`, but `born` is an index of them."""
