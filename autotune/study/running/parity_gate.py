"""Parity check: a trial's first steps are compared with a plain training of the same numerics.

A trial counts only if its losses and gradients agree. The plain training is eager, recomputes
nothing and uses no technique except the precision, the optimizer and the adapter. Where base
weights are quantized, it has ordinary layers with the numbers that the quantized ones stand for.
Gradients of weights in bf16 it adds up in fp32: of 1,024 micro batches a sum in bf16 was 19 % off.

A model without random numbers needs one plain training for all micro batches, and the trial's first
steps themselves are compared. With random numbers, as for dropout, both run their first steps
separately from the trial, with the random numbers of eager code and the same micro batch, so that
they draw the same masks. If they differ, the masks may still be the reason: then the two are
compared without dropout, and with dropout against the same configuration that recomputes nothing.
(PyTorch issue 190758: a memory budget below 1 draws dropout's masks anew in the backward pass and
computes wrong gradients.)

A training on several devices is compared with the plain training on one of them. What one device
cannot hold, also where each block is recomputed, is trained by one process that has the weights in
the host's memory and, where the host cannot hold it either, by ZeRO's third stage on all devices
of the trial. The record then says so.
"""

import json
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, Protocol

from autotune.errors import StudyMismatch
from autotune.execution.flow import Flow
from autotune.spec.config import BF16_WEIGHTS, QUANTIZED_WEIGHTS, Precision, TrainingConfig
from autotune.spec.parity import (
    NoTrace,
    ParityTrace,
    has_similar_settings,
    largest_difference,
)
from autotune.spec.reading import parse
from autotune.spec.result import Measurement
from autotune.system.files import durable_file

LARGEST_RATIO = 2**0.5
"""Largest ratio of the gradient norms of one training with other masks of dropout. It is nearer to
1 than to the factor of 2 that accumulation over two micro batches without a division makes. In
nanoGPT's first step, even with 8 sequences of other text for each micro batch, the norms were 0.92
to 1.36 times that of the whole batch; without the division 1.84 times for 2 micro batches, 4.1 for
4 and 10.9 for 8."""


_TWO_BLOCKS = 2
"""Blocks of the model that is compared where the whole one cannot be: a single block is the first
and the last one at once."""


class Tracer(Protocol):
    def __call__(
        self, config: TrainingConfig, *, dropout: bool, dequantized: bool, layers: int | None
    ) -> Flow[ParityTrace | NoTrace]:
        """Returns the first steps of a configuration, or why there are none.

        The cap is not enforced. With `dequantized` its quantized base weights are what they stand
        for, in ordinary layers. With `layers` the model has so many blocks instead of all.
        """


VerdictKind = Literal[
    "compare", "same", "same at two blocks", "failed", "unknowable", "not compared"
]
"""Unknowable: the plain training fails, so that there is nothing to compare with. Not compared:
there is no room for the plain training."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The result of the parity check."""

    kind: VerdictKind
    message: str = ""
    reference: ParityTrace | None = None
    """With `compare`: the steps that the trial's own first steps must repeat."""

    @property
    def ends_trial(self) -> Measurement | None:
        """The result of a configuration that need not be trained, as it can be no solution."""
        if self.kind not in ("failed", "unknowable"):
            return None
        is_another = self.kind == "failed"
        what = "computes another training" if is_another else "not compared"
        return Measurement(
            outcome="parity_failed",
            message=f"{what}: {self.message}",
            parity="failed" if is_another else "not compared",
            parity_message=self.message,
        )


class ParityGate:
    """Checks the configurations of one study; traces of plain trainings are stored in `folder`.

    `any_micro_batch`: whether a plain training at one micro batch serves the others, because the
    loss of the global batch is the same. A script may report the loss of a micro batch, and a
    user's loss need not be a sum over sequences. `sums_in_fp32`: whether plain trainings can add up
    the gradients of a `global_batch` so, which a script does itself. `has_layers`: whether the
    model can be made with fewer blocks. A trial has as many `devices`, of `device_type`.
    """

    def __init__(
        self,
        trace: Tracer,
        *,
        folder: Path,
        on_trace: Callable[[TrainingConfig], None],
        any_micro_batch: bool = True,
        sums_in_fp32: bool = False,
        global_batch: int = 1,
        has_layers: bool = False,
        devices: int = 1,
        device_type: str = "cpu",
    ) -> None:
        self._trace = trace
        self._folder = folder
        self._on_trace = on_trace
        self._any_micro_batch = any_micro_batch
        self._sums_in_fp32 = sums_in_fp32
        self._global_batch = global_batch
        self._has_layers = has_layers
        self._devices = devices
        self._device_type = device_type
        self._failures: dict[str, NoTrace] = {}
        self._alike: dict[tuple[str, str], bool] = {}
        self._of_earlier_searches = {file.stem for file in folder.glob("*.json")}
        self._changes_buffers: dict[str, bool] = {}

    def check(self, config: TrainingConfig) -> Flow[Verdict]:
        plain = self._plain_form(config, micro_batch_size=config.micro_batch_size)
        is_plain = config == plain and config.base_weights not in QUANTIZED_WEIGHTS
        micro_batch_size = yield from self._common_micro_batch(config)
        reference = yield from self._plain(config, micro_batch_size=micro_batch_size)
        if isinstance(reference, ParityTrace) and not reference.draws_random_numbers:
            return Verdict(kind="compare", reference=reference)
        if is_plain:
            return Verdict(kind="same", message="it is the plain training itself")
        missing = reference
        if isinstance(reference, ParityTrace):
            judged = yield from self._judge_separately(config)
            if isinstance(judged, Verdict):
                return judged
            missing = judged
        assert isinstance(missing, NoTrace)
        if not missing.lacks_room:
            return Verdict(kind="unknowable", message=missing.message)
        if not self._has_layers:
            return Verdict(kind="not compared", message=missing.message)
        return (yield from self._judge_at_two_blocks(config, missing))

    def any_micro_batch_serves(self, config: TrainingConfig) -> Flow[bool]:
        """Returns whether a configuration is the same training with every micro batch.

        It is not where forward changes a buffer, such as running statistics, in each micro batch.
        """
        if not self._any_micro_batch:
            return False
        plain = self._plain_form(config, micro_batch_size=1)
        if plain.fingerprint not in self._changes_buffers:
            trace = yield from self._plain(plain, micro_batch_size=1)
            changes = isinstance(trace, ParityTrace) and bool(trace.buffer_projections)
            self._changes_buffers[plain.fingerprint] = changes
        return not self._changes_buffers[plain.fingerprint]

    def _judge_at_two_blocks(self, config: TrainingConfig, missing: NoTrace) -> Flow[Verdict]:
        """Compare a model of two blocks, where the whole plain training has no room."""
        judged = yield from self._judge_separately(config, layers=_TWO_BLOCKS)
        message = f"at two blocks, {judged.message} ({missing.message})"
        if isinstance(judged, NoTrace):
            kind: VerdictKind = "not compared" if judged.lacks_room else "unknowable"
        else:
            kind = "same at two blocks" if judged.kind == "same" else judged.kind
        return Verdict(kind=kind, message=message)

    def updates_alike(self, config: TrainingConfig, other: TrainingConfig) -> Flow[bool]:
        """Returns whether the plain trainings of two configurations are one training.

        They differ in their micro batch only, so that neither needs a technique to differ: a script
        may draw other text for another micro batch, forget to divide its loss, or do once for each
        micro batch what belongs to the step. Losses are left out, since a script may report that of
        a micro batch. Dropout drops other activations in another micro batch: then the two are
        compared without it, and with it in what masks do not change.
        """
        first = self._plain_form(config, micro_batch_size=config.micro_batch_size)
        second = self._plain_form(other, micro_batch_size=other.micro_batch_size)
        pair = (first.fingerprint, second.fingerprint)
        if pair not in self._alike:
            self._alike[pair] = yield from self._are_one_training(first, second)
        return self._alike[pair]

    def check_unchanged(self, config: TrainingConfig) -> Flow[None]:
        """Raise StudyMismatch if the plain training is not what an earlier search has stored.

        Then code or data has changed that no file of the study shows, such as data of the hub, and
        no technique is to blame. A training that does not repeat itself tells nothing.
        """
        micro_batch_size = yield from self._common_micro_batch(config)
        plain = self._plain_form(config, micro_batch_size=micro_batch_size)
        dequantized = config.base_weights in QUANTIZED_WEIGHTS
        name = f"{plain.fingerprint}-dequantized" if dequantized else plain.fingerprint
        stored = _read(self._folder / f"{name}.json")
        if stored is None or name not in self._of_earlier_searches:
            return
        self._of_earlier_searches.remove(name)  # once in a search is enough
        now = yield from self._trace(plain, dropout=True, dequantized=dequantized, layers=None)
        if not isinstance(now, ParityTrace):
            return
        difference = largest_difference(now, stored, precision=config.precision)
        if not difference.is_outside:
            return
        again = yield from self._trace(plain, dropout=True, dequantized=dequantized, layers=None)
        if not isinstance(again, ParityTrace):
            return
        if not largest_difference(again, now, precision=config.precision).is_outside:
            raise StudyMismatch(
                "the training without any technique is no longer what the study was begun with: "
                f"{difference.message}",
                hint="restore its code and data, or begin another study with another --name",
            )

    def _are_one_training(self, first: TrainingConfig, second: TrainingConfig) -> Flow[bool]:
        def traces(*, dropout: bool) -> Flow[list[ParityTrace | NoTrace]]:
            found = []
            for config in (first, second):
                trace = yield from self._plain(
                    config, micro_batch_size=config.micro_batch_size, dropout=dropout
                )
                found.append(trace)
            return found

        trace, other = yield from traces(dropout=True)
        if isinstance(trace, NoTrace) or isinstance(other, NoTrace) or trace.tokens != other.tokens:
            return False
        if trace.draws_random_numbers or other.draws_random_numbers:
            if not _are_similar(trace, other, precision=first.precision):
                return False
            trace, other = yield from traces(dropout=False)
            if isinstance(trace, NoTrace) or isinstance(other, NoTrace):
                return False
        if not trace.gradient_norms or not other.gradient_norms:
            return False
        difference = largest_difference(
            trace, other, precision=first.precision, other_micro_batch=True
        )
        return not difference.is_outside

    def _judge_separately(
        self, config: TrainingConfig, *, layers: int | None = None
    ) -> Flow[Verdict | NoTrace]:
        """Compare first steps that are no part of the trial: same, failed, or why it cannot be."""
        self._on_trace(config)
        trace = yield from self._trace(config, dropout=True, dequantized=False, layers=layers)
        if isinstance(trace, NoTrace):  # the trial itself will end so
            return Verdict(kind="not compared", message=f"its first steps: {trace.message}")
        plain = yield from self._plain(
            config, micro_batch_size=config.micro_batch_size, layers=layers
        )
        # A memory budget gets a stricter test below, of the masks it draws.
        is_budget = config.memory_budget < 1.0 and trace.draws_random_numbers
        if isinstance(plain, ParityTrace) and not is_budget:
            difference = largest_difference(trace, plain, precision=config.precision)
            message = plain.described(difference.message)
            if not difference.is_outside:
                return Verdict(kind="same", message=f"at most, {message}")
            if not trace.draws_random_numbers:
                return Verdict(kind="failed", message=message)
        return (yield from self._judge_in_parts(config, trace, layers=layers))

    def _judge_in_parts(
        self, config: TrainingConfig, with_dropout: ParityTrace, *, layers: int | None
    ) -> Flow[Verdict | NoTrace]:
        """Compare without dropout to the plain training, and with it to no recomputation."""
        micro_batch_size = yield from self._common_micro_batch(config)
        plain_without_dropout = yield from self._plain(
            config,
            micro_batch_size=micro_batch_size,
            dropout=False,
            layers=layers,
        )
        no_recomputation = yield from self._stored_trace(
            replace(config, memory_budget=1.0, checkpointing="none"), layers=layers
        )
        without_dropout = yield from self._trace(
            config, dropout=False, dequantized=False, layers=layers
        )
        # Compiled code that differs only in its recomputation rounds almost the same.
        strictness = 2.0 if config.memory_budget < 1.0 else 1.0
        comparisons = (
            (
                "without dropout, ",
                without_dropout,
                plain_without_dropout,
                1.0,
            ),
            (
                "with dropout, against the same without recomputation, ",
                with_dropout,
                no_recomputation,
                strictness,
            ),
        )
        messages = []
        for what, trace, reference, strict in comparisons:
            if isinstance(trace, NoTrace):
                return Verdict(kind="not compared", message=what + trace.message)
            if isinstance(reference, NoTrace):
                return replace(reference, message=what + reference.message)
            difference = largest_difference(
                trace, reference, precision=config.precision, strictness=strict
            )
            message = what + reference.described(difference.message)
            if difference.is_outside:
                return Verdict(kind="failed", message=message)
            messages.append(message)
        return Verdict(kind="same", message="at most, " + "; ".join(messages))

    def _common_micro_batch(self, config: TrainingConfig) -> Flow[int]:
        """Returns the micro batch of the plain training without random numbers.

        The smallest, which needs the least memory, if any micro batch will do.
        """
        serves = yield from self.any_micro_batch_serves(config)
        return 1 if serves else config.micro_batch_size

    def _plain(
        self,
        config: TrainingConfig,
        *,
        micro_batch_size: int,
        dropout: bool = True,
        layers: int | None = None,
    ) -> Flow[ParityTrace | NoTrace]:
        """Returns the trace of the plain training, or why there is none.

        If the device cannot hold it, torch's checkpointing is applied to each block; and on
        several devices, weights that one of them cannot hold are on the host or divided. Where the
        plain training fails, no other form stands for it: checkpointing computes an operation in
        place, which autograd rejects, with wrong gradients.
        """
        plain = self._plain_form(config, micro_batch_size=micro_batch_size)
        dequantized = config.base_weights in QUANTIZED_WEIGHTS
        why_none: NoTrace | None = None
        for form, name in self._plain_forms(plain):
            trace = yield from self._stored_trace(
                form, dropout=dropout, dequantized=dequantized, layers=layers
            )
            if isinstance(trace, ParityTrace):
                return replace(trace, compared_with=name)
            why_none = why_none or trace
            if not why_none.lacks_room:
                break
        assert why_none is not None
        return why_none

    def _plain_form(self, config: TrainingConfig, *, micro_batch_size: int) -> TrainingConfig:
        plain = plain_form(config, micro_batch_size=micro_batch_size)
        has_sums = self._global_batch > micro_batch_size  # else it is illegal, and takes memory
        if self._sums_in_fp32 and has_sums and plain.precision in BF16_WEIGHTS:
            return replace(plain, gradient_accumulation_dtype="fp32")
        return plain

    def _plain_forms(self, plain: TrainingConfig) -> Iterator[tuple[TrainingConfig, str]]:
        """Yield the forms of the plain training, each with its name where it is another one.

        Each needs less memory of a device than the one before. The results are the same but for
        rounding: with weights in bf16, the forms for several devices add up gradients in bf16.
        """
        yield plain, ""
        checkpointed = replace(plain, checkpointing="block")
        yield checkpointed, ""
        if self._devices == 1:
            return
        # What has weights elsewhere adds up gradients by itself: in fp32 it is illegal.
        checkpointed = replace(checkpointed, gradient_accumulation_dtype="weights")
        if self._device_type != "cpu":  # whose memory the weights are in already
            on_host = "one process with the weights on the host, as one device cannot hold them"
            yield replace(checkpointed, offload="all"), on_host
        divided = f"zero3 on the same {self._devices} devices, as one device cannot hold the model"
        yield replace(checkpointed, sharding="zero3"), divided

    def _stored_trace(
        self,
        config: TrainingConfig,
        *,
        dropout: bool = True,
        dequantized: bool = False,
        layers: int | None = None,
    ) -> Flow[ParityTrace | NoTrace]:
        """Returns the trace of a reference configuration, which is run once for each study."""
        name = config.fingerprint if dropout else f"{config.fingerprint}-without-dropout"
        if dequantized:
            name += "-dequantized"
        if layers is not None:
            name += f"-{layers}-blocks"
        file = self._folder / f"{name}.json"
        if known := _read(file):
            return known
        if name not in self._failures:
            self._on_trace(config)
            trace = yield from self._trace(
                config, dropout=dropout, dequantized=dequantized, layers=layers
            )
            if isinstance(trace, ParityTrace):
                _store(file, trace)
                return trace
            self._failures[name] = _of("the plain training to compare with", trace)
        return self._failures[name]


def _of(what: str, missing: NoTrace) -> NoTrace:
    """Returns why there is no trace, with the training that it is missing of."""
    return replace(missing, message=f"{what}: {missing.message}")


def plain_form(config: TrainingConfig, *, micro_batch_size: int) -> TrainingConfig:
    """Returns the plain training of the same numerics."""
    return TrainingConfig(
        precision=config.precision,
        optimizer=config.optimizer,
        micro_batch_size=micro_batch_size,
        adapter=config.adapter,
        adapter_rank=config.adapter_rank,
        adapter_targets=config.adapter_targets,
        base_weights=config.base_weights,
    )


def _are_similar(trace: ParityTrace, other: ParityTrace, *, precision: Precision) -> bool:
    """Returns whether two trainings with other masks are alike in what masks do not change.

    They update as often and with the same settings; their gradients, and the changes of each
    buffer, differ in their norms by a factor of `LARGEST_RATIO` at most.
    """
    if not has_similar_settings(trace, other, precision=precision):
        return False
    buffers = trace.buffer_projections.keys() | other.buffer_projections.keys()
    sizes: list[tuple[Iterable[float], Iterable[float]]] = [
        (trace.backward_norms.values(), other.backward_norms.values())
    ]
    sizes += [
        (trace.buffer_projections.get(name, ()), other.buffer_projections.get(name, ()))
        for name in buffers
    ]
    return all(_are_of_one_size(math.hypot(*one), math.hypot(*another)) for one, another in sizes)


def _are_of_one_size(norm: float, other: float) -> bool:
    return 0.0 < max(norm, other) <= LARGEST_RATIO * min(norm, other)


def _read(file: Path) -> ParityTrace | None:
    """Returns a stored trace; None if it is missing or unreadable, and is to be made again."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        if "update_projections" not in content:
            return None  # of an earlier version, which compared less
        return parse(ParityTrace, content)
    except (OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError):
        return None


def _store(file: Path, trace: ParityTrace) -> None:
    with suppress(OSError):  # on a full disk the trace is known to this process only
        file.parent.mkdir(parents=True, exist_ok=True)
        with durable_file(file) as unfinished:
            unfinished.write_text(json.dumps(trace.to_dict()), encoding="utf-8")
