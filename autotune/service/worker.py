"""Takes searches from the queue, and runs each as a process on a group of devices of this machine.

Any number of workers may use one database, on any number of machines; a server has one within it.
Which search a worker takes is decided by the queue (`analysis/queue_order.py`), in one transaction
with the check that nothing else runs on the group, so that no two take the same one. From then on
the process of the search gives signs of life by itself, and is not disturbed where its worker is
killed: another worker of the same machine watches it, and one of any machine queues the search
again once its lease has expired.
"""

import logging
import math
import shutil
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, fields
from pathlib import Path

from autotune import __version__
from autotune.analysis.queue_order import DeviceGroup
from autotune.errors import AutotuneError
from autotune.service.other_servers import OtherServers
from autotune.service.processes import (
    StartedProcess,
    find_process,
    kill_process,
    machine_of,
    seconds_since_start,
    start_process,
    stop_process,
    this_host,
)
from autotune.service.retention import Retention
from autotune.service.rounds import Rounds
from autotune.service.settings import ServerSettings, SubmissionRules
from autotune.service.submissions import file_not_here
from autotune.spec.queued_search import (
    SEARCH_LEASE_SECONDS,
    SEARCH_RENEWAL_SECONDS,
    WORKER_STOPPED,
    QueuedSearch,
    SearchEnd,
)
from autotune.storage.searches import Searches
from autotune.study.workers.liveness import LeaseWatch

_LOG = logging.getLogger("autotune.service.worker")

_LOOK_SECONDS = 0.05
_LEAST_SECONDS = 120.0
"""With less of its time left, a worker takes no search."""
_LAST_SECONDS = 60.0
"""So long before its time is over, it stops those that it has."""
_LONG_SECONDS = 600.0
"""Of less time, both are a share."""
_RETAIN_SECONDS = 600.0
STOP_SECONDS = 30.0
"""A search that does not end so long after it was cancelled is killed."""
START_SECONDS = 600.0
"""A process that has not begun its search so long after it was started is killed."""
_MOST_QUEUED = 1000
SEARCH_MODULE = "autotune.service.search_process"


class Worker(Rounds):
    """Runs searches on `groups` of devices of this machine; without any it only watches.

    Woken by a request, it looks at the queue at once.
    """

    def __init__(
        self,
        searches: Searches,
        others: OtherServers,
        settings: ServerSettings,
        *,
        groups: Sequence[DeviceGroup],
        log_folder: Path,
        retention: Retention,
        module: str = SEARCH_MODULE,
        stop_seconds: float = STOP_SECONDS,
    ) -> None:
        super().__init__(name="worker")
        self._searches = searches
        self._others = others
        self._settings = settings
        self.groups = groups
        self._log_folder = log_folder
        self._retention = retention
        self._retain_at = 0.0
        self._module = module
        self._stop_seconds = stop_seconds
        began = time.monotonic() - seconds_since_start()
        self._ends_at = began + (settings.time_limit or math.inf)
        self._children: dict[tuple[int, int], StartedProcess] = {}
        """The processes that this worker has started, by the number of the search and the run."""
        self._stopping_since: dict[tuple[int, int], float] = {}
        self._leases = LeaseWatch(
            time.monotonic,
            lease_seconds=SEARCH_LEASE_SECONDS,
            renewal_seconds=SEARCH_RENEWAL_SECONDS,
        )

    @property
    def is_over(self) -> bool:
        """Whether it must end now, to have ended when its time is over."""
        return self._seconds_left < self._share_of_time(_LAST_SECONDS)

    @property
    def _seconds_left(self) -> float:
        return self._ends_at - time.monotonic()

    def _share_of_time(self, seconds: float) -> float:
        """Returns `seconds`; less where the whole time is short."""
        return min(seconds, (self._settings.time_limit or math.inf) * seconds / _LONG_SECONDS)

    def log_file(self, number: int) -> Path:
        """Returns the file with what the processes of a search have printed."""
        return self._log_folder / f"{number}.log"

    def _files_of(self, search: QueuedSearch) -> Path:
        """Returns the folder of a search's files, which each start removes with its end."""
        return self._log_folder.absolute() / f"{search.id}.files"

    def _round(self) -> None:
        running = self._searches.running()
        self._reap(running)
        overdue = self._leases.overdue(
            {(search.id, search.run): (search.lease_until, search.is_expired) for search in running}
        )
        for search in running:
            self._watch(search, is_overdue=(search.id, search.run) in overdue)
        if time.monotonic() >= self._retain_at:
            self._retain_at = time.monotonic() + _RETAIN_SECONDS
            # A large folder takes long.
            active = {search.study for search in running}
            threading.Thread(target=self._retention.apply, args=(active,), daemon=True).start()
        if self._seconds_left < self._share_of_time(_LEAST_SECONDS):
            self._others.withdraw_groups()
        elif self.groups and self._searches.counts().get("queued"):
            busy = {(search.host, search.group) for search in running}
            for group in self.groups:
                if (group.machine, group.name) not in busy:
                    self._begin_on(group)

    def _begin_on(self, group: DeviceGroup) -> None:
        rules = self._rules(group)  # may fail, and a search that is claimed has to be started
        search = self._searches.claim_next(
            group, version=__version__, lacking=self._lacking_files(group)
        )
        if search is None:
            return
        order = {
            "storage": self._settings.storage,
            "search": search.id,
            "run": search.run,
            "rules": rules,
            "folder": str(self._files_of(search)),
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
            self._searches.end_lost_run(search.id, search.run, end)
            return
        self._children[search.id, search.run] = started
        _LOG.info("search %d begins: study %s", search.id, search.study)

    def _lacking_files(self, group: DeviceGroup) -> dict[int, str]:
        """Returns {search that waits: why not here} of those with a file that is not here."""
        rules = self._settings.rules(group.name)
        queued, _ = self._searches.find(states=("queued",), limit=_MOST_QUEUED)
        found = {search.id: file_not_here(search.request, rules) for search in queued}
        machine = machine_of(group.machine)
        return {
            number: f"it waits for a worker with {file} in a folder for data or code, which "
            f"{machine} has not"
            for number, file in found.items()
            if file is not None
        }

    def _rules(self, group: DeviceGroup) -> dict[str, object]:
        """Returns what a search may have: files of this machine, and what the leader allows."""
        limits = self._searches.lead().limits
        of_searches = {field.name for field in fields(SubmissionRules)}
        allowed = {name: value for name, value in limits.items() if name in of_searches}
        return {**asdict(self._settings.rules(group.name)), **allowed}

    def _reap(self, running: Sequence[QueuedSearch]) -> None:
        """Wait for own processes that have ended and said how."""
        known = {(search.id, search.run) for search in running}
        for key, child in list(self._children.items()):
            if key not in known and child.how_it_ended() is not None:
                del self._children[key]
                self._stopping_since.pop(key, None)

    def _watch(self, search: QueuedSearch, *, is_overdue: bool) -> None:
        """See whether the process of a running search is still there; cancel it if asked to."""
        key = (search.id, search.run)
        child = self._children.get(key)
        if child is not None:
            how = child.how_it_ended()
        elif self._is_elsewhere(search):
            how = "its process has given no sign of life" if is_overdue else None
        else:
            how = self._fate(search)
        if how is not None:
            end = SearchEnd(state="queued", reason=how, is_loss=True)
            is_known = child is not None or not self._is_elsewhere(search)
            lost = self._searches.end_lost_run(
                search.id,
                search.run,
                end,
                unrenewed_since=None if is_known else search.lease_until,
            )
            if lost is not None:
                _LOG.warning("search %d: %s; it is %s", search.id, how, lost.state)
                if lost.has_ended:
                    shutil.rmtree(self._files_of(search), ignore_errors=True)
        elif child is not None and search.process is None:
            self._await(search, child)
        elif search.is_stopping:
            self._stop(search, key)

    def _await(self, search: QueuedSearch, child: StartedProcess) -> None:
        """Give the signs of life of a process that has not begun: it imports, or waits.

        One that does not begin at all is killed.
        """
        if time.monotonic() - child.started_at > START_SECONDS:
            _LOG.warning("search %d did not begin, and is killed", search.id)
            kill_process(child.process)
        else:
            self._searches.await_run(search.id, search.run)

    def _fate(self, search: QueuedSearch) -> str | None:
        """Returns how the process that another worker of this machine has started was lost."""
        assert search.process is not None
        return None if find_process(search.process) is not None else "its process has ended"

    def _is_elsewhere(self, search: QueuedSearch) -> bool:
        """Whether no process of this machine is known to run a search."""
        return search.process is None or search.process.host != this_host()

    def _stop(self, search: QueuedSearch, key: tuple[int, int]) -> None:
        """Tell the process at once, which would see it within seconds; kill one that hangs."""
        if search.process is None:
            return
        if key not in self._stopping_since:
            self._stopping_since[key] = time.monotonic()
            stop_process(search.process)
        elif time.monotonic() - self._stopping_since[key] > self._stop_seconds:
            _LOG.warning("search %d did not stop, and is killed", search.id)
            kill_process(search.process)

    def _finish(self) -> None:
        """Stop the searches on its groups, which the next worker resumes.

        One that another worker of this machine has started is left to it, if it is there.
        """
        processes = {key: child.process for key, child in self._children.items()}
        try:
            running = self._searches.running()
            own = {group.name for group in self.groups} - self._others.groups_here()
        except AutotuneError as error:
            _LOG.warning("searches of earlier workers go on: %s", error.message)
        else:
            for search in running:
                if search.group in own and not self._is_elsewhere(search):
                    assert search.process is not None
                    processes[search.id, search.run] = search.process
        for process in processes.values():
            stop_process(process)
        deadline = time.monotonic() + self._stop_seconds
        while any(map(find_process, processes.values())) and time.monotonic() < deadline:
            time.sleep(_LOOK_SECONDS)
        # A process that had just been started may have ended before it could say so.
        end = SearchEnd(state="queued", reason=WORKER_STOPPED)
        for (number, run), process in processes.items():
            if find_process(process) is None:
                with suppress(AutotuneError):
                    self._searches.end_lost_run(number, run, end)
        self._reap(())
