"""What one server of a database does for all: it says the limits, calls webhooks, prunes events.

Any number of servers may use one database; one leads. Its lead is a row that it renews: where it
does not for LEAD_SECONDS, or its process is seen to be dead, another takes the lead and goes on.
Searches do not depend on it: workers take them (`worker.py`), with or without a leader. Everything
here is repeated after a failure, and each write to the database names the epoch of the lead, so
that a server that was paused for a while changes nothing when it wakes up.
"""

import json
import logging
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from urllib.parse import urlsplit

import httpx

from autotune import __version__
from autotune.errors import AutotuneError, class_and_first_line_of
from autotune.service.processes import find_process, this_host, this_process
from autotune.service.rounds import Rounds
from autotune.service.search_json import search_object
from autotune.service.settings import ServerSettings
from autotune.spec.queued_search import QueuedSearch, SearchProcess
from autotune.spec.reading import parse
from autotune.storage.leases import LeaseLost
from autotune.storage.searches import Searches

_LOG = logging.getLogger("autotune.service")

_RENEW_SECONDS = 2.0
_WEBHOOK_SECONDS = 10.0
_WEBHOOK_TRIES = 3
_ANNOUNCE_SECONDS = 2.0
_PRUNE_SECONDS = 600.0
_MOST_EVENTS = 100_000
"""Older ones are removed; a reader that was away for longer reads everything again."""


class Leader(Rounds):
    """A thread that leads where no other server does.

    `webhooks_of_people` returns the URL that is told of the searches of each person who has one.
    """

    def __init__(
        self,
        searches: Searches,
        settings: ServerSettings,
        *,
        webhooks_of_people: Callable[[], Mapping[str, str]] = dict,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(name="leader")
        self._searches = searches
        self._settings = settings
        self._webhooks_of_people = webhooks_of_people
        self._clock = clock
        self._holder = json.dumps(asdict(this_process()))
        self._epoch: int | None = None
        self._renew_at = 0.0
        self._prune_at = 0.0
        self._announce_at = 0.0
        self._announcing = threading.Lock()

    @property
    def is_leading(self) -> bool:
        """Whether this server leads."""
        return self._epoch is not None

    def _round(self) -> None:
        if self._epoch is None:
            self._epoch = self._take_lead()
            if self._epoch is None:
                return
            _LOG.info("this server leads (epoch %d)", self._epoch)
        try:
            self._lead(self._epoch)
        except LeaseLost:
            _LOG.warning("another server has taken the lead; this one is the standby now")
            self._epoch = None

    def _lead(self, epoch: int) -> None:
        if self._clock() >= self._renew_at:
            self._searches.keep_lead(epoch)
            self._renew_at = self._clock() + _RENEW_SECONDS
        self._announce(epoch)
        if self._clock() >= self._prune_at:
            self._prune_at = self._clock() + _PRUNE_SECONDS
            self._searches.prune_events(epoch, most=_MOST_EVENTS)

    def _finish(self) -> None:
        """Let another server lead at once."""
        if self._epoch is not None:
            with suppress(AutotuneError):
                self._searches.give_lead(self._epoch)
        self._epoch = None

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
        return self._searches.take_lead(
            self._holder,
            version=__version__,
            dead_epoch=dead_epoch,
            limits=self._settings.limits,
        )

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
                host, why = urlsplit(url).hostname, _without_url(error)
                _LOG.warning("the webhook at %s has failed for search %d: %s", host, search.id, why)
                if self._ended.wait(2.0**attempt):
                    return False  # the next server calls it
            else:
                return True
        return True


def _without_url(error: httpx.HTTPError | httpx.InvalidURL) -> str:
    """Returns why a webhook has failed; its URL is a secret, which the library's sentences name."""
    if isinstance(error, httpx.HTTPStatusError):
        return f"it answered {error.response.status_code}"
    if isinstance(error, httpx.TransportError):
        return class_and_first_line_of(error)
    return "its URL is invalid"
