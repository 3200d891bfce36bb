"""One configuration, trained by autotune and by a hand-written PyTorch loop, in turn, in one run.

    python studies/plain_loop/compare.py [--pairs 5] [--layers 6 ...] > studies/plain_loop/results.json

The loop below is what a person writes who knows PyTorch: no line of autotune's trainer, memory or technique code.
Only the model's definition and the files with tokens and initial weights are shared, so that the losses can agree.
Each training runs in a fresh process. Prints a JSON object with machine, versions, date and all repeats.
"""

import argparse
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path

CONFIGURATIONS = {
    "fp32": {},
    "fp32, checkpoint every block": {"checkpointing": "block"},
    "fp32, fused AdamW, micro-batch 2": {"optimizer_fusion": "kernel", "micro_batch_size": 2},
}


def plain_loop(settings: dict, choices: dict, folder: Path) -> dict:
    """A training loop by hand: peak live bytes over two steps, median tokens per second, last loss."""
    import numpy
    import torch
    from torch.profiler import ProfilerActivity, profile
    from torch.utils.checkpoint import checkpoint

    from autotune.models.gpt import build
    from autotune.workload import Workload

    workload = Workload(**settings)
    batch, length, micro = workload.global_batch, workload.sequence_length, choices.get("micro_batch_size")
    model = build(workload)
    model.load_state_dict(torch.load(folder / "weights.pt", weights_only=True), strict=False)
    if choices.get("checkpointing") == "block":
        for block in model.blocks:
            forward = block.forward
            block.forward = lambda *args, forward=forward: checkpoint(forward, *args, use_reentrant=False)
    fused = choices.get("optimizer_fusion") == "kernel"
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, foreach=False, fused=fused)
    text = numpy.load(folder / "train.npy", mmap_mode="r")
    order = numpy.random.default_rng(workload.seed).permutation((len(text) - 1) // length)

    def step(index: int) -> float:
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * min(1.0, (index + 1) / workload.learning_rate_warmup_steps)
        rows = [text[i * length : i * length + length + 1] for i in order[index * batch : (index + 1) * batch]]
        tokens = torch.from_numpy(numpy.stack(rows).astype(numpy.int64))
        total = 0.0
        for part in tokens.split(micro or batch):
            loss = model(part[:, :-1].contiguous(), part[:, 1:].contiguous()) / (batch * length)
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return total

    for index in range(workload.warmup_steps):
        step(index)
    state = [v for s in optimizer.state.values() for v in s.values()]
    live = sum(t.untyped_storage().nbytes() for t in [*model.parameters(), *model.buffers(), *state])
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recording:
        for index in range(workload.warmup_steps, workload.warmup_steps + 2):
            step(index)
    events = recording.profiler.kineto_results.events()
    peak = live
    for _, size in sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"):
        live += size
        peak = max(peak, live)
    seconds = []
    for index in range(workload.warmup_steps + 2, workload.steps):
        started = time.perf_counter()
        loss = step(index)
        seconds.append(time.perf_counter() - started)
    speed = statistics.median(batch * length / s for s in seconds)
    return {"peak_memory_bytes": peak, "tokens_per_second": speed, "final_loss": loss}


def autotune_trial(settings: dict, choices: dict, folder: Path, server) -> dict:  # noqa: ANN001
    payload = {
        "workload": settings,
        "config": {"micro_batch_size": settings["global_batch"], **choices},
        "folder": str(folder),
        "device": "cpu",
        "cap_bytes": 2**50,
        "requested_at": time.monotonic(),
    }
    measured = server.submit("train", payload, log_file=folder / "trial.log").result().result
    return {key: measured[key] for key in ("peak_memory_bytes", "tokens_per_second", "final_loss")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--by-hand", nargs=3, metavar=("SETTINGS", "CHOICES", "FOLDER"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.by_hand:
        settings, choices, folder = arguments.by_hand
        print(json.dumps(plain_loop(json.loads(settings), json.loads(choices), Path(folder))))
        return
    from importlib.metadata import version

    from autotune.trial.client import TrialServer
    from autotune.workload import make_workload

    settings = make_workload("cpu").to_dict()
    results = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "prepared"
        with TrialServer(log_file=Path(temporary) / "server.log") as server:
            task = {"workload": settings, "folder": str(folder)}
            server.submit("prepare", task, log_file=Path(temporary) / "prepare.log").result()
            for name, choices in CONFIGURATIONS.items():
                pairs = []
                for _ in range(arguments.pairs):
                    command = [sys.executable, __file__, "--by-hand", json.dumps(settings), json.dumps(choices)]
                    by_hand = json.loads(subprocess.check_output([*command, str(folder)], stderr=subprocess.DEVNULL))
                    pairs.append({"by_hand": by_hand, "autotune": autotune_trial(settings, choices, folder, server)})
                ratios = [p["autotune"]["tokens_per_second"] / p["by_hand"]["tokens_per_second"] for p in pairs]
                results[name] = {"speed_ratio_median": statistics.median(ratios), "pairs": pairs}
                print(name, [round(ratio, 3) for ratio in ratios], file=sys.stderr)
    machine = {"system": platform.platform(), "processor": platform.processor() or platform.machine()}
    versions = {"python": platform.python_version(), "torch": version("torch"), "autotune": version("autotune")}
    about = {"date": datetime.now(UTC).isoformat(timespec="seconds"), "machine": machine, "versions": versions}
    print(json.dumps({**about, "workload": settings, "results": results}, indent=1))


if __name__ == "__main__":
    main()
