"""Tokenizers: bytes, a BPE trained on the data, or one from a file, a folder or the hub.

All but the first use the `tokenizers` library: https://huggingface.co/docs/tokenizers
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Protocol

import tokenizers

from autotune.data import hub
from autotune.errors import InvalidInput, first_line_of
from autotune.shipped.byte_tokenizer import ByteTokenizer
from autotune.shipped.chat_template import ChatTemplate, chat_template_of
from autotune.shipped.subword_tokenizer import SubwordTokenizer
from autotune.shipped.token_encoding import Tokens
from autotune.spec.user_files import LARGEST_TOKENIZER_BYTES, read_file, read_json
from autotune.spec.user_paths import expanded, is_plain_file, path_exists
from autotune.spec.workload import Workload

FILE_NAME = "tokenizer.json"
SETTINGS_FILE = "tokenizer_config.json"
TEMPLATE_FILE = "chat_template.jinja"

_LARGEST_SETTINGS_BYTES = 16 * 2**20
"""Gemma 3 describes its 6,414 special tokens in 1.2 MB."""
_LARGEST_TEMPLATE_BYTES = 2**20


class Tokenizer(Protocol):
    """What the preparation of a text needs of a tokenizer."""

    vocab_size: int
    """One more than the largest token."""
    beginning: Tokens
    """Tokens before a padded sample."""
    own_beginning: Tokens
    """Those that it puts before a text itself."""
    separator: Tokens
    """Tokens between two packed passages."""
    separator_bytes: int
    """Number of bytes of the text that the separator represents."""
    pad_token: int

    def encode(self, texts: Sequence[bytes], *, longest: int | None) -> list[tuple[Tokens, int]]:
        """Return, for each UTF-8 text, its first `longest` tokens and the number of their bytes."""


class LoadedTokenizer(SubwordTokenizer):
    """A tokenizer that somebody else has made; `source` is how messages name it."""

    def __init__(self, tokenizer: Any, *, source: str, settings: dict[str, Any]) -> None:
        super().__init__(tokenizer, settings=settings)
        self._source = source

    def encode(self, texts: Sequence[bytes], *, longest: int | None) -> list[tuple[Tokens, int]]:
        """Returns tokens as `Tokenizer` says. Raises InvalidInput for a text that has none."""
        with self._without_tokens():
            return super().encode(texts, longest=longest)

    def encode_with_offsets(self, text: str) -> tuple[Tokens, list[tuple[int, int]]]:
        """Returns the tokens of a text and where they are. Raises InvalidInput if it has none."""
        with self._without_tokens():
            return super().encode_with_offsets(text)

    def _without_tokens(self) -> AbstractContextManager[None]:
        return _translated_errors(
            f"tokenizer {self._source!r} has no tokens for a text",
            hint="use the tokenizer.json of the model, whole and unchanged",
        )


def load_tokenizer(workload: Workload) -> Tokenizer:
    """Returns the tokenizer that the workload names, except `bpe`, which has to be trained.

    Raises InvalidInput if it cannot be read or has too many tokens for the vocabulary.
    """
    if workload.tokenizer == "bytes":
        return ByteTokenizer()
    file = _file_of(workload.tokenizer)
    text = read_file(file, most_bytes=LARGEST_TOKENIZER_BYTES)
    tokenizer = parse_tokenizer(text, settings=_settings_next_to(file), source=str(file))
    if tokenizer.vocab_size > workload.vocab_size:
        raise InvalidInput(
            f"tokenizer {workload.tokenizer!r} has {tokenizer.vocab_size} tokens, "
            f"more than the {workload.vocab_size} of the model's vocabulary",
            hint=f"use --vocab-size {tokenizer.vocab_size}, or the tokenizer of the model",
        )
    return tokenizer


def _settings_next_to(file: Path) -> Any:
    settings_file = file.with_name(SETTINGS_FILE)
    if not settings_file.exists():
        return {}
    return read_json(settings_file, most_bytes=_LARGEST_SETTINGS_BYTES)


def load_chat_template(name: str) -> ChatTemplate | None:
    """Returns the chat template of a tokenizer that is not built in, or None if it has none.

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
    """Returns the tokenizer of a tokenizer.json and the value in its tokenizer_config.json.

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
        raise InvalidInput(f"{problem}: {first_line_of(error)}", hint=hint) from error


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
