"""Short questions of users: what a search would do, what a configuration needs, what fits.

Each is answered by a process of its own that imports torch, with a low priority, since trials may
be timed on the same machine. Few run at once, equal questions are answered once, and an answer is
remembered for a while.
"""

import asyncio
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections import OrderedDict
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Literal

from autotune.errors import (
    AutotuneError,
    InvalidInput,
    PredictionImpossible,
    PreparationFailed,
    StorageUnreachable,
)

Question = Literal["dry-run", "predict", "fit", "timeline"]

AT_ONCE = 1
MOST_WAITING = 16
ANSWER_SECONDS = 180.0
KEPT_SECONDS = 60.0
"""An answer may depend on what is stored, such as results that a search would reuse."""
_REMEMBERED = 200
_LONGEST_ANSWER_BYTES = 16 * 2**20
QUICK_MODULE = "autotune.service.quick_process"
"""What the process of an answer runs."""

_ERRORS: Mapping[str, type[AutotuneError]] = {
    "InvalidInput": InvalidInput,
    "PredictionImpossible": PredictionImpossible,
    "PreparationFailed": PreparationFailed,
    "StorageUnreachable": StorageUnreachable,
}


class TooBusy(AutotuneError):
    """So many questions wait that another one is not taken."""


class QuickAnswers:
    """Asks processes, and remembers what they answered."""

    def __init__(self, *, seconds: float = ANSWER_SECONDS, module: str = QUICK_MODULE) -> None:
        self._seconds = seconds
        self._module = module
        self._turn = asyncio.Semaphore(AT_ONCE)
        self._waiting = 0
        self._answers: OrderedDict[str, tuple[float, asyncio.Future[Any]]] = OrderedDict()
        """When each was asked for, and its answer."""

    async def ask(self, question: Question, order: Mapping[str, Any]) -> Any:
        """Returns the answer, what JSON can hold.

        Raises the AutotuneError of the question, TooBusy, and PreparationFailed after
        ANSWER_SECONDS.
        """
        text = json.dumps([question, order], sort_keys=True)
        key = hashlib.sha256(text.encode(errors="replace")).hexdigest()
        asked_at, known = self._answers.get(key, (0.0, None))
        is_old = known is not None and known.done() and time.monotonic() - asked_at > KEPT_SECONDS
        if known is None or is_old:
            if self._waiting >= MOST_WAITING:
                raise TooBusy(
                    f"{self._waiting} questions are waiting for an answer",
                    hint="ask again in a minute",
                )
            known = asyncio.ensure_future(self._answer(question, text))
            self._answers[key] = time.monotonic(), known
            known.add_done_callback(lambda done: self._forget_failure(key, done))
            while len(self._answers) > _REMEMBERED:
                self._answers.popitem(last=False)
        else:
            self._answers.move_to_end(key)
        # Somebody who goes away does not take the answer from others who asked the same.
        return await asyncio.shield(known)

    def _forget_failure(self, key: str, done: "asyncio.Future[Any]") -> None:
        if done.cancelled() or done.exception() is not None:
            self._answers.pop(key, None)

    async def _answer(self, question: Question, text: str) -> Any:
        self._waiting += 1
        try:
            async with self._turn:
                return await self._run(question, text)
        finally:
            self._waiting -= 1

    async def _run(self, question: Question, text: str) -> Any:
        environment = {
            name: value for name, value in os.environ.items() if name != "AUTOTUNE_TOKEN"
        }
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            self._module,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,
        )
        has_ended = False
        try:
            output = await asyncio.wait_for(
                _output_of(process, text.encode(errors="replace")), self._seconds
            )
            has_ended = True
        except TimeoutError:
            raise PreparationFailed(
                f"{question} took longer than {self._seconds:.0f} s",
                hint="ask for a smaller model, or run it on the command line",
            ) from None
        finally:
            if not has_ended:  # it, or what it has started and left its pipe to
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                await process.wait()
        try:
            return read_answer(output)
        except MalformedAnswer as error:
            raise PreparationFailed(
                f"{question} ended without an answer (exit code {process.returncode}): {error}",
                hint="run it on the command line of the server to see why",
            ) from None


class MalformedAnswer(Exception):
    """What a process wrote is no answer; the text says why, without a full stop."""


async def _output_of(process: asyncio.subprocess.Process, text: bytes) -> bytes:
    """Give a process its question; return what it writes until it ends, or a little too much."""
    assert process.stdin is not None
    assert process.stdout is not None
    with suppress(ConnectionError):  # it ended without reading it
        process.stdin.write(text)
        await process.stdin.drain()
        process.stdin.close()
    output = bytearray()
    while part := await process.stdout.read(2**16):
        if len(output) > _LONGEST_ANSWER_BYTES:
            continue  # what was still in the pipe
        output += part
        if len(output) > _LONGEST_ANSWER_BYTES:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    await process.wait()
    return bytes(output)


def read_answer(output: bytes) -> dict[str, Any]:
    """Returns the answer that a process wrote, what JSON can hold.

    It ran a user's model, which can write anything. Raises MalformedAnswer, and the error that the
    process ended with.
    """
    if len(output) > _LONGEST_ANSWER_BYTES:
        raise MalformedAnswer(f"it is longer than {_LONGEST_ANSWER_BYTES} bytes")
    try:
        answer = json.loads(output)
        # Also NaN, half a character and what is nested too deeply could not be sent to a browser.
        json.dumps(answer, allow_nan=False, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        raise MalformedAnswer("it is not JSON") from None
    match answer:
        case {"answer": dict() as found}:
            return found
        case {"error": str(message), "hint": str(hint), "kind": str(kind)}:
            raise _ERRORS.get(kind, PreparationFailed)(message, hint=hint)
    raise MalformedAnswer("it has neither an answer nor an error")
