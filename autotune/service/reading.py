"""Reads studies for many clients at once: what was read or computed is kept until it changes.

A key of the cache has the study's version, which one small query gives: a client never gets less
than was stored when it asked. Of a study that grows only the changed trials are read.
"""

import signal
from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import TypeVar

import anyio
import anyio.from_thread
import anyio.to_process
import anyio.to_thread

from autotune import __version__
from autotune.analysis.pick import Preferences
from autotune.reporting.figures import FigureOptions, check_options, figure_kind
from autotune.reporting.study_view import StudyView
from autotune.service.answers import Answer
from autotune.service.cache import Cache
from autotune.service.problems import Problem
from autotune.service.study_data import StudyData, read_study
from autotune.service.trial_query import TrialQuery
from autotune.spec.study import check_study_name
from autotune.storage.store import StudyEntry, StudyStore, StudySummary, StudyVersion

T = TypeVar("T")

HTML = "text/html; charset=utf-8"

REPORT_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'unsafe-inline' 'unsafe-eval'",
        "style-src 'unsafe-inline'",
        "img-src data: blob:",
        "form-action 'none'",
        "base-uri 'none'",
        "frame-ancestors 'self'",
        "sandbox allow-scripts allow-downloads",
    )
)
"""Of a report, whose scripts are in the page, and which names their hashes in a policy of its own.

In the sandbox the page has no origin: its scripts have no cookie and reach no other page."""

_MOST_READS_AT_ONCE = 10
"""Fewer than the connections of the database's pool."""
_MOST_COMPUTATIONS_AT_ONCE = 2
"""Python runs one at a time, and each takes turns with the event loop, which serves all others."""
_MOST_REPORTS_AT_ONCE = 1
"""They take longest; pages, figures and lists do not wait behind them."""
_IN_A_PROCESS = ("importance",)
"""Kinds of figures that take minutes for thousands of trials."""
_LONGEST_FIGURE_SECONDS = 60.0
_TAKES_LONG = 422
"""The status of a figure that takes longer."""
_BYTES_OF_FRONT = 10_000
_BYTES_OF_PART = 100_000

TimelineOf = Callable[[StudyView, FigureOptions], Awaitable[str]]
"""Predicts the memory of a trial over one step, and returns the figure as JSON."""


class StudyReader:
    """The studies of one database. All methods raise StorageUnavailable, and UnknownStudy."""

    def __init__(
        self, store: StudyStore, *, address: str, timeline_of: TimelineOf | None = None
    ) -> None:
        self._store = store
        self._address = address
        self._timeline_of = timeline_of
        self._cache = Cache()
        self._last: dict[str, StudyVersion] = {}
        self._entries: list[StudyEntry] = []
        """The studies as they were when they were last listed."""
        self._finished: Mapping[StudyVersion, int] = {}
        """The trials with a result of each of them."""
        self._summaries: list[StudySummary] = []
        self._reads = anyio.CapacityLimiter(_MOST_READS_AT_ONCE)
        self._computations = anyio.CapacityLimiter(_MOST_COMPUTATIONS_AT_ONCE)
        self._reports = anyio.CapacityLimiter(_MOST_REPORTS_AT_ONCE)
        self._processes = anyio.CapacityLimiter(1)

    # -- what other methods need -----------------------------------------------------------------

    async def version(self, study: str) -> StudyVersion:
        """Returns the version of what is stored of a study now."""
        check_study_name(study)
        version = await self._read(partial(self._store.version, study))
        if version is None:
            await self._read(partial(self._store.definition, study))  # raises UnknownStudy
            raise Problem(404, f"there is no study {study!r}")
        return version

    async def data(self, study: str) -> StudyData:
        """Returns the records of a study, whatever its reader prefers."""
        return await self._data(study, await self.version(study))

    async def view(self, study: str, preferences: Preferences) -> StudyView:
        """Returns the study with the front and the pick that a reader prefers."""
        return await self._view(await self.data(study), preferences)

    def view_in_thread(self, study: str, preferences: Preferences) -> StudyView:
        """Returns the same as `view`, for a route that runs in a thread."""
        return anyio.from_thread.run(self.view, study, preferences)

    def part_in_thread(
        self, study: str, preferences: Preferences, what: str, compute: Callable[[StudyView], T]
    ) -> T:
        """Returns what is computed of a view, kept until the study changes; as `view_in_thread`."""
        return anyio.from_thread.run(self._part, study, preferences, what, compute)

    async def _part(
        self, study: str, preferences: Preferences, what: str, compute: Callable[[StudyView], T]
    ) -> T:
        data = await self.data(study)
        view = await self._view(data, preferences)
        key = ("part", study, data.version, preferences, what)
        return await self._cache.get(
            key,
            partial(self._compute, partial(compute, view)),
            bytes_of=lambda _: _BYTES_OF_PART,
        )

    async def answer(
        self, study: str, what: Hashable, compute: Callable[[StudyData], Answer]
    ) -> Answer:
        """Returns an answer about a study; `what` says all that it depends on but the study."""
        data = await self.data(study)
        return await self._answer((what, study, data.version), partial(compute, data))

    async def order(
        self, study: str, query: TrialQuery, front: Sequence[int]
    ) -> tuple[StudyData, Sequence[int]]:
        """Returns a study and the numbers of the trials that a query asks for, in its order."""
        data = await self.data(study)
        key = ("order", study, data.version, query, tuple(front))
        numbers: Sequence[int] = await self._cache.get(
            key,
            partial(self._compute, partial(_numbers, query, data, front)),
            bytes_of=lambda found: 40 * len(found),
        )
        return data, numbers

    # -- answers ---------------------------------------------------------------------------------

    async def shown(self, study: str, preferences: Preferences) -> Answer:
        """Returns the JSON object of `autotune show --json`."""
        data = await self.data(study)
        view = await self._view(data, preferences)

        def compute() -> Answer:
            return Answer(data.result_json(view.result))

        return await self._answer(("shown", study, data.version, preferences), compute)

    async def figure(
        self, study: str, kind: str, options: FigureOptions, preferences: Preferences
    ) -> Answer:
        """Returns a figure as plotly's JSON. Raises InvalidInput, and Problem where it takes long.

        A timeline is predicted.
        """
        check_options(kind, options)
        data = await self.data(study)
        view = await self._view(data, preferences)

        async def compute() -> Answer | Problem:
            if kind == "timeline" and self._timeline_of is not None:
                text = await self._timeline_of(view, options)
            elif kind in _IN_A_PROCESS:
                text = await self._drawn_in_a_process(view, kind, options)
            else:
                text = await self._compute(partial(figure_json, view, kind, options))
            return Answer(text.encode())

        async def compute_or_fail() -> Answer | Problem:
            try:
                return await compute()
            except Problem as problem:
                if problem.status_code != _TAKES_LONG:
                    raise
                return problem  # kept, so that nobody waits for it again

        key = ("figure", study, data.version, preferences, kind, options)
        found = await self._cache.get(key, compute_or_fail, bytes_of=_bytes_of)
        if isinstance(found, Problem):
            raise found
        return found

    async def report(self, study: str, preferences: Preferences) -> Answer:
        """Returns the page of `autotune report`."""
        data = await self.data(study)
        view = await self._view(data, preferences)

        def compute() -> Answer:
            # plotly takes 0.1 s to import, which the start of the server does without.
            from autotune.reporting.report import contents  # noqa: PLC0415
            from autotune.reporting.report.page import page  # noqa: PLC0415

            report = contents.compute(view, version=__version__, preferences=preferences)
            headers = {"Content-Security-Policy": REPORT_POLICY}
            return Answer(page(report).encode(), media_type=HTML, headers=headers)

        written = partial(anyio.to_thread.run_sync, compute, limiter=self._reports)
        key = ("report", study, data.version, preferences)
        return await self._cache.get(key, written, bytes_of=_bytes_of)

    async def compared(self, studies: Sequence[str], preferences: Preferences) -> Answer:
        """Returns the figure of `autotune compare` as plotly's JSON. Raises InvalidInput."""
        data = [await self.data(study) for study in studies]
        views = [await self._view(one, preferences) for one in data]

        def compute() -> Answer:
            from autotune.reporting.figures import comparison  # noqa: PLC0415

            return Answer(comparison.draw(comparison.compute(views)).to_json().encode())

        versions = tuple(one.version for one in data)
        return await self._answer(("compared", tuple(studies), versions, preferences), compute)

    async def entries(self) -> tuple[list[StudyEntry], dict[int, int]]:
        """Returns every study, oldest first, and its trials with a result by the study's id."""
        await self._list_studies()
        finished = {version.study_id: number for version, number in self._finished.items()}
        return self._entries, finished

    async def summaries(self) -> list[StudySummary]:
        """Returns a line on every study, oldest first."""
        await self._list_studies()
        return self._summaries

    async def _list_studies(self) -> None:
        entries = await self._read(self._store.entries)
        if entries == self._entries:
            return
        versions = [entry.version for entry in entries]
        known = self._finished
        changed = [version.study_id for version in versions if version not in known]
        counted: Mapping[int, int] = {}
        if changed:
            counted = await self._read(partial(self._store.finished_trials, changed))
        finished = {
            version: known.get(version, counted.get(version.study_id, 0)) for version in versions
        }
        self._entries, self._finished = entries, finished
        self._summaries = [
            StudySummary(
                name=entry.name,
                created_at=f"{entry.created_at:%Y-%m-%d %H:%M}",
                trials=finished[entry.version],
                trials_wanted=entry.version.trials_wanted,
            )
            for entry in entries
        ]

    def summaries_in_thread(self) -> list[StudySummary]:
        """Returns the same as `summaries`, for a route that runs in a thread."""
        return anyio.from_thread.run(self.summaries)

    async def outcomes(self) -> dict[str, int]:
        """Returns how many trials of all studies ended in each outcome."""
        entries = await self._read(self._store.entries)
        revisions = tuple((entry.version.study_id, entry.version.revision) for entry in entries)
        self._cache.forget(lambda key: _is_older_count(key, "outcomes", revisions))
        return await self._cache.get(
            ("outcomes", revisions),
            partial(self._read, self._store.outcomes),
            bytes_of=lambda found: 100 * len(found),
        )

    # -- the cache -------------------------------------------------------------------------------

    async def _data(self, study: str, version: StudyVersion) -> StudyData:
        last = self._last.get(study)
        earlier: StudyData | None = None
        if last is not None and last != version:
            earlier = self._cache.peek(("data", study, last))

        async def compute() -> StudyData:
            data = await self._compute(
                partial(read_study, self._store, study, version, earlier, address=self._address)
            )
            self._last[study] = version
            self._cache.forget(lambda key: _is_of_other_version(key, study, version))
            return data

        key = ("data", study, version)
        return await self._cache.get(key, compute, bytes_of=lambda data: data.size_bytes)

    async def _view(self, data: StudyData, preferences: Preferences) -> StudyView:
        key = ("view", data.records.definition.name, data.version, preferences)
        compute = partial(self._compute, partial(data.view, preferences))
        return await self._cache.get(key, compute, bytes_of=lambda _: _BYTES_OF_FRONT)

    async def _answer(self, key: Hashable, compute: Callable[[], Answer]) -> Answer:
        return await self._cache.get(key, partial(self._compute, compute), bytes_of=_bytes_of)

    async def _read(self, read: Callable[[], T]) -> T:
        return await anyio.to_thread.run_sync(read, limiter=self._reads)

    async def _compute(self, compute: Callable[[], T]) -> T:
        return await anyio.to_thread.run_sync(compute, limiter=self._computations)

    async def _drawn_in_a_process(self, view: StudyView, kind: str, options: FigureOptions) -> str:
        study = view.result.study
        try:
            with anyio.fail_after(_LONGEST_FIGURE_SECONDS):
                return await anyio.to_process.run_sync(
                    _figure_of_a_process,
                    view,
                    kind,
                    options,
                    cancellable=True,
                    limiter=self._processes,
                )
        except TimeoutError:
            raise Problem(
                _TAKES_LONG,
                f"figure {kind!r} of study {study!r} takes longer than "
                f"{_LONGEST_FIGURE_SECONDS:g} s",
                hint=f"draw it where you have the database: autotune plot {study} {kind}",
            ) from None
        except anyio.BrokenWorkerProcess:
            raise Problem(
                503,
                f"the process that draws figure {kind!r} of study {study!r} has ended, or could "
                "not start",
                hint="ask again; the next time, look whether the server's machine has memory left",
            ) from None


def figure_json(view: StudyView, kind: str, options: FigureOptions) -> str:
    """Draws a figure and returns it as plotly's JSON."""
    # plotly takes 0.1 s to import, which the start of the server does without.
    from autotune.result import draw  # noqa: PLC0415

    text: str = draw(view, kind, options).to_json()
    return text


def _figure_of_a_process(view: StudyView, kind: str, options: FigureOptions) -> str:
    # Ctrl-C at a terminal reaches the server's processes, too; the server ends them itself.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    return figure_json(view, kind, options)


def _numbers(query: TrialQuery, data: StudyData, front: Sequence[int]) -> Sequence[int]:
    return [record.number for record in query.found(data.records.trials, front)]


def title_of_figure(study: str, kind: str) -> str:
    return f"{study}: {figure_kind(kind).title}"


def _bytes_of(answer: Answer | Problem) -> int:
    return answer.size_bytes if isinstance(answer, Answer) else 1_000


def _is_of_other_version(key: Hashable, study: str, version: StudyVersion) -> bool:
    """Whether a key is of another version of a study; keys have kind, study and version first."""
    return (
        isinstance(key, tuple)
        and len(key) > 2
        and key[1] == study
        and isinstance(key[2], StudyVersion)
        and key[2] != version
    )


def _is_older_count(key: Hashable, what: str, revisions: Hashable) -> bool:
    return isinstance(key, tuple) and key[0] == what and key[1] != revisions
