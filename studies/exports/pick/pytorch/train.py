"""gpt of 6 layers, width 128, 8 x 128 tokens a step, trained as in study tour, trial 39: fp32,
checkpointing block, compile model, micro-batch 4.

Measured: peak memory 31.85 MiB, 10,193 tokens/s, perplexity 21.65.

    python train.py                     # on the text of the workload
    python train.py --text my.txt       # on a text, jsonl, csv or parquet file, a folder,
                                        # or a name on the hub
    python train.py --steps 2000 --save model.pt

Written by autotune, which it does not need. The configuration is in `apply_techniques`, `Updater`,
`train_step` and the settings below.
"""

from __future__ import annotations

import argparse
import ast
import functools
import glob
import hashlib
import json
import math
import sysconfig
import time
import tokenize
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, UntypedStorage, nn
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TEXT = 'python-docs'
SEQUENCE_LENGTH = 128
VOCABULARY = 256
GLOBAL_BATCH = 8
"""Sequences of one optimizer step."""
MICRO_BATCH = 4
"""Sequences of one forward pass."""
STEPS = 30
EVALUATION_SEQUENCES = 64
LEARNING_RATE = 0.002
LEARNING_RATE_WARMUP_STEPS = 10
SCHEDULE = 'constant'
SEED = 0
IS_COMPILED = True
PEAK_MEMORY_BYTES: int | None = 33396480
"""Measured in the trial."""
TRIAL = 'study tour, trial 39, on cpu'
WEIGHTS_DTYPE = torch.float32


# -- techniques ------------------------------------------------------------------------------------


def apply_techniques(model: Any) -> None:
    """Applies the techniques inside the model, in the order in which they work together."""
    blocks = list(model.blocks)
    blocks = [Checkpointed(block) for block in blocks]
    model.blocks = nn.ModuleList(blocks)
    model.compile(dynamic=False)  # last: the graph contains all of the above


class Checkpointed(nn.Module):
    """`module` with its activations recomputed in the backward pass."""

    def __init__(self, module: nn.Module, *, context_fn: Callable[[], Any] | None = None) -> None:
        super().__init__()
        self.module = module
        self._options: dict[str, Any] = {} if context_fn is None else {"context_fn": context_fn}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(self.module, *args, use_reentrant=False, **self._options, **kwargs)

    def __getattr__(self, name: str) -> Any:
        """Looks up attributes in `module`, since models read them from their blocks."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)


def move_buffers(model: nn.Module) -> None:
    for module in model.modules():
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else buffer.to(DEVICE)


@torch.no_grad()
def move_to_device(model: nn.Module) -> None:
    """Casts parameters on the host, one by one; buffers stay in their dtype."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(WEIGHTS_DTYPE).to(DEVICE)
    move_buffers(model)


def prepare(model: nn.Module) -> None:
    move_to_device(model)


def make_optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(
        parameters,
        lr=LEARNING_RATE,
        weight_decay=0.01,
        betas=(0.9, 0.999),
        eps=1e-08,
        foreach=False,
        fused=False,
    )


GRADIENT_CLIPPING: float | None = None


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        # In torchao's optimizers it is a tensor, so that compiled code does not see a new number in
        # every step.
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


class Updater:
    """Updates all parameters once the gradients of a global batch are complete."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.parameters = parameters
        self.optimizer = make_optimizer(parameters)

    def set_learning_rate(self, learning_rate: float) -> None:
        set_learning_rate(self.optimizer, learning_rate)

    def scale(self, loss: Tensor) -> Tensor:
        return loss

    def step(self) -> None:
        if GRADIENT_CLIPPING is not None:
            nn.utils.clip_grad_norm_(self.parameters, GRADIENT_CLIPPING, foreach=False)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


# -- training --------------------------------------------------------------------------------------


def forward(model: Any, tokens: Tensor, labels: Tensor) -> Tensor:
    """Returns the summed token loss of a micro batch."""
    loss: Tensor = model(tokens, labels)
    return loss


IGNORED_LABEL = -100
"""The label that cross entropy ignores by default, in torch and in transformers."""


def summed_loss(model: Any, held_out: Sequences, start: int) -> tuple[float, int]:
    """Returns the summed loss and the number of labels of the micro batch that begins at `start`.

    The micro batch is always full; rows beyond the held-out sequences have no labels.
    """
    indices = numpy.arange(start, start + MICRO_BATCH)
    beyond = indices >= EVALUATION_SEQUENCES
    tokens, labels = held_out.batch(numpy.where(beyond, 0, indices))
    labels = labels.masked_fill(torch.from_numpy(beyond)[:, None], IGNORED_LABEL)
    loss = forward(model, tokens.contiguous().to(DEVICE), labels.contiguous().to(DEVICE))
    return loss.item(), int((labels != IGNORED_LABEL).sum())


class Training:
    """The model with its techniques, and its updater."""

    def __init__(self) -> None:
        torch.manual_seed(SEED)
        self.model: Any = make_model()
        self.model.train()
        torch.manual_seed(SEED)  # dropout is the same as with weights from a file
        prepare(self.model)
        self.parameters = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        """By their names before techniques wrap parts of the model."""
        apply_techniques(self.model)
        self.updater = Updater(list(self.parameters.values()))


def train_step(training: Training, batch: tuple[Tensor, Tensor], *, rate: float) -> float:
    """Makes one optimizer step on the global batch; returns the mean token loss before it.

    Losses are divided by the number of labels in the global batch, so that the gradients do not
    depend on the size of the micro batches.
    """
    training.updater.set_learning_rate(rate)
    valid_labels = max(1, int((batch[1] != IGNORED_LABEL).sum()))
    total = torch.zeros((), device=DEVICE)
    micro_batches = (part.to(DEVICE).split(MICRO_BATCH) for part in batch)
    for tokens, labels in zip(*micro_batches, strict=True):
        loss = forward(training.model, tokens.contiguous(), labels.contiguous()) / valid_labels
        training.updater.scale(loss).backward()
        total += loss.detach()
    training.updater.step()
    return total.item()


@torch.no_grad()
def evaluate(model: Any, held_out: Sequences) -> float:
    """Returns the mean token loss on the held-out sequences, in micro batches as in training."""
    model.eval()
    if IS_COMPILED:
        summed_loss(model, held_out, 0)  # compiles the graph without gradients
    total_loss = 0.0
    total_labels = 0
    for start in range(0, EVALUATION_SEQUENCES, MICRO_BATCH):
        loss, valid_labels = summed_loss(model, held_out, start)
        total_loss += loss
        total_labels += valid_labels
    model.train()
    return total_loss / max(1, total_labels)


def scheduled_rate(
    step: int, *, rate: float, steps: int, warmup_steps: int, schedule: str
) -> float:
    """Returns the learning rate at a step, counted from 0, of a training of `steps` steps.

    The warm-up rises to `rate` over `warmup_steps`; a cosine goes down to a tenth of it.
    """
    if step < warmup_steps:
        return rate * (step + 1) / warmup_steps
    if schedule == "constant":
        return rate
    progress = (step - warmup_steps) / max(1, steps - warmup_steps)
    return rate * (0.1 + 0.45 * (1 + math.cos(math.pi * progress)))


def learning_rate(step: int, *, steps: int) -> float:
    """Returns the rate at `step`, counted from 0, of a training of `steps` steps."""
    return scheduled_rate(
        step,
        rate=LEARNING_RATE,
        steps=steps,
        warmup_steps=LEARNING_RATE_WARMUP_STEPS,
        schedule=SCHEDULE,
    )


# -- model -----------------------------------------------------------------------------------------


TokenLoss = Callable[[Tensor, nn.Linear, Tensor], Tensor]
"""Function of hidden states [batch, sequence, width], head and labels [batch, sequence] that
returns the sum of the token losses as a float32 scalar."""


def next_token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the sum of cross entropies in float32 of [batch, sequence, vocabulary] logits."""
    return F.cross_entropy(
        logits.flatten(0, 1).float(), labels.flatten(), reduction="sum", ignore_index=IGNORED_LABEL
    )


def full_token_loss(hidden: Tensor, head: nn.Linear, labels: Tensor) -> Tensor:
    """A `TokenLoss` that computes the logits of the whole batch at once."""
    return next_token_loss(head(hidden), labels)


ROTARY_BASE = 10_000.0
INITIAL_DEVIATION = 0.02


def rotary_table(*, sequence_length: int, head_size: int) -> Tensor:
    """Return cosine and sine of the angles of each position: float32 [2, sequence, head_size]."""
    exponents = -torch.arange(0, head_size, 2, dtype=torch.float32) / head_size
    frequencies = torch.pow(ROTARY_BASE, exponents)
    positions = torch.arange(sequence_length, dtype=torch.float32)
    angles = torch.outer(positions, frequencies).repeat(1, 2)
    return torch.stack([angles.cos(), angles.sin()])


def rotate(x: Tensor, rotary: Tensor) -> Tensor:
    """Rotate pairs (i, i + head_size/2) of x [batch, heads, sequence, head_size] by position."""
    cosine, sine = rotary.to(x.dtype).unbind()
    first, second = x.chunk(2, dim=-1)
    return x * cosine + torch.cat([-second, first], dim=-1) * sine


class Attention(nn.Module):
    """Causal self-attention with rotary positions."""

    def __init__(self, *, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.head_size = width // heads
        self.query_key_value = nn.Linear(width, 3 * width, bias=False)
        self.output = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, rotary: Tensor) -> Tensor:
        batch, length, _ = x.shape
        # -1: tensor parallelism leaves a device only some of the heads.
        qkv = self.query_key_value(x).view(batch, length, 3, -1, self.head_size)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(
            rotate(query, rotary), rotate(key, rotary), value, is_causal=True
        )
        output: Tensor = self.output(attended.transpose(1, 2).reshape(batch, length, -1))
        return output


def default_feed_forward_width(width: int) -> int:
    """Return the inner size of the feed-forward: 8/3 of the width, up to a multiple of 32."""
    return -(-8 * width // (3 * 32)) * 32


class FeedForward(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, *, width: int, inner: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, inner, bias=False)
        self.up = nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return output


class Block(nn.Module):
    """Attention and feed-forward, each with a norm before and a residual connection."""

    def __init__(self, *, width: int, heads: int, inner: int) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(width, eps=1e-6)
        self.attention = Attention(width=width, heads=heads)
        self.feed_forward_norm = nn.RMSNorm(width, eps=1e-6)
        self.feed_forward = FeedForward(width=width, inner=inner)

    def forward(self, x: Tensor, rotary: Tensor) -> Tensor:
        attended: Tensor = x + self.attention(self.attention_norm(x), rotary)
        output: Tensor = attended + self.feed_forward(self.feed_forward_norm(attended))
        return output


class GPT(nn.Module):
    """forward(tokens, labels), both [batch, sequence] -> sum of token losses, float32 scalar."""

    def __init__(
        self,
        *,
        layers: int,
        width: int,
        heads: int,
        inner: int,
        vocab_size: int,
        sequence_length: int,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, width)
        self.blocks = nn.ModuleList(
            Block(width=width, heads=heads, inner=inner) for _ in range(layers)
        )
        self.norm = nn.RMSNorm(width, eps=1e-6)
        self.head = nn.Linear(width, vocab_size, bias=False)
        self.token_loss: TokenLoss = full_token_loss
        table = rotary_table(sequence_length=sequence_length, head_size=width // heads)
        self.register_buffer("rotary", table, persistent=False)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.rotary)
        return self.token_loss(self.norm(x), self.head, labels)


@torch.no_grad()
def initialize(model: nn.Module) -> None:
    """Draw all matrices from N(0, 0.02) as in GPT-2.

    Those that write to the residual stream have a standard deviation of 0.02 / sqrt(2 * layers).
    """
    assert isinstance(model, GPT)
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=INITIAL_DEVIATION)
    for block in model.blocks:
        assert isinstance(block, Block)
        for residual in (block.attention.output, block.feed_forward.down):
            nn.init.normal_(residual.weight, std=INITIAL_DEVIATION / (2 * len(model.blocks)) ** 0.5)


def make_model() -> nn.Module:
    model = GPT(
        layers=6,
        width=128,
        heads=4,
        vocab_size=256,
        inner=default_feed_forward_width(128),
        sequence_length=SEQUENCE_LENGTH,
    )
    initialize(model)
    return model


# -- text ------------------------------------------------------------------------------------------


DATASET_CONFIG: str | None = None
DATASET_SPLIT = 'train'
HELD_OUT_SPLIT: str | None = None
STREAMING = False
TEXT_COLUMN: str | None = None


_NOT_DOCUMENTATION = {
    "site-packages",
    "dist-packages",
    "test",
    "tests",
    "idle_test",
    "lib2to3",
    "ensurepip",
}
_BEFORE_DOCSTRING = {tokenize.ENCODING, tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE}


def standard_library_texts() -> list[str]:
    """Return a string per topic and per module: topics first, each group in alphabetical order."""
    return [text for _, text in sorted(topics.items())] + list(_module_docstrings())


def _module_docstrings() -> Iterator[str]:
    root = Path(sysconfig.get_path("stdlib"))
    for file in sorted(root.rglob("*.py")):
        if not _NOT_DOCUMENTATION.isdisjoint(file.relative_to(root).parts):
            continue
        text = _docstring(file)
        if text:
            yield text


def _docstring(file: Path) -> str | None:
    """Return the module docstring, read without parsing the rest of the file."""
    with file.open("rb") as source:
        try:
            first = next(
                token
                for token in tokenize.tokenize(source.readline)
                if token.type not in _BEFORE_DOCSTRING
            )
        except (SyntaxError, tokenize.TokenError, UnicodeDecodeError):
            return None
    if first.type != tokenize.STRING:
        return None
    value = ast.literal_eval(first.string)
    return value if isinstance(value, str) else None


READERS = {
    ".txt": "text",
    ".md": "text",
    ".rst": "text",
    ".jsonl": "json",
    ".json": "json",
    ".csv": "csv",
    ".parquet": "parquet",
}
"""Name of the reader in `datasets`, by suffix of a local file."""
ALL = "train"
"""The split of all files if no file is named after a split."""


def dataset_files(files: Iterable[Path]) -> list[Path]:
    """Return the readable ones in alphabetical order, without dataset cards and the like."""
    files = sorted(file for file in files if file.suffix.lower() in READERS)
    if not files:
        return []
    from datasets.data_files import FILES_TO_IGNORE

    return [file for file in files if file.name not in FILES_TO_IGNORE] or files


def files_named_by_split(folder: Path, everything: list[Path]) -> dict[str, list[Path]]:
    """Return {split: files} by the names of files and folders, as `datasets` assigns them."""
    from datasets.data_files import DataFilesDict, get_data_patterns

    try:
        found = DataFilesDict.from_patterns(get_data_patterns(str(folder)), base_path=str(folder))
    except FileNotFoundError:  # it finds no data files
        return {}
    readable = {str(file.resolve()): file for file in everything}
    by_split = {
        str(split): sorted({readable[name] for name in map(_resolved, names) if name in readable})
        for split, names in found.items()
    }
    return {split: files for split, files in by_split.items() if files}


def _resolved(name: str) -> str:
    return str(Path(name).resolve())


def read_dataset(name: str, *, split: str) -> Iterable[Any]:
    """Reads text, jsonl, csv or parquet files, a folder of them, or a data set.

    A data set is a folder written by `save_to_disk` or a name on the hub.
    """
    path = Path(name).expanduser()
    is_saved = any((path / file).exists() for file in ("state.json", "dataset_dict.json"))
    if path.is_file() or (path.is_dir() and not is_saved and DATASET_CONFIG is None):
        return _read_files(path, split=split)
    import datasets

    if not is_saved:
        source = str(path) if path.is_dir() else name
        rows = datasets.load_dataset(source, DATASET_CONFIG, split=split, streaming=STREAMING)
        return texts_of_rows(rows)
    rows = datasets.load_from_disk(str(path))
    return texts_of_rows(rows[split] if isinstance(rows, datasets.DatasetDict) else rows)


def _read_files(path: Path, *, split: str) -> Iterable[Any]:
    all_files = [path]
    if path.is_dir():
        all_files = dataset_files(file for file in path.rglob("*") if file.is_file())
    kinds = {READERS.get(file.suffix.lower()) for file in all_files}
    if len(kinds) != 1 or kinds == {None}:
        known = ", ".join(READERS)
        raise SystemExit(f"{path} must contain files of one kind, one of: {known}")
    splits = {} if path.is_file() else files_named_by_split(path, all_files)
    in_splits = {file for files in splits.values() for file in files}
    is_laid_out = ALL in splits and in_splits == set(all_files)
    wants_splits = HELD_OUT_SPLIT is not None or DATASET_SPLIT != "train"
    files = splits if splits and (wants_splits or is_laid_out) else {ALL: all_files}
    [kind] = kinds
    if kind == "text":
        if split not in files:
            known = ", ".join(files)
            raise SystemExit(f"{path} has no split {split!r}. Choose one of: {known}")
        return (file.read_text(encoding="utf-8") for file in files[split])
    import datasets

    names = {}
    for name, paths in files.items():
        names[name] = [glob.escape(str(file)) for file in paths]
    rows = datasets.load_dataset(kind, data_files=names, split=split, streaming=STREAMING)
    return texts_of_rows(rows)


def read_documents(name: str, *, split: str) -> Iterable[Any]:
    """Reads the text of the study, or another one as `read_dataset` does."""
    if name == TEXT:
        return standard_library_texts()
    return read_dataset(name, split=split)


def texts_of_rows(rows: Any) -> Iterator[Any]:
    """Yields the texts of TEXT_COLUMN; without it the tokens or the texts that the rows have.

    Without TEXT_COLUMN and tokens, the column is the one called text or the first one of strings.
    """
    rows = rows.with_format(None)
    string_types = ("string", "large_string", "string_view")
    has_strings: dict[str, bool] = {}
    if rows.features is None:  # streamed: the types are unknown, so look at some values
        for row in rows.take(64):
            for name, value in row.items():
                has_strings[name] = has_strings.get(name, False) or isinstance(value, str)
    else:
        for name, feature in rows.features.items():
            has_strings[name] = getattr(feature, "dtype", "") in string_types
    columns = list(has_strings)
    text_columns = [name for name in columns if has_strings[name]]
    if TEXT_COLUMN is None and "input_ids" in columns and "input_ids" not in text_columns:
        names = ("input_ids", "labels", "attention_mask")
        yield from _samples(rows, [name for name in names if name in columns])
        return
    column = TEXT_COLUMN
    if column is None:
        column = "text" if "text" in text_columns or not text_columns else text_columns[0]
    for row in rows.select_columns([column]):
        if row[column]:
            yield row[column]


def _samples(rows: Any, columns: list[str]) -> Iterator[Any]:
    """Yields the tokens of each row, with -2 - token where a token is not a label.

    Tokens under a mask of 0 and tokens after the last label are dropped.
    """
    for row in rows.select_columns(columns):
        tokens = numpy.asarray(row["input_ids"] or [], dtype=numpy.int64)
        labels = tokens
        if row.get("labels") is not None:
            labels = numpy.asarray(row["labels"], dtype=numpy.int64)
        if row.get("attention_mask") is not None:
            is_visible = numpy.asarray(row["attention_mask"]) != 0
            tokens, labels = tokens[is_visible], labels[is_visible]
        trained_on = labels != IGNORED_LABEL
        end = int(trained_on.nonzero()[0].max(initial=-1)) + 1
        yield numpy.where(trained_on, tokens, -2 - tokens)[:end]


PASSAGE_CHARACTERS = 4096
HELD_OUT_ONE_IN = 10
CHARACTERS_PER_TOKEN = 64
"""Upper bound for every tokenizer; characters beyond it cannot be part of a padded sample."""
TRAINED_ON_BYTES_PER_TOKEN = 8
"""Bytes of streamed text that a BPE is trained on, per token that the steps need."""
TRAIN, HELD_OUT = False, True


def passages(documents: Iterable[str]) -> Iterator[bytes]:
    """Yield each document as UTF-8, in passages of at most 4,096 characters."""
    for document in documents:
        for start in range(0, len(document), PASSAGE_CHARACTERS):
            yield document[start : start + PASSAGE_CHARACTERS].encode("utf-8", errors="replace")


def beginnings(documents: Iterable[str], *, sequence_length: int) -> Iterator[bytes]:
    """Yield as much of each document as a sample could contain, as UTF-8."""
    for document in documents:
        yield document[: CHARACTERS_PER_TOKEN * sequence_length].encode("utf-8", errors="replace")


def is_held_out(passage: bytes) -> bool:
    """Whether a passage is held out, decided by its hash."""
    return int.from_bytes(hashlib.sha256(passage).digest()[:8], "big") % HELD_OUT_ONE_IN == 0


def assigned(
    train: Iterable[Any], held_out: Iterable[Any] | None, *, is_full: Callable[[bool], bool]
) -> Iterator[Any]:
    """Yield (is held out, unit) for every unit until the parts are full."""
    if held_out is None:
        for unit in train:
            if is_full(TRAIN) and is_full(HELD_OUT):
                return
            yield is_held_out(unit if isinstance(unit, bytes) else unit.tobytes()), unit
        return
    for part, units in ((TRAIN, train), (HELD_OUT, held_out)):
        for unit in units:
            if is_full(part):
                break
            yield part, unit


def up_to(size_bytes: int, texts: Iterable[bytes]) -> Iterator[bytes]:
    """Yield texts until their total size reaches `size_bytes`."""
    for text in texts:
        yield text
        size_bytes -= len(text)
        if size_bytes <= 0:
            return


def cut(documents: Iterable[Any]) -> Iterator[Any]:
    """Yields the passages of each text; a sample of tokens stays whole."""
    for document in documents:
        if isinstance(document, str):
            yield from passages([document])
        else:
            yield document


Tokens = NDArray[numpy.integer]
NO_TOKEN = -1
"""Padding: the pad token as input, and no label."""


def read_token_of(encoded: Any) -> Any:
    """Encode a token of padded text that is not a label, or decode it: the inverse is the same."""
    return NO_TOKEN - 1 - encoded


class ByteTokenizer:
    """Each byte is a token; a blank line separates passages."""

    vocab_size = 256
    beginning: Tokens = numpy.zeros(0, dtype=numpy.uint8)
    separator: Tokens = numpy.frombuffer(b"\n\n", dtype=numpy.uint8)
    separator_bytes = len(separator)
    pad_token = 0

    def encode(self, texts: Sequence[bytes], *, longest: int | None) -> list[tuple[Tokens, int]]:
        arrays = [numpy.frombuffer(text, dtype=numpy.uint8)[:longest] for text in texts]
        return [(array, len(array)) for array in arrays]


def make_tokenizer(text: str) -> ByteTokenizer:
    return ByteTokenizer()


def units_of(name: str, is_full: Callable[[bool], bool]) -> Iterator[tuple[bool, Any]]:
    """Yields (is held out, unit) until both parts are full.

    A unit is a text in UTF-8 or a sample of tokens. It belongs to one part as a whole.
    """
    train = cut(read_documents(name, split=DATASET_SPLIT))
    held_out = None
    if HELD_OUT_SPLIT is not None:
        held_out = cut(read_documents(name, split=HELD_OUT_SPLIT))
    return assigned(train, held_out, is_full=is_full)


def is_full(part: bool, length: int, length_of: Callable[[int], int]) -> bool:
    """Whether a part has all the text that STEPS or the held-out sequences use.

    A text that is not streamed is read whole. A longer training repeats a streamed one.
    """
    sequences = EVALUATION_SEQUENCES if part == HELD_OUT else STEPS * GLOBAL_BATCH
    return STREAMING and length >= length_of(sequences)


def tokens_of(text: str) -> tuple[list[Any], int]:
    """Returns both parts and the padding token.

    A part is one stream of tokens, int32 [tokens], with the tokenizer's separator between texts.
    """
    tokenizer: Any = None
    parts: tuple[list[Any], list[Any]] = ([], [])
    lengths = [0, 0]

    def has_all(part: bool) -> bool:
        return is_full(part, lengths[part], lambda sequences: sequences * SEQUENCE_LENGTH + 1)

    for part, unit in units_of(text, has_all):
        if tokenizer is None and isinstance(unit, bytes):
            tokenizer = make_tokenizer(text)
        tokens = tokenizer.encode([unit], longest=None)[0][0] if isinstance(unit, bytes) else unit
        if has_all(part) or not len(tokens):
            continue
        added = [tokenizer.separator, tokens] if parts[part] and tokenizer is not None else [tokens]
        parts[part].extend(added)
        lengths[part] += sum(map(len, added))
    nothing = numpy.zeros(0, dtype=numpy.int32)
    streams = [numpy.concatenate([nothing, *part]).astype(numpy.int32) for part in parts]
    return streams, 0 if tokenizer is None else tokenizer.pad_token


class Sequences:
    """Sequences of a stream of tokens, in batches."""

    def __init__(self, tokens: Any, pad_token: int) -> None:
        self.tokens = tokens

    def __len__(self) -> int:
        return max(0, len(self.tokens) - 1) // SEQUENCE_LENGTH

    def batch(self, indices: Any) -> tuple[Tensor, Tensor]:
        """Returns tokens and labels, int64 [sequences, length] each; a label is the next token."""
        starts = [int(index) * SEQUENCE_LENGTH for index in indices]
        rows = numpy.stack([self.tokens[start : start + SEQUENCE_LENGTH + 1] for start in starts])
        both = torch.from_numpy(rows.astype(numpy.int64))
        return both[:, :-1], both[:, 1:]


def read_text(folder: str | None, text: str) -> tuple[Sequences, Sequences]:
    """Returns the training and the held-out part.

    They are read from `folder`, a study's folder with train.npy and held_out.npy, or made of
    `text` if `folder` is None.
    """
    if folder is None:
        parts, pad_token = tokens_of(text)
        return Sequences(parts[TRAIN], pad_token), Sequences(parts[HELD_OUT], pad_token)
    pad_token = 0
    file = Path(folder) / "text.json"
    if file.exists():
        pad_token = json.loads(file.read_text(encoding="utf-8")).get("pad_token", 0)
    train = numpy.load(Path(folder) / "train.npy", mmap_mode="r")
    held_out = numpy.load(Path(folder) / "held_out.npy", mmap_mode="r")
    return Sequences(train, pad_token), Sequences(held_out, pad_token)


# -- peak memory -----------------------------------------------------------------------------------


def held_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) for the tensors besides parameters that the module itself references.

    These are its buffers, and the tensors in its plain attributes, alone or in lists, tuples and
    dictionaries.
    """
    yield from module.named_buffers(recurse=False)
    for name, value in vars(module).items():
        if name not in ("_parameters", "_buffers", "_modules"):
            yield from ((name, leaf) for leaf in tree_leaves(value) if isinstance(leaf, Tensor))


def resident_tensors(training: Training) -> list[Tensor]:
    """Returns what is there before and after a step: weights, buffers and optimizer state."""
    held = [tensor for module in training.model.modules() for _, tensor in held_tensors(module)]
    state = [
        value
        for of_parameter in training.updater.optimizer.state.values()
        for value in of_parameter.values()
        if isinstance(value, Tensor)
    ]
    return [*training.model.parameters(), *held, *state]


PHASE_PREFIX = "autotune::"


def reallocate(tensors: Iterable[Tensor]) -> int:
    """Moves every storage of `tensors` to a new block; views of one storage still share it.

    Returns the bytes of all these storages. Memory that torch does not own alone, such as a mapped
    file or memory shared with another process, is not moved.
    """
    storages = {storage._cdata: storage for tensor in tensors for storage in _storages_of(tensor)}
    for storage in storages.values():
        if storage.resizable() and not storage.is_shared():
            size_bytes = storage.nbytes()
            content = storage.clone()
            storage.resize_(0)
            storage.resize_(size_bytes)
            storage.copy_(content)
    return sum(storage.nbytes() for storage in storages.values())


def _storages_of(tensor: Tensor) -> Iterator[UntypedStorage]:
    """Yields the storages of a tensor: all inner tensors of a subclass, both parts of a sparse one.

    Yields nothing for a tensor whose memory torch does not show, such as oneDNN's.
    """
    if tensor.layout == torch.sparse_coo:
        yield from (part.untyped_storage() for part in (tensor._indices(), tensor._values()))
        return
    if hasattr(tensor, "__tensor_flatten__"):
        for name in tensor.__tensor_flatten__()[0]:
            inner = getattr(tensor, name)
            if isinstance(inner, Tensor):  # not the mesh of a DTensor
                yield from _storages_of(inner)
        return
    try:
        yield tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return


def peak_of(recording: profile, *, within: str, alive_bytes: int | None = None) -> tuple[int, str]:
    """Returns the peak of live bytes inside the range named `within`, and the phase of that peak.

    `alive_bytes` is what is alive when the range begins; None stands for what the recording had
    allocated by then.
    """
    assert recording.profiler is not None
    results = recording.profiler.kineto_results
    assert results is not None
    phases = [
        (
            event.start_ns(),
            event.start_ns() + event.duration_ns(),
            event.name().removeprefix(PHASE_PREFIX),
        )
        for event in results.events()
        if event.name().startswith(PHASE_PREFIX)
    ]
    first, last = next(
        (event.start_ns(), event.start_ns() + event.duration_ns())
        for event in results.events()
        if event.name() == within
    )
    changes = _size_changes(results)
    if alive_bytes is None:
        alive_bytes = sum(change_bytes for at, change_bytes in changes if at < first)
    live = peak = alive_bytes
    peak_at = first
    for at, change_bytes in changes:
        if first <= at <= last:
            live += change_bytes
            if live > peak:
                peak, peak_at = live, at
    for start, end, name in phases:
        if start <= peak_at <= end:
            return peak, name
    return peak, "between"


def _size_changes(results: Any) -> list[tuple[int, int]]:
    """Returns (time in nanoseconds, bytes) of every allocation, and of its release as minus bytes.

    The release of an older block is left out. The allocator reports it where it knows the block
    from an earlier recording.
    """
    events = []
    waiting = list(results.experimental_event_tree())
    while waiting:
        event = waiting.pop()
        waiting.extend(event.children)
        if event.tag == torch._C._profiler._EventType.Allocation:
            events.append(
                (event.start_time_ns, event.extra_fields.alloc_size, event.extra_fields.ptr)
            )
    changes = []
    alive = set()
    for at, change_bytes, address in sorted(events):
        if change_bytes > 0:
            alive.add(address)
        elif address in alive:
            alive.remove(address)
        else:
            continue
        changes.append((at, change_bytes))
    return changes


class PeakMemory:
    """The peak memory of training: of one step on a CPU, of all that follows it on a GPU."""

    bytes = 0

    @contextmanager
    def of_step(self, training: Training) -> Iterator[None]:
        """Must surround one step after the first, which makes the optimizer's state."""
        if DEVICE == "cuda":
            torch.cuda.reset_peak_memory_stats()
            yield
            return
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recording:
            resident_bytes = reallocate(resident_tensors(training))
            with record_function("measured step"):
                yield
        self.bytes, _ = peak_of(recording, within="measured step", alive_bytes=resident_bytes)

    def read(self) -> int:
        """Returns the bytes; 0 if they were not measured."""
        return torch.cuda.max_memory_allocated() if DEVICE == "cuda" else self.bytes


# -- program ---------------------------------------------------------------------------------------


def training_order(
    *, sequences: int, global_batch: int, seed: int
) -> Iterator[NDArray[numpy.int64]]:
    """Yield global batches of sequence indices without end.

    Each epoch is shuffled anew; an incomplete last batch is dropped.
    """
    generator = numpy.random.default_rng(seed)
    while True:
        order = generator.permutation(sequences)
        for start in range(0, sequences - global_batch + 1, global_batch):
            yield order[start : start + global_batch]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--text", default=TEXT, help="file, folder or name on the hub")
    parser.add_argument(
        "--tokens", metavar="FOLDER", help="train.npy and held_out.npy of a study, not a text"
    )
    parser.add_argument("--steps", type=int, default=STEPS, help="number of optimizer steps")
    parser.add_argument("--save", metavar="FILE", help="file for the trained weights")
    return parser.parse_args()


def check_lengths(text: Sequences, held_out: Sequences) -> None:
    for part, sequences, needed in (
        ("training", text, GLOBAL_BATCH),
        ("held-out", held_out, EVALUATION_SEQUENCES),
    ):
        if len(sequences) < needed:
            raise SystemExit(
                f"the {part} text has {len(sequences)} sequences and {needed} are needed: "
                "use more text"
            )


def train(
    training: Training, text: Sequences, *, steps: int, say: Callable[[str], None]
) -> PeakMemory:
    """Makes `steps` optimizer steps; says their losses and the speed, and returns their peak."""
    batches = training_order(sequences=len(text), global_batch=GLOBAL_BATCH, seed=SEED)
    timed_from = min(5, steps - 1)
    peak_memory = PeakMemory()
    started = time.perf_counter()
    for step in range(steps):
        if step == timed_from:
            started = time.perf_counter()
        batch = text.batch(next(batches))
        rate = learning_rate(step, steps=steps)
        if step == timed_from - 1:
            with peak_memory.of_step(training):
                loss = train_step(training, batch, rate=rate)
        else:
            loss = train_step(training, batch, rate=rate)
        if step % 10 == 9 or step == steps - 1:
            say(f"step {step + 1}: loss {loss:.4f}")
    seconds = (time.perf_counter() - started) / max(1, steps - timed_from)
    tokens_per_second = GLOBAL_BATCH * SEQUENCE_LENGTH / seconds
    say(f"{tokens_per_second:,.0f} tokens/s after the first {timed_from} steps")
    return peak_memory


def main() -> None:
    arguments = parse_arguments()
    text, held_out = read_text(arguments.tokens, arguments.text)
    check_lengths(text, held_out)
    training = Training()
    say = functools.partial(print, flush=True)
    peak_memory = train(training, text, steps=arguments.steps, say=say)
    print(f"perplexity {math.exp(evaluate(training.model, held_out)):.4f}")
    if peak_memory.read():
        print(f"peak memory {peak_memory.read() / 2**20:,.2f} MiB")
    if PEAK_MEMORY_BYTES is not None:
        print(f"promised    {PEAK_MEMORY_BYTES / 2**20:,.2f} MiB, measured in {TRIAL}")
    if arguments.save:
        weights = {name: weight.detach().cpu() for name, weight in training.parameters.items()}
        torch.save(weights, arguments.save)


if __name__ == "__main__":
    main()
