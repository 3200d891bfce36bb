"""Check single settings of a workload, and merge settings from several sources.

`Workload` checks whether settings fit together.
"""

from collections.abc import Mapping
from typing import Any, Literal, get_args

from autotune.errors import InvalidInput, suggestion
from autotune.spec.config import CHOICES
from autotune.spec.learning_rates import LEARNING_RATE_NAMES
from autotune.spec.model_choice import HOW_TO_NAME
from autotune.spec.user_code import check_script_arguments
from autotune.units import is_positive_number

Schedule = Literal["constant", "cosine"]
Packing = Literal["packed", "padded"]

_TEXTS = ("model", "model_sha256", "dataset", "dataset_split", "text_sha256", "tokenizer")
_TEXTS_OR_NONE = (
    "model_source",
    "script",
    "dataset_config",
    "text_column",
    "chat_column",
    "held_out_split",
)
_MAXIMUM = {
    "layers": 1_000,
    "width": 2**20,
    "heads": 100_000,
    "feed_forward_width": 2**22,
    "vocab_size": 2**24,
    "sequence_length": 2**27,
    "global_batch": 2**20,
    "devices_per_trial": 4096,
}
"""Several times those of any model. Building takes milliseconds per layer, and the divisors of the
global batch are tried one by one."""
_DEFAULT_MAXIMUM = 2**31 - 1
"""Larger than in any training, and small enough to be multiplied and stored in a database."""
_CHOICES = {
    "schedule": get_args(Schedule),
    "packing": get_args(Packing),
    "streaming": (False, True),
    "own_precision": CHOICES["precision"],
    "own_fusion": CHOICES["optimizer_fusion"],
}


def check_setting(name: str, value: object) -> None:
    """Raise InvalidInput, with the allowed values, unless `value` is possible for setting `name`.

    `Workload` checks whether settings fit together.
    """
    if name in _TEXTS or name in _TEXTS_OR_NONE:
        if not isinstance(value, str) and not (value is None and name in _TEXTS_OR_NONE):
            raise InvalidInput(f"{name} = {value!r} is not possible", hint="use a string")
    elif name == "model_config":
        if value is not None and not isinstance(value, Mapping):
            raise InvalidInput(f"model_config = {value!r} is not possible", hint=HOW_TO_NAME)
    elif name == "script_arguments":
        check_script_arguments(value)
    elif name in ("script_files", "script_files_after_apply", "packages"):
        if not (value is None and name != "script_files_after_apply"):
            _check_files(name, value)
    elif name in ("pretrained", "one_rank"):
        if not isinstance(value, bool):
            raise InvalidInput(f"{name} = {value!r} is not possible", hint="use true or false")
    elif name == "seed":
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**32:
            raise InvalidInput(
                f"seed = {value!r} is not possible", hint="use a whole number from 0 to 4294967295"
            )
    elif name in _CHOICES:
        choices = _CHOICES[name]
        if type(value) is not type(choices[0]) or value not in choices:  # 1 == True
            raise InvalidInput(
                f"{name} = {value!r} is not known",
                hint=suggestion(
                    value, choices, otherwise=f"use one of {', '.join(map(str, choices))}"
                ),
            )
    elif name == "learning_rates":
        _check_learning_rates(value)
    elif value is None and name in ("feed_forward_width", "gradient_clipping"):
        return
    elif name == "gradient_clipping":
        if not is_positive_number(value):
            raise InvalidInput(
                f"gradient_clipping = {value!r} is not possible", hint="use a norm above zero"
            )
    else:
        _check_whole_number(name, value)


def _check_whole_number(name: str, value: object) -> None:
    maximum = _MAXIMUM.get(name, _DEFAULT_MAXIMUM)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= maximum:
        hint = "use a whole number from 1 up"
        if isinstance(value, int) and value > maximum:
            hint = f"use a whole number from 1 to {maximum}"
        raise InvalidInput(f"{name} = {value!r} is not possible", hint=hint)


def _check_files(name: str, files: object) -> None:
    texts = [*files, *files.values()] if isinstance(files, Mapping) else [None]
    if not all(isinstance(text, str) for text in texts):
        raise InvalidInput(f"{name} = {files!r} is not possible", hint="leave it out")


def _check_learning_rates(rates: object) -> None:
    if not isinstance(rates, Mapping):
        raise InvalidInput(
            f"learning_rates = {rates!r} is not a table",
            hint="write one rate per optimizer: adamw=3e-4",
        )
    for name, rate in rates.items():
        if name not in LEARNING_RATE_NAMES:
            raise InvalidInput(
                f"there is no optimizer {name!r} to set a learning rate for",
                hint=suggestion(
                    name,
                    LEARNING_RATE_NAMES,
                    otherwise=f"use one of {', '.join(CHOICES['optimizer'])}, or one of them after "
                    "an adapter: lora/adamw",
                ),
            )
        if not is_positive_number(rate):
            raise InvalidInput(
                f"learning rate {rate!r} of {name} is not possible",
                hint="use a number above zero",
            )


OF_ONE_DATASET = ("dataset_config", "dataset_split", "held_out_split", "text_column")
"""Settings that apply to one dataset and are dropped when another one is chosen."""


def overridden(before: Mapping[str, Any], by: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings `before`, overridden by those in `by`.

    `learning_rates` are merged per optimizer. If `by` has another dataset, the splits and columns
    of the previous one are dropped.
    """
    merged = dict(before)
    dataset = before.get("dataset")
    if dataset is not None and by.get("dataset") not in (None, dataset):
        for name in OF_ONE_DATASET:
            merged.pop(name, None)
    merged.update(by)
    rates_before = before.get("learning_rates")
    rates_by = by.get("learning_rates")
    if isinstance(rates_before, Mapping) and isinstance(rates_by, Mapping):
        merged["learning_rates"] = {**rates_before, **rates_by}
    return merged
