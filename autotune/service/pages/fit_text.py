"""What the page of a training that is to fit shows of each part of its answer: texts and tables."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from autotune.reporting.table import Table
from autotune.service.pages.contexts import sentence
from autotune.service.pages.field_names import LABELS_OF_FIT, in_fields
from autotune.service.pages.plan import Bar, bar_of
from autotune.spec.cap import FITS, OVER
from autotune.study.prediction.pasted import Part
from autotune.units import format_estimate, format_percent, format_size

_HOLDERS_SHOWN = 8
_sentence = partial(sentence, here=LABELS_OF_FIT)


@dataclass(frozen=True, kw_only=True)
class FitText:
    lead: str
    """The answer in a sentence."""
    is_good: bool | None = None
    """Whether it says that something fits; None where it says neither."""
    more: tuple[str, ...] = ()
    bar: Bar | None = None
    facts: tuple[tuple[str, str], ...] = ()
    tables: tuple[Table, ...] = ()
    notes: tuple[str, ...] = ()


def fit_text(part: Part, answer: Mapping[str, Any]) -> FitText:
    """Returns the texts of a part of the answer, with the names of the page's fields."""
    text = _TEXTS[part](answer)
    named = partial(in_fields, here=LABELS_OF_FIT)
    return replace(text, lead=named(text.lead), more=tuple(map(named, text.more)))


def _least(answer: Mapping[str, Any]) -> FitText:
    least_bytes, cap_bytes = answer["least_bytes"], answer["cap_bytes"]
    if least_bytes is None:
        lead = "The shapes of this model are not known: wait for the prediction."
    else:
        lead = f"It needs at least {format_size(least_bytes)}"
        if least_bytes > cap_bytes:
            lead += f", so that it cannot fit {format_size(cap_bytes)}"
        lead += "."
    return FitText(
        lead=lead,
        is_good=False if least_bytes is not None and least_bytes > cap_bytes else None,
        more=tuple(f"{line}." for line in answer["said"]),
        facts=(("training", answer["workload"]), ("with", answer["config"])),
    )


def _peak(answer: Mapping[str, Any]) -> FitText:
    more = (answer["change"], _sentence(answer["speed"]))
    return FitText(
        lead=answer["sentence"],
        is_good={FITS: True, OVER: False}.get(answer["verdict"]),
        more=tuple(filter(None, more)),
        bar=bar_of(answer["peak_memory_bytes"], cap_bytes=answer["cap_bytes"]),
        tables=tuple(_tables_of_peak(answer)),
        notes=tuple(map(_sentence, answer["notes"])),
    )


def _tables_of_peak(answer: Mapping[str, Any]) -> Iterable[Table]:
    peak_bytes = answer["peak_memory_bytes"]
    sizes = sorted(answer["bytes_by_category"].items(), key=lambda item: -item[1])
    yield Table(
        caption="What holds the memory at the peak",
        heads=("kind", "size", "share"),
        rows=tuple(
            (
                kind.replace("_", " "),
                format_size(size),
                f"{format_percent(size / peak_bytes, digits=1)} %",
            )
            for kind, size in sizes
            if size
        ),
    )
    yield Table(
        caption="The largest holders",
        heads=("where", "what", "made by", "blocks", "size"),
        rows=tuple(
            (
                holder["module"] or "-",
                holder["category"].replace("_", " "),
                holder["operator"],
                str(holder["count"]),
                format_size(holder["size_bytes"]),
            )
            for holder in answer["holders"][:_HOLDERS_SHOWN]
        ),
    )


def _front(answer: Mapping[str, Any]) -> FitText:
    own = answer["own"]
    rows = [
        row
        for row in answer["predictions"]
        if row["is_on_front"] or row["name"] or row["config"] == own
    ]
    return FitText(
        lead=answer["conclusion"],
        more=tuple(answer["lines"]),
        tables=(
            Table(
                caption=f"Configurations of the search space {answer['space']}; * on the front",
                heads=("configuration", "peak", "at most", "verdict", "tokens/s"),
                rows=tuple(_row(row, own=own) for row in rows),
            ),
        ),
    )


def _row(row: Mapping[str, Any], *, own: Mapping[str, Any]) -> tuple[str, ...]:
    is_own = row["config"] == own
    name = "this training" if is_own else row["name"] or row["described"]
    if row["verdict"] is None:
        return (f"{name}: {row['refusal']}", "-", "-", "-", "-")
    speed = row["predicted_tokens_per_second"]
    return (
        f"{name} *" if row["is_on_front"] else name,
        format_size(row["peak_memory_bytes"]),
        format_size(row["upper_bound_bytes"]),
        row["verdict"],
        "-" if speed is None else format_estimate(speed),
    )


def _longest(answer: Mapping[str, Any]) -> FitText:
    return FitText(lead=answer["sentence"])


_TEXTS: Mapping[Part, Callable[[Mapping[str, Any]], FitText]] = {
    "least": _least,
    "peak": _peak,
    "front": _front,
    "longest": _longest,
}
