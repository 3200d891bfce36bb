"""Puts the columns of a row into a prompt, and finds the answer that is learned.

A format is an object with the fields of `PromptFormat` (`autotune/spec/prompt_format.py`). By it a
row becomes a text that ends with the answer, or messages, which the chat template of the tokenizer
renders (`chat_template.py`). Exported scripts contain these definitions.
"""

import string
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy

from autotune.shipped.invalid_row import InvalidRow
from autotune.shipped.token_encoding import Tokens, read_token_of

Row = Mapping[str, Any]
Format = Mapping[str, Any]


def columns_in(template: str) -> list[str]:
    """Returns the columns that a template names in braces, such as {instruction}."""
    return [name for _, name, _, _ in string.Formatter().parse(template) if name is not None]


def filled(template: str, row: Row) -> str:
    """Returns the template with the row's values in place of its columns. Raises InvalidRow."""
    text = ""
    for before, column, _, _ in string.Formatter().parse(template):
        text += before
        if column is not None:
            text += text_of(row, column)
    return text


def text_of(row: Row, column: str) -> str:
    """Returns a value as text: a number as it is written, nothing for a value that is missing.

    Raises InvalidRow for a value of another type.
    """
    value = row.get(column)
    if value is None or value != value:  # NaN is how tables of numbers have no value
        return ""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise InvalidRow(
            f"has {type(value).__name__} in {column}, and only text is put into a prompt",
            hint=f"write {column} as text, or leave such rows out",
        )
    return str(value)


def has_text(template: str, row: Row) -> bool:
    """Returns whether every column of a template has text in a row."""
    return all(text_of(row, column) for column in columns_in(template))


def prompt_of(row: Row, form: Format) -> str:
    """Returns the prompt, the shorter one for a row that lacks a column of the longer."""
    is_shorter = form["shorter_prompt"] and not has_text(form["prompt"], row)
    return filled(form["shorter_prompt" if is_shorter else "prompt"], row)


def system_of(row: Row, form: Format) -> str:
    """Returns what stands before a prompt: of the row, or of a data set without its columns."""
    columns = columns_in(form["system"])
    if columns and not any(column in row for column in columns):
        return filled(form["default_system"], row)
    return filled(form["system"], row) if has_text(form["system"], row) else ""


# -- texts -----------------------------------------------------------------------------------------


def answered_prompt(
    row: Row,
    form: Format,
    encode: Callable[[str], Sequence[int]],
    *,
    beginning: Sequence[int],
    ending: Sequence[int],
) -> Tokens:
    """Returns int64 [tokens], with -2 - token where a token is not learned.

    `encode` returns the tokens of a text without the tokenizer's own around it, which are
    `beginning` and `ending`. Of a row without an answer nothing is learned. Raises InvalidRow.
    """
    prompt = system_of(row, form) + prompt_of(row, form)
    answer = filled(form["answer"], row)
    asked = [*beginning, *encode(prompt)]
    tokens = [*asked, *encode(answer)]
    if form["is_joined"]:
        tokens = [*beginning, *encode(prompt + answer)]
    if answer and tokens[-len(ending) :] != list(ending):
        tokens += ending
    encoded = numpy.array(tokens, dtype=numpy.int64)
    is_label = numpy.full(len(tokens), bool(answer))
    if form["learned"] != "all":
        # Where both are tokenized together, a token at the seam may be of neither alone.
        pairs = enumerate(zip(asked, tokens, strict=False))
        is_label[: next((at for at, (one, other) in pairs if one != other), len(asked))] = False
    return numpy.where(is_label, encoded, read_token_of(encoded))


# -- conversations ---------------------------------------------------------------------------------


def messages_of(row: Row, form: Format) -> list[Any]:
    """Returns the messages of a row, none where it has no answer.

    Those that are not learned have `train` false. Raises InvalidRow.
    """
    system = system_of(row, form)
    before = [{"role": "system", "content": system}] if system else []
    if form["messages"]:
        messages = _with_usual_names(row.get(form["messages"]), form)
        if form["learned"] == "last":
            messages[:-1] = [{**message, "train": False} for message in messages[:-1]]
        begins_itself = messages and messages[0]["role"] == "system"
        return messages if begins_itself else [*before, *messages]
    asked = _written(form["prompt"], row)
    if asked is None:
        asked = [{"role": "user", "content": prompt_of(row, form).strip("\n")}]
    answer = _written(form["answer"], row)
    if answer is None:
        text = filled(form["answer"], row)
        answer = [{"role": "assistant", "content": text}] if text else []
    asked = [*_history(row, form), *asked]
    if form["learned"] == "last":
        asked = [{**message, "train": False} for message in asked]
    return [*before, *asked, *answer] if answer else []


def _written(template: str, row: Row) -> list[Any] | None:
    """Returns the messages of a column that a template consists of; None where it has text."""
    columns = columns_in(template)
    messages = row.get(columns[0]) if columns and template == f"{{{columns[0]}}}" else None
    return messages if isinstance(messages, list) else None


def _history(row: Row, form: Format) -> list[Any]:
    """Returns the earlier turns of a row, which are pairs of question and answer."""
    messages = []
    for pair in (row.get(form["history"]) if form["history"] else None) or []:
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise InvalidRow(
                f"has {pair!r:.60} in {form['history']}, which is no pair of question and answer",
                hint="write each earlier turn as a list of two texts",
            )
        turn = dict(zip(("user", "assistant"), pair, strict=True))
        messages += [{"role": role, "content": text_of(turn, role)} for role in turn]
    return messages


def _with_usual_names(messages: Any, form: Format) -> list[Any]:
    """Returns messages with `role` and `content`, and roles as they are usually called."""
    if not isinstance(messages, list) or not all(isinstance(one, dict) for one in messages):
        raise InvalidRow(
            f"has no list of messages in {form['messages']}",
            hint=f"write each as an object with {form['role']} and {form['content']}",
        )
    renamed = []
    for message in messages:
        others = dict(message)
        role, content = others.pop(form["role"], None), others.pop(form["content"], None)
        renamed.append({**others, "role": form["roles"].get(role, role), "content": content})
    return renamed
