"""Replays search strategies on the recorded table: share of the full front by share of its cost.

    OMP_NUM_THREADS=1 python studies/search_efficiency/replay.py \\
        > studies/search_efficiency/replay.json
    ... replay.py --seeds 2 --only ehvi,random     # for a quick trial

autotune's samplers run through the real study code, with the table in place of the training
(`table.py`). The plain Optuna samplers run the objective that Optuna's documentation of constraints
leads to, on the same legal space, with every trial trained to its end, and repeated suggestions
answered from memory. Prints a JSON object: for each cap, strategy and seed the steps of the
hypervolume over cost and trials.
"""

import argparse
import json
import os
import random
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import optuna

from autotune.errors import Stopped
from autotune.execution.trial_options import TrialOptions
from autotune.spec.config import TrainingConfig
from autotune.spec.search_space import LegalSpace
from autotune.spec.space_file import load_space
from autotune.storage.store import StudyStore
from autotune.study.events import Converged, Event, TrialEnded
from autotune.study.prediction.prediction_cache import PredictionCache
from autotune.study.running.loop import StudySession
from autotune.study.running.running_study import RunningStudy
from autotune.study.sampler.distributions import as_parameters, decide, decide_static
from autotune.study.sampler.ehvi import Point, not_dominated
from autotune.study.workers.coordinator import Coordinator
from studies.search_efficiency.stand_in import training_of
from studies.search_efficiency.table import ReplayExecutor, Table

CAPS = {"loose": 1.0, "middle": 0.5, "tight": 0.05}
"""The cap fits this share of the table's configurations."""
MORE_CAPS = {"75 %": 0.75, "35 %": 0.35, "25 %": 0.25, "12 %": 0.12}
"""Caps at which only the default sampler is asked how many of its trainings are over them."""
AT_MORE_CAPS = ("ehvi", "until converged")
OURS = ("ehvi", "tpe", "nsga2", "random")
WITHOUT = "ehvi without "
ABLATIONS = ("predictions", "sharing", "first configurations")
EARLY_ENDS = WITHOUT + "early ends"
"""Replayed with all seeds: what noise ends wrongly is rare."""
MOST_TRIALS = 120
MOST_SUGGESTIONS = 300
"""Of plain Optuna, repeated ones included."""
GP_TRIALS = 50
FEWER_SEEDS = {
    "recipe": 1,
    "300 trials": 1,
    "optuna GP": 3,
    **dict.fromkeys(("tpe", "nsga2", "random", "optuna TPE multivariate group"), 5),
    **dict.fromkeys((WITHOUT + part for part in ABLATIONS), 5),
}
"""Plain Optuna's GP takes seconds a suggestion with three objectives and a constraint."""
TRIALS_OF_A_RUN = ("records", "confirmations")
ENOUGH = 0.995
"""A run ends once it has reached so much of the hypervolume."""


@dataclass(kw_only=True)
class Progress:
    """Hypervolume so far, relative to that of the whole table under the cap, whenever it grew."""

    table: Table
    cap_bytes: int
    points: list[Point] = field(default_factory=list)
    steps: list[tuple[float, int, float]] = field(default_factory=list)
    """(seconds, trials, relative hypervolume)"""

    @property
    def reached(self) -> float:
        return self.steps[-1][2] if self.steps else 0.0

    def note(self, config: TrainingConfig, *, seconds: float, trials: int) -> None:
        point = self.table.point_of(config)
        if point is None or point.memory > self.cap_bytes:
            return
        self.points = not_dominated([*self.points, point])
        if point not in self.points:
            return
        share = self.table.hypervolume_of(self.points, cap_bytes=self.cap_bytes)
        if share > self.reached:
            self.steps.append((seconds, trials, share))


@cache
def the_table(name: str = "gpt") -> Table:
    return Table.read(name)


def cap_of(name: str) -> int:
    return the_table().cap_bytes({**CAPS, **MORE_CAPS}[name])


# -- strategies ------------------------------------------------------------------------------------


def run_ours(
    cap_bytes: int,
    *,
    sampler: str,
    seed: int,
    table: Table | None = None,
    most: int = MOST_TRIALS,
    enough: float = ENOUGH,
    deadline: float | None = None,
    without: str = "",
    noise: float = 0.0,
    **options: Any,
) -> dict[str, Any]:
    """A study of ours as it is, or `without` one of what it does to waste nothing.

    Returns what it cost and found, and with it the `records` and `confirmations`.
    """
    table = table or the_table()
    definition = table.definition(cap_bytes=cap_bytes, sampler=sampler, seed=seed)
    if without == "first configurations":
        definition = replace(definition, space=replace(definition.space, configurations=()))
    executor = ReplayExecutor(table, seed=seed, ends_early=without != "early ends", noise=noise)
    progress = Progress(table=table, cap_bytes=cap_bytes)
    trials, converged_at = 0, None
    ended_at = [0.0]

    def listen(event: Event) -> None:
        nonlocal trials, converged_at
        if isinstance(event, Converged):
            converged_at = executor.seconds, trials, progress.reached
        if isinstance(event, TrialEnded):
            trials += 1
            ended_at.append(executor.seconds)
            if event.record.outcome == "ok":
                progress.note(event.record.config, seconds=executor.seconds, trials=trials)

    in_memory = "/dev/shm" if os.path.isdir("/dev/shm") else None
    with tempfile.TemporaryDirectory(dir=in_memory) as folder, ExitStack() as stack:
        store = StudyStore(f"sqlite:///{folder}/replay.db", create=True)
        store.create_study(definition, trials_wanted=most)
        session = StudySession(
            RunningStudy(
                definition=definition,
                shared=stack.enter_context(
                    Coordinator(definition, store=store, folder=Path(folder), listener=listen)
                ),
                prediction_cache=PredictionCache(
                    definition,
                    store=store,
                    predict=None if without == "predictions" else executor.predict,
                ),
                folder=Path(folder),
                listener=listen,
                trial_options=TrialOptions(
                    trial_time_limit_seconds=600.0, full_trainings=without == "sharing"
                ),
                clock=executor.clock,
            ),
            executor=executor,
            should_stop=lambda: progress.reached >= enough,
            **options,
        )
        with suppress(Stopped):
            session.run(trials_wanted=most, deadline=deadline)
        records = store.trials(definition.name)
        confirmations = store.confirmations(definition.name)
        store.close()
    return {
        "steps": progress.steps,
        "seconds": executor.seconds,
        "trials": trials,
        "ended_at": ended_at,
        "converged_at": converged_at,
        "trainings": executor.trainings,
        "over_cap": executor.over_cap,
        "ended_early": executor.ended_early,
        "ended_wrongly": executor.ended_wrongly,
        "seconds_by_part": executor.seconds_by_part,
        "seconds_in_sampler": session.seconds_in_sampler,
        "records": records,
        "confirmations": confirmations,
    }


def run_plain(
    cap_bytes: int,
    *,
    make_sampler: Callable[[int], optuna.samplers.BaseSampler],
    seed: int,
    most: int,
    is_fixed: bool,
    table: Table | None = None,
    noise: float = 0.0,
    begins_as_ours: bool = False,
) -> dict[str, Any]:
    """Plain Optuna: three objectives, the cap as a constraint, nothing known before a training.

    `begins_as_ours`: the space's first configurations are tried first.
    """
    table = table or the_table()
    definition = table.definition(cap_bytes=cap_bytes, seed=seed)
    legal = definition.legal_space()
    executor, progress = (
        ReplayExecutor(table, seed=seed, noise=noise),
        Progress(table=table, cap_bytes=cap_bytes),
    )
    known: dict[str, tuple[tuple[float, float, float], float]] = {}
    # Optuna's samplers take a space that branches as it comes; only the GP models nothing but a
    # fixed one.
    decided = decide_static if is_fixed else decide

    def train(config: TrainingConfig) -> tuple[tuple[float, float, float], float]:
        measured = executor.train(training_of(definition, config)).measurement
        peak = float(measured.peak_memory_bytes or 0)
        # What an out-of-memory trial did not measure is told as the worst that was seen.
        speeds = [values[1] for values, _ in known.values()] or [1.0]
        perplexities = [values[2] for values, _ in known.values()] or [
            float(table.workload.vocab_size)
        ]
        speed = measured.tokens_per_second or min(speeds)
        return (peak, speed, measured.perplexity or max(perplexities)), peak / cap_bytes - 1

    study = optuna.create_study(
        directions=["minimize", "maximize", "minimize"], sampler=make_sampler(seed)
    )
    if begins_as_ours:
        for config in legal.named.values():
            parameters, _ = as_parameters(legal, config)
            study.enqueue_trial(parameters)
    in_sampler = 0.0
    for _ in range(most):
        began = time.perf_counter()
        trial = study.ask()
        config = decided(legal, trial.suggest_categorical)
        in_sampler += time.perf_counter() - began
        if config.fingerprint not in known:
            known[config.fingerprint] = train(config)
            progress.note(config, seconds=executor.seconds, trials=len(known))
        values, over = known[config.fingerprint]
        began = time.perf_counter()
        trial.set_constraint("memory", over)
        study.tell(trial, values)
        in_sampler += time.perf_counter() - began
        if progress.reached >= ENOUGH:
            break
    return {
        "steps": progress.steps,
        "seconds": executor.seconds,
        "trials": len(known),
        "trainings": executor.trainings,
        "over_cap": executor.over_cap,
        "seconds_by_part": executor.seconds_by_part,
        "seconds_in_sampler": in_sampler,
    }


def run_recipe(cap_bytes: int) -> dict[str, Any]:
    """Trains the rows of the published table in order, those that the table of this study has."""
    table = the_table()
    definition = table.definition(cap_bytes=cap_bytes)
    executor, progress = ReplayExecutor(table), Progress(table=table, cap_bytes=cap_bytes)
    rows = list(recipe(definition.legal_space()))
    for count, config in enumerate(rows, start=1):
        executor.train(training_of(definition, config))
        progress.note(config, seconds=executor.seconds, trials=count)
    return {
        "steps": progress.steps,
        "seconds": executor.seconds,
        "trials": len(rows),
        "trainings": executor.trainings,
        "over_cap": executor.over_cap,
        "seconds_by_part": executor.seconds_by_part,
        "seconds_in_sampler": 0.0,
    }


def recipe(legal: LegalSpace) -> Iterator[TrainingConfig]:
    """Yields the rows with the simplest update and the nearest budget in the table.

    The optimizer of the published rows has no batched update.
    """
    table = the_table()
    for row in load_space("peak_memory").configurations:
        chosen = {**row, "micro_batch_size": legal.at.global_batch, "optimizer": "adamw"}
        chosen.pop("name")
        chosen.setdefault("optimizer_fusion", "none" if len(chosen) == 2 else "kernel")
        if "memory_budget" in chosen:
            chosen["memory_budget"] = round(float(chosen["memory_budget"]), 1) or 0.1
        for scope in (chosen.get("compile", "none"), "block"):
            config = TrainingConfig(
                **{**chosen, "compile": scope if "compile" in chosen else "none"}
            )
            if config.fingerprint in table.trainings:
                yield config
                break


def _quietly(
    make: Callable[..., optuna.samplers.BaseSampler], **options: Any
) -> optuna.samplers.BaseSampler:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return make(**options)


PLAIN: dict[str, Callable[[int], optuna.samplers.BaseSampler]] = {
    "optuna random": lambda seed: optuna.samplers.RandomSampler(seed=seed),
    "optuna TPE": lambda seed: optuna.samplers.TPESampler(seed=seed),
    "optuna TPE multivariate group": lambda seed: _quietly(
        optuna.samplers.TPESampler, seed=seed, multivariate=True, group=True
    ),
    "optuna NSGA-II": lambda seed: optuna.samplers.NSGAIISampler(seed=seed),
    "optuna GP": lambda seed: _quietly(optuna.samplers.GPSampler, seed=seed),
}


def run(job: tuple[str, str, int]) -> dict[str, Any]:
    strategy, cap, seed = job
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    warnings.simplefilter("ignore")
    cap_bytes = cap_of(cap)
    if strategy in PLAIN:
        most = GP_TRIALS if strategy == "optuna GP" else MOST_SUGGESTIONS
        found = run_plain(
            cap_bytes,
            make_sampler=PLAIN[strategy],
            seed=seed,
            most=most,
            is_fixed=strategy == "optuna GP",
        )
    elif strategy.startswith(WITHOUT):
        found = run_ours(
            cap_bytes, sampler="ehvi", seed=seed, without=strategy.removeprefix(WITHOUT)
        )
    elif strategy == "until converged":
        found = run_ours(cap_bytes, sampler="ehvi", seed=seed, enough=2.0, until_converged=True)
    elif strategy == "300 trials":
        found = run_ours(cap_bytes, sampler="ehvi", seed=seed, most=300, enough=2.0)
    elif strategy == "recipe":
        found = run_recipe(cap_bytes)
    else:
        found = run_ours(cap_bytes, sampler=strategy, seed=seed)
    return {"strategy": strategy, "cap": cap, "seed": seed, **costs(found)}


def costs(found: dict[str, Any]) -> dict[str, Any]:
    """Returns what is kept of a run: all but its trials."""
    return {name: value for name, value in found.items() if name not in TRIALS_OF_A_RUN}


def jobs(strategies: list[str], seeds: int) -> Iterator[tuple[str, str, int]]:
    for strategy in strategies:
        for cap in (*CAPS, *MORE_CAPS) if strategy in AT_MORE_CAPS else CAPS:
            limit = min(seeds, FEWER_SEEDS.get(strategy, seeds))
            for seed in range(limit):
                yield strategy, cap, seed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=30)
    parser.add_argument(
        "--only",
        default=",".join(
            [
                *OURS,
                *(WITHOUT + part for part in ABLATIONS),
                EARLY_ENDS,
                "until converged",
                "300 trials",
                *PLAIN,
                "recipe",
            ]
        ),
    )
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    arguments = parser.parse_args()
    todo = list(jobs(arguments.only.split(","), arguments.seeds))
    random.Random(0).shuffle(todo)  # the slow strategies do not all come last
    with ProcessPoolExecutor(arguments.processes) as pool:
        runs = list(pool.map(run, todo))
    said = {
        "configurations": len(the_table().trainings),
        "exhaustive_seconds": the_table().exhaustive_seconds(),
        "caps_bytes": {name: cap_of(name) for name in CAPS},
        "more_caps_bytes": {name: cap_of(name) for name in MORE_CAPS},
        "share_of_configurations": {**CAPS, **MORE_CAPS},
        "runs": sorted(runs, key=lambda one: (one["cap"], one["strategy"], one["seed"])),
    }
    print(json.dumps(rounded(said)))


def rounded(value: Any) -> Any:
    """Returns `value` with all floats at six decimals: half the size of the file."""
    if isinstance(value, float):
        return round(value, 6)
    if isinstance(value, dict):
        return {key: rounded(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(one) for one in value]
    return value


if __name__ == "__main__":
    main()
