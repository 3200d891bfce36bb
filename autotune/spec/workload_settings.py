"""Which values a single setting of a workload can have, and which says it when several do.

Whether settings fit together, a `Workload` checks.
"""

from collections.abc import Mapping
from typing import Any, Literal, get_args

from autotune.errors import InvalidInput
from autotune.spec.config import CHOICES
from autotune.spec.model_choice import HOW_TO_NAME
from autotune.units import is_positive_number

Schedule = Literal["constant", "cosine"]
Packing = Literal["packed", "padded"]


OPTION_NAMES: Mapping[str, str] = {
    "sequence_length": "seq-len",
    "evaluation_sequences": "eval-sequences",
    "learning_rates": "learning-rate",
    "learning_rate_warmup_steps": "lr-warmup-steps",
}
"""Where the command line says it shorter than `Workload`."""

_TEXTS = ("model", "model_sha256", "dataset", "dataset_split", "text_sha256", "tokenizer")
_TEXTS_OR_NONE = ("model_source", "script", "dataset_config", "text_column", "held_out_split")
_MOST = {"layers": 100_000, "heads": 100_000}
_MOST_OF_ANYTHING = 2**31 - 1
"""More of it than any training has, and still few enough to be counted, multiplied and kept in a
database."""
_CHOICES = {
    "schedule": get_args(Schedule),
    "packing": get_args(Packing),
    "streaming": (False, True),
}


def check_setting(name: str, value: object) -> None:
    """Raises InvalidInput, naming setting, value and what is allowed, unless `value` is one `name` can have.

    Whether settings fit together, a `Workload` checks.
    """
    if name in _TEXTS or name in _TEXTS_OR_NONE:
        if not isinstance(value, str) and not (value is None and name in _TEXTS_OR_NONE):
            raise InvalidInput(f"{name} = {value!r} is not possible", hint="use a text")
    elif name == "model_config":
        if value is not None and not isinstance(value, Mapping):
            raise InvalidInput(f"model_config = {value!r} is not possible", hint=HOW_TO_NAME)
    elif name == "pretrained":
        if not isinstance(value, bool):
            raise InvalidInput(f"pretrained = {value!r} is not possible", hint="use true or false")
    elif name == "seed":
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**32:
            raise InvalidInput(
                f"seed = {value!r} is not possible", hint="use a whole number from 0 to 4294967295"
            )
    elif name in _CHOICES:
        choices = _CHOICES[name]
        if type(value) is not type(choices[0]) or value not in choices:  # 1 is no True
            raise InvalidInput(
                f"{name} = {value!r} is not known",
                hint=f"use one of {', '.join(map(str, choices))}",
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
    most = _MOST.get(name, _MOST_OF_ANYTHING)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        is_too_large = isinstance(value, int) and value > most
        hint = (
            f"use a whole number from 1 to {most}"
            if is_too_large
            else "use a whole number from 1 up"
        )
        raise InvalidInput(f"{name} = {value!r} is not possible", hint=hint)


def _check_learning_rates(rates: object) -> None:
    if not isinstance(rates, Mapping):
        raise InvalidInput(
            f"learning_rates = {rates!r} is not a table",
            hint="write one rate an optimizer: adamw=3e-4",
        )
    for optimizer, rate in rates.items():
        if optimizer not in CHOICES["optimizer"]:
            raise InvalidInput(
                f"there is no optimizer {optimizer!r} to set a learning rate for",
                hint=f"the optimizers are {', '.join(CHOICES['optimizer'])}",
            )
        if not is_positive_number(rate):
            raise InvalidInput(
                f"learning rate {rate!r} of {optimizer} is not possible",
                hint="use a number above zero",
            )


def option_of(name: str) -> str:
    """What the command line calls a setting: `--seq-len`."""
    return f"--{OPTION_NAMES.get(name, name.replace('_', '-'))}"


OF_ONE_DATASET = ("dataset_config", "dataset_split", "held_out_split", "text_column")
"""Settings that say nothing of another dataset."""


def overridden(before: Mapping[str, Any], by: Mapping[str, Any]) -> dict[str, Any]:
    """Settings `before` with those of `by` in their place.

    `learning_rates` are merged optimizer by optimizer; another dataset takes the splits and columns
    of the one that was named before with it.
    """
    kept = dict(before)
    named = before.get("dataset")
    if named is not None and by.get("dataset") not in (None, named):
        for name in OF_ONE_DATASET:
            kept.pop(name, None)
    rates = [settings.get("learning_rates") for settings in (before, by)]
    both = [one for one in rates if isinstance(one, Mapping)]
    return {**kept, **by, **({"learning_rates": {**both[0], **both[1]}} if len(both) == 2 else {})}
