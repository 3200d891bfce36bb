"""The conversation that the columns of a row are made into."""

from typing import Any

from autotune.shipped.chat_template import Message, conversation_of
from autotune.shipped.prompts import messages_of
from autotune.shipped.script.written import PROMPT_FORMAT


def messages_in(row: Any) -> list[Message]:
    messages = messages_of(row, PROMPT_FORMAT)
    return conversation_of(messages) if messages else []
