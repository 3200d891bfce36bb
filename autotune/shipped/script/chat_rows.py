"""The conversations in the rows of a data set."""

from collections.abc import Iterator
from typing import Any

from autotune.shipped.chat_template import (
    ChatTemplate,
    chat_template_of,
    labelled_tokens,
    tools_of,
)
from autotune.shipped.script.tokenizer_from_file import (
    make_tokenizer,
    tokenizer_file,
    tokenizer_settings,
)
from autotune.shipped.script.written import LEARNED, TEXT, messages_in


def texts_of_rows(rows: Any) -> Iterator[Any]:
    """Yields the tokens of each conversation, with -2 - token where a token is not an answer."""
    tokenizer, template = make_tokenizer(TEXT), make_chat_template()
    for row in rows.with_format(None):
        messages = messages_in(row)
        if not messages:
            continue  # a row without an answer
        text, answers = template.with_answers(messages, tools=tools_of(row.get("tools")))
        if LEARNED == "all":
            answers = [(0, len(text))]
        tokens, offsets = tokenizer.encode_with_offsets(text)
        yield labelled_tokens(tokens, offsets, answers)


def make_chat_template() -> ChatTemplate:
    """Loads the chat template next to the tokenizer.json or in its settings."""
    file = tokenizer_file().with_name("chat_template.jinja")
    text = file.read_text(encoding="utf-8") if file.exists() else None
    template = chat_template_of(tokenizer_settings(), file_text=text)
    assert template is not None, "the tokenizer has no chat template"
    return template
