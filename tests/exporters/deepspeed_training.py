"""Trains with DeepSpeed and an export's numbers, and as a trial does; a test runs it as a process.

Prints a JSON object: {case: what DeepSpeed's engine did}.
"""

import json
import os
import sys

import deepspeed
import torch

from autotune.exporters import TARGETS
from autotune.exporters.deepspeed_config import FILE
from autotune.spec.config import TrainingConfig
from tests.exporters.own_training import (
    count_labels,
    distance,
    gives_logits,
    global_batches,
    script_loss,
    small_model,
    trained,
)
from tests.exporters.recipes import recipe

STEPS = 3
WORKLOAD = {
    "layers": 2,
    "width": 32,
    "heads": 2,
    "sequence_length": 16,
    "learning_rate_warmup_steps": 4,
}
MISSING_LABELS = {"padded": {"packing": "padded"}, "chat": {"chat_column": "messages"}}
CASES = {
    "fp32": (
        TrainingConfig(micro_batch_size=2, optimizer_fusion="kernel"),
        {"gradient_clipping": 0.5},
    ),
    "bf16-mixed": (TrainingConfig(micro_batch_size=8, precision="bf16-mixed"), {}),
    "bf16-true": (
        TrainingConfig(micro_batch_size=4, precision="bf16-true", optimizer_fusion="foreach"),
        {},
    ),
    "fp16-mixed": (
        TrainingConfig(micro_batch_size=8, precision="fp16-mixed"),
        {"gradient_clipping": 1.0},
    ),
    "sgd": (TrainingConfig(micro_batch_size=4, optimizer="sgd"), {}),
    "adafactor": (
        TrainingConfig(micro_batch_size=8, optimizer="adafactor"),
        {"learning_rate_warmup_steps": 1},
    ),
    **{
        f"{name} in {steps}": (TrainingConfig(micro_batch_size=8 // steps), settings)
        for name, settings in MISSING_LABELS.items()
        for steps in (1, 4)
    },
}


def run(config, settings):
    asked = recipe(config, device_type="cpu", **{**WORKLOAD, **settings})
    export = TARGETS["deepspeed"].write(asked, "0.19")
    start = small_model(
        asked.workload, config.precision
    )  # bf16-true: the line that the refusal says
    model = gives_logits(small_model(asked.workload, config.precision))
    engine, optimizer, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=json.loads(export.files[FILE])
    )
    rates = []
    for batch in global_batches(asked.workload, STEPS):
        rates.append(optimizer.param_groups[0]["lr"])
        labels_of_step = count_labels(batch)
        for sequences in batch.split(config.micro_batch_size):
            engine.backward(script_loss(engine, asked, sequences, labels_of_step=labels_of_step))
            engine.step()
    return {
        "steps": engine.global_steps,
        "optimizer": type(optimizer).__name__,
        "flags": [bool(optimizer.defaults["foreach"]), bool(optimizer.defaults.get("fused"))],
        "weights": str(next(engine.module.parameters()).dtype),
        "state": sorted(
            {str(t.dtype) for s in optimizer.state.values() for t in s.values() if t.dim()}
        ),
        "rates": rates,
        "distance": distance(engine.module, trained(asked, steps=STEPS), start),
    }


def control():
    """Returns the distance between two precisions, to judge how close equal weights are."""
    plain, mixed = (
        recipe(TrainingConfig(micro_batch_size=8, precision=p), **WORKLOAD)
        for p in ("fp32", "bf16-mixed")
    )
    start = small_model(plain.workload)
    return distance(trained(plain, steps=STEPS), trained(mixed, steps=STEPS), start)


if __name__ == "__main__":
    # Built by a compiler for a minute, and only for several processes on one host.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    os.environ["MASTER_PORT"] = sys.argv[1]
    torch.set_num_threads(1)
    found = {name: run(*case) for name, case in CASES.items()}
    found["control"] = control()
    print("\n" + json.dumps(found))
