"""The parity gate: before a trial counts, its first steps are held against a plain training of the same numerics.

Plain: eager, nothing recomputed, no technique but the precision and the optimizer. Where a model
draws no random numbers one plain training serves all micro batches, and a trial's own first steps
are compared. Where it does, as with dropout, both take their first steps apart from the trial, with
the random numbers of eager code and the same micro batch, so that they draw the same masks. Should
they differ, that may still be the masks: then the two are compared without dropout, and with it
against the same configuration that recomputes nothing. (pytorch issue 190758: a memory budget below
1 draws dropout's masks anew in the backward pass and gets the gradients wrong.)
"""

import json
import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, Protocol

from autotune.spec.config import TrainingConfig
from autotune.spec.parity import ParityTrace, largest_difference
from autotune.storage.durable_file import durable_file

LARGEST_RATIO = 2**0.5
"""Of the norms of two gradients of one training, each of another global batch: nearer to equal than
to the factor of two that one accumulation without a division makes. In nanoGPT's first step, with 8
sequences of other text for each micro batch, they were 0.92 to 1.36 times that of the whole batch;
without the division 1.84 times for 2 micro batches, 4.1 for 4 and 10.9 for 8."""


class Tracer(Protocol):
    def __call__(self, config: TrainingConfig, *, dropout: bool) -> ParityTrace | str:
        """The first steps of a configuration, beyond the cap if need be, or why there are none."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    kind: Literal["compare", "same", "failed", "not compared"]
    message: str = ""
    reference: ParityTrace | None = None
    """With `compare`: what the trial's own first steps must repeat."""


class ParityGate:
    """Judges configurations of one study. Traces of plain trainings are kept in `folder`.

    `any_micro_batch`: whether a plain training at one micro batch serves the others, as the loss of
    the global batch is the same; a script may report that of a micro batch, and a loss of one's own
    need not be a sum over sequences.
    """

    def __init__(
        self,
        trace: Tracer,
        *,
        folder: Path,
        on_trace: Callable[[TrainingConfig], None],
        any_micro_batch: bool = True,
    ) -> None:
        self._trace = trace
        self._folder = folder
        self._on_trace = on_trace
        self._any_micro_batch = any_micro_batch
        self._failures: dict[str, str] = {}
        self._alike: dict[tuple[str, str], bool] = {}

    def judge(self, config: TrainingConfig) -> Verdict:
        reference = self._plain(config, micro_batch_size=self._common_micro_batch(config))
        if isinstance(reference, str):
            return Verdict(kind="not compared", message=reference)
        if not reference.draws_random_numbers:
            return Verdict(kind="compare", reference=reference)
        plain = plain_form(config, micro_batch_size=config.micro_batch_size)
        if config == plain:
            return Verdict(kind="same", message="it is the plain training itself")
        return self._judge_random(config)

    def updates_alike(self, config: TrainingConfig, other: TrainingConfig) -> bool:
        """Whether the plain trainings at the micro batches of two configurations make updates alike.

        A script may draw other text for another micro batch, so that neither losses nor gradients
        repeat. But one that accumulates its gradients as it should has gradients of about the same
        norm at every micro batch; one that forgets to divide its loss has them larger by the number
        of micro batches, and one that does not accumulate reports fewer tokens.
        """
        plain = [
            plain_form(each, micro_batch_size=each.micro_batch_size) for each in (config, other)
        ]
        pair = (plain[0].fingerprint, plain[1].fingerprint)
        if pair not in self._alike:
            one, another = (
                self._plain(each, micro_batch_size=each.micro_batch_size) for each in plain
            )
            self._alike[pair] = (
                isinstance(one, ParityTrace)
                and isinstance(another, ParityTrace)
                and one.tokens == another.tokens
                and _are_of_one_size(one.gradient_norms, another.gradient_norms)
            )
        return self._alike[pair]

    def _judge_random(self, config: TrainingConfig) -> Verdict:
        self._on_trace(config)
        mine = self._trace(config, dropout=True)
        if isinstance(mine, str):
            return Verdict(kind="not compared", message=f"its first steps: {mine}")
        plain = self._plain(config, micro_batch_size=config.micro_batch_size)
        # A budget has a stricter test below, of the masks it draws.
        if isinstance(plain, ParityTrace) and config.memory_budget == 1.0:
            difference = largest_difference(mine, plain, precision=config.precision)
            if not difference.is_outside:
                return Verdict(kind="same", message=f"at most, {difference.message}")
        return self._judge_in_parts(config, mine)

    def _judge_in_parts(self, config: TrainingConfig, mine: ParityTrace) -> Verdict:
        plain_off = self._plain(
            config, micro_batch_size=self._common_micro_batch(config), dropout=False
        )
        recomputes_nothing = self._kept(replace(config, memory_budget=1.0, checkpointing="none"))
        # The same compiled code but for the recomputation rounds nearly alike.
        strictness = 2.0 if config.memory_budget < 1.0 else 1.0
        comparisons = (
            ("without dropout, ", self._trace(config, dropout=False), plain_off, 1.0),
            (
                "with dropout, against the same without recomputation, ",
                mine,
                recomputes_nothing,
                strictness,
            ),
        )
        same = []
        for what, trace, reference, strict in comparisons:
            if isinstance(trace, str) or isinstance(reference, str):
                return Verdict(
                    kind="not compared",
                    message=what + str(trace if isinstance(trace, str) else reference),
                )
            difference = largest_difference(
                trace, reference, precision=config.precision, strictness=strict
            )
            if difference.is_outside:
                return Verdict(kind="failed", message=what + difference.message)
            same.append(what + difference.message)
        return Verdict(kind="same", message="at most, " + "; ".join(same))

    def _common_micro_batch(self, config: TrainingConfig) -> int:
        """Without random numbers, that of the plain training; the smallest needs the least memory."""
        return 1 if self._any_micro_batch else config.micro_batch_size

    def _plain(
        self, config: TrainingConfig, *, micro_batch_size: int, dropout: bool = True
    ) -> ParityTrace | str:
        """Of the plain training; where the device cannot hold it, with torch's own checkpointing of each block."""
        plain = plain_form(config, micro_batch_size=micro_batch_size)
        trace = self._kept(plain, dropout=dropout)
        if isinstance(trace, ParityTrace):
            return trace
        checkpointed = self._kept(replace(plain, checkpointing="block"), dropout=dropout)
        return checkpointed if isinstance(checkpointed, ParityTrace) else trace

    def _kept(self, config: TrainingConfig, *, dropout: bool = True) -> ParityTrace | str:
        """The trace of a configuration that others are compared with; taken once a study, beyond the cap if need be."""
        name = config.fingerprint if dropout else f"{config.fingerprint}-without-dropout"
        file = self._folder / f"{name}.json"
        if known := _read(file):
            return known
        if name not in self._failures:
            self._on_trace(config)
            trace = self._trace(config, dropout=dropout)
            if isinstance(trace, ParityTrace):
                _keep(file, trace)
                return trace
            self._failures[name] = f"the plain training to compare with: {trace}"
        return self._failures[name]


def plain_form(config: TrainingConfig, *, micro_batch_size: int) -> TrainingConfig:
    """The plain training of the same numerics."""
    return TrainingConfig(
        precision=config.precision, optimizer=config.optimizer, micro_batch_size=micro_batch_size
    )


def _are_of_one_size(norms: Mapping[str, float], others: Mapping[str, float]) -> bool:
    """Whether two gradients, of which the norm of each block is given, differ in norm by `LARGEST_RATIO` at most."""
    norm, other = math.hypot(*norms.values()), math.hypot(*others.values())
    return 0.0 < max(norm, other) <= LARGEST_RATIO * min(norm, other)


def _read(file: Path) -> ParityTrace | None:
    """None where there is none, or none that can be read: it is taken anew."""
    try:
        return ParityTrace.from_dict(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _keep(file: Path, trace: ParityTrace) -> None:
    """Where the disk is full, for this process alone."""
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        with durable_file(file) as unfinished:
            unfinished.write_text(json.dumps(trace.to_dict()), encoding="utf-8")
