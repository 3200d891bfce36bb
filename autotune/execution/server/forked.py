"""A function in a process of its own, for what leaves traces in the process that does it: CUDA, above all."""

import json
import os
from collections.abc import Callable
from typing import Any

from autotune import errors
from autotune.errors import AutotuneError


class ForkFailed(Exception):
    """The function raised an exception, whose type and text this says, or its process died."""


def in_a_fork(run: Callable[[], Any]) -> Any:
    """Returns what `run` returns, which must be JSON-ready.

    Raises the AutotuneError that it raises, and ForkFailed for any other.
    """
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        _answer(run, write_end)
    os.close(write_end)
    with os.fdopen(read_end, "rb") as pipe:
        answer = pipe.read()
    exit_code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    try:
        said = json.loads(answer)
    except ValueError:
        raise ForkFailed(f"its process ended with exit code {exit_code}") from None
    if said.get("kind"):
        kind: type[AutotuneError] = getattr(errors, said["kind"])
        raise kind(said["message"], hint=said["hint"])
    if "message" in said:
        raise ForkFailed(said["message"])
    return said["result"]


def _answer(run: Callable[[], Any], pipe: int) -> None:
    """Leaves by os._exit: nothing of the process that was forked runs on."""
    exit_code = 1
    try:
        try:
            said = {"result": run()}
        except AutotuneError as error:
            said = {"kind": type(error).__name__, "message": error.message, "hint": error.hint}
        except Exception as error:
            said = {
                "message": f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
            }
        data = json.dumps(said).encode()
        while data:
            data = data[os.write(pipe, data) :]
        exit_code = 0
    finally:
        os._exit(exit_code)
