"""Peak, FLOPs and bytes of every configuration, from a sample that was predicted.

`predictions.csv` holds 329 predictions of autotune 0.2.1 for compute capability 9.0 and torch 2.11.
What is not among them is put together: activations, FLOPs and bytes come from a Gaussian process
over techniques and their pairs (Duvenaud, Nickisch and Rasmussen, "Additive Gaussian processes",
2011), in logarithms, since techniques multiply.
"""

import csv
import hashlib
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property

import numpy
from numpy.typing import NDArray

from autotune.spec.config import TrainingConfig
from studies.search_efficiency.gpu.assumptions import FOLDER

Array = NDArray[numpy.float64]
BUDGETS = (1.0, 0.8, 0.6, 0.4, 0.2, 0.1, 0.0)
_SCALE, _PAIR, _NOISE = 0.2, 0.3, 0.003
_DOUBLINGS = 1.5
"""Length scale of the micro batch."""
_ALIKE_COMPILED = 0.8
"""How much of a whole compiled model is like compiled blocks."""
_LEAST_ACTIVATION_BYTES, _LEAST_OFFLOADED = 2e7, 0.02


@dataclass(frozen=True)
class Shape:
    """The techniques that decide peak, FLOPs and bytes."""

    precision: str = "fp32"
    checkpointing: str = "none"
    compile: str = "none"
    memory_budget: float = 1.0
    optimizer_fusion: str = "none"
    micro_batch_size: int = 16
    loss: str = "full"
    activation_offload: str = "none"

    @classmethod
    def of(cls, config: TrainingConfig) -> "Shape":
        return cls(*(getattr(config, name) for name in TECHNIQUES))

    @property
    def as_counted(self) -> "Shape":
        """The shape with the same peak, FLOPs and bytes: tf32 is fp32 at another rate."""
        return replace(self, precision="fp32") if self.precision == "tf32" else self

    @property
    def in_memory(self) -> "Shape":
        """The shape of its first four techniques alone, which decide the activations."""
        return Shape(self.precision, self.checkpointing, self.compile, self.memory_budget)

    @cached_property
    def key(self) -> str:
        """A hash, to which everything that is drawn for the shape belongs."""
        values = asdict(self) | {"optimizer": "adamw", "allocator": "default"}
        for name, usual in (("loss", "full"), ("activation_offload", "none")):
            if values[name] == usual:
                del values[name]
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:12]


TECHNIQUES = tuple(field.name for field in fields(Shape))


class Predicted:
    """The sample, and what follows from it for other shapes."""

    def __init__(self) -> None:
        self.peak_bytes: dict[Shape, float] = {}
        self.flops: dict[Shape, float] = {}
        self.accessed_bytes: dict[Shape, float] = {}
        self.plans: dict[Shape, str] = {}
        with (FOLDER / "predictions.csv").open() as file:
            for row in csv.DictReader(file):
                self._add(row)

    def _add(self, row: Mapping[str, str]) -> None:
        shape = Shape(
            precision=row["precision"],
            checkpointing=row["checkpointing"],
            compile=row["compile"],
            memory_budget=float(row["memory_budget"]),
            optimizer_fusion=row["optimizer_fusion"],
            micro_batch_size=int(row["micro_batch_size"]),
            loss=row["loss"],
            activation_offload=row["activation_offload"],
        )
        shape = shape.as_counted
        self.peak_bytes[shape] = float(row["peak_bytes"])
        self.accessed_bytes[shape] = float(row["bytes_per_token"])
        self.plans[shape] = row["plan"]
        # A prediction does not count those of compiled blocks that are checkpointed.
        if row["flops_per_token"]:
            self.flops[shape] = float(row["flops_per_token"])

    def values(self, shape_field: str) -> set[object]:
        """Returns which values of a technique the sample has."""
        return {getattr(shape, shape_field) for shape in self.peak_bytes}

    def work_of(self, known: Mapping[Shape, float], shapes: Sequence[Shape]) -> Array:
        """Returns FLOPs or bytes of each shape, predicted or regressed."""
        return _regressed(known, [shape.as_counted for shape in shapes])

    def peak_of(self, shapes: Sequence[Shape]) -> Array:
        """Returns the peak of each shape in bytes, as predicted or put together:

        static bytes + what the update adds + micro batch / 16 * activations.
        """
        shapes = [shape.as_counted for shape in shapes]
        known = {shape: peak for shape, peak in self.peak_bytes.items() if shape == shape.in_memory}
        peaks = _regressed(known, [shape.in_memory for shape in shapes])
        return numpy.array(
            [
                self.peak_bytes.get(shape) or self._put_together(shape, float(peak))
                for shape, peak in zip(shapes, peaks, strict=True)
            ]
        )

    def _put_together(self, shape: Shape, peak_bytes: float) -> float:
        static_bytes = self._static_bytes[shape.precision]
        activation_bytes = peak_bytes - static_bytes
        with_loss, without = self._pair(shape, loss=shape.loss)
        activation_bytes += with_loss - without
        offloaded, kept = self._pair(shape, activation_offload=shape.activation_offload)
        left = (offloaded - static_bytes) / (kept - static_bytes)
        activation_bytes *= max(_LEAST_OFFLOADED, left)
        checkpointed = Shape(shape.precision, "block")
        updated = replace(checkpointed, optimizer_fusion=shape.optimizer_fusion)
        before = self.peak_bytes[checkpointed]
        update_bytes = self.peak_bytes.get(updated, before) - before
        share = shape.micro_batch_size / 16
        return static_bytes + update_bytes + share * max(activation_bytes, _LEAST_ACTIVATION_BYTES)

    def _pair(self, shape: Shape, *, loss: str = "", activation_offload: str = "") -> list[float]:
        """Returns the peaks with and without one change, with the shape's checkpointing or none."""
        scope = "block" if shape.compile == "model" else shape.compile
        for checkpointing in (shape.checkpointing, "none"):
            without = Shape(shape.precision, checkpointing, scope)
            with_change = replace(
                without,
                loss=loss or without.loss,
                activation_offload=activation_offload or without.activation_offload,
            )
            if with_change in self.peak_bytes:
                return [self.peak_bytes[with_change], self.peak_bytes[without]]
        raise KeyError(shape)

    @cached_property
    def _static_bytes(self) -> dict[str, float]:
        """Bytes that do not grow with the micro batch, by precision."""
        found = {}
        for precision in {shape.precision for shape in self.peak_bytes}:
            at_16 = self.peak_bytes[Shape(precision)]
            at_1 = self.peak_bytes[Shape(precision, micro_batch_size=1)]
            found[precision] = (16 * at_1 - at_16) / 15
        return found

    @cached_property
    def first_budgets(self) -> dict[tuple[str, float], float]:
        """For precision and budget the largest budget that compiles to the same program."""
        first: dict[tuple[str, str], float] = {}
        found = {}
        for precision, budget in itertools.product(self._static_bytes, BUDGETS):
            shape = Shape(precision, compile="block", memory_budget=budget)
            if plan := self.plans.get(shape):
                found[precision, budget] = first.setdefault((precision, plan), budget)
        return found


def _regressed(known: Mapping[Shape, float], wanted: Sequence[Shape]) -> Array:
    """Returns the known values, and for other shapes the mean of the Gaussian process."""
    seen = list(known)
    others = list(dict.fromkeys(shape for shape in wanted if shape not in known))
    found = dict(known)
    if others:
        logarithms = numpy.log(list(known.values()))
        covariance = _kernel(seen, seen) + _NOISE**2 * numpy.eye(len(seen))
        weights = numpy.linalg.solve(covariance, logarithms - logarithms.mean())
        means = _kernel(others, seen) @ weights + logarithms.mean()
        found.update(zip(others, numpy.exp(means).tolist(), strict=True))
    return numpy.array([found[shape] for shape in wanted])


def _kernel(rows: Sequence[Shape], columns: Sequence[Shape]) -> Array:
    """Returns the covariance of the logarithms, [row, column]."""
    singles = [_SCALE * _closeness(name, rows, columns) for name in TECHNIQUES]
    total = numpy.sum(singles, axis=0)
    squares = numpy.sum([single**2 for single in singles], axis=0)
    return numpy.asarray(_SCALE**2 + _SCALE * total + _PAIR**2 * (total**2 - squares) / 2)


def _closeness(name: str, rows: Sequence[Shape], columns: Sequence[Shape]) -> Array:
    """Returns how much alike shapes are in one technique, 0 to 1, [row, column]."""
    of_rows = numpy.array([getattr(shape, name) for shape in rows])
    of_columns = numpy.array([getattr(shape, name) for shape in columns])
    if name == "micro_batch_size":
        doublings = numpy.subtract.outer(numpy.log2(of_rows), numpy.log2(of_columns))
        return numpy.asarray(numpy.exp(-0.5 * (doublings / _DOUBLINGS) ** 2))
    is_equal = numpy.equal.outer(of_rows, of_columns).astype(float)
    if name == "compile":
        is_compiled = numpy.equal.outer(of_rows == "none", of_columns == "none")
        return numpy.asarray((1 - _ALIKE_COMPILED) * is_equal + _ALIKE_COMPILED * is_compiled)
    return is_equal
