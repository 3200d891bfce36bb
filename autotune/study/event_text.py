"""Events of a running search as lines of text, for terminals, files and notebooks."""

from collections.abc import Iterator, Mapping, Sequence

from autotune.reporting.outcomes import OUTCOME_LABELS
from autotune.reporting.trial_text import format_speed, perplexity_source_text, trial_label
from autotune.spec.result import TrialRecord
from autotune.spec.study import counted_trials
from autotune.study.events import (
    AttemptLost,
    BudgetSpent,
    Confirming,
    Converged,
    Event,
    Notice,
    PlaceJoined,
    PlaceLeft,
    PoisonTrial,
    Preparing,
    ResultRejected,
    SameProgram,
    SpaceExhausted,
    StorageBack,
    StudyOpened,
    TrialBegan,
    TrialEnded,
    WaitingForDevice,
    WaitingForOthers,
    WaitingForStorage,
)
from autotune.study.progress import Progress, waiting_text
from autotune.units import format_decimal, format_duration, format_percent, format_size

_STUDIES_SHOWN = 3

LASTING_EVENTS = (
    Notice,
    StudyOpened,
    SameProgram,
    SpaceExhausted,
    Converged,
    BudgetSpent,
    AttemptLost,
    PoisonTrial,
    ResultRejected,
    WaitingForStorage,
    StorageBack,
)
"""Events whose lines stay readable while a live table changes below them."""

WAITING = (WaitingForDevice, WaitingForOthers, WaitingForStorage, StorageBack)
"""Events that say what a search waits for, or that the wait is over."""


def headline(opened: StudyOpened) -> str:
    definition = opened.definition
    verb = "Study" if opened.is_new else "Continuing study"
    devices = definition.workload.devices_per_trial
    each_of = "" if devices == 1 else "each of "
    return (
        f"{verb} {definition.name}: {definition.workload.describe()}, "
        f"under {format_size(definition.cap_bytes)} "
        f"on {each_of}{definition.device.describe(devices=devices)}"
    )


def excluded_lines(excluded: Sequence[str]) -> list[str]:
    """Returns one line for each reason, with the values that it excludes, below a heading.

    `Excluded` / `  checkpointing attention, block; compile block: the model has no list of ...`.
    A named configuration whose value has such a line is only counted.
    """
    values: dict[str, dict[str, list[str]]] = {}
    configurations: list[tuple[str, str]] = []
    for line in excluded:
        what, _, reason = line.partition(": ")
        field, _, value = what.partition(" ")
        if field == "configuration":
            configurations.append((what, reason))
        else:
            values.setdefault(reason, {}).setdefault(field, []).append(value)
    lines = [
        "; ".join(f"{field} {', '.join(listed)}" for field, listed in fields.items())
        + f": {reason}"
        for reason, fields in values.items()
    ]
    known = {line for line in excluded if not line.startswith("configuration ")}
    others = [f"{what}: {reason}" for what, reason in configurations if reason not in known]
    lines += others
    counted = len(configurations) - len(others)
    if counted:
        have = "1 configuration has" if counted == 1 else f"{counted} configurations have"
        lines.append(f"{have} one of these")
    return lines


def time_budget_line(seconds: float | None, *, for_trials: float | None) -> str:
    """Returns what a time budget that nobody has given means; empty without one.

    `for_trials` is the part of it in which trials begin.
    """
    if seconds is None or for_trials is None:
        return ""
    line = f"no trial begins after {format_duration(for_trials)}"
    if for_trials < seconds:
        line += (
            f", which leaves {format_duration(seconds - for_trials)} of {format_duration(seconds)} "
            "to measure the finalists again"
        )
    return (
        f"{line}; --time-budget 1h sets another limit, --time-budget none lifts it, and so does "
        "--trials"
    )


def reused_line(counts: Mapping[str, int]) -> str:
    """Returns which studies results are reused from, or an empty text if none are.

    `Reused    12 results: 9 of study a, 3 of study b; --fresh measures them again`.
    """
    if not counts:
        return ""
    shown = [f"{count} of study {study}" for study, count in list(counts.items())[:_STUDIES_SHOWN]]
    rest = sum(list(counts.values())[_STUDIES_SHOWN:])
    total = sum(counts.values())
    if rest:
        shown.append(f"{rest} of older studies")
    results = "1 result" if total == 1 else f"{total} results"
    return f"Reused    {results}: {', '.join(shown)}; --fresh measures them again"


class EventText:
    """Writes the lines of each event; a wait is reported once, however often it happens."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._reported_waits: set[str | tuple[int, ...]] = set()

    def __call__(self, event: Event) -> Iterator[str]:
        """Yield the lines of an event, after `progress` has noted it."""
        match event:
            case Preparing(what=what):
                yield f"{self._elapsed()}  {what[0].upper()}{what[1:]} ..."
            case Notice(message=message):
                yield f"Note: {message}."
            case PlaceJoined(device=place):
                yield f"Note: {place} has joined the search."
            case PlaceLeft(device=place, reason=reason):
                yield f"Note: the search goes on without {place}: {reason}."
            case StudyOpened():
                yield headline(event)
                if event.places:
                    yield f"Devices: {', '.join(event.places)}"
                line = time_budget_line(
                    event.default_time_budget_seconds, for_trials=event.seconds_for_trials
                )
                if line:
                    yield f"Time: {line}"
                if lines := excluded_lines(event.legal.excluded):
                    yield "Excluded:"
                    yield from (f"  {line}" for line in lines)
                if line := reused_line(event.reused):
                    yield line
                if event.definition.device.others:
                    device = event.definition.device
                    yield f"Warning: {device.device}: {device.others}"
                for note in event.definition.device.notes:
                    yield f"Note: {note}."
            case TrialBegan(number=number, config=config, name=name, device=device):
                named = f"{name}: " if name else ""
                place = f"{device}  " if device else ""
                yield f"{self._elapsed()}  {place}#{number} {named}{config.describe()} ..."
            case TrialEnded(record=record):
                took = ""
                if record.seconds is not None:
                    took = f", in {format_duration(record.seconds)}"
                yield f"[{self._progress.status()}]  {_one_line(record)}{took}"
            case Confirming(doing=doing, device=device):
                place = f"{device}  " if device else ""
                yield f"{self._elapsed_and_left()}  {place}Measuring {doing} ..."
            case SameProgram(config=config, number=number):
                yield (
                    f"{config.describe()}: not run, it compiles to the same program as #{number}"
                )
            case SpaceExhausted(trials=trials):
                yield (
                    f"Nothing worth trying is left after {trials} trials: every other "
                    "configuration compiles to the program of one of them, does not fit or is "
                    "dominated."
                )
            case Converged(trials=trials, relative_improvement=gain):
                added = format_percent(gain, digits=2)
                yield (
                    f"Converged after {trials} trials: the most promising configuration left is "
                    f"expected to add {added} % to the hypervolume of the front."
                )
            case BudgetSpent(trials=trials, trials_wanted=wanted):
                tried = counted_trials(trials, wanted, between=" of ")
                yield f"The time budget is used up after {tried} trials."
            case WaitingForDevice(device=waited_for) | WaitingForOthers(numbers=waited_for):
                if waited_for in self._reported_waits:
                    return  # report each wait once, however often it happens
                self._reported_waits.add(waited_for)
                waiting = waiting_text(event)
                yield f"{waiting[0].upper()}{waiting[1:]}."
            case AttemptLost(number=number, cause=cause, attempts_left=left):
                if left:
                    then = f"it is tried again, {left} attempts left"
                else:
                    then = "it is left for a later search"
                yield f"#{number} failed for a reason outside the trial: {cause}; {then}."
            case PoisonTrial(number=number, deaths=deaths):
                yield (
                    f"#{number} was running each time when {deaths} searches died; it is run last."
                )
            case ResultRejected(number=number):
                yield (
                    f"A stale result of #{number} was rejected: another search has the trial. "
                    "The result is stored separately."
                )
            case WaitingForStorage(message=message, limit_seconds=limit):
                yield (
                    f"{message[0].upper()}{message[1:]}; waiting up to {format_duration(limit)}, "
                    "no result is lost."
                )
            case StorageBack(seconds=seconds):
                yield (
                    f"The studies database can be reached again after {format_duration(seconds)}."
                )

    def _elapsed_and_left(self) -> str:
        """Returns how long the search has been running, and how long its confirmation still may."""
        times = [format_duration(self._progress.seconds)]
        if self._progress.is_confirming and (left := self._progress.time_left()):
            times.append(left)
        return f"[{', '.join(times)}]"

    def _elapsed(self) -> str:
        """Returns how long the search has been running, to stand before a line."""
        return f"[{format_duration(self._progress.seconds)}]"


def _one_line(record: TrialRecord) -> str:
    words = [f"#{record.number} {trial_label(record)}:"]
    if record.peak_memory_bytes is not None:
        words.append(format_size(record.peak_memory_bytes))
    if record.tokens_per_second is not None:
        speed = format_speed(record.tokens_per_second, record.tokens_per_second_spread) or "-"
        words.append(f"{speed} tokens/s")
    if record.perplexity is not None:
        source = perplexity_source_text(record)
        words.append(f"perplexity {format_decimal(record.perplexity)}")
        if source:
            words.append(f"({source})")
    if record.outcome != "ok":
        words.append(OUTCOME_LABELS[record.outcome])
        if record.message:
            words.append(f"({record.message})")
    return " ".join(words)
