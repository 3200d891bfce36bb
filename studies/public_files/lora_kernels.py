"""Predicts what axolotl's LoRA kernels save, which trials do not have.

    python -m studies.public_files.lora_kernels

They compute a layer with its adapter, or a whole feed-forward part, in one function that keeps its
input, and of a feed-forward part the two inputs of its activation; peft's layers keep a copy of
their input for each adapter, and what the activation makes. Here functions that keep the same
tensors are put into the model of a prediction. Their values are not those of the kernels.

Source: axolotl 0.19.0, src/axolotl/kernels/lora.py: what LoRA_MLP, LoRA_QKV and LoRA_O save.
"""

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MethodType
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from autotune.models.parts import ModelParts
from autotune.predictor.predict import predict
from autotune.spec.config import TrainingConfig
from autotune.spec.prediction import PredictionRequest
from autotune.spec.workload import make_workload
from autotune.techniques import kernels

LLAMA_3_8B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}
GIB = 2**30


def weights(layer: Any, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the frozen matrix and both of the adapter, in the number format of the input."""
    first, second = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    return layer.base_layer.weight, first.to(dtype), second.to(dtype)


def output(layer: Any, rows: Tensor) -> Tensor:
    frozen, first, second = weights(layer, rows.dtype)
    return (rows @ frozen.t()).addmm_(rows @ first.t(), second.t())


def of_input(layer: Any, gradient: Tensor) -> Tensor:
    frozen, first, second = weights(layer, gradient.dtype)
    return (gradient @ frozen).addmm_(gradient @ second, first)


def of_adapter(layer: Any, rows: Tensor, gradient: Tensor) -> list[Tensor]:
    _, first, second = weights(layer, rows.dtype)
    found = (gradient @ second).t() @ rows, gradient.t() @ (rows @ first.t())
    return [one.to(layer.lora_A["default"].weight.dtype) for one in found]


class FusedLayer(torch.autograd.Function):
    """A layer with its adapter, which keeps its input."""

    @staticmethod
    def forward(ctx: Any, layer: Any, rows: Tensor, *adapter: Tensor) -> Tensor:
        ctx.layer = layer
        ctx.save_for_backward(rows)
        return output(layer, rows.flatten(0, -2)).unflatten(0, rows.shape[:-1])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (rows,) = ctx.saved_tensors
        flat, gradient = rows.flatten(0, -2), gradient.flatten(0, -2)
        trained = of_adapter(ctx.layer, flat, gradient)
        return None, of_input(ctx.layer, gradient).view_as(rows), *trained


class FusedFeedForward(torch.autograd.Function):
    """A feed-forward part, which keeps its input and those of its activation."""

    @staticmethod
    def forward(ctx: Any, part: Any, rows: Tensor, *adapters: Tensor) -> Tensor:
        flat = rows.flatten(0, -2)
        gate, up = output(part.gate_proj, flat), output(part.up_proj, flat)
        ctx.part = part
        ctx.save_for_backward(rows, gate, up)
        hidden = torch.empty_like(gate)
        return output(part.down_proj, hidden).unflatten(0, rows.shape[:-1])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        rows, gate, up = ctx.saved_tensors
        part, flat, gradient = ctx.part, rows.flatten(0, -2), gradient.flatten(0, -2)
        # Its kernel writes into these three: the hidden numbers, and the gradients of the others.
        hidden = of_input(part.down_proj, gradient)
        trained = [
            *of_adapter(part.gate_proj, flat, gate),
            *of_adapter(part.up_proj, flat, up),
            *of_adapter(part.down_proj, hidden, gradient),
        ]
        frozen, first, second = weights(part.gate_proj, gate.dtype)
        found = of_input(part.up_proj, up).addmm_(gate, frozen).addmm_(gate @ second, first)
        return None, found.view_as(rows), *trained


def adapters(*layers: Any) -> list[Tensor]:
    return [part["default"].weight for layer in layers for part in (layer.lora_A, layer.lora_B)]


def run_layer(layer: Any, rows: Tensor) -> Any:
    return FusedLayer.apply(layer, rows, *adapters(layer))


def run_feed_forward(part: Any, rows: Tensor) -> Any:
    trained = adapters(part.gate_proj, part.up_proj, part.down_proj)
    return FusedFeedForward.apply(part, rows, *trained)


def fuse(parts: ModelParts, *_: Any, **__: Any) -> None:
    for module in parts.model.modules():
        if isinstance(getattr(module, "gate_proj", None), nn.Module):
            module.forward = MethodType(run_feed_forward, module)
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            if layer := getattr(module, name, None):
                layer.forward = MethodType(run_layer, layer)


def peak_bytes(model: Path, **choices: Any) -> int:
    workload = make_workload(
        "cuda", {"model": str(model), "global_batch": 2, "sequence_length": 4096}
    )
    config = TrainingConfig(
        precision="bf16-mixed",
        adapter="lora",
        adapter_rank=16,
        base_weights="bf16",
        attention="flash",
        loss="chunked",
        allocator="expandable",
        micro_batch_size=2,
        **choices,
    )
    request = PredictionRequest(
        workload=workload,
        config=config,
        device="cuda",
        compute_capability="9.0",
        extrapolates="any",
    )
    return predict(request).peak_memory_bytes


def main() -> None:
    with TemporaryDirectory() as folder:
        model = Path(folder) / "config.json"
        model.write_text(json.dumps(LLAMA_3_8B))
        for checkpointing in ("block", "none"):
            plain = peak_bytes(model, checkpointing=checkpointing)
            with patch.object(kernels, "set_kernels", fuse):
                fused = peak_bytes(model, checkpointing=checkpointing)
            share = 100 * (1 - fused / plain)
            print(
                f"checkpointing {checkpointing}: {plain / GIB:.2f} GiB, with the kernels "
                f"{fused / GIB:.2f} GiB, {share:.1f} % less",
                flush=True,
            )


if __name__ == "__main__":
    main()
