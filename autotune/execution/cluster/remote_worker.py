"""A worker on a node, as the driver sees it: requests, what it is doing, and whether it lives.

While a request runs, the driver asks for the worker's state; the worker answers when something has
changed, or every few seconds. A worker that no longer answers is killed: its node hangs, or the
network to it is gone. Whatever ends a worker is an infrastructure loss, whose trial runs again.
"""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYet
from pathlib import Path
from typing import Any, TypeVar

import ray
import ray.exceptions

from autotune.errors import AutotuneError, Stopped, TrialLost
from autotune.execution.cluster.worker import WorkerReply, WorkerState
from autotune.execution.flow import POLL_SECONDS
from autotune.execution.server.replies import MalformedReply, TaskReply, decode, reply_of
from autotune.spec.reading import check

R = TypeVar("R")

_ANSWERS = ThreadPoolExecutor(8, thread_name_prefix="ray answers")
"""Handles what workers answer: Ray calls back in a thread of its own, in which its functions may
wait for that thread."""

REQUESTS_AT_ONCE = 4
CALLS_AT_ONCE = 2 * REQUESTS_AT_ONCE
"""Of the actor: requests, and questions that it answers at once."""
_NO_CONNECTION = (ray.exceptions.RayError, ConnectionError, RuntimeError)
"""What Ray raises where a call cannot even be made: the client has lost its cluster."""
SECONDS_WITHOUT_ANSWER = 30.0
_SECONDS_BETWEEN_ANSWERS = 5.0
_SECONDS_TO_CLOSE = 3.0


class RemoteWorker:
    """Sends requests to a worker, which `start` makes as a Ray actor.

    No more than `REQUESTS_AT_ONCE` are under way.

    `place` names it for the user, such as `node7 gpu 3`, and `node` is Ray's id of its node. `note`
    gets its sentences for the user.
    """

    def __init__(
        self,
        start: Callable[[], Any],
        *,
        place: str,
        node: str,
        note: Callable[[str], None],
    ) -> None:
        self.place = place
        self.node = node
        self._note = note
        self._actor = start()
        self._numbers = iter(range(1, 2**62))
        self._lock = threading.Lock()
        self._running: dict[int, Future[Any]] = {}
        self._state = WorkerState()
        self._last_answer = time.monotonic()
        self._is_watched = False
        self._is_lost = False
        self.has_worked = False
        """Whether it has run a trial to its end."""
        self.folder = Path()
        """The folder of the search on its node, once it is ready."""
        self.sharing = ""
        """How trials share the CPUs of its node, once it is ready."""
        self.why_lost = ""
        """A sentence, without its full stop, on why it is lost."""
        self.ready: Future[None] = Future()
        """Done when Ray has given the worker its device; TrialLost where it was not started."""
        _then(self._actor.describe.remote(), self._hear_that_it_is_ready)

    @property
    def actor(self) -> Any:
        """Ray's handle of it."""
        return self._actor

    @property
    def is_lost(self) -> bool:
        """Whether the worker has ended or no longer answers."""
        return self._is_lost

    def give_up(self, why: str) -> None:
        """Kills it: another worker has found that it is lost."""
        self._lose(TrialLost(why))

    @property
    def state(self) -> WorkerState:
        """What it is doing, as last heard."""
        return self._state

    def _hear_that_it_is_ready(self, done: Future[Any]) -> None:
        error = done.exception()
        if error is None:
            self.folder = Path(done.result()["folder"])
            self.sharing = done.result()["sharing"]
            self.ready.set_result(None)
        else:
            self._lose(error)
            self.ready.set_exception(TrialLost(self.why_lost))

    # -- requests ----------------------------------------------------------------------------------

    def request(self, method: str, read: Callable[[WorkerReply], R], **arguments: Any) -> Future[R]:
        """Has the worker perform a method; the future's result is what `read` makes of its answer.

        Its error is what `read` raises, or TrialLost. A failure where a result is used would leave
        its request without an end, so that `read` checks all.
        """
        number = next(self._numbers)
        future: Future[R] = Future()
        with self._lock:
            self._running[number] = future
        if self._is_lost:
            self._fail(number, self.why_lost)
            return future
        try:
            reference = self._actor.perform.remote(number, method, arguments)
            _then(reference, lambda done: self._settle(number, read, done))
            self._watch()
        except _NO_CONNECTION as error:
            self._lose(error)
        return future

    def _settle(self, number: int, read: Callable[[WorkerReply], Any], done: Future[Any]) -> None:
        error = done.exception()
        if error is not None:
            self._lose(error)
            return
        answer = done.result()
        if not isinstance(answer, WorkerReply):  # of a worker that a trial has changed
            self._lose(TrialLost(f"{self.place} gave an answer that is none"))
            return
        value, failure = None, None
        try:
            check(answer)
            value = read(answer)
        except AutotuneError as of_task:
            failure = of_task
        except (MalformedReply, ValueError, TypeError, AttributeError) as unreadable:
            self._fail(number, f"{self.place} sends what cannot be read: {unreadable}")
            return
        for sentence in answer.notes:
            self._note(f"{self.place}: {sentence}")
        with self._lock:
            future = self._running.pop(number, None)
        if future is None:
            return
        if failure is None:
            future.set_result(value)
        else:
            future.set_exception(failure)

    def cancel(self, future: Future[Any]) -> None:
        """Ends the request of a future, which then raises Stopped."""
        with self._lock:
            numbers = [number for number, known in self._running.items() if known is future]
        for number in numbers:
            self._actor.cancel.remote(number)

    def ask(
        self, method: str, *, seconds: float, should_stop: Callable[[], bool], **arguments: Any
    ) -> Any:
        """Returns what a method of the worker returns soon, such as `lacking`.

        Raises TrialLost where it has ended, or does not answer for so many seconds, and Stopped.
        """
        answer = self.request(method, lambda found: reply_in(found).result, **arguments)
        end = time.monotonic() + seconds
        while True:
            try:
                return answer.result(timeout=POLL_SECONDS)
            except NotYet:
                if should_stop():
                    raise Stopped(
                        "the search was stopped", hint="the same command begins again"
                    ) from None
                if time.monotonic() > end:
                    self._lose(TrialLost(f"{self.place} does not answer for {seconds:.0f} s"))

    # -- whether it lives --------------------------------------------------------------------------

    def _watch(self) -> None:
        """Keeps one question for the state under way while a request runs."""
        with self._lock:
            if self._is_watched or not self._running or self._is_lost:
                return
            self._last_answer = time.monotonic()
            self._is_watched = True
        self._ask_state()

    def _ask_state(self) -> None:
        reference = self._actor.state.remote(self._state.version, _SECONDS_BETWEEN_ANSWERS)
        _then(reference, self._hear_state)

    def _hear_state(self, done: Future[Any]) -> None:
        error = done.exception()
        if error is not None:
            self._is_watched = False
            self._lose(error)
            return
        self._state = done.result()
        self._last_answer = time.monotonic()
        with self._lock:
            self._is_watched = bool(self._running) and not self._is_lost
            goes_on = self._is_watched
        if goes_on:
            self._ask_state()

    def check(self) -> None:
        """Kills a worker that has not answered for too long; called while a request is waited for.

        Its requests then end with TrialLost.
        """
        silent = time.monotonic() - self._last_answer
        if self._is_watched and silent > SECONDS_WITHOUT_ANSWER:
            self._lose(TrialLost(f"{self.place} does not answer for {silent:.0f} s"))

    def _lose(self, error: BaseException) -> None:
        with self._lock:
            was_lost = self._is_lost
            self.why_lost = self.why_lost or why_lost(self.place, error)
            self._is_lost = True
            numbers = list(self._running)
        for number in numbers:
            self._fail(number, self.why_lost)
        if not was_lost:
            self._kill()

    def _fail(self, number: int, message: str) -> None:
        with self._lock:
            future = self._running.pop(number, None)
        if future is not None:
            future.set_exception(TrialLost(message, hint="run the same command again to continue"))

    def _kill(self) -> None:
        try:
            ray.kill(self._actor)
        except (ray.exceptions.RayError, RuntimeError, ConnectionError):
            pass  # the cluster is gone, and the worker with it

    def close(self) -> None:
        """Ends the worker, and what it runs, within seconds."""
        if not self._is_lost:
            try:
                self.ask("close", seconds=_SECONDS_TO_CLOSE, should_stop=lambda: False)
            except AutotuneError:
                pass  # then it is killed, and another worker of the node removes its files
        self._is_lost = True
        self._kill()


def reply_in(answer: WorkerReply) -> TaskReply:
    """Returns what a request has ended with. Raises its error, and MalformedReply."""
    reply = reply_of(decode(answer.line))
    if reply.error is not None:
        raise reply.error.exception()
    return reply


def _then(reference: Any, handle: Callable[[Future[Any]], None]) -> None:
    """Has `handle` called with the future of a reference when it is done."""
    reference.future().add_done_callback(lambda done: _ANSWERS.submit(handle, done))


def why_lost(place: str, error: BaseException) -> str:
    """Returns a sentence, without its full stop, on the end of a worker."""
    if isinstance(error, AutotuneError):
        return error.message
    if isinstance(error, ray.exceptions.OutOfMemoryError):
        return f"Ray ended the trial on {place}, whose node runs out of memory"
    if isinstance(error, ray.exceptions.NodeDiedError):
        return f"the node of {place} has left the cluster"
    if isinstance(error, ray.exceptions.RayActorError):
        return f"the process of {place} has ended"
    if isinstance(error, ray.exceptions.RayTaskError):
        return f"the process of {place} has failed: {error.cause!r}"
    return f"{place} is lost: {type(error).__name__}"
