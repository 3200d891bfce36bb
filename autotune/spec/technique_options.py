"""Options of the command line that choose a value of a technique, read from its declaration."""

from autotune.spec.config import SEARCHED, TECHNIQUES, TrainingConfig
from autotune.spec.option import COUNT, NUMBER, TEXT, Option
from autotune.spec.option import TECHNIQUES as HEADING


def _option(field: str) -> Option:
    technique = TECHNIQUES[field]
    kind = TEXT
    if technique.numbers is not None:
        kind = COUNT if technique.numbers.are_whole else NUMBER
    default = technique.shown_default or getattr(TrainingConfig(), field)
    return Option(
        flag=technique.flag or f"--{field.replace('_', '-')}",
        keyword=field,
        group=HEADING,
        kind=kind,
        choices=SEARCHED.get(field, ()),
        metavar=technique.metavar,
        help=f"{technique.help} [default: {default}]",
    )


CONFIGURATION_OPTIONS = tuple(_option(field) for field in TECHNIQUES)
