"""Times several trainings of a study in turn, so that the same disturbances meet all of them.

Each training has its own process, as a trial has, because tf32, inductor's settings, the allocator
and its limit belong to a process. Only one of them computes at any moment, also while it builds and
warms up: two trainings at once would measure each other.

`in turn`: where all fit the device at once, they are started one after the other, and then step in
rounds. In each round every training has one turn, in an order that is drawn anew. A training that
waits blocks in a system call (`training/turns.py`).

`in blocks`: where they do not fit, or where that is not known, each is started several times, in an
order that is drawn anew each time: it builds, warms up, has its turns one after the other and ends.
"""

import math
import os
import random
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, Self, TypeVar

from autotune.errors import Stopped
from autotune.execution.server.limits import TimeLimits
from autotune.execution.tasks import TrainInTurn
from autotune.memory.host import available_bytes
from autotune.memory.nvml import open_device
from autotune.spec.attempt import FinishedTrial
from autotune.spec.config import TrainingConfig
from autotune.spec.confirmation import Schedule, TimedBlock, TurnResult
from autotune.spec.result import DeviceInfo, Measurement
from autotune.spec.schema import Schema
from autotune.spec.training_request import TrainingRequest
from autotune.training.turns import (
    Connection,
    MalformedMessage,
    block_of,
    step_seconds_of,
)

SHORT_TRAININGS = 4
"""How often each training is started `in blocks`."""
LEAST_ROUNDS = 12
"""So many are made where the time of a run is over, and half of the short trainings: without them
a run has cost its start and says little."""

_TURN_SECONDS = 0.2
"""About how long the turn of the fastest training lasts. At its beginning a GPU has been idle, and
the caches of a CPU hold the data of another training."""
_POLL_SECONDS = 0.1
"""How often a wait checks whether it should end."""
_SECONDS_TO_END = 5.0
"""How long to wait for the processes of a stopped run to end."""
_SECONDS_BEYOND_LIMIT = 60.0
"""How long a training may not answer after its time limit, by which its server has ended it. One
that claims to wait for its turn has no limit there, but nobody else has the turn."""
_LARGEST_SHARE = 0.9
"""Of the free memory, what trainings that are there at once may need."""
_HOST_BYTES = 512 * 1024**2
"""What a process needs of the host's memory beside its tensors."""
_LONGEST_FOLDER_NAME = 90
"""In bytes. The address of a Unix socket, a path, has at most 108, on some systems 104."""


@dataclass(frozen=True, kw_only=True)
class TrainingInTurn:
    """One training of a run in turn."""

    config: TrainingConfig
    enforce_cap: bool = True
    """False for a baseline that may exceed the cap."""
    device_bytes: int | None = None
    """Memory that it needs of the device, with its context; None: not known."""


@dataclass(frozen=True, kw_only=True)
class RunInTurn:
    """Two or more trainings to time in turn, of which the first is the partner of the others."""

    trainings: tuple[TrainingRequest, ...]
    """Of one workload."""
    device_bytes: tuple[int | None, ...]
    """As `TrainingInTurn.device_bytes`, of each."""
    devices: tuple[DeviceInfo, ...]
    """That of each process of a training; those of a CPU are one."""
    rounds: int
    """Blocks of each training, where the time suffices."""
    seconds: float
    """After them no further round begins, but for LEAST_ROUNDS."""
    seed: int
    log_name: str
    """Beginning of the names of their logs."""
    limits: TimeLimits
    """Of each training."""


@dataclass(frozen=True, kw_only=True)
class TimedInTurn(Schema):
    """The result of a run in turn."""

    schedule: Schedule
    results: tuple[TurnResult, ...]
    """In the order of the trainings, with the same number of blocks for all that are `ok`."""


def fit_at_once(devices: Sequence[DeviceInfo], device_bytes: Sequence[int | None]) -> bool:
    """Returns whether the devices surely hold all trainings at once, next to their other users.

    `device_bytes` is what each needs of a device, and None where that is not known.
    """
    needed_bytes = 0
    for of_training in device_bytes:
        if of_training is None:
            return False
        needed_bytes += of_training
    if devices[0].type == "cpu":
        free_bytes = available_bytes()
        needed_bytes = len(devices) * (needed_bytes + len(device_bytes) * _HOST_BYTES)
        return free_bytes is not None and needed_bytes <= _LARGEST_SHARE * free_bytes
    for device in devices:
        if device.uuid_of_nvml is None or device.compute_mode != "default":
            return False  # memory in use, or the processes that may use it, are not known
        free_bytes = device.total_memory_bytes - open_device(device.uuid_of_nvml).used_bytes()
        if needed_bytes > _LARGEST_SHARE * free_bytes:
            return False
    return True


T = TypeVar("T")


class Call(Protocol):
    """Starts the process of a training, as `LocalExecutor.call` does."""

    def __call__(
        self, task: TrainInTurn, *, log_name: str, limits: TimeLimits
    ) -> Future[FinishedTrial]: ...


def time_in_turn(
    run: RunInTurn,
    *,
    call: Call,
    cancel: Callable[[Future[FinishedTrial]], None],
    should_stop: Callable[[], bool],
) -> TimedInTurn:
    """Times the trainings of a run, each with a process of its own.

    Each gets `rounds` blocks, or fewer: no training takes more steps than the workload has, and no
    round begins after the run's `seconds` but for the least that say something. What
    fails has its outcome, and the others are measured; where the partner fails, nothing is.

    Trainings that ran out of memory next to each other are all timed again in blocks.

    Raises TrialLost where the machine, and no configuration, ended a training, and Stopped once
    `should_stop` returns true. All processes have then ended.
    """

    assert len(run.trainings) > 1, "a speed is compared with that of another training"

    ends = time.monotonic() + run.seconds

    def timed(schedule: Schedule) -> TimedInTurn:
        with _Processes(
            run, call=call, cancel=cancel, should_stop=should_stop, ends=ends
        ) as processes:
            if schedule == "in turn":
                processes.in_turn(run.rounds)
            else:
                processes.in_blocks(run.rounds)
            return TimedInTurn(schedule=schedule, results=processes.results())

    if not fit_at_once(run.devices, run.device_bytes):
        return timed("in blocks")
    at_once = timed("in turn")
    if any(result.outcome == "out_of_memory" for result in at_once.results):
        return timed("in blocks")  # it may have been for what the others held
    return at_once


@dataclass(kw_only=True)
class _Training:
    """One training of the run and what is known of it."""

    number: int
    config: TrainingConfig
    blocks: list[list[TimedBlock]] = field(default_factory=list)
    """Of each of its processes."""
    failure: Measurement | None = None
    """Its outcome, where that is not `ok`."""
    process: Future[FinishedTrial] | None = None
    """Its process; None before it was started and after it has ended."""
    connection: Connection | None = None


class _Processes:
    """Starts the trainings of a run and grants their turns.

    The methods return when nothing is left to measure, and raise as `time_in_turn` does. Use it as
    a context manager, which ends all processes.
    """

    def __init__(
        self,
        run: RunInTurn,
        *,
        call: Call,
        cancel: Callable[[Future[FinishedTrial]], None],
        should_stop: Callable[[], bool],
        ends: float,
    ) -> None:
        self._run = run
        self._ends = ends
        self._trainings = [
            _Training(number=number, config=training.config)
            for number, training in enumerate(run.trainings)
        ]
        workload = run.trainings[0].workload
        self._steps_to_time = workload.steps - workload.warmup_steps
        self._draw = random.Random(run.seed)
        self._longest_seconds = run.limits.trial_seconds + _SECONDS_BEYOND_LIMIT
        self._call = call
        self._cancel = cancel
        self._should_stop = should_stop
        self._folder = _folder_of_socket()
        self._listener = socket.socket(socket.AF_UNIX)
        self._address = str(self._folder / "turns")
        self._listener.bind(self._address)
        self._listener.listen()
        self._listener.settimeout(_POLL_SECONDS)

    # -- the two schedules -------------------------------------------------------------------------

    def in_turn(self, rounds: int) -> None:
        rounds = min(rounds, self._steps_to_time)
        step_seconds = []
        for training in self._trainings:
            seconds = self._begin(training)
            if seconds is not None:
                step_seconds.append(seconds)
            if not self._may_compare:
                return
        steps = self._steps_of_turn(min(step_seconds), turns=rounds)
        for done in range(rounds):
            if done >= LEAST_ROUNDS and time.monotonic() > self._ends:
                break
            for training in self._drawn_order():
                has_ended = not self._take_turn(training, steps=steps)
                if not self._may_compare or (has_ended and training.failure is None):
                    return
        for training in self._trainings:
            self._end(training)

    def in_blocks(self, rounds: int) -> None:
        turns = min(math.ceil(rounds / SHORT_TRAININGS), self._steps_to_time)
        steps = None
        for done in range(SHORT_TRAININGS):
            if done >= SHORT_TRAININGS // 2 and time.monotonic() > self._ends:
                return
            for training in self._drawn_order():
                seconds = self._begin(training)
                if seconds is not None:
                    if steps is None:
                        steps = self._steps_of_turn(seconds, turns=turns)
                    for _ in range(turns):
                        if not self._take_turn(training, steps=steps):
                            break
                    self._end(training)
                if not self._may_compare:
                    return

    def _steps_of_turn(self, step_seconds: float, *, turns: int) -> int:
        """Returns the steps of a turn, the same for all trainings, whose fastest step is given."""
        return max(1, min(math.ceil(_TURN_SECONDS / step_seconds), self._steps_to_time // turns))

    def _drawn_order(self) -> Iterator[_Training]:
        order = list(self._trainings)
        self._draw.shuffle(order)
        return (training for training in order if training.failure is None)

    @property
    def _may_compare(self) -> bool:
        """Whether the partner, and a training to compare with it, have not failed."""
        partner, *others = self._trainings
        return partner.failure is None and any(other.failure is None for other in others)

    # -- one training ------------------------------------------------------------------------------

    def _begin(self, training: _Training) -> float | None:
        """Starts a training and waits until it has warmed up.

        Returns about what a step takes, in seconds; None where the training has failed.
        """
        request = self._run.trainings[training.number]
        training.process = self._call(
            TrainInTurn(training=request, address=self._address),
            log_name=f"{self._run.log_name}-{training.number}",
            limits=self._run.limits,
        )
        training.blocks.append([])
        until = self._until()
        while not training.process.done():
            self._check_stop()
            try:
                connected, _ = self._listener.accept()
            except TimeoutError:
                if time.monotonic() > until:
                    self._give_up(training, self._timeout())
                    return None
                continue
            connected.settimeout(_POLL_SECONDS)
            training.connection = Connection(connected)
            return self._receive(training, step_seconds_of)
        self._note_end(training)
        return None

    def _take_turn(self, training: _Training, *, steps: int) -> bool:
        """Lets a training take its steps; returns False where it has ended instead."""
        self._check_stop()
        assert training.connection is not None
        training.connection.send({"steps": steps})
        block = self._receive(training, block_of)
        if block is None:
            return False
        seconds, tokens = block
        training.blocks[-1].append(TimedBlock(seconds=seconds, tokens=tokens))
        return True

    def _end(self, training: _Training) -> None:
        """Ends a training and waits for the end of its process."""
        if training.connection is not None:
            training.connection.send({"steps": 0})
            self._note_end(training)

    def _receive(self, training: _Training, read: Callable[[dict[str, Any]], T]) -> T | None:
        """Waits for the message of a training and returns what `read` does.

        Returns None where the training has ended instead, or had to be ended.
        """
        assert training.connection is not None
        assert training.process is not None
        until = self._until()
        while True:
            try:
                message = training.connection.receive()
                if message is None:
                    break
                return read(message)
            except TimeoutError:
                self._check_stop()
                if training.process.done():
                    break
                if time.monotonic() > until:
                    self._give_up(training, self._timeout())
                    return None
            except MalformedMessage as error:
                text = f"its process sent no valid message about its turn: {error}"
                self._give_up(training, Measurement(outcome="crashed", message=text))
                return None
        self._note_end(training)
        return None

    def _note_end(self, training: _Training) -> None:
        """Waits for the end of a training's process and notes how it ended.

        Raises the error with which it ended.
        """
        assert training.process is not None
        until = self._until()
        while not training.process.done():
            self._check_stop()
            if time.monotonic() > until:
                self._give_up(training, self._timeout())
                return
            wait([training.process], timeout=_POLL_SECONDS)
        ending = training.process.result().measurement
        if ending.outcome != "ok":
            training.failure = ending
        self._release(training)

    def _give_up(self, training: _Training, ending: Measurement) -> None:
        """Ends a training that does not take part as it should; raises the error that ends it."""
        assert training.process is not None
        self._cancel(training.process)
        while not training.process.done():
            self._check_stop()
            wait([training.process], timeout=_POLL_SECONDS)
        training.process.result()
        training.failure = ending
        self._release(training)

    def _until(self) -> float:
        """Returns by when a training that is waited for has to answer."""
        return time.monotonic() + self._longest_seconds

    def _timeout(self) -> Measurement:
        text = f"did not take its turn within {self._longest_seconds:g} s"
        return Measurement(outcome="timeout", message=text)

    def _check_stop(self) -> None:
        if self._should_stop():
            raise Stopped("the search was stopped", hint="the same command begins again")

    # -- results and end ---------------------------------------------------------------------------

    def results(self) -> tuple[TurnResult, ...]:
        """Returns the result of each training, with the rounds in which all have a block."""
        complete = [training for training in self._trainings if training.failure is None]
        return tuple(
            self._result(training, blocks=_common_blocks(training, complete))
            for training in self._trainings
        )

    def _result(self, training: _Training, *, blocks: tuple[TimedBlock, ...]) -> TurnResult:
        partner = self._trainings[0]
        if training.failure is not None:
            return TurnResult(
                config=training.config,
                outcome=training.failure.outcome,
                message=training.failure.message,
            )
        if partner.failure is not None:
            message = f"not measured, because its partner ended as {partner.failure.outcome}"
            return TurnResult(config=training.config, outcome="interrupted", message=message)
        return TurnResult(config=training.config, outcome="ok", blocks=blocks)

    def _release(self, training: _Training) -> None:
        if training.connection is not None:
            training.connection.close()
        training.connection = None
        training.process = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        processes = []
        for training in self._trainings:
            if training.process is not None:
                self._cancel(training.process)
                processes.append(training.process)
            self._release(training)
        wait(processes, timeout=_SECONDS_TO_END)
        self._listener.close()
        shutil.rmtree(self._folder, ignore_errors=True)


def _common_blocks(training: _Training, complete: Sequence[_Training]) -> tuple[TimedBlock, ...]:
    """Returns the blocks of a training, without those that one of `complete` does not have.

    A script that ends early has fewer.
    """
    blocks: list[TimedBlock] = []
    for number, of_process in enumerate(training.blocks):
        counts = [len(other.blocks[number]) for other in complete if number < len(other.blocks)]
        blocks += of_process[: min(counts, default=0)]
    return tuple(blocks)


def _folder_of_socket() -> Path:
    """Creates a folder that only this user can enter, with a short name."""
    folder = Path(tempfile.mkdtemp(prefix="autotune-"))
    if len(os.fsencode(folder)) <= _LONGEST_FOLDER_NAME:
        return folder
    folder.rmdir()
    return Path(tempfile.mkdtemp(prefix="autotune-", dir="/tmp"))
