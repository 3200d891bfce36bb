"""Batches in an exported script, with the passages, tokens, held-out part and order of a study."""

from autotune.exporters.bundle import Part, code, shipped
from autotune.exporters.pytorch.documents import document_parts
from autotune.spec.workload import Workload


def data_parts(workload: Workload) -> list[Part]:
    """Return the definition of `read_text(folder, text)`.

    It returns the training and the held-out part, each of which makes batches.
    """
    if workload.chat_column is not None:
        tokens = _CHAT_TOKENS + (_PACKED_CHAT if workload.packing == "packed" else _PADDED_CHAT)
        batches = tokens + _ROWS_OF_TOKENS
    elif workload.packing == "packed":
        batches = _PACKED
    else:
        batches = _PADDED + _ROWS_OF_TOKENS
    return [
        *document_parts(workload),
        _units(workload),
        _tokenizer(workload),
        code(_LIMIT[workload.streaming]),
        code(batches),
        code(_READ_TEXT),
        shipped("training_order"),
    ]


# -- units -----------------------------------------------------------------------------------------


def _units(workload: Workload) -> Part:
    """Return the definition of `units_of`.

    A unit belongs to one part as a whole: a passage, a document, or a sample of tokens.
    """
    if workload.packing == "packed":
        function = "passages"
        cut = "passages([document])"
    else:
        function = "beginnings"
        cut = "beginnings([document], sequence_length=SEQUENCE_LENGTH)"
    held_out = "None"
    if workload.held_out_split is not None:
        held_out = f"_cut(documents(name, split={workload.held_out_split!r}))"
    text = f'''
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from autotune.shipped.text_parts import HELD_OUT, TRAIN, assigned, {function}

def units_of(name: str, is_full: Callable[[bool], bool]) -> Iterator[tuple[bool, Any]]:
    """Yields (is held out, unit) until both parts are full.

    A unit is a text in UTF-8 or a sample of tokens.
    """
    train = _cut(documents(name, split={workload.dataset_split!r}))
    held_out = {held_out}
    return assigned(train, held_out, is_full=is_full)


def _cut(documents: Iterable[Any]) -> Iterator[Any]:
    for document in documents:
        if isinstance(document, str):
            yield from {cut}
        else:
            yield document
'''
    return code(text)


# -- tokens ----------------------------------------------------------------------------------------


def _tokenizer(workload: Workload) -> Part:
    """Return the definition of `make_tokenizer(text)`."""
    if workload.tokenizer == "bytes":
        return code(_BYTES)
    if workload.tokenizer != "bpe":
        template = ""
        if workload.chat_column is not None:
            template = _CHAT_TEMPLATE
        return code(_FROM_FILE.format(name=repr(workload.tokenizer)) + template)
    limit = ""
    if workload.streaming:
        limit = _BPE_LIMIT.format(tokens="STEPS * GLOBAL_BATCH * SEQUENCE_LENGTH")
    return code(_BPE.format(vocab_size=workload.vocab_size, limit=limit))


_BYTES = """
from autotune.shipped.byte_tokenizer import ByteTokenizer

def make_tokenizer(text: str) -> ByteTokenizer:
    return ByteTokenizer()
"""
_BPE = '''
from pathlib import Path
from autotune.shipped.bpe import train_bpe

def make_tokenizer(text: str) -> SubwordTokenizer:
    """Trains a tokenizer on the training part and stores it in tokenizer.json next to this file."""
    units = units_of(text, lambda part: part == HELD_OUT)
    texts = (unit for part, unit in units if part == TRAIN)
{limit}    file = Path(__file__).with_name("tokenizer.json")
    return train_bpe(texts, vocab_size={vocab_size}, file=file)
'''
_BPE_LIMIT = "    texts = up_to(TRAINED_ON_BYTES_PER_TOKEN * {tokens}, texts)\n"
_FROM_FILE = '''
import json
from pathlib import Path
from typing import Any
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError
from tokenizers import Tokenizer
from autotune.shipped.subword_tokenizer import SubwordTokenizer

def tokenizer_file() -> Path:
    """Returns a tokenizer.json, local or from the hub, next to its settings if it has any."""
    path = Path({name}).expanduser()
    file = path / "tokenizer.json" if path.is_dir() else path
    if file.is_file():
        return file
    for optional in ("tokenizer_config.json", "chat_template.jinja"):
        try:
            hf_hub_download({name}, optional)
        except EntryNotFoundError:
            pass  # SubwordTokenizer knows the usual names of special tokens
    return Path(hf_hub_download({name}, "tokenizer.json"))


def tokenizer_settings() -> dict[str, Any]:
    file = tokenizer_file().with_name("tokenizer_config.json")
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else {{}}


def make_tokenizer(text: str) -> SubwordTokenizer:
    tokenizer = Tokenizer.from_str(tokenizer_file().read_text(encoding="utf-8"))
    return SubwordTokenizer(tokenizer, settings=tokenizer_settings())
'''
_CHAT_TEMPLATE = '''

def make_chat_template() -> ChatTemplate:
    """Loads the chat template next to the tokenizer.json or in its settings."""
    file = tokenizer_file().with_name("chat_template.jinja")
    text = file.read_text(encoding="utf-8") if file.exists() else None
    template = chat_template_of(tokenizer_settings(), file_text=text)
    assert template is not None, "the tokenizer has no chat template"
    return template
'''

_LIMIT = {
    False: '''
from collections.abc import Callable

def is_full(part: bool, length: int, length_of: Callable[[int], int]) -> bool:
    """Returns False: the whole text is read."""
    return False
''',
    True: '''
from collections.abc import Callable

def is_full(part: bool, length: int, length_of: Callable[[int], int]) -> bool:
    """Whether a part has all the text that STEPS or the held-out sequences use.

    A longer training repeats the text.
    """
    return length >= length_of(EVALUATION_SEQUENCES if part == HELD_OUT else STEPS * GLOBAL_BATCH)
''',
}

_READ_TEXT = '''
import json
from pathlib import Path
import numpy

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
'''

_PACKED = '''
from typing import Any
import numpy
import torch
from torch import Tensor

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
'''

_PADDED = '''
from typing import Any
import numpy
import torch
from torch import Tensor

def tokens_of(text: str) -> tuple[list[Any], int]:
    """Returns both parts and the padding token.

    A part is int32 [samples, SEQUENCE_LENGTH + 1]; each text is a sample, padded with -1.
    """
    tokenizer: Any = None
    parts: tuple[list[Any], list[Any]] = ([], [])

    def has_all(part: bool) -> bool:
        return is_full(part, len(parts[part]), lambda sequences: sequences)

    for part, unit in units_of(text, has_all):
        sample = unit
        if isinstance(unit, bytes):
            if tokenizer is None:
                tokenizer = make_tokenizer(text)
            longest = SEQUENCE_LENGTH - len(tokenizer.beginning)
            tokens = tokenizer.encode([unit], longest=longest)[0][0]
            sample = numpy.concatenate([tokenizer.beginning, tokens])
        sample = sample.astype(numpy.int32)[:SEQUENCE_LENGTH]
        has_label = (sample[1:] >= 0).any()
        if has_label and not has_all(part):
            padding = (0, SEQUENCE_LENGTH + 1 - len(sample))
            parts[part].append(numpy.pad(sample, padding, constant_values=-1))
    nothing = numpy.zeros((0, SEQUENCE_LENGTH + 1), dtype=numpy.int32)
    samples = [numpy.stack(part) if part else nothing for part in parts]
    return samples, 0 if tokenizer is None else tokenizer.pad_token
'''

_CHAT_TOKENS = '''
from typing import Any
import numpy
import torch
from torch import Tensor

def tokens_of(text: str) -> tuple[list[Any], int]:
    """Returns both parts and the padding token.

    A part is int32 [sequences, SEQUENCE_LENGTH + 1], without those that have no answer.
    """
    parts: tuple[list[Any], list[Any]] = ([], [])
    rests = [numpy.zeros(0, dtype=numpy.int32) for _ in parts]

    def has_all(part: bool) -> bool:
        return is_full(part, len(parts[part]), lambda sequences: sequences)

    for part, conversation in units_of(text, has_all):
        rows, rests[part] = sequences_of(rests[part], conversation.astype(numpy.int32))
        for row in rows:
            if (row[1:] >= 0).any() and not has_all(part):
                parts[part].append(row)
    nothing = numpy.zeros((0, SEQUENCE_LENGTH + 1), dtype=numpy.int32)
    rows_of_parts = [numpy.stack(part) if part else nothing for part in parts]
    return rows_of_parts, make_tokenizer(text).pad_token
'''
_PADDED_CHAT = '''

def sequences_of(rest: Any, conversation: Any) -> tuple[list[Any], Any]:
    """Returns the conversation as one sequence, padded with -1, and no rest."""
    sample = conversation[:SEQUENCE_LENGTH]
    padding = (0, SEQUENCE_LENGTH + 1 - len(sample))
    return [numpy.pad(sample, padding, constant_values=-1)], rest
'''
_PACKED_CHAT = '''

def sequences_of(rest: Any, conversation: Any) -> tuple[list[Any], Any]:
    """Returns sequences from the stream of `rest` and the conversation, and what is left of it.

    They overlap by one token: the last label of one is the first token of the next.
    """
    stream = numpy.concatenate([rest, conversation])
    starts = range(0, len(stream) - SEQUENCE_LENGTH, SEQUENCE_LENGTH)
    rows = [stream[start : start + SEQUENCE_LENGTH + 1] for start in starts]
    return rows, stream[len(rows) * SEQUENCE_LENGTH :]
'''

_ROWS_OF_TOKENS = '''

class Sequences:
    """Rows of tokens, in batches.

    -1 is padding. A smaller value, -2 - token, stands for a token that is not a label.
    """

    def __init__(self, tokens: Any, pad_token: int) -> None:
        self.tokens = tokens
        self.pad_token = pad_token

    def __len__(self) -> int:
        return len(self.tokens)

    def batch(self, indices: Any) -> tuple[Tensor, Tensor]:
        """Returns tokens and labels, int64 [sequences, length] each.

        A label is the next token, or -100.
        """
        rows = torch.from_numpy(numpy.asarray(self.tokens[list(indices)], dtype=numpy.int64))
        tokens = torch.where(rows < -1, -2 - rows, rows).masked_fill(rows == -1, self.pad_token)
        labels = rows.masked_fill(rows < 0, IGNORED_LABEL)
        return tokens[:, :-1], labels[:, 1:]
'''
