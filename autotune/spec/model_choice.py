"""Resolve a model: built-in name, Hugging Face config, user's function or training script."""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from autotune.errors import InvalidInput, suggestion
from autotune.spec.model_file import (
    FILE_NAME,
    hub_model_config,
    is_hub_name,
    known_sizes,
    model_name,
    no_weights,
    read_model_config,
    source_of,
    weight_files,
)
from autotune.spec.user_code import SCRIPT, check_function, check_script, is_function_reference
from autotune.spec.user_paths import path_exists
from autotune.spec.weight_files import check_weight_files
from autotune.system.python_environment import python_environment

MODEL_NAMES = ("gpt", "deep-one")
"""Names in the model registry, which only the process of a trial may import, as it loads torch."""

HOW_TO_NAME = (
    f"the models are {', '.join(MODEL_NAMES)}, a Hugging Face {FILE_NAME}, a folder with one, "
    "a hub name, or file.py:function"
)

_ASK_ITS_CLASS = (sys.executable, "-P", "-m", "autotune.models.config_class")
"""A process of its own, because transformers imports torch."""


def no_model(name: str) -> InvalidInput:
    """Returns the error for a name that is not a model."""
    return InvalidInput(
        f"there is no model {name!r}", hint=suggestion(name, MODEL_NAMES, otherwise=HOW_TO_NAME)
    )


def arguments_without_script(arguments: Sequence[str]) -> InvalidInput:
    """Returns the error for arguments that no script could take."""
    return InvalidInput(
        f"only a script takes arguments such as {arguments[0]!r}, and no script is named",
        hint="name it: autotune search --script train.py -- config.py --device=cpu",
    )


def with_model_config(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `settings` with a path or hub name in `model` resolved to a config and its name.

    Other settings, and a model that is already resolved, stay as they are. A script sets the model
    to "script", and has no arguments unless they are given. Raises InvalidInput for a model that
    does not exist or cannot be used.
    """
    arguments = settings.get("script_arguments") or ()
    if settings.get("script") is not None:
        check_script(settings)
        return {**settings, "model": SCRIPT, "script_arguments": tuple(arguments)}
    if arguments:
        raise arguments_without_script(arguments)
    model = settings.get("model")
    if not isinstance(model, str) or model in MODEL_NAMES:
        return dict(settings)
    if settings.get("model_config") is not None:
        return dict(settings)
    if is_function_reference(model):
        check_function(model, settings)
        return dict(settings)
    exists = path_exists(model)
    if not exists and not is_hub_name(model):
        raise no_model(model)
    if model.endswith(".py"):
        raise InvalidInput(
            f"{model} does not say which function makes the model", hint=f"write {model}:function"
        )
    needs_weights = bool(settings.get("pretrained"))
    if exists:
        content = _completed(read_model_config(model))
    else:
        content = _completed(hub_model_config(model, needs_weights=needs_weights))
    resolved = {**settings, "model": model_name(content), "model_config": content}
    source = source_of(model)
    if settings.get("tokenizer") == "model":
        resolved["tokenizer"] = source
    if settings.get("pretrained"):
        if exists:
            if not weight_files(Path(source)):
                raise no_weights(source)
            check_weight_files(Path(source))
        resolved["model_source"] = source
    return resolved


def _completed(content: dict[str, Any]) -> dict[str, Any]:
    """Returns the config with its number of layers and its vocabulary, if it leaves them out.

    transformers adds them from its class, which takes seconds. Raises InvalidInput if that is not
    the class of a causal language model, or transformers is not installed.
    """
    sizes = known_sizes(content)
    if sizes["layers"] is not None and sizes["vocab_size"] is not None:
        return content
    process = subprocess.run(
        _ASK_ITS_CLASS,
        input=json.dumps(content),
        capture_output=True,
        text=True,
        env=python_environment(),
        check=False,
    )
    try:
        answer = json.loads(process.stdout)
    except ValueError:
        lines = process.stderr.strip().splitlines() or ["no reason given"]
        answer = {
            "message": f"the sizes that {FILE_NAME} leaves out cannot be read: {lines[-1]}",
            "hint": "give num_hidden_layers and vocab_size, next to model_type",
        }
    if "message" in answer:
        raise InvalidInput(answer["message"], hint=answer["hint"])
    completed: dict[str, Any] = answer["content"]
    return completed
