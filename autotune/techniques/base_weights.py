"""Base weights: the number format of frozen weights, beside which adapters are trained.

| value | bytes a weight | linear layers of the blocks | everything else |
|---|---|---|---|
| trained | 4 or 2 | in the format of training | the same |
| bf16 | 2 | bf16, under autocast to bf16 | bf16 |
| fp16 | 2 | fp16, under autocast to fp16, with scaled losses | fp16 |
| int8 | 1 | whole numbers, a scale per row, by torchao | 16 bits |
| fp8 | 1 | e4m3, a scale for each row, by torchao | 16 bits |
| nf4 | 0.52 | 16 levels, a scale for 64, in 8 bits, by bitsandbytes (arXiv:2305.14314) | 16 bits |

A quantized weight is converted to 16 bits wherever it is multiplied, in forward and in backward:
one layer at a time has a copy of its weight. Source: https://docs.pytorch.org/ao/stable/,
https://huggingface.co/docs/bitsandbytes/main/en/reference/nn/linear4bit

With `-experts` the weights of three dimensions are in the format as well (`shipped/experts.py`).
Autograd keeps the copy of such a weight from forward to backward, where a layer converts it again:
without checkpointing that is all that is saved.
"""

import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily

from autotune.errors import first_line_of
from autotune.shipped.quantized import dequantize
from autotune.spec.config import QUANTIZED_WEIGHTS, BaseWeights
from autotune.techniques.extras import bitsandbytes
from autotune.techniques.tried_layer import why_wrong


def prepare(
    model: nn.Module,
    layers: Iterable[nn.Module],
    value: BaseWeights,
    *,
    compute_dtype: torch.dtype,
    dequantized: bool,
) -> list[nn.Parameter]:
    """Returns the weights of the layers, of `layers`, that are to be quantized when placed.

    The model is on the meta device. For nf4 its layers are replaced by those of bitsandbytes, which
    keep the compressed weight and convert it; torchao's formats are tensors in the same layers.
    """
    chosen = [layer for layer in layers if isinstance(layer, nn.Linear)]
    if QUANTIZED_WEIGHTS[value] != "nf4" or dequantized:
        return [layer.get_parameter("weight") for layer in chosen]
    quantized = []
    paths = {module: path for path, module in model.named_modules()}
    for layer in chosen:
        owner_path, _, name = paths[layer].rpartition(".")
        replacement = _four_bit_layer(layer, compute_dtype)
        setattr(model.get_submodule(owner_path), name, replacement)
        quantized.append(replacement.get_parameter("weight"))
    # peft then uses its layer for bitsandbytes, as for a model that transformers has loaded so.
    model.is_loaded_in_4bit = True  # type: ignore[assignment]
    return quantized


def quantize(weight: nn.Parameter, value: BaseWeights, *, dequantized: bool) -> nn.Parameter:
    """Returns a compressed weight, of a layer or of experts; `dequantized`: what it stands for."""
    compressed = _nf4(weight) if QUANTIZED_WEIGHTS[value] == "nf4" else _of_torchao(weight, value)
    if dequantized:
        return nn.Parameter(dequantize(compressed).to(weight.dtype), requires_grad=False)
    return compressed


def outline(weight: nn.Parameter) -> nn.Parameter:
    """Returns, of a weight on the meta device, the codes of nf4: two of four bits in a byte.

    bitsandbytes itself must not see that device: it remembers the first one that it quantizes on.
    """
    return nn.Parameter(
        torch.empty(-(-weight.numel() // 2), 1, dtype=torch.uint8, device="meta"),
        requires_grad=False,
    )


def keep_scales(layer: nn.Module, name: str, part: nn.Parameter, *, of: Tensor) -> None:
    """Have a layer read `name`, a part of a weight of nf4, once FSDP2 has gathered all of it.

    The layer and the part keep the scales of the whole weight: 0.13 bits for each number of it, on
    every device, as bitsandbytes leaves them in a training that FSDP divides.
    """
    state = getattr(of, "quant_state", None)
    if state is not None:
        part.quant_state = state  # type: ignore[attr-defined]
        layer.quant_state = state
        layer.quant_states = {**getattr(layer, "quant_states", {}), name: state}  # type: ignore[assignment]
        layer.register_forward_pre_hook(functools.partial(_give_scales, name))


def _give_scales(name: str, layer: Any, _arguments: Any) -> None:
    """Give a weight that has been gathered, which is another tensor than its part, the scales."""
    getattr(layer, name).quant_state = layer.quant_states[name]


def unavailable(value: BaseWeights, *, device: torch.device) -> str | None:
    """Returns why frozen weights cannot have this format on `device`; None if they can.

    It is found by a product, forward and backward.
    """
    if value not in QUANTIZED_WEIGHTS:
        return None
    try:
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(256, 256, bias=False, dtype=torch.bfloat16))
        prepare(model, [*model], value, compute_dtype=torch.bfloat16, dequantized=False)
        (layer,) = model
        generator = torch.Generator().manual_seed(0)
        numbers = torch.randn(256, 256, generator=generator).to(device).bfloat16()
        weight = nn.Parameter(numbers, requires_grad=False)
        layer.weight = quantize(weight, value, dequantized=False)
        return why_wrong(layer, numbers)
    except (RuntimeError, NotImplementedError, AssertionError, ImportError, ValueError) as error:
        return first_line_of(error)


def _four_bit_layer(layer: nn.Linear, compute_dtype: torch.dtype) -> nn.Module:
    """Returns bitsandbytes' layer on the meta device, with an ordinary weight at first."""
    with unset_fake_temporarily():  # its own class of parameter cannot hold a fake tensor
        replacement: nn.Module = bitsandbytes().nn.Linear4bit(
            layer.in_features,
            layer.out_features,
            bias=layer.bias is not None,
            compute_dtype=compute_dtype,
            compress_statistics=True,
            quant_type="nf4",
            device="meta",
        )
    # On some CPUs it would rearrange the weights when it first evaluates, which takes memory that
    # training does not, and is not possible for small layers.
    replacement.support_avx512bf16_for_cpu = False  # type: ignore[assignment]
    weight: Any = nn.Parameter(torch.empty_like(layer.weight), requires_grad=False)
    # peft reads these of the weight.
    weight.compress_statistics, weight.quant_type = True, "nf4"
    replacement.weight = weight
    if layer.bias is not None:
        replacement.bias = nn.Parameter(torch.empty_like(layer.bias), requires_grad=False)
    return replacement


def _nf4(weight: nn.Parameter) -> nn.Parameter:
    """Returns the weight as bitsandbytes stores it: packed, with its scales in `quant_state`."""
    packed, state = bitsandbytes().functional.quantize_4bit(
        weight.data, blocksize=64, compress_statistics=True, quant_type="nf4"
    )
    # Not its own class of parameter, which cannot hold a fake tensor: its layer reads only the
    # state.
    compressed = nn.Parameter(packed, requires_grad=False)
    compressed.quant_state = state  # type: ignore[attr-defined]
    return compressed


def _of_torchao(weight: nn.Parameter, value: BaseWeights) -> nn.Parameter:
    from torchao.quantization import (  # noqa: PLC0415
        Float8WeightOnlyConfig,
        Int8WeightOnlyConfig,
        quantize_,
    )

    out_features, in_features = weight.shape[-2:]
    layer = nn.Linear(in_features, out_features, bias=False, device="meta")
    layer.weight = weight
    is_int8 = QUANTIZED_WEIGHTS[value] == "int8"
    quantize_(layer, Int8WeightOnlyConfig() if is_int8 else Float8WeightOnlyConfig())
    return nn.Parameter(layer.weight, requires_grad=False)
