"""Whether a training fits under a memory cap: the answer, with what would make it fit."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from autotune.printable import printable
from autotune.spec.cap import CLOSE, FITS, Verdict, needed_bytes, verdict_of
from autotune.spec.data_sheets import requested_device
from autotune.spec.limits import Count, SizeBytes
from autotune.spec.prediction import Category, Holder, Prediction, context_bytes_on
from autotune.spec.result import JSON_SCHEMA
from autotune.spec.schema import Schema
from autotune.spec.setting import Settings, Size, setting
from autotune.units import format_percent, format_size

_HOLDERS_SHOWN = 5
_SMALLEST_SHARE = 0.005
"""Of the peak; smaller categories are not shown."""


@dataclass(frozen=True, kw_only=True)
class MemoryFitRequest(Settings):
    """The cap, and the device that is predicted for. Raises InvalidInput for another device."""

    max_mem: Size | None = setting(
        None, "Memory cap: 24GiB. [default: all memory of the device, where it is known]"
    )
    device: str = setting("cuda", "cpu, cuda, or a GPU by its data sheet: h100, l4, rtx-4090.")

    def __post_init__(self) -> None:
        super().__post_init__()
        requested_device(self.device, None)


@dataclass(frozen=True, kw_only=True)
class WayToFit(Schema):
    """A change of a training, with what is predicted of the training after it."""

    change: str
    """In words, such as `recompute 3 of 12 blocks`."""
    peak_memory_bytes: SizeBytes
    needed_bytes: SizeBytes
    """What the device must have at the upper bound, with its context."""
    fits: bool
    """Whether it surely fits."""
    rows: Count | None = None
    """The first dimension of the batch's tensors, where that is changed."""
    recomputed_blocks: Count = 0
    optimizer: str | None = None

    def __str__(self) -> str:
        """Returns the change with its sizes."""
        peak, needed = format_size(self.peak_memory_bytes), format_size(self.needed_bytes)
        text = f"{self.change}: {peak} at the peak, at most {needed}"
        return printable(text if self.fits else f"{text}, which is not enough")


@dataclass(frozen=True, kw_only=True, repr=False)
class MemoryFit(Schema):
    """Whether a training fits under a cap, by prediction; it is true where it surely fits.

    Where the cap is within the bounds of the prediction it is false, and `verdict` is "too close to
    say".
    """

    cap_bytes: SizeBytes
    prediction: Prediction
    ways: tuple[WayToFit, ...] = ()
    """What would make it fit, by further predictions; empty where it fits. Those that are not
    enough alone come last."""
    rows: Count | None = None
    """The first dimension of the batch's tensors; None where they do not share one."""
    blocks: Count = 0
    """How many blocks the models have."""
    recomputed_blocks: Count = 0
    """How many of them recompute their activations: `fit_to` makes them."""
    notes: tuple[str, ...] = ()
    """What was assumed, and what was not tried."""

    def __bool__(self) -> bool:
        """Returns whether the training surely fits."""
        return self.verdict == FITS

    @cached_property
    def verdict(self) -> Verdict:
        """`fits`, `too close to say` or `over the cap`."""
        verdict = verdict_of(self.prediction, cap_bytes=self.cap_bytes)
        assert verdict is not None
        return verdict

    @property
    def peak_memory_bytes(self) -> int:
        """The predicted peak of a steady step."""
        return self.prediction.peak_memory_bytes

    @property
    def needed_bytes(self) -> int:
        """What the device must have at the upper bound, with its context."""
        return needed_bytes(self.prediction)

    @property
    def phase(self) -> str:
        """Where in the step the peak is: forward, backward or step."""
        return self.prediction.phase

    @property
    def bytes_by_category(self) -> Mapping[Category, int]:
        """Bytes at the peak; their sum is the peak."""
        return self.prediction.bytes_by_category

    @property
    def holders(self) -> tuple[Holder, ...]:
        """The largest ones at the peak, in descending order of size."""
        return self.prediction.holders

    @property
    def sentence(self) -> str:
        """Returns the verdict with the peak and its bounds."""
        prediction = self.prediction
        cap, peak = format_size(self.cap_bytes), format_size(prediction.peak_memory_bytes)
        context = context_bytes_on(prediction.device)
        besides = f" with {format_size(context)} for the CUDA context" if context else ""
        most = f"at most {format_size(self.needed_bytes)}{besides}"
        least = format_size(prediction.lower_bound_bytes)
        if self.verdict == FITS:
            return f"It fits in {cap}: {peak} at the peak, {most}."
        if self.verdict == CLOSE:
            return (
                f"Too close to say whether it fits in {cap}: {peak} at the peak, at least {least} "
                f"and {most}."
            )
        return f"It does not fit in {cap}: {peak} at the peak, at least {least}."

    def __str__(self) -> str:
        """Returns the verdict, what holds the memory, and what would make it fit, as text."""
        prediction = self.prediction
        where = " at ".join(filter(None, (prediction.module, prediction.operator)))
        lines = [self.sentence]
        if self.recomputed_blocks:
            lines.append(f"  recomputed blocks: {self.recomputed_blocks} of {self.blocks}")
        lines.append(f"  peak in {prediction.phase}{where and f', in {where}'}")
        sizes = sorted(prediction.bytes_by_category.items(), key=lambda item: -item[1])
        parts = [
            f"{category.replace('_', ' ')} {format_size(size)} "
            f"({format_percent(size / max(1, self.peak_memory_bytes))} %)"
            for category, size in sizes
            if size >= _SMALLEST_SHARE * self.peak_memory_bytes
        ]
        lines += [f"  {', '.join(parts)}", "  largest:"]
        for holder in prediction.holders[:_HOLDERS_SHOWN]:
            made = " at ".join(filter(None, (holder.module, holder.operator)))
            what = f"{holder.category.replace('_', ' ')}, {made}"
            times = f", {holder.count} blocks" if holder.count > 1 else ""
            lines.append(f"    {format_size(holder.size_bytes):>10}  {what}{times}")
        if self.ways:
            enough = any(way.fits for way in self.ways)
            lines.append("  what would make it fit:" if enough else "  no one change is enough:")
            lines += [f"    {way}" for way in self.ways]
        lines += [f"  note: {note}" for note in (*prediction.notes, *self.notes)]
        return printable("\n".join(lines), keep_lines=True)

    def __repr__(self) -> str:
        """Returns the text, which Python and notebooks show, instead of the fields."""
        return str(self)

    def to_dict(self) -> dict[str, Any]:
        """Returns a dictionary ready for JSON."""
        return {
            "schema": JSON_SCHEMA,
            "fits": bool(self),
            "verdict": self.verdict,
            "cap_bytes": self.cap_bytes,
            "needed_bytes": self.needed_bytes,
            "prediction": self.prediction.to_dict(),
            "ways": [dataclasses.asdict(way) for way in self.ways],
            "rows": self.rows,
            "blocks": self.blocks,
            "recomputed_blocks": self.recomputed_blocks,
            "notes": list(self.notes),
        }
