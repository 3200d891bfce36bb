"""The process trials are forked from: `python -m autotune.trial.server`.

It has imported all that a trial needs and started no kernel, no thread and no device, so that a forked trial is at
its first step in a fraction of a second and a CUDA context is the trial's own. Requests come as JSON lines on
stdin, replies leave as JSON lines on stdout:

    {"id": 3, "task": "train", "payload": {...}, "time_limit": 600, "log_file": "...", "environment": {...}}
    {"cancel": 3}
    -> {"id": 3, "result": ..., "error": null, "seconds": 7.1}

When stdin closes, because the search has ended or was killed, every trial's process group is killed and the server
ends: nothing outlives a killed search. A trial in turn is killed by the kernel when the server dies.
"""

import gc
import json
import os
import selectors
import signal
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from autotune.trial.child import be_the_child, become_reaper, write_line


@dataclass(kw_only=True)
class _Child:
    id: int
    task: str
    pid: int
    pipe: int
    log_file: Path
    started: float
    deadline: float | None
    host_memory_kills: int
    ended_by_us: str = ""
    output: bytearray = field(default_factory=bytearray)


class Server:
    def __init__(self, *, replies: int) -> None:
        self._replies = replies
        self._children: dict[int, _Child] = {}
        self._selector = selectors.DefaultSelector()
        self._requests = b""

    def serve(self, *, requests: int) -> None:
        """Runs until `requests` is closed at its other end."""
        wakeup_read, wakeup_write = os.pipe()
        os.set_blocking(wakeup_read, False)
        os.set_blocking(wakeup_write, False)
        signal.set_wakeup_fd(wakeup_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._selector.register(requests, selectors.EVENT_READ, "requests")
        self._selector.register(wakeup_read, selectors.EVENT_READ, "child ended")
        while True:
            for key, _ in self._selector.select(timeout=self._seconds_to_deadline()):
                if key.data == "requests":
                    if not self._read_requests(requests):
                        self._kill_all()
                        return
                elif key.data == "child ended":
                    os.read(wakeup_read, 4096)
                else:
                    self._read_output(key.data)
            self._enforce_deadlines()
            self._reap()

    # -- requests ----------------------------------------------------------------------------------------------

    def _read_requests(self, requests: int) -> bool:
        received = os.read(requests, 65536)
        *lines, self._requests = (self._requests + received).split(b"\n")
        for line in lines:
            request = json.loads(line)
            if "cancel" in request:
                self._end(request["cancel"], why="cancelled")
            else:
                self._fork(request)
        return bool(received)

    def _fork(self, request: dict[str, Any]) -> None:
        from autotune.trial.failures import host_memory_kills

        read_end, write_end = os.pipe()
        memory_kills = host_memory_kills()
        server_pid, pid = os.getpid(), os.fork()
        if pid == 0:
            os.close(read_end)
            os.close(self._replies)  # or a process the trial leaves behind would keep the caller waiting
            be_the_child(request, server_pid=server_pid, result_pipe=write_end)
        os.close(write_end)
        os.set_blocking(read_end, False)
        started = time.monotonic()
        limit = request.get("time_limit")
        child = _Child(
            id=request["id"],
            task=request["task"],
            pid=pid,
            pipe=read_end,
            log_file=Path(request["log_file"]),
            started=started,
            deadline=None if limit is None else started + limit,
            host_memory_kills=memory_kills,
        )
        self._children[child.id] = child
        self._selector.register(read_end, selectors.EVENT_READ, child)

    # -- children ----------------------------------------------------------------------------------------------

    def _read_output(self, child: _Child) -> None:
        try:
            received = os.read(child.pipe, 65536)
        except BlockingIOError:
            return
        if received:
            child.output += received
        elif child.pipe in self._selector.get_map():
            self._selector.unregister(child.pipe)

    def _seconds_to_deadline(self) -> float | None:
        deadlines = [c.deadline for c in self._children.values() if c.deadline is not None and not c.ended_by_us]
        # A selector takes no more than some weeks; looking once an hour is cheap.
        return max(0.0, min(*deadlines, time.monotonic() + 3600) - time.monotonic()) if deadlines else None

    def _enforce_deadlines(self) -> None:
        now = time.monotonic()
        for child in list(self._children.values()):
            if child.deadline is not None and now >= child.deadline and not child.ended_by_us:
                self._end(child.id, why="timeout")

    def _end(self, child_id: int, *, why: str) -> None:
        if child := self._children.get(child_id):
            child.ended_by_us = why
            _kill_group(child.pid)

    def _reap(self) -> None:
        """Collects every process that has ended; also those a trial left behind, whose parent we are by now."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            child = next((child for child in self._children.values() if child.pid == pid), None)
            if child is not None:
                self._finish(child, exit_status=os.waitstatus_to_exitcode(status))

    def _finish(self, child: _Child, *, exit_status: int) -> None:
        _kill_group(child.pid)  # whatever the trial started and did not end
        while child.pipe in self._selector.get_map():
            before = len(child.output)
            self._read_output(child)
            if len(child.output) == before:
                break
        if child.pipe in self._selector.get_map():
            self._selector.unregister(child.pipe)
        os.close(child.pipe)
        del self._children[child.id]
        reply = _reply_of(child, exit_status=exit_status)
        reply |= {"id": child.id, "seconds": time.monotonic() - child.started}
        write_line(self._replies, reply)

    def _kill_all(self) -> None:
        for child in self._children.values():
            _kill_group(child.pid)


def _reply_of(child: _Child, *, exit_status: int) -> dict[str, Any]:
    """The child's own reply, or what its end says where it left none."""
    from autotune.result import Measurement
    from autotune.trial.failures import host_memory_kills, measurement_of_exit

    if child.output.endswith(b"\n"):
        reply: dict[str, Any] = json.loads(child.output)
        return reply
    if child.ended_by_us == "timeout":
        limit = (child.deadline or child.started) - child.started
        ending = Measurement(outcome="timeout", message=f"no result within {limit:.0f} s; see {child.log_file}")
    elif child.ended_by_us:
        ending = Measurement(outcome="interrupted", message="stopped before its end")
    else:
        killed = host_memory_kills() > child.host_memory_kills
        ending = measurement_of_exit(exit_status, log_file=child.log_file, host_killed_for_memory=killed)
    if child.task == "train":
        return {"result": asdict(ending), "error": None}
    return {"result": None, "error": {"kind": "PreparationFailed", "message": ending.message, "hint": ""}}


def _kill_group(pid: int) -> None:
    """Ends the process group that `pid` leads; also `pid` itself, which may not have become a leader yet."""
    for kill in (os.killpg, os.kill):
        try:
            kill(pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            pass


def _import_what_trials_need() -> None:
    """Only imports: no kernel, no thread, no device, or the forked children would hang or share a CUDA context."""
    import torch._dynamo
    import torch._inductor.compile_fx  # noqa: F401

    import autotune.predictor
    import autotune.trainer
    import autotune.trial.failures
    import autotune.trial.tasks  # noqa: F401


def main() -> None:
    # Keeps torch.cuda.is_available() from initializing CUDA, which a forked child could then not use.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the search, which decides what ends
    replies = os.dup(1)
    os.dup2(2, 1)
    become_reaper()
    _import_what_trials_need()
    gc.collect()
    gc.freeze()  # keeps the collector from touching, and so copying, pages shared with the children
    write_line(replies, {"ready": os.getpid()})
    Server(replies=replies).serve(requests=0)


if __name__ == "__main__":
    main()
