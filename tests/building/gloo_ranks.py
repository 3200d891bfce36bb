"""Functions run by several processes of this machine that are the ranks of one gloo group.

    results = on_ranks(2, measure, arguments)      # [of rank 0, of rank 1]

Each process is new and has one thread; `function(rank, *arguments)` must be importable. All are
forked from one that has imported torch and what predicts, which takes seconds.
"""

import multiprocessing
import tempfile
import traceback
from datetime import timedelta
from pathlib import Path

TIMEOUT_SECONDS = 300
IMPORTED_ONCE = [
    "torch.distributed.fsdp",
    "autotune.predictor.predict",
    "autotune.techniques.sharding",
    "autotune.training.step",
]


def on_ranks(size, function, *arguments):
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED_ONCE)
    answers = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(
                target=_run, args=(rank, size, Path(folder) / "store", function, arguments, answers)
            )
            for rank in range(size)
        ]
        for process in processes:
            process.start()
        try:
            results = dict(answers.get(timeout=TIMEOUT_SECONDS) for _ in processes)
        finally:
            for process in processes:
                process.join(timeout=5)
                process.kill()
    failed = [text for text in results.values() if isinstance(text, str)]
    assert not failed, failed[0]
    return [results[rank] for rank in range(size)]


def _run(rank, size, store, function, arguments, answers):
    import torch
    import torch.distributed
    from torch.distributed import FileStore  # type: ignore[attr-defined]

    torch.set_num_threads(1)
    try:
        torch.distributed.init_process_group(
            "gloo",
            store=FileStore(str(store), size),
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=TIMEOUT_SECONDS),
        )
        answers.put((rank, function(rank, *arguments)))
    except BaseException:
        answers.put((rank, traceback.format_exc()))
        raise
