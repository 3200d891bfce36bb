"""What a search would do, as texts: the dry run of the form of a new search."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from autotune.errors import AutotuneError
from autotune.service.pages.contexts import sentence
from autotune.service.pages.field_names import in_fields
from autotune.units import format_duration, format_percent, format_size


@dataclass(frozen=True, kw_only=True)
class Bar:
    """The baseline and the cap as lengths; the longer one has 96 of 100."""

    peak: float
    cap: float
    is_over: bool


@dataclass(frozen=True, kw_only=True)
class PlanText:
    error: str = ""
    hint: str = ""
    baseline: str = ""
    """The predicted peak of the baseline beside the cap, in a sentence."""
    bar: Bar | None = None
    """The same as a picture."""
    facts: tuple[tuple[str, str], ...] = ()
    lists: tuple[tuple[str, tuple[str, ...]], ...] = ()


def plan_text(plan: Mapping[str, Any] | AutotuneError) -> PlanText:
    """Returns the texts of the plan of the HTTP interface, or of why there is none."""
    if isinstance(plan, AutotuneError):
        return PlanText(error=sentence(plan.message), hint=sentence(plan.hint))
    baseline, bar = _baseline(plan)
    return PlanText(
        baseline=baseline,
        bar=bar,
        facts=tuple(_facts(plan)),
        lists=(
            ("Tried first", tuple(_first(plan))),
            ("Values that are tried", tuple(_values(plan["values"]))),
            ("Left out", tuple(map(in_fields, plan["excluded"]))),
        ),
    )


def _baseline(plan: Mapping[str, Any]) -> tuple[str, Bar | None]:
    cap_bytes = plan["cap_bytes"]
    about, peak_bytes = "", plan["reused_baseline_bytes"]
    for entry in plan["first"]:
        if entry["is_baseline"]:
            about, peak_bytes = "about ", entry["predicted_peak_memory_bytes"]
    if peak_bytes is None:
        return "", None
    share = peak_bytes / cap_bytes
    text = (
        f"Plain training, the baseline, needs {about}{format_size(peak_bytes)}: "
        f"{format_percent(share)} % of the cap of {format_size(cap_bytes)}."
    )
    if share <= 1:
        text += " It fits; the search looks for what is faster."
    return text, bar_of(peak_bytes, cap_bytes=cap_bytes)


def bar_of(peak_bytes: int, *, cap_bytes: int) -> Bar:
    longer = max(peak_bytes, cap_bytes)
    return Bar(
        peak=round(96 * peak_bytes / longer, 2),
        cap=round(96 * cap_bytes / longer, 2),
        is_over=peak_bytes > cap_bytes,
    )


def _facts(plan: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    yield "training", plan["workload"]
    yield "device", f"{plan['device']['name']} ({plan['device']['device']})"
    if "runs_on" in plan:
        yield "runs on", f"{plan['runs_on']}: its peaks and times are others than those said here"
    yield "cap", format_size(plan["cap_bytes"])
    yield "search space", f"{plan['space']}, {plan['configurations']:,} legal configurations"
    at_once = plan["trials_at_once"]
    wanted = f"{plan['trials_wanted']:,}"
    if plan["ends_by_time"]:
        wanted = "as many as the time allows"
    yield "trials", wanted + (f", {at_once} at once" if at_once > 1 else "")
    yield "time", _time(plan)
    if plan["reused"]:
        studies = ", ".join(f"{count} of {name}" for name, count in plan["reused"].items())
        yield "reused", f"results that are known already: {studies}"
    if plan["confirm_share"]:
        share = format_percent(plan["confirm_share"] + plan["variants_share"])
        yield "measured again", f"the best ones, in at most {share} % of the time"


def _time(plan: Mapping[str, Any]) -> str:
    parts = []
    if plan["seconds"] is not None:
        parts.append(f"about {format_duration(plan['seconds'])} of trials, by earlier studies")
    budget = plan["default_time_budget_seconds"]
    if budget is not None:
        parts.append(f"it ends after {format_duration(budget)}, as nothing else is set")
    elif plan["seconds_for_trials"] is not None:
        parts.append(f"trials begin for at most {format_duration(plan['seconds_for_trials'])}")
    if not parts:
        parts.append("not known before the first trials have run; there is no time limit")
    return "; ".join(parts)


def _first(plan: Mapping[str, Any]) -> Iterator[str]:
    for entry in plan["first"][: plan["trials_wanted"]]:
        peak = entry["predicted_peak_memory_bytes"]
        line = f"{entry['name']}: {entry['label']}"
        if peak is not None:
            over = ", over the cap" if entry["is_over_cap"] else ""
            line += f" (about {format_size(peak)}{over})"
        yield line


def _values(values: Mapping[str, list[Any]]) -> Iterator[str]:
    for field, choices in values.items():
        if len(choices) > 1:
            yield f"{field.replace('_', ' ')}: {', '.join(map(str, choices))}"
