"""Which ranks of a training run on a node, and where all of them meet. Does not import torch."""

from collections.abc import Sequence
from dataclasses import dataclass

from autotune.spec.limits import Count
from autotune.spec.schema import Schema


@dataclass(frozen=True, kw_only=True)
class NodeRanks(Schema):
    """The ranks of a training that run on one node.

    Where they are all of its ranks, they meet without any network.
    """

    size: Count
    """Of the training: the ranks on all nodes."""
    first: Count = 0
    """The rank of the first one here."""
    count: Count
    """How many are here."""
    node: str = ""
    """What the user knows the node by; empty where it has all ranks."""
    address: str | None = None
    """Of this node, as the other nodes see it."""
    store: tuple[str, Count] | None = None
    """Address and port of the store, on the first node, through which the ranks find each other."""

    @property
    def has_store(self) -> bool:
        """Whether this is the node that has the store."""
        return self.store is not None and self.first == 0

    def name_of(self, local_index: int) -> str:
        """Returns what a message calls the rank with this index on the node."""
        name = f"rank {self.first + local_index}"
        return f"{name} on {self.node}" if self.node else name


def divided(size: int, *, nodes: Sequence[str], store: tuple[str, int]) -> list[NodeRanks]:
    """Returns the ranks of each of the named nodes: equal parts, in order.

    Neighbours are on one node, as torchrun numbers them, so that groups of neighbours, such as
    those of tensor parallelism, communicate within it.
    """
    count = size // len(nodes)
    return [
        NodeRanks(size=size, first=number * count, count=count, node=node, store=store)
        for number, node in enumerate(nodes)
    ]
