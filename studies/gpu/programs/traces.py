"""First steps of several configurations, compared with the plain training of their precision.

    python studies/gpu/programs/traces.py cuda:0 SEED PRECISION UNTIL [--small]

What the parity gate of a search compares, for one seed and precision: largest relative difference
of the losses of three steps and of a block's gradient at the first. Also how far the plain training
is from that in fp32. No configuration is begun after UNTIL, seconds since 1970. Prints one JSON
object: {"pairs": [...], "open": [...]}.
"""

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from autotune.execution.local import LocalExecutor
from autotune.execution.prepared_folder import PREPARED
from autotune.execution.server.limits import time_limits
from autotune.execution.tasks import Prepare, Trace
from autotune.spec.config import TrainingConfig
from autotune.spec.parity import NoTrace, ParityTrace
from autotune.spec.search_space import SearchSpace
from autotune.spec.study import StudyDefinition
from autotune.spec.workload import make_workload
from autotune.study.running.parity_gate import plain_form

GLOBAL_BATCH = 8
SIZES = {
    "layers": 8,
    "width": 512,
    "heads": 8,
    "sequence_length": 512,
    "global_batch": GLOBAL_BATCH,
}
SMALL_SIZES = {
    "layers": 2,
    "width": 64,
    "heads": 4,
    "sequence_length": 64,
    "global_batch": GLOBAL_BATCH,
    "steps": 10,
}
VARIANTS: tuple[dict[str, Any], ...] = (
    {},
    {"micro_batch_size": 2},
    {"checkpointing": "block"},
    {"checkpointing": "selective"},
    {"optimizer_fusion": "kernel"},
    {"optimizer_fusion": "backward"},
    {"attention": "math"},
    {"attention": "efficient"},
    {"loss": "chunked"},
    {"activation_offload": "cpu"},
    {"compile": "block"},
    {"compile": "block", "memory_budget": 0.4, "micro_batch_size": 2},
    {"compile": "model"},
)
ILLEGAL = {("fp16-mixed", "backward"), ("bf16-stochastic", "kernel")}
"""Of these variants, by precision and optimizer_fusion."""
SMALL_VARIANTS = (*VARIANTS[:3], *VARIANTS[10:11])
SECONDS = 120.0


def main() -> None:
    device, seed, precision, until, *flags = sys.argv[1:]
    is_small = "--small" in flags
    pairs: list[dict[str, Any]] = []
    left_open: list[str] = []
    with tempfile.TemporaryDirectory() as temporary, LocalExecutor(Path(temporary)) as executor:
        info, _ = executor.probe(device, {})
        settings = {**(SMALL_SIZES if is_small else SIZES), "seed": int(seed)}
        definition = StudyDefinition(
            name="traces",
            workload=make_workload(info.type, settings),
            space=SearchSpace(name="traces", techniques={}),
            device=info,
            unavailable={},
            cap_bytes=info.total_memory_bytes,
            seed=0,
            sampler="random",
        )
        folder = Path(temporary) / "traces"
        executor.run(Prepare(workload=definition.workload, folder=folder / PREPARED))

        def trace(config: TrainingConfig) -> ParityTrace | NoTrace:
            training = executor.training(definition, config, study_folder=folder, enforce_cap=False)
            return executor.run(Trace(training=training, dropout=True), limits=time_limits(SECONDS))

        plain = trace(plain_form(TrainingConfig(precision=precision), micro_batch_size=1))
        exact = trace(plain_form(TrainingConfig(), micro_batch_size=1))
        pairs.append({"what": "plain, against fp32", **difference(plain, exact)})
        for variant in SMALL_VARIANTS if is_small else VARIANTS:
            if (precision, variant.get("optimizer_fusion")) in ILLEGAL:
                continue
            config = TrainingConfig(
                **{"precision": precision, "micro_batch_size": GLOBAL_BATCH, **variant}
            )
            if time.time() > float(until):
                left_open.append(config.describe())
                continue
            began = time.monotonic()
            found = difference(trace(config), plain)
            pairs.append(
                {"what": config.describe(), "seconds": round(time.monotonic() - began, 1), **found}
            )
    print(
        json.dumps({"seed": int(seed), "precision": precision, "pairs": pairs, "open": left_open})
    )


def difference(trace: ParityTrace | NoTrace, reference: ParityTrace | NoTrace) -> dict[str, Any]:
    """Returns the largest relative differences of losses and block gradients, and the losses."""
    for one in (trace, reference):
        if isinstance(one, NoTrace):
            return {"failure": one.message}
    assert isinstance(trace, ParityTrace)
    assert isinstance(reference, ParityTrace)
    losses = [
        abs(mine - its) / abs(its) if its else 0.0
        for mine, its in zip(trace.losses, reference.losses)  # noqa: B905
    ]
    blocks = set(trace.gradient_norms) & set(reference.gradient_norms)
    return {
        "loss": max(losses, default=0.0),
        "gradient": max(
            (trace.gradient_difference(reference, block) for block in blocks), default=0.0
        ),
        "losses": list(trace.losses),
    }


if __name__ == "__main__":
    main()
