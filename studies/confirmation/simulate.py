"""Simulates searches on a noisy machine, with and without confirmation, on a recorded table.

    OMP_NUM_THREADS=1 python studies/confirmation/simulate.py       # simulated.json.gz
    python studies/confirmation/simulate.py --summary

Each search is the real one on the table of `studies/search_efficiency`, whose recorded speed times
a drawn error stands for what a trial measures. The confirmation is planned by the real plan; each
of its runs gets a drawn error, too, and costs what starting, warming up, compiling from the cache
and stepping took when the table was recorded. Claims are then compared with the recorded speeds.
"""

import argparse
import math
import random
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from autotune.analysis.confirmed import confirmed_records
from autotune.analysis.front import pareto_front
from autotune.analysis.pick import DEFAULT_PREFERENCES, choose
from autotune.execution.trial_options import TrialOptions
from autotune.spec.attempt import FinishedTrial
from autotune.spec.config import TrainingConfig
from autotune.spec.confirmation import Confirmation, PairedSpeed, RepeatedSpeed
from autotune.spec.result import TrialRecord
from autotune.storage.store import StudyStore
from autotune.study.confirmation.plan import TimeInTurn, next_step
from autotune.study.confirmation.session import ROUNDS
from autotune.study.loop import TRIALS_PER_REPEAT, StudySession
from autotune.study.prediction_cache import PredictionCache
from autotune.study.request import VARIANTS_SHARE
from autotune.study.sampler.ehvi import hypervolume
from autotune.study.workers.coordinator import Coordinator
from studies.compressed import read_json, write_json
from studies.search_efficiency.replay import (
    cap_of,
    exhaustive_volume,
    point_of,
    reference_point,
    rounded,
    the_table,
)
from studies.search_efficiency.table import ReplayExecutor

SIMULATED = Path(__file__).parent / "simulated.json.gz"
NOISE_ALONE = 0.094
"""Standard deviation of the log speed of a configuration between runs, measured alone."""
NOISE_BETWEEN_RUNS, NOISE_OF_A_ROUND = 0.01, 0.10
"""Of a log ratio measured in turn: what more rounds do not lower, and what they do."""
CAPS = ("loose", "middle", "35 %", "12 %")
TRIALS = (24, 30, 40)
SHARES = (0.0, 0.12, 0.2, 0.3)
START_SECONDS, WARMUP_STEPS = 0.3, 3


class NoisyExecutor(ReplayExecutor):
    """Replays the table with an error in every speed."""

    def __init__(self, *arguments: Any, seed: int, **options: Any) -> None:
        super().__init__(*arguments, seed=seed, **options)
        self._noise = random.Random(7 * seed + 1)

    def submit(self, *arguments: Any, **options: Any) -> "Future[FinishedTrial]":
        finished = super().submit(*arguments, **options).result()
        speed = finished.measurement.tokens_per_second
        if speed is not None:
            speed *= math.exp(self._noise.gauss(0.0, NOISE_ALONE))
        noisy: Future[FinishedTrial] = Future()
        measurement = replace(finished.measurement, tokens_per_second=speed)
        noisy.set_result(replace(finished, measurement=measurement))
        return noisy


def search(cap_bytes: int, *, trials: int, seed: int) -> tuple[list[TrialRecord], float]:
    """Returns the trials of a search with noisy speeds, and its seconds."""
    table = the_table()
    definition = table.definition(cap_bytes=cap_bytes, sampler="ehvi", seed=seed)
    executor = NoisyExecutor(table, seed=seed)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        store = StudyStore(f"sqlite:///{folder}/replay.db", create=True)
        store.create_study(definition, trials_wanted=trials)
        shared = stack.enter_context(
            Coordinator(definition, store=store, folder=Path(folder), listener=lambda event: None)
        )
        session = StudySession(
            definition,
            shared=shared,
            slots=None,
            executor=executor,
            prediction_cache=PredictionCache(definition, store=store, predict=executor.forecast),
            study_folder=Path(folder),
            listener=lambda event: None,
            should_stop=lambda: False,
            trial_options=TrialOptions(trial_time_limit_seconds=600.0),
            clock=executor.clock,
        )
        session.run(trials_wanted=trials, deadline=None)
        records = store.trials(definition.name)
        store.close()
    return records, executor.seconds


def true_speed(config: TrainingConfig) -> float:
    speed = the_table().trainings[config.fingerprint].measurement.tokens_per_second
    assert speed is not None
    return speed


def seconds_in_turn(config: TrainingConfig) -> float:
    """Returns what one training of a run in turn costs, with compiled code from the cache."""
    table = the_table()
    program = table.program(config)
    compiled = set() if program is None else {program}
    parts = table.trainings[config.fingerprint].measurement.seconds_by_part or {}
    step = table.workload.tokens_per_step / true_speed(config)
    rounds = min(ROUNDS, table.workload.steps - WARMUP_STEPS)
    compiling = table.compilation(config, compiled=compiled)[0]
    return START_SECONDS + parts["startup"] + compiling + (WARMUP_STEPS + rounds) * step


def measured(step: TimeInTurn, draw: random.Random) -> list[PairedSpeed]:
    rounds = min(ROUNDS, the_table().workload.steps - WARMUP_STEPS)
    noise = math.hypot(NOISE_BETWEEN_RUNS, NOISE_OF_A_ROUND / math.sqrt(rounds))
    partner = step.partner.config
    partner_speed = true_speed(partner) * math.exp(draw.gauss(0.0, NOISE_ALONE))
    return [
        PairedSpeed(
            config=subject.config,
            partner=partner,
            schedule="in turn",
            rounds=rounds,
            speed_ratio=true_speed(subject.config)
            / true_speed(partner)
            * math.exp(draw.gauss(0.0, noise)),
            partner_tokens_per_second=partner_speed,
            seconds=seconds_in_turn(subject.config),
        )
        for subject in step.subjects
    ]


def repeats(baseline: TrainingConfig, trials: int, draw: random.Random) -> list[Confirmation]:
    """Returns the speeds of the baseline that the search measures on its way."""
    return [
        RepeatedSpeed(
            config=baseline,
            tokens_per_second=true_speed(baseline) * math.exp(draw.gauss(0.0, NOISE_ALONE)),
            seconds=0.0,
        )
        for _ in range(trials // TRIALS_PER_REPEAT)
    ]


def simulate(job: tuple[str, int, int]) -> list[dict[str, Any]]:
    """Returns what is claimed after each share of the time, with how true it is."""
    cap, trials, seed = job
    cap_bytes = cap_of(cap)
    records, seconds = search(cap_bytes, trials=trials, seed=seed)
    table = the_table()
    baseline = table.definition(cap_bytes=cap_bytes).baseline_config()
    draw = random.Random(13 * seed + 5)
    confirmations = repeats(baseline, trials, draw)
    whole = seconds / (1.0 - VARIANTS_SHARE)
    spent = 0.0
    claims = []
    for share in SHARES:
        while share > 0.0:
            step = next_step(
                records, confirmations, baseline=baseline, preferences=DEFAULT_PREFERENCES
            )
            if not isinstance(step, TimeInTurn):
                break
            trainings = (step.partner, *step.subjects)
            cost = sum(seconds_in_turn(record.config) for record in trainings)
            if spent + cost > share / (1.0 - share) * whole:
                break
            spent += cost
            confirmations += measured(step, draw)
        claim = claims_of(records, confirmations if share > 0.0 else [], cap_bytes=cap_bytes)
        if claim:
            claims.append(
                {
                    "cap": cap,
                    "trials": trials,
                    "seed": seed,
                    "share": share,
                    "spent": spent / (whole + spent),
                    **claim,
                }
            )
    return claims


def claims_of(
    records: Sequence[TrialRecord], confirmations: Sequence[Confirmation], *, cap_bytes: int
) -> dict[str, Any]:
    """Returns claimed over true speeds of the pick, and the true hypervolume of the front."""
    found = confirmed_records(records, confirmations)
    front = pareto_front(found, tolerance=DEFAULT_PREFERENCES.tolerance)
    pick = choose(found, front, baseline=None, preferences=DEFAULT_PREFERENCES)
    if pick is None:
        return {}
    picked = found[pick.number]
    assert picked.tokens_per_second is not None
    claim: dict[str, Any] = {
        "claimed": picked.tokens_per_second / true_speed(picked.config),
        "confirmations": picked.confirmations,
        "front": volume([record for record in found if record.number in front], cap_bytes),
        "tried": volume([record for record in found if record.feasible], cap_bytes),
    }
    partners = [one.partner for one in confirmations if isinstance(one, PairedSpeed)]
    if partners:
        partner = next(record for record in found if record.config == partners[0])
        assert partner.tokens_per_second is not None
        true_ratio = true_speed(picked.config) / true_speed(partner.config)
        ratio = picked.tokens_per_second / partner.tokens_per_second
        claim["claimed_ratio"] = ratio / true_ratio
        claim["covered"] = [
            interval[0] <= true_speed(record.config) <= interval[1]
            for record in found
            if (interval := record.tokens_per_second_interval) is not None
        ]
    return claim


def volume(records: Sequence[TrialRecord], cap_bytes: int) -> float:
    """Returns the hypervolume by true speeds, relative to that of the whole table."""
    points = [point_of(the_table(), record.config) for record in records]
    known = [point for point in points if point is not None and point.memory <= cap_bytes]
    if not known:
        return 0.0
    return hypervolume(known, reference=reference_point(cap_bytes)) / exhaustive_volume(cap_bytes)


def summary(claims: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yields a row for each number of trials and share of the time."""
    yield (
        "| trials | share allowed | spent | claimed speed / true | ratio / true | "
        "intervals that cover | confirmations of the pick | front | tried |"
    )
    yield "|---|---|---|---|---|---|---|---|---|"
    for trials in TRIALS:
        for share in SHARES:
            rows = [row for row in claims if (row["trials"], row["share"]) == (trials, share)]
            if not rows:
                continue
            covered = [one for row in rows for one in row.get("covered", ())]
            cells = [
                str(trials),
                f"{100 * share:.0f} %",
                f"{100 * statistics.fmean(row['spent'] for row in rows):.0f} %",
                _median_and_90th([row["claimed"] for row in rows]),
                _median_and_90th([row["claimed_ratio"] for row in rows if "claimed_ratio" in row]),
                f"{100 * statistics.fmean(covered):.0f} %" if covered else "-",
                f"{statistics.fmean(row['confirmations'] for row in rows):.1f}",
                f"{statistics.median(row['front'] for row in rows):.3f}",
                f"{statistics.median(row['tried'] for row in rows):.3f}",
            ]
            yield f"| {' | '.join(cells)} |"


def _median_and_90th(values: Sequence[float]) -> str:
    if len(values) < 2:
        return "-"
    tenths = statistics.quantiles(values, n=10, method="inclusive")
    return f"{tenths[4]:.3f}, {tenths[8]:.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=12)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--summary", action="store_true", help="print the table of the last run")
    arguments = parser.parse_args()
    if arguments.summary:
        print("\n".join(summary(read_json(SIMULATED))))
        return
    jobs = [
        (cap, trials, seed) for cap in CAPS for trials in TRIALS for seed in range(arguments.seeds)
    ]
    with ProcessPoolExecutor(arguments.processes) as pool:
        claims = [claim for found in pool.map(simulate, jobs) for claim in found]
    write_json(SIMULATED, rounded(claims))


if __name__ == "__main__":
    main()
