"""Conversations as training data: tokens by the tokenizer's chat template, labels on the answers.

A row has a list of messages, {"role": "user", "content": "text"}, as in trl and on the hub.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from typing import Any

from autotune.data.rows import values
from autotune.data.tokenizer import load_chat_template, load_tokenizer
from autotune.errors import InvalidDataset, InvalidInput
from autotune.shipped.chat_template import (
    ChatTemplate,
    InvalidConversation,
    conversation_of,
    labelled_tokens,
    tools_of,
)
from autotune.shipped.subword_tokenizer import SubwordTokenizer
from autotune.shipped.token_encoding import Tokens
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
    column: str
    beside: tuple[str, ...]
    """Those of `TOOLS` and `SYSTEM` that the dataset has."""
    workload: Workload

    def __iter__(self) -> Iterator[Tokens]:
        rows = values(self.rows, [self.column, *self.beside], dataset=self.workload.dataset)
        for number, (conversation, *others) in enumerate(rows, start=1):
            beside = dict(zip(self.beside, others, strict=True))
            try:
                yield self._sample(conversation, beside)
            except InvalidConversation as error:
                raise InvalidDataset(
                    f"row {number} of dataset {self.workload.dataset!r} {error.message}",
                    hint=error.hint,
                ) from error

    @property
    def pad_token(self) -> int:
        return self._tokenizer.pad_token

    def check(self) -> None:
        """Raise InvalidInput if the workload's tokenizer cannot tokenize conversations."""
        _ = self._template

    def _sample(self, conversation: Any, beside: Mapping[str, Any]) -> Tokens:
        messages = conversation_of(conversation, system=beside.get(SYSTEM))
        tools = tools_of(beside.get(TOOLS))
        text, answers = self._template.with_answers(messages, tools=tools)
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
