"""Adapters: small trained matrices beside the frozen linear layers of the blocks, by peft.

| value | trained per layer of n inputs and m outputs | costs |
|---|---|---|
| none | the layer itself, n m | gradients and optimizer state of n m |
| lora | two matrices, rank (n + m) (arXiv:2106.09685) | two narrow products a layer |
| dora | the same and m magnitudes (arXiv:2402.09353) | the norm of the whole weight, each forward |

The product of the two matrices is scaled by alpha / rank, so that one learning rate is right for
all ranks, or by alpha / sqrt(rank) (rsLoRA, arXiv:2312.03732). Adapters are in the number format
of training: float32 under autocast. Biases, norms, embeddings and the head stay frozen.

Facts of the workload say what else peft is told: alpha, the scaling, ranks and alphas of single
layers, and whether an adapter begins at random and zero, or as the part of its weight with the
largest singular values (PiSSA, arXiv:2404.02948), of which the frozen weight is then the rest.

With adapter_kernels `fused` a layer with its LoRA is one function, which keeps its input as it was
given and no copies of it, and a gated feed-forward part keeps its input and the two inputs of its
activation, which is computed again (`shipped/fused_adapters.py`).

Two facts of the workload change what an adapter needs. `adapter_dropout` drops a part of what each
adapter reads: its layer keeps a mask and one more input for the backward pass, on a CPU the mask in
the numbers' own format, on CUDA in a byte each (aten::native_dropout). `modules_to_save` names
modules of which copies are trained whole, in the format of adapters or of the frozen weights; the
frozen original of each stays in memory, as peft's ModulesToSaveWrapper keeps it.

The order of things makes trials and predictions alike: peft changes the model on the meta device,
then every parameter gets its tensor, real or fake, from `AdaptedWeights`. Source:
https://huggingface.co/docs/peft/package_reference/lora
"""

import math
import re
import warnings
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily

from autotune.errors import IllegalConfiguration, InvalidInput, suggestion
from autotune.models.parts import ModelParts
from autotune.models.weights import Placement
from autotune.shipped.adapter_weights import principal_matrices, without_principal
from autotune.shipped.experts import dequantize_in_calls, expert_weights, reader_of
from autotune.shipped.frozen_on_host import FrozenOnHost, frozen_in_blocks
from autotune.shipped.quantized import dequantize
from autotune.shipped.routers import routers_in
from autotune.spec.adapters import lora_arguments
from autotune.spec.config import (
    DEPENDENT_FIELDS,
    QUANTIZED_EXPERTS,
    QUANTIZED_WEIGHTS,
    AdapterTargets,
    TrainingConfig,
)
from autotune.spec.workload import Workload, end_of_path
from autotune.techniques import base_weights, precision

_INPUT, _OUTPUT, _MAGNITUDE = "lora_A", "lora_B", "lora_magnitude_vector"
_COPY = ".modules_to_save.default"
"""What peft adds to the path of the copy of a module that it trains whole."""
_BASE = ".base_layer."
"""What the name of a weight has where an adapter is beside it."""
_ADDED = re.compile(r"\.(base_layer|original_module|modules_to_save\.default)(?=\.)")
"""What peft adds to the name of a weight, once for each weight of experts in a module."""


class AdaptedWeights(Placement):
    """Freezes a model, adds adapters to it and stores its weights as a configuration says.

    With `dequantized` the weights are quantized and converted back, so that plain layers compute
    what quantized ones should: the reference of the parity check.
    """

    def __init__(
        self,
        config: TrainingConfig,
        workload: Workload,
        *,
        device: torch.device,
        dequantized: bool = False,
    ) -> None:
        super().__init__(dtype=_base_dtype(config), device=device)
        self._config = config
        self._workload = workload
        self._dequantized = dequantized
        self._parts: ModelParts | None = None
        self._names_in_file: dict[str, str] = {}
        self._saved_dtype = precision.weights_dtype(config.precision)
        if workload.modules_to_save_dtype == "base" and self.dtype != torch.float16:
            self._saved_dtype = self.dtype
        self._quantized: frozenset[nn.Parameter] = frozenset()
        self._unquantized = (0, 0)
        self._norms: dict[str, Tensor] = {}
        """The norm of each row of the weight that is beside an adapter, by the adapter's path."""
        self._principal: dict[tuple[str, str], Tensor] = {}
        """The matrices that adapters begin with as PiSSA's, by their paths and `_INPUT` or
        `_OUTPUT`."""

        self.on_host: FrozenOnHost | None = None
        """Where the frozen weights of blocks are, with offload frozen."""
        self._block_of: dict[str, int] = {}

    def change(self, parts: ModelParts) -> ModelParts:
        """Freeze a model on the meta device, add the adapters and copy the modules to save."""
        saved = saved_modules(parts, self._workload.modules_to_save)
        check_patterns(parts, self._workload)
        for technique in DEPENDENT_FIELDS["adapter"]:
            value = getattr(self._config, technique)
            reason = missing_layers(
                parts,
                technique,
                value,
                saved=saved,
                targets=(self._config.adapter_targets,),
                own_ranks=self._workload.adapter_rank_pattern,
            )
            if reason:
                raise IllegalConfiguration(
                    f"{technique} {value} cannot be applied: {reason}",
                    hint=f"use another {technique}, or no adapter",
                )
        self._names_in_file = _names_in_file(parts.model)
        parts.model.requires_grad_(False)
        targets = [path for path, _ in _adapted(parts, self._config.adapter_targets, saved=saved)]
        experts = target_experts(parts)
        if self._config.base_weights in QUANTIZED_WEIGHTS:
            layers = [layer for _, layer in target_layers(parts, "all-linear")]
            in_layers = base_weights.prepare(
                parts.model,
                layers,
                self._config.base_weights,
                compute_dtype=self.dtype,
                dequantized=self._dequantized,
            )
            self._quantized = frozenset(in_layers)
        if self._config.base_weights in QUANTIZED_EXPERTS:
            self._quantized |= {parts.model.get_parameter(path) for path in experts}
        quantized = sum(weight.numel() for weight in self._quantized)
        numbers = sum(parameter.numel() for parameter in parts.model.parameters())
        self._unquantized = numbers - quantized, quantized
        adapted = experts if self._config.adapter_targets == "experts" else []
        _inject(parts.model, targets, adapted, self._config, self._workload)
        if self._config.base_weights in QUANTIZED_EXPERTS and not self._dequantized:
            dequantize_in_calls(parts.model, experts)
        if parts.head in saved.values():
            parts = _with_copied_head(parts, saved)
        if self._config.offload == "frozen":
            blocks = list(parts.blocks)
            self._block_of = frozen_in_blocks(parts.model, blocks)
            self.on_host = FrozenOnHost(len(blocks))
        self._parts = parts
        return parts

    def name_in_file(self, name: str) -> str | None:
        if any(f".{part}." in name for part in (_INPUT, _OUTPUT, _MAGNITUDE)):
            return None  # it is of the adapter
        return self._names_in_file[_ADDED.sub("", name)]

    def place(self, name: str, parameter: nn.Parameter, weight: Tensor | None) -> nn.Parameter:
        if weight is None:
            return self._initial(name, parameter)
        if f"{_COPY}." in name:  # of the frozen weight, as peft makes it
            begun = weight.to(self.dtype).to(self._saved_dtype, copy=True)
            return nn.Parameter(begun.to(self.device))
        placed = super().place(name, parameter, weight)
        if parameter in self._quantized:
            placed = base_weights.quantize(
                placed, self._config.base_weights, dequantized=self._dequantized
            )
        self._note_norm(name, placed)
        placed = self._without_principal(name, placed)
        if self.on_host is not None and name in self._block_of:
            self.on_host.take(self._block_of[name], placed)
        return placed

    def outline(self, name: str, parameter: nn.Parameter, weight: Tensor | None) -> nn.Parameter:
        outline = super().outline(name, parameter, weight)
        if weight is None:
            return nn.Parameter(outline.to(precision.weights_dtype(self._config.precision)))
        if f"{_COPY}." in name:
            return nn.Parameter(outline.to(self._saved_dtype))
        if parameter in self._quantized and not self._dequantized:
            return base_weights.outline(outline)
        return outline

    def whole(self, name: str, parameter: nn.Parameter, weight: Tensor | None) -> Tensor:
        # What is computed of a weight is computed on the device, which so has one of them whole.
        is_read = self._config.adapter == "dora" or self._workload.adapter_init == "pissa"
        if weight is None or (is_read and _BASE in name) or parameter in self._quantized:
            return self.place(name, parameter, weight)
        return super().whole(name, parameter, weight)

    def unquantized(self) -> tuple[int, int]:
        return self._unquantized

    def _module(self, path: str) -> nn.Module:
        assert self._parts is not None
        return self._parts.model.get_submodule(path)

    def _note_norm(self, name: str, weight: Tensor) -> None:
        """Compute the magnitudes of DoRA that a placed weight begins with."""
        adapter, is_base, own_name = name.partition(_BASE)
        if self._config.adapter == "dora" and is_base and own_name == "weight":
            of_inputs = 1 if isinstance(self._module(adapter + ".base_layer"), nn.Linear) else 0
            numbers = dequantize(weight).to(precision.weights_dtype(self._config.precision))
            self._norms[adapter] = torch.linalg.norm(numbers, dim=of_inputs)

    def _without_principal(self, name: str, weight: nn.Parameter) -> nn.Parameter:
        """Returns what is left of a placed weight where PiSSA's adapter begins as a part of it."""
        adapter, is_base, own_name = name.partition(_BASE)
        if self._workload.adapter_init == "standard" or not is_base or own_name != "weight":
            return weight
        layer: Any = self._module(adapter)
        [rank], [scale] = layer.r.values(), layer.scaling.values()
        is_transposed = not isinstance(layer.base_layer, nn.Linear)
        numbers = weight.detach().t() if is_transposed else weight.detach()
        seed = self._workload.seed + zlib.crc32(adapter.encode())
        first, second = principal_matrices(numbers, rank=rank, scale=scale, seed=seed)
        self._principal[adapter, _INPUT], self._principal[adapter, _OUTPUT] = first, second
        rest = without_principal(numbers, first, second, scale=scale)
        return nn.Parameter(rest.t().contiguous() if is_transposed else rest, requires_grad=False)

    def _initial(self, name: str, parameter: nn.Parameter) -> nn.Parameter:
        """Returns a new parameter of an adapter: the first matrix random, the second zero.

        The magnitudes of DoRA are the norms of the weight, which has been placed before, and both
        matrices of PiSSA a part of it.

        The random numbers are drawn on the host, in float32, and depend only on seed and name:
        adapters of one rank begin alike on every device and in every number format.
        """
        adapter, is_magnitude, _ = name.partition(f".{_MAGNITUDE}.")
        if is_magnitude:
            return nn.Parameter(self._norms.pop(adapter).detach())
        path, _, of_adapter = name.rpartition(".lora_")
        principal = self._principal.pop((path, f"lora_{of_adapter[0]}"), None)
        initial = torch.zeros(parameter.shape) if principal is None else principal
        if principal is None and f".{_INPUT}." in name:
            generator = torch.Generator().manual_seed(
                self._workload.seed + zlib.crc32(name.encode())
            )
            nn.init.kaiming_uniform_(initial, a=math.sqrt(5), generator=generator)
        dtype = precision.weights_dtype(self._config.precision)
        return nn.Parameter(initial.to(dtype).to(self.device))


def target_layers(parts: ModelParts, targets: AdapterTargets) -> list[tuple[str, nn.Module]]:
    """Returns path and layer of the linear layers that get adapters, empty if there are none.

    They are those of the blocks, or of their attention; of the whole model but its head where no
    blocks were found.
    """
    roots = _roots(parts)
    if targets == "attention":
        if parts.attention_name is None:
            return []
        roots = [getattr(block, parts.attention_name) for block in roots]
    paths = {module: path for path, module in parts.model.named_modules()}
    found = {
        module: paths[module]
        for root in roots
        for module in root.modules()
        if is_linear(module) and module is not parts.head
    }
    return [(path, module) for module, path in found.items()]


def target_experts(parts: ModelParts) -> list[str]:
    """Returns the paths of the weights of experts in the blocks, empty if there are none."""
    return expert_weights(parts.model, _roots(parts))


def _roots(parts: ModelParts) -> list[nn.Module]:
    return [parts.model] if parts.blocks_owner is None else list(parts.blocks)


def saved_modules(parts: ModelParts, names: Iterable[str]) -> dict[str, nn.Module]:
    """Returns {path: module} of the modules that are trained whole, by the ends of their names.

    It is peft's rule: `norm` is every module whose name ends so. Raises InvalidInput for a name
    that no module has, and for modules that hold others of them, or the blocks.
    """
    model = parts.model
    # Also a second name of a module: peft copies it apart, as it does tied weights.
    modules = dict(model.named_modules(remove_duplicate=False))
    found: dict[str, nn.Module] = {}
    for name in names:
        paths = [path for path in modules if path.endswith(name)]
        if not paths:
            known = dict.fromkeys(path.rpartition(".")[2] for path in modules if path)
            last = [one for one in known if not one.isdecimal()]
            raise InvalidInput(
                f"the model has no module {name!r} to train beside adapters",
                hint=suggestion(name, last, otherwise=f"it has {', '.join(last[:_MOST_NAMED])}"),
            )
        found |= {path: modules[path] for path in paths}
    blocks = set() if parts.blocks_owner is None else set(parts.blocks)
    for path, module in found.items():
        others = {one for one in found.values() if one is not module} | blocks
        if not others.isdisjoint(module.modules()):
            raise InvalidInput(
                f"module {path!r} cannot be trained whole beside adapters: it has blocks of the "
                "model, or others of modules_to_save, in it",
                hint="name modules inside it in modules_to_save",
            )
        if not any(True for _ in module.parameters()):
            raise InvalidInput(
                f"module {path!r} has no weights to train", hint="leave it out of modules_to_save"
            )
    return found


def check_patterns(parts: ModelParts, workload: Workload) -> None:
    """Raises InvalidInput where a rank or alpha by pattern is for no layer, or a rank too large.

    Of those that are not adapted, too: other configurations of a search may adapt them.
    """
    layers = target_layers(parts, "all-linear")
    for what in ("rank", "alpha"):
        for pattern, value in getattr(workload, f"adapter_{what}_pattern").items():
            found = [one for one in layers if re.match(end_of_path(pattern), one[0])]
            if not found:
                known = list(dict.fromkeys(path.rpartition(".")[2] for path, _ in layers))
                raise InvalidInput(
                    f"no linear layer of the blocks is {pattern!r}, which has its own {what}",
                    hint=suggestion(pattern, known, otherwise=f"they are {', '.join(known)}"),
                )
            path, layer = min(found, key=lambda path_and_layer: width_of(path_and_layer[1]))
            if what == "rank" and value > width_of(layer):
                raise InvalidInput(
                    f"rank {value} of {pattern} is larger than layer {path}, which is "
                    f"{_sizes(layer)}",
                    hint=f"give a rank of {width_of(layer)} or less",
                )


_MOST_NAMED = 12
"""Of the names that a hint lists, the first ones."""


def _adapted(
    parts: ModelParts, targets: AdapterTargets, *, saved: dict[str, nn.Module]
) -> list[tuple[str, nn.Module]]:
    """Returns the target layers that are not trained whole."""
    whole = {inner for module in saved.values() for inner in module.modules()}
    return [(path, one) for path, one in target_layers(parts, targets) if one not in whole]


def _with_copied_head(parts: ModelParts, saved: dict[str, nn.Module]) -> ModelParts:
    """Returns the parts with the copy of the head, which computes the logits."""
    path = next(path for path, module in saved.items() if module is parts.head) + _COPY
    copied: Any = parts.model.get_submodule(path)
    return replace(parts, head=copied)


def _names_in_file(model: nn.Module) -> dict[str, str]:
    """Returns {name: the name under which the file has it} of parameters and buffers.

    The file has tied weights once, under the first of their names.
    """
    first: dict[Tensor, str] = {}
    tensors = [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]
    return {name: first.setdefault(tensor, name) for name, tensor in tensors}


def is_linear(module: nn.Module) -> bool:
    """Returns whether peft can put an adapter beside it: torch's Linear and GPT-2's Conv1D."""
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"


def width_of(layer: nn.Module) -> int:
    """Returns the smaller of the layer's two sizes, the largest useful rank."""
    return min(_weight_of(layer).shape)


def _routers(parts: ModelParts, layers: Mapping[str, nn.Module]) -> set[nn.Module]:
    """Returns the routers, and the layers with a single output as a gate of what is shared has.

    They are narrower than any useful rank, and no reason against it.
    """
    single = {one for one in layers.values() if 1 in _weight_of(one).shape}
    return single.union(*map(routers_in, _roots(parts)))


def missing_layers(
    parts: ModelParts,
    technique: str,
    value: Any,
    *,
    saved: dict[str, nn.Module],
    targets: Sequence[AdapterTargets] = ("all-linear",),
    own_ranks: Iterable[str] = (),
) -> str | None:
    """Returns why a model cannot have this choice about adapters; None if it can.

    `technique` is one of the fields about adapters, and `value` its choice. `saved` are the modules
    that are trained whole beside adapters. A rank is for any of `targets`, but for layers with a
    rank of their own by a pattern of `own_ranks`.
    """
    if technique == "adapter_targets" and not _adapted(parts, value, saved=saved):
        if value == "attention":
            return "no linear layers were found in the attention of the model's blocks"
        if saved:
            return "all linear layers of the model's blocks are among modules_to_save"
        return "the model's blocks have no linear layers"
    if technique == "adapter_rank":
        for choice in targets:
            adapted = dict(_adapted(parts, choice, saved=saved))
            routers = _routers(parts, adapted)
            ends = [end_of_path(pattern) for pattern in own_ranks]
            bounding = {
                path: one
                for path, one in adapted.items()
                if one not in routers and not any(re.match(end, path) for end in ends)
            }
            narrowest = min(bounding, key=lambda path: width_of(bounding[path]), default=None)
            if narrowest is not None and value > width_of(bounding[narrowest]):
                return (
                    f"it is larger than layer {narrowest}, which is {_sizes(bounding[narrowest])}"
                )
    needs_experts = (technique, value) == ("adapter_targets", "experts") or (
        technique == "base_weights" and value in QUANTIZED_EXPERTS
    )
    experts = target_experts(parts) if needs_experts else []
    if needs_experts and not experts:
        return "the model's blocks have no weights of three dimensions, as experts have"
    whole = {inner: path for path, one in saved.items() for inner in one.modules()}
    for path in experts:
        holder = path.rpartition(".")[0]
        owner = parts.model.get_submodule(holder)
        if owner in whole:
            return f"experts are frozen, and modules_to_save has {whole[owner]}"
        reader = reader_of(parts.model, path)
        if parts.model.get_submodule(reader) in _roots(parts):
            return f"{path} is a weight of a whole block, not of a module inside it"
        if technique == "adapter_targets" and reader != holder:
            return f"peft adds adapters where a module is called, and {holder} only holds weights"
    if technique == "base_weights" and value in QUANTIZED_WEIGHTS:
        layers = target_layers(parts, "all-linear")
        if not any(isinstance(layer, nn.Linear) for _, layer in layers):
            return "the model's blocks have no torch.nn.Linear"
        for _, layer in layers:
            if layer in whole:
                return (
                    f"what is quantized cannot be trained, and modules_to_save has {whole[layer]}"
                )
    return None


def _base_dtype(config: TrainingConfig) -> torch.dtype:
    """Returns the number format of frozen weights that are not quantized."""
    if config.base_weights == "trained":
        return precision.weights_dtype(config.precision)
    return precision.compute_dtype(config.precision)


def _inject(
    model: nn.Module,
    targets: list[str],
    experts: list[str],
    config: TrainingConfig,
    workload: Workload,
) -> None:
    # An extra, and a second to import.
    from peft import LoraConfig, inject_adapter_in_model  # noqa: PLC0415
    from peft.tuners.lora import dora  # noqa: PLC0415

    # It knows a compressed weight by the class of its parameter, which fake tensors cannot have.
    dora.dequantize_module_weight = _uncompressed_weight

    layers = [model.get_submodule(target) for target in targets]
    arguments = lora_arguments(config, workload)
    arguments["init_lora_weights"] = False  # `AdaptedWeights` sets them
    settings = LoraConfig(
        **arguments,
        target_modules=targets,
        target_parameters=experts,
        fan_in_fan_out=not any(isinstance(layer, nn.Linear) for layer in layers),
    )
    with warnings.catch_warnings(), unset_fake_temporarily():
        warnings.simplefilter(
            "ignore"
        )  # about fan_in_fan_out where kinds of layers are mixed, and ties
        # On the meta device in predictions, too: peft moves the layers that it makes, which
        # parameters with fake tensors do not allow.
        inject_adapter_in_model(settings, model)


def _uncompressed_weight(layer: nn.Module) -> Tensor:
    return dequantize(_weight_of(layer))


def _sizes(layer: nn.Module) -> str:
    return " x ".join(map(str, _weight_of(layer).shape))


def _weight_of(layer: nn.Module) -> Tensor:
    assert isinstance(layer.weight, Tensor)
    return layer.weight
