"""Trains a small model for 1,000 steps with each optimizer, and evaluates it every 100 steps.

    python studies/optimizers/measure.py                    # goes on where results.json.xz ends
    python studies/optimizers/measure.py --read             # prints the table of README.md

A GPT of two layers and 140,000 parameters learns bytes of the documentation of Python's standard
library. Every optimizer is trained at its default rate, with three seeds; those with a rate of
their own, and AdamW, at 0.3 and 3 times that rate as well. Beside the optimizers of autotune are
two that only this study has: AdamW with moments in bf16 that are rounded to the nearest number, all
in bf16 by the rule of AnyPrecisionAdamW (https://github.com/pytorch/torchdistx), and computed in
float32.
"""

import argparse
import itertools
import tempfile
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from math import exp
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from autotune.execution.process.preparation import prepare
from autotune.execution.tasks import Prepare
from autotune.shipped import adamw_bf16
from autotune.spec.config import TrainingConfig
from autotune.spec.optimizers import OPTIMIZERS
from autotune.spec.training_request import TrainingRequest
from autotune.spec.workload import Workload, make_workload
from autotune.training.step import Diverged
from autotune.training.trainer import Trainer
from studies.compressed import append_row, read_rows

FILE = Path(__file__).parent / "results.json.xz"
STEPS, EVERY = 1000, 100
MULTIPLES = (1.0, 0.3, 3.0)
SEEDS = (0, 1, 2)
BATCH = 8
WITH_RATES = ("adamw", "muon", "apollo", "apollo-mini")
"""Optimizers whose rates are compared; other AdamWs have that of AdamW."""
TO_NEAREST, ALL_IN_BF16 = "adamw-bf16, to nearest", "adamw-bf16, all in bf16"


def update_in_bf16(weight: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
    """Updates by AnyPrecisionAdamW without its Kahan summation: moments change in bf16."""
    beta1, beta2 = group["betas"]
    if not state:
        state["step"] = 0
        state["exp_avg"] = torch.zeros_like(weight, dtype=torch.bfloat16)
        state["exp_avg_sq"] = torch.zeros_like(weight, dtype=torch.bfloat16)
    state["step"] += 1
    assert weight.grad is not None
    gradient = weight.grad.bfloat16()
    weight.mul_(1 - group["lr"] * group["weight_decay"])
    average = state["exp_avg"].mul_(beta1).add_(gradient, alpha=1 - beta1)
    square = state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    denominator = (square.sqrt() / (1 - beta2 ** state["step"]) ** 0.5).add_(group["eps"])
    weight.addcdiv_(average, denominator, value=-group["lr"] / (1 - beta1 ** state["step"]))


def to_nearest(values: Tensor, **_: Any) -> Tensor:
    return values.to(torch.bfloat16)


def workload_of(name: str, *, multiple: float, seed: int) -> Workload:
    optimizer = name.partition(",")[0]
    given: dict[str, Any] = {
        "layers": 2,
        "width": 64,
        "heads": 2,
        "sequence_length": 64,
        "global_batch": BATCH,
        "steps": STEPS,
        "warmup_steps": 50,
        "seed": seed,
        "evaluation_sequences": 64,
    }
    rate = make_workload("cpu", given).learning_rate_of(optimizer) * multiple
    return make_workload("cpu", {**given, "learning_rates": {optimizer: rate}})


def train(name: str, *, multiple: float, seed: int) -> dict[str, Any]:
    """Returns the row of one training."""
    workload = workload_of(name, multiple=multiple, seed=seed)
    config = TrainingConfig(optimizer=name.partition(",")[0], micro_batch_size=BATCH)
    with tempfile.TemporaryDirectory() as folder:
        prepare(Prepare(workload=workload, folder=Path(folder) / "prepared"))
        request = TrainingRequest(
            workload=workload,
            config=config,
            folder=Path(folder) / "prepared",
            device="cpu",
            cap_bytes=2**40,
            requested_at=time.monotonic(),
        )
        trainer = Trainer(request)
        updater: Any = trainer.training.updater
        rule: AbstractContextManager[Any] = nullcontext()
        if name == TO_NEAREST:
            rule = patch.object(adamw_bf16, "round_to_bf16", to_nearest)
        elif name == ALL_IN_BF16:
            rule = patch.object(adamw_bf16, "_update", update_in_bf16)
        began, curve = time.perf_counter(), []
        batches = trainer.batches()
        for step in range(STEPS):
            with rule:
                trainer.take_step(step, next(batches))
            if (step + 1) % EVERY == 0:
                curve.append(perplexity_of(trainer))
        state_bytes = sum(tensor.untyped_storage().nbytes() for tensor in updater.state())
        return {
            "optimizer": name,
            "multiple": multiple,
            "rate": workload.learning_rate_of(config.optimizer),
            "seed": seed,
            "perplexity": curve,
            "state_bytes": state_bytes,
            "seconds": round(time.perf_counter() - began, 1),
        }


def perplexity_of(trainer: Trainer) -> float | None:
    """Returns the perplexity on held-out text, or None if the training diverged."""
    try:
        loss = trainer._evaluate()
    except Diverged:
        return None
    trainer.training.parts.model.train()
    assert loss is not None
    return round(exp(loss), 4)


def trainings() -> Iterator[tuple[str, float, int]]:
    """Yield name, multiple of the default rate and seed; the default rates first."""
    names = [*OPTIMIZERS, TO_NEAREST, ALL_IN_BF16]
    names = [name for name in names if not OPTIMIZERS.get(name) or not OPTIMIZERS[name].is_paged]
    for seed, name in itertools.product(SEEDS, names):
        yield name, 1.0, seed
    for multiple, name in itertools.product(MULTIPLES[1:], WITH_RATES):
        yield name, multiple, SEEDS[0]


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| optimizer | rate | state, bytes | perplexity after 100 | 300 | 1,000 | seeds |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, multiple in sorted({(row["optimizer"], row["multiple"]) for row in rows}):
        own = [r for r in rows if (r["optimizer"], r["multiple"]) == (name, multiple)]
        ends = ", ".join(f"{row['perplexity'][-1]:.3f}" for row in own)
        first = own[0]
        lines.append(
            f"| {name} | {first['rate']:g} | {first['state_bytes']:,} | "
            f"{first['perplexity'][0]:.2f} | {first['perplexity'][2]:.3f} | {ends} | {len(own)} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--read", action="store_true")
    parser.add_argument("--only", nargs="*", help="names of optimizers")
    parser.add_argument("--seeds", nargs="*", type=int, default=SEEDS)
    chosen = parser.parse_args()
    rows = read_rows(FILE)
    if chosen.read:
        print(table(rows))
        return
    done = {(row["optimizer"], row["multiple"], row["seed"]) for row in rows}
    for name, multiple, seed in trainings():
        if (name, multiple, seed) in done or seed not in chosen.seeds:
            continue
        if chosen.only and name not in chosen.only:
            continue
        row = train(name, multiple=multiple, seed=seed)
        append_row(FILE, row)
        print(row, flush=True)


if __name__ == "__main__":
    main()
