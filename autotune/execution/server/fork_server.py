"""The process trials are forked from: `python -m autotune.execution.server.fork_server`.

It has imported everything that a trial needs, but has run no kernel, started no thread and touched
no device. A forked trial thus starts within a fraction of a second and creates its own CUDA
context. Requests are JSON lines on stdin, replies are JSON lines on stdout:

    {"id": 3, "task": "train", "payload": {...}, "is_training": true, "requested_at": 12.5,
     "rests": false, "limits": {...}, "log_file": "...", "environment": {...}}
    {"cancel": 3}
    -> {"id": 3, "result": ..., "error": null, "ended": null, "seconds": 7.1}
    -> {"beat": 12}

The beat is sent at a fixed interval while the server serves, so that the client notices a server
that no longer does: a trial may have stopped it, and would then have no limit of time.

A trial reports through a pipe what it is doing (`process/progress.py`), and has a deadline for each
phase (`limits.py`). It is ended by SIGTERM, and by SIGKILL a little later, together with every
process that it started (`process_tree.py`). While a training is timed, the processes of a request
that `rests`, such as a prediction beside it, are stopped, so that they do not slow it down.

When stdin closes, because the search has ended or was killed, the server ends every trial and then
itself: nothing outlives a killed search. When the server dies, the kernel kills its trials.
"""

import fcntl
import gc
import importlib
import json
import os
import selectors
import signal
import sys
import termios
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from autotune.errors import TrialLost
from autotune.execution.process.request import END_SIGNALS, run_child
from autotune.execution.server.child_process import (
    GRACE_SECONDS,
    LINGER_SECONDS,
    MAX_DISTURBED_ATTEMPTS,
    SECONDS_BETWEEN_ATTEMPTS,
    ChildProcess,
    Ending,
)
from autotune.execution.server.clean_imports import CudaTouched, without_touching_cuda
from autotune.execution.server.infrastructure import host_memory_kills
from autotune.execution.server.limits import TimeLimits
from autotune.execution.server.process_tree import (
    become_reaper,
    descendants,
    kill_all,
    send,
    send_to_group,
)
from autotune.execution.server.replies import TaskReply, failure, write_line

_MODULES_OF_TRIALS = (
    "torch._dynamo",
    "torch._inductor.compile_fx",
    "autotune.execution.process.progress",
    "autotune.execution.process.answers",
)
"""With these, everything that a trial needs is imported. Not at the top of this module: `main` sets
the environment, the signals and the output before."""
BEAT_SECONDS = 5.0
"""How often the server says that it serves."""
_PIPE_BYTES = 65536
_GRACE_SECONDS_WHEN_CLOSING = 1.0
_LINGER_SECONDS_WHEN_CLOSING = 2.0
"""While the server itself ends. Both together are less than the client waits for it."""
_LEFTOVER_SECONDS = 2.0
"""How long a reply waits for the processes that its trial left behind to end."""


class Server:
    """Forks a process for each request, and writes the replies to the descriptor `replies`."""

    def __init__(self, *, replies: int) -> None:
        self._replies = replies
        self._children: dict[int, ChildProcess] = {}
        self._selector = selectors.DefaultSelector()
        self._wakeup_write = -1
        self._requests = b""
        self._is_closing = False
        self._imported: set[str] = set()
        self._beats = 0
        self._next_beat = time.monotonic()

    def serve(self, *, requests: int) -> None:
        """Handles requests until the other end of `requests` is closed and all children ended."""
        wakeup_read, self._wakeup_write = os.pipe()
        os.set_blocking(wakeup_read, False)
        os.set_blocking(self._wakeup_write, False)
        signal.set_wakeup_fd(self._wakeup_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._selector.register(requests, selectors.EVENT_READ, "requests")
        self._selector.register(wakeup_read, selectors.EVENT_READ, "child ended")
        while self._children or not self._is_closing:
            self._beat()
            for key, _ in self._selector.select(timeout=self._seconds_to_deadline()):
                if key.data == "requests":
                    self._read_requests(requests)
                elif key.data == "child ended":
                    os.read(wakeup_read, 4096)
                else:
                    self._read_output(key.data)
            self._finish_ended()  # before the deadlines, which a child that has ended has met
            self._let_rest()
            self._enforce_deadlines()

    def _beat(self) -> None:
        if time.monotonic() >= self._next_beat:
            self._beats += 1
            self._next_beat = time.monotonic() + BEAT_SECONDS
            self._send({"beat": self._beats})

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
                child.shorten_deadlines(
                    grace_seconds=_GRACE_SECONDS_WHEN_CLOSING,
                    linger_seconds=_LINGER_SECONDS_WHEN_CLOSING,
                )

    def _start(self, request: dict[str, Any], *, attempt: int = 1) -> None:
        modules = [name for name in request.get("modules", ()) if name not in self._imported]
        if modules:
            self._imported.update(modules)
            _import_without_gpu(modules)
        try:
            self._fork(request, attempt=attempt)
        except OSError as error:  # no more processes, no more memory
            lost = TrialLost(
                f"no process could be started: {error}",
                hint="run the same command again to continue",
            )
            self._reply(request["id"], failure(lost))

    def _fork(self, request: dict[str, Any], *, attempt: int) -> None:
        read_end, write_end = os.pipe()
        memory_kills = host_memory_kills()
        with suppress(OSError):  # usually there is no log yet
            os.truncate(request["log_file"], 0)  # an old log must not count as this trial's
        begins = time.monotonic()
        if attempt > 1:  # the process that disturbed the last attempt may still be running
            begins += SECONDS_BETWEEN_ATTEMPTS
            request["requested_at"] = begins  # a training counts its start-up time from then on
        server_pid = os.getpid()
        pid = os.fork()
        if pid == 0:
            os.close(read_end)
            self._close_in_fork()
            run_child(request, server_pid=server_pid, result_pipe=write_end, begins=begins)
        os.close(write_end)
        os.set_blocking(read_end, False)
        limits = request.get("limits")
        if limits is not None:
            limits = TimeLimits(**limits)
        child = ChildProcess(
            id=request["id"],
            request=request,
            attempt=attempt,
            pid=pid,
            pipe=read_end,
            log_file=Path(request["log_file"]),
            limits=limits,
            host_memory_kills=memory_kills,
            started=begins,
        )
        self._children[child.id] = child
        self._selector.register(read_end, selectors.EVENT_READ, child)

    def _close_in_fork(self) -> None:
        """Closes what only the server may use: its caller's pipe, and those of other children.

        A process that the trial leaves behind would otherwise keep the caller waiting.
        """
        signal.set_wakeup_fd(-1)  # from Python 3.12 on asyncio, if imported, has done so already
        os.close(self._wakeup_write)
        os.close(self._replies)
        for key in list(self._selector.get_map().values()):
            if key.data != "requests":  # the trial gets another standard input
                os.close(key.fd)
        self._selector.close()

    # -- while they run ----------------------------------------------------------------------------

    def _read_output(self, child: ChildProcess) -> int:
        """Reads what a child has written; returns the number of bytes."""
        try:
            received = os.read(child.pipe, _PIPE_BYTES)
        except BlockingIOError:
            return 0
        if received:
            child.receive(received)
            news = child.news(time.monotonic())
            if news is not None:
                self._send(news)
        elif child.pipe in self._selector.get_map():
            self._selector.unregister(child.pipe)
        return len(received)

    def _read_all_output(self, child: ChildProcess) -> None:
        """Reads what is in the pipe now: a process that writes without end never empties it."""
        bytes_left = _bytes_in(child.pipe)
        while bytes_left > 0 and child.reply is None:
            received = self._read_output(child)
            if not received:
                return
            bytes_left -= received

    def _let_rest(self) -> None:
        """Stops what rests while a training is timed, and lets it go on as soon as none is."""
        is_timed = any(child.is_timed for child in self._children.values())
        for child in self._children.values():
            if child.is_to_change(rests=is_timed):
                number = signal.SIGSTOP if is_timed else signal.SIGCONT
                send_to_group(child.pid, number)
                send(descendants(child.pid), number)
                note = child.rest if is_timed else child.go_on
                note(time.monotonic())

    def _seconds_to_deadline(self) -> float:
        now = time.monotonic()
        seconds = self._next_beat - now
        for child in self._children.values():
            seconds = min(seconds, child.log.check_seconds)
            deadline = child.deadline()
            if deadline is not None:
                seconds = min(seconds, deadline - now)
        return max(0.0, seconds)

    def _enforce_deadlines(self) -> None:
        now = time.monotonic()
        for child in list(self._children.values()):
            why, message = child.exceeded_limit(now)
            if why:
                self._end(child, why=why, message=message)
            if child.kill_at is not None and now >= child.kill_at:
                self._kill(child)
            elif child.give_up_at is not None and now >= child.give_up_at:
                self._give_up(child)

    # -- their end ---------------------------------------------------------------------------------

    def _end(
        self, child: ChildProcess | None, *, why: Ending, message: str = "stopped before its end"
    ) -> None:
        """Sends SIGTERM to a child and its descendants; SIGCONT lets a stopped process react."""
        if child is None:
            return
        child.may_be_repeated = False
        if child.ended_because:
            return
        self._read_all_output(child)
        if child.reply is not None:  # its result was already in the pipe
            return
        child.ended_because = why
        child.message = message
        if not child.request["is_training"]:
            self._kill(child)
            return
        child.kill_at = time.monotonic() + GRACE_SECONDS
        started = descendants(child.pid)
        send_to_group(child.pid, signal.SIGTERM, signal.SIGCONT)
        send(started, signal.SIGTERM, signal.SIGCONT)

    def _kill(self, child: ChildProcess) -> None:
        linger_seconds = _LINGER_SECONDS_WHEN_CLOSING if self._is_closing else LINGER_SECONDS
        child.kill_at = None
        child.give_up_at = time.monotonic() + linger_seconds
        send_to_group(child.pid, signal.SIGKILL)
        send(descendants(child.pid), signal.SIGKILL)

    def _give_up(self, child: ChildProcess) -> None:
        """Replies for a child that not even SIGKILL has ended, and stops waiting for it."""
        if child.reply is None:
            error = TrialLost(
                f"process {child.pid} of the trial cannot be ended",
                hint="see the kernel's log for what it waits for; "
                "run the same command again to continue",
            )
            child.reply = failure(error)
        self._forget(child)

    def _collect(self) -> None:
        """Reaps every process that has ended, including those that a trial left to this reaper."""
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
        while True:
            ended = [child for child in self._children.values() if child.exit_status is not None]
            if not ended:
                return
            self._kill_leftovers()
            for child in ended:
                self._read_all_output(child)
                self._forget(child)

    def _kill_leftovers(self) -> None:
        """Kills what ended trials left behind.

        Orphans of an ended trial are children of this process; those of a running trial are its
        own.
        """

        def leftovers() -> list[int]:
            return descendants(
                os.getpid(), except_of=[child.pid for child in self._children.values()]
            )

        kill_all(leftovers, within_seconds=_LEFTOVER_SECONDS, between=self._collect)

    def _forget(self, child: ChildProcess) -> None:
        """Sends a child's reply, or starts it again where another process disturbed it."""
        del self._children[child.id]
        if child.pipe in self._selector.get_map():
            self._selector.unregister(child.pipe)
        os.close(child.pipe)
        child.log.shorten()
        if child.was_disturbed and child.may_be_repeated and child.attempt < MAX_DISTURBED_ATTEMPTS:
            self._start(child.request, attempt=child.attempt + 1)
            return
        self._reply(child.id, child.outcome(), seconds=time.monotonic() - child.started)

    def _reply(self, request: int, reply: TaskReply, *, seconds: float = 0.0) -> None:
        self._send({**asdict(reply), "id": request, "seconds": seconds})

    def _send(self, reply: dict[str, Any]) -> None:
        try:
            write_line(self._replies, reply)
        except BrokenPipeError:
            pass  # nobody is left to read it


def _bytes_in(pipe: int) -> int:
    """Returns how many bytes can be read from a pipe at the moment."""
    count = fcntl.ioctl(pipe, termios.FIONREAD, b"\0" * 4)
    return int.from_bytes(count, sys.byteorder)


def _import_what_trials_need() -> None:
    """Imports modules, changes how inductor writes files, and does nothing else.

    After a kernel, a thread or a device, forked children would hang or share a CUDA context. Raises
    CudaTouched where an import has initialized CUDA.
    """
    with without_touching_cuda():
        for module in _MODULES_OF_TRIALS:
            importlib.import_module(module)
        with suppress(ImportError, AttributeError):  # the probe names what this torch lacks
            compiled_files = importlib.import_module("autotune.execution.process.compiled_files")
            compiled_files.keep_incomplete_files_out()


def _import_without_gpu(modules: list[str]) -> None:
    """Imports what several processes will need, which then need not import it each.

    No module sees a GPU, since some ask its driver while they are imported. A module that cannot be
    imported is left to the processes: they report the error.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    try:
        for module in modules:
            with suppress(Exception), without_touching_cuda():
                importlib.import_module(module)
    finally:
        if visible is None:
            del os.environ["CUDA_VISIBLE_DEVICES"]
        else:
            os.environ["CUDA_VISIBLE_DEVICES"] = visible
    _freeze_objects()


def _freeze_objects() -> None:
    """Keeps the collector from touching, and so copying, pages shared with the children."""
    gc.collect()
    gc.freeze()


def main() -> None:
    # Keeps torch.cuda.is_available() from initializing CUDA, which forked children could then not
    # use.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    for number in END_SIGNALS:  # the search gets them too, and decides what ends
        signal.signal(number, signal.SIG_IGN)
    replies = os.dup(1)
    os.dup2(2, 1)
    become_reaper()
    try:
        _import_what_trials_need()
    except CudaTouched as error:
        write_line(replies, {"failed": f"{error}, so that trials could not use it"})
        raise
    _freeze_objects()
    write_line(replies, {"ready": os.getpid()})
    Server(replies=replies).serve(requests=0)
    # A normal exit would take more than a second to unload modules, while the search waits.
    os._exit(0)


if __name__ == "__main__":
    main()
