"""What an exported training compares itself with after twenty steps: numbers and facts of a trial.

`autotune/shipped/promise.py` compares them. A fact is here only if that process can know its own.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from autotune.exporters.bundle import shipped_text
from autotune.exporters.export import Unsupported
from autotune.exporters.recipe import DECIDED_BY_SCRIPT, Recipe

OF_TRAINER, OF_LIGHTNING = "autotune_promise.py", "autotune_lightning_promise.py"
"""The comparison as a file of `autotune.shipped` beside those of a trainer."""

_COMPARED_VERSIONS = ("torch", "cuda", "triton", "transformers")


def is_promised(recipe: Recipe) -> bool:
    """Returns whether the trial measured anything that a training can be compared with."""
    return recipe.peak_memory_bytes is not None or recipe.tokens_per_second is not None


def promise_file(recipe: Recipe, file: str) -> dict[str, str]:
    """Returns {file: text}; nothing where the trial measured nothing."""
    return {file: shipped_text(file)} if is_promised(recipe) else {}


def promised(recipe: Recipe, unsupported: Iterable[Unsupported] = ()) -> dict[str, Any]:
    """Returns the numbers and facts of the trial that are known.

    `unsupported` is what the files of the export do not express.
    """
    config, workload = recipe.config, recipe.workload
    peaks = recipe.peak_memory_bytes_by_rank
    found: dict[str, Any] = {
        "trial": f"{recipe.origin}, on {recipe.device_type}",
        # The first process says it.
        "peak_memory_bytes": peaks[0] if peaks else recipe.peak_memory_bytes,
        "tokens_per_second": recipe.tokens_per_second,
        "tokens_per_second_spread": recipe.tokens_per_second_spread,
        "device": recipe.device_name,
        "devices": recipe.devices,
        "micro_batch_size": config.micro_batch_size,
        "sequence_length": workload.sequence_length,
        "accumulation_steps": recipe.accumulation_steps,
        "share_of_tokens": 1.0 - (recipe.padding_share or 0.0),
        "versions": {
            name: recipe.versions[name] for name in _COMPARED_VERSIONS if name in recipe.versions
        },
        "not_expressed": [_not_expressed(entry) for entry in unsupported if _is_cause(entry)],
    }
    if workload.script is not None:  # which makes its batches itself
        for name in ("share_of_tokens", *DECIDED_BY_SCRIPT):
            found.pop(name, None)
    if recipe.bytes_by_kind is not None and recipe.devices == 1 and config.offload == "none":
        found["weights_bytes"] = recipe.bytes_by_kind["parameters"]
        found["optimizer_bytes"] = recipe.bytes_by_kind["optimizer_state"]
    return {name: value for name, value in found.items() if value not in (None, [], {})}


def literal_lines(name: str, values: Mapping[str, Any]) -> list[str]:
    """Returns lines of Python that bind `name` to a dictionary, an entry on each."""
    return [f"{name} = {{", *(f"    {key!r}: {value!r}," for key, value in values.items()), "}"]


def _is_cause(entry: Unsupported) -> bool:
    """Returns whether the training is another one for it; it sees its micro batches itself."""
    return entry.is_technique and entry.setting != "micro_batch_size"


def _not_expressed(entry: Unsupported) -> str:
    instead = "your code" if entry.instead is None else entry.instead
    return f"{entry.setting} {instead} ({entry.value} in the trial)"
