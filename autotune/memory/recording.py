"""What a training step allocated and freed: blocks with birth, death and where they come from.

Pure bookkeeping. A prediction fills it in from fake tensors, `history.py` from a real step on CUDA;
`attribution.py` reads it.
"""

from dataclasses import dataclass, field

from autotune.spec.prediction import Category


@dataclass(slots=True, kw_only=True)
class Scope:
    """A forward pass or a recomputation: what is born in it and outlives it is an activation."""

    ended: int | None = None
    """Number of events when it ended."""


@dataclass(slots=True, kw_only=True)
class Block:
    """One storage.

    `born` and `died` count events; a block that was alive before the recording has born = -1.
    """

    size_bytes: int
    module: str
    operator: str
    born: int
    died: int | None = None
    resident: Category | None = None
    """What it is where that is known from the start; else its life decides."""
    is_gradient: bool = False
    scope: Scope | None = None
    in_phase: str = ""

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
    name: str
    first_event: int
    last_event: int = -1


@dataclass(slots=True, kw_only=True)
class Recording:
    """`events`: (+1 or -1, block), in order."""

    events: list[tuple[int, Block]] = field(default_factory=list)
    resident: list[Block] = field(default_factory=list)
    """Blocks alive when the recording began."""
    phases: list[Phase] = field(default_factory=list)
