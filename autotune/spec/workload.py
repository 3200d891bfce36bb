"""What is trained: model, text, sequence length, global batch, steps, seed, learning rates and schedule.

Two trials are comparable only when their workload is equal to the last field, the hash of the text
included.
"""

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from autotune.errors import InvalidInput
from autotune.spec.config import Circumstances
from autotune.spec.model_choice import HOW_TO_NAME, MODEL_NAMES, no_model, with_model_config
from autotune.spec.model_file import FILE_NAME, largest_sequence_length, model_name, sizes_of
from autotune.spec.user_code import SCRIPT, is_function_reference, read_reference
from autotune.spec.workload_settings import Packing, Schedule, check_setting, overridden

STANDARD_LIBRARY_TEXT = "python-docs"
"""Name of the default text: the documentation of the Python standard library found on every
machine."""

BYTE_VOCABULARY = 256
SMALLEST_BPE_VOCABULARY = BYTE_VOCABULARY + 2
"""Every byte, the end of a text, and padding."""
DEFAULT_BPE_VOCABULARY = 8000
MEMORY_STEPS = 2
"""Steady-state steps whose memory is measured; they are not timed."""

MINIMUM_TIMED_STEPS = 3
SHORT_TIMED_STEPS = 10
"""Steps timed where nothing but memory and speed is wanted of a training."""

DEFAULT_LEARNING_RATES: Mapping[str, float] = {
    "adamw": 2e-3,
    "adafactor": 3e-2,
    "sgd": 0.1,
    "adafactor-fixed-rate": 2e-4,
}
"""AdamW: the usual rate of a GPT of a few million parameters. Adafactor: three times
torch.optim.Adafactor's default, relative to the size of each weight. SGD: the usual rate with
momentum 0.9. Adafactor of fixed rate: that of the model it is known from
(`autotune/models/deep_one.py`)."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Everything that decides which numbers a training computes, apart from its `TrainingConfig`.

    Raises InvalidInput for sizes that do not fit together.
    """

    model: str = "gpt"
    """A built-in model, the name that `model_file.py` gives to a config.json, or
    `file.py:function`."""
    model_config: Mapping[str, Any] | None = None
    """The whole content of the config.json, so that a study goes on whatever becomes of the file;
    else None."""
    model_sha256: str = ""
    """SHA-256 of a model's Python file or trained weights, filled when the study is made; empty
    without either."""
    pretrained: bool = False
    """Whether training goes on from the weights in `model_source`; else they are drawn from the
    seed."""
    model_source: str | None = None
    """Folder or hub name of pretrained weights; else None."""
    script: str | None = None
    """A training script of the user's own that is run in the place of a model; `model` is then
    "script"."""
    layers: int
    width: int
    heads: int
    feed_forward_width: int | None = None
    """Inner size of the feed-forward parts; None: the model's own choice for its width."""
    vocab_size: int = BYTE_VOCABULARY

    dataset: str = STANDARD_LIBRARY_TEXT
    """`python-docs`, a local text, jsonl, csv or parquet file, a folder (also of `save_to_disk`),
    or a hub name."""
    dataset_config: str | None = None
    dataset_split: str = "train"
    held_out_split: str | None = None
    """The split the perplexity is measured on; None: a tenth of the text, by hash."""
    streaming: bool = False
    """Whether no more is read than the steps and the held-out set can use."""
    text_column: str | None = None
    text_sha256: str = ""
    """SHA-256 of the prepared tokens, training and held-out part; empty until the text has been
    read."""
    tokenizer: str = "bytes"
    """`bytes`, `bpe` (trained on the training part), a tokenizer.json, a folder with one, or a hub
    name."""
    packing: Packing = "packed"
    """packed: sequences cut from one stream. padded: a sequence is the beginning of one document.
    """

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
    learning_rates: Mapping[str, float] = dataclasses.field(
        default_factory=lambda: dict(DEFAULT_LEARNING_RATES)
    )
    schedule: Schedule = "constant"
    learning_rate_warmup_steps: int = 10
    """Steps over which the learning rate rises linearly from a fraction of itself to its full
    value."""
    gradient_clipping: float | None = None
    """Largest norm of all gradients of a global batch together; larger ones are scaled down to it.
    None: no limit."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            check_setting(field.name, getattr(self, field.name))
        # 1 and 1.0 are one learning rate and must have one fingerprint.
        rates = {optimizer: float(rate) for optimizer, rate in self.learning_rates.items()}
        object.__setattr__(self, "learning_rates", rates)
        object.__setattr__(
            self, "gradient_clipping", self.gradient_clipping and float(self.gradient_clipping)
        )
        self._check_steps()
        if (self.script is not None) != (self.model == SCRIPT):
            raise no_model(self.model)
        if self.script is not None:
            return  # it has its own
        if self.model_config is not None:
            self._check_model_config(self.model_config)
        elif not is_function_reference(self.model):
            self._check_built_in()
        self._check_pretrained()
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
        if self.tokenizer == "model":
            raise InvalidInput(
                "tokenizer = 'model' needs a model with files", hint="name its folder with --model"
            )
        least = {"bytes": BYTE_VOCABULARY, "bpe": SMALLEST_BPE_VOCABULARY}.get(self.tokenizer, 1)
        if self.vocab_size < least:
            way = "--vocab-size" if self.model_config is None else "a model with a vocabulary of"
            raise InvalidInput(
                f"vocab_size = {self.vocab_size} is smaller than the {least} byte-level tokens",
                hint=f"use {way} {least} or more",
            )

    def _check_built_in(self) -> None:
        if self.model not in MODEL_NAMES:
            raise no_model(self.model)
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

    def _check_pretrained(self) -> None:
        if self.pretrained and (self.model_config is None or self.model_source is None):
            raise InvalidInput(
                f"there are no pretrained weights of model {self.model!r}",
                hint="name a Hugging Face model by folder or hub name together with --pretrained",
            )
        if self.pretrained and self.layers != (said := sizes_of(self.model_config or {})["layers"]):
            raise InvalidInput(
                f"layers = {self.layers} contradicts the pretrained weights, which are of {said}",
                hint="leave --layers or --pretrained out",
            )

    def _check_model_config(self, content: Mapping[str, Any]) -> None:
        if self.model != model_name(content):
            raise InvalidInput(
                f"model {self.model!r} and model_config do not belong together", hint=HOW_TO_NAME
            )
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
    def model_name(self) -> str:
        """The model in a few letters that can be part of a file's name."""
        model = f"{self.script}:{SCRIPT}" if self.script is not None else self.model
        return read_reference(model).short_name if is_function_reference(model) else model

    def describe(self) -> str:
        """Model and global batch in a few words."""
        if self.script is not None:
            return f"{self.describe_model()}, {self.global_batch} sequences a step"
        return (
            f"{self.describe_model()}, {self.global_batch} x {self.sequence_length} tokens a step"
        )

    def describe_model(self) -> str:
        """The model in a few words; its sizes only where they are known to be those of the settings."""
        if self.script is not None:
            return f"script {self.script}"
        if is_function_reference(self.model):
            return self.model
        return f"{self.model} of {self.layers} layers, width {self.width}" + (
            ", pretrained" if self.pretrained else ""
        )

    @property
    def circumstances(self) -> Circumstances:
        """What decides which configurations can train it."""
        return Circumstances(
            global_batch=self.global_batch,
            clips_gradients=self.gradient_clipping is not None,
            sequence_length=self.sequence_length if self.script is None else None,
        )

    def learning_rate_of(self, optimizer: str) -> float:
        """AdamW in 8 bits has AdamW's rate unless one of its own is said; older studies know fewer optimizers."""
        plain = optimizer.removesuffix("-8bit")
        return (
            self.learning_rates.get(optimizer)
            or self.learning_rates.get(plain)
            or DEFAULT_LEARNING_RATES[plain]
        )

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
        return {k: v for k, v in self.to_dict().items() if k not in _YOUNGER or v != _YOUNGER[k]}


_YOUNGER: Mapping[str, Any] = {
    "gradient_clipping": None,
    "held_out_split": None,
    "packing": "packed",
    "streaming": False,
    "model_sha256": "",
    "pretrained": False,
    "model_source": None,
    "script": None,
}
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

    A config.json brings its sizes. Raises InvalidInput for unknown or impossible settings.
    """
    merged: dict[str, Any] = dict(DEFAULTS_BY_DEVICE[device_type])
    merged["learning_rates"] = dict(merged.get("learning_rates", DEFAULT_LEARNING_RATES))
    known = {field.name for field in dataclasses.fields(Workload)}
    for setting in map(with_model_config, settings):
        if setting.get("model") is not None:
            content = setting.get("model_config")
            merged.update(
                {"model_config": content}, **({} if content is None else sizes_of(content))
            )
        for name, value in setting.items():
            if name not in known:
                raise InvalidInput(
                    f"there is no workload setting {name!r}",
                    hint=f"known are {', '.join(sorted(known))}",
                )
            if value is not None:
                check_setting(name, value)
        merged = overridden(
            merged, {name: value for name, value in setting.items() if value is not None}
        )
    if merged.get("tokenizer") == "bpe":
        merged.setdefault("vocab_size", DEFAULT_BPE_VOCABULARY)
    return Workload(**merged)
