"""Read the `config.json` of a Hugging Face model, without torch or transformers.

`autotune/models/hugging_face.py` builds the model, in the process of a trial.
"""

import hashlib
import json
import math
import re
import tomllib
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from autotune.errors import InvalidInput, first_line_of
from autotune.spec.user_files import parse_json, read_file
from autotune.spec.user_paths import expanded, path_exists

FILE_NAME = "config.json"
HUB_TIMEOUT_SECONDS = 10
_KEYS: Mapping[str, tuple[str, ...]] = {
    "layers": (
        "num_hidden_layers",
        "n_layer",
        "n_layers",
        "num_layers",
        "decoder_layers",
        "num_decoder_layers",
    ),
    "width": ("hidden_size", "n_embd", "d_model", "emb_dim"),
    "heads": (
        "num_attention_heads",
        "n_head",
        "n_heads",
        "num_heads",
        "attention_heads",
        "decoder_attention_heads",
        "num_decoder_attention_heads",
    ),
    "vocab_size": ("vocab_size",),
}
"""The sizes of a workload, each with its keys in config files. A family may have no such size: a
state-space model such as mamba has no heads."""
TEXT_PART = "text_config"
"""Where the config of a model of text and images has the part that is a language model."""
WEIGHT_FILES = ("*.safetensors", "*.bin")
"""Patterns of weight files, the preferred one first."""
_POSITION_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_target_positions")
_WIDTH_KEYS = ("intermediate_size", "moe_intermediate_size", "head_dim", "n_inner")
_KEY_VALUE_HEADS = "num_key_value_heads"
_AT_LEAST_ONE = frozenset(
    (*(key for keys in _KEYS.values() for key in keys), *_POSITION_KEYS, *_WIDTH_KEYS)
) | {_KEY_VALUE_HEADS}
_COUNTS = re.compile(
    r"(?:num|n)_\w+|(?:\w+_)?(?:size|dim|heads|layers|experts|rank|width|positions)"
)
"""Keys of other sizes, of which there may be none: `n_shared_experts`, `q_lora_rank`."""


def read_model_config(path: str) -> dict[str, Any]:
    """Returns the content of the config.json at `path` or in the folder `path`.

    Raises InvalidInput if it cannot be read or does not describe a model.
    """
    file = expanded(path)
    file = file / FILE_NAME if file.is_dir() else file
    content = read_file(file, hint=f"name a {FILE_NAME} or a folder that holds one")
    return parse_model_config(content, source=str(file))


def parse_model_config(text: bytes, *, source: str) -> dict[str, Any]:
    """Returns the content of a config.json. `source` is how messages name it. Raises as above."""
    content = parse_json(text, source=source)
    if not isinstance(content, dict) or not _is_plain_name(content.get("model_type")):
        raise InvalidInput(
            f"{source} does not say which model it describes",
            hint='it must have a "model_type", such as "llama", or "gpt2" for GPT2LMHeadModel',
        )
    check_sizes(content, source=source)
    return content


def ignored_quantization(content: Mapping[str, Any] | None) -> str:
    """Returns that a config.json asks for quantized weights, which trials do not have; else ""."""
    settings = (content or {}).get("quantization_config")
    if not isinstance(settings, Mapping):
        return ""
    method = settings.get("quant_method", "a method without a name")
    return (
        f"the quantization_config of the model's {FILE_NAME} ({method}) is not used: weights are "
        "stored as precision and base_weights say"
    )


def is_hub_name(model: str) -> bool:
    """Whether `model` has the form `owner/name` and does not look like a file."""
    if Path(model).suffix in (".json", ".py"):
        return False
    return re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", model, re.ASCII) is not None


def fetch_model_config(name: str) -> dict[str, Any]:
    """Returns the config.json of a model on the Hugging Face hub, or its copy in the hub's cache.

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
        raise InvalidInput(
            f"model {name!r} is not a local path and cannot be loaded from the Hugging Face hub: "
            f"{first_line_of(error)}",
            hint=f"check the name and the network, or give a local {FILE_NAME} or its folder",
        ) from error


def known_model_config(name: str) -> dict[str, Any] | None:
    """Returns the config.json of a model of the Hugging Face hub, as far as it decides its sizes.

    None for a model that is not in `model_shapes.toml`. What does not change memory, such as the
    scaling of positions, is left out.
    """
    text = resources.files(__package__).joinpath("model_shapes.toml").read_text("utf-8")
    for model in tomllib.loads(text)["model"]:
        if name.lower() in map(str.lower, model["ids"]):
            return {**model["config"], **dict.fromkeys(model.get("unset", ()))}
    return None


def hub_model_config(name: str, *, needs_weights: bool) -> dict[str, Any]:
    """Returns the config.json of a model on the hub: of the hub's cache, of the table, or fetched.

    One whose weights are needed is fetched before the table is asked. Raises InvalidInput.
    """
    # A quarter of a second, which only models of the hub need.
    from huggingface_hub import try_to_load_from_cache  # noqa: PLC0415

    cached = try_to_load_from_cache(name, FILE_NAME)
    if isinstance(cached, str):
        return read_model_config(cached)
    known = known_model_config(name)
    if known is not None and not needs_weights:
        return known
    try:
        return fetch_model_config(name)
    except InvalidInput:
        if known is None:
            raise
        return known


def source_of(model: str) -> str:
    """Returns the absolute folder of a local model, which also has its weights, or the hub name."""
    if not path_exists(model):
        return model
    path = expanded(model)
    folder = path if path.is_dir() else path.parent
    return str(folder.absolute())


def weight_files(folder: Path) -> list[Path]:
    """Returns the weight files in a folder, sorted, all of the first pattern that matches."""
    for pattern in WEIGHT_FILES:
        files = sorted(folder.glob(pattern))
        if files:
            return files
    return []


def no_weights(source: str) -> InvalidInput:
    """Returns the error for a folder or repository without weights."""
    return InvalidInput(
        f"there are no weights in {source}", hint="name a folder with model.safetensors in it"
    )


def _is_plain_name(value: object) -> bool:
    return (
        isinstance(value, str)
        and value.isascii()
        and value.replace("_", "").replace("-", "").isalnum()
    )


def model_name(content: Mapping[str, Any]) -> str:
    """Returns a name such as `llama-1f3c5a`; files with equal content get the same name."""
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    return f"{content['model_type']}-{digest[:6]}"


def known_sizes(content: Mapping[str, Any]) -> dict[str, int | None]:
    """Returns the sizes of the model, by the names of the workload's settings.

    A size is None where the config does not specify it, or has one for each layer. Raises
    InvalidInput for one that is not a positive whole number.
    """
    return {field: _size(content, keys) for field, keys in _KEYS.items()}


def sizes_of(content: Mapping[str, Any]) -> dict[str, int | None]:
    """Returns `known_sizes`, of a config that specifies the vocabulary.

    Raises InvalidInput if it does not: texts are checked against it.
    """
    sizes = known_sizes(content)
    if sizes["vocab_size"] is None:
        raise InvalidInput(
            f"the model's {FILE_NAME} has no vocab_size",
            hint="give vocab_size as a whole number, next to model_type",
        )
    return sizes


def with_defaults(content: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the config with the sizes that it leaves to the defaults of its class.

    `defaults` is the whole config as its class completes it.
    """
    completed = dict(content)
    for field in (*_KEYS.values(), _POSITION_KEYS):
        if not any(content.get(key) is not None for key in field):
            completed.update((key, defaults[key]) for key in field if _is_size(defaults.get(key)))
    text_defaults = defaults.get(TEXT_PART)
    if isinstance(text_defaults, Mapping):
        completed[TEXT_PART] = with_defaults(content.get(TEXT_PART) or {}, text_defaults)
    return completed


def check_finite(content: Any) -> None:
    """Raise InvalidInput for a number in a config that is not finite: JSON cannot store it.

    Python also reads Infinity and NaN, and 1e999 as infinity.
    """
    for key, value in content.items() if isinstance(content, Mapping) else enumerate(content):
        if isinstance(value, Mapping | list | tuple):
            check_finite(value)
        elif isinstance(value, float) and not math.isfinite(value):
            raise InvalidInput(
                f"the model's {FILE_NAME} has {key} = {value}, which no file of JSON can hold",
                hint=f"give {key} as a finite number",
            )


def check_sizes(content: Mapping[str, Any], *, source: str) -> None:
    """Raise InvalidInput for a size in a config, or in its text part, that is none.

    Beside a whole number it may be null, which leaves it to the class, or a list with one for each
    layer. `source` is how the message names the config.
    """
    for key, value in (*content.items(), *_text_part(content).items()):
        if key in _AT_LEAST_ONE:
            given = value if isinstance(value, list) and value else [value]
            if not all(one is None or _is_size(one) for one in given):
                raise _no_size(key, value, source=source)
            continue
        is_other = value in (None, "auto") or isinstance(value, bool | list)
        if not is_other and _COUNTS.fullmatch(str(key)) and not _is_whole(value, least=0):
            raise _no_size(key, value, source=source, least=0)


def check_complete(content: Mapping[str, Any], *, source: str, has_heads: bool) -> None:
    """Raise InvalidInput for a config without the sizes of a language model, each as one number.

    The number of heads may only be missing in one that has none, as a state-space model.
    """
    for field, keys in _KEYS.items():
        values = [
            (key, part[key])
            for part in (content, _text_part(content))
            for key in keys
            if key in part
        ]
        value = next((value for _, value in values if value is not None), None)
        if _is_size(value):
            continue
        if field == "heads" and (isinstance(value, list) or not (values or has_heads)):
            continue
        if values:
            raise _no_size(*values[0], source=source)
        raise InvalidInput(
            f"{source} has no {keys[0]}",
            hint=f"give {keys[0]} as a whole number from 1 up, next to model_type",
        )


def _no_size(key: str, value: object, *, source: str, least: int = 1) -> InvalidInput:
    return InvalidInput(
        f"{source} has {key:.60} = {json.dumps(value, default=str):.60}, which is not a size",
        hint=f"give {key:.60} as a whole number from {least} up, next to model_type",
    )


def _size(content: Mapping[str, Any], keys: tuple[str, ...]) -> int | None:
    """Returns the value of the first of `keys` that is specified, here or in the text part."""
    for part in (content, _text_part(content)):
        for key in keys:
            value = part.get(key)
            if value is None:
                continue
            if isinstance(value, list) and all(map(_is_size, value)):
                return None  # one for each layer
            if not _is_size(value):
                raise _no_size(key, value, source=f"the model's {FILE_NAME}")
            return int(value)
    return None


def _is_size(value: object) -> bool:
    return _is_whole(value, least=1)


def _is_whole(value: object, *, least: int) -> bool:
    return type(value) is int and value >= least


def _text_part(content: Mapping[str, Any]) -> Mapping[str, Any]:
    part = content.get(TEXT_PART)
    return part if isinstance(part, Mapping) else {}


def largest_sequence_length(content: Mapping[str, Any]) -> int | None:
    """Returns the number of positions of the model; None if the config does not say."""
    for part in (content, _text_part(content)):
        for key in _POSITION_KEYS:
            value = part.get(key)
            if type(value) is int and value >= 1:
                return value
    return None


def with_layers(content: Mapping[str, Any], layers: int | None) -> dict[str, Any]:
    """Returns the config with another number of layers.

    Lists with one entry per layer are cut, or repeated from their start. A config that does not
    specify its number of layers stays as it is.
    """
    before = known_sizes(content)["layers"]
    changed = dict(content)
    if before is None or layers is None:
        return changed
    if not any(content.get(key) is not None for key in _KEYS["layers"]):
        return {**changed, TEXT_PART: with_layers(_text_part(content), layers)}
    for key, value in content.items():
        if key in _KEYS["layers"]:
            changed[key] = layers
        elif isinstance(value, list) and len(value) == before:
            changed[key] = [value[index % before] for index in range(layers)]
    return changed
