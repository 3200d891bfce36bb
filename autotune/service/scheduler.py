"""Runs the queue: the leading server begins searches, watches their processes, and begins the next.

Any number of servers may use one database; one leads. Its lead is a row that it renews: where it
does not for LEAD_SECONDS, or its process is seen to be dead, another takes the lead and goes on.
Searches that run meanwhile are not disturbed: each gives signs of life to the database by itself.
Everything here is repeated after a failure, and each write to the database names the epoch of the
lead, so that a server that was paused for a while changes nothing when it wakes up.
"""

import json
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import httpx

from autotune import __version__
from autotune.errors import AutotuneError
from autotune.service.processes import (
    StartedProcess,
    find_process,
    kill_process,
    start_process,
    stop_process,
    this_host,
    this_process,
)
from autotune.service.retention import Retention
from autotune.service.search_json import search_object
from autotune.service.settings import ServerSettings
from autotune.spec.queued_search import QueuedSearch, SearchEnd, SearchProcess
from autotune.spec.reading import parse
from autotune.storage.leases import LeaseLost
from autotune.storage.searches import Searches

_LOG = logging.getLogger("autotune.service")

_ROUND_SECONDS = 1.0
_LOOK_SECONDS = 0.05
_RENEW_SECONDS = 2.0
STOP_SECONDS = 30.0
"""A search that does not end so long after it was cancelled is killed."""
_WEBHOOK_SECONDS = 10.0
_WEBHOOK_TRIES = 3
_ANNOUNCE_SECONDS = 2.0
_MOST_RUNNING = 1000
_PRUNE_SECONDS = 600.0
_MOST_EVENTS = 100_000
"""Older ones are removed; a reader that was away for longer reads everything again."""
SEARCH_MODULE = "autotune.service.search_process"


class Scheduler:
    """A thread that leads where no other server does. Use it as a context manager.

    `webhooks_of_people` returns the URL that is told of the searches of each person who has one.
    `woken` by a request, it looks at the queue at once.
    """

    def __init__(
        self,
        searches: Searches,
        settings: ServerSettings,
        *,
        log_folder: Path,
        retention: Retention,
        webhooks_of_people: Callable[[], Mapping[str, str]] = dict,
        clock: Callable[[], float] = time.monotonic,
        module: str = SEARCH_MODULE,
        stop_seconds: float = STOP_SECONDS,
    ) -> None:
        self._searches = searches
        self._settings = settings
        self._log_folder = log_folder
        self._retention = retention
        self._webhooks_of_people = webhooks_of_people
        self._clock = clock
        self._module = module
        self._stop_seconds = stop_seconds
        own = this_process()
        self._holder = json.dumps(asdict(own))
        self._epoch: int | None = None
        self._renew_at = 0.0
        self._prune_at = 0.0
        self._retain_at = 0.0
        self._announce_at = 0.0
        self._children: dict[tuple[int, int], StartedProcess] = {}
        """The processes that this server has started, by the number of the search and the run."""
        self._stopping_since: dict[tuple[int, int], float] = {}
        self._woken = threading.Event()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._work, name="scheduler", daemon=True)
        self._announcing = threading.Lock()

    def __enter__(self) -> "Scheduler":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop the searches of this server, which the next one goes on with, and give the lead."""
        self._ended.set()
        self._woken.set()
        self._thread.join(timeout=2 * STOP_SECONDS)

    @property
    def is_leading(self) -> bool:
        """Whether this server runs the queue."""
        return self._epoch is not None

    def wake(self) -> None:
        """Have the queue looked at now."""
        self._woken.set()

    def log_file(self, number: int) -> Path:
        """Returns the file with what the processes of a search have printed."""
        return self._log_folder / f"{number}.log"

    # -- the thread ----------------------------------------------------------------------------

    def _work(self) -> None:
        while not self._ended.is_set():
            self._woken.clear()
            try:
                self._round()
            except LeaseLost:
                _LOG.warning("another server has taken the lead; this one is the standby now")
                self._epoch = None
            except AutotuneError as error:
                _LOG.warning("the queue waits: %s", error.message)
            except Exception:
                _LOG.exception("the queue has failed; it is tried again")
            self._woken.wait(_ROUND_SECONDS)
        self._stop_all()

    def _round(self) -> None:
        running, _ = self._searches.find(states=("running",), limit=_MOST_RUNNING)
        self._reap(running)
        if self._clock() >= self._retain_at:
            self._retain_at = self._clock() + _PRUNE_SECONDS
            # A large folder takes longer than the lead lasts.
            active = {search.study for search in running}
            threading.Thread(target=self._retention.apply, args=(active,), daemon=True).start()
        if self._epoch is None:
            self._epoch = self._take_lead()
            if self._epoch is None:
                return
            _LOG.info("this server leads (epoch %d)", self._epoch)
        for search in running:
            self._watch(self._epoch, search)
        if self._clock() >= self._renew_at:
            self._searches.keep_lead(self._epoch)
            self._renew_at = self._clock() + _RENEW_SECONDS
        if self._searches.counts().get("queued"):
            self._begin_searches(self._epoch)
        self._announce(self._epoch)
        if self._clock() >= self._prune_at:
            self._prune_at = self._clock() + _PRUNE_SECONDS
            self._searches.prune_events(self._epoch, most=_MOST_EVENTS)

    def _take_lead(self) -> int | None:
        lead = self._searches.lead()
        dead_epoch = -1
        if lead.holder:
            with suppress(ValueError, TypeError, RecursionError):
                holder = parse(SearchProcess, json.loads(lead.holder))
                if holder.host == this_host() and find_process(holder) is None:
                    dead_epoch = lead.epoch
        if lead.version not in ("", __version__):
            _LOG.info("the queue was led by autotune %s; this is %s", lead.version, __version__)
        return self._searches.take_lead(self._holder, version=__version__, dead_epoch=dead_epoch)

    def _begin_searches(self, epoch: int) -> None:
        for group in self._settings.device_groups:
            search = self._searches.claim_next(epoch, group=group, version=__version__)
            if search is not None:
                self._start(epoch, search)

    def _start(self, epoch: int, search: QueuedSearch) -> None:
        order = {
            "storage": self._settings.storage,
            "search": search.id,
            "run": search.run,
            "rules": asdict(self._settings.rules(search.group)),
        }
        try:
            started = start_process(self._module, order, log_file=self.log_file(search.id))
        except OSError as error:
            end = SearchEnd(
                state="failed",
                reason=f"its process could not be started: {error.strerror or error}",
                hint="continue it once the machine has room",
                exit_code=70,
            )
            self._searches.end_lost_run(epoch, search.id, search.run, end)
            return
        self._children[search.id, search.run] = started
        _LOG.info("search %d begins: study %s", search.id, search.study)

    def _reap(self, running: Sequence[QueuedSearch]) -> None:
        """Wait for own processes that have ended and said how."""
        known = {(search.id, search.run) for search in running}
        for key, child in list(self._children.items()):
            if key not in known and child.how_it_ended() is not None:
                del self._children[key]
                self._stopping_since.pop(key, None)

    def _watch(self, epoch: int, search: QueuedSearch) -> None:
        """See whether the process of a running search is still there; cancel it if asked to."""
        key = (search.id, search.run)
        child = self._children.get(key)
        how = self._fate(search) if child is None else child.how_it_ended()
        if how is not None:
            end = SearchEnd(state="queued", reason=how, is_loss=True)
            lost = self._searches.end_lost_run(epoch, search.id, search.run, end)
            if lost is not None:
                _LOG.warning("search %d: %s; it is %s", search.id, how, lost.state)
        elif search.is_stopping:
            self._stop(search, key)

    def _fate(self, search: QueuedSearch) -> str | None:
        """Returns how the process that another server has started was lost.

        None while it may live. Of another machine only signs of life are known.
        """
        process = search.process
        if process is not None and process.host == this_host():
            return None if find_process(process) is not None else "its process has ended"
        return "its process has given no sign of life" if search.is_expired else None

    def _stop(self, search: QueuedSearch, key: tuple[int, int]) -> None:
        """Tell the process at once, which would see it within seconds; kill one that hangs."""
        if search.process is None:
            return
        if key not in self._stopping_since:
            self._stopping_since[key] = self._clock()
            stop_process(search.process)
        elif self._clock() - self._stopping_since[key] > self._stop_seconds:
            _LOG.warning("search %d did not stop, and is killed", search.id)
            kill_process(search.process)

    def _stop_all(self) -> None:
        """Stop the searches of this machine, which the next server resumes, and give the lead.

        A server that does not lead leaves its searches to the one that does.
        """
        if self._epoch is None:
            return
        try:
            running, _ = self._searches.find(states=("running",), limit=_MOST_RUNNING)
        except AutotuneError as error:
            _LOG.warning("the searches go on without a server: %s", error.message)
            return
        processes = {child.process for child in self._children.values()}
        processes |= {search.process for search in running if search.process is not None}
        for process in processes:
            stop_process(process)
        end = time.monotonic() + self._stop_seconds
        while any(find_process(process) for process in processes) and time.monotonic() < end:
            time.sleep(_LOOK_SECONDS)
        self._reap(())
        with suppress(AutotuneError):
            self._searches.give_lead(self._epoch)
        self._epoch = None

    # -- webhooks ----------------------------------------------------------------------------------

    def _announce(self, epoch: int) -> None:
        """Call the webhooks for searches that have ended, in a thread of its own."""
        if self._clock() < self._announce_at:
            return
        self._announce_at = self._clock() + _ANNOUNCE_SECONDS
        of_people = self._webhooks_of_people()
        if self._settings.webhook is None and not of_people:
            return
        if not self._announcing.acquire(blocking=False):
            return
        threading.Thread(target=self._call_webhooks, args=(epoch, of_people), daemon=True).start()

    def _call_webhooks(self, epoch: int, of_people: Mapping[str, str]) -> None:
        of_all = self._settings.webhook
        try:
            for search in self._searches.to_announce(by=of_people if of_all is None else None):
                urls = {of_all, of_people.get(search.submitted_by)} - {None}
                if all(self._post(url, search) for url in urls if url is not None):
                    self._searches.set_announced(epoch, [search.id])
        except (LeaseLost, AutotuneError):
            pass  # the next leader announces what is left
        finally:
            self._announcing.release()

    def _post(self, url: str, search: QueuedSearch) -> bool:
        """Call the webhook; return whether that is done with, also if it fails every time."""
        message = {"event": "search_ended", "search": search_object(search)}
        for attempt in range(1, _WEBHOOK_TRIES + 1):
            try:
                # Its status is enough: what follows it could be without end.
                with httpx.stream("POST", url, json=message, timeout=_WEBHOOK_SECONDS) as response:
                    response.raise_for_status()
            except (httpx.HTTPError, httpx.InvalidURL) as error:
                _LOG.warning("the webhook has failed for search %d: %s", search.id, error)
                if self._ended.wait(2.0**attempt):
                    return False  # the next server calls it
            else:
                return True
        return True
