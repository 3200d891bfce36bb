"""One configuration, trained by autotune and by a hand-written PyTorch loop, in turn, in one run.

    python studies/plain_loop/compare.py [--pairs 5] > studies/plain_loop/results.json
    python studies/plain_loop/compare.py --device cuda [--pairs 3] \\
        > studies/plain_loop/results-cuda.json

The loop below is what a person writes who knows PyTorch: no line of autotune's trainer, memory or
technique code. Only the model's definition and the files with tokens and initial weights are
shared, so that the losses can agree. Each training runs in a fresh process. Prints a JSON object
with machine, versions, date and all repeats.

On CUDA the loop never waits for the device while it is timed, as a training does not: its batches
come from pinned memory, and its losses stay where they are. Its speed is that of all timed steps
together, by the clock on the wall.
"""

import argparse
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

CONFIGURATIONS = {
    "cpu": {
        "fp32": {},
        "fp32, checkpoint every block": {"checkpointing": "block"},
        "fp32, fused AdamW, micro-batch 2": {"optimizer_fusion": "kernel", "micro_batch_size": 2},
    },
    "cuda": {
        "bf16-mixed, fused AdamW": {"precision": "bf16-mixed", "optimizer_fusion": "kernel"},
        "bf16-mixed, fused AdamW, micro-batch 1": {
            "precision": "bf16-mixed",
            "optimizer_fusion": "kernel",
            "micro_batch_size": 1,
        },
        "fp32, checkpoint every block, fused AdamW": {
            "checkpointing": "block",
            "optimizer_fusion": "kernel",
        },
    },
}
WORKLOADS: dict[str, dict[str, dict[str, Any]]] = {
    "cpu": {"default": {}},
    # A step of a few milliseconds, where waiting for the device would be seen, and one of some
    # hundred.
    "cuda": {
        "small": {
            "layers": 4,
            "width": 256,
            "heads": 4,
            "sequence_length": 256,
            "global_batch": 8,
            "steps": 60,
        },
        "default": {},
    },
}


def make_step(
    settings: dict, choices: dict, folder: Path, *, device: str
) -> tuple[Callable, Callable]:
    """Returns the functions of a hand-written training: one optimizer step, and resident tensors.

    The step takes its number and returns the mean loss: on CUDA as a tensor, which the device need
    not have computed.
    """
    import numpy
    import torch
    from torch.utils.checkpoint import checkpoint

    from autotune.models.gpt import build
    from autotune.spec.workload import Workload

    workload = Workload(**settings)
    batch, length, micro = (
        workload.global_batch,
        workload.sequence_length,
        choices.get("micro_batch_size"),
    )
    is_mixed, on_cuda = choices.get("precision") == "bf16-mixed", device != "cpu"
    model = build(workload)
    model.load_state_dict(torch.load(folder / "weights.pt", weights_only=True), strict=False)
    model.to(device)
    if choices.get("checkpointing") == "block":
        for block in model.blocks:
            forward = block.forward
            block.forward = lambda *args, forward=forward: checkpoint(
                forward, *args, use_reentrant=False
            )
    fused = choices.get("optimizer_fusion") == "kernel"
    rate = workload.learning_rates["adamw"]
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, foreach=False, fused=fused)
    text = numpy.load(folder / "train.npy", mmap_mode="r")
    order = numpy.random.default_rng(workload.seed).permutation((len(text) - 1) // length)

    def step(index: int) -> torch.Tensor | float:
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1.0, (index + 1) / workload.learning_rate_warmup_steps)
        first = (
            index * batch % (len(order) - batch)
        )  # a long comparison reads the text more than once
        rows = [text[i * length : i * length + length + 1] for i in order[first : first + batch]]
        tokens = torch.from_numpy(numpy.stack(rows).astype(numpy.int64))
        if on_cuda:
            tokens = tokens.pin_memory().to(device, non_blocking=True)
        total = torch.zeros((), device=device) if on_cuda else 0.0
        for part in tokens.split(micro or batch):
            with torch.autocast(torch.device(device).type, dtype=torch.bfloat16, enabled=is_mixed):
                loss = model(part[:, :-1].contiguous(), part[:, 1:].contiguous())
            loss = loss / (batch * length)
            loss.backward()
            total += loss.detach() if on_cuda else loss.item()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return total

    def resident() -> list:
        state = [value for one in optimizer.state.values() for value in one.values()]
        return [*model.parameters(), *model.buffers(), *state]

    return step, resident


def plain_loop(settings: dict, choices: dict, folder: Path, device: str) -> dict:
    """A training loop by hand: peak live bytes over two steps, tokens per second, last loss."""
    from autotune.spec.workload import Workload

    workload, on_cuda = Workload(**settings), device != "cpu"
    step, resident = make_step(settings, choices, folder, device=device)
    first = workload.warmup_steps
    for index in range(first):
        float(step(index))
    measure_peak = peak_on_cuda if on_cuda else peak_on_cpu
    peak = measure_peak(lambda: [float(step(first + index)) for index in range(2)], live=resident())
    timed = range(first + 2, workload.steps)
    seconds, loss = seconds_on_cuda(step, timed) if on_cuda else seconds_on_cpu(step, timed)
    speed = workload.global_batch * workload.sequence_length / seconds
    return {"peak_memory_bytes": peak, "tokens_per_second": speed, "final_loss": loss}


def peak_on_cpu(take_steps, live) -> int:  # noqa: ANN001
    from torch.profiler import ProfilerActivity, profile

    live_bytes = sum(t.untyped_storage().nbytes() for t in live)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recording:
        take_steps()
    events = recording.profiler.kineto_results.events()
    peak = live_bytes
    for _, size in sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"):
        live_bytes += size
        peak = max(peak, live_bytes)
    return peak


def peak_on_cuda(take_steps, live) -> int:  # noqa: ANN001
    import torch

    torch.cuda.reset_peak_memory_stats()
    take_steps()
    return torch.cuda.max_memory_allocated()


def seconds_on_cpu(step, timed: range) -> tuple[float, float]:  # noqa: ANN001
    """The median step and the last loss."""
    seconds = []
    for index in timed:
        started = time.perf_counter()
        loss = step(index)
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds), loss


def seconds_on_cuda(step, timed: range) -> tuple[float, float]:  # noqa: ANN001
    """The mean step of all and the last loss; nothing waits for the device in between."""
    import torch

    torch.cuda.synchronize()
    started = time.perf_counter()
    for index in timed:
        loss = step(index)
    torch.cuda.synchronize()
    return (time.perf_counter() - started) / len(timed), float(loss)


def autotune_trial(settings: dict, choices: dict, folder: Path, server, device) -> dict:  # noqa: ANN001
    from autotune.execution.tasks import Train
    from autotune.spec.config import TrainingConfig
    from autotune.spec.training_request import TrainingRequest
    from autotune.spec.workload import Workload

    training = TrainingRequest(
        workload=Workload(**settings),
        config=TrainingConfig(**{"micro_batch_size": settings["global_batch"], **choices}),
        folder=folder,
        device=device.device,
        device_uuid=device.uuid_of_nvml,
        cap_bytes=2**50,
        enforce_cap=False,
    )
    future = server.submit(Train(training=training), log_file=folder / "trial.log")
    measured = future.result().measurement
    if measured.outcome != "ok":
        raise RuntimeError(
            f"the trial of {choices} ended as {measured.outcome}: {measured.message}"
        )
    return {
        key: getattr(measured, key)
        for key in ("peak_memory_bytes", "tokens_per_second", "final_loss")
    }


def compare(settings: dict, choices: dict, folder: Path, server, device, *, pairs: int) -> dict:  # noqa: ANN001
    """Trains `pairs` times by hand and by autotune; returns all repeats and the median speed ratio.

    `folder`: the prepared workload; `server`: a TrialServer; `device`: a DeviceInfo as a
    dictionary.
    """
    found = []
    for _ in range(pairs):
        command = [
            sys.executable,
            __file__,
            "--by-hand",
            json.dumps(settings),
            json.dumps(choices),
            str(folder),
        ]
        by_hand = json.loads(
            subprocess.check_output([*command, device["device"]], stderr=subprocess.DEVNULL)
        )
        found.append(
            {
                "by_hand": by_hand,
                "autotune": autotune_trial(settings, choices, folder, server, device),
            }
        )
    ratios = [p["autotune"]["tokens_per_second"] / p["by_hand"]["tokens_per_second"] for p in found]
    return {"speed_ratio_median": statistics.median(ratios), "speed_ratios": ratios, "pairs": found}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--workload", choices=("small", "default"), help="only this one")
    parser.add_argument(
        "--by-hand",
        nargs=4,
        metavar=("SETTINGS", "CHOICES", "FOLDER", "DEVICE"),
        help=argparse.SUPPRESS,
    )
    arguments = parser.parse_args()
    if arguments.by_hand:
        settings, choices, folder, device = arguments.by_hand
        print(
            json.dumps(plain_loop(json.loads(settings), json.loads(choices), Path(folder), device))
        )
        return
    from importlib.metadata import version

    from autotune.execution.server.client import TrialServer
    from autotune.execution.tasks import ListDevices, Prepare
    from autotune.spec.workload import make_workload

    results, workloads = {}, {}
    with (
        tempfile.TemporaryDirectory() as temporary,
        TrialServer(log_file=Path(temporary) / "server.log") as server,
    ):
        found = server.submit(ListDevices(), log_file=Path(temporary) / "devices.log").result()
        device = next(one for one in found if one.device.startswith(arguments.device))
        for size, changes in WORKLOADS[arguments.device].items():
            if arguments.workload not in (None, size):
                continue
            workload = make_workload(arguments.device, changes)
            workloads[size] = settings = workload.to_dict()
            folder = Path(temporary) / size
            task = Prepare(workload=workload, folder=folder)
            server.submit(task, log_file=Path(temporary) / "prepare.log").result()
            for name, choices in CONFIGURATIONS[arguments.device].items():
                compared = compare(settings, choices, folder, server, device, pairs=arguments.pairs)
                results[f"{size}: {name}"] = compared
                print(
                    size,
                    name,
                    [round(ratio, 3) for ratio in compared["speed_ratios"]],
                    file=sys.stderr,
                )
    machine = {
        "system": platform.platform(),
        "processor": platform.processor() or platform.machine(),
    }
    machine["device"] = device.name
    versions = {
        "python": platform.python_version(),
        "torch": version("torch"),
        "autotune": version("autotune"),
    }
    about = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine,
        "versions": versions,
    }
    print(json.dumps({**about, "workloads": workloads, "results": results}, indent=1))


if __name__ == "__main__":
    main()
