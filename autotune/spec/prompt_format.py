"""How the columns of a row become one text, or one conversation, of which the answer is learned.

`prompt_formats.toml` has the formats that have a name; any other is a text with the columns in
braces, whose last one is the answer, or an object with the fields of `PromptFormat`.
`shipped/prompts.py` reads rows by it, in trials and in exported scripts.
"""

import dataclasses
import json
import string
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import Any, Literal

from autotune.errors import InvalidInput, suggestion
from autotune.spec.schema import Schema

Learned = Literal["answers", "last", "all"]


@dataclass(frozen=True, kw_only=True)
class PromptFormat(Schema):
    """How to read a row. A template is a text with columns in braces, such as {instruction}."""

    prompt: str = ""
    """The template of what is asked, for a row that has text in all of its columns."""
    shorter_prompt: str = ""
    """The template for the other rows; empty: `prompt` with nothing for what they lack."""
    answer: str = ""
    """The template of what is learned."""
    system: str = ""
    """The template of what stands before a prompt, where a row has text in its columns."""
    default_system: str = ""
    """What stands there where the data set has none of these columns."""
    is_chat: bool = False
    """Whether prompt and answer are messages, which the tokenizer's chat template renders."""
    history: str = ""
    """Of messages: the column of earlier pairs of question and answer."""
    messages: str = ""
    """The column of messages, whose keys and roles have other names than usual, in place of prompt
    and answer."""
    role: str = "role"
    content: str = "content"
    roles: Mapping[str, str] = field(default_factory=dict)
    """{role in the data: the usual one}, of such messages."""
    learned: Learned = "answers"
    """The answers, of a conversation only the last one, or all tokens."""
    is_joined: bool = False
    """Whether prompt and answer are tokenized as one text, and what differs from the tokens of the
    prompt is learned. Otherwise one after the other, so that no token is partly in both."""

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns without which a data set cannot be read by this format."""
        always = columns_of(self.shorter_prompt or self.prompt)
        others = [name for name in (self.history, self.messages) if name]
        return tuple(dict.fromkeys([*always, *columns_of(self.answer), *others]))

    @property
    def optional_columns(self) -> tuple[str, ...]:
        """The columns that are read where a data set has them."""
        named = [*columns_of(self.prompt), *columns_of(self.system)]
        return tuple(name for name in dict.fromkeys(named) if name not in self.columns)

    @property
    def makes_messages(self) -> bool:
        """Whether a row becomes messages, and not a text."""
        return self.is_chat or bool(self.messages)

    @property
    def bare_columns(self) -> dict[str, str] | None:
        """{prompt, input, answer, system, history: column} of a format without words of its own.

        None for another one. A prompt and its input have a line break between them; a text has
        neither an input nor a system.
        """
        asked, systems = columns_of(self.prompt), columns_of(self.system)
        columns = {
            **dict(zip(("prompt", "input"), asked, strict=False)),
            **dict(zip(("answer",), columns_of(self.answer), strict=False)),
            **dict(zip(("system",), systems, strict=False)),
            **({"history": self.history} if self.history else {}),
        }
        templates = {name: f"{{{column}}}" for name, column in columns.items()}
        bare = dataclasses.replace(
            self,
            prompt="\n".join(templates[name] for name in ("prompt", "input") if name in templates),
            shorter_prompt=templates["prompt"] if len(asked) == 2 else "",
            answer=templates.get("answer", ""),
            system=templates.get("system", ""),
            default_system="",
            messages="",
        )
        is_possible = self.is_chat or not (systems or len(asked) > 1)
        return columns if self == bare and asked and is_possible else None

    @property
    def name(self) -> str:
        """Its name in the table, whichever part is learned; empty for a format without one."""
        usual = [named(name) for name in prompt_formats()]
        for name, known in zip(prompt_formats(), usual, strict=True):
            if dataclasses.replace(self, learned=known.learned) == known:
                return name
        return ""

    def describe(self) -> str:
        """Returns how rows are read, as the end of a sentence."""
        if self.messages:
            return f"messages in {self.messages}, by {self.role} and {self.content}"
        made = "messages of the chat template" if self.is_chat else "a prompt and its answer"
        by = f" ({self.name})" if self.name else ""
        return f"{', '.join((*self.columns, *self.optional_columns))} as {made}{by}"

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


_HINT = (
    "write the columns in braces, the answer last: '{question}\\n{answer}', or name a format: see "
    "autotune search --help"
)


def columns_of(template: str) -> list[str]:
    """Returns the columns in a template. Raises InvalidInput for one that cannot be filled in."""
    columns = []
    try:
        for _, column, style, conversion in string.Formatter().parse(template):
            if column == "" or style or conversion:
                raise ValueError("what is in braces is the name of a column alone")
            if column is not None:
                columns.append(column)
    except ValueError as error:
        raise InvalidInput(f"{template!r:.80} is no prompt: {error}", hint=_HINT) from None
    return columns


@cache
def prompt_formats() -> Mapping[str, Mapping[str, Any]]:
    """Returns {name: facts of a format} of `prompt_formats.toml`."""
    text = resources.files(__package__).joinpath("prompt_formats.toml").read_text("utf-8")
    facts: dict[str, dict[str, Any]] = tomllib.loads(text)
    return {name: {**facts.get(of.get("like", ""), {}), **of} for name, of in facts.items()}


@cache
def named(name: str) -> PromptFormat:
    """Returns the format of a name in the table."""
    facts = prompt_formats()[name]
    fields = {one.name for one in dataclasses.fields(PromptFormat)}
    return PromptFormat(**{key: value for key, value in facts.items() if key in fields})


def template_of(text: str, columns: Mapping[str, str] | None = None) -> str:
    """Returns the template of another program's text, whose names in braces stand for `columns`.

    Without them, braces are text. A name that stands for "" is left out. Raises InvalidInput, also
    for one that is not in them.
    """
    if columns is None:
        return text.replace("{", "{{").replace("}", "}}")
    for name in columns_of(text):
        if name not in columns:
            raise InvalidInput(
                f"{text!r:.80} is no prompt: {{{name}}} stands for no column",
                hint=f"it may have {', '.join(f'{{{known}}}' for known in columns)}",
            )
    return "".join(
        template_of(before) + (f"{{{columns[name]}}}" if name and columns[name] else "")
        for before, name, _, _ in string.Formatter().parse(text)
    )


def of_axolotl(name: str) -> bool:
    """Returns whether a name is that of a `type` of axolotl."""
    return bool(prompt_formats().get(name, {}).get("axolotl"))


def detected(columns: tuple[str, ...]) -> PromptFormat | None:
    """Returns the format of a data set with exactly these columns, None if there is none."""
    for name, facts in prompt_formats().items():
        wanted = set(facts.get("detected", ()))
        required = wanted & set(named(name).columns)
        if wanted and required <= set(columns) <= wanted:
            return named(name)
    return None


def read_prompt_format(given: Any) -> Any:
    """Returns the fields of a format that is given by name, as a text, or as an object.

    Raises InvalidInput.
    """
    if isinstance(given, str):
        return _of_text(given).to_dict()
    if not isinstance(given, Mapping):
        return given
    from autotune.spec.reading import parse  # noqa: PLC0415  # imports pydantic, 0.07 s

    try:
        return _checked(parse(PromptFormat, dict(given))).to_dict()
    except ValueError as error:
        raise InvalidInput(f"a format with {error}", hint=_HINT) from None


def _of_text(text: str) -> PromptFormat:
    if text in prompt_formats():
        return named(text)
    if text.startswith('{"'):
        try:
            content = json.loads(text)
        except (ValueError, RecursionError):
            raise InvalidInput(f"{text!r:.80} is no JSON", hint=_HINT) from None
        return PromptFormat(**read_prompt_format(content))
    template = text.replace("\\n", "\n")
    columns = columns_of(template)
    if not columns:
        near = suggestion(text, prompt_formats(), otherwise=_HINT)
        raise InvalidInput(f"there is no format {text!r:.80}", hint=near)
    if len(columns) == 1:
        raise InvalidInput(
            f"{text!r:.80} has one column, and an answer needs a prompt",
            hint="name a column of text with --text-column, or add the column of the prompt",
        )
    prompt, _, after = template.rpartition("{" + columns[-1] + "}")
    return PromptFormat(prompt=prompt, answer="{" + columns[-1] + "}" + after)


def _checked(format: PromptFormat) -> PromptFormat:
    """Returns the format. Raises InvalidInput for one by which nothing is learned."""
    for template in (format.prompt, format.shorter_prompt, format.system, format.default_system):
        columns_of(template)
    if not format.messages and not columns_of(format.answer):
        raise InvalidInput("a format without the column of the answer", hint=_HINT)
    return format


def write_prompt_format(fields: Mapping[str, Any]) -> str:
    """Returns the text that `read_prompt_format` returns these fields of."""
    format = PromptFormat(**fields)
    if format.name and named(format.name) == format:
        return format.name
    usual = PromptFormat().to_dict()
    return json.dumps({key: value for key, value in fields.items() if value != usual[key]})
