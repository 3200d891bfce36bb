"""What is trained: model, text, sequence length, global batch, steps, seed, learning rates and schedule.

Two trials are comparable only when their workload is equal to the last field, the hash of the text included.
"""

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from autotune.config import CHOICES
from autotune.errors import InvalidInput
from autotune.model_file import FILE_NAME, largest_sequence_length, model_name, read_model_config, sizes_of

Schedule = Literal["constant", "cosine"]

STANDARD_LIBRARY_TEXT = "python-docs"
"""Name of the default text: the documentation of the Python standard library found on every machine."""

MODEL_NAMES = ("gpt", "deep-one")
"""Keys of the model registry, which only a trial's own process can import."""

BYTE_VOCABULARY = 256
MEMORY_STEPS = 2
"""Steady-state steps whose memory is measured; they are not timed."""

MINIMUM_TIMED_STEPS = 3

DEFAULT_LEARNING_RATES: Mapping[str, float] = {
    "adamw": 2e-3,
    "adafactor": 3e-2,
    "sgd": 0.1,
    "adafactor-fixed-rate": 2e-4,
}
"""AdamW: the usual rate of a GPT of a few million parameters. Adafactor: three times torch.optim.Adafactor's default,
relative to the size of each weight. SGD: the usual rate with momentum 0.9. Adafactor of fixed
rate: that of the model it is known from (`autotune/models/deep_one.py`)."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Everything that decides which numbers a training computes, apart from its `TrainingConfig`.

    Raises InvalidInput for sizes that do not fit together.
    """

    model: str = "gpt"
    """A built-in model, or the name that `model_file.py` gives to a config.json."""
    model_config: Mapping[str, Any] | None = None
    """The whole content of the config.json, so that a study goes on whatever becomes of the file; else None."""
    layers: int
    width: int
    heads: int
    feed_forward_width: int | None = None
    """Inner size of the feed-forward parts; None: the model's own choice for its width."""
    vocab_size: int = BYTE_VOCABULARY

    dataset: str = STANDARD_LIBRARY_TEXT
    """`python-docs`, a local text, jsonl, csv or parquet file, a folder of them, or a Hugging Face hub name."""
    dataset_config: str | None = None
    dataset_split: str = "train"
    text_column: str | None = None
    text_sha256: str = ""
    """SHA-256 of the prepared token stream, training and held-out part; empty until the text has been read."""
    tokenizer: str = "bytes"

    sequence_length: int
    """Tokens in one sequence."""
    global_batch: int
    """Sequences per optimizer step, whatever the micro batch."""
    steps: int
    """Optimizer steps of one trial; the perplexity is that after the last."""
    warmup_steps: int = 4
    """First steps, neither timed nor measured: compilation and optimizer state happen here."""
    evaluation_sequences: int
    """Sequences of the fixed held-out set."""

    seed: int = 0
    """Decides initial weights and data order."""
    learning_rates: Mapping[str, float] = dataclasses.field(default_factory=lambda: dict(DEFAULT_LEARNING_RATES))
    schedule: Schedule = "constant"
    learning_rate_warmup_steps: int = 10
    """Steps over which the learning rate rises linearly from a fraction of itself to its full value."""
    gradient_clipping: float | None = None
    """Largest norm of all gradients of a global batch together; larger ones are scaled down to it. None: no limit."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            check_setting(field.name, getattr(self, field.name))
        # 1 and 1.0 are one learning rate and must have one fingerprint.
        rates = {optimizer: float(rate) for optimizer, rate in self.learning_rates.items()}
        object.__setattr__(self, "learning_rates", rates)
        object.__setattr__(self, "gradient_clipping", self.gradient_clipping and float(self.gradient_clipping))
        self._check_steps()
        if self.model_config is None:
            self._check_built_in()
        else:
            self._check_model_config(self.model_config)
        self._check_vocabulary()

    def _check_steps(self) -> None:
        least = self.warmup_steps + MEMORY_STEPS + MINIMUM_TIMED_STEPS
        if self.steps < least:
            raise InvalidInput(
                f"steps = {self.steps} leaves nothing to time after {self.warmup_steps} warm-up and "
                f"{MEMORY_STEPS} memory steps",
                hint=f"use at least {least} steps, or fewer warm-up steps",
            )

    def _check_vocabulary(self) -> None:
        if self.tokenizer == "bytes" and self.vocab_size < BYTE_VOCABULARY:
            way = "--vocab-size" if self.model_config is None else "a model with a vocabulary of"
            raise InvalidInput(
                f"vocab_size = {self.vocab_size} is smaller than the {BYTE_VOCABULARY} byte-level tokens",
                hint=f"use {way} {BYTE_VOCABULARY} or more",
            )

    def _check_built_in(self) -> None:
        if self.model not in MODEL_NAMES:
            raise _no_model(self.model)
        if self.width % self.heads:
            raise InvalidInput(
                f"width {self.width} cannot be split into {self.heads} heads of one size",
                hint="choose a width that is a multiple of the number of heads",
            )
        if self.model == "gpt" and (self.width // self.heads) % 2:  # its positions rotate pairs
            raise InvalidInput(
                f"width {self.width} cannot be split into {self.heads} heads of an even size",
                hint="choose a width that is a multiple of twice the number of heads",
            )

    def _check_model_config(self, content: Mapping[str, Any]) -> None:
        if self.model != model_name(content):
            raise InvalidInput(f"model {self.model!r} and model_config do not belong together", hint=_HOW_TO_NAME)
        fixed = {**sizes_of(content), "layers": self.layers, "feed_forward_width": None}
        for field, said in fixed.items():
            if getattr(self, field) != said:
                raise InvalidInput(
                    f"{field} = {getattr(self, field)} contradicts the model's {FILE_NAME}"
                    + (f", which says {said}" if said else ", which decides it"),
                    hint=f"leave --{field.replace('_', '-')} out; only --layers can be changed",
                )
        positions = largest_sequence_length(content)
        if positions is not None and self.sequence_length > positions:
            raise InvalidInput(
                f"sequence_length = {self.sequence_length} is more than the {positions} positions of the model",
                hint=f"use --seq-len {positions} or less",
            )

    @property
    def clips_gradients(self) -> bool:
        return self.gradient_clipping is not None

    def learning_rate_of(self, optimizer: str) -> float:
        """AdamW in 8 bits has AdamW's rate unless one of its own is said."""
        return self.learning_rates.get(optimizer) or self.learning_rates[optimizer.removesuffix("-8bit")]

    @property
    def tokens_per_step(self) -> int:
        return self.global_batch * self.sequence_length

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @property
    def fingerprint(self) -> str:
        """Twelve hexadecimal digits that are equal exactly for equal workloads."""
        return hashlib.sha256(json.dumps(self.identity(), sort_keys=True).encode()).hexdigest()[:12]

    def identity(self) -> dict[str, Any]:
        """`to_dict` without settings younger than the first studies and not in use: those keep their names."""
        return {k: v for k, v in self.to_dict().items() if k != "gradient_clipping" or v is not None}


_TEXTS = ("model", "dataset", "dataset_split", "text_sha256", "tokenizer")
_TEXTS_OR_NONE = ("dataset_config", "text_column")


def check_setting(name: str, value: object) -> None:
    """Raises InvalidInput, naming setting, value and what is allowed, unless `value` is one `name` can have.

    Whether settings fit together, a `Workload` checks.
    """
    if name in _TEXTS or name in _TEXTS_OR_NONE:
        if not isinstance(value, str) and not (value is None and name in _TEXTS_OR_NONE):
            raise InvalidInput(f"{name} = {value!r} is not possible", hint="use a text")
    elif name == "model_config":
        if value is not None and not isinstance(value, Mapping):
            raise InvalidInput(f"model_config = {value!r} is not possible", hint=_HOW_TO_NAME)
    elif name == "seed":
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**32:
            raise InvalidInput(f"seed = {value!r} is not possible", hint="use a whole number from 0 to 4294967295")
    elif name == "schedule":
        if not isinstance(value, str) or value not in get_args(Schedule):
            raise InvalidInput(f"schedule = {value!r} is not known", hint=f"use one of {', '.join(get_args(Schedule))}")
    elif name == "learning_rates":
        _check_learning_rates(value)
    elif value is None and name in ("feed_forward_width", "gradient_clipping"):
        return
    elif name == "gradient_clipping":
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
            raise InvalidInput(f"gradient_clipping = {value!r} is not possible", hint="use a norm above zero")
    elif isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InvalidInput(f"{name} = {value!r} is not possible", hint="use a whole number from 1 up")


def _check_learning_rates(rates: object) -> None:
    if not isinstance(rates, Mapping):
        raise InvalidInput(f"learning_rates = {rates!r} is not a table", hint="write one rate an optimizer: adamw=3e-4")
    for optimizer, rate in rates.items():
        if optimizer not in CHOICES["optimizer"]:
            raise InvalidInput(
                f"there is no optimizer {optimizer!r} to set a learning rate for",
                hint=f"the optimizers are {', '.join(CHOICES['optimizer'])}",
            )
        if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 < rate < float("inf"):
            raise InvalidInput(f"learning rate {rate!r} of {optimizer} is not possible", hint="use a number above zero")


_HOW_TO_NAME = f"the models are {', '.join(MODEL_NAMES)}, a Hugging Face {FILE_NAME}, or a folder with one"


def _no_model(name: str) -> InvalidInput:
    return InvalidInput(f"there is no model {name!r}", hint=_HOW_TO_NAME)


def with_model_config(settings: Mapping[str, Any]) -> dict[str, Any]:
    """`settings` with a path as `model` replaced by the file's content and the name it gives the model.

    What is already replaced, and settings without a path, stay as they are. Raises InvalidInput.
    """
    model = settings.get("model")
    if not isinstance(model, str) or model in MODEL_NAMES or settings.get("model_config") is not None:
        return dict(settings)
    try:
        exists = bool(model) and Path(model).expanduser().exists()
    except (OSError, ValueError, RuntimeError):  # too long, a zero byte, nobody's home
        exists = False
    if not exists:
        raise _no_model(model)
    content = read_model_config(model)
    return {**settings, "model": model_name(content), "model_config": content}


DEFAULTS_BY_DEVICE: Mapping[str, Mapping[str, Any]] = {
    # 1.3 M parameters: a trial of seconds.
    "cpu": {
        "layers": 6,
        "width": 128,
        "heads": 4,
        "sequence_length": 128,
        "global_batch": 8,
        "steps": 40,
        "evaluation_sequences": 64,
    },
    # 114 M parameters and sequences of 1,024: memory and speed mean something on a GPU.
    "cuda": {
        "layers": 16,
        "width": 768,
        "heads": 12,
        "sequence_length": 1024,
        "global_batch": 16,
        "steps": 60,
        "evaluation_sequences": 64,
        "learning_rates": {**DEFAULT_LEARNING_RATES, "adamw": 6e-4},
    },
}
"""What a workload is where neither the command line nor the search space says otherwise."""


def make_workload(device_type: str, *settings: Mapping[str, Any]) -> Workload:
    """The device's defaults overridden by each of `settings` in turn; None values override nothing.

    `learning_rates` are merged optimizer by optimizer; a config.json brings its sizes. Raises InvalidInput for unknown
    or impossible settings.
    """
    merged: dict[str, Any] = dict(DEFAULTS_BY_DEVICE[device_type])
    merged["learning_rates"] = dict(merged.get("learning_rates", DEFAULT_LEARNING_RATES))
    known = {field.name for field in dataclasses.fields(Workload)}
    for setting in map(with_model_config, settings):
        if setting.get("model") is not None:
            content = setting.get("model_config")
            merged.update({"model_config": content}, **({} if content is None else sizes_of(content)))
        for name, value in setting.items():
            if name not in known:
                raise InvalidInput(
                    f"there is no workload setting {name!r}", hint=f"known are {', '.join(sorted(known))}"
                )
            if value is None:
                continue
            check_setting(name, value)
            merged[name] = {**merged[name], **value} if name == "learning_rates" else value
    return Workload(**merged)
