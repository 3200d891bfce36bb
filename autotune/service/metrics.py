"""Counts requests, and writes the text format of Prometheus.

The format is small: a line of help and type for each name, then a line for each set of labels.
"""

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from autotune.printable import printable

MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"

BOUNDS_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)

_METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")

Labels = tuple[tuple[str, str], ...]


@dataclass(frozen=True, kw_only=True)
class Metric:
    """A name with its values by their labels, such as {(("state", "queued"),): 3}."""

    name: str
    help: str
    kind: str
    """counter or gauge."""
    values: Mapping[Labels, float]


@dataclass
class _Durations:
    """A histogram of one route: how many requests took at most so long."""

    by_bound: list[int] = field(default_factory=lambda: [0] * (len(BOUNDS_SECONDS) + 1))
    seconds: float = 0.0


class HttpMetrics:
    """Requests by route, method and status, and how long they took. Used by the event loop only."""

    def __init__(self) -> None:
        self._requests: Counter[tuple[str, str, int]] = Counter()
        self._durations: dict[str, _Durations] = {}

    def count(self, *, route: str, method: str, status: int, seconds: float) -> None:
        """Counts a request; an unknown method counts as `other`, so that there are few labels."""
        known = method if method in _METHODS else "other"
        self._requests[route, known, status] += 1
        durations = self._durations.setdefault(route, _Durations())
        durations.by_bound[bisect_left(BOUNDS_SECONDS, seconds)] += 1
        durations.seconds += seconds

    def lines(self) -> Iterable[str]:
        """Yields the lines of both metrics."""
        yield from lines_of(
            Metric(
                name="autotune_http_requests_total",
                help="Requests that were answered.",
                kind="counter",
                values={
                    (("route", route), ("method", method), ("status", str(status))): number
                    for (route, method, status), number in sorted(self._requests.items())
                },
            )
        )
        name = "autotune_http_request_seconds"
        yield f"# HELP {name} Seconds until a request was answered; a stream until it ended."
        yield f"# TYPE {name} histogram"
        for route, durations in sorted(self._durations.items()):
            total = 0
            for bound, number in zip((*BOUNDS_SECONDS, math.inf), durations.by_bound, strict=True):
                total += number
                labels = (("route", route), ("le", _number(bound)))
                yield f"{name}_bucket{_labels(labels)} {total}"
            of_route = _labels((("route", route),))
            yield f"{name}_sum{of_route} {_number(durations.seconds)}"
            yield f"{name}_count{of_route} {total}"


def lines_of(metric: Metric) -> Iterable[str]:
    """Yields the lines of a counter or a gauge."""
    yield f"# HELP {metric.name} {metric.help}"
    yield f"# TYPE {metric.name} {metric.kind}"
    for labels, value in metric.values.items():
        yield f"{metric.name}{_labels(labels)} {_number(value)}"


def exposition(parts: Sequence[Iterable[str]]) -> str:
    """Returns the text that Prometheus reads."""
    return "".join(f"{line}\n" for lines in parts for line in lines)


def _labels(labels: Labels) -> str:
    if not labels:
        return ""
    pairs = [f'{name}="{_escaped(value)}"' for name, value in labels]
    return f"{{{','.join(pairs)}}}"


def _escaped(value: str) -> str:
    visible = printable(value, keep_lines=True)
    return visible.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _number(value: float) -> str:
    if math.isinf(value):
        return "+Inf"
    return str(int(value)) if value == int(value) else repr(value)
