"""Kernels: norms and gated activations of the model's own code, or Liger's, which keep less.

| value | keeps for the backward pass | costs | needs |
|---|---|---|---|
| none | norm: a float32 copy, the result before its weight; gate: activation | | |
| liger | norm: its input; gate: its inputs | computes both again | a GPU, liger-kernel |

With Liger's kernels go its rotary embedding, which keeps as much as the model's own, and not its
loss, which is another technique. They are put into a model of transformers as `use_liger_kernel` of
its Trainer does. In 16 bit they round slightly differently. Of mixtures of experts, and of models
with other layers than attention, Liger replaces parts of which there is no prediction: those are
left out. Source: liger-kernel 0.8.5, https://github.com/linkedin/Liger-Kernel, arXiv:2410.10989
"""

from typing import Any

import torch
from torch import nn

from autotune.errors import first_line_of
from autotune.models.parts import ModelParts
from autotune.shipped.liger import use_liger
from autotune.spec.config import Kernels
from autotune.techniques.liger_in_torch import replace_in_torch, replaced_modules

_FAMILIES = (
    *("exaone4", "gemma", "gemma2", "gemma3_text", "glm4", "granite", "hunyuan_v1_dense", "llama"),
    *("ministral", "mistral", "olmo2", "olmo3", "phi3", "qwen2", "qwen3", "smollm3"),
)
"""Types of models of `MODEL_TYPE_TO_APPLY_LIGER_FN` with attention and dense layers alone."""


def set_kernels(parts: ModelParts, kernels: Kernels, *, device: torch.device) -> None:
    """Puts Liger's kernels into the model, for kernels `liger`; Liger skips what it does not know.

    Without a GPU, as in predictions, it is plain torch that keeps the same tensors.
    """
    if kernels == "liger" and device.type == "cuda":
        use_liger(_network(parts))
    elif kernels == "liger" and why_not(parts) is None:
        replace_in_torch(_network(parts))


def why_not(parts: ModelParts) -> str | None:
    """Returns why Liger's kernels cannot be put into a model; None if they can."""
    network = _network(parts)
    kind = getattr(getattr(network, "config", None), "model_type", None)
    if kind not in _FAMILIES:
        named = "this model" if kind is None else f"models of type {kind}"
        return f"Liger replaces norms and activations of other models than {named}"
    if not list(replaced_modules(network)):
        return "the model has no norm and no gated activation that Liger replaces"
    return None


def unavailable(kernels: Kernels, *, device: torch.device) -> str | None:
    """Returns why Liger's kernels do not run on `device`, found by running one; None if they do."""
    if kernels == "none":
        return None
    from liger_kernel.ops import LigerSiLUMulFunction  # noqa: PLC0415  # an optional package

    try:
        gate, up = torch.ones(2, 1, 64, device=device, requires_grad=True)
        LigerSiLUMulFunction.apply(gate, up).sum().backward()
    except Exception as error:  # Triton raises errors of many types
        return f"Liger's kernels do not run: {first_line_of(error)}"
    return None


def _network(parts: ModelParts) -> Any:
    network: nn.Module = getattr(parts.model, "network", parts.model)
    return network
