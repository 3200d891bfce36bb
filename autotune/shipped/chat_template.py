"""Render a conversation by the chat template of a tokenizer, and find its answers.

A chat template is a Jinja program next to the tokenizer. transformers runs it in a sandbox:
https://huggingface.co/docs/transformers/chat_templating. What the assistant says is marked in some
templates by `{% generation %}`; with the others, the text up to an answer is compared with the text
including it. Exported scripts contain these definitions.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy

from autotune.shipped.invalid_row import InvalidRow
from autotune.shipped.token_encoding import Tokens, read_token_of

ROLES = ("system", "developer", "user", "assistant", "tool")
_FIRST_ROLES = ("system", "developer")
ROLES_OF_SHAREGPT = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
}

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
MARK_ANSWERS = (
    "mark the answers in the template by {% generation %} and {% endgeneration %}, as the "
    "templates in trl.get_training_chat_template do"
)

_PROBE = "<a place for the answer>"

Message = dict[str, Any]


class InvalidConversation(InvalidRow):
    """A row that is not a conversation to learn from."""


# -- messages --------------------------------------------------------------------------------------


def conversation_of(row: Any, *, system: Any = None) -> list[Message]:
    """Returns the messages of a row as {"role", "content", ...}.

    Messages of ShareGPT have `from` and `value` instead. `system` is the row's text for a system
    message, which some files have in a column of its own; it counts where the messages begin
    without one. Raises InvalidConversation.
    """
    if isinstance(row, dict) and all(isinstance(values, list) for values in row.values()):
        names = list(row)  # an object of lists, as `datasets` returns some lists of objects
        row = [dict(zip(names, values, strict=True)) for values in zip(*row.values(), strict=False)]
    if not isinstance(row, list) or not all(isinstance(message, dict) for message in row):
        raise InvalidConversation(
            "is not a list of messages", hint='write each as {"role": "user", "content": "text"}'
        )
    if not row:
        raise InvalidConversation("has no messages", hint="remove the rows without messages")
    messages = [_message_of(message) for message in row]
    if all(message["role"] != "assistant" for message in messages):
        raise InvalidConversation(
            "has no message of the assistant, which is what is learned",
            hint="remove such rows, or check the roles",
        )
    if isinstance(system, str) and system.strip() and messages[0]["role"] not in _FIRST_ROLES:
        messages.insert(0, {"role": "system", "content": system})
    return messages


def is_learned(message: Message) -> bool:
    """Returns whether a message is an answer to learn from.

    Files of OpenAI's fine-tuning exclude an answer by `weight` 0, those of axolotl by `train`
    false, those of ms-swift by `loss` false. Raises InvalidConversation for a weight between 0
    and 1.
    """
    weight = message.get("weight", 1)
    if weight not in (0, 1):
        raise InvalidConversation(
            f"has an answer of weight {weight!r}, and an answer is learned or not",
            hint="use 0 or 1",
        )
    is_excluded = message.get("train") is False or message.get("loss") is False
    return message["role"] == "assistant" and weight == 1 and not is_excluded


def _message_of(given: Message) -> Message:
    # Files of columns have every key in every message, empty where it is not used.
    message = {name: value for name, value in given.items() if value is not None}
    role = message.pop("from", None)
    role = message.pop("role", role)
    if isinstance(role, str):
        role = ROLES_OF_SHAREGPT.get(role.lower(), role.lower())
    if role not in ROLES:
        raise InvalidConversation(
            f"has a message of role {role!r}", hint=f"use one of {', '.join(ROLES)}"
        )
    content = message.pop("value", None)
    content = message.pop("content", content)
    if content is None and role == "assistant" and message.get("tool_calls"):
        return {"role": role, **message}
    return {"role": role, "content": _text_of(content), **message}


def _text_of(content: Any) -> str:
    """Returns the content of a message, which may be a list of parts, as text."""
    if isinstance(content, str):
        return content
    texts = []
    for part in content if isinstance(content, list) else [content]:
        kind = part.get("type", "text") if isinstance(part, dict) else type(part).__name__
        text = part.get("text") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(text, str):
            what = "no content" if content is None else f"content of type {kind!r}"
            raise InvalidConversation(
                f"has a message with {what}, and only text is trained on",
                hint="leave such rows out, or keep their text only",
            )
        texts.append(text)
    return "".join(texts)


def tools_of(value: Any) -> list[Any] | None:
    """Returns the tools of a row, which may be written as JSON. Raises InvalidConversation."""
    tools = value
    if isinstance(value, str):
        try:
            tools = json.loads(value) if value.strip() else None
        except (ValueError, RecursionError):
            tools = value
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise InvalidConversation(
            "has tools that are not a list of JSON schemas",
            hint="write them as the chat template of the model expects them",
        )
    return tools


# -- the template ----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ChatTemplate:
    """A chat template, and the special tokens of its tokenizer by their names in it."""

    text: str
    special_tokens: Mapping[str, str]

    @property
    def marks_answers(self) -> bool:
        """Whether the template has {% generation %} around answers."""
        return _GENERATION.search(self.text) is not None

    def render(
        self, messages: Sequence[Message], *, tools: list[Any] | None, up_to_answer: bool = False
    ) -> str:
        """Returns the conversation as text, `up_to_answer` with the start of the next answer."""
        return self._rendered(messages, tools, add_generation_prompt=up_to_answer)[0]

    def with_answers(
        self, messages: Sequence[Message], *, tools: list[Any] | None
    ) -> tuple[str, list[tuple[int, int]]]:
        """Returns the conversation as text, and from where to where its answers are.

        An answer includes what the template puts after it, such as the token that ends the turn.
        Raises InvalidConversation.
        """
        if self.marks_answers:
            rendered, marked = self._rendered(messages, tools, return_assistant_tokens_mask=True)
            answers = _learned_of(marked, messages)
        else:
            rendered = self.render(messages, tools=tools)
            answers = [
                self._answer_at(index, messages, tools, rendered)
                for index, message in enumerate(messages)
                if is_learned(message)
            ]
        if any(map(is_learned, messages)):
            _check_learned("".join(rendered[start:end] for start, end in answers), messages)
        return rendered, answers

    def _answer_at(
        self, index: int, messages: Sequence[Message], tools: list[Any] | None, rendered: str
    ) -> tuple[int, int]:
        """Returns where in `rendered` the answer messages[index] is, in a text without marks."""
        has_prompt = index > 0 and "add_generation_prompt" in self.text
        probe = [*messages[:index], {**messages[index], "content": _PROBE}]
        before, _, after = self.render(probe, tools=tools).partition(_PROBE)
        if has_prompt:
            before = self.render(messages[:index], tools=tools, up_to_answer=True)
        with_answer = self.render(messages[: index + 1], tools=tools)
        start, end = len(before), len(with_answer)
        if start < end and rendered.startswith(before) and rendered.startswith(with_answer):
            return start, end
        # Some templates render the last answer differently from the earlier ones, with room for
        # thoughts before it or with the end of the text after it. The answer itself must be there.
        start = _common_length(before, rendered)
        content = str(messages[index].get("content", ""))
        end_of_text = self.special_tokens.get("eos_token", "")
        for text in (content, content.strip()):
            for ending in (after, after.removesuffix(end_of_text)):
                if text.strip() and rendered.startswith(text + ending, start):
                    return start, start + len(text + ending)
        raise InvalidConversation(
            "has an answer that cannot be told from the rest: the chat template renders it "
            "differently when it is not the end of the conversation",
            hint=MARK_ANSWERS,
        )

    def _rendered(
        self, messages: Sequence[Message], tools: list[Any] | None, **options: bool
    ) -> tuple[str, list[tuple[int, int]]]:
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            texts, answers = render_jinja_template(
                [list(messages)],
                tools=tools,
                chat_template=self.text,
                **options,
                **self.special_tokens,
            )
        except Exception as error:  # whatever a program of somebody else's raises
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise InvalidConversation(
                f"is not rendered by the chat template: {reason}",
                hint="write the conversation as the template expects it, or correct the template",
            ) from error
        return texts[0], answers[0] if answers else []


def _common_length(one: str, other: str) -> int:
    """Returns how many characters two texts have in common at their beginning."""
    for index, (character, other_character) in enumerate(zip(one, other, strict=False)):
        if character != other_character:
            return index
    return min(len(one), len(other))


def _learned_of(
    marked: list[tuple[int, int]], messages: Sequence[Message]
) -> list[tuple[int, int]]:
    """Returns those of the marked answers that are learned."""
    answers = [message for message in messages if message["role"] == "assistant"]
    if all(map(is_learned, answers)):
        return marked
    if len(marked) != len(answers):
        raise InvalidConversation(
            "has an answer that is not learned, and the chat template marks "
            f"{len(marked)} parts for {len(answers)} answers",
            hint="mark each answer once by {% generation %}, or remove the marks",
        )
    pairs = zip(marked, answers, strict=True)
    return [part for part, answer in pairs if is_learned(answer)]


def _check_learned(answers: str, messages: Sequence[Message]) -> None:
    """Raise InvalidConversation if `answers`, the text of the labels, has none of the answers."""
    last_words = set()
    for message in messages:
        if is_learned(message):
            last_words.update(str(message.get("content", "")).split()[-1:])
    has_one = any(word in answers for word in last_words)
    if not answers or (last_words and not has_one):
        raise InvalidConversation(
            "has no answer in what the chat template renders or marks as one",
            hint="use a template for messages whose content is text, and put {% generation %} "
            "around the content of the assistant",
        )


def chat_template_of(settings: Mapping[str, Any], *, file_text: str | None) -> ChatTemplate | None:
    """Returns the template of a tokenizer, or None if it has none.

    `file_text` is the text of its chat_template.jinja, which comes before the template in
    `settings`, the content of its tokenizer_config.json: a text or a list of named ones.
    """
    template = settings.get("chat_template")
    if isinstance(template, list):
        named = {one.get("name"): one.get("template") for one in template if isinstance(one, dict)}
        template = named.get("default")
    if file_text is not None:
        template = file_text
    if not isinstance(template, str):
        return None
    tokens = {}
    for name, token in settings.items():
        text = token.get("content") if isinstance(token, dict) else token
        if name.endswith("_token") and isinstance(text, str):
            tokens[name] = text
    return ChatTemplate(text=template, special_tokens=tokens)


# -- tokens ----------------------------------------------------------------------------------------


def labelled_tokens(
    tokens: Tokens, offsets: Sequence[tuple[int, int]], answers: Sequence[tuple[int, int]]
) -> Tokens:
    """Returns int64 [tokens] in which only the tokens of the answers are labels.

    The others are encoded as in `token_file.py`. `offsets` are the characters from which to which
    each token goes. A token that is partly in an answer belongs to it.
    """
    begins = numpy.array([begin for begin, _ in offsets], dtype=numpy.int64)
    ends = numpy.array([end for _, end in offsets], dtype=numpy.int64)
    is_label = numpy.zeros(len(tokens), dtype=bool)
    for start, end in answers:
        # Whole ranges, because a token of spaces may have no characters of its own.
        first = int(numpy.searchsorted(ends, start, side="right"))
        last = int(numpy.searchsorted(begins, end, side="left"))
        is_label[first:last] = True
    tokens = tokens.astype(numpy.int64)
    return numpy.where(is_label, tokens, read_token_of(tokens))
