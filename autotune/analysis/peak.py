"""Where a predicted peak is and why, in words: the moment of the step, the module, what holds the bytes.

Pure functions over a prediction; nothing is predicted here.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Literal, get_args

from autotune.spec.config import TrainingConfig
from autotune.spec.prediction import Category, Prediction
from autotune.units import format_size

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
MOMENT_WORDS: Mapping[Moment, str] = {
    "forward": "in the forward pass",
    "start of backward": "at the start of backward",
    "middle of backward": "in the middle of backward",
    "end of backward": "at the end of backward",
    "backward": "in backward",
    "step": "in the optimizer step",
    "elsewhere": "between two phases of the step",
}

HARDLY_ANY = 0.05
"""Gradients of less than this share of the parameters are those of the very first layers of
backward."""
MOST = 0.5
EDGE = 0.1
"""Share of a phase's allocations that counts as its start, and as its end."""
NOTABLE = 0.01
"""Shares of the peak below this are not worth a word."""

_CATEGORY_WORDS: Mapping[Category, str] = {
    "optimizer_state": "optimizer state",
    "workspace": "cuBLAS workspace",
}
_GROUPS_SHOWN = 4
_KERNEL_NAME_LENGTH = 60


def moment_of(prediction: Prediction, config: TrainingConfig, *, global_batch: int) -> Moment:
    """Backward is divided by the gradients that exist, where they come and stay; else by its allocations."""
    if prediction.phase not in ("forward", "backward", "step"):
        return "elsewhere"
    if prediction.phase != "backward":
        return "forward" if prediction.phase == "forward" else "step"
    if not frees_gradients_at_once(config) and config.micro_batch_size == global_batch:
        share = gradient_share(prediction)
        return _divided(share, start=HARDLY_ANY, end=MOST)
    progress = _progress(prediction)
    return "backward" if progress is None else _divided(progress, start=EDGE, end=1 - EDGE)


def frees_gradients_at_once(config: TrainingConfig) -> bool:
    """Whether a step in backward works: one graph of the whole model hands out all gradients only when it ends."""
    return config.optimizer_fusion == "backward" and config.compile != "model"


def gradient_share(prediction: Prediction) -> float:
    """Bytes of gradients relative to those of the parameters."""
    sizes = prediction.bytes_by_category
    return sizes.get("gradients", 0) / max(1, sizes.get("parameters", 0))


def peak_sentences(
    prediction: Prediction,
    config: TrainingConfig,
    *,
    global_batch: int,
    measured_bytes: int | None = None,
) -> tuple[str, ...]:
    """When and where, what all bytes are, and who holds the largest part of those that come and go."""
    moment = moment_of(prediction, config, global_batch=global_batch)
    first = (
        f"The peak, {format_size(prediction.peak_memory_bytes)}, is {MOMENT_WORDS[moment]}, "
        f"{_place(prediction, config)}: {_cause(prediction, config, moment, global_batch=global_batch)}."
    )
    sentences = [first, f"At the peak: {_categories(prediction)}."]
    sentences += [f"{_capital(line)}." for line in _largest_groups(prediction, config)]
    if measured_bytes is not None:
        share = 100 * (prediction.peak_memory_bytes / measured_bytes - 1)
        sentences.append(
            f"Measured: {format_size(measured_bytes)}; the prediction is {share:+.1f} % off."
        )
    return tuple(sentences)


def burden(prediction: Prediction) -> str:
    """`14.73 GiB of activations`: what a step adds at this peak, without its gradients."""
    notable = [
        (size, name) for name, size in _sizes(prediction) if name in ("activations", "temporaries")
    ]
    notable = [
        (size, name) for size, name in notable if size >= 0.1 * max(size for size, _ in notable)
    ]
    return listed(*(f"{format_size(size)} of {name}" for size, name in notable)) or "no activations"


def listed(*words: str) -> str:
    """`a, b and c`."""
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


# -- the moment ------------------------------------------------------------------------------------


def _divided(share: float, *, start: float, end: float) -> Moment:
    return (
        "start of backward"
        if share <= start
        else "end of backward"
        if share >= end
        else "middle of backward"
    )


def _progress(prediction: Prediction) -> float | None:
    """How far into its phase the peak is, counted in allocations and frees; None without a timeline."""
    if prediction.timeline is None:
        return None
    event = prediction.timeline.peak_event
    for _, first, last in prediction.timeline.phases:
        if first <= event < last:
            return (event - first) / (last - first)
    return None


def _cause(
    prediction: Prediction, config: TrainingConfig, moment: Moment, *, global_batch: int
) -> str:
    sizes = prediction.bytes_by_category
    gradients = f"{format_size(sizes.get('gradients', 0))} of gradients"
    accumulates = config.micro_batch_size != global_batch
    if moment == "forward":
        return f"{burden(prediction)} have come together, and backward needs less than that" + (
            f"; {gradients} of the micro batches before are kept" if accumulates else ""
        )
    if moment == "step":
        return f"{gradients} and the optimizer's own memory exist together"
    if moment == "elsewhere":
        return "no phase of the step exceeds what stays between them"
    if moment == "start of backward":
        recomputed = config.checkpointing != "none" or config.memory_budget != 1.0
        kept = (
            "what is recomputed first comes on top of all that forward kept" if recomputed else ""
        )
        kept = kept or "all that forward kept for backward is still there"
        return f"{kept}, {burden(prediction)}, and {_gradients_so_far(prediction, config, accumulates=accumulates)}"
    if frees_gradients_at_once(config):
        return f"{burden(prediction)} are alive, and each gradient is freed once its parameter is updated"
    if moment == "end of backward":
        return f"{100 * min(1.0, gradient_share(prediction)):.0f} % of all gradients exist, and {burden(prediction)}"
    gradients += ", kept since the micro batch before," if accumulates else ""
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


# -- the place -------------------------------------------------------------------------------------


def _place(prediction: Prediction, config: TrainingConfig) -> str:
    if not prediction.operator:
        return "with nothing allocated since the step began"
    operator = _operator_words(prediction.operator)
    if config.compile == "model":
        return (
            f"in the one program that inductor made of the whole model, where {operator} allocates"
        )
    if not prediction.module:
        return (
            f"where {operator} allocates outside all modules, as updates and sums of gradients do"
        )
    compiled = (
        "the compiled "
        if config.compile == "block" and re.search(r"\.\d+$", prediction.module)
        else ""
    )
    return f"where {operator} allocates in {compiled}{module_words(prediction.module)}"


def module_words(module: str) -> str:
    """`feed_forward.up of block 3` for `blocks.3.feed_forward.up`."""
    match = re.fullmatch(r"(?:.*\.)?\w+\.(\d+)(?:\.(.+))?", module)
    if match is None:
        return module
    return f"{match[2]} of block {match[1]}" if match[2] else f"block {match[1]}"


def _operator_words(operator: str) -> str:
    """`log_softmax_backward_data` for `aten._log_softmax_backward_data`; a long kernel's name is cut."""
    if operator.startswith("aten."):
        return operator.removeprefix("aten.").removeprefix("_")
    short = (
        operator if len(operator) <= _KERNEL_NAME_LENGTH else operator[:_KERNEL_NAME_LENGTH] + "..."
    )
    return f"the kernel {short}" if "fused" in operator else short


# -- the holders -----------------------------------------------------------------------------------


def _sizes(prediction: Prediction) -> list[tuple[Category, int]]:
    """Categories that hold something, largest first."""
    return sorted(
        ((name, s) for name, s in prediction.bytes_by_category.items() if s),
        key=lambda one: -one[1],
    )


def _categories(prediction: Prediction) -> str:
    peak = prediction.peak_memory_bytes
    notable = [(name, size) for name, size in _sizes(prediction) if size >= NOTABLE * peak]
    words = [
        f"{_CATEGORY_WORDS.get(name, name)} {format_size(size)} ({100 * size / peak:.0f} %)"
        for name, size in notable
    ]
    rest = peak - sum(size for _, size in notable)
    return ", ".join(words) + (f", everything else {format_size(rest)}" if rest else "")


def _largest_groups(prediction: Prediction, config: TrainingConfig) -> Iterator[str]:
    """`of the 14.73 GiB of activations: feed_forward 5.93 GiB, ...`, of each category with a tenth of the peak.

    By parts of the blocks; in a compiled model, which has no parts left, by operator.
    """
    for category, size in _sizes(prediction):
        comes_and_goes = category in ("activations", "temporaries", "gradients")
        if not comes_and_goes or size < 0.1 * prediction.peak_memory_bytes:
            continue
        groups: Counter[str] = Counter()
        for holder in prediction.holders:
            if holder.category == category:
                whole = config.compile == "model" and category != "gradients"
                groups[_operator_words(holder.operator) if whole else _part(holder.module)] += (
                    holder.size_bytes
                )
        shown = groups.most_common(_GROUPS_SHOWN)
        rest = size - sum(held for _, held in shown)
        words = [f"{name} {format_size(held)}" for name, held in shown]
        words += (
            [f"in smaller pieces {format_size(rest)}"] if shown and rest >= NOTABLE * size else []
        )
        if words:
            label = _CATEGORY_WORDS.get(category, category)
            is_recomputed = (
                category == "temporaries"
                and config.compile == "model"
                and config.memory_budget != 1.0
            )
            label += ", among them what compiled code recomputes" if is_recomputed else ""
            yield f"of the {format_size(size)} of {label}: {', '.join(words)}"


def _part(module: str) -> str:
    """The part of a block that `module` is or is within: `feed_forward` for `blocks.*.feed_forward.up`."""
    before, star, after = module.rpartition("*")
    if star:
        return after.strip(".").partition(".")[0] or "the blocks themselves"
    return before + after if module else "outside all modules"


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
