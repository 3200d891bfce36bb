"""Simulates searches on a noisy machine, with and without confirmation, on a recorded table.

    OMP_NUM_THREADS=1 python studies/confirmation/simulate.py       # simulated.json.xz
    python studies/confirmation/simulate.py --summary

Each search is the real one on a table of `studies/search_efficiency`, whose recorded speed times a
drawn error stands for what a trial measures. The confirmation is planned by the real plan; each of
its runs gets a drawn error, too, and costs what starting, warming up, compiling from the cache and
stepping took when the table was recorded. Claims are then compared with the recorded speeds.
"""

import argparse
import math
import random
import statistics
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

from autotune.analysis.confirmed import confirmed_records
from autotune.analysis.front import pareto_front
from autotune.analysis.pick import DEFAULT_PREFERENCES, choose
from autotune.spec.config import TrainingConfig
from autotune.spec.confirmation import Confirmation, PairedSpeed
from autotune.spec.result import TrialRecord
from autotune.study.confirmation.plan import TimeInTurn, next_step
from autotune.study.confirmation.session import ROUNDS
from autotune.study.request import VARIANTS_SHARE
from studies.compressed import read_json, write_json
from studies.search_efficiency.replay import CAPS, MORE_CAPS, rounded, run_ours, the_table
from studies.search_efficiency.table import Table

SIMULATED = Path(__file__).parent / "simulated.json.xz"
NOISE_ALONE = 0.094
"""Standard deviation of the log speed of a configuration between runs, measured alone."""
NOISE_BETWEEN_RUNS, NOISE_OF_A_ROUND = 0.01, 0.10
"""Of a log ratio measured in turn: what more rounds do not lower, and what they do."""
CAPS_SIMULATED = ("loose", "middle", "35 %", "12 %")
TRIALS = (24, 30, 40)
SHARES = (0.0, 0.12, 0.2, 0.3)
START_SECONDS, WARMUP_STEPS = 0.3, 3
ALL = 2.0
"""Of the hypervolume: never reached, so that a search runs all its trials."""


class Simulation:
    """Confirms searches over a table with drawn errors, and judges what is then announced."""

    def __init__(self, table: Table, *, cap_bytes: int) -> None:
        self._table = table
        self._cap_bytes = cap_bytes
        self._baseline = table.definition(cap_bytes=cap_bytes).baseline_config()
        self._rounds = ROUNDS

    def true_speed(self, config: TrainingConfig) -> float:
        """Returns the recorded tokens per second."""
        speed = self._table.trainings[config.fingerprint].measurement.tokens_per_second
        assert speed is not None
        return speed

    def confirm(
        self,
        records: Sequence[TrialRecord],
        confirmations: list[Confirmation],
        *,
        seconds: float,
        draw: random.Random,
    ) -> float:
        """Adds confirmations while there is time for the next; returns the seconds they took."""
        spent = 0.0
        while True:
            step = next_step(
                records, confirmations, baseline=self._baseline, preferences=DEFAULT_PREFERENCES
            )
            if not isinstance(step, TimeInTurn):
                return spent
            trainings = (step.partner, *step.subjects)
            cost = sum(self._seconds_in_turn(record.config) for record in trainings)
            if spent + cost > seconds:
                return spent
            spent += cost
            confirmations += self._measured(step, draw)

    def _seconds_in_turn(self, config: TrainingConfig) -> float:
        """Returns what one training of a run in turn costs, with compiled code from the cache."""
        table = self._table
        program = table.program(config)
        compiled = set() if program is None else {program}
        parts = table.trainings[config.fingerprint].measurement.seconds_by_part or {}
        step = table.workload.tokens_per_step / self.true_speed(config)
        compiling = table.compilation(config, compiled=compiled)[0]
        return START_SECONDS + parts["startup"] + compiling + (WARMUP_STEPS + self._rounds) * step

    def _measured(self, step: TimeInTurn, draw: random.Random) -> list[PairedSpeed]:
        noise = math.hypot(NOISE_BETWEEN_RUNS, NOISE_OF_A_ROUND / math.sqrt(self._rounds))
        partner = step.partner.config
        partner_speed = self.true_speed(partner) * math.exp(draw.gauss(0.0, NOISE_ALONE))
        return [
            PairedSpeed(
                config=subject.config,
                partner=partner,
                schedule="in turn",
                rounds=self._rounds,
                speed_ratio=self.true_speed(subject.config)
                / self.true_speed(partner)
                * math.exp(draw.gauss(0.0, noise)),
                partner_tokens_per_second=partner_speed,
                seconds=self._seconds_in_turn(subject.config),
            )
            for subject in step.subjects
        ]

    def claims(
        self, records: Sequence[TrialRecord], confirmations: Sequence[Confirmation]
    ) -> dict[str, Any]:
        """Returns claimed over true speeds of the pick, and true hypervolumes.

        They are those of the announced front, of all trials, and of the front that would be
        announced if all configurations of the table had been tried and their true speeds known;
        with them the true speed of the pick beside that of the pick from there.
        """
        found = confirmed_records(records, confirmations)
        front = pareto_front(found, tolerance=DEFAULT_PREFERENCES.tolerance)
        pick = choose(found, front, baseline=None, preferences=DEFAULT_PREFERENCES)
        if pick is None:
            return {}
        picked = found[pick.number]
        assert picked.tokens_per_second is not None
        exhaustive_front, best = exhaustive(self._table, self._cap_bytes)
        claim: dict[str, Any] = {
            "claimed": picked.tokens_per_second / self.true_speed(picked.config),
            "confirmations": picked.confirmations,
            "front": self._volume([found[number] for number in front]),
            "tried": self._volume([record for record in found if record.feasible]),
            "exhaustive_front": self._volume(exhaustive_front),
            "pick": self.true_speed(picked.config) / self.true_speed(best.config),
        }
        partners = [one.partner for one in confirmations if isinstance(one, PairedSpeed)]
        if partners:
            partner = next(record for record in found if record.config == partners[0])
            assert partner.tokens_per_second is not None
            true_ratio = self.true_speed(picked.config) / self.true_speed(partner.config)
            ratio = picked.tokens_per_second / partner.tokens_per_second
            claim["claimed_ratio"] = ratio / true_ratio
            claim["covered"] = [
                interval[0] <= self.true_speed(record.config) <= interval[1]
                for record in found
                if (interval := record.tokens_per_second_interval) is not None
            ]
        return claim

    def _volume(self, records: Sequence[TrialRecord]) -> float:
        """Returns the hypervolume by true speeds, relative to that of the whole table."""
        points = [self._table.point_of(record.config) for record in records]
        known = [point for point in points if point and point.memory <= self._cap_bytes]
        return self._table.hypervolume_of(known, cap_bytes=self._cap_bytes)


@cache
def exhaustive(table: Table, cap_bytes: int) -> tuple[list[TrialRecord], TrialRecord]:
    """Returns the front and the pick of all configurations under a cap, with their true speeds."""
    records = []
    for name, config in table.configs.items():
        measured = table.trainings[name].measurement
        if measured.outcome == "ok" and (measured.device_bytes or 0) <= cap_bytes:
            values = vars(measured)
            number = len(records)
            records.append(TrialRecord(**values, number=number, config=config, feasible=True))
    front = pareto_front(records, tolerance=DEFAULT_PREFERENCES.tolerance)
    pick = choose(records, front, baseline=None, preferences=DEFAULT_PREFERENCES)
    assert pick is not None
    return [records[number] for number in front], records[pick.number]


def simulate(job: tuple[str, int, int]) -> list[dict[str, Any]]:
    """Returns what is claimed after each share of the time, with how true it is."""
    cap, trials, seed = job
    table = the_table()
    cap_bytes = table.cap_bytes({**CAPS, **MORE_CAPS}[cap])
    found = run_ours(
        cap_bytes,
        table=table,
        sampler="ehvi",
        seed=seed,
        most=trials,
        enough=ALL,
        noise=NOISE_ALONE,
        repeats_baseline=True,
    )
    simulation = Simulation(table, cap_bytes=cap_bytes)
    draw = random.Random(13 * seed + 5)
    confirmations = list(found["confirmations"])
    whole = found["seconds"] / (1.0 - VARIANTS_SHARE)
    spent = 0.0
    claims = []
    for share in SHARES:
        allowed = share / (1.0 - share) * whole
        if share > 0.0:
            spent += simulation.confirm(
                found["records"], confirmations, seconds=allowed - spent, draw=draw
            )
        known = confirmations if share > 0.0 else []
        claim = simulation.claims(found["records"], known)
        if claim:
            about = {"cap": cap, "trials": trials, "seed": seed, "share": share}
            claims.append({**about, "spent": spent / (whole + spent), **claim})
    return claims


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
        (cap, trials, seed)
        for cap in CAPS_SIMULATED
        for trials in TRIALS
        for seed in range(arguments.seeds)
    ]
    with ProcessPoolExecutor(arguments.processes) as pool:
        claims = [claim for found in pool.map(simulate, jobs) for claim in found]
    write_json(SIMULATED, rounded(claims))


if __name__ == "__main__":
    main()
