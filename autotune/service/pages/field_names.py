"""What the pages call a setting, in place of its option on the command line.

The sentences of errors, notes and help are those of the command line, and name its options. A page
has a field for most of them.
"""

import re
from collections.abc import Mapping

from autotune.service.request_body import SPACE_CONTENT
from autotune.service.submissions import ACCEPTED
from autotune.spec.setting import Option, all_options_of
from autotune.study.submission import Submission

FIELDS: Mapping[str, Option] = {
    name: option
    for name, option in all_options_of(Submission).items()
    if name in ACCEPTED and (option.is_typed or name == SPACE_CONTENT)
}
"""The fields of the form of a new search, by keyword."""
_OTHER_NAMES: Mapping[str, str] = {
    "max_mem": "Memory cap",
    "time_budget": "Time",
    "name": "Name of the study",
    "space": "Search space",
    "perplexity_seeds": "Seeds per perplexity",
    "lr_warmup_steps": "Learning rate warm-up steps",
}


def _label(keyword: str, option: Option) -> str:
    """Returns the name of a field; that of a switch says what it does when it is on."""
    name = option.parameter if option.turns_off else keyword
    return _OTHER_NAMES.get(keyword) or name.replace("_", " ").capitalize()


LABELS: Mapping[str, str] = {keyword: _label(keyword, option) for keyword, option in FIELDS.items()}
"""{keyword: what the form of a new search calls it}."""
LABELS_OF_FIT: Mapping[str, str] = {
    **{name: LABELS[name] for name in ("max_mem", "sequence_length", "global_batch")},
    "model": "The config.json of its model",
}
"""{keyword: what the page on a training that is to fit calls it}."""
LABELS_OF_ACTIONS: Mapping[str, str] = {
    "trials": "More trials",
    "time_budget": "Time",
    "name": "Name of your study",
    "priority": "Priority",
}
"""{keyword: what the dialogs of `actions.js` call it}."""
_KEYWORDS: Mapping[str | None, str] = {
    flag: keyword for keyword, option in FIELDS.items() for flag in (option.flag, option.synonym)
}
_COMMAND_OR_OPTION = re.compile(
    r"(?P<command>\b(?:autotune|torchrun|accelerate|ray|nvidia-smi) [a-z-][^,;\n]*)"
    r"|(?<![\w-])(?P<option>--[a-z][\w-]*)(?![\w=-])"
)
"""An option with = before its value is an argument of somebody's script."""
_INVALID = re.compile(r"^Invalid (?:body\.)?(?P<keyword>\w+)(?=:)")
"""How a sentence on the value of a setting begins; keys in the middle may be of a file."""


def in_fields(text: str, *, here: Mapping[str, str] = LABELS) -> str:
    """Returns a sentence with the names of fields in place of options.

    `here` has those of the page. Another field is said to be one of a new search, and an option
    without a field to be one of the command line. Whole commands stay as they are. So it is with
    the setting that a sentence calls invalid.
    """

    def named(found: re.Match[str]) -> str:
        if found["command"]:
            return found["command"]
        keyword = _KEYWORDS.get(found["option"], "")
        if keyword in here:
            return f"“{here[keyword]}”"
        if keyword in LABELS:
            return f"“{LABELS[keyword]}” (in a new search)"
        return f"{found['option']} (on the command line)"

    def invalid(found: re.Match[str]) -> str:
        label = here.get(found["keyword"]) or LABELS.get(found["keyword"])
        return found[0] if label is None else f"Invalid “{label}”"

    return _INVALID.sub(invalid, _COMMAND_OR_OPTION.sub(named, text))
