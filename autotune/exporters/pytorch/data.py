"""Text to batches in an exported script: the same passages, tokens, held-out part and order as a study's."""

from autotune.exporters.pytorch.documents import document_pieces
from autotune.exporters.pytorch.pieces import Piece, own_source, piece
from autotune.spec.workload import Workload

_ANY = "from typing import Any"
_NUMPY = "import numpy"
_CALLABLE = "from collections.abc import Callable"
_ITERABLE = "from collections.abc import Iterable"
_ITERATOR = "from collections.abc import Iterator"


def data_pieces(workload: Workload) -> list[Piece]:
    """`read_text(folder, text)` gives the training and the held-out part, each of which makes batches."""
    batches = _PACKED if workload.packing == "packed" else _PADDED
    return [
        *document_pieces(workload),
        _units(workload),
        *_tokenizer(workload),
        piece(_LIMIT[workload.streaming], _CALLABLE),
        piece(batches, _NUMPY, _ANY, "import torch", "from torch import Tensor"),
        piece(_READ_TEXT, _NUMPY, "import json", "from pathlib import Path"),
        own_source(
            "data.batches",
            "training_order",
            imports=(
                _NUMPY,
                "from numpy.typing import NDArray",
                "from collections.abc import Iterator",
            ),
        ),
    ]


# -- units -----------------------------------------------------------------------------------------


def _units(workload: Workload) -> Piece:
    """What belongs to one part as a whole: passages, or documents, or samples of tokens."""
    is_packed = workload.packing == "packed"
    names = (
        ("PASSAGE_CHARACTERS", "passages") if is_packed else ("CHARACTERS_PER_TOKEN", "beginnings")
    )
    source = own_source("data.tokens", *names, "HELD_OUT_ONE_IN", "is_held_out", "_assigned")
    cut = (
        "passages([document])"
        if is_packed
        else "beginnings([document], sequence_length=SEQUENCE_LENGTH)"
    )
    held_out = "None"
    if workload.held_out_split is not None:
        held_out = f"_cut(documents(name, split={workload.held_out_split!r}))"
    made = f'''
TRAIN, HELD_OUT = False, True


def units_of(name: str, is_full: Callable[[bool], bool]) -> Iterator[tuple[bool, Any]]:
    """Each text as UTF-8, or each sample of tokens, with whether it is held out, until the parts are full."""
    return _assigned(_cut(documents(name, split={workload.dataset_split!r})), {held_out}, is_full=is_full)


def _cut(documents: Iterable[Any]) -> Iterator[Any]:
    for document in documents:
        if isinstance(document, str):
            yield from {cut}
        else:
            yield document
'''
    imports = ("import hashlib", _ANY, _CALLABLE, _ITERABLE, _ITERATOR)
    return piece(source.text + "\n\n\n" + made.strip("\n"), *imports)


# -- tokens ----------------------------------------------------------------------------------------

_SUBWORDS = (
    "END_OF_TEXT",
    "PADDING",
    "_NAMES",
    "SubwordTokenizer",
    "_bytes_of",
    "_array",
    "_token_of",
)


def _tokenizer(workload: Workload) -> list[Piece]:
    pieces = [
        own_source(
            "data.token_file", "Tokens", imports=(_NUMPY, "from numpy.typing import NDArray")
        )
    ]
    if workload.tokenizer == "bytes":
        vocabulary = own_source("spec.workload", "BYTE_VOCABULARY")
        return [
            *pieces,
            vocabulary,
            own_source(
                "data.tokenizer", "ByteTokenizer", imports=("from collections.abc import Sequence",)
            ),
            piece(_BYTES),
        ]
    trained = ("_LONG_WORD", "train_bpe") if workload.tokenizer == "bpe" else ()
    imports = (
        _ANY,
        _NUMPY,
        "from collections.abc import Iterable, Sequence",
        "from pathlib import Path",
        "import re",
    )
    pieces.append(
        own_source(
            "data.tokenizer", *_SUBWORDS, *trained, imports=imports if trained else imports[:-1]
        )
    )
    return [*pieces, *(_trained_bpe(workload) if trained else [_from_file(workload)])]


def _trained_bpe(workload: Workload) -> list[Piece]:
    texts = (
        "(unit for part, unit in units_of(text, lambda part: part == HELD_OUT) if part == TRAIN)"
    )
    if not workload.streaming:
        return [
            piece(
                _BPE.format(vocab_size=workload.vocab_size, texts=texts), "from pathlib import Path"
            )
        ]
    limit = "TRAINED_ON_BYTES_PER_TOKEN * STEPS * GLOBAL_BATCH * SEQUENCE_LENGTH"
    made = _BPE.format(vocab_size=workload.vocab_size, texts=f"_up_to({limit}, {texts})")
    return [
        own_source(
            "data.tokens", "TRAINED_ON_BYTES_PER_TOKEN", "_up_to", imports=(_ITERABLE, _ITERATOR)
        ),
        piece(made, "from pathlib import Path"),
    ]


def _from_file(workload: Workload) -> Piece:
    return piece(
        _FROM_FILE.format(name=repr(workload.tokenizer)),
        "import json",
        "from huggingface_hub import hf_hub_download",
        "from huggingface_hub.errors import EntryNotFoundError",
        "from pathlib import Path",
        "from tokenizers import Tokenizer",
    )


_BYTES = """
def make_tokenizer(text: str) -> ByteTokenizer:
    return ByteTokenizer()
"""
_BPE = '''
def make_tokenizer(text: str) -> SubwordTokenizer:
    """Trained on the training part, and kept beside this file."""
    texts = {texts}
    return train_bpe(texts, vocab_size={vocab_size}, file=Path(__file__).with_name("tokenizer.json"))
'''
_FROM_FILE = '''
def make_tokenizer(text: str) -> SubwordTokenizer:
    """Of a tokenizer.json, a folder with one, or a name on the hub, with its settings where they are beside it."""
    path = Path({name}).expanduser()
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        try:
            hf_hub_download({name}, "tokenizer_config.json")
        except EntryNotFoundError:
            pass  # the usual names of special tokens are known
        file = Path(hf_hub_download({name}, "tokenizer.json"))
    settings = file.with_name("tokenizer_config.json")
    said = json.loads(settings.read_text(encoding="utf-8")) if settings.exists() else {{}}
    return SubwordTokenizer(Tokenizer.from_str(file.read_text(encoding="utf-8")), settings=said)
'''

_LIMIT = {
    False: '''
def is_full(part: bool, length: int, length_of: Callable[[int], int]) -> bool:
    """Never: the whole text is read."""
    return False
''',
    True: '''
def is_full(part: bool, length: int, length_of: Callable[[int], int]) -> bool:
    """No more is read than STEPS and the held-out sequences can use; a longer training repeats it."""
    return length >= length_of(EVALUATION_SEQUENCES if part == HELD_OUT else STEPS * GLOBAL_BATCH)
''',
}

_READ_TEXT = '''
def read_text(folder: str | None, text: str) -> tuple[Sequences, Sequences]:
    """Training and held-out part: of a study's folder with train.npy and held_out.npy, or made of `text`."""
    if folder is None:
        parts, pad_token = tokens_of(text)
        return Sequences(parts[TRAIN], pad_token), Sequences(parts[HELD_OUT], pad_token)
    file = Path(folder) / "text.json"
    facts = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    train, held_out = (numpy.load(Path(folder) / f"{part}.npy", mmap_mode="r") for part in ("train", "held_out"))
    return Sequences(train, facts.get("pad_token", 0)), Sequences(held_out, facts.get("pad_token", 0))
'''

_PACKED = '''
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
'''

_PADDED = '''
def tokens_of(text: str) -> tuple[list[Any], int]:
    """Each part as samples, int32 [samples, SEQUENCE_LENGTH + 1]: a text is a sample, and -1 is padding."""
    tokenizer: Any = None
    parts: tuple[list[Any], list[Any]] = ([], [])

    def has_all(part: bool) -> bool:
        return is_full(part, len(parts[part]), lambda sequences: sequences)

    for part, unit in units_of(text, has_all):
        sample = unit
        if isinstance(unit, bytes):
            tokenizer = tokenizer or make_tokenizer(text)
            tokens = tokenizer.encode([unit], longest=SEQUENCE_LENGTH - len(tokenizer.beginning))[0][0]
            sample = numpy.concatenate([tokenizer.beginning, tokens])
        sample = sample.astype(numpy.int32)[:SEQUENCE_LENGTH]
        if (sample[1:] >= 0).any() and not has_all(part):  # without a label it teaches nothing
            parts[part].append(numpy.pad(sample, (0, SEQUENCE_LENGTH + 1 - len(sample)), constant_values=-1))
    nothing = numpy.zeros((0, SEQUENCE_LENGTH + 1), dtype=numpy.int32)
    samples = [numpy.stack(part) if part else nothing for part in parts]
    return samples, 0 if tokenizer is None else tokenizer.pad_token


class Sequences:
    """Batches of padded samples: -1 is padding, and what is less is a token, -2 - token, that is no label."""

    def __init__(self, tokens: Any, pad_token: int) -> None:
        self.tokens, self.pad_token = tokens, pad_token

    def __len__(self) -> int:
        return len(self.tokens)

    def batch(self, indices: Any) -> tuple[Tensor, Tensor]:
        """Tokens and labels, int64 [sequences, length] each; a label is the token that follows, or -100."""
        rows = torch.from_numpy(numpy.asarray(self.tokens[list(indices)], dtype=numpy.int64))
        tokens = torch.where(rows < -1, -2 - rows, rows).masked_fill(rows == -1, self.pad_token)
        labels = rows.masked_fill(rows < 0, IGNORED_LABEL)
        return tokens[:, :-1], labels[:, 1:]
'''
