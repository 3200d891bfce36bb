"""The config classes of Hugging Face transformers: whether one is of a language model, its sizes.

Run as a program, it reads a config.json from standard input and writes it, with the sizes that its
class has by default, to standard output. The process of a search uses that, because importing
transformers also imports torch.
"""

import json
import sys
from collections.abc import Mapping
from copy import deepcopy
from typing import Any

from autotune.errors import InvalidInput
from autotune.spec.model_file import FILE_NAME, TEXT_PART, with_defaults

_WAY_OUT = (
    "use the config.json of a decoder that predicts the next token, such as llama, or search with "
    "a training script of your own: --script train.py"
)
_ENCODER_DECODER = "an encoder-decoder, which is no causal language model"


def make_config(content: Mapping[str, Any]) -> Any:
    """Returns the config object of transformers for the content of a config.json.

    Raises InvalidInput for a model type that the installed transformers does not have, and for one
    that is not a causal language model. Raises what the class raises for settings that it rejects.
    """
    # An extra, and seconds to import: `main` says what is missing where it is not installed.
    import transformers  # noqa: PLC0415

    settings = deepcopy(dict(content))  # classes change the tables in it
    model_type = settings.pop("model_type")
    settings.pop("auto_map", None)  # refers to code outside transformers, which is not run
    settings.pop("quantization_config", None)  # `base_weights` decides how weights are stored
    settings.pop("transformers_weights", None)  # names another file than those that are checked
    if model_type not in transformers.CONFIG_MAPPING:
        raise InvalidInput(
            f"transformers {transformers.__version__} has no model type {model_type!r}",
            hint="install a newer transformers, or use another model",
        )
    config_class = transformers.CONFIG_MAPPING[model_type]
    if config_class not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        raise _no_language_model(config_class, content)
    config = config_class.from_dict(settings)
    if _is_encoder_decoder(config, model_type):
        raise InvalidInput(f"{_described(content)}, {_ENCODER_DECODER}", hint=_WAY_OUT)
    return config


def _is_encoder_decoder(config: Any, model_type: str) -> bool:
    """Returns whether a config is of an encoder with its decoder, and not of a decoder alone.

    The language model of such a family is its decoder without the encoder. A file of that names its
    class as the architecture, or says that it has no encoder.
    """
    from transformers.models.auto.modeling_auto import (  # noqa: PLC0415
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    )

    if not (config.is_encoder_decoder or type(config).is_encoder_decoder):
        return False
    if not config.architectures:
        return bool(config.is_encoder_decoder)
    decoders = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]  # a name, or several
    if isinstance(decoders, str):
        decoders = (decoders,)
    return any(architecture not in decoders for architecture in config.architectures)


def _no_language_model(config_class: Any, content: Mapping[str, Any]) -> InvalidInput:
    """Returns the error for a model of another kind, with the kind."""
    from transformers import (  # noqa: PLC0415
        CONFIG_MAPPING,
        MODEL_FOR_CAUSAL_LM_MAPPING,
        MODEL_FOR_MASKED_LM_MAPPING,
    )

    described = _described(content)
    part = content.get(TEXT_PART)
    text_type = part.get("model_type") if isinstance(part, Mapping) else None
    if text_type in CONFIG_MAPPING and CONFIG_MAPPING[text_type] in MODEL_FOR_CAUSAL_LM_MAPPING:
        return InvalidInput(
            f"{described}, which is no language model, but has one of type {text_type} as its "
            "text part",
            hint=f"save its {TEXT_PART} as a {FILE_NAME} of its own, and name that with --model",
        )
    if config_class.is_encoder_decoder:
        kind = _ENCODER_DECODER
    elif config_class in MODEL_FOR_MASKED_LM_MAPPING:
        kind = "an encoder, which is no causal language model"
    else:
        kind = "which is no language model"
    return InvalidInput(f"{described}, {kind}", hint=_WAY_OUT)


def _described(content: Mapping[str, Any]) -> str:
    return f"{FILE_NAME} is of a {content['model_type']} model"


def complete(content: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the content with the sizes that the class has by default.

    Raises as `make_config`.
    """
    return with_defaults(content, make_config(content).to_dict())


def describe_error(error: Exception) -> str:
    """Returns the first sentence of an error of transformers, or its class."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    if lines[0].endswith(":") and len(lines) > 1:
        lines[0] += f" {lines[1]}"  # which of the checks of a config class failed, and why
    return lines[0].partition(". ")[0]


def main() -> None:
    """Complete the config.json on standard input; the answer is JSON on standard output."""
    content = json.load(sys.stdin)
    answer: dict[str, Any]
    try:
        answer = {"content": complete(content)}
    except InvalidInput as error:
        answer = {"message": error.message, "hint": error.hint}
    except ImportError as error:
        answer = {
            "message": f"a {content['model_type']} model needs the transformers library: {error}",
            "hint": 'pip install "autotune[huggingface]"',
        }
    except Exception as error:  # each config class checks its settings in its own way
        answer = {
            "message": f"transformers rejects the {FILE_NAME}: {describe_error(error)}",
            "hint": f"change the {FILE_NAME}, or use another model",
        }
    json.dump(answer, sys.stdout)


if __name__ == "__main__":
    main()
