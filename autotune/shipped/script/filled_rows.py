"""Rows that are put into their prompts, for a trainer that cannot do it itself."""

import json
from typing import Any

from autotune.shipped.prompts import filled, messages_of, prompt_of, system_of
from autotune.shipped.script.written import PROMPT_FORMAT


def write_rows(rows: Any, file: str) -> None:
    """Writes each row as a line of JSON: prompt and completion, or messages."""
    with open(file, "w", encoding="utf-8") as lines:
        for row in rows:
            made = filled_row(row)
            if made is not None:
                lines.write(json.dumps(made, ensure_ascii=False) + "\n")


def filled_row(row: Any) -> dict[str, Any] | None:
    """Returns what a row becomes, None for one without an answer."""
    if PROMPT_FORMAT["is_chat"] or PROMPT_FORMAT["messages"]:
        messages = messages_of(row, PROMPT_FORMAT)
        return {"messages": messages} if messages else None
    prompt = system_of(row, PROMPT_FORMAT) + prompt_of(row, PROMPT_FORMAT)
    answer = filled(PROMPT_FORMAT["answer"], row)
    return {"prompt": prompt, "completion": answer} if answer else None
