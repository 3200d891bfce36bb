"""Runs a function in a forked process, for work that changes its process, such as using CUDA."""

import os
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from autotune.execution.server.replies import (
    MalformedReply,
    TaskReply,
    decode,
    reply_after,
    reply_of,
    write_line,
)
from autotune.spec.result import Measurement


class ForkFailed(Exception):
    """The function raised an exception, or its process died; the text says which."""


def run_in_fork(run: Callable[[], Any]) -> Any:
    """Calls `run` in a fork and returns its result, which must be JSON-ready.

    Raises the AutotuneError that it raises, and ForkFailed for any other exception.
    """
    return run_in_forks([run])[0]


def run_in_forks(runs: Sequence[Callable[[], Any]]) -> list[Any]:
    """Calls each of `runs` in a fork, all at once, and returns their results, as `run_in_fork`.

    Raises the error of the first that fails, once all have ended.
    """
    started = [_start(run) for run in runs]
    ended = []
    for pid, read_end in started:
        with os.fdopen(read_end, "rb") as pipe:
            answer = pipe.read()
        ended.append((answer, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])))
    return [_result_of(answer, exit_code) for answer, exit_code in ended]


def _start(run: Callable[[], Any]) -> tuple[int, int]:
    """Forks, and returns the process and the end of the pipe that its answer comes from."""
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        _answer(run, write_end)
    os.close(write_end)
    return pid, read_end


def _result_of(answer: bytes, exit_code: int) -> Any:
    try:
        reply = reply_of(decode(answer))
    except MalformedReply:
        raise ForkFailed(f"its process ended with exit code {exit_code}") from None
    if reply.error is not None:
        raise reply.error.exception()
    if reply.ended is not None:
        raise ForkFailed(reply.ended.message)
    return reply.result


def _answer(run: Callable[[], Any], pipe: int) -> None:
    """Writes the reply and leaves by os._exit, so that no other code runs in the fork."""
    exit_code = 1
    try:
        try:
            reply = reply_after(run)
        except Exception as error:
            first_line = str(error).strip().partition("\n")[0]
            message = f"{type(error).__name__}: {first_line}"
            reply = TaskReply(ended=Measurement(outcome="crashed", message=message))
        write_line(pipe, asdict(reply))
        exit_code = 0
    finally:
        os._exit(exit_code)
