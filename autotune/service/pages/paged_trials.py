"""The table of trials on the page of a study, cut into pages by the server.

So a study of ten thousand trials is as quick to open as one of ten, and what a reader asked for is
in the address. An address that is wrong shows all trials instead of an error, as it may have been
typed or be of an older version.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import urlencode

from autotune.errors import InvalidInput
from autotune.reporting.columns import ON_PAGES, Column, TrialTable, trial_table
from autotune.reporting.outcomes import OUTCOME_LABELS
from autotune.service.trial_query import TrialQuery
from autotune.spec.config import FIELD_ORDER
from autotune.spec.result import StudyResult

PAGE_SIZE = 25


@dataclass(frozen=True, kw_only=True)
class TrialAddress:
    """Which trials a reader wants to see, and in which order, as an address says it."""

    find: str = ""
    show: str = ""
    """front, feasible, running, an outcome, or empty for all."""
    techniques: tuple[str, ...] = ()
    sort: str = "number"
    page: int = 1

    @classmethod
    def of(cls, parameters: Iterable[tuple[str, str]]) -> "TrialAddress":
        """Returns what the parameters of an address say; the default where they are not valid."""
        given = list(parameters)
        last = dict(given)
        page = last.get("page", "")
        address = cls(
            find=last.get("find", "")[:200],
            show=last.get("show", ""),
            techniques=tuple(value for name, value in given if name == "technique" and value),
            sort=last.get("sort", "number"),
            page=int(page) if page.isascii() and page.isdigit() and 0 < len(page) < 8 else 1,
        )
        try:
            address.query()
        except InvalidInput:
            return cls()
        return address

    def query(self) -> TrialQuery:
        """Returns the same as a query. Raises InvalidInput."""
        of_outcome = self.show if self.show not in ("", "front", "feasible", "running") else None
        return TrialQuery(
            find=self.find,
            outcomes=() if of_outcome is None else (of_outcome,),
            running=None if of_outcome is None else False,
            techniques=self.techniques,
            sort=self.sort,
            **({self.show: True} if self.show and of_outcome is None else {}),
        )

    def text(self, **changes: Any) -> str:
        """Returns the parameters with `changes`, for a link; defaults are left out."""
        changed, default = replace(self, **changes), TrialAddress()
        pairs = [
            (name, str(getattr(changed, name)))
            for name in ("find", "show", "sort", "page")
            if getattr(changed, name) != getattr(default, name)
        ]
        pairs += [("technique", choice) for choice in changed.techniques]
        return urlencode(pairs)

    def sorted_by(self, column: Column) -> str:
        """Returns the parameters that sort by a column, or turn its order."""
        descending = "-" if self.sort == column.key else ""
        return self.text(sort=f"{descending}{column.key}", page=1)

    @property
    def directions(self) -> dict[str, str]:
        """The direction of the column that the table is sorted by, for `aria-sort`."""
        direction = "descending" if self.sort.startswith("-") else "ascending"
        return {self.sort.removeprefix("-"): direction}


@dataclass(frozen=True, kw_only=True)
class SelectOption:
    value: str
    title: str
    is_chosen: bool


@dataclass(frozen=True, kw_only=True)
class PagedTrials:
    """One page of the table and what stands around it."""

    address: TrialAddress
    table: TrialTable
    found: int
    total: int
    first: int
    """Position of the first row among those found, from 1; 0 without rows."""
    last: int
    pages: int
    outcomes: tuple[SelectOption, ...]
    techniques: tuple[tuple[str, tuple[SelectOption, ...]], ...]
    """The techniques that differ between trials, each with its values."""


def paged_trials(result: StudyResult, address: TrialAddress) -> PagedTrials:
    """Returns the page of the table that the address asks for; past the last it is the last."""
    found = address.query().found(result.trials, result.front)
    pages = max(1, -(-len(found) // PAGE_SIZE))
    address = replace(address, page=max(1, min(address.page, pages)))
    begin = (address.page - 1) * PAGE_SIZE
    shown = found[begin : begin + PAGE_SIZE]
    return PagedTrials(
        address=address,
        table=trial_table(result, shown, optional=ON_PAGES, with_before_training=address.page == 1),
        found=len(found),
        total=len(result.trials),
        first=begin + 1 if shown else 0,
        last=begin + len(shown),
        pages=pages,
        outcomes=tuple(_outcome_choices(result, address)),
        techniques=tuple(_technique_choices(result, address)),
    )


def _outcome_choices(result: StudyResult, address: TrialAddress) -> Iterable[SelectOption]:
    outcomes = {record.outcome for record in result.trials if not record.is_running}
    titles = {"": "all trials", "front": "the front", "feasible": "under the cap and ok"}
    if any(record.is_running for record in result.trials):
        titles["running"] = "running"
    titles |= {outcome: label for outcome, label in OUTCOME_LABELS.items() if outcome in outcomes}
    for value, title in titles.items():
        yield SelectOption(value=value, title=title, is_chosen=value == address.show)


def _technique_choices(
    result: StudyResult, address: TrialAddress
) -> Iterable[tuple[str, tuple[SelectOption, ...]]]:
    for field in FIELD_ORDER:
        values = {str(getattr(record.config, field)) for record in result.trials}
        if len(values) < 2:
            continue
        choices = []
        for value in sorted(values):
            choice = f"{field}:{value}"
            choices.append(
                SelectOption(value=choice, title=value, is_chosen=choice in address.techniques)
            )
        yield field.replace("_", " "), tuple(choices)
