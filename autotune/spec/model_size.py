"""Estimate the size of a model from its settings alone, before anything of it is built.

The initial weights of a study are drawn in memory and written to disk in fp32, 4 bytes each.
"""

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from autotune.errors import InvalidInput
from autotune.units import format_size

WEIGHT_BYTES = 4

_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers")
_WIDTHS = ("hidden_size", "n_embd", "n_embed", "d_model", "emb_dim")
_INNER_WIDTHS = (
    "intermediate_size",
    "n_inner",
    "d_ff",
    "ffn_dim",
    "ffn_hidden_size",
    "decoder_ffn_dim",
)
_INNER_WIDTHS_OF_EXPERTS = ("moe_intermediate_size", "shared_expert_intermediate_size")
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
"""Names of sizes in the configs of transformers."""


def estimated_weights(workload: Mapping[str, Any]) -> int:
    """Returns about how many weights the model of a workload has.

    A transformer has about 4 W^2 + 3 W F weights in each block (W the width, F the inner width, for
    each expert), and 2 V W in its embeddings of V tokens. A model with fewer heads for keys than
    for queries, without a gate in its feed-forward or with tied embeddings has down to half of it.
    """
    config = workload.get("model_config") or {}
    layers = _largest(workload.get("layers"), config, _LAYERS, otherwise=1)
    width = _largest(workload.get("width"), config, _WIDTHS, otherwise=1)
    inner = _largest(workload.get("feed_forward_width"), config, _INNER_WIDTHS, otherwise=4 * width)
    heads = _largest(workload.get("heads"), config, _HEADS, otherwise=1)
    attention = max(width, heads * _largest(None, config, ("head_dim", "kv_channels"), otherwise=0))
    experts = _largest(None, config, _EXPERTS, otherwise=1)
    if experts > 1:
        inner = _largest(None, config, _INNER_WIDTHS_OF_EXPERTS, otherwise=inner)
    rows = 2 * _largest(workload.get("vocab_size"), config, ("vocab_size",), otherwise=256)
    rows += _largest(None, config, ("n_positions",), otherwise=0)
    return layers * (4 * width * attention + 3 * width * inner * experts) + rows * width


def _largest(given: Any, config: Any, names: Sequence[str], *, otherwise: int) -> int:
    """Returns what is given, or else the largest number of these names anywhere in the config."""
    if type(given) is int and given > 0:
        return given
    found = []
    parts = [config]
    while parts:
        part = parts.pop()
        if isinstance(part, Mapping):
            found += [part[name] for name in names if type(part.get(name)) is int]
            parts += part.values()
    return max(found, default=otherwise)


def check_weights_fit(
    workload: Mapping[str, Any],
    *,
    folder: Path,
    tolerance: float = 1.0,
    kind: type[InvalidInput] = InvalidInput,
) -> None:
    """Raise `kind` if the weights do not fit in this machine's memory or on the disk of `folder`.

    `tolerance` is how much more the estimate may be: 2 refuses only what cannot fit.
    """
    weights = estimated_weights(workload)
    size_bytes = weights * WEIGHT_BYTES
    memory_bytes = _memory_bytes()
    free_bytes = free_disk_bytes(folder)
    described = f"the model has about {weights:.3g} weights, {format_size(size_bytes)} in fp32, and"
    if size_bytes > tolerance * memory_bytes:
        raise kind(
            f"{described} this machine has {format_size(memory_bytes)} of memory",
            hint="choose a smaller model",
        )
    if size_bytes > tolerance * free_bytes:
        raise kind(
            f"{described} the disk of {folder.absolute()} has {format_size(free_bytes)} left",
            hint="make room on that disk, or work in a folder of another one",
        )


def largest_weights_bytes(folder: Path) -> int:
    """Returns how large weights in fp32 may be, which `check_weights_fit` lets pass."""
    return min(_memory_bytes(), free_disk_bytes(folder))


def _memory_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def free_disk_bytes(folder: Path) -> int:
    """Returns the free bytes of the disk that `folder` is on, or would be."""
    folder = folder.absolute()
    for existing in (folder, *folder.parents):
        try:
            return shutil.disk_usage(existing).free
        except OSError:  # it is not there yet
            continue
    return 0
