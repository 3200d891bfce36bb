"""Which model is meant: a built-in name, a Hugging Face config, a function of the user's own, or a training script."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autotune.errors import InvalidInput
from autotune.spec.model_file import (
    FILE_NAME,
    fetch_model_config,
    is_hub_name,
    model_name,
    no_weights,
    read_model_config,
    source_of,
    weight_files,
)
from autotune.spec.user_code import SCRIPT, check_function, check_script, is_function_reference
from autotune.spec.user_paths import is_there

MODEL_NAMES = ("gpt", "deep-one")
"""Keys of the model registry, which only a trial's own process can import."""

HOW_TO_NAME = (
    f"the models are {', '.join(MODEL_NAMES)}, a Hugging Face {FILE_NAME}, a folder with one, a hub name, "
    "or file.py:function"
)


def no_model(name: str) -> InvalidInput:
    """The refusal of a name that is none of the above."""
    return InvalidInput(f"there is no model {name!r}", hint=HOW_TO_NAME)


def with_model_config(settings: Mapping[str, Any]) -> dict[str, Any]:
    """`settings` with a path or hub name as `model` replaced by the config's content and the name it gives the model.

    What is already replaced, and settings without a path, stay as they are. Raises InvalidInput.
    """
    if settings.get("script") is not None:
        check_script(settings)
        return {**settings, "model": SCRIPT}
    model = settings.get("model")
    if (
        not isinstance(model, str)
        or model in MODEL_NAMES
        or settings.get("model_config") is not None
    ):
        return dict(settings)
    if is_function_reference(model):
        check_function(model, settings)
        return dict(settings)
    exists = is_there(model)
    if not exists and not is_hub_name(model):
        raise no_model(model)
    if model.endswith(".py"):
        raise InvalidInput(
            f"{model} does not say which function makes the model", hint=f"write {model}:function"
        )
    content = read_model_config(model) if exists else fetch_model_config(model)
    replaced = {**settings, "model": model_name(content), "model_config": content}
    if settings.get("tokenizer") == "model":
        replaced["tokenizer"] = source_of(model)
    if not settings.get("pretrained"):
        return replaced
    source = source_of(model)
    if exists and not weight_files(Path(source)):
        raise no_weights(source)
    return {**replaced, "model_source": source}
