"""A training configuration is one choice for every technique; `RULES` says which choices conflict.

`RULES` is the only list of illegal combinations; each rule carries the sentence that explains it.
What a particular device cannot do is not decided here: a probe finds it
(`autotune/execution/process/answers.py`).
"""

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal, get_args

from autotune.errors import IllegalConfiguration, InvalidInput, suggestion
from autotune.shipped.fp8_sizes import FP8_MULTIPLE
from autotune.spec.limits import Range
from autotune.spec.optimizers import OPTIMIZERS, Optimizer, OptimizerFacts
from autotune.spec.schema import Built
from autotune.spec.setting import NO_LIMIT, SizeOrNone, number, option_of, whole_number
from autotune.spec.technique import Technique

Precision = Literal[
    "fp32",
    "tf32",
    "bf16-mixed",
    "bf16-true",
    "fp16-mixed",
    "bf16-stochastic",
    "fp8",
    "int8-mixed",
    "fp64",
    "fp16-true",
    "as-is",
]
_PRECISIONS_OF_SCRIPTS = ("fp64", "fp16-true", "as-is")
_SEARCHED_PRECISIONS = [name for name in get_args(Precision) if name not in _PRECISIONS_OF_SCRIPTS]
Checkpointing = Literal[
    "none",
    "attention",
    "selective",
    "selective-2",
    "save-attention",
    "every-4",
    "every-2",
    "block",
    "sqrt",
]
CompileScope = Literal["none", "block", "model"]
CompileMode = Literal["default", "reduce-overhead", "max-autotune-no-cudagraphs", "max-autotune"]
OptimizerFusion = Literal["none", "foreach", "kernel", "backward", "as-is"]
Allocator = Literal["default", "expandable"]
Attention = Literal["auto", "flash", "efficient", "cudnn", "math"]
Loss = Literal["full", "chunked"]
Kernels = Literal["none", "liger"]
ActivationOffload = Literal["none", "cpu"]
Adapter = Literal["none", "lora", "dora"]
AdapterTargets = Literal["all-linear", "attention", "experts"]
AdapterKernels = Literal["none", "fused"]
FeedForward = Literal["whole", "tiled"]
GradientAccumulationDtype = Literal["weights", "fp32"]
BaseWeights = Literal[
    "trained",
    "bf16",
    "fp16",
    "int8",
    "fp8",
    "nf4",
    "int8-experts",
    "fp8-experts",
    "nf4-experts",
]
Sharding = Literal["none", "ddp", "zero1", "zero2", "zero3", "hsdp"]
Offload = Literal["none", "optimizer", "all", "frozen"]
GradientReduction = Literal["fp32", "bf16"]
Engine = Literal["torch", "deepspeed"]


_GRAPHS_OF_A_GPU = "CUDA graphs need a GPU: use max-autotune-no-cudagraphs"


@dataclass(frozen=True, kw_only=True)
class TrainingConfig(Built):
    """One choice for every technique: flat, hashable and ready for JSON.

    Raises InvalidInput for a value that the technique does not have.
    """

    is_partial: ClassVar = True

    precision: Annotated[
        Precision,
        Technique(
            help=f"Number formats of weights and computation: {', '.join(_SEARCHED_PRECISIONS)}.",
            metavar="NAME",
            is_chosen_first=True,
            of_scripts=_PRECISIONS_OF_SCRIPTS,
            packages={"fp8": "torchao"},
        ),
    ] = "fp32"
    """Number formats of computation and storage. `*-mixed`: autocast over fp32 weights;
    `bf16-true`: the whole model in bf16; `bf16-stochastic`: the same with stochastic rounding of
    the update; `fp8` and `int8-mixed`: bf16-mixed with the matrix products of the blocks in 8 bits.
    Only scripts have `fp64` and `fp16-true`, whose weights are in these formats, and `as-is`, where
    they are in several, or the script itself turns autocast on: nothing is changed then."""

    checkpointing: Annotated[
        Checkpointing,
        Technique(
            help="Which activations to recompute in the backward pass: "
            f"{', '.join(get_args(Checkpointing))}.",
            metavar="NAME",
        ),
    ] = "none"
    """Which activations are dropped in the forward pass and recomputed in the backward pass."""

    compile: Annotated[
        CompileScope,
        Technique(
            help="What to compile with torch.compile.",
        ),
    ] = "none"
    """What torch.compile compiles as one unit: nothing, each transformer block, or the whole model
    with its loss."""

    memory_budget: Annotated[
        float,
        number("a number from 0.0 to 1.0", least=0.0, most=1.0),
        Technique(
            help="Activation memory budget of torch.compile.",
            metavar="SHARE",
            refines="compile",
        ),
    ] = 1.0
    """torch.compile's activation memory budget, from 1.0 (save what the partitioner
    would save by default) to 0.0 (recompute everything)."""

    compile_mode: Annotated[
        CompileMode,
        Technique(
            help="Mode of torch.compile: with CUDA graphs, with kernels chosen by trying, or both.",
            metavar="NAME",
            is_added_later=True,
            refines="compile",
            held_by_the_host={
                "reduce-overhead": _GRAPHS_OF_A_GPU,
                "max-autotune": _GRAPHS_OF_A_GPU,
            },
        ),
    ] = "default"
    """Mode of torch.compile. `reduce-overhead` launches a compiled model by CUDA graphs;
    `max-autotune-no-cudagraphs` tries several kernels for each product; `max-autotune` does both.
    """

    optimizer: Annotated[
        Optimizer,
        Technique(
            help=f"Optimizer: {', '.join(OPTIMIZERS)}.",
            metavar="NAME",
            is_chosen_first=True,
            packages={name: facts.package for name, facts in OPTIMIZERS.items() if facts.package},
        ),
    ] = "adamw"
    """What updates the weights (`spec/optimizers.py`)."""

    optimizer_fusion: Annotated[
        OptimizerFusion,
        Technique(
            help="How the optimizer applies its updates.",
            of_scripts=("as-is",),
        ),
    ] = "none"
    """How the update runs: a loop over the parameters, batched (`foreach`), one kernel
    (`fused=True`), or inside the backward pass. Only scripts have `as-is`, where their optimizers
    update in several ways: nothing is changed then."""

    micro_batch_size: Annotated[
        int,
        whole_number(1, 2**31 - 1),
        Technique(
            help="Sequences per forward pass of a device.",
            flag="--micro-batch",
            shown_default="its part of the global batch",
            is_chosen_first=True,
        ),
    ] = 1
    """Sequences per forward pass; the global batch divided by it is the number of accumulation
    steps."""

    allocator: Annotated[
        Allocator,
        Technique(
            help="Mode of torch's CUDA memory allocator.",
        ),
    ] = "default"
    """CUDA caching allocator: default segments or expandable segments."""

    attention: Annotated[
        Attention,
        Technique(
            help="Kernel of the attention.",
            is_added_later=True,
        ),
    ] = "auto"
    """Kernel behind scaled_dot_product_attention; `auto`: torch's own choice, call by call."""

    loss: Annotated[
        Loss,
        Technique(
            help="Compute the loss on all logits at once or in chunks.",
            is_added_later=True,
        ),
    ] = "full"
    """Whether the logits of the whole micro batch exist at once, or chunk by chunk."""

    feed_forward: Annotated[
        FeedForward,
        Technique(
            help="Compute feed-forward parts of all tokens at once or in tiles.",
            is_added_later=True,
        ),
    ] = "whole"
    """Whether the feed-forward part of a block computes all tokens of a sequence at once, or tile
    by tile, each of which is computed again in the backward pass."""

    gradient_accumulation_dtype: Annotated[
        GradientAccumulationDtype,
        Technique(
            help="Number format in which gradients of micro batches are added up.",
            is_added_later=True,
        ),
    ] = "weights"
    """Number format in which the gradients of micro batches are added up: that of the weights, or
    fp32, from which each gradient is rounded to that of its weight before the update."""

    activation_budget: Annotated[
        SizeOrNone,
        Technique(
            help="Peak memory for which it is planned what each block recomputes.",
            metavar="SIZE",
            is_added_later=True,
        ),
    ] = NO_LIMIT
    """Peak of a step that decides, operator by operator, what each block keeps for the backward
    pass; the rest is recomputed. `none`: there is no plan."""

    kernels: Annotated[
        Kernels,
        Technique(
            help="Kernels in place of the model's norms and gated activations.",
            is_added_later=True,
            held_by_the_host={"liger": "Liger's kernels are written in Triton and need a GPU"},
            packages={"liger": "liger_kernel"},
        ),
    ] = "none"
    """What computes norms and gated activations: the code of the model, or Liger's kernels, which
    keep less for the backward pass."""

    activation_offload: Annotated[
        ActivationOffload,
        Technique(
            help="Where activations wait for the backward pass.",
            is_added_later=True,
            held_by_the_host={"cpu": "activations are in the host's memory already"},
        ),
    ] = "none"
    """Where large activations are stored until the backward pass: on the device, or in pinned host
    memory."""

    adapter: Annotated[
        Adapter,
        Technique(
            help="Train small matrices beside frozen weights.",
            is_added_later=True,
            packages={"lora": "peft", "dora": "peft"},
        ),
    ] = "none"
    """What is trained: the model's own weights (`none`), or small matrices beside its linear layers
    while the weights are frozen."""

    adapter_rank: Annotated[
        int,
        whole_number(1, 2**16),
        Technique(
            help="Inner width of an adapter's matrices.",
            is_added_later=True,
            refines="adapter",
        ),
    ] = 8
    """Inner width of an adapter's two matrices."""

    adapter_targets: Annotated[
        AdapterTargets,
        Technique(
            help="Layers of the blocks that have adapters.",
            is_added_later=True,
            refines="adapter",
        ),
    ] = "all-linear"
    """What has adapters: all linear layers of the blocks, those of the attention, or all and the
    experts, whose weights have three dimensions."""

    adapter_kernels: Annotated[
        AdapterKernels,
        Technique(
            help="Compute layers together with their LoRA, keeping less.",
            is_added_later=True,
            refines="adapter",
        ),
    ] = "none"
    """What computes layers with adapters: peft's layers, or one function for a layer and its LoRA,
    or for a feed-forward part with those of its layers, which keep less for the backward pass."""

    base_weights: Annotated[
        BaseWeights,
        Technique(
            help=f"Number format of frozen weights: {', '.join(get_args(BaseWeights))}.",
            metavar="FORMAT",
            is_added_later=True,
            refines="adapter",
            packages={
                **dict.fromkeys(("int8", "fp8", "int8-experts", "fp8-experts"), "torchao"),
                **dict.fromkeys(("nf4", "nf4-experts"), "bitsandbytes"),
            },
        ),
    ] = "trained"
    """Number format in which frozen weights are stored. `trained`: that of training; `bf16` or
    `fp16`, that of autocast; or the linear layers of the blocks in `int8`, `fp8` or `nf4`, and the
    rest in 16 bits. `-experts`: the weights of experts in that format, too."""

    sharding: Annotated[
        Sharding,
        Technique(
            help="What the devices of a trial share out.",
            shown_default="ddp with several devices",
            is_added_later=True,
            needs_devices=True,
        ),
    ] = "none"
    """What the devices of a trial share out among them: nothing (`ddp`), the optimizer's state
    (`zero1`), gradients and weights between steps (`zero2`), or weights within a step as well
    (`zero3`); `hsdp` is zero3 within groups of devices, and ddp among the groups."""

    sharding_group: Annotated[
        int,
        whole_number(1, 2**31 - 1),
        Technique(
            help="Devices that share out one copy of the model, with hsdp.",
            is_added_later=True,
            refines="sharding",
            needs_devices=True,
        ),
    ] = 1
    """Devices that share out one copy of the model, with `hsdp`."""

    tensor_parallel: Annotated[
        int,
        whole_number(1, 2**31 - 1),
        Technique(
            help="Devices among which each matrix of a block is split.",
            is_added_later=True,
            needs_devices=True,
        ),
    ] = 1
    """Devices among which each matrix of a block is split."""

    offload: Annotated[
        Offload,
        Technique(
            help="What is in host memory between its uses.",
            is_added_later=True,
            held_by_the_host={
                "optimizer": "the optimizer's state is in the host's memory already",
                "all": "all tensors are in the host's memory already",
                "frozen": "frozen weights are in the host's memory already",
            },
            packages={"optimizer": "torchao"},
        ),
    ] = "none"
    """What is in host memory between its uses: nothing, the optimizer's state, weights, gradients
    and state, or the frozen weights of blocks beside adapters."""

    gradient_reduction: Annotated[
        GradientReduction,
        Technique(
            help="Number format in which devices add up gradients.",
            is_added_later=True,
            refines="sharding",
            needs_devices=True,
        ),
    ] = "fp32"
    """Number format in which devices add up their gradients."""

    engine: Annotated[
        Engine,
        Technique(
            help="Whose code shares out the training.",
            is_added_later=True,
            packages={"deepspeed": "deepspeed"},
        ),
    ] = "torch"
    """Whose code shares out the training: torch's, or DeepSpeed's."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            # Thousands are loaded at once: only what is not known at once gets the full check.
            if value is not _DEFAULTS[name] and not _is_known(name, value):
                object.__setattr__(self, name, check_value(name, value))
        # 1 and 1.0, and 0.0 and -0.0, are the same budget and must give the same fingerprint.
        object.__setattr__(self, "memory_budget", float(self.memory_budget) + 0.0)

    def to_dict(self) -> dict[str, Any]:
        """Returns the choices by field name."""
        return {name: getattr(self, name) for name in TECHNIQUES}

    @cached_property
    def fingerprint(self) -> str:
        """Twelve hexadecimal digits of a hash: equal for equal configurations only."""
        hashed = {}
        for name, value in self.to_dict().items():
            is_default = value == getattr(_DEFAULT_CONFIG, name)
            if not TECHNIQUES[name].is_added_later or not is_default:
                hashed[name] = value
        return hashlib.sha256(_SORTED_JSON.encode(hashed).encode()).hexdigest()[:12]

    @cached_property
    def numerics_class(self) -> tuple[str, ...]:
        """Key of the configurations that compute the same numbers, up to the order of operations.

        In full precision compiled and eager training are in one class. In 16 bits they are in two,
        because fusion changes what is rounded; other kernels and a loss that is summed over chunks
        also change it.
        """
        trained: str = self.optimizer
        if self.adapter != "none":
            trained = (
                f"{self.adapter}/{trained}, rank {self.adapter_rank}, {self.adapter_targets}, "
                f"{self.base_weights} base"
            )
        if self.precision in FULL_PRECISIONS:
            return (self.precision, trained, "eager")
        rounding = ["eager" if self.compile == "none" else "compiled"]
        if self.compile_mode != "default":
            rounding.append(self.compile_mode)
        if self.attention != "auto":
            rounding.append(self.attention)
        if self.loss != "full":
            rounding.append(self.loss)
        if self.feed_forward != "whole":
            rounding.append(self.feed_forward)
        if self.gradient_accumulation_dtype != "weights":
            rounding.append(f"gradients in {self.gradient_accumulation_dtype}")
        if self.kernels != "none":
            rounding.append(self.kernels)
        if self.adapter_kernels != "none":
            rounding.append(f"{self.adapter_kernels} adapters")
        return (self.precision, trained, *rounding)

    @property
    def kind_of_training(self) -> str:
        """`full` without an adapter, else the adapter: trainings of one kind share a rate."""
        return "full" if self.adapter == "none" else self.adapter

    @property
    def recomputation(self) -> str:
        """What decides which activations are recomputed, with its value; empty where none are."""
        if self.activation_budget != NO_LIMIT:
            return f"activation_budget {self.activation_budget}"
        return "" if self.checkpointing == "none" else f"checkpointing {self.checkpointing}"

    @cached_property
    def compiled_class(self) -> tuple[Any, ...] | None:
        """Key of the configurations that compile the same code; None where nothing is compiled.

        The update is never compiled, and the loss only with the whole model. Several memory budgets
        may lead to the same code, too, but only a prediction knows that.
        """
        if self.compile == "none":
            return None
        not_compiled = {"optimizer", "optimizer_fusion", "gradient_accumulation_dtype", "allocator"}
        if self.compile == "block":
            not_compiled.add("loss")
        return tuple(value for name, value in self.to_dict().items() if name not in not_compiled)

    def describe(self) -> str:
        """Returns precision, micro batch and every choice that is not the default, as text."""
        techniques = []
        for name, value in self.to_dict().items():
            if name in ("precision", "micro_batch_size"):
                continue
            if value != getattr(_DEFAULT_CONFIG, name):
                techniques.append(f"{name.replace('_', '-')} {value}")
        return ", ".join([self.precision, *techniques, f"micro-batch {self.micro_batch_size}"])


_SORTED_JSON = json.JSONEncoder(sort_keys=True)

_TYPES = {field.name: get_args(field.type) for field in dataclasses.fields(TrainingConfig)}
TECHNIQUES: Mapping[str, Technique] = {
    field: annotations[-1] for field, (_, *annotations) in _TYPES.items()
}
"""{field: its declaration}, in the order of the fields."""

FIELD_ORDER = tuple(sorted(TECHNIQUES, key=lambda field: not TECHNIQUES[field].is_chosen_first))
"""The order in which a configuration is built: the legal values of a field depend only on the
fields before it."""

CHOICES: Mapping[str, tuple[Any, ...]] = {
    field: values for field in FIELD_ORDER if (values := get_args(_TYPES[field][0]))
}
"""The values of each technique that has a fixed list of values."""

_CHOICES = {field: frozenset(values) for field, values in CHOICES.items()}

_DEFAULTS = {field.name: field.default for field in dataclasses.fields(TrainingConfig)}

_NUMBERS: Mapping[str, tuple[Any, Range]] = {
    field: (kind, numbers)
    for field, (kind, *_) in _TYPES.items()
    if (numbers := option_of(TrainingConfig, field).format.range) is not None
}
"""The type and the range of each other technique."""

WHOLE_NUMBERS = tuple(field for field in FIELD_ORDER if _NUMBERS.get(field, (str,))[0] is int)


def _is_known(field: str, value: Any) -> bool:
    """Returns whether a value surely is one of a technique, as a fast check finds."""
    if value.__class__ is str:
        return value in _CHOICES.get(field, ()) or value == _DEFAULTS[field]
    if field not in _NUMBERS:
        return False
    kind, numbers = _NUMBERS[field]
    return value.__class__ is kind and numbers.least <= value <= numbers.most


OF_SCRIPTS = {
    field: technique.of_scripts for field, technique in TECHNIQUES.items() if technique.of_scripts
}
"""{technique: values that only a script has} for the techniques of which it brings its own."""

SEARCHED: Mapping[str, tuple[Any, ...]] = {
    field: tuple(value for value in values if value not in OF_SCRIPTS.get(field, ()))
    for field, values in CHOICES.items()
}
"""`CHOICES` without those values: what a search can choose."""

AS_IS: Mapping[str, str] = dict.fromkeys(OF_SCRIPTS, "as-is")
"""{technique: the value with which what a script brings is not changed}."""

DEPENDENT_FIELDS: Mapping[str, tuple[str, ...]] = {
    field: tuple(other for other in FIELD_ORDER if TECHNIQUES[other].refines == field)
    for field in dict.fromkeys(technique.refines for technique in TECHNIQUES.values())
    if field
}
"""Fields that are at their defaults where the technique is `none`, because they refine it."""

OF_SEVERAL_DEVICES = tuple(field for field in FIELD_ORDER if TECHNIQUES[field].needs_devices)

HELD_BY_THE_HOST = {
    field: technique.held_by_the_host
    for field, technique in TECHNIQUES.items()
    if technique.held_by_the_host
}
"""What a CPU cannot do: {technique: {value: reason}}."""

KEEPS_PRODUCTS: tuple[Checkpointing, ...] = ("selective", "selective-2")
"""The values of `checkpointing` that keep results of matrix products."""

CUDA_GRAPHS: tuple[CompileMode, ...] = ("reduce-overhead", "max-autotune")
"""The values of `compile_mode` that launch compiled code by CUDA graphs."""

SELECTIVE: tuple[Checkpointing, ...] = (*KEEPS_PRODUCTS, "save-attention")
"""The values of `checkpointing` that choose by operator what is kept."""

FULL_PRECISIONS: tuple[Precision, ...] = ("fp64", "fp32", "tf32")
"""Precisions in which one training tells the perplexity: 0.04 % between trainings of one class
(`studies/sharing`), compiled or not, with any attention kernel and form of the loss."""
KERNELS_OF_16_BITS: tuple[Attention, ...] = ("flash", "cudnn")
"""Values of `attention` that these exclude."""

BF16_WEIGHTS: tuple[Precision, ...] = ("bf16-true", "bf16-stochastic")
"""Precisions with weights and gradients in bf16."""

EIGHT_BIT_PRECISIONS: tuple[Precision, ...] = ("fp8", "int8-mixed")
"""Precisions with layers of their own, which multiply matrices in 8 bits."""

SHARDED_WEIGHTS: tuple[Sharding, ...] = ("zero2", "zero3", "hsdp")
"""The values of `sharding` with which a device has only a part of the weights between steps."""

UPDATES_ON_HOST: tuple[Offload, ...] = ("optimizer", "all")
"""The values of `offload` with which the host's processors update the weights."""

QUANTIZED_WEIGHTS: Mapping[BaseWeights, BaseWeights] = {
    "int8": "int8",
    "fp8": "fp8",
    "nf4": "nf4",
    "int8-experts": "int8",
    "fp8-experts": "fp8",
    "nf4-experts": "nf4",
}
"""{value of `base_weights` for which layers have fewer than 16 bits a weight: their format}."""

QUANTIZED_EXPERTS = tuple(value for value in QUANTIZED_WEIGHTS if value.endswith("-experts"))
"""Those with which experts have that format as well."""

UNDIVIDED_WEIGHTS = tuple(
    value for value, number_format in QUANTIZED_WEIGHTS.items() if number_format in ("int8", "fp8")
)
"""Those that FSDP2 cannot divide: torchao 0.18 has no `aten.split` of its tensors."""


def check_value(field: str, value: object) -> Any:
    """Returns a value of `field` as configurations have it: a size in its one form.

    Raises InvalidInput, with the allowed values, for what is no value of it.
    """
    from autotune.spec.checked import checked_setting  # noqa: PLC0415  # imports pydantic, 0.07 s

    if field not in TECHNIQUES:
        raise InvalidInput(
            f"there is no technique {field!r}",
            hint=suggestion(field, FIELD_ORDER, otherwise=f"use one of {', '.join(FIELD_ORDER)}"),
        )
    return checked_setting(TrainingConfig, field, value)


_DEFAULT_CONFIG = TrainingConfig()
"""fp32 without any technique."""


@dataclass(frozen=True, kw_only=True)
class LegalityContext:
    """The properties of a workload that decide which configurations are legal."""

    global_batch: int
    """Sequences per optimizer step."""
    clips_gradients: bool = False
    drops_inputs_of_adapters: bool = False
    adapters_begin_as_weights: bool = False
    """Whether the start of adapters is taken out of the frozen weights, as by PiSSA."""
    sequence_length: int | None = None
    """Tokens in a sequence; None if unknown, as for a user's script."""
    devices: int = 1
    """Devices of one trial."""
    own_precision: Precision = "fp32"
    """That of the training without any technique; of a script, what it brings."""
    own_fusion: OptimizerFusion = "none"
    """The same of how the optimizer updates."""
    own: "TrainingConfig | None" = None
    """What a trainer's file trains with, if the workload is that of such a file."""

    @classmethod
    def of_script(
        cls, config: "TrainingConfig", *, global_batch: int, clips_gradients: bool = False
    ) -> "LegalityContext":
        """Returns that of a script which trains with `config`; what it brings is not known."""
        return cls(
            global_batch=global_batch,
            clips_gradients=clips_gradients,
            own_precision=config.precision,
            own_fusion=config.optimizer_fusion,
        )

    def default_of(self, field: str) -> Any:
        """Returns the value of a technique that nobody chose: that of the trainer's file, if any.

        Without one it is one pass of the global batch, on several devices by data-parallel
        training.
        """
        if self.own is not None:
            return getattr(self.own, field)
        if field == "micro_batch_size":
            return max(1, self.global_batch // self.devices)
        if field == "sharding" and self.devices > 1:
            return "ddp"
        if field == "precision":
            return self.own_precision
        if field == "optimizer_fusion":
            return self.own_fusion
        return getattr(_DEFAULT_CONFIG, field)


def configuration_of(
    choices: Mapping[str, Any], at: LegalityContext | None = None
) -> TrainingConfig:
    """Returns the configuration of a user's choices by field, the others at their defaults.

    Raises InvalidInput for a value that its technique does not have.
    """
    for field, value in choices.items():
        check_value(field, value)
    defaults = {}
    if at is not None and at.own is not None:
        defaults = at.own.to_dict()
        for technique, fields in DEPENDENT_FIELDS.items():
            if choices.get(technique) == "none":
                defaults |= {field: getattr(_DEFAULT_CONFIG, field) for field in fields}
    elif at is not None:
        decided = ("precision", "optimizer_fusion", "micro_batch_size", "sharding")
        defaults = {field: at.default_of(field) for field in decided}
        split = {"tensor_parallel": choices.get("tensor_parallel", 1)}
        # Devices that split matrices train the same rows.
        defaults["micro_batch_size"] = max(1, at.global_batch // replicas(split, at))
        if at.devices > 1 and split["tensor_parallel"] == at.devices:
            defaults["sharding"] = "none"  # there is nobody to divide batches with
    return TrainingConfig(**{**defaults, **choices})


def reverted(config: TrainingConfig, technique: str, *, plain: TrainingConfig) -> TrainingConfig:
    """Returns `config` with the choice of `plain` for a technique.

    Where that is none, the fields that depend on the technique are at their defaults.
    """
    changes = {technique: getattr(plain, technique)}
    if changes[technique] == "none":
        for field in DEPENDENT_FIELDS.get(technique, ()):
            changes[field] = getattr(_DEFAULT_CONFIG, field)
    if changes.get("sharding", "hsdp") != "hsdp":
        changes["sharding_group"] = _DEFAULT_CONFIG.sharding_group
    return dataclasses.replace(config, **changes)


@dataclass(frozen=True)
class Rule:
    """One illegal combination of the values of `fields`, in given circumstances."""

    fields: tuple[str, ...]
    broken: Callable[[Mapping[str, Any], LegalityContext], bool]
    """Returns whether the chosen values, in these circumstances, are the illegal combination."""
    why: str
    """Template of the reason, in which `facts` are those of the optimizer."""
    hint: str
    """Template of what to change."""

    def explanation(self, chosen: Mapping[str, Any], at: LegalityContext) -> tuple[str, str]:
        """Returns reason and hint with the values of `chosen` and the circumstances filled in."""
        values = {**vars(at), **chosen, "facts": OPTIMIZERS.get(chosen.get("optimizer", ""))}
        return self.why.format_map(values), self.hint.format_map(values)

    def sentence(self, chosen: Mapping[str, Any], at: LegalityContext) -> str:
        """Returns the reason and, after a colon, the hint."""
        return ": ".join(self.explanation(chosen, at))


def replicas(chosen: Mapping[str, Any], at: LegalityContext) -> int:
    """Returns the data-parallel size: how many parts of a global batch are trained at once."""
    size: int = at.devices // chosen["tensor_parallel"]
    return max(1, size)


def _chosen_fusion(chosen: Mapping[str, Any], at: LegalityContext) -> Any:
    """Returns the fusion, but `none` where a script brings it.

    Its optimizer has that fusion, whatever the configuration calls the optimizer.
    """
    fusion = chosen["optimizer_fusion"]
    return "none" if fusion == at.own_fusion else fusion


def _facts(chosen: Mapping[str, Any]) -> OptimizerFacts:
    return OPTIMIZERS[chosen["optimizer"]]


RULES = (
    Rule(
        ("precision",),
        lambda c, at: (
            c["precision"] in OF_SCRIPTS["precision"] and c["precision"] != at.own_precision
        ),
        "precision {precision} is that of a script that brings such weights, and this training is "
        "in {own_precision}",
        "use precision fp32 or bf16-true",
    ),
    Rule(
        ("optimizer_fusion",),
        lambda c, at: c["optimizer_fusion"] == "as-is" and at.own_fusion != "as-is",
        "optimizer_fusion as-is is that of a script whose optimizers update in several ways, and "
        "here it is {own_fusion}",
        "use optimizer_fusion {own_fusion}",
    ),
    Rule(
        ("micro_batch_size",),
        lambda c, at: at.global_batch % c["micro_batch_size"] != 0,
        "micro_batch_size {micro_batch_size} does not divide the global batch of {global_batch}",
        "use one of its divisors, so that every optimizer step sees the same number of sequences",
    ),
    Rule(
        ("compile", "memory_budget"),
        lambda c, _: c["memory_budget"] != 1.0 and c["compile"] == "none",
        "memory_budget {memory_budget} needs torch.compile, whose partitioner it steers",
        "set compile to block or model",
    ),
    Rule(
        ("compile", "compile_mode"),
        lambda c, _: c["compile_mode"] != "default" and c["compile"] == "none",
        "compile_mode {compile_mode} is a mode of torch.compile, and compile is none",
        "set compile to block or model, or leave compile_mode out",
    ),
    Rule(
        ("compile", "compile_mode"),
        # torch/_inductor/cudagraph_trees.py, can_start_new_generation
        lambda c, _: c["compile_mode"] in CUDA_GRAPHS and c["compile"] == "block",
        "compile_mode {compile_mode} launches CUDA graphs, and in an evaluation that of a compiled "
        "block overwrites what the block before it has computed",
        "set compile to model, or compile_mode to max-autotune-no-cudagraphs",
    ),
    Rule(
        ("micro_batch_size", "compile_mode", "tensor_parallel"),
        # https://github.com/pytorch/pytorch/issues/169545
        lambda c, at: (
            c["compile_mode"] in CUDA_GRAPHS
            and c["micro_batch_size"] * replicas(c, at) != at.global_batch
        ),
        "compile_mode {compile_mode} launches CUDA graphs, which overwrite the gradients of a "
        "micro batch of {micro_batch_size} by those of the next one of the global batch of "
        "{global_batch}",
        "use the largest micro_batch_size, or compile_mode max-autotune-no-cudagraphs",
    ),
    Rule(
        ("compile_mode",),
        lambda c, at: c["compile_mode"] in CUDA_GRAPHS and at.devices > 1,
        "compile_mode {compile_mode} records CUDA graphs of one device, without what {devices} "
        "devices send each other",
        "use compile_mode max-autotune-no-cudagraphs",
    ),
    Rule(
        ("compile_mode", "activation_offload"),
        lambda c, _: c["compile_mode"] in CUDA_GRAPHS and c["activation_offload"] != "none",
        "compile_mode {compile_mode} launches CUDA graphs, whose activations stay in memory of "
        "their own when activation_offload {activation_offload} has copied them",
        "use activation_offload none, or compile_mode max-autotune-no-cudagraphs",
    ),
    Rule(
        ("compile_mode", "offload"),
        lambda c, _: c["compile_mode"] in CUDA_GRAPHS and c["offload"] == "all",
        "compile_mode {compile_mode} launches CUDA graphs, which read weights where they were when "
        "they were recorded, and offload {offload} brings them to other places",
        "use offload none, or compile_mode max-autotune-no-cudagraphs",
    ),
    Rule(
        ("checkpointing", "memory_budget"),
        lambda c, _: c["memory_budget"] != 1.0 and c["checkpointing"] != "none",
        "memory_budget {memory_budget} and checkpointing {checkpointing} both decide what is "
        "recomputed",
        "set checkpointing to none or memory_budget to 1.0",
    ),
    Rule(
        ("checkpointing", "activation_budget"),
        lambda c, _: c["activation_budget"] != NO_LIMIT and c["checkpointing"] != "none",
        "activation_budget {activation_budget} and checkpointing {checkpointing} both decide what "
        "is recomputed",
        "set checkpointing to none, or leave activation_budget out",
    ),
    Rule(
        ("compile", "activation_budget"),
        lambda c, _: c["activation_budget"] != NO_LIMIT and c["compile"] != "none",
        "activation_budget {activation_budget} predicts one plan after the other, for each of "
        "which compile {compile} would compile the model anew",
        "set compile to none, or memory_budget below 1.0 in place of activation_budget",
    ),
    Rule(
        ("activation_offload", "activation_budget"),
        lambda c, _: c["activation_budget"] != NO_LIMIT and c["activation_offload"] != "none",
        "activation_offload {activation_offload} moves what blocks keep to the host, and "
        "activation_budget {activation_budget} plans for it on the device",
        "set activation_offload to none, or leave activation_budget out",
    ),
    Rule(
        ("activation_budget", "engine"),
        lambda c, _: c["activation_budget"] != NO_LIMIT and c["engine"] == "deepspeed",
        "activation_budget {activation_budget} plans by predicting the peak, and what engine "
        "deepspeed allocates is not predicted",
        "use checkpointing, or engine torch",
    ),
    Rule(
        ("optimizer", "optimizer_fusion"),
        lambda c, at: not _facts(c).has_fusion(_chosen_fusion(c, at)),
        "{optimizer} {facts.way_of_updating}, and has no optimizer_fusion {optimizer_fusion}",
        "use none or backward, or another optimizer",
    ),
    Rule(
        ("precision", "optimizer_fusion"),
        lambda c, _: c["optimizer_fusion"] == "backward" and c["precision"] == "fp16-mixed",
        "optimizer_fusion backward steps before GradScaler could unscale the gradients of "
        "fp16-mixed",
        "use bf16-mixed, or another fusion",
    ),
    Rule(
        ("micro_batch_size", "optimizer_fusion", "tensor_parallel"),
        lambda c, at: (
            c["optimizer_fusion"] == "backward"
            and c["micro_batch_size"] * replicas(c, at) != at.global_batch
        ),
        "optimizer_fusion backward would step after every micro batch of {micro_batch_size} "
        "instead of once for the global batch of {global_batch}",
        "use the largest micro_batch_size, so that nothing is accumulated, or another fusion",
    ),
    Rule(
        ("optimizer_fusion",),
        lambda c, at: c["optimizer_fusion"] == "backward" and at.clips_gradients,
        "optimizer_fusion backward updates each parameter before the norm of all gradients is "
        "known, by which gradient_clipping scales them",
        "use another fusion, or no clipping",
    ),
    Rule(
        ("precision", "optimizer_fusion"),
        lambda c, _: (
            c["optimizer_fusion"] in ("foreach", "kernel") and c["precision"] == "bf16-stochastic"
        ),
        "bf16-stochastic holds one parameter at a time in float32, and optimizer_fusion "
        "{optimizer_fusion} updates all at once",
        "use none or backward, or precision bf16-true",
    ),
    Rule(
        ("precision", "optimizer"),
        lambda c, _: c["precision"] == "bf16-stochastic" and bool(_facts(c).state_form),
        "bf16-stochastic rounds an optimizer's state to bf16, and {optimizer} has it "
        "{facts.state_form}",
        "use precision bf16-true, or optimizer adamw",
    ),
    Rule(
        ("precision", "gradient_accumulation_dtype"),
        lambda c, _: (
            c["gradient_accumulation_dtype"] != "weights" and c["precision"] not in BF16_WEIGHTS
        ),
        "gradient_accumulation_dtype {gradient_accumulation_dtype} adds up gradients of bf16 "
        "weights, which precision {precision} does not have",
        "use precision bf16-true or bf16-stochastic, or leave gradient_accumulation_dtype out",
    ),
    Rule(
        ("micro_batch_size", "gradient_accumulation_dtype"),
        lambda c, at: (
            c["gradient_accumulation_dtype"] != "weights"
            and c["micro_batch_size"] == at.global_batch
        ),
        "gradient_accumulation_dtype {gradient_accumulation_dtype} adds up gradients of several "
        "micro batches, and with micro_batch_size {micro_batch_size} there is one in the global "
        "batch of {global_batch}",
        "use a smaller micro_batch_size, or leave gradient_accumulation_dtype out",
    ),
    Rule(
        ("gradient_accumulation_dtype",),
        lambda c, at: c["gradient_accumulation_dtype"] != "weights" and at.devices > 1,
        "gradient_accumulation_dtype {gradient_accumulation_dtype} adds up gradients on one "
        "device, and {devices} devices add theirs up by sharding or tensor_parallel",
        "use one device, or leave gradient_accumulation_dtype out",
    ),
    Rule(
        ("gradient_accumulation_dtype", "offload"),
        lambda c, _: (
            c["gradient_accumulation_dtype"] != "weights" and c["offload"] in UPDATES_ON_HOST
        ),
        "gradient_accumulation_dtype {gradient_accumulation_dtype} adds up gradients on the "
        "device, from which offload {offload} takes them after each backward pass",
        "use offload none or frozen, or leave gradient_accumulation_dtype out",
    ),
    Rule(
        ("precision", "attention"),
        lambda c, _: c["precision"] in FULL_PRECISIONS and c["attention"] in KERNELS_OF_16_BITS,
        "attention {attention} is a kernel for 16-bit numbers, precision {precision} has more bits",
        "use attention auto or efficient, or precision bf16-mixed",
    ),
    Rule(
        ("precision", "micro_batch_size"),
        # The gradient of a weight is a matrix product along the tokens of a micro batch, and every
        # micro batch is full.
        lambda c, at: (
            c["precision"] in EIGHT_BIT_PRECISIONS
            and at.sequence_length is not None
            and c["micro_batch_size"] * at.sequence_length % FP8_MULTIPLE != 0
        ),
        "precision {precision} needs micro batches whose number of tokens is a multiple of 16, and "
        "micro_batch_size {micro_batch_size} has sequences of {sequence_length} tokens",
        "use a sequence length that is a multiple of 16, another micro_batch_size, "
        "or precision bf16-mixed",
    ),
    Rule(
        ("precision", "checkpointing"),
        lambda c, _: c["precision"] == "int8-mixed" and c["checkpointing"] in KEEPS_PRODUCTS,
        "checkpointing {checkpointing} keeps products, and those of precision {precision} are "
        "integers of 32 bits, twice the size of what they become",
        "use checkpointing block or save-attention, or precision bf16-mixed",
    ),
    Rule(
        ("compile", "kernels"),
        lambda c, _: c["kernels"] != "none" and c["compile"] != "none",
        "with compile {compile} torch makes kernels of norms and activations itself, which keep as "
        "little as those of kernels {kernels}",
        "use kernels none, or compile none",
    ),
    Rule(
        ("kernels", "tensor_parallel"),
        # https://github.com/linkedin/Liger-Kernel/issues/826
        lambda c, _: c["kernels"] != "none" and c["tensor_parallel"] > 1,
        "kernels {kernels} take whole tensors, which tensor_parallel {tensor_parallel} splits",
        "use kernels none, or tensor_parallel 1",
    ),
    Rule(
        ("precision", "adapter"),
        lambda c, _: c["precision"] in EIGHT_BIT_PRECISIONS and c["adapter"] != "none",
        "precision {precision} converts the layers of the model's own weights, to which adapter "
        "{adapter} adds matrices that are too narrow for it",
        "use precision bf16-mixed, with base_weights fp8 for the memory",
    ),
    Rule(
        ("adapter", "adapter_rank"),
        lambda c, _: c["adapter"] == "none" and c["adapter_rank"] != 8,
        "adapter_rank {adapter_rank} is the rank of an adapter, and adapter is none",
        "set adapter to lora or dora, or leave adapter_rank out",
    ),
    Rule(
        ("adapter", "adapter_targets"),
        lambda c, _: c["adapter"] == "none" and c["adapter_targets"] != "all-linear",
        "adapter_targets {adapter_targets} are the layers with an adapter, and adapter is none",
        "set adapter to lora or dora, or leave adapter_targets out",
    ),
    Rule(
        ("adapter", "adapter_targets"),
        lambda c, _: c["adapter"] == "dora" and c["adapter_targets"] == "experts",
        "adapter dora scales the rows of one matrix, and adapter_targets experts have several in "
        "one weight",
        "use adapter lora, or adapter_targets all-linear",
    ),
    Rule(
        ("adapter_targets",),
        lambda c, at: c["adapter_targets"] == "experts" and at.drops_inputs_of_adapters,
        "adapter_targets experts add matrices to weights before tokens come to them, and "
        "adapter_dropout would drop a part of what these read",
        "set adapter_dropout to 0, or adapter_targets to all-linear",
    ),
    Rule(
        ("adapter_targets",),
        lambda c, at: c["adapter_targets"] == "experts" and at.adapters_begin_as_weights,
        "adapter_init pissa takes the start of an adapter out of one matrix, and adapter_targets "
        "experts have several in one weight",
        "set adapter_init to standard, or adapter_targets to all-linear",
    ),
    Rule(
        ("adapter", "adapter_kernels"),
        lambda c, _: c["adapter"] != "lora" and c["adapter_kernels"] != "none",
        "adapter_kernels {adapter_kernels} compute a layer with its LoRA, and adapter is {adapter}",
        "set adapter to lora, or leave adapter_kernels out",
    ),
    Rule(
        ("adapter_kernels",),
        lambda c, at: c["adapter_kernels"] != "none" and at.drops_inputs_of_adapters,
        "adapter_kernels {adapter_kernels} keep one input of a layer for its LoRA as well, which "
        "has another one where adapter_dropout drops a part of it",
        "set adapter_dropout to 0, or adapter_kernels to none",
    ),
    Rule(
        ("base_weights",),
        lambda c, at: c["base_weights"] in QUANTIZED_WEIGHTS and at.adapters_begin_as_weights,
        "base_weights {base_weights} are quantized, and adapter_init pissa takes the start of "
        "adapters out of them in 16 or 32 bits",
        "set adapter_init to standard, or base_weights to bf16",
    ),
    Rule(
        ("checkpointing", "adapter_kernels"),
        lambda c, _: c["checkpointing"] in KEEPS_PRODUCTS and c["adapter_kernels"] != "none",
        "checkpointing {checkpointing} keeps the results of products, to which adapter_kernels "
        "{adapter_kernels} add others in place",
        "use checkpointing block, or adapter_kernels none",
    ),
    Rule(
        ("adapter_kernels", "sharding", "engine"),
        lambda c, _: (
            c["adapter_kernels"] != "none"
            and c["engine"] == "deepspeed"
            and c["sharding"] == "zero3"
        ),
        "engine deepspeed gathers a weight that sharding {sharding} divides when its layer is "
        "called, and adapter_kernels {adapter_kernels} compute a layer without calling it",
        "use sharding zero2, engine torch, or adapter_kernels none",
    ),
    Rule(
        ("adapter", "base_weights"),
        lambda c, _: c["adapter"] == "none" and c["base_weights"] != "trained",
        "base_weights {base_weights} are frozen, and without an adapter nothing would be trained",
        "set adapter to lora or dora, or base_weights to trained",
    ),
    Rule(
        ("precision", "base_weights"),
        lambda c, _: c["base_weights"] == "bf16" and c["precision"] != "bf16-mixed",
        "base_weights bf16 are multiplied in bf16, which precision {precision} does not do, or "
        "does with all its weights",
        "use precision bf16-mixed, or base_weights trained",
    ),
    Rule(
        ("precision", "base_weights"),
        lambda c, _: c["base_weights"] == "fp16" and c["precision"] != "fp16-mixed",
        "base_weights fp16 are multiplied in fp16, which precision {precision} does not do, or "
        "does with all its weights",
        "use precision fp16-mixed, or base_weights trained",
    ),
    Rule(
        ("precision", "base_weights"),
        lambda c, _: c["base_weights"] in QUANTIZED_WEIGHTS and c["precision"] in ("fp32", "tf32"),
        "base_weights {base_weights} are multiplied in 16 bits, precision {precision} has 32",
        "use precision bf16-mixed, or base_weights trained",
    ),
    Rule(
        ("micro_batch_size", "tensor_parallel"),
        lambda c, at: (
            at.devices > 1 and at.global_batch % (c["micro_batch_size"] * replicas(c, at)) != 0
        ),
        "micro batches of {micro_batch_size} sequences on each of {devices} devices, with "
        "tensor_parallel {tensor_parallel}, do not add up to the global batch of {global_batch}",
        "use a smaller micro_batch_size, or another global batch",
    ),
    Rule(
        ("sharding",),
        lambda c, at: at.devices == 1 and c["sharding"] != "none",
        "sharding {sharding} divides a training among devices, and a trial has one",
        "use several devices with --devices-per-trial, or leave sharding out",
    ),
    Rule(
        ("sharding", "tensor_parallel"),
        lambda c, at: (
            at.devices > 1 and c["sharding"] == "none" and c["tensor_parallel"] != at.devices
        ),
        "with sharding {sharding} and tensor_parallel {tensor_parallel} nothing adds up the "
        "gradients of {devices} devices",
        "use sharding ddp, or tensor_parallel {devices}",
    ),
    Rule(
        ("sharding", "tensor_parallel"),
        lambda c, at: (
            at.devices > 1 and c["sharding"] != "none" and c["tensor_parallel"] == at.devices
        ),
        "tensor_parallel {tensor_parallel} takes all devices of a trial and leaves none for "
        "sharding {sharding}",
        "use sharding none, or a smaller tensor_parallel",
    ),
    Rule(
        ("tensor_parallel",),
        lambda c, at: at.devices % c["tensor_parallel"] != 0,
        "tensor_parallel {tensor_parallel} does not divide the number of devices of a trial, "
        "{devices}",
        "use one of its divisors, or another --devices-per-trial",
    ),
    Rule(
        ("sharding", "sharding_group"),
        lambda c, _: c["sharding"] != "hsdp" and c["sharding_group"] != 1,
        "sharding_group {sharding_group} is a group of sharding hsdp, and sharding is {sharding}",
        "set sharding to hsdp, or leave sharding_group out",
    ),
    Rule(
        ("sharding", "sharding_group", "tensor_parallel"),
        lambda c, at: (
            c["sharding"] == "hsdp"
            and not (
                1 < c["sharding_group"] < replicas(c, at)
                and replicas(c, at) % c["sharding_group"] == 0
            )
        ),
        "sharding hsdp needs groups of several devices, and several groups: sharding_group "
        "{sharding_group} does not divide {devices} devices with tensor_parallel "
        "{tensor_parallel} into such",
        "use another sharding_group, or sharding zero3",
    ),
    Rule(
        ("sharding", "tensor_parallel"),
        lambda c, _: c["tensor_parallel"] > 1 and c["sharding"] == "hsdp",
        "sharding hsdp has two kinds of groups of devices, and tensor_parallel {tensor_parallel} "
        "would add a third",
        "use sharding zero3, or tensor_parallel 1",
    ),
    Rule(
        ("precision", "tensor_parallel"),
        lambda c, _: c["tensor_parallel"] > 1 and c["precision"] == "fp16-mixed",
        "with tensor_parallel {tensor_parallel} a gradient that overflows the range of fp16-mixed "
        "is seen only by the device that has it, and the others would take the step",
        "use precision bf16-mixed, or tensor_parallel 1",
    ),
    Rule(
        ("precision", "tensor_parallel"),
        lambda c, _: c["tensor_parallel"] > 1 and c["precision"] in EIGHT_BIT_PRECISIONS,
        "precision {precision} has layers of its own, which tensor_parallel {tensor_parallel} "
        "cannot split",
        "use precision bf16-mixed, or tensor_parallel 1",
    ),
    Rule(
        ("precision", "tensor_parallel"),
        lambda c, _: c["tensor_parallel"] > 1 and c["precision"] == "bf16-stochastic",
        "bf16-stochastic rounds by chance, and with tensor_parallel {tensor_parallel} nothing "
        "keeps the weights that several devices have the same",
        "use precision bf16-true, or tensor_parallel 1",
    ),
    Rule(
        ("optimizer", "tensor_parallel"),
        lambda c, _: c["tensor_parallel"] > 1 and not _facts(c).updates_parts,
        "{optimizer} needs whole weights, which tensor_parallel {tensor_parallel} splits",
        "use optimizer adamw or sgd, or tensor_parallel 1",
    ),
    Rule(
        ("adapter", "tensor_parallel"),
        lambda c, _: c["tensor_parallel"] > 1 and c["adapter"] != "none",
        "adapter {adapter} is added to whole layers, which tensor_parallel {tensor_parallel} "
        "splits",
        "use adapter none, or tensor_parallel 1",
    ),
    Rule(
        ("sharding", "gradient_reduction"),
        lambda c, _: c["sharding"] == "none" and c["gradient_reduction"] != "fp32",
        "gradient_reduction {gradient_reduction} is how devices add up gradients, which "
        "sharding none does not do",
        "use another sharding, or leave gradient_reduction out",
    ),
    Rule(
        ("optimizer_fusion", "sharding"),
        lambda c, _: c["optimizer_fusion"] == "backward" and c["sharding"] in ("ddp", "zero1"),
        "optimizer_fusion backward would step with the gradients of one device, before sharding "
        "{sharding} adds up those of all",
        "use another fusion, or sharding zero2 or zero3",
    ),
    Rule(
        ("offload", "engine"),
        lambda c, at: c["offload"] == "optimizer" and c["engine"] == "torch" and at.devices > 1,
        "offload optimizer takes each gradient to the host before {devices} devices have added "
        "theirs up",
        "use offload all, with sharding zero2, zero3 or hsdp, or engine deepspeed",
    ),
    Rule(
        ("sharding", "offload"),
        lambda c, at: (
            c["offload"] == "all" and at.devices > 1 and c["sharding"] not in SHARDED_WEIGHTS
        ),
        "offload all moves the parts into which weights are divided, and sharding {sharding} has "
        "all of them on each device",
        "use sharding zero2, zero3 or hsdp",
    ),
    Rule(
        ("offload", "engine"),
        lambda c, at: c["offload"] == "optimizer" and c["engine"] == "torch" and at.clips_gradients,
        "offload optimizer takes each gradient to the host before the norm of all gradients is "
        "known, by which gradient_clipping scales them",
        "use offload all, engine deepspeed, or no clipping",
    ),
    Rule(
        ("precision", "offload"),
        lambda c, _: c["offload"] in UPDATES_ON_HOST and c["precision"] == "fp16-mixed",
        "GradScaler unscales the gradients of fp16-mixed on the device, and offload {offload} has "
        "taken them to the host by then",
        "use precision bf16-mixed, or offload none",
    ),
    Rule(
        ("precision", "offload"),
        lambda c, _: c["offload"] in UPDATES_ON_HOST and c["precision"] == "bf16-stochastic",
        "bf16-stochastic brings an optimizer of its own, which offload {offload} cannot move to "
        "the host",
        "use precision bf16-true, or offload none",
    ),
    Rule(
        ("optimizer", "offload"),
        lambda c, _: (
            c["offload"] in UPDATES_ON_HOST and bool(_facts(c).state_form or _facts(c).of_matrices)
        ),
        "{optimizer} saves memory of the device, where offload {offload} has no optimizer state",
        "use optimizer adamw, or offload none",
    ),
    Rule(
        ("optimizer", "offload"),
        lambda c, _: c["offload"] == "all" and not _facts(c).updates_fsdp2,
        "{optimizer} does not work on the tensors of FSDP2, which offload all uses",
        "use another optimizer, or offload optimizer",
    ),
    Rule(
        ("optimizer_fusion", "offload"),
        lambda c, _: c["offload"] == "all" and c["optimizer_fusion"] == "backward",
        "offload all moves gradients to the host already, and optimizer_fusion backward would use "
        "them before they have arrived",
        "use optimizer_fusion none, foreach or kernel",
    ),
    Rule(
        ("base_weights", "offload"),
        lambda c, _: c["offload"] == "all" and c["base_weights"] in UNDIVIDED_WEIGHTS,
        "offload all moves weights by FSDP2, which cannot divide torchao's tensors of codes and "
        "scales, as base_weights {base_weights} are",
        "use base_weights nf4 or bf16, or offload optimizer",
    ),
    Rule(
        ("adapter", "offload"),
        lambda c, _: c["offload"] == "frozen" and c["adapter"] == "none",
        "offload frozen brings frozen weights from the host, and adapter none freezes no weights",
        "set adapter to lora or dora, or offload to all",
    ),
    Rule(
        ("offload",),
        lambda c, at: c["offload"] == "frozen" and at.devices > 1,
        "offload frozen brings the whole weights of a block to its device, and {devices} devices "
        "would each have all of them in the host's memory",
        "use sharding zero3, with offload all or none",
    ),
    Rule(
        ("compile", "offload"),
        lambda c, _: c["offload"] == "frozen" and c["compile"] == "model",
        "offload frozen brings weights between the blocks, where compile model has one graph",
        "set compile to block or none, or offload to none",
    ),
    Rule(
        ("offload", "engine"),
        lambda c, _: c["offload"] == "frozen" and c["engine"] == "deepspeed",
        "engine deepspeed moves frozen weights to the host together with those that are trained",
        "use offload all with sharding zero3, or engine torch",
    ),
    Rule(
        ("optimizer", "sharding"),
        lambda c, _: c["sharding"] in SHARDED_WEIGHTS and not _facts(c).updates_parts,
        "{optimizer} needs whole weights, which sharding {sharding} divides",
        "use optimizer adamw or sgd, or sharding zero1",
    ),
    Rule(
        ("precision", "sharding"),
        lambda c, _: c["sharding"] in SHARDED_WEIGHTS and c["precision"] == "bf16-stochastic",
        "bf16-stochastic rounds whole weights, which sharding {sharding} divides",
        "use precision bf16-true, or sharding zero1",
    ),
    Rule(
        ("base_weights", "sharding"),
        lambda c, _: c["sharding"] in SHARDED_WEIGHTS and c["base_weights"] in UNDIVIDED_WEIGHTS,
        "sharding {sharding} divides weights by FSDP2, which cannot divide torchao's tensors of "
        "codes and scales, as base_weights {base_weights} are",
        "use base_weights nf4 or bf16, or sharding ddp or zero1",
    ),
    Rule(
        ("precision", "engine"),
        lambda c, _: (
            c["engine"] == "deepspeed" and c["precision"] not in ("fp32", "tf32", "bf16-mixed")
        ),
        "engine deepspeed has 16-bit weights and scaled losses in forms of its own, which are not "
        "precision {precision}",
        "use precision bf16-mixed, or engine torch",
    ),
    Rule(
        ("optimizer", "engine"),
        lambda c, _: c["engine"] == "deepspeed" and not _facts(c).updates_parts,
        "engine deepspeed has the optimizer update flat parts of the weights, and {optimizer} "
        "needs whole ones",
        "use optimizer adamw or sgd, or engine torch",
    ),
    Rule(
        ("compile", "engine"),
        lambda c, _: c["engine"] == "deepspeed" and c["compile"] != "none",
        "engine deepspeed gathers weights and adds up gradients by hooks, at which compile "
        "{compile} would cut its graphs",
        "use compile none, or engine torch",
    ),
    Rule(
        ("optimizer_fusion", "engine"),
        lambda c, _: c["engine"] == "deepspeed" and c["optimizer_fusion"] == "backward",
        "engine deepspeed updates the weights after the backward pass, and optimizer_fusion "
        "backward within it",
        "use another fusion, or engine torch",
    ),
    Rule(
        ("activation_offload", "engine"),
        lambda c, _: c["engine"] == "deepspeed" and c["activation_offload"] != "none",
        "activation_offload {activation_offload} moves what is not a weight, and cannot tell the "
        "weights that engine deepspeed has gathered",
        "use activation_offload none, or engine torch",
    ),
    Rule(
        ("base_weights", "engine"),
        lambda c, _: c["engine"] == "deepspeed" and c["base_weights"] in UNDIVIDED_WEIGHTS,
        "engine deepspeed moves each weight as one tensor, and base_weights {base_weights} are "
        "torchao's tensors of codes and scales",
        "use base_weights nf4 or bf16, or engine torch",
    ),
    Rule(
        ("sharding", "engine"),
        lambda c, _: c["engine"] == "deepspeed" and c["sharding"] == "hsdp",
        "engine deepspeed shares out a model among all devices: it has no groups for sharding hsdp",
        "use sharding zero3, or engine torch",
    ),
    Rule(
        ("tensor_parallel", "engine"),
        lambda c, _: c["engine"] == "deepspeed" and c["tensor_parallel"] > 1,
        "engine deepspeed does not split the matrices of any model, as tensor_parallel "
        "{tensor_parallel} does",
        "use tensor_parallel 1, or engine torch",
    ),
    Rule(
        ("sharding", "offload", "engine"),
        lambda c, _: (
            c["engine"] == "deepspeed" and c["offload"] == "optimizer" and c["sharding"] == "ddp"
        ),
        "engine deepspeed moves the optimizer's state to the host where it is shared out, and with "
        "sharding ddp each device has all of it",
        "use sharding zero1, zero2 or zero3",
    ),
    Rule(
        ("sharding", "offload", "engine"),
        lambda c, _: (
            c["engine"] == "deepspeed" and c["offload"] == "all" and c["sharding"] == "zero2"
        ),
        "engine deepspeed moves weights to the host where they are shared out, and with sharding "
        "zero2 each device has all of them",
        "use sharding zero3, or offload optimizer",
    ),
)


def rule_violations(chosen: Mapping[str, Any], at: LegalityContext) -> list[str]:
    """Returns why `chosen` (a configuration or its first fields) is illegal, a sentence per rule.

    A rule about a field that is not in `chosen` is not applied.
    """
    return [rule.sentence(chosen, at) for rule in _rules_broken_by(chosen, at)]


def _rules_broken_by(chosen: Mapping[str, Any], at: LegalityContext) -> Iterator[Rule]:
    for rule in RULES:
        is_decided = all(field in chosen for field in rule.fields)
        if is_decided and rule.broken(chosen, at):
            yield rule


def check_legal(config: TrainingConfig, at: LegalityContext) -> None:
    """Raise IllegalConfiguration, with the first broken rule, if `config` is illegal there."""
    chosen = config.to_dict()
    for rule in _rules_broken_by(chosen, at):
        message, hint = rule.explanation(chosen, at)
        raise IllegalConfiguration(message, hint=hint)


def baseline_of(*, optimizer: Optimizer, at: LegalityContext) -> TrainingConfig:
    """Returns what savings are relative to: no technique, the global batch in one pass.

    A script's has the precision and the update that it brings, any other is in fp32 without fusion.
    On several devices it is data-parallel training. Of a trainer's file it is what the file says.
    """
    if at.own is not None:
        return at.own
    return TrainingConfig(
        precision=at.own_precision,
        optimizer_fusion=at.own_fusion,
        optimizer=optimizer,
        micro_batch_size=at.default_of("micro_batch_size"),
        sharding=at.default_of("sharding"),
    )
