"""The process of one search of the queue: `python -m autotune.service.search_process`.

It reads its order as JSON from stdin, runs the same search as `autotune search`, and writes what
happens to the database: a sign of life every two seconds, events, and how it ended. Nothing of it
depends on the server that started it, which may be killed, replaced or on another machine later.
"""

import dataclasses
import json
import math
import os
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

from autotune import __version__
from autotune.errors import (
    AutotuneError,
    Stopped,
    StorageUnavailable,
    StorageUnreachable,
    TrialLost,
    class_and_first_line_of,
)
from autotune.execution.local import LocalExecutor
from autotune.printable import printable
from autotune.service.processes import this_process
from autotune.service.settings import SubmissionRules
from autotune.service.submissions import TRIALS_BEFORE, request_of_submission
from autotune.spec.queued_search import (
    SEARCH_RENEWAL_SECONDS,
    WORKER_STOPPED,
    QueuedSearch,
    SearchEnd,
)
from autotune.storage.database import Database
from autotune.storage.hidden_url import HiddenUrl, told_to_others
from autotune.storage.leases import LeaseLost
from autotune.storage.retry import RetryPolicy
from autotune.storage.searches import Searches
from autotune.study.events import (
    Event,
    Notice,
    StudyOpened,
    TrialEnded,
    TrialPhase,
    stream_form,
)
from autotune.study.profiling import profile_at_end
from autotune.study.progress import Progress
from autotune.study.request import SearchRequest
from autotune.study.search import search
from autotune.system.failpoints import failpoint
from autotune.system.standard_streams import protect_streams

_STEP_SECONDS = 1.0
"""Steps of one place are reported at most this often."""
_WAIT_AT_ENDS_SECONDS = 300.0
"""How long the begin, and the last events with the end, may wait for a database that is away."""
_LEAST_SECONDS_LEFT = 1.0
_NOT_DONE = 75


class _Reporter:
    """Writes events and signs of life from a thread of its own, so that no trial waits for them.

    Use it as a context manager; `end` is stored when the block is left.
    """

    def __init__(self, searches: Searches, found: QueuedSearch, hidden: HiddenUrl) -> None:
        self._searches = searches
        self._hidden = hidden
        self._number, self._run = found.id, found.run
        self._events: list[tuple[str, Any]] = []
        """Those that are not written yet; the thread removes the others from the front."""
        self._ended = threading.Event()
        self._give_up_at = math.inf
        self._woken = threading.Event()
        self._thread = threading.Thread(target=self._write, name="reporter", daemon=True)
        self.progress: Mapping[str, Any] = {}
        self.study = found.study
        self.has_results = False
        self.is_cancelled = False
        self.is_lost = False
        self.end = SearchEnd(state="queued", reason="its process has ended", is_loss=True)
        self.exit_code = _NOT_DONE
        """That of `end`, once it is stored."""

    def __enter__(self) -> "_Reporter":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._give_up_at = time.monotonic() + _WAIT_AT_ENDS_SECONDS
        self._ended.set()
        self._woken.set()
        self._thread.join(2 * _WAIT_AT_ENDS_SECONDS)

    def add(self, kind: str, data: Any) -> None:
        self._events.append((kind, self._hidden.without_in(data)))
        self._woken.set()

    def _write(self) -> None:
        written = 0
        while True:
            has_ended = self._ended.is_set()
            self._woken.clear()
            events = self._events.copy()  # others are added meanwhile
            try:
                self.is_cancelled |= self._searches.renew_run(
                    self._number,
                    self._run,
                    progress=self._hidden.without_in(self.progress),
                    study=self.study,
                    has_results=self.has_results,
                    events=events,
                    after=written,
                )
                if has_ended:
                    failpoint("search ended, not stored")
                    self._searches.end_run(self._number, self._run, self.end)
                    self.exit_code = _NOT_DONE if self.end.exit_code is None else self.end.exit_code
                    return
            except LeaseLost:
                self.is_lost = True
                return
            except StorageUnavailable as error:
                if time.monotonic() > self._give_up_at:
                    _print_error(error)
                    return
                time.sleep(1.0)
                continue
            except Exception:
                traceback.print_exc()
                self.is_lost = True  # nobody would see what the search does
                return
            del self._events[: len(events)]
            written += len(events)
            self._woken.wait(SEARCH_RENEWAL_SECONDS)


class _SearchListener:
    """Takes in the events of the search: prints them, and reports them with its state."""

    def __init__(
        self,
        request: SearchRequest,
        reporter: _Reporter,
        *,
        used_seconds: float,
        time_budget_seconds: float | None,
    ) -> None:
        self._progress = Progress(
            preferences=request.preferences, until_converged=request.until_converged
        )
        self._reporter = reporter
        self._used_seconds = used_seconds
        self._time_budget_seconds = time_budget_seconds
        """Of the whole search, with what earlier processes have used of it."""
        self._began = time.monotonic()
        self._front: dict[str, Any] = {"front": [], "pick": None}
        self._step_at: dict[str, float] = {}
        self._profiling = ""
        """What is profiled, after the trials."""

    def note_profile(self, sentence: str) -> None:
        """Say what is profiled at the end of the search."""
        self._profiling = sentence
        self(Notice(message=sentence))

    def __call__(self, event: Event) -> None:
        self._progress.note(event)
        lines = list(self._progress.lines(event))
        for line in lines:
            print(printable(line), flush=True)
        if isinstance(event, TrialPhase):
            self._add_step(event)
        elif event.kind or lines:
            self._reporter.add(*stream_form(event, lines))
        if isinstance(event, StudyOpened):
            self._reporter.study = event.study
            if event.default_time_budget_seconds is not None:
                self._time_budget_seconds = event.default_time_budget_seconds
        if isinstance(event, StudyOpened | TrialEnded):
            self._reporter.has_results |= isinstance(event, TrialEnded)
            self._add_front()
        self._reporter.progress = self._state()

    def _add_step(self, phase: TrialPhase) -> None:
        now = time.monotonic()
        is_last = phase.steps is not None and phase.steps[0] == phase.steps[1]
        if now - self._step_at.get(phase.device, -math.inf) < _STEP_SECONDS and not is_last:
            return
        self._step_at[phase.device] = now
        trial = self._progress.at_place(phase.device).trial
        number = None if trial is None else trial.number
        self._reporter.add(phase.kind, {"number": number, **phase.to_dict()})

    def _add_front(self) -> None:
        so_far = self._progress.so_far()
        pick = None if so_far.pick is None else so_far.pick.number
        now = {"front": list(so_far.front), "pick": pick}
        if now != self._front:
            self._front = now
            self._reporter.add("front", now)

    def _state(self) -> dict[str, Any]:
        progress = self._progress
        left = progress.seconds_left()
        places = [
            {
                "name": place.name,
                "trial": None if place.trial is None else place.trial.number,
                "label": place.label,
                "doing": place.doing,
                "seconds": round(place.seconds, 1),
            }
            for place in (progress.places() or [progress.at_place("")])
        ]
        if self._profiling:
            places, left = [], None
        return {
            "doing": self._profiling or "; ".join(progress.doing()),
            "places": places,
            "trials": len(progress.records),
            "trials_wanted": progress.wanted,
            "counts": progress.counts() if progress.opened else "",
            "time_left": progress.time_left() if progress.opened and not self._profiling else "",
            "seconds_left": left,
            "best": progress.best() if progress.opened else "",
            "is_confirming": progress.is_confirming,
            "used_seconds": self._used_seconds + time.monotonic() - self._began,
            "time_budget_seconds": (
                None if self._time_budget_seconds == math.inf else self._time_budget_seconds
            ),
        }


def main(make_executor: Callable[..., LocalExecutor] = LocalExecutor) -> int:
    """Run the search that the order on stdin names; return the exit code of the process."""
    protect_streams(is_answer=False)  # the disk of its log may be full
    order = json.load(sys.stdin)
    stops: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda received, _frame: stops.append(received))
    try:
        searches, found = _begin(order, stops)
    except (LeaseLost, Stopped):
        return _NOT_DONE  # another process has it, or will have it
    except AutotuneError as error:
        _print_error(error)
        return error.exit_code
    failpoint("search begun")
    print(f"-- autotune {__version__}, search {found.id}, start {found.run} --", flush=True)
    hidden = HiddenUrl(order["storage"])
    with _Reporter(searches, found, hidden) as reporter:
        end = _run(order, found, reporter, stops, make_executor)
        reason, hint = hidden.without(end.reason), hidden.without(end.hint)
        reporter.end = dataclasses.replace(end, reason=reason, hint=hint)
    return reporter.exit_code


def _begin(order: Mapping[str, Any], stops: list[int]) -> tuple[Searches, QueuedSearch]:
    """Notes that this process runs the search, as soon as the database is there.

    Raises LeaseLost and Stopped, and StorageUnreachable where it waited for too long.
    """

    def check_stop() -> None:
        if stops:
            raise Stopped("the search was stopped", hint="its worker begins it again")

    def begin() -> tuple[Searches, QueuedSearch]:
        searches = Searches(Database(order["storage"], was_reached=True))
        process = this_process()
        run = searches.begin_run(order["search"], order["run"], process, version=__version__)
        return searches, run

    waiting = RetryPolicy(
        limit_seconds=_WAIT_AT_ENDS_SECONDS,
        check_stop=check_stop,
        on_waiting=lambda message: print(f"{printable(message)}; waiting for it", flush=True),
    )
    return waiting.repeat(begin)


def _run(
    order: Mapping[str, Any],
    found: QueuedSearch,
    reporter: _Reporter,
    stops: list[int],
    make_executor: Callable[..., LocalExecutor],
) -> SearchEnd:
    """Run the search and return how it ended."""

    def should_stop() -> bool:
        return bool(stops) or reporter.is_cancelled or reporter.is_lost

    try:
        return _search(order, found, reporter, should_stop, make_executor)
    except Stopped:
        if reporter.is_cancelled:
            return SearchEnd(state="cancelled", exit_code=75)
        return SearchEnd(state="queued", reason=WORKER_STOPPED)
    except (StorageUnreachable, TrialLost) as error:
        # The fault of the machine or of the database: another start may help.
        _print_error(error)
        reason, hint = told_to_others(error)
        return SearchEnd(state="queued", reason=reason, hint=hint, is_loss=True)
    except AutotuneError as error:
        _print_error(error)
        reason, hint = told_to_others(error)
        return SearchEnd(state="failed", reason=reason, hint=hint, exit_code=error.exit_code)
    except Exception as error:
        traceback.print_exc()
        return SearchEnd(
            state="failed",
            reason=f"internal error: {class_and_first_line_of(error)}",
            hint="see the log of the search",
            exit_code=70,
        )


def _search(
    order: Mapping[str, Any],
    found: QueuedSearch,
    reporter: _Reporter,
    should_stop: Callable[[], bool],
    make_executor: Callable[..., LocalExecutor],
) -> SearchEnd:
    with _files_of_start(Path(order["folder"]), found.run) as folder:
        used = _used_seconds(found)
        request: SearchRequest = request_of_submission(
            found.request,
            SubmissionRules.of(order["rules"]),
            study=found.study,
            folder=folder,
            trials_before=found.request.get(TRIALS_BEFORE, 0),
        )
        budget = (found.progress or {}).get("time_budget_seconds")
        budget = budget or request.time_budget
        request = _with_time_left(request, budget, used_seconds=used)
        listener = _SearchListener(request, reporter, used_seconds=used, time_budget_seconds=budget)
        result = search(
            request,
            listener=listener,
            should_stop=should_stop,
            make_executor=make_executor,
            was_reached=True,
        )
    profile_at_end(result, request, should_stop=should_stop, note=listener.note_profile)
    if result.front:
        return SearchEnd(state="finished", exit_code=0)
    return SearchEnd(
        state="finished",
        reason="nothing is feasible under the cap",
        hint="choose a larger cap, or another search space",
        exit_code=1,
    )


@contextmanager
def _files_of_start(folder: Path, run: int) -> Iterator[Path]:
    """Yields a folder for the files of this start, and removes those of starts that were killed."""
    shutil.rmtree(folder, ignore_errors=True)
    of_start = folder / str(run)
    of_start.mkdir(parents=True)
    try:
        yield of_start
    finally:
        shutil.rmtree(of_start, ignore_errors=True)
        with suppress(OSError):  # a later start has files there
            folder.rmdir()


def _print_error(error: AutotuneError) -> None:
    print(f"Error: {printable(error.message)}", file=sys.stderr)
    print(f"  hint: {printable(error.hint)}", file=sys.stderr, flush=True)


def _used_seconds(found: QueuedSearch) -> float:
    used = (found.progress or {}).get("used_seconds")
    return float(used) if isinstance(used, int | float) else 0.0


def _with_time_left(
    request: SearchRequest, budget_seconds: float | None, *, used_seconds: float
) -> SearchRequest:
    """Returns the request with what earlier processes have left of its time."""
    if not used_seconds or budget_seconds is None or budget_seconds == math.inf:
        return request
    left = max(_LEAST_SECONDS_LEFT, budget_seconds - used_seconds)
    return dataclasses.replace(request, time_budget=left)


def end_process(code: int) -> NoReturn:
    """End at once: a thread that waits for a database that is away must not keep the process."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    end_process(main())
