"""A hand-written training loop on a GPU, timed in three ways.

    by_hand.py SETTINGS CHOICES FOLDER DEVICE BLOCK

The loop is that of `studies/plain_loop/compare.py`. Blocks of BLOCK steps take turns, until the
steps of the workload are over: each step between two synchronisations, as a stopwatch is used;
steps between CUDA events whose loss is read each time, as people log it; and steps between events
whose losses are read after the block. Prints one JSON object.
"""

import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]


def main() -> None:
    import torch

    from studies.plain_loop.compare import make_step

    settings, choices, folder, device, block_text = sys.argv[1:]
    workload, block = json.loads(settings), int(block_text)
    tokens = workload["global_batch"] * workload["sequence_length"]
    step, _ = make_step(workload, json.loads(choices), Path(folder), device=device)
    torch.cuda.set_device(device)
    first = workload["warmup_steps"]
    losses = [step(index).item() for index in range(first)]
    torch.cuda.reset_peak_memory_stats()
    losses += [step(index).item() for index in range(first, first + 2)]
    peak = torch.cuda.max_memory_allocated()

    def synchronised(numbers: range) -> list[float]:
        seconds = []
        for number in numbers:
            torch.cuda.synchronize()
            began = time.perf_counter()
            losses.append(step(number).item())
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - began)
        return seconds

    def between_events(numbers: range, *, reads: bool) -> list[float]:
        torch.cuda.synchronize()
        events = [torch.cuda.Event(enable_timing=True) for _ in range(len(numbers) + 1)]
        found: list[Any] = []
        events[0].record()
        for number, event in zip(numbers, events[1:], strict=True):
            loss = step(number)
            found.append(loss.item() if reads else loss)
            event.record()
        torch.cuda.synchronize()
        losses.extend(float(loss) for loss in found)
        return [begin.elapsed_time(end) / 1000 for begin, end in itertools.pairwise(events)]

    ways: dict[str, Callable[[range], list[float]]] = {
        "synchronised": synchronised,
        "events, loss read": lambda numbers: between_events(numbers, reads=True),
        "events": lambda numbers: between_events(numbers, reads=False),
    }
    timed: dict[str, list[float]] = {way: [] for way in ways}
    start = first + 2
    while start < workload["steps"]:
        for way, measure in ways.items():
            numbers = range(start, min(start + block, workload["steps"]))
            timed[way] += measure(numbers)
            start = numbers.stop
    speeds = {
        way: statistics.median(tokens / s for s in seconds if s)
        for way, seconds in timed.items()
        if any(seconds)
    }
    print(
        json.dumps(
            {
                "peak_memory_bytes": peak,
                "tokens_per_second": speeds,
                "step_seconds": {
                    way: [round(s, 6) for s in seconds] for way, seconds in timed.items()
                },
                "losses": losses,
            }
        )
    )


if __name__ == "__main__":
    main()
