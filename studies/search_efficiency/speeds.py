"""Measures speeds relative to a plain training in the same process and writes `speeds.jsonl.xz`.

    OMP_NUM_THREADS=1 python studies/search_efficiency/speeds.py       # after record.py
    ... speeds.py --table llama --sample 0
    ... speeds.py --table llama --near-front 0.1 --times 5

A speed measured alone here differs by a tenth from one minute to the next, which would make the
table's front a matter of luck. So each configuration trains in a process that also holds the
baseline, one step of the one after one of the other, and its speed is that of the baseline times
the ratio of the two, each the mean of the faster half of its steps. One process a core, each with
one thread. Goes on where it was stopped; a sample is measured three times, and `--disturbed 0.25`
measures once more where the steps of either spread by more. `--near-front 0.1 --times 5` measures,
until there are five measurements, what would be on the front if it were a tenth faster. `--only
precision=bf16-stochastic` drops the speeds of the configurations with this value and measures them
again.
"""

import argparse
import importlib
import itertools
import multiprocessing
import os
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from autotune.execution.prepared_folder import PREPARED
from autotune.spec.config import TrainingConfig
from autotune.spec.training_request import TrainingRequest
from autotune.spec.workload import Workload
from autotune.storage.identity import find_work_folder
from autotune.study.sampler.ehvi import not_dominated
from autotune.training.trainer import Trainer
from studies.compressed import append_row, read_rows, write_rows
from studies.search_efficiency.record import Only
from studies.search_efficiency.table import (
    TABLES,
    Table,
    TableFiles,
    disturbance,
    undisturbed,
)

PAIRS, WARMUP_STEPS, SAMPLE, REPEATS = 8, 3, 24, 3

Job = tuple[Workload, TrainingConfig, int, Path]
"""What to measure, how often it was measured before, and the folder of the recorded study."""
_cores: Any = None
"""The cores that are free; each process takes one."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--table", choices=TABLES, default="gpt")
    parser.add_argument("--disturbed", type=float, metavar="SPREAD")
    parser.add_argument("--near-front", type=float, metavar="SHARE")
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--sample", type=int, default=SAMPLE, help="measured three times")
    parser.add_argument("--only", type=Only.read, metavar="FIELD=VALUE", help="measure these again")
    arguments = parser.parse_args()
    files = TableFiles(arguments.table)
    study = find_work_folder(files.storage) / "record"
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str((study / "inductor").absolute())
    if arguments.only is not None:
        others = [row for row in read_rows(files.speeds) if not arguments.only.holds(row)]
        write_rows(files.speeds, others)
    rows = read_rows(files.speeds)
    if arguments.near_front is not None:
        table = Table.read(arguments.table)
        near = near_front(table, share=arguments.near_front)
        order = [(config, repeat) for repeat in range(arguments.times) for config in near]
    else:
        table = Table.read(arguments.table, with_speeds=False)
        order = shuffled(table, rows, sample=arguments.sample, disturbed=arguments.disturbed)
    counts = Counter(TrainingConfig(**row["config"]).fingerprint for row in rows)
    jobs = [
        (table.workload, config, repeat, study)
        for config, repeat in order
        if repeat >= counts[config.fingerprint]
    ]
    if table.workload.model_config is not None:
        importlib.import_module("transformers")  # once, not in each process
    context = multiprocessing.get_context("fork")
    cores = context.Queue()
    for core in sorted(os.sched_getaffinity(0)):
        cores.put(core)
    processes = len(os.sched_getaffinity(0))
    with context.Pool(processes, maxtasksperchild=1, initializer=_know, initargs=(cores,)) as pool:
        for count, row in enumerate(pool.imap_unordered(_measure, jobs), start=1):
            append_row(files.speeds, row)
            ratio = undisturbed(row["plain"]) / undisturbed(row["subject"])
            print(
                f"{count}/{len(jobs)} {ratio:.2f} {TrainingConfig(**row['config']).describe()}",
                flush=True,
            )
    write_rows(files.speeds, read_rows(files.speeds))


def shuffled(
    table: Table, rows: Sequence[dict[str, Any]], *, sample: int, disturbed: float | None
) -> list[tuple[TrainingConfig, int]]:
    """Returns all configurations once, and the sample and what was disturbed again."""
    draw = random.Random(1)
    configs = list(table.configs.values())
    order = [(config, 0) for config in configs]
    order += [
        (config, repeat) for config in draw.sample(configs, sample) for repeat in range(1, REPEATS)
    ]
    draw.shuffle(order)
    if disturbed is not None:
        spreads = {TrainingConfig(**row["config"]): disturbance(row) for row in rows}
        order += [(config, REPEATS) for config, spread in spreads.items() if spread > disturbed]
    return order


def near_front(table: Table, *, share: float) -> list[TrainingConfig]:
    """Returns what would be on the front if its speed were higher by `share`."""
    front = not_dominated(table.points)
    found = []
    for config in table.configs.values():
        point = table.point_of(config)
        if point is None:
            continue
        faster = replace(point, speed=point.speed * (1 + share))
        if faster in not_dominated([*front, faster]):
            found.append(config)
    return found


def _know(cores: Any) -> None:
    global _cores
    _cores = cores


def _measure(job: Job) -> dict[str, Any]:
    workload, config, repeat, study = job
    core = _cores.get()
    try:
        os.sched_setaffinity(0, {core})
        return {"config": config.to_dict(), "repeat": repeat, **_pairs(workload, config, study)}
    finally:
        _cores.put(core)


def _pairs(workload: Workload, config: TrainingConfig, study: Path) -> dict[str, Any]:
    """Returns the seconds of alternating steps of both and the ratio of their speeds."""
    plain = _training(workload, TrainingConfig(micro_batch_size=workload.global_batch), study)
    subject = _training(workload, config, study)
    seconds: dict[str, list[float]] = {"plain": [], "subject": []}
    for pair in range(PAIRS):
        both = [("plain", plain), ("subject", subject)]
        for name, step in both if pair % 2 else both[::-1]:
            began = time.perf_counter()
            step()
            seconds[name].append(round(time.perf_counter() - began, 9))
    return seconds


def _training(workload: Workload, config: TrainingConfig, study: Path) -> Callable[[], None]:
    """A warmed-up training, as a function that takes its next step."""
    request = TrainingRequest(
        workload=workload,
        config=config,
        folder=study / PREPARED,
        device="cpu",
        cap_bytes=2**50,
        enforce_cap=False,
        requested_at=time.monotonic(),
    )
    trainer = Trainer(request)
    batches, numbers = trainer.batches(), itertools.count()

    def step() -> None:
        trainer.take_step(next(numbers), next(batches))

    for _ in range(WARMUP_STEPS):
        step()
    return step


if __name__ == "__main__":
    main()
