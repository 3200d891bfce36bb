"""Measures what one process that drives many devices computes for each trial of a long search.

    OMP_NUM_THREADS=1 python studies/many_devices/scale.py --devices 1000 --trials 10000
    ... scale.py --devices 64 --trials 5000 --filled 4750      # the last 250 of 5,000 trials
    ... scale.py --storage postgresql ...                      # on a server of its own
    ... scale.py --real-time ...                               # timers of 30 seconds
    ... scale.py --profile 40 ...                              # where the time goes

The search is the real one: loop, sampler, coordinator, outbox and database. Its devices are
stand-ins, each of which runs a trial of about 30 seconds at a time. The clock counts the seconds of
the processor that the search computes, and skips those in which it waits: a device that is free
meanwhile idles, as it would in reality. What the stand-ins compute counts nowhere.

The space is the default one, of 21,648 legal configurations, most of which fit the cap. Memory,
speed and predictions are the formula of `tests/building/made_study.py` (each technique
multiplies memory and speed), and every speed has noise.

Prints a JSON object: at each number of trials what the trials before it took, in milliseconds of
the search for each trial, by part; statements to the database for each trial; resident memory; and
the share of the time in which the devices were at work.
"""

import argparse
import cProfile
import heapq
import itertools
import json
import math
import os
import platform
import pstats
import random
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar

import numpy
import optuna
import psutil
import torch
from sqlalchemy import event as sqlalchemy_event

from autotune.errors import Stopped
from autotune.execution.flow import Flow, Pause, wait_for_one
from autotune.execution.trial_options import TrialOptions
from autotune.spec.attempt import FinishedTrial
from autotune.spec.config import TrainingConfig
from autotune.spec.early_stopping import dominated_by
from autotune.spec.parity import ParityTrace
from autotune.spec.prediction import Forecast
from autotune.spec.training_request import TrainingRequest
from autotune.storage.store import StudyStore
from autotune.study.events import Event, TrialEnded
from autotune.study.prediction.prediction_cache import PredictionCache
from autotune.study.running.loop import StudySession
from autotune.study.running.places import Places, ThreadedListener, TrialPlace
from autotune.study.running.running_study import RunningStudy
from autotune.study.workers.coordinator import Coordinator
from studies.search_efficiency.stand_in import StandInExecutor
from tests.building import made_study
from tests.building.postgres import PostgresServer

T = TypeVar("T")

RESULTS = Path(__file__).with_name("scale.json")
TRIAL_SECONDS, PREDICTION_SECONDS = 30.0, 2.0
NOISE_OF_SECONDS, NOISE_OF_SPEED = 0.1, 0.03
"""Standard deviations of the logarithms of a trial's seconds, so that devices do not end all at
once, and of its speed."""
MARKS = (100, 1_000, 5_000, 10_000)
MOST_IN_A_ROW = 200
"""A row is about at most so many trials before its mark."""
PARTS = ("choose", "claim", "store", "refresh", "predictions", "trial")
"""What is timed apart: choosing a configuration; claiming its trial; storing its result, on disk
and in the database; reading what has changed; storing predictions; what else the flows of the
places compute. The rest, which is what the main loop computes between them, is "other"."""


class Clock:
    """The seconds of a search: those that it computes are real, those that it waits are skipped.

    They are seconds of the processor, as other programs on the machine would disturb others.
    """

    def __init__(self) -> None:
        self._began = time.process_time()
        self._skipped = 0.0
        self._in_stand_ins = 0.0

    def __call__(self) -> float:
        return self.computed + self._skipped

    @property
    def computed(self) -> float:
        """Processor seconds outside the stand-ins."""
        return time.process_time() - self._began - self._in_stand_ins

    def skip_to(self, moment: float) -> None:
        self._skipped += max(0.0, moment - self())

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Let no time pass while a stand-in computes."""
        began = time.process_time()
        try:
            yield
        finally:
            self._in_stand_ins += time.process_time() - began


@dataclass(kw_only=True)
class Parts:
    """Seconds of the search by part: one inside another counts as itself only."""

    clock: Clock
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    _inside: list[float] = field(default_factory=lambda: [0.0])
    """Seconds of the parts inside each part that is timed now."""

    def timed(self, part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(call)
        def timed_call(*arguments: Any, **options: Any) -> Any:
            began = self.clock.computed
            self._inside.append(0.0)
            try:
                return call(*arguments, **options)
            finally:
                took = self.clock.computed - began
                self.seconds[part] += took - self._inside.pop()
                self._inside[-1] += took

        return timed_call


class RealClock(Clock):
    """Real seconds; what is computed is the processor time of all threads."""

    def __call__(self) -> float:
        return time.monotonic()

    @property
    def computed(self) -> float:
        return time.process_time()

    @contextmanager
    def stopped(self) -> Iterator[None]:
        yield


class Timers:
    """Futures that get their results after some seconds, which the clock skips."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._due: list[tuple[float, int, Future[Any], Any]] = []
        self._asked = 0.0
        self._order = itertools.count()

    def after(self, seconds: float, result: T) -> Future[T]:
        future: Future[T] = Future()
        self._asked += seconds
        heapq.heappush(self._due, (self._clock() + seconds, next(self._order), future, result))
        return future

    def seconds_waited(self) -> float:
        """Summed over the futures."""
        now = self._clock()
        return self._asked - sum(max(0.0, due - now) for due, *_ in self._due)

    def wait_for_one(self, futures: Collection[Future[Any]], seconds: float) -> None:
        """Skips the time until the first future is done; none where `seconds` is 0."""
        with self._clock.stopped():
            ends = [due for due, *_ in self._due[:1]]
            ends += [future.until for future in futures if isinstance(future, Pause)]
            waits = seconds > 0 and not any(future.done() for future in futures)
        if waits:
            self._clock.skip_to(min(ends, default=self._clock() + seconds))
        with self._clock.stopped():
            self._settle()

    def _settle(self) -> None:
        """Gives the futures that are due their results."""
        while self._due and self._due[0][0] <= self._clock():
            _, _, future, result = heapq.heappop(self._due)
            if future.set_running_or_notify_cancel():
                future.set_result(result)


class RealTimers(Timers):
    """The same in real time: one thread for all."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock)
        self._changed = threading.Condition()
        threading.Thread(target=self._run, daemon=True).start()

    def after(self, seconds: float, result: T) -> Future[T]:
        with self._changed:
            self._changed.notify()
            return super().after(seconds, result)

    def seconds_waited(self) -> float:
        with self._changed:
            return super().seconds_waited()

    def wait_for_one(self, futures: Collection[Future[Any]], seconds: float) -> None:
        wait_for_one(futures, seconds)

    def _run(self) -> None:
        with self._changed:
            while True:
                self._settle()
                self._changed.wait(self._due[0][0] - self._clock() if self._due else None)


class StandIn(StandInExecutor):
    """A device: trials of TRIAL_SECONDS that measure what the formula says."""

    def __init__(self, clock: Clock, timers: Timers, draw: random.Random) -> None:
        self.clock = clock
        self.takes_time = self._work
        self._timers = timers
        self._draw = draw

    def _work(self, _: object, work: Callable[[], T], *, rests: bool = False) -> Flow[T]:
        with self.clock.stopped():
            result = work()
        future = self._timers.after(_seconds_of(result), result)
        try:
            return (yield future)
        except BaseException:
            future.cancel()
            raise

    def forecast(self, config: TrainingConfig) -> Forecast:
        return made_study.forecast(config)

    def trace(self, config: TrainingConfig) -> ParityTrace:
        return ParityTrace(
            losses=(3.0, 2.9, 2.8),
            gradient_norms={},
            gradient_projections={},
            draws_random_numbers=False,
        )

    def train(self, training: TrainingRequest) -> FinishedTrial:
        seconds = TRIAL_SECONDS * math.exp(self._draw.gauss(0.0, NOISE_OF_SECONDS))
        measured = made_study.measure(training.config)
        if measured.is_within_cap and measured.tokens_per_second and measured.peak_memory_bytes:
            speed = measured.tokens_per_second * math.exp(self._draw.gauss(0, NOISE_OF_SPEED))
            is_dominated = dominated_by(
                training.pruning_bounds,
                peak_memory_bytes=measured.peak_memory_bytes,
                tokens_per_second=speed,
            )
            measured = replace(
                measured,
                outcome="dominated" if is_dominated else "ok",
                tokens_per_second=speed,
            )
        return FinishedTrial(measurement=measured, seconds=seconds)


def _seconds_of(result: object) -> float:
    """Returns how long a device works for a result."""
    match result:
        case FinishedTrial():
            return result.seconds
        case Forecast():
            return PREDICTION_SECONDS
    return 0.0


def place_of(stand_in: StandIn, number: int) -> TrialPlace:
    executor: Any = stand_in
    return TrialPlace(
        executor=executor,
        device=replace(made_study.definition("scale").device, device=f"cuda:{number}"),
        name=f"device {number}",
        predict=stand_in.predict,
        clock=stand_in.clock,
    )


@contextmanager
def storage_url(kind: str) -> Iterator[tuple[str, Path]]:
    """Yield the URL of an empty database, on disk and synced as in production, and a folder."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        url = f"sqlite:///{folder}/scale.db"
        if kind == "postgresql":
            url = stack.enter_context(PostgresServer(durable=True)).create_database("scale")
        yield url, Path(folder)


def run(
    *,
    devices: int,
    trials: int,
    filled: int,
    storage: str,
    seed: int,
    real_time: bool = False,
    profiled: int = 0,
) -> dict[str, Any]:
    """Search from `filled` trials, which are written and not run, until `trials` have a result.

    The devices are busy until then: more trials than that are begun.
    """
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    warnings.simplefilter("ignore")
    definition = replace(made_study.definition("scale"), seed=seed)
    made = (
        made_study.make(definition, trials=filled)
        if filled
        else made_study.Made(records=(), forecasts=())
    )
    profile = cProfile.Profile()
    with storage_url(storage) as (url, folder), ExitStack() as stack:
        store = StudyStore(url, create=True)
        stack.callback(store.close)
        trials_wanted = trials + devices
        store.create_study(
            definition,
            trials_wanted=trials_wanted,
            records=made.records,
            forecasts=made.forecasts,
        )
        clock = RealClock() if real_time else Clock()
        marks = sorted({*(mark for mark in MARKS if filled < mark < trials), trials})
        timers = RealTimers(clock) if real_time else Timers(clock)
        watch = _Watch(store, clock, timers, devices=devices, filled=filled, marks=marks)
        listener = ThreadedListener(watch)
        draw = random.Random(seed)
        places = stack.enter_context(
            Places(
                [place_of(StandIn(clock, timers, draw), number) for number in range(devices)],
                listener=listener,
                wait_for_one=timers.wait_for_one,
            )
        )
        shared = stack.enter_context(
            Coordinator(definition, store=store, folder=folder, listener=listener)
        )
        first = places.first.executor
        cache = PredictionCache(definition, store=store, predict=places.first.predict)
        session = StudySession(
            RunningStudy(
                definition=definition,
                shared=shared,
                prediction_cache=cache,
                folder=folder,
                listener=listener,
                trial_options=TrialOptions(trial_time_limit_seconds=600.0),
                clock=clock,
            ),
            executor=first,
            should_stop=lambda: watch.ended >= trials,
            repeats_baseline=True,
            places=places,
        )
        watch.time_parts(session, shared, cache)
        if profiled:
            profile.enable()
        with suppress(Stopped):
            session.run(trials_wanted=trials_wanted, deadline=None)
        profile.disable()
    if profiled:
        pstats.Stats(profile, stream=sys.stderr).sort_stats("tottime").print_stats(profiled)
        pstats.Stats(profile, stream=sys.stderr).sort_stats("cumtime").print_stats(profiled)
    return {
        "devices": devices,
        "storage": storage,
        "real_time": real_time,
        "filled": filled,
        "seed": seed,
        "trials": watch.ended,
        "rows": watch.rows,
    }


@dataclass(frozen=True, kw_only=True)
class _Moment:
    """What has been counted until a moment."""

    ended: int
    seconds: float
    computed: float
    at_work: float
    statements: int
    parts: dict[str, float]


class _Watch:
    """Listens to a search, and makes a row at each mark."""

    def __init__(
        self,
        store: StudyStore,
        clock: Clock,
        timers: Timers,
        *,
        devices: int,
        filled: int,
        marks: Sequence[int],
    ) -> None:
        self._clock = clock
        self._timers = timers
        self._devices = devices
        self._parts = Parts(clock=clock)
        self._statements = 0
        self._first = filled
        self._marks = marks
        self.ended = filled
        self.rows: list[dict[str, Any]] = []
        sqlalchemy_event.listen(store._database.engine, "before_cursor_execute", self._count)
        self._since = self._now()

    def _count(self, *_: Any) -> None:
        self._statements += 1

    def time_parts(
        self, session: StudySession, shared: Coordinator, cache: PredictionCache
    ) -> None:
        """Put a timer around each part."""
        timed: Any = [
            (session, "_choose", "choose"),
            (shared, "claim", "claim"),
            (shared, "store_result", "store"),
            (shared, "refresh", "refresh"),
            (cache, "add", "predictions"),
            (session._flows, "_resume", "trial"),
        ]
        for holder, name, part in timed:
            setattr(holder, name, self._parts.timed(part, getattr(holder, name)))

    def __call__(self, event: Event) -> None:
        if not isinstance(event, TrialEnded):
            return
        self.ended += 1
        for mark in self._marks:
            row_begins = max(self._first, mark - min(MOST_IN_A_ROW, mark // 2))
            if self.ended == row_begins:
                self._since = self._now()
            if self.ended == mark:
                self._add_row()

    def _now(self) -> _Moment:
        return _Moment(
            ended=self.ended,
            seconds=self._clock(),
            computed=self._clock.computed,
            at_work=self._timers.seconds_waited(),
            statements=self._statements,
            parts=dict(self._parts.seconds),
        )

    def _add_row(self) -> None:
        since, now = self._since, self._now()
        count = now.ended - since.ended
        parts = {part: now.parts[part] - since.parts[part] for part in PARTS}
        computed = now.computed - since.computed
        parts["other"] = computed - sum(parts.values())
        elapsed = now.seconds - since.seconds
        row = {
            "trials": now.ended,
            "of_these_last": count,
            "driver_milliseconds_a_trial": 1000 * computed / count,
            "by_part": {part: 1000 * seconds / count for part, seconds in parts.items()},
            "share_computing": computed / elapsed,
            "trials_a_second": count / elapsed,
            "share_at_work": (now.at_work - since.at_work) / (self._devices * elapsed),
            "statements_a_trial": (now.statements - since.statements) / count,
            "resident_mib": psutil.Process().memory_info().rss / 2**20,
        }
        self.rows.append(row)
        print(json.dumps(_rounded(row)), file=sys.stderr, flush=True)


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 3)
    if isinstance(value, dict):
        return {name: _rounded(one) for name, one in value.items()}
    return value


def machine() -> dict[str, Any]:
    """What the numbers were measured with."""
    return {
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "threads_of_numpy": os.environ.get("OMP_NUM_THREADS"),
        "python": platform.python_version(),
        "numpy": numpy.__version__,
        "torch": torch.__version__,
        "optuna": optuna.__version__,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--devices", type=int, default=1000)
    parser.add_argument("--trials", type=int, default=10_000)
    parser.add_argument("--filled", type=int, default=0, help="trials that are written, not run")
    parser.add_argument("--storage", choices=("sqlite", "postgresql"), default="sqlite")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--real-time", action="store_true", help="wait instead of skipping")
    parser.add_argument("--profile", type=int, default=0, help="print so many lines of a profile")
    asked = parser.parse_args()
    found = run(
        devices=asked.devices,
        trials=asked.trials,
        filled=asked.filled,
        storage=asked.storage,
        seed=asked.seed,
        real_time=asked.real_time,
        profiled=asked.profile,
    )
    print(json.dumps({**machine(), **found, "rows": [_rounded(row) for row in found["rows"]]}))


if __name__ == "__main__":
    main()
