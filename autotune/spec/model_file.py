"""A model described by a Hugging Face `config.json`: what must be known of it without loading torch or transformers.

`autotune/models/hugging_face.py` builds it, in a trial's own process.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autotune.errors import InvalidInput
from autotune.spec.user_paths import expanded, is_plain_file, is_there

FILE_NAME = "config.json"
HUB_TIMEOUT_SECONDS = 10
_KEYS: Mapping[str, tuple[str, ...]] = {
    "layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "width": ("hidden_size", "n_embd", "d_model"),
    "heads": ("num_attention_heads", "n_head", "n_heads", "num_heads"),
    "vocab_size": ("vocab_size",),
}
"""A workload's sizes and what config files call them."""
WEIGHT_FILES = ("*.safetensors", "*.bin")
"""Kinds of files that hold weights, the preferred one first."""
_POSITION_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len")


def read_model_config(path: str) -> dict[str, Any]:
    """The content of the config.json at `path`, or in the folder `path`. Raises InvalidInput."""
    file = expanded(path)
    file = file / FILE_NAME if file.is_dir() else file
    if is_there(str(file)) and not is_plain_file(file):
        raise InvalidInput(
            f"model {path!r} is no file to be read", hint=f"name a {FILE_NAME} or a folder with one"
        )
    try:
        content = json.loads(file.read_text(encoding="utf-8-sig"), parse_constant=_refuse_constant)
    except OSError as error:
        raise InvalidInput(
            f"model {path!r} cannot be read: {error.strerror} ({file})",
            hint=f"name a {FILE_NAME} or a folder that holds one",
        ) from None
    except (ValueError, RecursionError) as error:
        raise InvalidInput(
            f"{file} is not valid JSON: {error}", hint="mend the place it names"
        ) from None
    if not isinstance(content, dict) or not _is_plain_name(content.get("model_type")):
        raise InvalidInput(
            f"{file} does not say which model it describes",
            hint='it must hold a "model_type", such as "llama"',
        )
    sizes_of(content)
    return content


def is_hub_name(model: str) -> bool:
    """Whether `model` has the form `owner/name`, and not that of a path."""
    return re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", model, re.ASCII) is not None and Path(
        model
    ).suffix not in (
        ".json",
        ".py",
    )


def fetch_model_config(name: str) -> dict[str, Any]:
    """The content of the config.json of a model on the Hugging Face hub, or of its copy in the hub's cache.

    Raises InvalidInput, at once where there is no network.
    """
    from huggingface_hub import HfApi, hf_hub_download, try_to_load_from_cache

    cached = try_to_load_from_cache(name, FILE_NAME)
    try:
        # One short question first: without a network the download would be tried again and again.
        HfApi().model_info(name, timeout=HUB_TIMEOUT_SECONDS)
        return read_model_config(hf_hub_download(name, FILE_NAME, etag_timeout=HUB_TIMEOUT_SECONDS))
    except InvalidInput:
        raise
    except Exception as error:  # whatever the network or the hub raises
        if isinstance(cached, str):
            return read_model_config(cached)
        lines = str(error).strip().splitlines()
        raise InvalidInput(
            f"model {name!r} is no local path and cannot be had from the Hugging Face hub: "
            f"{lines[0] if lines else type(error).__name__}",
            hint=f"check the name and the network, or name a local {FILE_NAME} or a folder with one",
        ) from error


def source_of(model: str) -> str:
    """Where the weights beside a config.json are: the absolute folder, or the hub name itself."""
    path = expanded(model)
    if not is_there(model):
        return model
    return str((path if path.is_dir() else path.parent).absolute())


def weight_files(folder: Path) -> list[Path]:
    """Files of trained weights in a folder, all of one kind; empty where there are none."""
    return next((files for kind in WEIGHT_FILES if (files := sorted(folder.glob(kind)))), [])


def no_weights(source: str) -> InvalidInput:
    return InvalidInput(
        f"there are no weights in {source}", hint="name a folder with model.safetensors in it"
    )


def _refuse_constant(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON number")


def _is_plain_name(value: object) -> bool:
    return (
        isinstance(value, str)
        and value.isascii()
        and value.replace("_", "").replace("-", "").isalnum()
    )


def model_name(content: Mapping[str, Any]) -> str:
    """`llama-1f3c5a`: files of equal content have one name, wherever they are."""
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    return f"{content['model_type']}-{digest[:6]}"


def sizes_of(content: Mapping[str, Any]) -> dict[str, int]:
    """The workload's sizes by their names there.

    Raises InvalidInput for one that is missing or no size.
    """
    sizes = {}
    for field, keys in _KEYS.items():
        value = next((content[key] for key in keys if key in content), None)
        if type(value) is not int or value < 1:
            raise InvalidInput(
                f"the model's {FILE_NAME} says {keys[0]} = {value!r}, which is no size"
                if value is not None
                else f"the model's {FILE_NAME} does not say {keys[0]}",
                hint=f"give {keys[0]} as a whole number, beside model_type",
            )
        sizes[field] = value
    return sizes


def largest_sequence_length(content: Mapping[str, Any]) -> int | None:
    """Positions the model has, None if it does not say."""
    value = next((content[key] for key in _POSITION_KEYS if key in content), None)
    return value if type(value) is int else None


def with_layers(content: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """The same model with that many layers; lists with one entry a layer are cut, or go on from their beginning."""
    before = sizes_of(content)["layers"]
    changed = dict(content)
    for key, value in content.items():
        if key in _KEYS["layers"]:
            changed[key] = layers
        elif isinstance(value, list) and len(value) == before:
            changed[key] = [value[index % before] for index in range(layers)]
    return changed
