"""Says once, after twenty steps of a training, whether it keeps what its trial promises.

It says peak memory and tokens/s beside those of the trial and, where they are off by more than 5 %,
what differs from the trial, as far as this process knows it. Nothing waits for the device before.
An error in here ends the comparison, not the training. AUTOTUNE_PROMISE=0 turns it off.
"""

import functools
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from typing import Any

import torch
from torch import Tensor

from autotune.shipped.batch_tokens import count_tokens, shape_of_tokens
from autotune.shipped.cpu_peak import storage_bytes
from autotune.shipped.device_name import device_name
from autotune.shipped.peak_memory import PeakMemory

COMPARED_UP_TO = 20
FIRST_COMPARED = 5
"""Not timed: they compile and make the optimizer's state. The peak counts from the last one on."""
LEAST_COMPARED = 5
AS_PROMISED = 0.05

_FACTS: dict[str, tuple[str, int | None, int]] = {
    "micro_batch_size": ("{} sequences in a forward pass", 1, 0),
    "sequence_length": ("sequences of {} tokens", 1, 0),
    "accumulation_steps": ("{} forward passes in a step", 1, 0),
    "share_of_tokens": ("{} of all places being no padding", None, 1),
    "weights_bytes": ("{} bytes of weights", 1, -1),
    "optimizer_bytes": ("{} bytes of optimizer state", 1, -1),
    "devices": ("a number of devices of {}", 0, 0),
    "device": ("the device {}", 0, 0),
}
"""{fact: (words, what more of it does to memory, to speed)}.

1 stands for more, -1 for less, 0 for either, None for nothing.
"""

_LOOK_AT_MEMORY = (
    "look at the trial by `autotune explain`, and at this training by "
    "torch.cuda.memory._record_memory_history"
)
_LOOK_AT_SPEED = (
    "look for other programs on the device, and compare `autotune profile` of the trial with "
    "torch.profiler in this training"
)


def _never_fails(method: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(method)
    def guarded(self: "Promise", *args: Any, **kwargs: Any) -> None:
        if self.is_over:
            return
        try:
            method(self, *args, **kwargs)
        except Exception as error:
            self.is_over = True
            with suppress(Exception):
                self._step.close()  # which may record
            _say(f"this training is not compared with its trial: {type(error).__name__}: {error}")

    return guarded


def _say(text: str) -> None:
    print(f"\nautotune: {text}", file=sys.stderr, flush=True)  # below a progress bar


class Promise:
    """Measures the first steps of a training; `trial` are the numbers and facts of its trial."""

    def __init__(
        self,
        trial: Mapping[str, Any],
        *,
        device_type: str,
        devices: int = 1,
        is_first: bool = True,
        peak: PeakMemory | None = None,
    ) -> None:
        """`is_first`: whether this is the process that says it. `peak` is measured elsewhere."""
        self.is_over = not is_first or os.environ.get("AUTOTUNE_PROMISE") == "0"
        self._trial = trial
        self._device_type = device_type
        self._measures_peak = peak is None
        self._peak = peak or PeakMemory(device_type)
        self._facts: dict[str, Any] = {"devices": devices}
        self._step = ExitStack()
        self._steps = 0
        self._tokens: list[Any] = []
        self._places = 0
        self._micro_batches = 0
        self._times: list[tuple[Any, Any]] = []
        """When each step began and ended, from the last warm-up step on."""
        self._between: dict[str, None] = {}

    @_never_fails
    def step_begins(self, model: Any = None, *optimizers: Any) -> None:
        """Must be called before the first forward pass of a step, after its data was read."""
        self._micro_batches = 0
        if self._steps == FIRST_COMPARED - 1 and model is not None:
            state = [
                value
                for optimizer in optimizers
                for of_parameter in optimizer.state.values()
                for value in of_parameter.values()
                if isinstance(value, Tensor)
            ]
            weights = list(model.parameters())
            self._facts["weights_bytes"] = storage_bytes(weights)
            self._facts["optimizer_bytes"] = storage_bytes(state)
            self._measure_peak([*weights, *model.buffers(), *state])
        if self._steps >= FIRST_COMPARED - 1:
            self._began = self._now()

    def _measure_peak(self, resident: list[Tensor]) -> None:
        if self._device_type == "cpu" and (
            self._facts["devices"] > 1 or torch._C._autograd._profiler_enabled()
        ):
            return
        if self._measures_peak and self._device_type in ("cpu", "cuda"):
            self._step.enter_context(self._peak.of_step(lambda: resident, moves=False))

    @_never_fails
    def saw(self, tokens: Any, *, rows: int, length: int, micro_batches: int = 1) -> None:
        """Notes micro batches of a step: their tokens, their rows and the places of a row."""
        self._micro_batches += micro_batches
        for fact, seen in (
            ("micro_batch_size", rows),
            ("sequence_length", length),
            ("accumulation_steps", self._micro_batches),
        ):
            self._facts[fact] = max(seen, self._facts.get(fact, 0))
        self._count(tokens)
        if self._steps >= FIRST_COMPARED:
            self._places += rows * length * micro_batches

    def _count(self, tokens: Any) -> None:
        if self._steps >= FIRST_COMPARED:
            self._tokens.append(tokens)

    @_never_fails
    def saw_batch(self, batch: Any) -> None:
        """Notes a micro batch as a data loader has collated it."""
        rows, length = shape_of_tokens(batch)
        self.saw(count_tokens(batch), rows=rows, length=length)

    @_never_fails
    def step_ended(self, tokens: Any = None) -> None:
        """Must be called after the optimizer's step; says the result after the last one.

        `tokens` are those of the step, where its micro batches are not seen.
        """
        if tokens is not None:
            self._count(tokens)
        self._step.close()
        self._steps += 1
        if self._steps >= FIRST_COMPARED:
            self._times.append((self._began, self._now()))
        if self._steps == FIRST_COMPARED:
            self._cpu_seconds = time.process_time()
        if self._steps == COMPARED_UP_TO:
            self.ends()

    def interrupted(self, by: str) -> None:
        """Notes what came between two steps, such as `evaluation`."""
        self._between[by] = None

    @_never_fails
    def ends(self) -> None:
        """Says the result. Must be called where a training ends, which may be earlier."""
        self.is_over = True
        self._step.close()
        if self._steps == 0:
            return
        _say("\n  ".join([f"{self._steps} steps beside {self._trial['trial']}", *self._lines()]))

    # -- time --------------------------------------------------------------------------------------

    def _now(self) -> Any:
        if self._device_type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _seconds(self, began: Any, ended: Any) -> float:
        if self._device_type != "cuda":
            return float(ended - began)
        return float(began.elapsed_time(ended)) / 1000

    # -- the result --------------------------------------------------------------------------------

    def _lines(self) -> Iterator[str]:
        """Yields a line on memory and one on speed."""
        if self._device_type == "cuda":
            torch.cuda.synchronize()
        self._facts["device"] = device_name(self._device_type)
        yield from self._memory()
        yield from self._speed()

    def _memory(self) -> Iterator[str]:
        peak_bytes = self._peak.read() if self._steps >= FIRST_COMPARED else 0
        promised = self._trial.get("peak_memory_bytes")
        if promised is None:
            return
        line = f"promised {promised / 2**20:,.2f} MiB"
        if not peak_bytes:
            yield f"peak memory is not measured here, {line}"
            return
        is_more = peak_bytes > promised
        causes = list(self._differences(is_more, effect=1))
        if is_more and self._device_type == "cuda":  # where the peak is not that of a step alone
            causes += self._between
        off = _off(peak_bytes / promised - 1, ("more", "less"), causes, _LOOK_AT_MEMORY)
        yield f"peak memory {peak_bytes / 2**20:,.2f} MiB, {line}{off}"

    def _speed(self) -> Iterator[str]:
        promised = self._trial.get("tokens_per_second")
        steps = list(zip(self._times, self._times[1:], strict=False))
        if promised is None:
            return
        if len(steps) < LEAST_COMPARED or not self._tokens:
            yield f"too few steps for a speed, promised {promised:,.0f} tokens/s"
            return
        times = [self._seconds(last[1], now[1]) for last, now in steps]
        seconds = statistics.median(times)
        between = statistics.median(self._seconds(last[1], now[0]) for last, now in steps)
        tokens = float(sum(self._tokens))
        if self._places:
            self._facts["share_of_tokens"] = tokens / self._places
        speed = tokens * self._facts["devices"] / len(steps) / seconds
        more = speed / promised - 1
        causes = list(self._differences(more > 0, effect=2))
        if more < 0 and between > AS_PROMISED * seconds:
            what = " and ".join(["data", "logging", *self._between])
            causes.append(f"{_text(between / seconds)} of the time between steps ({what})")
        on_cpu = (time.process_time() - self._cpu_seconds) / sum(times)
        if more < 0 and self._device_type == "cpu" and on_cpu < 1 - AS_PROMISED:
            causes.append(f"having a CPU for {_text(on_cpu)} of the time only")
        lower, _, upper = statistics.quantiles(times, n=4)
        spread = (upper - lower) / 2 / seconds
        spread_of_trial = self._trial.get("tokens_per_second_spread", 0.0) / promised
        if abs(more) < spread + spread_of_trial:
            varied = f"{_text(spread)} here, {_text(spread_of_trial)} in the trial"
            causes.append(f"disturbed steps, whose speed varied by {varied}")
        off = _off(more, ("faster", "slower"), causes, _LOOK_AT_SPEED)
        yield f"{speed:,.0f} tokens/s, promised {promised:,.0f}{off}"

    def _differences(self, is_more: bool, *, effect: int) -> Iterator[str]:
        """Yields what differs from the trial and can make memory (1) or speed (2) more or less."""
        yield from self._trial.get("not_expressed", ())
        for fact, (words, *effects) in _FACTS.items():
            seen, in_trial, sign = self._facts.get(fact), self._trial.get(fact), effects[effect - 1]
            if not seen or in_trial is None or sign is None or not _differ(seen, in_trial):
                continue
            if sign == 0 or (seen > in_trial) == (is_more == (sign > 0)):
                yield f"{words.format(_text(seen))} ({_text(in_trial)} in the trial)"
        for package, of_trial in self._trial.get("versions", {}).items():
            module = sys.modules.get(package)
            seen = torch.version.cuda if package == "cuda" else getattr(module, "__version__", None)
            if seen and seen != of_trial:
                yield f"{package} {seen} ({of_trial} in the trial)"


def _differ(seen: Any, in_trial: Any) -> bool:
    """Returns whether two texts differ, or two numbers by more than one in a hundred."""
    if isinstance(seen, str):
        return bool(seen != in_trial)
    return bool(abs(seen - in_trial) > 0.01 * in_trial)


def _text(value: str | int | float) -> str:
    """Returns a name, a number or a share as text."""
    if isinstance(value, str):
        return value
    return f"{value:,}" if isinstance(value, int) else f"{100 * value:.0f} %"


def _off(more: float, words: tuple[str, str], causes: list[str], otherwise: str) -> str:
    """Returns what follows a number that is off by `more`, a share of what was promised."""
    if abs(more) <= AS_PROMISED:
        return ""
    how = f": {_text(abs(more))} {words[0] if more > 0 else words[1]}"
    if not causes:
        return f"{how}, and nothing that this process knows differs from the trial: {otherwise}"
    return f"{how}, likely because of {', '.join(causes)}"
