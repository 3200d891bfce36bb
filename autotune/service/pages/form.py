"""The form of a new search, made from the declared options, so that a new option appears by itself.

What most people set comes first, the rest in the groups of the command's help. What a reader typed
is checked a field at a time, so that an error stands next to the field it is about, and together
it becomes the body of a submission.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autotune.errors import InvalidInput
from autotune.service.pages.contexts import sentence
from autotune.service.pages.field_names import FIELDS, LABELS, in_fields
from autotune.service.request_body import SPACE_CONTENT
from autotune.spec.checked import checked_beside
from autotune.spec.model_choice import MODEL_NAMES
from autotune.spec.setting import EVERYDAY, GROUPS, RESULTS, Option
from autotune.spec.space_content import named_spaces
from autotune.study.submission import Submission

MOST_USED = (
    "max_mem",
    "model",
    "dataset",
    "layers",
    "width",
    "heads",
    "space",
    "trials",
    "time_budget",
    "name",
)
"""Keywords of the fields that are not folded, in their order."""
_HELP: Mapping[str, str] = {
    "max_mem": "What a trial may need at most: 8GiB, 8GB, 8192MiB.",
    "model": "gpt, deep-one, or a model of Hugging Face by its name or folder.",
    "dataset": "A text, jsonl, csv or parquet file, a folder, or a name on the Hugging Face hub.",
    "space": "Which techniques are tried.",
    "time_budget": "For all trials and for measuring the best again: 30m, 2h, or none.",
    "name": "By which you find it again. An existing study is continued.",
}
"""In place of help that speaks of a command line, or is long."""
_EXAMPLES: Mapping[str, str] = {
    "max_mem": "8GiB",
    "time_budget": "30m",
    "learning_rates": "adamw=3e-4",
    "name": "my-study",
}


@dataclass(frozen=True, kw_only=True)
class Field:
    """One field of the form with what was typed into it."""

    keyword: str
    """Name of the field, and of the setting in a submission."""
    label: str
    control: str
    """text, number, choice, check or lines."""
    help: str
    value: str
    placeholder: str
    choices: tuple[tuple[str, str], ...]
    """(value, title) of a choice; of a text what a browser proposes."""
    error: str
    hint: str

    @property
    def is_set(self) -> bool:
        return bool(self.value)


@dataclass(frozen=True, kw_only=True)
class Group:
    title: str
    fields: tuple[Field, ...]

    @property
    def is_open(self) -> bool:
        """Whether something in it is set or wrong, which must not be hidden."""
        return any(field.is_set or field.error for field in self.fields)


@dataclass(frozen=True, kw_only=True)
class Form:
    first: tuple[Field, ...]
    groups: tuple[Group, ...]

    @property
    def wrong(self) -> tuple[Field, ...]:
        """The fields with an error."""
        fields = [*self.first, *(field for group in self.groups for field in group.fields)]
        return tuple(field for field in fields if field.error)


@dataclass(frozen=True, kw_only=True)
class Filled:
    """What was typed: the form to show again, and the body of the submission."""

    form: Form
    body: Mapping[str, Any]

    @property
    def is_valid(self) -> bool:
        return not self.form.wrong


def filled(given: Mapping[str, str]) -> Filled:
    """Read the texts of a form by keyword; without any, the form is empty."""
    body: dict[str, Any] = {}
    errors: dict[str, InvalidInput] = {}
    for keyword, option in FIELDS.items():
        text = given.get(keyword, "").replace("\r\n", "\n").strip()
        if not text:
            continue
        try:
            if option.turns_off:
                text = "false" if text == "true" else "true"
            value = option.parse(text)
            checked_beside(Submission, {keyword: value})
            # A size or a duration stays as it was typed.
            body[keyword] = text if option.format.takes_text else value
        except InvalidInput as error:
            errors[keyword] = error
    return Filled(form=_form(given, errors), body=body)


def with_error(given: Mapping[str, str], error: InvalidInput) -> Form:
    """Returns the form with an error of the whole next to the field that its sentence names first.

    Without such a field, the form has no error of a field, and the page shows the sentence.
    """
    named = _named_in(error.message, given)
    return _form(given, {} if named is None else {named: error})


def _named_in(message: str, given: Mapping[str, str]) -> str | None:
    for keyword, option in FIELDS.items():
        if not given.get(keyword):
            continue
        words = message.split()
        if option.flag in words or keyword in words:
            return keyword
    return None


def key_of(of_form: str, body: Mapping[str, Any]) -> str | None:
    """Returns the key of a submission: a form that is sent twice is one search.

    One that was gone back to and changed is another search.
    """
    if not of_form:
        return None
    content = json.dumps([of_form, body], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()


# -- showing ---------------------------------------------------------------------------------------


def _form(given: Mapping[str, str], errors: Mapping[str, InvalidInput]) -> Form:
    fields = {
        keyword: _field(keyword, option, given.get(keyword, ""), errors.get(keyword))
        for keyword, option in FIELDS.items()
    }
    return Form(
        first=tuple(fields[keyword] for keyword in MOST_USED),
        groups=tuple(_groups(fields)),
    )


def _groups(fields: Mapping[str, Field]) -> Iterator[Group]:
    for title in GROUPS:
        members = tuple(
            fields[keyword]
            for keyword, option in FIELDS.items()
            if option.group == title and keyword not in MOST_USED
        )
        if members:
            shown = {EVERYDAY: "More", RESULTS: "Which trial to pick"}.get(title, title)
            yield Group(title=shown, fields=members)


def _field(keyword: str, option: Option, value: str, error: InvalidInput | None) -> Field:
    help_text, default = _help_and_default(option)
    help_text = _HELP.get(keyword, help_text)
    if default:
        help_text = f"{help_text} Default: {default}."
    return Field(
        keyword=keyword,
        label=LABELS[keyword],
        control=_control(keyword, option),
        help=in_fields(help_text),
        value=value,
        placeholder=_placeholder(keyword, default),
        choices=tuple(_choices(keyword, option)),
        error="" if error is None else sentence(error.message),
        hint="" if error is None else sentence(error.hint),
    )


def _control(keyword: str, option: Option) -> str:
    if option.is_switch:
        return "choice" if option.default is None else "check"
    if keyword == SPACE_CONTENT or option.is_repeatable:
        return "lines"
    if keyword == "space" or option.is_closed:
        return "choice"
    return "number" if option.is_whole_number else "text"


def _help_and_default(option: Option) -> tuple[str, str]:
    """Returns the help without the default that it ends in, and that default."""
    text, _, rest = option.help.partition(" [default: ")
    default = rest.removesuffix("]")
    if not default and option.default is not None and not option.is_switch:
        default = option.format.write(option.default)
    return text, default


def _placeholder(keyword: str, default: str) -> str:
    """Returns an example, or what an empty field means where that is short."""
    if keyword in _EXAMPLES:
        return f"for example {_EXAMPLES[keyword]}"
    return default if len(default) <= 20 and "--" not in default else ""


def _choices(keyword: str, option: Option) -> Iterable[tuple[str, str]]:
    if option.is_switch:
        return [("", "not set"), ("true", "yes"), ("false", "no")]
    if keyword == "space":
        return [("", "default"), *((name, name) for name in named_spaces() if name != "default")]
    names: Sequence[str] = MODEL_NAMES if keyword == "model" else option.choices
    if _control(keyword, option) == "choice":
        _, default = _help_and_default(option)
        unset = f"not set ({default})" if default else "not set"
        return [("", unset), *((name, name) for name in names)]
    return [(name, name) for name in names]
