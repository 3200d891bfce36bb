"""Trains one model by torch's own sharding and by DeepSpeed's, on one process and on two.

    python -m studies.engines.measure

Writes `results.json` next to this file. Takes about five minutes on two idle CPU cores.
"""

import argparse
import datetime
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from autotune.data.batches import Batch
from autotune.execution.server.ranks import Rank, run_on_ranks
from autotune.memory.cpu import CpuMeter
from autotune.models.weights import draw_weights
from autotune.shipped.quantized import tensors_behind
from autotune.shipped.tensors import held_tensors
from autotune.spec.config import TrainingConfig
from autotune.spec.workload import Workload, make_workload
from autotune.techniques import Training, apply_techniques, deepspeed_engine
from autotune.techniques.sharding import make_mesh
from autotune.training.step import TrainingStep

HERE = Path(__file__).parent
CPU = torch.device("cpu")
SETTINGS = {
    "layers": 4,
    "width": 512,
    "heads": 8,
    "vocab_size": 2048,
    "sequence_length": 32,
    "global_batch": 4,
}
CASES: Mapping[str, tuple[int, Mapping[str, Any]]] = {
    "torch": (1, {}),
    "DeepSpeed": (1, {"engine": "deepspeed"}),
    "torch, ddp": (2, {"sharding": "ddp"}),
    "DeepSpeed, ddp": (2, {"engine": "deepspeed", "sharding": "ddp"}),
    "torch, zero1": (2, {"sharding": "zero1"}),
    "DeepSpeed, zero1": (2, {"engine": "deepspeed", "sharding": "zero1"}),
    "torch, zero2": (2, {"sharding": "zero2"}),
    "DeepSpeed, zero2": (2, {"engine": "deepspeed", "sharding": "zero2"}),
    "torch, zero3": (2, {"sharding": "zero3"}),
    "DeepSpeed, zero3": (2, {"engine": "deepspeed", "sharding": "zero3"}),
    "DeepSpeed, zero1, optimizer on the host": (
        2,
        {"engine": "deepspeed", "sharding": "zero1", "offload": "optimizer"},
    ),
    "DeepSpeed, zero3, all on the host": (
        2,
        {"engine": "deepspeed", "sharding": "zero3", "offload": "all"},
    ),
}
"""{name: (processes, techniques)}."""
OWN_SIZES = ("DeepSpeed, zero1", "DeepSpeed, zero3")
"""Cases that are also trained once with the sizes of buffers that DeepSpeed has by itself."""
WARMUP_STEPS, MEMORY_STEPS, TIMED_STEPS = 1, 1, 3


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=HERE / "results.json")
    parser.add_argument("--rounds", type=int, default=2)
    arguments = parser.parse_args()
    began = time.monotonic()
    rounds: dict[str, list[dict[str, Any]]] = {name: [] for name in CASES}
    with tempfile.TemporaryDirectory() as folder:
        draw_weights(workload(1), file=Path(folder) / "weights.pt")
        for _ in range(arguments.rounds):
            for name in CASES:
                rounds[name].append(measured(name, Path(folder)))
                print(name, rounds[name][-1], flush=True)
        own_sizes = {name: measured(name, Path(folder), own_sizes=True) for name in OWN_SIZES}
    results = {
        "date": datetime.date.today().isoformat(),
        "machine": f"{os.cpu_count()} CPUs, {platform.machine()}, {platform.system()}",
        "versions": {
            "python": platform.python_version(),
            **{package: version(package) for package in ("torch", "deepspeed")},
        },
        "settings": SETTINGS,
        "parameters": parameters(),
        "rounds": rounds,
        "own_sizes": own_sizes,
        "seconds": round(time.monotonic() - began),
    }
    arguments.out.write_text(json.dumps(results, indent=1) + "\n")
    print(table(results))


def workload(processes: int) -> Workload:
    return make_workload("cpu", {**SETTINGS, "devices_per_trial": processes})


def parameters() -> int:
    from autotune.models import build_model

    with torch.device("meta"):
        model = build_model(workload(1)).model
    return sum(parameter.numel() for parameter in model.parameters())


def measured(name: str, folder: Path, *, own_sizes: bool = False) -> dict[str, Any]:
    """Return the peak of each process, the median seconds of a step and the last loss."""
    processes, techniques = CASES[name]
    config = TrainingConfig(micro_batch_size=SETTINGS["global_batch"] // processes, **techniques)

    def train(rank: Rank) -> dict[str, Any]:
        torch.set_num_threads(1)
        if own_sizes:
            use_own_sizes()
        if processes == 1:
            return trained(config, workload(1), folder)
        with rank.joined("cpu"):
            return trained(config, workload(processes), folder)

    ranks = run_on_ranks(train, size=processes, why_failed=lambda _result: "")
    return {
        "peak_bytes_by_rank": [rank["peak_bytes"] for rank in ranks],
        "seconds_per_step": ranks[0]["seconds_per_step"],
        "loss": ranks[0]["loss"],
    }


def use_own_sizes() -> None:
    """Leave out the sizes that trials give DeepSpeed; ends with the process."""
    ours = deepspeed_engine.settings_of

    def without_sizes(config: TrainingConfig, at: Workload) -> dict[str, Any]:
        settings = ours(config, at)
        stage = settings["zero_optimization"]["stage"]
        return {**settings, "zero_optimization": {"stage": stage}}

    deepspeed_engine.settings_of = without_sizes


def trained(config: TrainingConfig, at: Workload, folder: Path) -> dict[str, Any]:
    rows = torch.randint(
        0,
        at.vocab_size,
        (at.global_batch, at.sequence_length + 1),
        generator=torch.Generator().manual_seed(5),
    )
    batch = Batch(rows[:, :-1], rows[:, 1:])
    mesh = make_mesh(config, devices=at.devices_per_trial, device=CPU)
    training = apply_techniques(
        config, at, weights_file=folder / "weights.pt", device=CPU, mesh=mesh
    )
    meter = CpuMeter()
    step = TrainingStep(training, workload=at, config=config, device=CPU, marker=meter)
    for number in range(WARMUP_STEPS):
        step(number, batch)
    with meter.measuring(lambda: resident(training)):
        for number in range(MEMORY_STEPS):
            step(WARMUP_STEPS + number, batch)
    seconds = []
    loss = 0.0
    for number in range(TIMED_STEPS):
        began = time.perf_counter()
        loss = step(WARMUP_STEPS + MEMORY_STEPS + number, batch)
        seconds.append(time.perf_counter() - began)
    return {
        "peak_bytes": meter.reading().peak_memory_bytes,
        "seconds_per_step": round(statistics.median(seconds), 4),
        "loss": loss,
    }


def resident(training: Training) -> list[torch.Tensor]:
    model = training.parts.model
    weights = [part for weight in model.parameters() for part in tensors_behind(weight)]
    held = [tensor for module in model.modules() for _, tensor in held_tensors(module)]
    return [*weights, *held, *training.updater.state(), *training.devices.held()]


def table(results: Mapping[str, Any]) -> str:
    """Return the peaks and the times, relative to the first case with as many processes."""
    lines = []
    for name, rounds in results["rounds"].items():
        processes = CASES[name][0]
        plain = results["rounds"]["torch" if processes == 1 else "torch, ddp"]
        ratios = [
            one["seconds_per_step"] / other["seconds_per_step"]
            for one, other in zip(rounds, plain, strict=True)
        ]
        peaks = sorted({peak for one in rounds for peak in one["peak_bytes_by_rank"]})
        listed = ", ".join(f"{ratio:.2f}" for ratio in ratios)
        lines.append(
            f"| {name} | {processes} | {' or '.join(f'{peak / 1e6:.1f}' for peak in peaks)} | "
            f"{statistics.median(ratios):.2f} ({listed}) |"
        )
    for name, once in results["own_sizes"].items():
        peak = max(once["peak_bytes_by_rank"]) / 1e6
        lines.append(f"| {name}, its own sizes | {CASES[name][0]} | {peak:.1f} | |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
