"""Declares what the exporter writes into `train.py` for one configuration: constants, functions.

`autotune/exporters/pytorch` writes them, or chooses the module beside this file that defines them.
The modules import them from here, so that a type checker knows them; a script has definitions in
place of these imports. This module is never imported.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from autotune.shipped.ranks import Rank
from autotune.shipped.replication import GradientBuckets

# -- settings --------------------------------------------------------------------------------------

DEVICE: str
SEQUENCE_LENGTH: int
GLOBAL_BATCH: int
MICRO_BATCH: int
STEPS: int
EVALUATION_SEQUENCES: int
LEARNING_RATE: float
LEARNING_RATE_WARMUP_STEPS: int
SCHEDULE: str
GRADIENT_CLIPPING: float | None
SEED: int
WEIGHTS_DTYPE: torch.dtype
IS_COMPILED: bool
QUANTIZATION: Any
GRADIENTS_ADDED_UP_IN: str
PEAK_MEMORY_BYTES_BY_RANK: tuple[int, ...]
PROMISE: dict[str, Any]
COMMAND: str

# -- model -----------------------------------------------------------------------------------------

MODEL: str
FUNCTION: str
SIZES: dict[str, int]
MODEL_CONFIG_FILE: str
PRETRAINED: str | None


def make_model() -> nn.Module: ...


# -- techniques ------------------------------------------------------------------------------------


def prepare(model: nn.Module) -> None: ...
def apply_techniques(model: Any) -> None: ...
def share_out(model: nn.Module, blocks: list[nn.Module]) -> None: ...
def forward(model: Any, tokens: Tensor, labels: Tensor) -> Tensor: ...
def make_optimizer(parameters: list[nn.Parameter], model: nn.Module) -> Optimizer: ...


class Updater:
    optimizer: Optimizer

    def __init__(self, parameters: list[nn.Parameter], model: nn.Module) -> None: ...
    def set_learning_rate(self, learning_rate: float) -> None: ...
    def scale(self, loss: Tensor) -> Tensor: ...
    def step(self) -> None: ...


# -- training --------------------------------------------------------------------------------------


class Training:
    rank: Rank
    model: Any
    module: Any
    buckets: GradientBuckets
    parameters: dict[str, Any]
    updater: Updater

    def __init__(self, rank: Rank = ...) -> None: ...
    def eval(self) -> None: ...


def train_step(training: Training, batch: tuple[Tensor, Tensor], *, rate: float) -> float: ...
def resident_tensors(training: Training) -> list[Tensor]: ...
def save(training: Training, file: str) -> None: ...


# -- text ------------------------------------------------------------------------------------------

TEXT: str
DATASET_CONFIG: str | None
DATASET_SPLIT: str
HELD_OUT_SPLIT: str | None
TEXT_COLUMN: str | None
CHAT_COLUMN: str
PROMPT_FORMAT: dict[str, Any]
LEARNED: str
STREAMING: bool
TOKENIZER: str
VOCABULARY: int


def read_documents(name: str, *, split: str) -> Iterable[Any]: ...
def texts_of_rows(rows: Any) -> Iterator[Any]: ...
def messages_in(row: Any) -> list[dict[str, Any]]: ...
def cut(documents: Iterable[Any]) -> Iterator[Any]: ...
def units_of(name: str, is_full: Callable[[bool], bool]) -> Iterator[tuple[bool, Any]]: ...
def make_tokenizer(text: str) -> Any: ...
def tokens_of(text: str) -> tuple[list[Any], int]: ...
def sequences_of(rest: Any, conversation: Any) -> tuple[list[Any], Any]: ...


class Sequences:
    def __init__(self, tokens: Any, pad_token: int) -> None: ...
    def __len__(self) -> int: ...
    def batch(self, indices: Any) -> tuple[Tensor, Tensor]: ...
    def tokens_per_sequence(self) -> float: ...
