"""The conversation in one column of a row."""

from typing import Any

from autotune.shipped.chat_template import Message, conversation_of
from autotune.shipped.script.written import CHAT_COLUMN


def messages_in(row: Any) -> list[Message]:
    return conversation_of(row[CHAT_COLUMN], system=row.get("system"))
