"""Conversations as training data: tokens by the tokenizer's chat template, labels on the answers.

A row has a list of messages, {"role": "user", "content": "text"}, as in trl and on the hub, or
columns that a format makes messages of.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from typing import Any

from autotune.data.prompts import invalid_row
from autotune.data.rows import values
from autotune.data.tokenizer import load_chat_template, load_tokenizer
from autotune.errors import InvalidInput
from autotune.shipped.chat_template import (
    ChatTemplate,
    Message,
    conversation_of,
    labelled_tokens,
    tools_of,
)
from autotune.shipped.invalid_row import InvalidRow
from autotune.shipped.prompts import messages_of
from autotune.shipped.subword_tokenizer import SubwordTokenizer
from autotune.shipped.token_encoding import Tokens
from autotune.spec.prompt_format import PromptFormat
from autotune.spec.workload import SHAREGPT_COLUMN, Workload

CHAT_COLUMNS = ("messages", SHAREGPT_COLUMN)
"""Names of the column of conversations, of trl and of ShareGPT."""
TOOLS, SYSTEM = "tools", "system"
"""Columns beside the conversations: what the assistant may call, and the system's message."""


@dataclass(frozen=True, kw_only=True)
class ChatColumn:
    """The conversations of a dataset as samples; can be iterated several times.

    A sample is int64 [tokens], encoded as in `token_file.py`: only answers are labels.
    """

    rows: Any
    column: str | None
    """That of the messages; None where `format` makes them of several."""
    beside: tuple[str, ...]
    """Other columns that are read: those of `TOOLS` and `SYSTEM` that the dataset has, or of
    `format`."""
    format: PromptFormat | None = None
    workload: Workload

    def __iter__(self) -> Iterator[Tokens]:
        columns = [*([] if self.column is None else [self.column]), *self.beside]
        rows = values(self.rows, columns, dataset=self.workload.dataset)
        for number, row in enumerate(rows, start=1):
            named = dict(zip(columns, row, strict=True))
            try:
                messages = self._messages(named)
                if messages is not None:
                    yield self._sample(messages, tools_of(named.get(TOOLS)))
            except InvalidRow as error:
                raise invalid_row(error, number, self.workload) from error

    @property
    def pad_token(self) -> int:
        return self._tokenizer.pad_token

    def check(self) -> None:
        """Raise InvalidInput if the workload's tokenizer cannot tokenize conversations."""
        _ = self._template

    def _messages(self, row: Mapping[str, Any]) -> list[Message] | None:
        """Returns the messages of a row, None for one whose columns have no answer."""
        if self.column is not None:
            return conversation_of(row[self.column], system=row.get(SYSTEM))
        assert self.format is not None
        messages = messages_of(row, self.format.to_dict())
        return conversation_of(messages) if messages else None

    def _sample(self, messages: list[Message], tools: list[Any] | None) -> Tokens:
        text, answers = self._template.with_answers(messages, tools=tools)
        if self.format is not None and self.format.learned == "all":
            answers = [(0, len(text))]
        tokens, offsets = self._tokenizer.encode_with_offsets(text)
        return labelled_tokens(tokens, offsets, answers)

    @cached_property
    def _tokenizer(self) -> SubwordTokenizer:
        tokenizer = load_tokenizer(self.workload)
        assert isinstance(tokenizer, SubwordTokenizer)
        return tokenizer

    @cached_property
    def _template(self) -> ChatTemplate:
        name, dataset = self.workload.tokenizer, self.workload.dataset
        if name in ("bytes", "bpe"):
            raise InvalidInput(
                f"dataset {dataset!r} has conversations, and tokenizer {name!r} has no chat "
                "template to render them",
                hint="use --tokenizer model or the folder of a tokenizer with a chat template, or "
                "name a column of text with --text-column",
            )
        template = load_chat_template(name)
        if template is None:
            raise InvalidInput(
                f"tokenizer {name!r} has no chat template for the conversations of dataset "
                f"{dataset!r}",
                hint="put a chat_template.jinja next to its tokenizer.json, or use the tokenizer "
                "of a chat model",
            )
        if find_spec("transformers") is None or find_spec("jinja2") is None:
            raise InvalidInput(
                f"the chat template of tokenizer {name!r} needs transformers and jinja2",
                hint="pip install 'autotune[huggingface]'",
            )
        return template
