"""Describes a predicted peak: the moment of the training step, the module, what holds the bytes.

Pure functions over a prediction; nothing is predicted here.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Literal, get_args

from autotune.spec.config import TrainingConfig
from autotune.spec.prediction import Category, Prediction
from autotune.units import format_percent, format_size

Moment = Literal[
    "forward",
    "start of backward",
    "middle of backward",
    "end of backward",
    "backward",
    "step",
    "elsewhere",
]
MOMENTS = get_args(Moment)
MOMENT_DESCRIPTIONS: Mapping[Moment, str] = {
    "forward": "in the forward pass",
    "start of backward": "at the start of backward",
    "middle of backward": "in the middle of backward",
    "end of backward": "at the end of backward",
    "backward": "in backward",
    "step": "in the optimizer step",
    "elsewhere": "between two phases of the step",
}

HARDLY_ANY = 0.05
"""With gradients below this share of the parameters, backward has just begun."""
MOST = 0.5
"""With gradients above this share of the parameters, backward is about to end."""
EDGE = 0.1
"""Share of a phase's allocations that counts as its start, and as its end."""
NOTABLE = 0.01
"""Smaller shares of the peak are not mentioned."""

_CATEGORY_NAMES: Mapping[Category, str] = {
    "optimizer_state": "optimizer state",
    "gathered_weights": "gathered weights",
    "workspace": "cuBLAS workspace",
}
_COME_AND_GO: tuple[Category, ...] = (
    "activations",
    "temporaries",
    "gradients",
    "gathered_weights",
)
_GROUPS_SHOWN = 4
_KERNEL_NAME_LENGTH = 60


def moment_of(prediction: Prediction, config: TrainingConfig, *, sequences_per_step: int) -> Moment:
    """Returns the moment of the peak.

    Backward is divided into three by the share of gradients that exist, if gradients accumulate in
    it, otherwise by the share of its allocations.
    """
    if prediction.phase not in ("forward", "backward", "step"):
        return "elsewhere"
    if prediction.phase != "backward":
        return "forward" if prediction.phase == "forward" else "step"
    if not frees_gradients_at_once(config) and config.micro_batch_size == sequences_per_step:
        share = gradient_share(prediction)
        return _divided(share, start=HARDLY_ANY, end=MOST)
    progress = _progress(prediction)
    return "backward" if progress is None else _divided(progress, start=EDGE, end=1 - EDGE)


def frees_gradients_at_once(config: TrainingConfig) -> bool:
    """Returns whether a step in backward frees each gradient at once.

    It does not for one graph of the whole model, which returns all gradients when it ends.
    """
    return config.optimizer_fusion == "backward" and config.compile != "model"


def gradient_share(prediction: Prediction) -> float:
    """Returns the bytes of gradients at the peak relative to those of the parameters."""
    sizes = prediction.bytes_by_category
    return sizes.get("gradients", 0) / max(1, sizes.get("parameters", 0))


def peak_sentences(
    prediction: Prediction,
    config: TrainingConfig,
    *,
    sequences_per_step: int,
    measured_bytes: int | None = None,
) -> tuple[str, ...]:
    """Returns sentences on when and where the peak is, and what holds its bytes."""
    moment = moment_of(prediction, config, sequences_per_step=sequences_per_step)
    cause = _cause(prediction, config, moment, sequences_per_step=sequences_per_step)
    sentences = [
        f"The peak, {format_size(prediction.peak_memory_bytes)}, is {MOMENT_DESCRIPTIONS[moment]}, "
        f"{_location(prediction, config)}: {cause}.",
        f"At the peak: {_categories(prediction)}.",
    ]
    for group in _largest_groups(prediction, config):
        sentences.append(f"{group[:1].upper()}{group[1:]}.")
    if measured_bytes is not None:
        share = prediction.peak_memory_bytes / measured_bytes - 1
        off = format_percent(share, digits=1, sign=True)
        sentences.append(f"Measured: {format_size(measured_bytes)}; the prediction is {off} % off.")
    return tuple(sentences)


def burden(prediction: Prediction) -> str:
    """Returns `14.73 GiB of activations`: what a step adds at this peak, except its gradients."""
    added = [
        (_CATEGORY_NAMES.get(name, name), size)
        for name, size in _sizes(prediction)
        if name in ("activations", "temporaries", "gathered_weights")
    ]
    if not added:
        return "no activations"
    largest = max(size for _, size in added)
    return listed(
        *(f"{format_size(size)} of {name}" for name, size in added if size >= 0.1 * largest)
    )


def listed(*items: str) -> str:
    """Returns `a, b and c`."""
    if len(items) < 2:
        return "".join(items)
    return f"{', '.join(items[:-1])} and {items[-1]}"


# -- the moment ------------------------------------------------------------------------------------


def _divided(share: float, *, start: float, end: float) -> Moment:
    if share <= start:
        return "start of backward"
    if share >= end:
        return "end of backward"
    return "middle of backward"


def _progress(prediction: Prediction) -> float | None:
    """Returns how far into its phase the peak is, from 0 to 1; None without a timeline.

    It is counted in allocations and frees.
    """
    if prediction.timeline is None:
        return None
    event = prediction.timeline.peak_event
    for _, first, last in prediction.timeline.phases:
        if first <= event < last:
            return (event - first) / (last - first)
    return None


def _cause(
    prediction: Prediction, config: TrainingConfig, moment: Moment, *, sequences_per_step: int
) -> str:
    """Returns why the peak is at this moment."""
    sizes = prediction.bytes_by_category
    gradients = f"{format_size(sizes.get('gradients', 0))} of gradients"
    accumulates = config.micro_batch_size != sequences_per_step
    if moment == "forward":
        cause = f"{burden(prediction)} have come together, and backward needs less than that"
        if accumulates:
            cause += f"; {gradients} of the micro batches before are kept"
        return cause
    if moment == "step":
        return f"{gradients} and the optimizer's own memory exist together"
    if moment == "elsewhere":
        return "no phase of the step exceeds what stays between them"
    if moment == "start of backward":
        if config.recomputation or config.memory_budget != 1.0:
            stored = "what is recomputed first comes on top of all that forward kept"
        else:
            stored = "all that forward kept for backward is still there"
        so_far = _gradients_so_far(prediction, config, accumulates=accumulates)
        return f"{stored}, {burden(prediction)}, and {so_far}"
    if frees_gradients_at_once(config):
        return (
            f"{burden(prediction)} are alive, and each gradient is freed once its parameter is "
            "updated"
        )
    if moment == "end of backward":
        share = format_percent(min(1.0, gradient_share(prediction)))
        return f"{share} % of all gradients exist, and {burden(prediction)}"
    if accumulates:
        gradients += ", kept since the micro batch before,"
    return f"{gradients} and {burden(prediction)} exist together"


def _gradients_so_far(prediction: Prediction, config: TrainingConfig, *, accumulates: bool) -> str:
    size = prediction.bytes_by_category.get("gradients", 0)
    if accumulates:
        return f"{format_size(size)} of gradients of the micro batches before are kept"
    if frees_gradients_at_once(config) and size:
        return (
            f"only {format_size(size)} of gradients exist, each freed once its parameter is updated"
        )
    return f"only {format_size(size)} of gradients exist" if size else "no gradient exists yet"


# -- the location ----------------------------------------------------------------------------------


def _location(prediction: Prediction, config: TrainingConfig) -> str:
    """Returns which operator allocates at the peak, and in which module."""
    if not prediction.operator:
        return "with nothing allocated since the step began"
    operator = _operator_name(prediction.operator)
    if config.compile == "model":
        return (
            f"in the one program that inductor made of the whole model, where {operator} allocates"
        )
    if not prediction.module:
        return (
            f"where {operator} allocates outside all modules, as updates and sums of gradients do"
        )
    module = describe_module(prediction.module)
    if config.compile == "block" and re.search(r"\.\d+$", prediction.module):
        module = f"the compiled {module}"
    return f"where {operator} allocates in {module}"


def describe_module(module: str) -> str:
    """Returns `feed_forward.up of block 3` for `blocks.3.feed_forward.up`."""
    match = re.fullmatch(r"(?:.*\.)?\w+\.(\d+)(?:\.(.+))?", module)
    if match is None:
        return module
    return f"{match[2]} of block {match[1]}" if match[2] else f"block {match[1]}"


def _operator_name(operator: str) -> str:
    """Returns `log_softmax_backward_data` for `aten._log_softmax_backward_data`.

    The long name of a kernel is cut.
    """
    if operator.startswith("aten."):
        return operator.removeprefix("aten.").removeprefix("_")
    short = operator
    if len(operator) > _KERNEL_NAME_LENGTH:
        short = operator[:_KERNEL_NAME_LENGTH] + "..."
    return f"the kernel {short}" if "fused" in operator else short


# -- the holders -----------------------------------------------------------------------------------


def _sizes(prediction: Prediction) -> list[tuple[Category, int]]:
    """Returns the categories that hold bytes, with their sizes, largest first."""
    sizes = [(name, size) for name, size in prediction.bytes_by_category.items() if size]
    return sorted(sizes, key=lambda name_and_size: -name_and_size[1])


def _categories(prediction: Prediction) -> str:
    peak = prediction.peak_memory_bytes
    notable = [(name, size) for name, size in _sizes(prediction) if size >= NOTABLE * peak]
    parts = [
        f"{_CATEGORY_NAMES.get(name, name)} {format_size(size)} ({format_percent(size / peak)} %)"
        for name, size in notable
    ]
    text = ", ".join(parts)
    rest = peak - sum(size for _, size in notable)
    if rest:
        text += f", everything else {format_size(rest)}"
    return text


def _largest_groups(prediction: Prediction, config: TrainingConfig) -> Iterator[str]:
    """Yield `of the 14.73 GiB of activations: feed_forward 5.93 GiB, ...`.

    One for each category with a tenth of the peak or more. It is divided by parts of the blocks; in
    a compiled model, which has no parts, by operator.
    """
    for category, size in _sizes(prediction):
        comes_and_goes = category in _COME_AND_GO
        if not comes_and_goes or size < 0.1 * prediction.peak_memory_bytes:
            continue
        by_operator = config.compile == "model" and category != "gradients"
        groups: Counter[str] = Counter()
        for holder in prediction.holders:
            if holder.category == category:
                name = _operator_name(holder.operator) if by_operator else _part(holder.module)
                groups[name] += holder.size_bytes
        shown = groups.most_common(_GROUPS_SHOWN)
        if not shown:
            continue
        parts = [f"{name} {format_size(held)}" for name, held in shown]
        rest = size - sum(held for _, held in shown)
        if rest >= NOTABLE * size:
            parts.append(f"in smaller pieces {format_size(rest)}")
        label = _CATEGORY_NAMES.get(category, category)
        is_compiled = config.compile == "model" and config.memory_budget != 1.0
        if category == "temporaries" and is_compiled:
            label += ", among them what compiled code recomputes"
        yield f"of the {format_size(size)} of {label}: {', '.join(parts)}"


def _part(module: str) -> str:
    """Returns the part of a block: `feed_forward` for `blocks.*.feed_forward.up`."""
    if not module:
        return "outside all modules"
    _, star, after = module.rpartition("*")
    if not star:
        return module
    return after.strip(".").partition(".")[0] or "the blocks themselves"
