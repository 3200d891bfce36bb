"""Read the `config.json` of a Hugging Face model, without torch or transformers.

`autotune/models/hugging_face.py` builds the model, in the process of a trial.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autotune.errors import InvalidInput
from autotune.spec.user_paths import expanded, is_plain_file, path_exists

FILE_NAME = "config.json"
HUB_TIMEOUT_SECONDS = 10
_KEYS: Mapping[str, tuple[str, ...]] = {
    "layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "width": ("hidden_size", "n_embd", "d_model"),
    "heads": ("num_attention_heads", "n_head", "n_heads", "num_heads"),
    "vocab_size": ("vocab_size",),
}
"""The sizes of a workload, each with its keys in config files."""
WEIGHT_FILES = ("*.safetensors", "*.bin")
"""Patterns of weight files, the preferred one first."""
_POSITION_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len")


def read_model_config(path: str) -> dict[str, Any]:
    """Return the content of the config.json at `path` or in the folder `path`.

    Raises InvalidInput if it cannot be read or does not describe a model.
    """
    file = expanded(path)
    file = file / FILE_NAME if file.is_dir() else file
    if path_exists(str(file)) and not is_plain_file(file):
        raise InvalidInput(
            f"model {path!r} is not a regular file", hint=f"name a {FILE_NAME} or a folder with one"
        )
    try:
        content = json.loads(file.read_text(encoding="utf-8-sig"), parse_constant=_reject_constant)
    except OSError as error:
        raise InvalidInput(
            f"model {path!r} cannot be read: {error.strerror} ({file})",
            hint=f"name a {FILE_NAME} or a folder that holds one",
        ) from None
    except (ValueError, RecursionError) as error:
        raise InvalidInput(
            f"{file} is not valid JSON: {error}", hint="correct the file at this position"
        ) from None
    if not isinstance(content, dict) or not _is_plain_name(content.get("model_type")):
        raise InvalidInput(
            f"{file} does not say which model it describes",
            hint='it must have a "model_type", such as "llama"',
        )
    sizes_of(content)
    return content


def is_hub_name(model: str) -> bool:
    """Whether `model` has the form `owner/name` and does not look like a file."""
    if Path(model).suffix in (".json", ".py"):
        return False
    return re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", model, re.ASCII) is not None


def fetch_model_config(name: str) -> dict[str, Any]:
    """Return the config.json of a model on the Hugging Face hub, or its copy in the hub's cache.

    Raises InvalidInput if the model does not exist, and at once if there is no network.
    """
    # A quarter of a second, which only models of the hub need.
    from huggingface_hub import (  # noqa: PLC0415
        HfApi,
        hf_hub_download,
        try_to_load_from_cache,
    )

    cached = try_to_load_from_cache(name, FILE_NAME)
    try:
        # A short request first: without a network the download would retry for a long time.
        HfApi().model_info(name, timeout=HUB_TIMEOUT_SECONDS)
        return read_model_config(hf_hub_download(name, FILE_NAME, etag_timeout=HUB_TIMEOUT_SECONDS))
    except InvalidInput:
        raise
    except Exception as error:  # network and hub raise many types
        if isinstance(cached, str):
            return read_model_config(cached)
        lines = str(error).strip().splitlines()
        reason = lines[0] if lines else type(error).__name__
        raise InvalidInput(
            f"model {name!r} is not a local path and cannot be loaded from the Hugging Face hub: "
            f"{reason}",
            hint=f"check the name and the network, or give a local {FILE_NAME} or its folder",
        ) from error


def source_of(model: str) -> str:
    """Return the absolute folder of a local model, which also has its weights, or the hub name."""
    if not path_exists(model):
        return model
    path = expanded(model)
    folder = path if path.is_dir() else path.parent
    return str(folder.absolute())


def weight_files(folder: Path) -> list[Path]:
    """Return the weight files in a folder, sorted, all of the first pattern that matches."""
    for pattern in WEIGHT_FILES:
        files = sorted(folder.glob(pattern))
        if files:
            return files
    return []


def no_weights(source: str) -> InvalidInput:
    """Return the error for a folder or repository without weights."""
    return InvalidInput(
        f"there are no weights in {source}", hint="name a folder with model.safetensors in it"
    )


def _reject_constant(constant: str) -> None:
    raise ValueError(f"{constant} is not a JSON number")


def _is_plain_name(value: object) -> bool:
    return (
        isinstance(value, str)
        and value.isascii()
        and value.replace("_", "").replace("-", "").isalnum()
    )


def model_name(content: Mapping[str, Any]) -> str:
    """Return a name such as `llama-1f3c5a`; files with equal content get the same name."""
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    return f"{content['model_type']}-{digest[:6]}"


def sizes_of(content: Mapping[str, Any]) -> dict[str, int]:
    """Return the sizes of the model, by the names of the workload's settings.

    Raises InvalidInput for one that is missing or not a positive whole number.
    """
    sizes = {}
    for field, keys in _KEYS.items():
        value = next((content[key] for key in keys if key in content), None)
        if type(value) is not int or value < 1:
            if value is None:
                message = f"the model's {FILE_NAME} has no {keys[0]}"
            else:
                message = f"the model's {FILE_NAME} has {keys[0]} = {value!r}, which is not a size"
            raise InvalidInput(
                message, hint=f"give {keys[0]} as a whole number, next to model_type"
            )
        sizes[field] = value
    return sizes


def largest_sequence_length(content: Mapping[str, Any]) -> int | None:
    """Return the number of positions of the model; None if the config does not say."""
    value = next((content[key] for key in _POSITION_KEYS if key in content), None)
    return value if type(value) is int else None


def with_layers(content: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """Return the config with another number of layers.

    Lists with one entry per layer are cut, or repeated from their start.
    """
    before = sizes_of(content)["layers"]
    changed = dict(content)
    for key, value in content.items():
        if key in _KEYS["layers"]:
            changed[key] = layers
        elif isinstance(value, list) and len(value) == before:
            changed[key] = [value[index % before] for index in range(layers)]
    return changed
