"""Text to batches in an exported script: the same passages, tokens, held-out part and order as a study's."""

import json

from autotune.exporters.pytorch.pieces import Piece, own_source, piece
from autotune.workload import STANDARD_LIBRARY_TEXT, Workload

_ANY = "from typing import Any"
_NUMPY = "import numpy"
_ITERABLE = "from collections.abc import Iterable"
_ITERATOR = "from collections.abc import Iterator"


def data_pieces(workload: Workload) -> list[Piece]:
    """`read_text(folder, text)` gives the training and the held-out part, each of which makes batches."""
    batches = _PACKED if workload.packing == "packed" else _PADDED
    return [
        *_documents(workload),
        *_tokenizer(workload),
        _held_out(workload),
        piece(batches, _NUMPY, _ANY, "import torch", "from torch import Tensor"),
        piece(_READ_TEXT, _NUMPY, "import json", "from pathlib import Path"),
        own_source(
            "data.batches",
            "training_order",
            imports=(_NUMPY, "from numpy.typing import NDArray", "from collections.abc import Iterator"),
        ),
    ]


# -- documents ---------------------------------------------------------------------------------------------------


def _documents(workload: Workload) -> list[Piece]:
    pieces = []
    if workload.dataset == STANDARD_LIBRARY_TEXT:
        imports = ("import ast", "import sysconfig", "import tokenize", "from pydoc_data.topics import topics")
        standard = own_source(
            "data.python_docs",
            "_NOT_DOCUMENTATION",
            "_BEFORE_DOCSTRING",
            "documents",
            "_module_docstrings",
            "_docstring",
            imports=(*imports, "from pathlib import Path", _ITERATOR),
        )
        pieces.append(Piece(standard.text.replace("def documents()", "def python_docs()"), standard.imports))
    python_docs = ""
    if workload.dataset == STANDARD_LIBRARY_TEXT:
        python_docs = f'    if name == "{STANDARD_LIBRARY_TEXT}":\n        return python_docs()\n'
    column = json.dumps(workload.text_column or "text")
    text = f'''
def documents(name: str, *, split: str) -> Iterable[str]:
    """Local text, jsonl, csv or parquet files, a folder of them or of `save_to_disk`, or a name on the hub."""
{python_docs}    path = Path(name).expanduser()
    readers = {{".txt": "text", ".md": "text", ".rst": "text", ".json": "json", ".jsonl": "json"}}
    readers |= {{".csv": "csv", ".parquet": "parquet"}}
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.suffix in readers)
    if files and all(readers[file.suffix] == "text" for file in files):
        return [file.read_text(encoding="utf-8") for file in files]
    import datasets

    if (path / "state.json").exists():
        rows = datasets.load_from_disk(name)
    elif files:
        names = {{split: [str(file) for file in files]}}
        rows = datasets.load_dataset(readers[files[0].suffix], data_files=names, split=split)
    else:
        rows = datasets.load_dataset(name, {workload.dataset_config!r}, split=split)
    return rows[{column}]
'''
    pieces.append(piece(text, "from pathlib import Path", _ITERABLE))
    return pieces


def _held_out(workload: Workload) -> Piece:
    is_packed = workload.packing == "packed"
    names = ("PASSAGE_CHARACTERS", "passages") if is_packed else ("CHARACTERS_PER_TOKEN", "beginnings")
    by_hash = ("HELD_OUT_ONE_IN", "is_held_out") if workload.held_out_split is None else ()
    source = own_source("data.tokens", *names, *by_hash, imports=("import hashlib",) if by_hash else ())

    def cut(split: str) -> str:
        found = f"documents(name, split={json.dumps(split)})"
        return f"passages({found})" if is_packed else f"beginnings({found}, sequence_length=SEQUENCE_LENGTH)"

    if workload.held_out_split is None:
        body = f"    for text in {cut(workload.dataset_split)}:\n        yield is_held_out(text), text"
    else:
        splits = ((False, workload.dataset_split), (True, workload.held_out_split))
        body = "\n".join(f"    for text in {cut(split)}:\n        yield {part}, text" for part, split in splits)
    made = f'''
def texts_of(name: str) -> Iterator[tuple[bool, bytes]]:
    """Each text as UTF-8, with whether it is held out."""
{body}
'''
    return piece(source.text + "\n\n\n" + made.strip("\n"), *source.imports, _ITERABLE, _ITERATOR)


# -- tokens ------------------------------------------------------------------------------------------------------

_SUBWORDS = ("END_OF_TEXT", "PADDING", "_NAMES", "SubwordTokenizer", "_bytes_of", "_array", "_token_of")


def _tokenizer(workload: Workload) -> list[Piece]:
    pieces = [own_source("data.token_file", "Tokens", imports=(_NUMPY, "from numpy.typing import NDArray"))]
    if workload.tokenizer == "bytes":
        vocabulary = own_source("workload", "BYTE_VOCABULARY")
        return [
            *pieces,
            vocabulary,
            own_source("data.tokenizer", "ByteTokenizer", imports=("from collections.abc import Sequence",)),
            piece(_BYTES, _ITERABLE),
        ]
    trained = ("_LONG_WORD", "train_bpe") if workload.tokenizer == "bpe" else ()
    imports = (_ANY, _NUMPY, "from collections.abc import Iterable, Sequence", "from pathlib import Path", "import re")
    pieces.append(own_source("data.tokenizer", *_SUBWORDS, *trained, imports=imports if trained else imports[:-1]))
    if workload.tokenizer == "bpe":
        pieces.append(piece(_BPE.format(vocab_size=workload.vocab_size), _ITERABLE, "from pathlib import Path"))
    else:
        pieces.append(
            piece(
                _FROM_FILE.format(name=json.dumps(workload.tokenizer)),
                "import json",
                "from huggingface_hub import hf_hub_download",
                "from pathlib import Path",
                "from tokenizers import Tokenizer",
            )
        )
    return pieces


_BYTES = """
def make_tokenizer(texts: Iterable[bytes]) -> ByteTokenizer:
    return ByteTokenizer()
"""
_BPE = '''
def make_tokenizer(texts: Iterable[bytes]) -> SubwordTokenizer:
    """Trained on the training part, and kept beside this file."""
    return train_bpe(texts, vocab_size={vocab_size}, file=Path(__file__).with_name("tokenizer.json"))
'''
_FROM_FILE = '''
def make_tokenizer(texts: Iterable[bytes]) -> SubwordTokenizer:
    """Of a tokenizer.json, a folder with one, or a name on the hub, with its settings where they are beside it."""
    path = Path({name}).expanduser()
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        hf_hub_download({name}, "tokenizer_config.json")
        file = Path(hf_hub_download({name}, "tokenizer.json"))
    settings = file.with_name("tokenizer_config.json")
    said = json.loads(settings.read_text(encoding="utf-8")) if settings.exists() else {{}}
    return SubwordTokenizer(Tokenizer.from_str(file.read_text(encoding="utf-8")), settings=said)
'''

_READ_TEXT = '''
def read_text(folder: str | None, text: str) -> tuple[Sequences, Sequences]:
    """Training and held-out part: of a study's folder with train.npy and held_out.npy, or made of `text`."""
    if folder is not None:
        facts = json.loads((Path(folder) / "text.json").read_text(encoding="utf-8"))
        train, held_out = (numpy.load(Path(folder) / f"{part}.npy", mmap_mode="r") for part in ("train", "held_out"))
        return Sequences(train, facts["pad_token"]), Sequences(held_out, facts["pad_token"])
    tokenizer = make_tokenizer(unit for held_out, unit in texts_of(text) if not held_out)
    train, held_out = tokens_of(tokenizer, text)
    return Sequences(train, tokenizer.pad_token), Sequences(held_out, tokenizer.pad_token)
'''

_PACKED = '''
def tokens_of(tokenizer: Any, text: str) -> list[Any]:
    """Each part as one stream of tokens [any], the tokenizer's separator between texts."""
    parts: tuple[list[Any], list[Any]] = ([], [])
    for held_out, unit in texts_of(text):
        tokens = tokenizer.encode([unit], longest=None)[0][0]
        if len(tokens):
            parts[held_out].extend([tokenizer.separator, tokens] if parts[held_out] else [tokens])
    return [numpy.concatenate(part).astype(numpy.int32) for part in parts]


class Sequences:
    """Batches of a stream of tokens."""

    def __init__(self, tokens: Any, pad_token: int) -> None:
        self.tokens = tokens

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // SEQUENCE_LENGTH

    def batch(self, indices: Any) -> tuple[Tensor, Tensor]:
        """Tokens and labels, int64 [sequences, length] each; a label is the token that follows."""
        starts = [int(index) * SEQUENCE_LENGTH for index in indices]
        rows = numpy.stack([self.tokens[start : start + SEQUENCE_LENGTH + 1] for start in starts])
        both = torch.from_numpy(rows.astype(numpy.int64))
        return both[:, :-1], both[:, 1:]
'''

_PADDED = '''
def tokens_of(tokenizer: Any, text: str) -> list[Any]:
    """Each part as samples, int32 [samples, SEQUENCE_LENGTH + 1]: a text is a sample, and -1 is padding."""
    parts: tuple[list[Any], list[Any]] = ([], [])
    longest = SEQUENCE_LENGTH - len(tokenizer.beginning)
    for held_out, unit in texts_of(text):
        tokens = tokenizer.encode([unit], longest=longest)[0][0]
        sample = numpy.concatenate([tokenizer.beginning, tokens]).astype(numpy.int32)[:SEQUENCE_LENGTH]
        if len(sample) > 1:  # without a label it teaches nothing
            parts[held_out].append(numpy.pad(sample, (0, SEQUENCE_LENGTH + 1 - len(sample)), constant_values=-1))
    return [numpy.stack(part) for part in parts]


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
