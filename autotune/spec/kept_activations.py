"""What the blocks of a model keep for the backward pass within a budget: what `checkpoint` returns.

An operator is named as torch does, with the number of its call in the block: `aten.mm 3` is the
fourth matrix product. All kernels of attention are `attention`.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any

from autotune.printable import printable
from autotune.spec.limits import SizeBytes
from autotune.spec.prediction import KeptOfBlock, Prediction, kept_in_words
from autotune.spec.result import JSON_SCHEMA
from autotune.spec.schema import Schema
from autotune.spec.setting import Settings, Size, setting
from autotune.units import format_size


@dataclass(frozen=True, kw_only=True)
class BudgetRequest(Settings):
    """The budget of `checkpoint`."""

    budget: Size = setting(help="Peak memory of a training step: 8GB, 1.5GiB.")


@dataclass(frozen=True, kw_only=True, repr=False)
class KeptActivations(Schema):
    """What each block keeps, and the peak that is predicted of the training with it."""

    budget_bytes: SizeBytes
    prediction: Prediction
    """Of a steady step with this plan."""
    least_bytes: SizeBytes | None = None
    """The predicted peak with every block recomputed; None where everything is kept."""
    blocks: tuple[KeptOfBlock, ...] = ()
    """In the order in which they run."""

    @property
    def peak_memory_bytes(self) -> int:
        """The predicted peak of a steady step."""
        return self.prediction.peak_memory_bytes

    def __str__(self) -> str:
        """Returns the peak, and what how many blocks keep."""
        peak, budget = format_size(self.peak_memory_bytes), format_size(self.budget_bytes)
        lines = [f"predicted peak {peak}, budget {budget}"]
        if self.least_bytes is not None:
            lines[0] += f", {format_size(self.least_bytes)} with every block recomputed"
        lines += [f"  {line}" for line in kept_in_words(self.blocks)]
        return printable("\n".join(lines), keep_lines=True)

    def __repr__(self) -> str:
        """Returns the text, which Python and notebooks show, instead of the fields."""
        return str(self)

    def to_dict(self) -> dict[str, Any]:
        """Returns a dictionary ready for JSON."""
        return {"schema": JSON_SCHEMA, **dataclasses.asdict(self)}
