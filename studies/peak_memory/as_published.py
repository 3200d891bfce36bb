"""Adds the differences between the published table's trainer and autotune one after the other.

    python studies/peak_memory/as_published.py

Predicts the six eager rows with every entry of `CHANGES` added to those before it. The first entry
is the bytes that tensors request, without the rounding of the caching allocator. Writes
`as_published.json.xz` and prints the table. Runs in one process and needs neither GPU nor data.

Facts about the trainer are from https://github.com/jdinalt/forgather, in versions near the table's,
reimplemented here.
"""

import platform
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autotune.predictor.predict
from autotune.memory.recording import Recording
from autotune.predictor.cublas import CublasWorkspaces
from autotune.predictor.predict import PredictionRequest, predict
from autotune.shipped import adafactor_fixed_rate as adafactor
from autotune.shipped import deep_one
from autotune.shipped.labels import IGNORED_LABEL
from autotune.spec.prediction import Prediction
from autotune.spec.search_space import bind_space
from autotune.spec.space_file import load_space
from autotune.spec.workload import make_workload
from studies.compressed import write_json

GIB = 1024**3

# -- the loss --------------------------------------------------------------------------------------


def shifted_token_loss(hidden: Tensor, head: nn.Linear, labels: Tensor) -> Tensor:
    """Cross entropy of all positions but the last, on a contiguous copy of the logits."""
    kept = head(hidden)[:, :-1].contiguous()
    wanted = labels[:, :-1].contiguous()
    return F.cross_entropy(
        kept.flatten(0, 1), wanted.flatten(), reduction="sum", ignore_index=IGNORED_LABEL
    )


# -- the positions ---------------------------------------------------------------------------------


def attention_with_own_positions(
    self: deep_one.Attention, x: Tensor, _offsets: Tensor, _causal: Tensor
) -> Tensor:
    """Every layer makes new offsets and a mask in the dtype of the query; autograd saves both."""
    query, key, value = (self._split(part(x)) for part in (self.query, self.key, self.value))
    length = x.shape[1]
    positions = torch.arange(length, device=x.device, dtype=query.dtype)
    bias = (positions[None, :] - positions[:, None]) * self.slopes.view(-1, 1, 1)
    past = torch.ones(length, length, dtype=torch.bool, device=x.device).tril()
    bias.masked_fill_(past.logical_not(), float("-inf"))
    attended = F.scaled_dot_product_attention(query, key, value, attn_mask=bias)
    output: Tensor = self.output(attended.transpose(1, 2).flatten(2))
    return output


def no_positions(_length: int, *, device: torch.device) -> tuple[Tensor, Tensor]:
    """In place of those that our layers share."""
    return torch.empty(0, device=device), torch.empty(0, device=device)


# -- the optimizer ---------------------------------------------------------------------------------


def update_out_of_place(parameter: Tensor, state: dict[str, Any], *, learning_rate: float) -> None:
    """The same rule with a new tensor for each intermediate, alive as long as there."""
    if not state:
        state.update(adafactor._initial_state(parameter))
    state["step"] += 1
    assert parameter.grad is not None
    forgotten = max(state["step"] ** adafactor.DECAY_RATE, 1 - adafactor.LARGEST_BETA2)
    parameter.add_(parameter, alpha=-learning_rate * adafactor.WEIGHT_DECAY)
    gradient = parameter.grad.float()
    update = gradient.square() + adafactor.SQUARE_EPS
    if "square" in state:
        update = gradient / adafactor._blend(state, "square", update, forgotten).sqrt()
    else:
        row = adafactor._blend(state, "row", update.sum(dim=-1), forgotten)
        column = adafactor._blend(state, "column", update.sum(dim=-2), forgotten)
        # The squares stay alive until the product, a third tensor beside them and the outer
        # product, takes their name.
        update = gradient * torch.outer((row / row.sum()).rsqrt(), column.rsqrt())
    update /= (update.square().mean().sqrt() / adafactor.CLIP_THRESHOLD).clamp_(min=1.0)
    if parameter.dtype == update.dtype:
        parameter.add_(update, alpha=-learning_rate)
    else:
        parameter.copy_(parameter.float() - learning_rate * update)


# -- the study -------------------------------------------------------------------------------------


def no_pieces(_recording: Recording, *, workspaces: Iterable[int]) -> int:
    """In place of the caching allocator: every tensor is as large as it asks for."""
    return sum(workspaces)


def workspaces_of_one_handle(self: CublasWorkspaces) -> list[int]:
    """As if forward and backward shared their cuBLAS handle: one workspace per library."""
    by_library = {library: size_bytes for (library, _), size_bytes in self._used.items()}
    return list(by_library.values()) if self._is_persistent else []


CHANGES: dict[str, tuple[tuple[object, str, object], ...]] = {
    "ours": (),
    "+ positions": (
        (deep_one.Attention, "forward", attention_with_own_positions),
        (deep_one, "relative_positions", no_positions),
    ),
    "+ optimizer": ((adafactor, "_update", update_out_of_place),),
    "+ loss": ((deep_one, "full_token_loss", shifted_token_loss),),
}
"""What is patched, each entry beside all those before it."""
WITHOUT_ALLOCATOR = ((autotune.predictor.predict, "count_pieces", no_pieces),)
ONE_HANDLE = ((CublasWorkspaces, "persistent", property(workspaces_of_one_handle)),)


@contextmanager
def patched(changes: Iterable[tuple[object, str, object]]) -> Iterator[None]:
    with ExitStack() as stack:
        for owner, attribute, replacement in changes:
            stack.enter_context(patch.object(owner, attribute, replacement))
        yield


def study_row(request: PredictionRequest) -> dict[str, Any]:
    """The columns of one row; beside them all with one cuBLAS handle in place of two."""
    names, columns = list(CHANGES), {}
    with patched(WITHOUT_ALLOCATOR):
        columns["as asked for"] = described(predict(request))
    changes: list[tuple[object, str, object]] = []
    for name in names:
        changes += CHANGES[name]
        with patched(changes):
            columns[name] = described(predict(request))
    with patched((*changes, *ONE_HANDLE)):
        one_handle = described(predict(request))
    return {"columns": columns, "all_with_one_cublas_handle": one_handle}


def described(prediction: Prediction) -> dict[str, Any]:
    return {
        "gib": prediction.peak_memory_bytes / GIB,
        "phase": prediction.phase,
        "module": prediction.module,
        "operator": prediction.operator,
        "bytes_by_category": dict(prediction.bytes_by_category),
        "largest_holders": [
            [h.category, h.module, h.operator, h.count, h.size_bytes] for h in prediction.holders
        ],
    }


def table_line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    space = load_space("peak_memory")
    assert space.reference is not None
    workload = make_workload("cuda", space.workload)
    named = bind_space(space, workload.legality_context, unavailable={}).named
    results = []
    heads = ["row", "published", "as asked for", *CHANGES, "ratio"]
    print(table_line(heads) + "\n" + table_line(["---"] * len(heads)))
    for name, config in named.items():
        if config.compile != "none":
            continue
        request = PredictionRequest(
            workload=workload, config=config, device="cuda", torch_version=space.reference.torch
        )
        row = study_row(request)
        published = (space.reference.rows[name].peak_memory_bytes or 0) / GIB
        columns = [published, *(column["gib"] for column in row["columns"].values())]
        columns.append(columns[-1] / published)
        print(table_line([name, *(f"{number:.3f}" for number in columns)]), flush=True)
        results.append({"row": name, "published_gib": published, **row, "ratio": columns[-1]})
    write(results, predicted_as_torch=space.reference.torch)


def write(results: list[dict[str, Any]], *, predicted_as_torch: str | None) -> None:
    written = {
        "command": "python studies/peak_memory/as_published.py",
        "date": datetime.now(UTC).date().isoformat(),
        "machine": f"{platform.machine()}, Python {platform.python_version()}, "
        f"torch {version('torch')}",
        "predicted_as_torch": predicted_as_torch,
        "rows": results,
    }
    write_json(Path(__file__).with_suffix(".json.xz"), written)


if __name__ == "__main__":
    main()
