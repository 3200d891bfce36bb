"""Measures speeds relative to a plain training in the same process and writes `speeds.jsonl.gz`.

    OMP_NUM_THREADS=1 python studies/search_efficiency/speeds.py       # after record.py

A speed measured alone here differs by a tenth from one minute to the next, which would make the
table's front a matter of luck. So each configuration trains in a process that also holds the
baseline, one step of the one after one of the other, and its speed is that of the baseline times
the ratio of the two, each the mean of the faster half of its steps. One process a core, each with
one thread. Goes on where it was stopped; a sample is measured three times, and `--disturbed 0.25`
measures once more where the steps of either spread by more; the least disturbed counts. `--only
precision=bf16-stochastic` drops the speeds of the configurations with this value and measures them
again.
"""

import argparse
import itertools
import multiprocessing
import os
import random
import time
from collections.abc import Callable, Iterator
from typing import Any

from autotune.execution.server_tasks import PREPARED
from autotune.spec.config import TrainingConfig
from autotune.spec.training_request import TrainingRequest
from autotune.spec.workload import Workload
from autotune.storage.database import work_folder_path
from autotune.training.trainer import Trainer
from studies.compressed import append_row, read_rows, write_rows
from studies.search_efficiency.record import Only
from studies.search_efficiency.table import SPEEDS, Table, disturbance, undisturbed

PAIRS, WARMUP_STEPS, SAMPLE, REPEATS = 8, 3, 24, 3
STUDY = work_folder_path("sqlite:///record.db") / "record"


Job = tuple[Workload, TrainingConfig, int]
_cores: Any = None
"""The cores that are free; each process takes one."""


def main() -> None:
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str((STUDY / "inductor").absolute())
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--disturbed", type=float, metavar="SPREAD")
    parser.add_argument("--only", type=Only.read, metavar="FIELD=VALUE", help="measure these again")
    arguments = parser.parse_args()
    if arguments.only is not None:
        others = [row for row in read_rows(SPEEDS) if not arguments.only.holds(row)]
        write_rows(SPEEDS, others)
    todo = list(_jobs(Table.read(with_speeds=False), disturbed=arguments.disturbed))
    context = multiprocessing.get_context("fork")
    cores = context.Queue()
    for core in sorted(os.sched_getaffinity(0)):
        cores.put(core)
    processes = len(os.sched_getaffinity(0))
    with context.Pool(processes, maxtasksperchild=1, initializer=_know, initargs=(cores,)) as pool:
        for count, row in enumerate(pool.imap_unordered(_measure, todo), start=1):
            append_row(SPEEDS, row)
            ratio = undisturbed(row["plain"]) / undisturbed(row["subject"])
            print(
                f"{count}/{len(todo)} {ratio:.2f} {TrainingConfig(**row['config']).describe()}",
                flush=True,
            )
    write_rows(SPEEDS, read_rows(SPEEDS))


def _jobs(table: Table, *, disturbed: float | None) -> Iterator[Job]:
    draw = random.Random(1)
    configs = list(table.configs.values())
    order = [(config, 0) for config in configs]
    order += [
        (config, repeat) for config in draw.sample(configs, SAMPLE) for repeat in range(1, REPEATS)
    ]
    draw.shuffle(order)
    rows = read_rows(SPEEDS)
    done = {(TrainingConfig(**row["config"]).fingerprint, row["repeat"]) for row in rows}
    if disturbed is not None:
        spreads = {TrainingConfig(**row["config"]): disturbance(row) for row in rows}
        order += [(config, REPEATS) for config, spread in spreads.items() if spread > disturbed]
    for config, repeat in order:
        if (config.fingerprint, repeat) not in done:
            yield table.workload, config, repeat


def _know(cores: Any) -> None:
    global _cores
    _cores = cores


def _measure(job: Job) -> dict[str, Any]:
    workload, config, repeat = job
    core = _cores.get()
    try:
        os.sched_setaffinity(0, {core})
        return {"config": config.to_dict(), "repeat": repeat, **_pairs(workload, config)}
    finally:
        _cores.put(core)


def _pairs(workload: Workload, config: TrainingConfig) -> dict[str, Any]:
    """Returns the seconds of alternating steps of both and the ratio of their speeds."""
    plain = _training(workload, TrainingConfig(micro_batch_size=workload.global_batch))
    subject = _training(workload, config)
    seconds: dict[str, list[float]] = {"plain": [], "subject": []}
    for pair in range(PAIRS):
        both = [("plain", plain), ("subject", subject)]
        for name, step in both if pair % 2 else both[::-1]:
            began = time.perf_counter()
            step()
            seconds[name].append(time.perf_counter() - began)
    return seconds


def _training(workload: Workload, config: TrainingConfig) -> Callable[[], None]:
    """A warmed-up training, as a function that takes its next step."""
    request = TrainingRequest(
        workload=workload,
        config=config,
        folder=STUDY / PREPARED,
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
