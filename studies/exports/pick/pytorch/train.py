"""gpt of 6 layers, width 128, 8 x 128 tokens a step, trained as in study tour, trial 39: fp32, checkpointing block,
compile model, micro-batch 4.

Measured there: peak memory 31.85 MiB, 10,193 tokens/s, perplexity 21.65.

    python train.py                         # on the workload's own text
    python train.py --text my.txt           # on a text, jsonl, csv or parquet file, a folder, or a name on the hub
    python train.py --steps 2000 --save model.pt

Written by autotune, which it does not need. What makes up the configuration is in `apply_techniques`, `Updater`,
`train_step` and the settings below.
"""

from __future__ import annotations

import argparse
import ast
import glob
import hashlib
import json
import math
import sysconfig
import time
import tokenize
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TEXT = 'python-docs'
SEQUENCE_LENGTH = 128
GLOBAL_BATCH = 8
"""Sequences of one optimizer step."""
MICRO_BATCH = 4
"""Sequences of one forward pass."""
STEPS = 30
EVALUATION_SEQUENCES = 64
LEARNING_RATE = 0.002
LEARNING_RATE_WARMUP_STEPS = 10
SEED = 0
WEIGHTS_DTYPE = torch.float32


# -- techniques -------------------------------------------------------------------------------------------------------


def apply_techniques(model: Any) -> None:
    """Everything that stands inside the model, in this order."""
    blocks = list(model.blocks)
    blocks = [Checkpointed(block) for block in blocks]
    model.blocks = nn.ModuleList(blocks)
    model.compile(dynamic=False)  # last: all of the above is inside its one graph


class Checkpointed(nn.Module):
    """`module` with its activations recomputed in the backward pass."""

    def __init__(self, module: nn.Module, *, context_fn: Callable[[], Any] | None = None) -> None:
        super().__init__()
        self.module = module
        self._options: dict[str, Any] = {} if context_fn is None else {"context_fn": context_fn}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(self.module, *args, use_reentrant=False, **self._options, **kwargs)

    def __getattr__(self, name: str) -> Any:
        """What a model reads of its own parts, such as the kind of a block, is still found."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)


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


class Updater:
    """Updates all parameters once the gradients of a global batch are complete."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.optimizer = make_optimizer(parameters)

    def set_learning_rate(self, learning_rate: float) -> None:
        set_learning_rate(self.optimizer, learning_rate)

    def scale(self, loss: Tensor) -> Tensor:
        return loss

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


# -- training ---------------------------------------------------------------------------------------------------------


class Training:
    """The model with its techniques, and what updates it."""

    def __init__(self) -> None:
        torch.manual_seed(SEED)
        self.model: Any = make_model()
        self.model.train()
        torch.manual_seed(SEED)  # dropout begins as it does with weights from a file
        move_to_device(self.model)
        self.parameters = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        """By the names they have before techniques wrap the model's parts."""
        apply_techniques(self.model)
        self.updater = Updater(list(self.parameters.values()))


@torch.no_grad()
def move_to_device(model: nn.Module) -> None:
    """Parameters are cast on the host, one by one; buffers keep their dtype."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(WEIGHTS_DTYPE).to(DEVICE)
    for module in model.modules():
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else buffer.to(DEVICE)


def forward(model: Any, tokens: Tensor, labels: Tensor) -> Tensor:
    """Summed token loss of a micro batch."""
    loss: Tensor = model(tokens, labels)
    return loss


def train_step(training: Training, batch: tuple[Tensor, Tensor], *, rate: float) -> float:
    """One optimizer step over the global batch; returns the mean token loss before it.

    Losses are divided by the labels of the global batch, so that gradients add up to its own whatever the micro batch.
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
    """Mean token loss on the held-out sequences, in the micro batches of the training."""
    model.eval()
    summed_loss(model, held_out, 0)  # compiles the graph without gradients
    parts = [summed_loss(model, held_out, start) for start in range(0, EVALUATION_SEQUENCES, MICRO_BATCH)]
    model.train()
    return sum(loss for loss, _ in parts) / max(1, sum(count for _, count in parts))


def summed_loss(model: Any, held_out: Sequences, start: int) -> tuple[float, int]:
    """Of a whole micro batch; rows beyond the held-out sequences are there for the shape only, without labels."""
    indices = numpy.arange(start, start + MICRO_BATCH)
    beyond = indices >= EVALUATION_SEQUENCES
    tokens, labels = held_out.batch(numpy.where(beyond, 0, indices))
    labels = labels.masked_fill(torch.from_numpy(beyond)[:, None], IGNORED_LABEL)
    loss = forward(model, tokens.contiguous().to(DEVICE), labels.contiguous().to(DEVICE))
    return loss.item(), int((labels != IGNORED_LABEL).sum())


def learning_rate(step: int, *, steps: int) -> float:
    """Linear rise, then constant."""
    if step < LEARNING_RATE_WARMUP_STEPS:
        return LEARNING_RATE * (step + 1) / LEARNING_RATE_WARMUP_STEPS
    return LEARNING_RATE


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        if isinstance(group["lr"], torch.Tensor):  # compiled code must not see a new number every step
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


# -- model ------------------------------------------------------------------------------------------------------------


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


ROTARY_BASE = 10_000.0
INITIAL_DEVIATION = 0.02


def rotary_table(*, sequence_length: int, head_size: int) -> Tensor:
    """Cosines and sines of every position's angles: [2, sequence, head_size], float32."""
    frequencies = torch.pow(ROTARY_BASE, -torch.arange(0, head_size, 2, dtype=torch.float32) / head_size)
    angles = torch.outer(torch.arange(sequence_length, dtype=torch.float32), frequencies).repeat(1, 2)
    return torch.stack([angles.cos(), angles.sin()])


def rotate(x: Tensor, rotary: Tensor) -> Tensor:
    """Turns pairs (i, i + head_size/2) of x [batch, heads, sequence, head_size] by their position's angle."""
    cosine, sine = rotary.to(x.dtype).unbind()
    first, second = x.chunk(2, dim=-1)
    return x * cosine + torch.cat([-second, first], dim=-1) * sine


class Attention(nn.Module):
    def __init__(self, *, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query_key_value = nn.Linear(width, 3 * width, bias=False)
        self.output = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, rotary: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.query_key_value(x).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(rotate(query, rotary), rotate(key, rotary), value, is_causal=True)
        output: Tensor = self.output(attended.transpose(1, 2).reshape(batch, length, width))
        return output


def default_feed_forward_width(width: int) -> int:
    """Inner size of the feed-forward: 8/3 of the width, rounded up to a multiple of 32."""
    return -(-8 * width // (3 * 32)) * 32


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, *, width: int, inner: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, inner, bias=False)
        self.up = nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return output


class Block(nn.Module):
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
    """forward(tokens [batch, sequence], labels [batch, sequence]) -> sum of token losses, float32 scalar."""

    def __init__(
        self, *, layers: int, width: int, heads: int, inner: int, vocab_size: int, sequence_length: int
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, width)
        self.blocks = nn.ModuleList(Block(width=width, heads=heads, inner=inner) for _ in range(layers))
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
    """N(0, 0.02) for matrices; those that write to the residual stream smaller by sqrt(2 * layers), as in GPT-2."""
    assert isinstance(model, GPT)
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=INITIAL_DEVIATION)
    for block in model.blocks:
        assert isinstance(block, Block)
        for residual in (block.attention.output, block.feed_forward.down):
            nn.init.normal_(residual.weight, std=INITIAL_DEVIATION / (2 * len(model.blocks)) ** 0.5)


IGNORED_LABEL = -100
TokenLoss = Callable[[Tensor, nn.Linear, Tensor], Tensor]
"""(hidden states [batch, sequence, width], head, labels [batch, sequence]) -> sum of token losses, float32 scalar."""


def next_token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Sum of cross entropies in float32: logits [batch, sequence, vocabulary], labels [batch, sequence]."""
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="sum", ignore_index=IGNORED_LABEL)


def full_token_loss(hidden: Tensor, head: nn.Linear, labels: Tensor) -> Tensor:
    """A `TokenLoss` with the logits of the whole batch at once."""
    return next_token_loss(head(hidden), labels)


# -- text -------------------------------------------------------------------------------------------------------------


_NOT_DOCUMENTATION = {"site-packages", "dist-packages", "test", "tests", "idle_test", "lib2to3", "ensurepip"}
_BEFORE_DOCSTRING = {tokenize.ENCODING, tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE}


def python_docs() -> list[str]:
    """One string a topic or module, topics first, each group in alphabetical order."""
    return [text for _, text in sorted(topics.items())] + list(_module_docstrings())


def _module_docstrings() -> Iterator[str]:
    root = Path(sysconfig.get_path("stdlib"))
    for file in sorted(root.rglob("*.py")):
        if _NOT_DOCUMENTATION.isdisjoint(file.relative_to(root).parts) and (text := _docstring(file)):
            yield text


def _docstring(file: Path) -> str | None:
    """The module docstring, read without parsing the rest of the file."""
    with file.open("rb") as source:
        try:
            first = next(token for token in tokenize.tokenize(source.readline) if token.type not in _BEFORE_DOCSTRING)
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
"""How `datasets` calls the reader of each kind of local file."""
_ALL = "train"
"""The split that everything belongs to where no file is named by one."""


def _files_in(folder: Path) -> list[Path]:
    """All that can be read, in alphabetical order; the card of a dataset and the like are no part of it."""
    from datasets.data_files import FILES_TO_IGNORE

    files = sorted(file for file in folder.rglob("*") if file.is_file() and file.suffix.lower() in READERS)
    return [file for file in files if file.name not in FILES_TO_IGNORE] or files


def _files_named_by_split(folder: Path, everything: list[Path]) -> dict[str, list[Path]]:
    """{split: files} by the names of files and folders, as `datasets` understands them."""
    from datasets.data_files import DataFilesDict, get_data_patterns

    try:
        found = DataFilesDict.from_patterns(get_data_patterns(str(folder)), base_path=str(folder))
    except FileNotFoundError:  # nothing that it takes for data
        return {}
    readable = {str(file.resolve()): file for file in everything}
    by_split = {
        str(split): sorted({readable[name] for name in map(_resolved, names) if name in readable})
        for split, names in found.items()
    }
    return {split: files for split, files in by_split.items() if files}


def _resolved(name: str) -> str:
    return str(Path(name).resolve())


DATASET_CONFIG: str | None = None
TEXT_COLUMN: str | None = None
STREAMING = False
WANTS_SPLITS = False


def documents(name: str, *, split: str) -> Iterable[Any]:
    """Local text, jsonl, csv or parquet files, a folder of them or of `save_to_disk`, or a name on the hub."""
    if name == 'python-docs':
        return python_docs()
    path = Path(name).expanduser()
    is_saved = any((path / file).exists() for file in ("state.json", "dataset_dict.json"))
    if path.is_file() or (path.is_dir() and not is_saved and DATASET_CONFIG is None):
        return _of_files(path, split=split)
    import datasets

    if not is_saved:
        where = str(path) if path.is_dir() else name
        return of_rows(datasets.load_dataset(where, DATASET_CONFIG, split=split, streaming=STREAMING))
    rows = datasets.load_from_disk(str(path))
    return of_rows(rows[split] if isinstance(rows, datasets.DatasetDict) else rows)


def _of_files(path: Path, *, split: str) -> Iterable[Any]:
    everything = [path] if path.is_file() else _files_in(path)
    kinds = {READERS.get(file.suffix.lower()) for file in everything}
    if len(kinds) != 1 or kinds == {None}:
        raise SystemExit(f"{path} holds no files of one kind that can be read: {', '.join(READERS)}")
    splits = {} if path.is_file() else _files_named_by_split(path, everything)
    is_laid_out = _ALL in splits and {file for files in splits.values() for file in files} == set(everything)
    files = splits if splits and (WANTS_SPLITS or is_laid_out) else {_ALL: everything}
    [kind] = kinds
    if kind == "text":
        if split not in files:
            raise SystemExit(f"{path} has no split {split!r}, but {', '.join(files)}")
        return (file.read_text(encoding="utf-8") for file in files[split])
    import datasets

    names = {part: [glob.escape(str(file)) for file in of_part] for part, of_part in files.items()}
    return of_rows(datasets.load_dataset(kind, data_files=names, split=split, streaming=STREAMING))


def of_rows(rows: Any) -> Iterator[Any]:
    """The column that is named, else the tokens, else the column called text, else the only one of strings."""
    rows = rows.with_format(None)
    features = {name: getattr(feature, "dtype", "") for name, feature in (rows.features or {}).items()}
    texts = [name for name, kind in features.items() if kind in ("string", "large_string", "string_view")]
    if rows.features is None:  # streamed
        seen = [(name, value) for row in rows.take(64) for name, value in row.items()]
        texts = [name for name in dict(seen) if any(isinstance(value, str) for other, value in seen if other == name)]
        features = dict(seen)
    if TEXT_COLUMN is None and "input_ids" in features and "input_ids" not in texts:
        yield from _samples(rows, [name for name in ("input_ids", "labels", "attention_mask") if name in features])
        return
    column = TEXT_COLUMN or ("text" if "text" in texts or not texts else texts[0])
    yield from (row[column] for row in rows.select_columns([column]) if row[column])


def _samples(rows: Any, columns: list[str]) -> Iterator[Any]:
    """Tokens; -2 - token where it is no label. What is under a mask of 0, or behind the last label, is left out."""
    for row in rows.select_columns(columns):
        tokens = numpy.asarray(row["input_ids"] or [], dtype=numpy.int64)
        labels = tokens if row.get("labels") is None else numpy.asarray(row["labels"], dtype=numpy.int64)
        if row.get("attention_mask") is not None:
            kept = numpy.asarray(row["attention_mask"]) != 0
            tokens, labels = tokens[kept], labels[kept]
        trained_on = labels != IGNORED_LABEL
        end = int(trained_on.nonzero()[0].max(initial=-1)) + 1
        yield numpy.where(trained_on, tokens, -2 - tokens)[:end]


PASSAGE_CHARACTERS = 4096
HELD_OUT_ONE_IN = 10


def passages(documents: Iterable[str]) -> Iterator[bytes]:
    """Each document as UTF-8, in passages of at most 4,096 characters."""
    for document in documents:
        for start in range(0, len(document), PASSAGE_CHARACTERS):
            yield document[start : start + PASSAGE_CHARACTERS].encode("utf-8", errors="replace")


def is_held_out(passage: bytes) -> bool:
    return int.from_bytes(hashlib.sha256(passage).digest()[:8], "big") % HELD_OUT_ONE_IN == 0


def _assigned(
    train: Iterable[Any], held_out: Iterable[Any] | None, *, is_full: Callable[[bool], bool]
) -> Iterator[Any]:
    """(whether it is held out, unit) for every unit until the parts are full."""
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


TRAIN, HELD_OUT = False, True


def units_of(name: str, is_full: Callable[[bool], bool]) -> Iterator[tuple[bool, Any]]:
    """Each text as UTF-8, or each sample of tokens, with whether it is held out, until the parts are full."""
    return _assigned(_cut(documents(name, split='train')), None, is_full=is_full)


def _cut(documents: Iterable[Any]) -> Iterator[Any]:
    for document in documents:
        if isinstance(document, str):
            yield from passages([document])
        else:
            yield document


Tokens = NDArray[numpy.integer]
BYTE_VOCABULARY = 256


class ByteTokenizer:
    """A byte is a token; a blank line separates passages."""

    vocab_size = BYTE_VOCABULARY
    beginning: Tokens = numpy.zeros(0, dtype=numpy.uint8)
    separator: Tokens = numpy.frombuffer(b"\n\n", dtype=numpy.uint8)
    separator_bytes = len(separator)
    pad_token = 0

    def encode(self, texts: Sequence[bytes], *, longest: int | None) -> list[tuple[Tokens, int]]:
        arrays = [numpy.frombuffer(text, dtype=numpy.uint8)[:longest] for text in texts]
        return [(array, len(array)) for array in arrays]


def make_tokenizer(text: str) -> ByteTokenizer:
    return ByteTokenizer()


def is_full(part: bool, length: int, length_of: Callable[[int], int]) -> bool:
    """Never: the whole text is read."""
    return False


def tokens_of(text: str) -> tuple[list[Any], int]:
    """Each part as one stream of tokens [any], the tokenizer's separator between texts; and the token that pads."""
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
    """Batches of a stream of tokens."""

    def __init__(self, tokens: Any, pad_token: int) -> None:
        self.tokens = tokens

    def __len__(self) -> int:
        return max(0, len(self.tokens) - 1) // SEQUENCE_LENGTH

    def batch(self, indices: Any) -> tuple[Tensor, Tensor]:
        """Tokens and labels, int64 [sequences, length] each; a label is the token that follows."""
        starts = [int(index) * SEQUENCE_LENGTH for index in indices]
        rows = numpy.stack([self.tokens[start : start + SEQUENCE_LENGTH + 1] for start in starts])
        both = torch.from_numpy(rows.astype(numpy.int64))
        return both[:, :-1], both[:, 1:]


def read_text(folder: str | None, text: str) -> tuple[Sequences, Sequences]:
    """Training and held-out part: of a study's folder with train.npy and held_out.npy, or made of `text`."""
    if folder is None:
        parts, pad_token = tokens_of(text)
        return Sequences(parts[TRAIN], pad_token), Sequences(parts[HELD_OUT], pad_token)
    file = Path(folder) / "text.json"
    facts = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    train, held_out = (numpy.load(Path(folder) / f"{part}.npy", mmap_mode="r") for part in ("train", "held_out"))
    return Sequences(train, facts.get("pad_token", 0)), Sequences(held_out, facts.get("pad_token", 0))


def training_order(*, sequences: int, global_batch: int, seed: int) -> Iterator[NDArray[numpy.int64]]:
    """Endless global batches of sequence indices: a fresh shuffle each epoch, an incomplete last batch dropped."""
    generator = numpy.random.default_rng(seed)
    while True:
        order = generator.permutation(sequences)
        for start in range(0, sequences - global_batch + 1, global_batch):
            yield order[start : start + global_batch]


# -- program ----------------------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", default=TEXT)
    parser.add_argument("--tokens", metavar="FOLDER", help="train.npy and held_out.npy of a study, in place of a text")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--save", metavar="FILE", help="where the trained weights go")
    asked = parser.parse_args()
    train, held_out = read_text(asked.tokens, asked.text)
    for part, sequences, needed in (("training", train, GLOBAL_BATCH), ("held-out", held_out, EVALUATION_SEQUENCES)):
        if len(sequences) < needed:
            raise SystemExit(f"the {part} text has {len(sequences)} sequences and {needed} are needed: use more text")
    training = Training()
    batches = training_order(sequences=len(train), global_batch=GLOBAL_BATCH, seed=SEED)
    started, timed_from = time.perf_counter(), min(5, asked.steps - 1)
    for step in range(asked.steps):
        if step == timed_from:
            started = time.perf_counter()
        loss = train_step(training, train.batch(next(batches)), rate=learning_rate(step, steps=asked.steps))
        if step % 10 == 9 or step == asked.steps - 1:
            print(f"step {step + 1}: loss {loss:.4f}", flush=True)
    seconds = (time.perf_counter() - started) / max(1, asked.steps - timed_from)
    print(f"{GLOBAL_BATCH * SEQUENCE_LENGTH / seconds:,.0f} tokens/s after the first {timed_from} steps")
    print(f"perplexity {math.exp(evaluate(training.model, held_out)):.4f}")
    if DEVICE == "cuda":
        print(f"peak memory {torch.cuda.max_memory_allocated() / 2**20:,.2f} MiB")
    if asked.save:
        torch.save({name: parameter.detach().cpu() for name, parameter in training.parameters.items()}, asked.save)


if __name__ == "__main__":
    main()
