"""A training configuration is one choice for every technique; `RULES` says which choices conflict.

`RULES` is the only list of illegal combinations; each rule carries the sentence that explains it.
What a particular device cannot do is not decided here: a probe finds it
(`autotune/execution/server/tasks.py`).
"""

import dataclasses
import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, get_args

from autotune.errors import IllegalConfiguration, InvalidInput, suggestion

Precision = Literal[
    "fp32", "tf32", "bf16-mixed", "bf16-true", "fp16-mixed", "bf16-stochastic", "fp8"
]
Checkpointing = Literal["none", "attention", "selective", "every-4", "every-2", "block", "sqrt"]
CompileScope = Literal["none", "block", "model"]
Optimizer = Literal[
    "adamw",
    "adafactor",
    "sgd",
    "adafactor-fixed-rate",
    "adamw-8bit",
    "paged-adamw",
    "paged-adamw-8bit",
]
OptimizerFusion = Literal["none", "foreach", "kernel", "backward"]
Allocator = Literal["default", "expandable"]
Attention = Literal["auto", "flash", "efficient", "cudnn", "math"]
Loss = Literal["full", "chunked"]
ActivationOffload = Literal["none", "cpu"]
Adapter = Literal["none", "lora", "dora"]
AdapterTargets = Literal["all-linear", "attention"]
BaseWeights = Literal["trained", "bf16", "int8", "fp8", "nf4"]


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """One choice for every technique: flat, hashable and ready for JSON.

    Raises InvalidInput for a value that the technique does not have.
    """

    precision: Precision = "fp32"
    """Number formats of computation and storage. `*-mixed`: autocast over fp32 weights;
    `bf16-true`: the whole model in bf16; `bf16-stochastic`: the same with stochastic rounding of
    the update; `fp8`: bf16-mixed with the matrix products of the blocks in fp8."""

    checkpointing: Checkpointing = "none"
    """Which activations are dropped in the forward pass and recomputed in the backward pass."""

    compile: CompileScope = "none"
    """What torch.compile compiles as one unit: nothing, each transformer block, or the whole model
    with its loss."""

    memory_budget: float = 1.0
    """torch.compile's activation memory budget, from 1.0 (save what the partitioner
    would save by default) to 0.0 (recompute everything)."""

    optimizer: Optimizer = "adamw"
    """torch.optim's AdamW, Adafactor or SGD (momentum 0.9); Adafactor with a fixed learning rate,
    not scaled by the size of each weight; torchao's AdamW with its state in 8 bits; or AdamW of
    bitsandbytes, whose state the driver moves to the host when the device is full (`paged-*`)."""

    optimizer_fusion: OptimizerFusion = "none"
    """How the update runs: a loop over the parameters, batched (`foreach`), one kernel
    (`fused=True`), or inside the backward pass."""

    micro_batch_size: int = 1
    """Sequences per forward pass; the global batch divided by it is the number of accumulation
    steps."""

    allocator: Allocator = "default"
    """CUDA caching allocator: default segments or expandable segments."""

    attention: Attention = "auto"
    """Kernel behind scaled_dot_product_attention; `auto`: torch's own choice, call by call."""

    loss: Loss = "full"
    """Whether the logits of the whole micro batch exist at once, or chunk by chunk."""

    activation_offload: ActivationOffload = "none"
    """Where large activations are stored until the backward pass: on the device, or in pinned host
    memory."""

    adapter: Adapter = "none"
    """What is trained: the model's own weights (`none`), or small matrices beside its linear layers
    while the weights are frozen."""

    adapter_rank: int = 8
    """Inner width of an adapter's two matrices."""

    adapter_targets: AdapterTargets = "all-linear"
    """The linear layers of the blocks that have adapters: all, or those of the attention."""

    base_weights: BaseWeights = "trained"
    """Number format in which frozen weights are stored. `trained`: that of training; `bf16`; or
    the linear layers of the blocks in `int8`, `fp8` or `nf4`, and the rest in 16 bits."""

    def __post_init__(self) -> None:
        values = vars(self)
        for name, value in values.items():
            # Fast path, as thousands are loaded at once: only other values get the full check.
            if value.__class__ is not str or value not in _CHOICES.get(name, ()):
                check_value(name, value)
        # 1 and 1.0, and 0.0 and -0.0, are the same budget and must give the same fingerprint.
        object.__setattr__(self, "memory_budget", float(self.memory_budget) + 0.0)

    def to_dict(self) -> dict[str, Any]:
        """Return the choices by field name."""
        return {name: getattr(self, name) for name in _FIELDS}

    @cached_property
    def fingerprint(self) -> str:
        """Twelve hexadecimal digits of a hash: equal for equal configurations only."""
        hashed = {}
        for name, value in self.to_dict().items():
            is_default = value == getattr(_DEFAULT_CONFIG, name)
            if name not in _FIELDS_ADDED_LATER or not is_default:
                hashed[name] = value
        return hashlib.sha256(_SORTED_JSON.encode(hashed).encode()).hexdigest()[:12]

    @cached_property
    def numerics_class(self) -> tuple[str, ...]:
        """Key of the configurations that compute the same numbers, up to the order of operations.

        In fp32 and tf32 compiled and eager training are in one class. In 16 bits they are in two,
        because fusion changes what is rounded; another attention kernel and a loss that is summed
        over chunks also change it.
        """
        trained: str = self.optimizer
        if self.adapter != "none":
            trained = (
                f"{self.adapter}/{trained}, rank {self.adapter_rank}, {self.adapter_targets}, "
                f"{self.base_weights} base"
            )
        if self.precision in ("fp32", "tf32"):
            return (self.precision, trained, "eager")
        rounding = ["eager" if self.compile == "none" else "compiled"]
        if self.attention != "auto":
            rounding.append(self.attention)
        if self.loss != "full":
            rounding.append(self.loss)
        return (self.precision, trained, *rounding)

    @property
    def kind_of_training(self) -> str:
        """`full` without an adapter, else the adapter: trainings of one kind share a rate."""
        return "full" if self.adapter == "none" else self.adapter

    @cached_property
    def compiled_class(self) -> tuple[Any, ...] | None:
        """Key of the configurations that compile the same code; None where nothing is compiled.

        The update is never compiled, and the loss only with the whole model. Several memory budgets
        may lead to the same code, too, but only a prediction knows that.
        """
        if self.compile == "none":
            return None
        not_compiled = {"optimizer", "optimizer_fusion", "allocator"}
        if self.compile == "block":
            not_compiled.add("loss")
        return tuple(value for name, value in self.to_dict().items() if name not in not_compiled)

    def describe(self) -> str:
        """Return precision, micro batch and every choice that is not the default, as text."""
        techniques = []
        for name, value in self.to_dict().items():
            if name in ("precision", "micro_batch_size"):
                continue
            if value != getattr(_DEFAULT_CONFIG, name):
                techniques.append(f"{name.replace('_', '-')} {value}")
        return ", ".join([self.precision, *techniques, f"micro-batch {self.micro_batch_size}"])


_SORTED_JSON = json.JSONEncoder(sort_keys=True)
_FIELDS_ADDED_LATER = (
    "attention",
    "loss",
    "activation_offload",
    "adapter",
    "adapter_rank",
    "adapter_targets",
    "base_weights",
)
"""Fields that the first studies did not have. At their defaults they are left out of a fingerprint,
so that the fingerprints of old records stay valid."""

CHOICES: Mapping[str, tuple[Any, ...]] = {
    "precision": get_args(Precision),
    "optimizer": get_args(Optimizer),
    "checkpointing": get_args(Checkpointing),
    "compile": get_args(CompileScope),
    "optimizer_fusion": get_args(OptimizerFusion),
    "allocator": get_args(Allocator),
    "attention": get_args(Attention),
    "loss": get_args(Loss),
    "activation_offload": get_args(ActivationOffload),
    "adapter": get_args(Adapter),
    "adapter_targets": get_args(AdapterTargets),
    "base_weights": get_args(BaseWeights),
}
"""The values of each technique that has a fixed list of values."""

_FIELDS = tuple(field.name for field in dataclasses.fields(TrainingConfig))
_CHOICES = {field: frozenset(values) for field, values in CHOICES.items()}

FIELD_ORDER = (
    "precision",
    "optimizer",
    "micro_batch_size",
    "checkpointing",
    "compile",
    "memory_budget",
    "optimizer_fusion",
    "allocator",
    "attention",
    "loss",
    "activation_offload",
    "adapter",
    "adapter_rank",
    "adapter_targets",
    "base_weights",
)
"""The order in which a configuration is built: the legal values of a field depend only on the
fields before it."""

DEPENDENT_FIELDS: Mapping[str, tuple[str, ...]] = {
    "compile": ("memory_budget",),
    "adapter": ("adapter_rank", "adapter_targets", "base_weights"),
}
"""Fields that are at their defaults where the technique is `none`, because they refine it."""

QUANTIZED_WEIGHTS: tuple[BaseWeights, ...] = ("int8", "fp8", "nf4")
"""The values of `base_weights` for which linear layers have fewer than 16 bits a weight."""


def check_value(field: str, value: object) -> None:
    """Raise InvalidInput, with the allowed values, if `value` is not a value of `field`."""
    if field in CHOICES:
        # The type is tested as well: with `in` alone, a value of another type could compare equal.
        if not isinstance(value, str) or value not in CHOICES[field]:
            raise InvalidInput(
                f"{field} = {value!r} is not possible",
                hint=suggestion(
                    value, CHOICES[field], otherwise=f"use one of {', '.join(CHOICES[field])}"
                ),
            )
    elif field == "memory_budget":
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0.0 <= value <= 1.0:
            raise InvalidInput(
                f"memory_budget = {value!r} is not possible", hint="use a number from 0.0 to 1.0"
            )
    elif field in ("micro_batch_size", "adapter_rank"):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise InvalidInput(
                f"{field} = {value!r} is not possible", hint="use a whole number from 1 up"
            )
        if field == "adapter_rank" and value > _LARGEST_RANK:
            raise InvalidInput(
                f"adapter_rank = {value} is not possible",
                hint=f"use a whole number from 1 to {_LARGEST_RANK}",
            )
    else:
        raise InvalidInput(
            f"there is no technique {field!r}",
            hint=suggestion(field, FIELD_ORDER, otherwise=f"use one of {', '.join(FIELD_ORDER)}"),
        )


def configuration_of(choices: Mapping[str, Any]) -> TrainingConfig:
    """Return the configuration of a user's choices by field. Raises InvalidInput."""
    for field, value in choices.items():
        check_value(field, value)
    return TrainingConfig(**choices)


_LARGEST_RANK = 2**16
"""Larger than the width of any model's layers."""

_DEFAULT_CONFIG = TrainingConfig()
"""fp32 without any technique."""


@dataclass(frozen=True, kw_only=True)
class LegalityContext:
    """The properties of a workload that decide which configurations are legal."""

    global_batch: int
    """Sequences per optimizer step."""
    clips_gradients: bool = False
    sequence_length: int | None = None
    """Tokens in a sequence; None if unknown, as for a user's script."""


def reverted(config: TrainingConfig, technique: str, *, plain: TrainingConfig) -> TrainingConfig:
    """Return `config` with the choice of `plain` for a technique.

    Where that is none, the fields that depend on the technique are at their defaults.
    """
    changes = {technique: getattr(plain, technique)}
    if changes[technique] == "none":
        for field in DEPENDENT_FIELDS.get(technique, ()):
            changes[field] = getattr(_DEFAULT_CONFIG, field)
    return dataclasses.replace(config, **changes)


FP8_MULTIPLE = 16
"""Both dimensions of every matrix in an fp8 product must be multiples of this."""


@dataclass(frozen=True)
class Rule:
    """One illegal combination of the values of `fields`, in given circumstances."""

    fields: tuple[str, ...]
    broken: Callable[[Mapping[str, Any], LegalityContext], bool]
    """Returns whether the chosen values, in these circumstances, are the illegal combination."""
    why: str
    """Template of the reason."""
    hint: str
    """Template of what to change."""

    def explanation(self, chosen: Mapping[str, Any], at: LegalityContext) -> tuple[str, str]:
        """Return reason and hint with the values of `chosen` and of the circumstances filled in."""
        values = {**vars(at), **chosen}
        return self.why.format_map(values), self.hint.format_map(values)

    def sentence(self, chosen: Mapping[str, Any], at: LegalityContext) -> str:
        """Return the reason and, after a colon, the hint."""
        return ": ".join(self.explanation(chosen, at))


RULES = (
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
        ("checkpointing", "memory_budget"),
        lambda c, _: c["memory_budget"] != 1.0 and c["checkpointing"] != "none",
        "memory_budget {memory_budget} and checkpointing {checkpointing} both decide what is "
        "recomputed",
        "set checkpointing to none or memory_budget to 1.0",
    ),
    Rule(
        ("optimizer", "optimizer_fusion"),
        lambda c, _: c["optimizer_fusion"] == "kernel" and c["optimizer"] == "adafactor",
        "torch's Adafactor has no fused kernel",
        "use optimizer_fusion foreach, or another optimizer",
    ),
    Rule(
        ("optimizer", "optimizer_fusion"),
        lambda c, _: (
            c["optimizer_fusion"] in ("foreach", "kernel")
            and c["optimizer"] == "adafactor-fixed-rate"
        ),
        "adafactor-fixed-rate updates one parameter after the other and has no optimizer_fusion "
        "{optimizer_fusion}",
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
        ("micro_batch_size", "optimizer_fusion"),
        lambda c, at: (
            c["optimizer_fusion"] == "backward" and c["micro_batch_size"] != at.global_batch
        ),
        "optimizer_fusion backward would step after every micro batch of {micro_batch_size} "
        "instead of once for the global batch of {global_batch}",
        "set micro_batch_size to {global_batch}, or use another fusion",
    ),
    Rule(
        ("optimizer_fusion",),
        lambda c, at: c["optimizer_fusion"] == "backward" and at.clips_gradients,
        "optimizer_fusion backward updates each parameter before the norm of all gradients is "
        "known, by which gradient_clipping scales them",
        "use another fusion, or no clipping",
    ),
    Rule(
        ("optimizer", "optimizer_fusion"),
        lambda c, _: (
            c["optimizer_fusion"] in ("foreach", "kernel") and c["optimizer"] == "adamw-8bit"
        ),
        "adamw-8bit compiles its own kernel for each parameter and has no optimizer_fusion "
        "{optimizer_fusion}",
        "use none or backward, or another optimizer",
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
        lambda c, _: c["precision"] == "bf16-stochastic" and c["optimizer"] == "adamw-8bit",
        "bf16-stochastic rounds an optimizer's state to bf16, and that of adamw-8bit is in 8 bits",
        "use precision bf16-true, or optimizer adamw",
    ),
    Rule(
        ("precision", "attention"),
        lambda c, _: c["precision"] in ("fp32", "tf32") and c["attention"] in ("flash", "cudnn"),
        "attention {attention} is a kernel for 16-bit numbers, precision {precision} has 32",
        "use attention auto or efficient, or precision bf16-mixed",
    ),
    Rule(
        ("precision", "micro_batch_size"),
        # The gradient of a weight is a matrix product along the tokens of a micro batch, and every
        # micro batch is full.
        lambda c, at: (
            c["precision"] == "fp8"
            and at.sequence_length is not None
            and c["micro_batch_size"] * at.sequence_length % FP8_MULTIPLE != 0
        ),
        "precision fp8 needs micro batches whose number of tokens is a multiple of 16, and "
        "micro_batch_size {micro_batch_size} has sequences of {sequence_length} tokens",
        "use a sequence length that is a multiple of 16, another micro_batch_size, "
        "or precision bf16-mixed",
    ),
    Rule(
        ("optimizer", "optimizer_fusion"),
        lambda c, _: (
            c["optimizer_fusion"] in ("foreach", "kernel") and c["optimizer"].startswith("paged")
        ),
        "{optimizer} has a kernel of its own for each parameter and no optimizer_fusion "
        "{optimizer_fusion}",
        "use none or backward, or another optimizer",
    ),
    Rule(
        ("precision", "optimizer"),
        lambda c, _: c["precision"] == "bf16-stochastic" and c["optimizer"].startswith("paged"),
        "bf16-stochastic rounds an optimizer's state, and {optimizer} has it in memory of its own",
        "use precision bf16-true, or optimizer adamw",
    ),
    Rule(
        ("precision", "adapter"),
        lambda c, _: c["precision"] == "fp8" and c["adapter"] != "none",
        "precision fp8 converts the layers of the model's own weights, to which adapter {adapter} "
        "adds matrices that are too narrow for it",
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
        ("adapter", "base_weights"),
        lambda c, _: c["adapter"] == "none" and c["base_weights"] != "trained",
        "base_weights {base_weights} are frozen, and without an adapter nothing would be trained",
        "set adapter to lora or dora, or base_weights to trained",
    ),
    Rule(
        ("precision", "base_weights"),
        lambda c, _: c["base_weights"] == "bf16" and c["precision"] not in ("bf16-mixed",),
        "base_weights bf16 are multiplied in bf16, which precision {precision} does not do, or "
        "does with all its weights",
        "use precision bf16-mixed, or base_weights trained",
    ),
    Rule(
        ("precision", "base_weights"),
        lambda c, _: c["base_weights"] in QUANTIZED_WEIGHTS and c["precision"] in ("fp32", "tf32"),
        "base_weights {base_weights} are multiplied in 16 bits, precision {precision} has 32",
        "use precision bf16-mixed, or base_weights trained",
    ),
)


def rule_violations(chosen: Mapping[str, Any], at: LegalityContext) -> list[str]:
    """Return why `chosen` (a configuration or its first fields) is illegal, a sentence per rule.

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


def baseline_of(*, optimizer: Optimizer, global_batch: int) -> TrainingConfig:
    """Return what savings are relative to: fp32, no technique, the global batch in one pass."""
    return TrainingConfig(optimizer=optimizer, micro_batch_size=global_batch)


def segment_bounds(layers: int) -> list[int]:
    """Return where `sqrt` cuts the blocks: segment i has those from bounds[i] to bounds[i + 1].

    It makes round(sqrt(layers)) segments of nearly equal length.
    """
    segments = round(math.sqrt(layers))
    return [round(index * layers / segments) for index in range(segments + 1)]
