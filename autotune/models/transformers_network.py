"""Builds the network of a config.json with transformers, which is imported with this module.

Attention runs through scaled_dot_product_attention, without a cache. Families for which
transformers does not offer it (Gemma 2 with its soft caps) use their eager attention. For a layer
that is simply causal no mask is made, in eager, compiled and fake execution alike; transformers
alone would make one whenever it cannot read values. Mixtures of experts run with the default of
transformers, `grouped_mm`, which sorts the tokens by expert and has no data-dependent shapes.
(`batched_mm` would copy the weights of an expert for each token. On fake tensors torch's grouped
matrix product takes bf16 only.)
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.masking_utils import AttentionMaskInterface

from autotune.errors import InvalidInput
from autotune.models.config_class import describe_error, make_config
from autotune.shipped.hugging_face_mask import causal_mask
from autotune.spec.model_file import with_layers
from autotune.spec.workload import Workload


def build(workload: Workload, *, weights_folder: Path | None = None) -> Any:
    """Returns the network in float32, with random weights or those from `weights_folder`.

    Raises InvalidInput if transformers cannot build it.
    """
    AttentionMaskInterface.register("sdpa", causal_mask)
    try:
        return _network(workload, weights_folder, attention="sdpa")
    except ValueError as error:
        if "scaled_dot_product_attention" not in str(error):
            raise _build_error(workload, error) from error
    # A family whose attention no kernel computes.
    return _network(workload, weights_folder, attention="eager")


def _network(workload: Workload, weights_folder: Path | None, *, attention: str) -> Any:
    """Returns the transformers model; raises ValueError if its family has no such attention."""
    config = _config(workload)
    options: dict[str, Any] = {
        "dtype": torch.float32,
        "attn_implementation": attention,
        "trust_remote_code": False,
    }
    try:
        if weights_folder is None:
            return AutoModelForCausalLM.from_config(config, **options)
        network, report = AutoModelForCausalLM.from_pretrained(
            str(weights_folder),
            config=config,
            local_files_only=True,
            # What was checked is what is read (`spec/weight_files.py`).
            use_safetensors=any(weights_folder.glob("*.safetensors")),
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # it would name none; `_check_loaded` rejects them
            **options,
        )
        _check_loaded(workload, report)
        return network
    except (InvalidInput, ValueError):
        raise
    except Exception as error:  # model classes and readers of weights raise errors of many types
        raise _build_error(workload, error) from error


def _check_loaded(workload: Workload, report: Mapping[str, Any]) -> None:
    """Raise InvalidInput if weights are missing, left over or of another shape."""
    for name, found, expected in sorted(report["mismatched_keys"]):
        raise InvalidInput(
            f"the weights in {workload.model_source} do not fit its config.json: {name} is "
            f"{_by(found)}, not {_by(expected)}",
            hint="name the folder that has this config.json together with its weights",
        )
    for problem, names in (
        ("lack", report["missing_keys"]),
        ("hold also", report["unexpected_keys"]),
    ):
        if not names:
            continue
        first = min(map(str, names))
        others = f" and {len(names) - 1} more" if len(names) > 1 else ""
        raise InvalidInput(
            f"the weights in {workload.model_source} {problem} {first}{others}",
            hint="name the folder that has this config.json together with its weights",
        )


def _by(shape: Iterable[int]) -> str:
    return " x ".join(map(str, shape))


def _config(workload: Workload) -> Any:
    """Returns a new config object each time, because building a model changes it."""
    assert workload.model_config is not None
    try:
        return make_config(with_layers(workload.model_config, workload.layers))
    except InvalidInput:
        raise
    except Exception as error:  # each config class checks its settings in its own way
        raise _build_error(workload, error) from error


def _build_error(workload: Workload, error: Exception) -> InvalidInput:
    """Returns the error with the first sentence of what transformers reports."""
    return InvalidInput(
        f"transformers cannot build model {workload.model}: {describe_error(error)}",
        hint="change its config.json, or use another model",
    )
