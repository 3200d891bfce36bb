"""The process trials are forked from: `python -m autotune.execution.server.fork_server`.

It has imported all that a trial needs and started no kernel, no thread and no device, so that a
forked trial is at its first step in a fraction of a second and a CUDA context is the trial's own.
Requests come as JSON lines on stdin, replies leave as JSON lines on stdout:

    {"id": 3, "task": "train", "payload": {...}, "limits": {...}, "log_file": "...", "environment": {...}}
    {"cancel": 3}
    -> {"id": 3, "result": ..., "error": null, "seconds": 7.1}

A trial says through a pipe of its own what it is doing (`progress.py`), and has a deadline for that
(`limits.py`). It is ended by SIGTERM, and by SIGKILL a little later; whatever it started goes with
it, wherever it went (`process_tree.py`). When stdin closes, because the search has ended or was
killed, every trial is ended and then the server: nothing outlives a killed search. A trial in turn
is killed by the kernel when the server dies.
"""

import gc
import json
import os
import selectors
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from autotune.errors import TrialLost
from autotune.execution.server.child import END_SIGNALS, be_the_child, become_reaper, write_line
from autotune.execution.server.child_process import (
    ATTEMPTS_WHERE_DISTURBED,
    GRACE_SECONDS,
    LINGER_SECONDS,
    SECONDS_BETWEEN_ATTEMPTS,
    TRAININGS,
    ChildProcess,
    Ending,
    failure_of,
)
from autotune.execution.server.clean_imports import CudaTouched, without_touching_cuda
from autotune.execution.server.limits import TimeLimits
from autotune.execution.server.process_tree import descendants, kill_all, send, send_to_group

_LOOK_SECONDS = 2.0
"""How often a log's size is looked at, where nothing else happens."""
_GRACE_SECONDS_IN_THE_END = 1.0
_LINGER_SECONDS_IN_THE_END = 2.0
"""When the server itself ends: with the grace, less than the client waits for it."""
_LEFTOVER_SECONDS = 2.0
"""For what a trial left behind to be gone, before its result is passed on."""


class Server:
    def __init__(self, *, replies: int) -> None:
        self._replies = replies
        self._children: dict[int, ChildProcess] = {}
        self._selector = selectors.DefaultSelector()
        self._requests = b""
        self._is_closing = False

    def serve(self, *, requests: int) -> None:
        """Runs until `requests` is closed at its other end."""
        wakeup_read, wakeup_write = os.pipe()
        os.set_blocking(wakeup_read, False)
        os.set_blocking(wakeup_write, False)
        signal.set_wakeup_fd(wakeup_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._selector.register(requests, selectors.EVENT_READ, "requests")
        self._selector.register(wakeup_read, selectors.EVENT_READ, "child ended")
        while self._children or not self._is_closing:
            for key, _ in self._selector.select(timeout=self._seconds_to_deadline()):
                if key.data == "requests":
                    self._read_requests(requests)
                elif key.data == "child ended":
                    os.read(wakeup_read, 4096)
                else:
                    self._read_output(key.data)
            self._finish_ended()  # before deadlines: who has ended in time is not late
            self._enforce_deadlines()

    # -- requests ----------------------------------------------------------------------------------

    def _read_requests(self, requests: int) -> None:
        received = os.read(requests, 65536)
        *lines, self._requests = (self._requests + received).split(b"\n")
        for line in lines:
            request = json.loads(line)
            if "cancel" in request:
                self._end(self._children.get(request["cancel"]), why="cancelled")
            else:
                self._start(request)
        if not received:
            self._is_closing = True
            self._selector.unregister(requests)
            for child in self._children.values():
                self._end(child, why="cancelled")
                child.hurry(
                    grace_seconds=_GRACE_SECONDS_IN_THE_END,
                    linger_seconds=_LINGER_SECONDS_IN_THE_END,
                )

    def _start(self, request: dict[str, Any], *, attempt: int = 1) -> None:
        try:
            self._fork(request, attempt=attempt)
        except OSError as error:  # no more processes, no more memory
            lost = TrialLost(
                f"no process could be started: {error}", hint="the same command goes on from here"
            )
            self._send(failure_of(lost) | {"id": request["id"], "seconds": 0.0})

    def _fork(self, request: dict[str, Any], *, attempt: int) -> None:
        from autotune.execution.server.infrastructure import host_memory_kills

        read_end, write_end = os.pipe()
        memory_kills = host_memory_kills()
        with suppress(OSError):  # mostly there is none
            os.truncate(request["log_file"], 0)  # or an earlier one would count as this one's
        begins = time.monotonic()
        if attempt > 1:  # what disturbed the last one may still be at it
            begins += SECONDS_BETWEEN_ATTEMPTS
            request["payload"] = _asked_at(begins, request["payload"])
        server_pid, pid = os.getpid(), os.fork()
        if pid == 0:
            os.close(read_end)
            os.close(
                self._replies
            )  # or a process the trial leaves behind would keep the caller waiting
            be_the_child(request, server_pid=server_pid, result_pipe=write_end, begins=begins)
        os.close(write_end)
        os.set_blocking(read_end, False)
        limits = request.get("limits")
        child = ChildProcess(
            id=request["id"],
            task=request["task"],
            request=request,
            attempt=attempt,
            pid=pid,
            pipe=read_end,
            log_file=Path(request["log_file"]),
            limits=None if limits is None else TimeLimits(**limits),
            host_memory_kills=memory_kills,
            started=begins,
        )
        self._children[child.id] = child
        self._selector.register(read_end, selectors.EVENT_READ, child)

    # -- while they run ----------------------------------------------------------------------------

    def _read_output(self, child: ChildProcess) -> int:
        """How many bytes there were."""
        try:
            received = os.read(child.pipe, 65536)
        except BlockingIOError:
            return 0
        if received:
            child.receive(received)
        elif child.pipe in self._selector.get_map():
            self._selector.unregister(child.pipe)
        return len(received)

    def _read_all_output(self, child: ChildProcess) -> None:
        while self._read_output(child) and child.reply is None:
            pass

    def _seconds_to_deadline(self) -> float | None:
        if not self._children:
            return None
        deadlines = [
            at for child in self._children.values() if (at := child.deadline()) is not None
        ]
        return max(0.0, min([_LOOK_SECONDS, *(at - time.monotonic() for at in deadlines)]))

    def _enforce_deadlines(self) -> None:
        now = time.monotonic()
        for child in list(self._children.values()):
            why, words = child.to_be_ended(now)
            if why:
                self._end(child, why=why, words=words)
            if child.kill_at is not None and now >= child.kill_at:
                self._kill(child)
            elif child.give_up_at is not None and now >= child.give_up_at:
                self._give_up(child)

    # -- their end ---------------------------------------------------------------------------------

    def _end(
        self, child: ChildProcess | None, *, why: Ending, words: str = "stopped before its end"
    ) -> None:
        """Asks a process and all it started to end; one that was stopped goes on, so that it can."""
        if child is None:
            return
        child.may_be_repeated = False
        if child.ended_because:
            return
        self._read_all_output(child)
        if child.reply is not None:  # in time after all
            return
        child.ended_because, child.message = why, words
        if child.task not in TRAININGS:
            self._kill(child)
            return
        child.kill_at = time.monotonic() + GRACE_SECONDS
        started = descendants(child.pid)
        send_to_group(child.pid, signal.SIGTERM, signal.SIGCONT)
        send(started, signal.SIGTERM, signal.SIGCONT)

    def _kill(self, child: ChildProcess) -> None:
        linger_seconds = _LINGER_SECONDS_IN_THE_END if self._is_closing else LINGER_SECONDS
        child.kill_at, child.give_up_at = None, time.monotonic() + linger_seconds
        send_to_group(child.pid, signal.SIGKILL)
        send(descendants(child.pid), signal.SIGKILL)

    def _give_up(self, child: ChildProcess) -> None:
        """Passes on what is known of a process that not even SIGKILL has ended."""
        if child.reply is None:
            hint = "see the kernel's log for what it waits for; the same command goes on from here"
            child.reply = failure_of(
                TrialLost(f"process {child.pid} of the trial cannot be ended", hint=hint)
            )
        self._forget(child)

    def _collect(self) -> None:
        """Waits for every process that has ended; also those a trial left behind, whose parent we are by now."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            for child in self._children.values():
                if child.pid == pid:
                    child.exit_status = os.waitstatus_to_exitcode(status)

    def _finish_ended(self) -> None:
        self._collect()
        while ended := [
            child for child in self._children.values() if child.exit_status is not None
        ]:
            self._kill_what_is_left()
            for child in ended:
                self._read_all_output(child)
                self._forget(child)

    def _kill_what_is_left(self) -> None:
        """Ends what a trial that has ended left behind: by now ours, as those who live keep their own."""

        def left() -> list[int]:
            return descendants(
                os.getpid(), except_of=[child.pid for child in self._children.values()]
            )

        kill_all(left, within_seconds=_LEFTOVER_SECONDS, between=self._collect)

    def _forget(self, child: ChildProcess) -> None:
        del self._children[child.id]
        if child.pipe in self._selector.get_map():
            self._selector.unregister(child.pipe)
        os.close(child.pipe)
        if (
            child.was_disturbed
            and child.may_be_repeated
            and child.attempt < ATTEMPTS_WHERE_DISTURBED
        ):
            self._start(child.request, attempt=child.attempt + 1)
            return
        self._send(child.outcome() | {"id": child.id, "seconds": time.monotonic() - child.started})

    def _send(self, reply: dict[str, Any]) -> None:
        try:
            write_line(self._replies, reply)
        except BrokenPipeError:
            pass  # nobody is left to read it


def _asked_at(moment: float, payload: dict[str, Any]) -> dict[str, Any]:
    """The payload of a training whose start-up is counted from `moment`."""
    return {**payload, "requested_at": moment} if "requested_at" in payload else payload


def _import_what_trials_need() -> None:
    """Only imports: no kernel, no thread, no device, or the forked children would hang or share a CUDA context.

    Raises CudaTouched where an import has done so.
    """
    with without_touching_cuda():
        import torch._dynamo
        import torch._inductor.compile_fx  # noqa: F401

        import autotune.execution.server.failures
        import autotune.execution.server.progress
        import autotune.execution.server.tasks
        import autotune.predictor.predict
        import autotune.training.trainer  # noqa: F401


def main() -> None:
    # Keeps torch.cuda.is_available() from initializing CUDA, which a forked child could then not
    # use.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    for number in END_SIGNALS:  # they are for the search, which decides what ends
        signal.signal(number, signal.SIG_IGN)
    replies = os.dup(1)
    os.dup2(2, 1)
    become_reaper()
    try:
        _import_what_trials_need()
    except CudaTouched as error:
        write_line(replies, {"failed": f"{error}, so that trials could not use it"})
        raise
    gc.collect()
    gc.freeze()  # keeps the collector from touching, and so copying, pages shared with the children
    write_line(replies, {"ready": os.getpid()})
    Server(replies=replies).serve(requests=0)
    os._exit(
        0
    )  # taking down all that is imported costs more than a second, and the search waits for it


if __name__ == "__main__":
    main()
