"""Tensor parallelism: each matrix of a block is split among the devices, which train the same rows.

The first matrices of a part of a block (query, key, value, gate, up) are split by their outputs, so
that each device has some heads of the attention or some inner units of the feed-forward. The last
one (output, down) is split by its inputs, and the devices add up what they have of its result. In
the backward pass they add up the gradients of the part's input instead. This is the scheme of
Megatron-LM (arXiv:1909.08053).

| | |
|---|---|
| saves | weights, gradients, optimizer's state and inner activations of the blocks, by its degree |
| does not | embedding, head, norms and the activations between parts: each device has all of them |
| costs | two sums of [rows, sequence, width] over the devices for each block and pass |
| needs | a plan for the model (below), and heads and inner widths that the degree divides |

Plans: of `gpt` and `deep-one` here, and of a family of transformers the `base_model_tp_plan` of its
configuration class, whose styles are described in `Style`. A device has its parts as ordinary
parameters, so that every optimizer, DistributedDataParallel and FSDP2 treat them as they treat
others. (torch's own `parallelize_module` makes DTensors, which batched updates do not take together
with ordinary parameters, and splits a fused query, key and value in the wrong places.)

Devices that train the same rows compute the same in what is not split: they draw the same random
numbers, and sums over devices are the same on each.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
import torch.distributed
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import _functional_collectives
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from autotune.errors import IllegalConfiguration
from autotune.models.parts import ModelParts
from autotune.models.weights import Placement
from autotune.shipped.deep_one import DeepOne
from autotune.shipped.gloo import add_up, gather
from autotune.shipped.gpt import GPT
from autotune.shipped.hugging_face import HuggingFaceModel
from autotune.techniques.gloo_compiled import use_gloo_in_compiled_code

Style = Literal[
    "colwise",
    "colwise_gather_output",
    "rowwise",
    "rowwise_split_input",
    "replicated_with_grad_allreduce",
    "three_colwise",
    "split",
]
"""How a layer is split. The first five are names of transformers.

`colwise`: by outputs; `colwise_gather_output`: by outputs, which are then put together again;
`rowwise`: by inputs; `rowwise_split_input`: by inputs, of which each device takes its own from all;
`replicated_with_grad_allreduce`: not split, but applied to the heads of a device, so that its
gradient is a part of a sum; `three_colwise`: three matrices one above the other, each as `colwise`;
`split`: a parameter of one number a head.
"""

_SPLIT_OUTPUTS: tuple[Style, ...] = ("colwise", "colwise_gather_output", "three_colwise")
_SPLIT_INPUTS: tuple[Style, ...] = ("rowwise", "rowwise_split_input")

_PLANS: Mapping[type[nn.Module], Mapping[str, Style]] = {
    GPT: {
        "blocks.*.attention.query_key_value": "three_colwise",
        "blocks.*.attention.output": "rowwise",
        "blocks.*.feed_forward.gate": "colwise",
        "blocks.*.feed_forward.up": "colwise",
        "blocks.*.feed_forward.down": "rowwise",
    },
    DeepOne: {
        "blocks.*.attention.query": "colwise",
        "blocks.*.attention.key": "colwise",
        "blocks.*.attention.value": "colwise",
        "blocks.*.attention.slopes": "split",
        "blocks.*.attention.output": "rowwise",
        "blocks.*.feed_forward.gate": "colwise",
        "blocks.*.feed_forward.up": "colwise",
        "blocks.*.feed_forward.down": "rowwise",
    },
}


# -- which part of a weight ------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Split:
    """How a weight is divided: along a dimension, in each of `matrices` that it consists of."""

    dimension: int
    matrices: int = 1

    def part(self, weight: Tensor, index: int, *, of: int) -> Tensor:
        """Returns one of `of` parts, a view where the weight is one matrix."""
        length = weight.shape[self.dimension] // (self.matrices * of)
        if self.matrices == 1:
            return weight.narrow(self.dimension, index * length, length)
        return torch.cat(
            [
                matrix.narrow(self.dimension, index * length, length)
                for matrix in weight.chunk(self.matrices, dim=self.dimension)
            ],
            dim=self.dimension,
        )

    def together(self, parts: Sequence[Tensor]) -> Tensor:
        """Returns the weight of which these are all parts."""
        pieces = [part.chunk(self.matrices, dim=self.dimension) for part in parts]
        return torch.cat(
            [piece for matrix in zip(*pieces, strict=True) for piece in matrix],
            dim=self.dimension,
        )


_SPLITS: Mapping[Style, Split] = {
    "colwise": Split(dimension=0),
    "colwise_gather_output": Split(dimension=0),
    "three_colwise": Split(dimension=0, matrices=3),
    "split": Split(dimension=0),
    "rowwise": Split(dimension=1),
    "rowwise_split_input": Split(dimension=1),
}


# -- what the model needs --------------------------------------------------------------------------


def why_not(parts: ModelParts, degree: int) -> str | None:
    """Returns why a model cannot be split among `degree` devices; None if it can."""
    if degree == 1 or any(isinstance(module, SplitLinear) for module in parts.model.modules()):
        return None
    plan = _plan_of(parts)
    if isinstance(plan, str):
        return plan
    layers = _layers(parts.model, plan)
    if not layers:
        return "no layer of the model is in its plan"
    if any(style in ("colwise", "three_colwise") for style in plan.values()):
        for kind, heads in _heads(parts).items():
            if heads % degree:
                return f"its {heads} {kind} cannot be divided among {degree} devices"
    for name, style in layers.items():
        reason = _why_no_split(parts.model, name, style, degree)
        if reason is not None:
            return reason
    return None


def _why_no_split(model: nn.Module, name: str, style: Style, degree: int) -> str | None:
    if style in ("split", "replicated_with_grad_allreduce"):
        return None
    layer = model.get_submodule(name)
    if type(layer) is not nn.Linear:
        return f"its layer {name} is a {type(layer).__name__} and no torch.nn.Linear"
    sizes = {"outputs": layer.out_features} if style in _SPLIT_OUTPUTS else {}
    if style in _SPLIT_INPUTS:
        sizes = {"inputs": layer.in_features}
    for kind, size in sizes.items():
        if size % (degree * _SPLITS[style].matrices):
            return f"the {size} {kind} of its layer {name} cannot be divided among {degree} devices"
    return None


def _plan_of(parts: ModelParts) -> Mapping[str, Style] | str:
    """Returns {name of layers of the model, with * for a number: style}, or why there is none."""
    if type(parts.model) in _PLANS:
        return _PLANS[type(parts.model)]
    if not isinstance(parts.model, HuggingFaceModel):
        return "there is no plan of how to split the matrices of a model of your own"
    network = parts.model.network
    family = network.config.model_type
    plan = getattr(network.config, "base_model_tp_plan", None)
    if not plan:
        return f"transformers has no plan of how to split the matrices of {family}"
    base = next(
        name for name, module in parts.model.named_modules() if module is network.base_model
    )
    for name, style in plan.items():
        if style not in get_args(Style):
            return f"the plan of {family} splits {name} as {style}, which autotune does not have"
    # Only blocks: embeddings and head are on every device.
    return {f"{base}.{name}": style for name, style in plan.items() if ".*." in name}


def _heads(parts: ModelParts) -> dict[str, int]:
    """Returns the numbers of heads, of which a device must have whole ones."""
    if isinstance(parts.model, GPT | DeepOne):
        attention: Any = parts.blocks[0].attention
        return {"heads": attention.heads}
    config = parts.model.network.config  # type: ignore[union-attr]
    heads = {
        "heads": getattr(config, "num_attention_heads", None),
        "heads of keys and values": getattr(config, "num_key_value_heads", None),
    }
    return {kind: number for kind, number in heads.items() if number is not None}


def _layers(model: nn.Module, plan: Mapping[str, Style]) -> dict[str, Style]:
    """Returns {name: style} of all layers and parameters of the model that are in the plan."""
    patterns = {
        re.compile(re.escape(name).replace(r"\*", r"\d+")): style for name, style in plan.items()
    }
    names = [name for name, _ in (*model.named_modules(), *model.named_parameters())]
    found = {}
    for name in names:
        for pattern, style in patterns.items():
            if pattern.fullmatch(name):
                found[name] = style
    return found


# -- splitting it ----------------------------------------------------------------------------------


class TensorParallel:
    """This process as one of the devices among which the matrices of a model are split."""

    def __init__(self, mesh: DeviceMesh) -> None:
        """`mesh` has one dimension: the devices that train the same rows."""
        self.group = mesh.get_group()
        self.size = mesh.size()
        self.index = mesh.get_local_rank()
        if mesh.device_type == "cpu":
            use_gloo_in_compiled_code()
        self._split_of_name: dict[str, Split] = {}
        self._added_up_names: set[str] = set()
        self._split_of: dict[Tensor, Split] = {}
        self._added_up: list[nn.Parameter] = []

    def split(self, parts: ModelParts) -> None:
        """Replace the layers of a model on the meta device by those of this device.

        Raises IllegalConfiguration where the model cannot be split.
        """
        reason = why_not(parts, self.size)
        if reason is not None:
            raise IllegalConfiguration(
                f"tensor_parallel {self.size} cannot be applied: {reason}",
                hint="use another tensor_parallel",
            )
        plan = _plan_of(parts)
        assert not isinstance(plan, str)
        layers = _layers(parts.model, plan)
        owners = {name.rpartition(".")[0] for name in layers}
        for owner_name in owners:
            owner = parts.model.get_submodule(owner_name)
            own = {name for name in layers if name.rpartition(".")[0] == owner_name}
            # Once for all its layers, where nothing else takes the input of this part of a block.
            is_shared = all(
                any(f"{owner_name}.{name}.".startswith(f"{layer}.") for layer in own)
                for name, _ in owner.named_parameters()
            )
            has_outputs = any(layers[name] in _SPLIT_OUTPUTS for name in own)
            if is_shared and has_outputs:
                owner.register_forward_pre_hook(self._begin_part, with_kwargs=True)
            for name in own:
                self._split_layer(owner, name, layers[name], adds_up_input_gradient=not is_shared)

    def _split_layer(
        self, owner: nn.Module, path: str, style: Style, *, adds_up_input_gradient: bool
    ) -> None:
        name = path.rpartition(".")[2]
        child = getattr(owner, name)
        if style == "replicated_with_grad_allreduce":
            self._added_up_names |= {f"{path}.{own}" for own, _ in child.named_parameters()}
            return
        split = _SPLITS[style]
        if style == "split":
            self._split_of_name[path] = split
            setattr(owner, name, nn.Parameter(split.part(child.detach(), 0, of=self.size)))
            return
        self._split_of_name[f"{path}.weight"] = split
        if style in _SPLIT_OUTPUTS:
            self._split_of_name[f"{path}.bias"] = split
        layer = SplitLinear(child, style, group=self, adds_up_input_gradient=adds_up_input_gradient)
        setattr(owner, name, layer)

    def _begin_part(
        self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Have the gradient of a part's input added up: each device has that of its own layers."""
        if args:
            return (_added_up_in_backward(args[0], self.group), *args[1:]), kwargs
        hidden = _added_up_in_backward(kwargs["hidden_states"], self.group)
        return args, {**kwargs, "hidden_states": hidden}

    def part(self, name: str, weight: Tensor) -> Tensor:
        """Returns what this device has of the parameter `name`, of which `weight` is the whole."""
        split = self._split_of_name.get(name)
        return weight if split is None else split.part(weight, self.index, of=self.size)

    def follow(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Note the parameters that are trained, by their names when the model was split."""
        for name, parameter in parameters.items():
            if name in self._split_of_name:
                self._split_of[parameter] = self._split_of_name[name]
            if name in self._added_up_names:
                self._added_up.append(parameter)

    def is_split(self, parameter: Tensor) -> bool:
        """Returns whether a device has only a part of this parameter."""
        return parameter in self._split_of

    # -- gradients ---------------------------------------------------------------------------------

    @torch.no_grad()
    def add_up_gradients(self) -> None:
        """Add up the gradients of the parameters that all devices have, each of its own heads."""
        for parameter in self._added_up:
            self._add_up_gradient(parameter)

    def add_up_in_backward(self) -> None:
        """Add up those gradients in the backward pass, before an optimizer that steps there."""
        for parameter in self._added_up:
            parameter.register_post_accumulate_grad_hook(self._add_up_gradient)

    @torch.no_grad()
    def _add_up_gradient(self, parameter: Tensor) -> None:
        gradient = parameter.grad
        if gradient is not None:
            local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
            local.copy_(add_up(local, self.group))

    @torch.no_grad()
    def total_norm(self, parameters: Iterable[nn.Parameter]) -> Tensor:
        """Returns the norm of all gradients together, of whole weights."""
        own: list[Tensor] = []
        common: list[Tensor] = []
        for parameter in parameters:
            if parameter.grad is not None:
                (own if self.is_split(parameter) else common).append(parameter.grad)
        square = add_up(_square_of_norm(own), self.group) if own else torch.zeros(())
        return (square + _square_of_norm(common)).sqrt() if common else square.sqrt()

    @torch.no_grad()
    def whole_gradient(self, parameter: Tensor, gradient: Tensor) -> Tensor:
        """Returns the gradient of the whole weight, of which this device has a part."""
        split = self._split_of.get(parameter)
        if split is None:
            return gradient
        return split.together(gather(gradient, self.group))


def _square_of_norm(gradients: Sequence[Tensor]) -> Tensor:
    # With a loop: a batched version would allocate as much as all gradients again.
    norm = nn.utils.get_total_norm(gradients, foreach=False)
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    return norm.square()


class SplitWeights(Placement):
    """Gives each device its parts of the weights, of which it reads no more."""

    def __init__(
        self, tensor_parallel: TensorParallel, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(dtype=dtype, device=device)
        self._tensor_parallel = tensor_parallel

    def change(self, parts: ModelParts) -> ModelParts:
        self._tensor_parallel.split(parts)
        return parts

    def place(self, name: str, parameter: nn.Parameter, weight: Tensor | None) -> nn.Parameter:
        assert weight is not None
        return super().place(name, parameter, self._tensor_parallel.part(name, weight))


# -- layers and what the devices exchange ----------------------------------------------------------


class SplitLinear(nn.Linear):
    """What one device has of a linear layer."""

    def __init__(
        self,
        whole: nn.Linear,
        style: Style,
        *,
        group: TensorParallel,
        adds_up_input_gradient: bool,
    ) -> None:
        inputs, outputs = whole.in_features, whole.out_features
        if style in _SPLIT_OUTPUTS:
            outputs //= group.size
        else:
            inputs //= group.size
        has_bias = whole.bias is not None
        super().__init__(inputs, outputs, bias=has_bias, device="meta", dtype=whole.weight.dtype)
        self.style = style
        self._devices = group
        self._adds_up_input_gradient = adds_up_input_gradient and style in _SPLIT_OUTPUTS

    def forward(self, x: Tensor) -> Tensor:
        devices = self._devices
        if self.style in _SPLIT_OUTPUTS:
            if self._adds_up_input_gradient:
                x = _added_up_in_backward(x, devices.group)
            output = F.linear(x, self.weight, self.bias)
            if self.style == "colwise_gather_output":
                output = _put_together(output, devices)
            return output
        if self.style == "rowwise_split_input":
            x = _take_own_part(x, devices)
        output = _added_up(F.linear(x, self.weight), devices.group)
        return output if self.bias is None else output + self.bias


def _sum(tensor: Tensor, group: Any) -> Tensor:
    if torch.compiler.is_compiling():
        total: Tensor = _functional_collectives.all_reduce(tensor, "sum", group)
        return total
    return add_up(tensor, group)


class _AddedUpInBackward(torch.autograd.Function):
    """The input, which is the same on all devices; its gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _sum(gradient, ctx.group), None


class _AddedUp(torch.autograd.Function):
    """The sum of the devices' inputs; its gradient is the same on all devices."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        return _sum(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, None


class _PutTogether(torch.autograd.Function):
    """The devices' inputs one after the other in the last dimension."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, devices: TensorParallel) -> Tensor:
        ctx.devices = devices
        return _gathered(x, devices)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _own_part(gradient, ctx.devices), None


class _OwnPart(torch.autograd.Function):
    """This device's part of the last dimension."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, devices: TensorParallel) -> Tensor:
        ctx.devices = devices
        return _own_part(x, devices)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _gathered(gradient, ctx.devices), None


def _added_up_in_backward(x: Tensor, group: Any) -> Tensor:
    result: Tensor = _AddedUpInBackward.apply(x, group)  # type: ignore[no-untyped-call]
    return result


def _added_up(x: Tensor, group: Any) -> Tensor:
    result: Tensor = _AddedUp.apply(x, group)  # type: ignore[no-untyped-call]
    return result


def _put_together(x: Tensor, devices: TensorParallel) -> Tensor:
    result: Tensor = _PutTogether.apply(x, devices)  # type: ignore[no-untyped-call]
    return result


def _take_own_part(x: Tensor, devices: TensorParallel) -> Tensor:
    result: Tensor = _OwnPart.apply(x, devices)  # type: ignore[no-untyped-call]
    return result


def _own_part(x: Tensor, devices: TensorParallel) -> Tensor:
    return x.chunk(devices.size, dim=-1)[devices.index].contiguous()


def _gathered(x: Tensor, devices: TensorParallel) -> Tensor:
    if torch.compiler.is_compiling():
        gathered: Tensor = _functional_collectives.all_gather_tensor(
            x.contiguous(), x.dim() - 1, devices.group
        )
        return gathered
    return torch.cat(gather(x, devices.group), dim=-1)
