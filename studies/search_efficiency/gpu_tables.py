"""Replays searches of the default space on the table of a GPU, in virtual time.

    python -m studies.search_efficiency.gpu_tables --gpu h200 --caps 4,8,16 --seeds 0,1,2,3,4
    python -m studies.search_efficiency.gpu_tables --strategies autotune --redraw 1,2,3

For each cap and time it prints three shares of the table's optimum under that cap: the best speed /
hypervolume / the pick's speed. `README.md` says what the table is and what it assumes.
"""

import argparse
import json
import math
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import optuna

import autotune
from autotune.analysis.front import pareto_front
from autotune.analysis.pick import DEFAULT_PREFERENCES, choose
from autotune.errors import Stopped
from autotune.execution.cpu_shares import MOST_BESIDE
from autotune.execution.trial_options import TrialOptions
from autotune.spec.config import TrainingConfig
from autotune.spec.result import Pick, TrialRecord
from autotune.storage.store import StudyStore
from autotune.study.events import Event, TrialEnded
from autotune.study.prediction.prediction_cache import PredictionCache
from autotune.study.running.loop import StudySession
from autotune.study.running.running_study import RunningStudy
from autotune.study.sampler.distributions import decide
from autotune.study.workers.coordinator import Coordinator
from studies.many_devices.virtual_places import VirtualTime
from studies.search_efficiency.gpu.assumptions import Assumptions, Card
from studies.search_efficiency.gpu.device_table import GIB, DeviceTable
from studies.search_efficiency.gpu.virtual_executor import VirtualExecutor
from studies.search_efficiency.stand_in import training_of

MOST_TRIALS = 600
ENOUGH = 0.93
"""The share of the hypervolume at which several devices are compared with one."""
TRIAL_TIME_LIMIT_SECONDS = 600.0


@dataclass(frozen=True, kw_only=True)
class TableName:
    """Which table a run is on; tables are made once in each process."""

    gpu: str
    perplexities: str = "smooth"
    redraw: int | None = None
    gains: bool = True

    def __str__(self) -> str:
        drawn = "" if self.redraw is None else f", redrawn {self.redraw}"
        return f"{self.gpu}{drawn}{'' if self.gains else ', no gain'}"


@cache
def table_of(name: TableName) -> DeviceTable:
    """Returns the table of a name."""
    assumptions = replace(Assumptions(), gains=name.gains)
    if name.redraw is not None:
        assumptions = assumptions.redrawn(name.redraw)
    return DeviceTable(Card.read(name.gpu), assumptions, perplexities=name.perplexities)


class Run:
    """One run of a strategy, with what it knew at each virtual second."""

    def __init__(
        self,
        table: DeviceTable,
        *,
        cap_bytes: int,
        seed: int,
        until: float,
        devices: int = 1,
        predictions_beside: int = MOST_BESIDE,
    ) -> None:
        self.table = table
        self.cap_bytes = cap_bytes
        self.seed = seed
        self.until = until
        self.predictions_beside = predictions_beside
        self.executors = [VirtualExecutor(table, seed=seed + 97 * k) for k in range(devices)]
        self.executor = self.executors[0]
        self.time: VirtualTime | None = None
        """Of a search, once it has begun."""
        self.ended: list[tuple[float, TrialRecord]] = []
        """Each trial with the second at which it ended."""

    @property
    def seconds(self) -> float:
        return self.executor.seconds if self.time is None else self.time.seconds

    @property
    def is_over(self) -> bool:
        return self.seconds >= self.until

    def train(self, config: TrainingConfig, *, shares_perplexity: bool = False) -> TrialRecord:
        """Train a configuration without a study, as the two references do."""
        definition = self.table.definition(cap_bytes=self.cap_bytes)
        training = training_of(definition, config, shares_perplexity=shares_perplexity)
        finished = self.executor.train(training)
        measured = finished.measurement
        values = vars(measured) | {"perplexity": self.table.objectives(config)[2]}
        record = TrialRecord(**values, number=0, config=config, feasible=measured.outcome == "ok")
        self.ended.append((self.seconds, record))
        return record

    def shares(self, seconds: float) -> tuple[float, float, float]:
        """Returns best speed, hypervolume and the pick's speed at that time, as shares."""
        table, cap_bytes = self.table, self.cap_bytes
        records = [record for ended_at, record in self.ended if ended_at <= seconds]
        trained = [record for record in records if record.outcome in ("ok", "dominated")]
        points = [table.objectives(record.config) for record in trained]
        points = [point for point in points if point[0] <= cap_bytes]
        fastest = table.objectives(table.optimum(cap_bytes))[1]
        pick = _pick_of(records)
        return (
            max((speed for _, speed, _ in points), default=0.0) / fastest,
            table.hypervolume(points, cap_bytes) / table.whole_hypervolume(cap_bytes),
            0.0 if pick is None else table.objectives(pick.config)[1] / fastest,
        )

    def to_enough(self) -> tuple[float, int]:
        """Returns the seconds and the trials until the hypervolume was `ENOUGH` of the whole."""
        table, cap_bytes = self.table, self.cap_bytes
        wanted = ENOUGH * table.whole_hypervolume(cap_bytes)
        points: list[tuple[float, float, float]] = []
        for number, (ended_at, record) in enumerate(self.ended, start=1):
            if record.outcome not in ("ok", "dominated"):
                continue
            point = table.objectives(record.config)
            if point[0] > cap_bytes:
                continue
            points.append(point)
            if table.hypervolume(points, cap_bytes) >= wanted:
                return ended_at, number
        return math.inf, len(self.ended)


def _pick_of(records: Sequence[TrialRecord]) -> TrialRecord | None:
    """Returns what autotune would pick of the records."""
    known = [one for one in records if not one.feasible or one.perplexity is not None]
    numbered = [replace(record, number=number) for number, record in enumerate(known)]
    if not any(record.feasible for record in numbered):
        return None
    front = pareto_front(numbered, tolerance=DEFAULT_PREFERENCES.tolerance)
    pick: Pick | None = choose(numbered, front, baseline=None, preferences=DEFAULT_PREFERENCES)
    return None if pick is None else numbered[pick.number]


# -- strategies ------------------------------------------------------------------------------------


def search(run: Run) -> None:
    """Run autotune's own study, with the table in place of the device."""
    definition = run.table.definition(cap_bytes=run.cap_bytes, seed=run.seed)
    executor: Any = run.executor

    def listen(event: Event) -> None:
        if isinstance(event, TrialEnded):
            run.ended.append((run.seconds, event.record))

    in_memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(dir=in_memory) as name, ExitStack() as stack:
        folder = Path(name)
        store = stack.enter_context(
            closing(StudyStore(f"sqlite:///{folder}/replay.db", create=True))
        )
        store.create_study(definition, trials_wanted=MOST_TRIALS)
        run.time = VirtualTime(
            run.executors,
            seconds_of_cache=executor.seconds_of_cache,
            predictions_beside=run.predictions_beside,
        )
        session = StudySession(
            RunningStudy(
                definition=definition,
                shared=stack.enter_context(
                    Coordinator(definition, store=store, folder=folder, listener=listen)
                ),
                prediction_cache=PredictionCache(definition, store=store, predict=executor.predict),
                folder=folder,
                listener=listen,
                trial_options=TrialOptions(trial_time_limit_seconds=TRIAL_TIME_LIMIT_SECONDS),
                clock=lambda: run.seconds,
            ),
            executor=executor,
            should_stop=lambda: False,
            places=stack.enter_context(run.time.places(definition.device, listener=listen)),
        )
        with suppress(Stopped):
            session.run(trials_wanted=MOST_TRIALS, deadline=run.until)


def human(run: Run) -> None:
    """Work through a sensible person's list; nothing is predicted, and no baseline is measured."""
    classes = set()
    for config in persons_list():
        if config in run.table.row and not run.is_over:
            run.train(config, shares_perplexity=config.numerics_class in classes)
            classes.add(config.numerics_class)


def persons_list() -> Iterator[TrainingConfig]:
    """Yield 16 bit and a compiled whole model first, then what needs less and less memory."""
    for precision in ("bf16-mixed", "bf16-true"):
        plain = TrainingConfig(
            precision=precision,
            compile="model",
            optimizer_fusion="kernel",
        )
        for size in (16, 8, 4):
            yield replace(plain, micro_batch_size=size)
        for size in (16, 8):
            yield replace(plain, checkpointing="selective", micro_batch_size=size)
        for size in (16, 8):
            yield replace(plain, checkpointing="block", micro_batch_size=size)
        eager = replace(plain, compile="none", checkpointing="block")
        yield replace(eager, micro_batch_size=16)
        if precision == "bf16-true":
            eager = replace(eager, loss="chunked", optimizer_fusion="backward")
        yield replace(eager, micro_batch_size=4)
    for size in (16, 8):
        yield TrainingConfig(
            precision="fp8", compile="model", optimizer_fusion="kernel", micro_batch_size=size
        )


def tpe(run: Run) -> None:
    """Run plain Optuna TPE: three objectives, and the cap as a constraint."""
    sampler = optuna.samplers.TPESampler(seed=run.seed, multivariate=True, group=True)
    study = optuna.create_study(directions=["minimize", "maximize", "minimize"], sampler=sampler)
    known: dict[TrainingConfig, tuple[float, float, float]] = {}
    for _ in range(MOST_TRIALS):
        if run.is_over:
            break
        trial = study.ask()
        config = decide(run.table.legal, trial.suggest_categorical)
        if config not in known:
            record = run.train(config)
            slowest = min((speed for _, speed, _ in known.values()), default=1.0)
            known[config] = (
                float(record.device_bytes or 0),
                record.tokens_per_second or slowest,
                record.perplexity or 0.0,
            )
        trial.set_constraint("memory", known[config][0] / run.cap_bytes - 1)
        study.tell(trial, known[config])


STRATEGIES: dict[str, Callable[[Run], None]] = {"autotune": search, "human": human, "tpe": tpe}


# -- the replays -----------------------------------------------------------------------------------

Job = tuple[str, TableName, float, int, tuple[float, ...], int, int]
"""Strategy, table, cap in GiB, seed, the seconds that are looked at, the number of devices, and how
many predictions run beside a trial."""


def replay(job: Job) -> dict[str, Any]:
    """Run a strategy once, and return its shares and all its trials."""
    strategy, name, cap, seed, times, devices, beside = job
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    warnings.simplefilter("ignore")
    began = time.perf_counter()
    run = Run(
        table_of(name),
        cap_bytes=int(cap * GIB),
        seed=seed,
        until=max(times),
        devices=devices,
        predictions_beside=beside,
    )
    STRATEGIES[strategy](run)
    return {
        "strategy": strategy,
        "table": str(name),
        "cap": cap,
        "seed": seed,
        "shares": [run.shares(seconds) for seconds in times],
        "devices": devices,
        "to_enough": run.to_enough(),
        "trials": [
            (round(ended_at, 1), one.config.describe(), one.outcome, one.tokens_per_second)
            for ended_at, one in run.ended
        ],
        "seconds_by_part": dict(run.executor.seconds_by_part),
        "over_cap": run.executor.over_cap,
        "ended_early": run.executor.ended_early,
        "predictions": run.executor.predictions,
        "wall_seconds": time.perf_counter() - began,
    }


def _print_table(name: TableName, caps: Sequence[float]) -> None:
    table = table_of(name)
    print(f"{name}: {table.card.name}, {len(table.configs)} configurations, ", end="")
    print(f"the baseline has {table.baseline_speed:,.0f} tokens/s")
    for cap in caps:
        best = table.optimum(int(cap * GIB))
        share = float((table.device_bytes <= cap * GIB).mean())
        gain = table.objectives(best)[1] / table.baseline_speed
        print(f"{cap:g} GiB: {share:.0%} fit; optimum {gain:.2f} x baseline: {best.describe()}")


def _print_shares(label: str, runs: Sequence[dict[str, Any]], times: Sequence[float]) -> None:
    print(f"{label:24s}", end="")
    for k, seconds in enumerate(times):
        shares = [statistics.median(run["shares"][k][i] for run in runs) for i in range(3)]
        print(f"   {seconds:g} s:", " / ".join(f"{share:.2f}" for share in shares), end="")
    print()


def _enough_text(runs: Sequence[dict[str, Any]]) -> str:
    seconds = statistics.median(run["to_enough"][0] for run in runs)
    trials = statistics.median(run["to_enough"][1] for run in runs)
    return f"    {ENOUGH:.0%} of the hypervolume after {seconds:.0f} s and {trials:.0f} trials"


def _listed(kind: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    return lambda text: [kind(part) for part in text.split(",")]


def main() -> None:
    """Replay every strategy at every cap with every seed, and print medians over seeds."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gpu", default="h200", help="a card of the folder gpu, or a JSON file")
    parser.add_argument("--caps", type=_listed(float), default=[4, 8, 16], help="GiB")
    parser.add_argument("--seeds", type=_listed(int), default=[0, 1])
    parser.add_argument("--times", type=_listed(float), default=[60, 180, 600])
    parser.add_argument("--strategies", type=_listed(str), default=list(STRATEGIES))
    parser.add_argument("--perplexities", choices=("smooth", "chance"), default="smooth")
    parser.add_argument("--redraw", type=_listed(int), default=[None], help="redrawn assumptions")
    parser.add_argument("--no-gain", action="store_true", help="16 bit and compiling bring nothing")
    parser.add_argument("--devices", type=int, default=1, help="of autotune's search")
    parser.add_argument(
        "--beside", type=int, default=MOST_BESIDE, help="predictions at a time beside a trial"
    )
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument(
        "--out", type=Path, help="write every run with its trials to this JSON file"
    )
    arguments = parser.parse_args()
    print(f"autotune {autotune.__version__}")
    names = [
        TableName(
            gpu=arguments.gpu,
            perplexities=arguments.perplexities,
            redraw=redraw,
            gains=not arguments.no_gain,
        )
        for redraw in arguments.redraw
    ]
    for name in names:
        _print_table(name, arguments.caps)
    print("\nbest speed / hypervolume / pick's speed, as shares of the optimum; medians over seeds")
    jobs: list[Job] = [
        (strategy, name, cap, seed, tuple(arguments.times), arguments.devices, arguments.beside)
        for name in names
        for strategy in arguments.strategies
        for cap in arguments.caps
        for seed in arguments.seeds
    ]
    with ProcessPoolExecutor(arguments.processes) as pool:
        rows = list(pool.map(replay, jobs))
    for name in names:
        for strategy in arguments.strategies:
            runs = [row for row in rows if (row["table"], row["strategy"]) == (str(name), strategy)]
            prefix = strategy if len(names) == 1 else f"{name}: {strategy}"
            for cap in arguments.caps:
                of_cap = [run for run in runs if run["cap"] == cap]
                _print_shares(f"{prefix:14s} {cap:3g} GiB", of_cap, arguments.times)
                print(_enough_text(of_cap))
            if len(arguments.caps) > 1:
                _print_shares(f"{prefix:14s} all caps", runs, arguments.times)
    if arguments.out:
        arguments.out.write_text(json.dumps(rows))


if __name__ == "__main__":
    main()
