"""How long the collectives of a step take at least, from what devices send each other.

Each device of a ring of n sends (n - 1) / n of what is gathered or scattered, and twice as much of
what is added up for all (Patarasuk and Yuan 2009, doi:10.1016/j.jpdc.2008.09.002):

    ddp, zero1      adds up all gradients; zero1 then sends each updated weight to all
    zero2, zero3    gathers all weights, zero3 again in the backward pass, and scatters the sums of
                    the gradients (ZeRO, arXiv:1910.02054, section 7)
    hsdp            as zero3 within its groups, whose parts are then added up among them
    tensor parallel adds up four activations a block: two in the forward pass and two in the
                    backward pass (Megatron-LM, arXiv:1909.08053, section 3)

The links are those of the vendor's own systems, at their stated rates: a step cannot take less, and
takes longer where the network is slower. A ring over several nodes crosses between two of them
once for each device that it has on a node, each by a link of its own. None of this was compared
with a measurement on several GPUs.
"""

from dataclasses import dataclass

from autotune.spec.config import TrainingConfig
from autotune.spec.data_sheets import sheet_of

_FULL, _HALF = 4, 2
"""Bytes of a number in fp32, and in 16 bits."""
_PCIE_4_GIGABYTES = 32.0
_ETHERNET_GIGABYTES = 12.5
"""Of a GPU whose data sheet is not known: PCIe 4.0 x16 in one direction, and 100 Gb/s."""
_ALL_REDUCES_OF_A_BLOCK = 4


@dataclass(frozen=True, kw_only=True)
class Links:
    """Bytes per second that a device sends in one direction."""

    inside_node: float
    between_nodes: float
    """By the network link that each device has for itself."""

    @classmethod
    def of(cls, device_name: str) -> "Links":
        """Returns the links of a GPU, by the name that its driver reports."""
        sheet = sheet_of(device_name)
        if sheet is None:
            inside, between = _PCIE_4_GIGABYTES, _ETHERNET_GIGABYTES
        else:
            inside, between = sheet.link_gigabytes, sheet.network_gigabytes
        return cls(inside_node=inside * 1e9, between_nodes=between * 1e9)


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """What the devices of a training exchange in a step."""

    devices: int
    nodes: int
    trained: int
    """Trained parameters."""
    blocks: int
    width: int | None
    """Of the activations between blocks; None where it is not known."""
    tokens_of_a_step: int

    def seconds(self, config: TrainingConfig, links: Links) -> float:
        """Returns how long the collectives of a step take at least; 0 for one device."""
        if self.devices == 1:
            return 0.0
        return self._by_data(config, links) + self._by_tensors(config, links)

    def _by_data(self, config: TrainingConfig, links: Links) -> float:
        """Of gradients and weights, which each device has of its own part of the matrices."""
        split = config.tensor_parallel
        parts = self.devices // split
        own = self.trained / split
        reduced = own * (_HALF if config.gradient_reduction == "bf16" else _FULL)
        is_full = config.precision in ("fp32", "tf32")
        gathered = own * (_FULL if is_full else _HALF)

        def ring(size: float, count: int, stride: int) -> float:
            return self._ring(size, links, count=count, stride=stride)

        match config.sharding:
            case "none":
                return 0.0
            case "ddp":
                return 2 * ring(reduced, parts, split)
            case "zero1":
                return 2 * ring(reduced, parts, split) + ring(_FULL * own, parts, split)
            case "hsdp":
                group = config.sharding_group
                inside = 2 * ring(gathered, group, split) + ring(reduced, group, split)
                among = 2 * ring(reduced / group, parts // group, split * group)
                return inside + among
        gathers = 1 if config.sharding == "zero2" else 2
        return gathers * ring(gathered, parts, split) + ring(reduced, parts, split)

    def _by_tensors(self, config: TrainingConfig, links: Links) -> float:
        """Of activations, of which a device adds up those of its own rows."""
        split = config.tensor_parallel
        if split == 1 or self.width is None:
            return 0.0
        rows = self.tokens_of_a_step / (self.devices // split)
        is_full = config.precision in ("fp32", "tf32")
        size = rows * self.width * (_FULL if is_full else _HALF)
        all_reduces = _ALL_REDUCES_OF_A_BLOCK * self.blocks
        return all_reduces * 2 * self._ring(size, links, count=split, stride=1)

    def _ring(self, size: float, links: Links, *, count: int, stride: int) -> float:
        """Seconds of one round of `size` bytes among `count` devices, each `stride` after the last.

        Neighbours are on one node, as `spec/node_ranks.py` numbers them.
        """
        if count <= 1:
            return 0.0
        on_each_node = self.devices // self.nodes
        rate = links.inside_node
        if count * stride > on_each_node:
            members = max(1, on_each_node // stride)
            rate = min(rate, members * links.between_nodes)
        return (count - 1) / count * size / rate
