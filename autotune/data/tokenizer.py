"""Tokenizers: bytes, a BPE trained on the data, or one from a file, a folder or the hub.

All but the first use the `tokenizers` library: https://huggingface.co/docs/tokenizers
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Protocol

import numpy
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from autotune.data import hub
from autotune.data.chat_template import ChatTemplate, chat_template_of
from autotune.data.token_file import Tokens
from autotune.errors import InvalidInput
from autotune.spec.user_files import LARGEST_TOKENIZER_BYTES, read_file, read_json
from autotune.spec.user_paths import expanded, is_plain_file, path_exists
from autotune.spec.workload import BYTE_VOCABULARY, Workload

FILE_NAME = "tokenizer.json"
SETTINGS_FILE = "tokenizer_config.json"
TEMPLATE_FILE = "chat_template.jinja"
END_OF_TEXT = "<|endoftext|>"
PADDING = "<|pad|>"

_LARGEST_SETTINGS_BYTES = 16 * 2**20
"""Gemma 3 describes its 6,414 special tokens in 1.2 MB."""
_LARGEST_TEMPLATE_BYTES = 2**20
_LONG_WORD = re.compile(r"\w{256,}")
"""Removed before a BPE is trained: it learns nothing from such words, but stores each of them."""
_NAMES = {
    "bos": ("<|begin_of_text|>", "<s>", "<bos>", END_OF_TEXT),
    "eos": (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>"),
    "pad": (PADDING, "<pad>", "[PAD]", "<|finetune_right_pad_id|>"),
}
"""Usual names of the token of each role, used without a tokenizer_config.json."""


class Tokenizer(Protocol):
    """What the preparation of a text needs of a tokenizer."""

    vocab_size: int
    """One more than the largest token."""
    beginning: Tokens
    """Tokens before a padded sample."""
    separator: Tokens
    """Tokens between two packed passages."""
    separator_bytes: int
    """Number of bytes of the text that the separator represents."""
    pad_token: int

    def encode(self, texts: Sequence[bytes], *, longest: int | None) -> list[tuple[Tokens, int]]:
        """Return, for each UTF-8 text, its first `longest` tokens and the number of their bytes."""


class ByteTokenizer:
    """Each byte is a token; a blank line separates passages."""

    vocab_size = BYTE_VOCABULARY
    beginning: Tokens = numpy.zeros(0, dtype=numpy.uint8)
    separator: Tokens = numpy.frombuffer(b"\n\n", dtype=numpy.uint8)
    separator_bytes = len(separator)
    pad_token = 0

    def encode(self, texts: Sequence[bytes], *, longest: int | None) -> list[tuple[Tokens, int]]:
        arrays = [numpy.frombuffer(text, dtype=numpy.uint8)[:longest] for text in texts]
        return [(array, len(array)) for array in arrays]


class SubwordTokenizer:
    """A tokenizer of the `tokenizers` library."""

    separator_bytes = 0

    def __init__(self, tokenizer: Any, *, settings: dict[str, Any] | None = None) -> None:
        self._tokenizer = tokenizer
        tokenizer.no_padding()
        tokenizer.no_truncation()
        self.vocab_size = 1 + max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
        roles = {role: _token_of(role, tokenizer, settings or {}) for role in _NAMES}
        self.beginning = _array([] if roles["bos"] is None else [roles["bos"]])
        self.separator = _array([] if roles["eos"] is None else [roles["eos"]])
        self.pad_token = roles["pad"] or 0

    def encode(self, texts: Sequence[bytes], *, longest: int | None) -> list[tuple[Tokens, int]]:
        # numpy arrays, because lists of Python integers take ten times the memory of the text.
        decoded = [text.decode() for text in texts]
        encodings = self._tokenizer.encode_batch(decoded, add_special_tokens=False)
        return [
            (_array(encoding.ids[:longest]), _bytes_of(text, encoding, longest))
            for text, encoding in zip(decoded, encodings, strict=True)
        ]

    def encode_with_offsets(self, text: str) -> tuple[Tokens, list[tuple[int, int]]]:
        """Return the tokens of a text, and from which to which character each goes."""
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        return _array(encoding.ids), encoding.offsets


class LoadedTokenizer(SubwordTokenizer):
    """A tokenizer that somebody else has made; `source` is how messages name it."""

    def __init__(self, tokenizer: Any, *, source: str, settings: dict[str, Any]) -> None:
        super().__init__(tokenizer, settings=settings)
        self._source = source

    def encode(self, texts: Sequence[bytes], *, longest: int | None) -> list[tuple[Tokens, int]]:
        """Return tokens as `Tokenizer` says. Raises InvalidInput for a text that has none."""
        with self._without_tokens():
            return super().encode(texts, longest=longest)

    def encode_with_offsets(self, text: str) -> tuple[Tokens, list[tuple[int, int]]]:
        """Return the tokens of a text and where they are. Raises InvalidInput if it has none."""
        with self._without_tokens():
            return super().encode_with_offsets(text)

    def _without_tokens(self) -> AbstractContextManager[None]:
        return _translated_errors(
            f"tokenizer {self._source!r} has no tokens for a text",
            hint="use the tokenizer.json of the model, whole and unchanged",
        )


def _bytes_of(text: str, encoding: Any, longest: int | None) -> int:
    """Return how many bytes of `text` its first `longest` tokens represent."""
    if longest is None or len(encoding.ids) <= longest:
        return len(text.encode())
    end = encoding.offsets[longest - 1][1] if longest else 0
    return len(text[:end].encode())


def _array(tokens: list[int]) -> Tokens:
    return numpy.array(tokens, dtype=numpy.uint32)


def _token_of(role: str, tokenizer: Any, settings: dict[str, Any]) -> int | None:
    """Return the token of a role, by its name in `settings` or else by its usual names."""
    names: list[Any] = list(_NAMES[role])
    if f"{role}_token" in settings:
        setting = settings[f"{role}_token"]
        names = [setting.get("content") if isinstance(setting, dict) else setting]
    for name in names:
        token: int | None = tokenizer.token_to_id(name) if isinstance(name, str) else None
        if token is not None:
            return token
    return None


def train_bpe(texts: Iterable[bytes], *, vocab_size: int, file: Path) -> SubwordTokenizer:
    """Train a byte-level BPE of at most `vocab_size` tokens and store it in `file`.

    Equal texts give equal tokenizers.
    """
    tokenizer: Any = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT, PADDING],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((_LONG_WORD.sub("", text.decode()) for text in texts), trainer)
    tokenizer.save(str(file))
    return SubwordTokenizer(tokenizer)


def load_tokenizer(workload: Workload) -> Tokenizer:
    """Return the tokenizer that the workload names, except `bpe`, which has to be trained.

    Raises InvalidInput if it cannot be read or has too many tokens for the vocabulary.
    """
    if workload.tokenizer == "bytes":
        return ByteTokenizer()
    tokenizer = _load(workload.tokenizer)
    if tokenizer.vocab_size > workload.vocab_size:
        raise InvalidInput(
            f"tokenizer {workload.tokenizer!r} has {tokenizer.vocab_size} tokens, "
            f"more than the {workload.vocab_size} of the model's vocabulary",
            hint=f"use --vocab-size {tokenizer.vocab_size}, or the tokenizer of the model",
        )
    return tokenizer


def _load(name: str) -> SubwordTokenizer:
    file = _file_of(name)
    text = read_file(file, most_bytes=LARGEST_TOKENIZER_BYTES)
    return parse_tokenizer(text, settings=_settings_next_to(file), source=str(file))


def _settings_next_to(file: Path) -> Any:
    settings_file = file.with_name(SETTINGS_FILE)
    if not settings_file.exists():
        return {}
    return read_json(settings_file, most_bytes=_LARGEST_SETTINGS_BYTES)


def load_chat_template(name: str) -> ChatTemplate | None:
    """Return the chat template of a tokenizer that is not built in, or None if it has none.

    Raises InvalidInput if the tokenizer or the template cannot be read.
    """
    file = _file_of(name)
    settings = _settings_next_to(file)
    template_file: Path | None = file.with_name(TEMPLATE_FILE)
    if not path_exists(name):
        template_file = hub.template_file(name)
    text = None
    if template_file is not None and template_file.exists():
        try:
            text = read_file(template_file, most_bytes=_LARGEST_TEMPLATE_BYTES).decode("utf-8")
        except UnicodeDecodeError as error:
            raise InvalidInput(
                f"chat template {str(template_file)!r} is not UTF-8: {error.reason}",
                hint="save it as UTF-8",
            ) from None
    return chat_template_of(settings if isinstance(settings, dict) else {}, file_text=text)


def parse_tokenizer(text: bytes, *, settings: Any, source: str) -> SubwordTokenizer:
    """Return the tokenizer of a tokenizer.json and the value in its tokenizer_config.json.

    `source` is how messages name it. Raises InvalidInput.
    """
    with _translated_errors(
        f"tokenizer {source!r} cannot be read", hint="check that the file is complete"
    ):
        # Not from_file, which rejects paths that are not UTF-8, and whose errors do not distinguish
        # reading from parsing.
        tokenizer = tokenizers.Tokenizer.from_str(text.decode("utf-8"))
        return LoadedTokenizer(
            tokenizer, source=source, settings=settings if isinstance(settings, dict) else {}
        )


@contextmanager
def _translated_errors(problem: str, *, hint: str) -> Iterator[None]:
    """Raise InvalidInput, `problem` with the reason, for whatever the library raises."""
    try:
        yield
    except BaseException as error:  # the library raises Exception itself, or panics
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise InvalidInput(f"{problem}: {reason}", hint=hint) from error


def _file_of(name: str) -> Path:
    path = expanded(name)
    is_folder = path_exists(name) and path.is_dir()
    file = path / FILE_NAME if is_folder else path
    if is_plain_file(file):
        return file
    if is_folder:
        raise InvalidInput(
            f"folder {name!r} has no {FILE_NAME}",
            hint="transformers writes one: "
            f"AutoTokenizer.from_pretrained({name!r}).save_pretrained({name!r})",
        )
    if not name or path_exists(name) or hub.is_local_name(name, suffixes=(".json",)):
        raise InvalidInput(
            f"there is no tokenizer {name!r}", hint="check --tokenizer: bytes, bpe, model or a path"
        )
    return hub.tokenizer_file(name)
