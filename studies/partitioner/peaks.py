"""Predicts compiled rows of the published table as their trainer wrote them, read in two ways.

    python -m studies.partitioner.peaks bf16_budget_60
    python -m studies.partitioner.peaks bf16_budget_60 --checkpointed --fused

The model has the positions, the loss and the optimizer of the table's trainer
(`studies/peak_memory/as_published.py`), and the loss is compiled as a graph of its own, as the
published figures of the partitioner show. With `--as-ours` it is what `autotune predict` has.
`--checkpointed` checkpoints every block and `--fused` steps in backward: the description of the
row `bf16_budget_60` says so, its settings do not. Runs under torch 2.8 as well. Prints one line of
JSON.
"""

import argparse
import json
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.distributed.fsdp._fully_shard._fsdp_api as fsdp_api
from torch import Tensor

for _name in ("AllGather", "ReduceScatter"):  # autotune imports them; torch 2.8 lacks them
    if not hasattr(fsdp_api, _name):
        setattr(fsdp_api, _name, type(_name, (), {}))

from autotune.predictor.predict import PredictionRequest, predict  # noqa: E402
from autotune.shipped import deep_one  # noqa: E402
from autotune.spec.search_space import bind_space  # noqa: E402
from autotune.spec.space_file import load_space  # noqa: E402
from autotune.spec.workload import make_workload  # noqa: E402
from studies.partitioner.saved import one_fake_mode  # noqa: E402
from studies.peak_memory.as_published import CHANGES, GIB, patched  # noqa: E402

RTX_4090 = "8.9"


def forward_with_loss_apart(self: deep_one.DeepOne, tokens: Tensor, labels: Tensor) -> Tensor:
    """The model's forward with the loss as a compiled graph of its own."""
    x = self.embedding(tokens)
    offsets, causal = deep_one.relative_positions(tokens.shape[1], device=tokens.device)
    for block in self.blocks:
        x = block(x, offsets, causal)
    logits = self.head(self.norm(x))
    torch._dynamo.graph_break()
    kept = logits[:, :-1].contiguous()
    return torch.nn.functional.cross_entropy(
        kept.flatten(0, 1), labels[:, :-1].contiguous().flatten(), reduction="sum"
    )


def predicted(
    row: str, *, layers: int, as_ours: bool, budget: float | None, choices: dict[str, Any]
) -> dict[str, Any]:
    """Returns the predicted peak of a row, with what holds it."""
    space = load_space("peak_memory")
    assert space.reference is not None
    workload = make_workload("cuda", {**space.workload, "layers": layers})
    config = bind_space(space, workload.legality_context, unavailable={}).named[row]
    config = replace(config, **choices)
    if budget is not None:
        config = replace(config, memory_budget=budget)
    request = PredictionRequest(
        workload=workload,
        config=config,
        device="cuda",
        torch_version=space.reference.torch,
        compute_capability=RTX_4090,
    )
    changes = [] if as_ours else [change for each in CHANGES.values() for change in each]
    if not as_ours:
        changes.append((deep_one.DeepOne, "forward", forward_with_loss_apart))
    in_one_mode = one_fake_mode() if torch.__version__ < "2.13" else nullcontext()
    with patched(changes), in_one_mode:
        prediction = predict(request)
    published = (space.reference.rows[row].peak_memory_bytes or 0) / GIB
    peak = prediction.peak_memory_bytes / GIB
    return {
        "torch": torch.__version__,
        "row": row,
        "layers": layers,
        "as_ours": as_ours,
        "choices": choices,
        "budget": config.memory_budget,
        "peak_gib": round(peak, 4),
        "published_gib": round(published, 4),
        "ratio": round(peak / published, 4),
        "phase": prediction.phase,
        "operator": prediction.operator,
        "gib_by_category": {
            category: round(size / GIB, 4)
            for category, size in prediction.bytes_by_category.items()
        },
        "seconds": round(prediction.seconds),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("row")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--budget", type=float, help="in place of the row's")
    parser.add_argument("--as-ours", action="store_true")
    parser.add_argument("--checkpointed", action="store_true")
    parser.add_argument("--fused", action="store_true")
    options = parser.parse_args()
    choices: dict[str, Any] = {}
    if options.checkpointed:
        choices["checkpointing"] = "block"
    if options.fused:
        choices["optimizer_fusion"] = "backward"
    line = predicted(
        options.row,
        layers=options.layers,
        as_ours=options.as_ours,
        budget=options.budget,
        choices=choices,
    )
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
