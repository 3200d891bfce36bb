"""Short questions of users: what a search would do, what a configuration needs, what fits.

Each is answered by a process of its own that imports torch, with a low priority, since trials may
be timed on the same machine. Few run at once, equal questions are answered once, and an answer is
remembered for a while. A process may say what it does before it answers.
"""

import asyncio
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections import OrderedDict, defaultdict
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Any, Literal

from autotune.errors import (
    AutotuneError,
    InvalidInput,
    PredictionImpossible,
    PreparationFailed,
    StorageUnreachable,
)
from autotune.study.opening.staging import staged

Question = Literal["dry-run", "predict", "fit", "timeline", "bound", "will-it-fit"]

_TURNS: Mapping[Question, Question] = {"bound": "bound", "will-it-fit": "will-it-fit"}
"""{question: those with which it takes turns}, one at once: nobody waits a minute for seconds."""
MOST_WAITING = 16
ANSWER_SECONDS = 180.0
MOST_SECONDS: Mapping[Question, float] = {"will-it-fit": 600.0}
"""Of a question that takes longer, and says how far it is."""
KEPT_SECONDS = 60.0
"""An answer may depend on what is stored, such as results that a search would reuse."""
FAILURE_KEPT_SECONDS = 5.0
"""For pages that look every second; who asks again meanwhile gets a new answer."""
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


@dataclass(kw_only=True)
class Asked:
    """A question, whose answer may still be awaited."""

    ended_at: float = inf
    """By time.monotonic."""
    progress: str = ""
    """What its process does now, in its own words; empty while it waits for its turn."""
    answer: asyncio.Future[Any] = field(init=False)

    @property
    def has_failed(self) -> bool:
        """Whether it ended without an answer."""
        answer = self.answer
        return answer.done() and (answer.cancelled() or answer.exception() is not None)


class QuickAnswers:
    """Asks processes, and remembers what they answered.

    Each process has a folder in `work_folder` for its temporary files.
    """

    def __init__(
        self, work_folder: Path, *, seconds: float | None = None, module: str = QUICK_MODULE
    ) -> None:
        self._work_folder = work_folder
        self._seconds = seconds
        self._module = module
        self._turns: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._waiting = 0
        self._asked: OrderedDict[str, Asked] = OrderedDict()

    async def ask(self, question: Question, order: Mapping[str, Any]) -> Any:
        """Returns the answer, what JSON can hold.

        Raises the AutotuneError of the question, TooBusy, and PreparationFailed for one that takes
        too long.
        """
        asked = self.asked(question, order)
        if asked.has_failed:
            asked = self._ask(question, order)
        # Somebody who goes away does not take the answer from others who asked the same.
        return await asyncio.shield(asked.answer)

    def asked(self, question: Question, order: Mapping[str, Any]) -> Asked:
        """Returns the question, which is asked unless it was a moment ago.

        One that has just failed is returned, too, for those who look after it. Raises TooBusy.
        """
        key = _key_of(question, order)
        known = self._asked.get(key)
        if known is None or time.monotonic() - known.ended_at > KEPT_SECONDS:
            return self._ask(question, order)
        self._asked.move_to_end(key)
        return known

    def _ask(self, question: Question, order: Mapping[str, Any]) -> Asked:
        if self._waiting >= MOST_WAITING:
            raise TooBusy(
                f"{self._waiting} questions are waiting for an answer",
                hint="ask again in a minute",
            )
        asked = Asked()
        text = json.dumps([question, order], sort_keys=True)
        asked.answer = asyncio.ensure_future(self._answer(question, text, asked))
        key = _key_of(question, order)
        asked.answer.add_done_callback(lambda done: self._note_end(key, asked))
        self._asked[key] = asked
        while len(self._asked) > _REMEMBERED:
            self._asked.popitem(last=False)
        return asked

    def _note_end(self, key: str, asked: Asked) -> None:
        asked.ended_at = time.monotonic()

        def forget() -> None:
            if self._asked.get(key) is asked:
                del self._asked[key]

        if asked.has_failed:
            asyncio.get_running_loop().call_later(FAILURE_KEPT_SECONDS, forget)

    async def _answer(self, question: Question, text: str, asked: Asked) -> Any:
        self._waiting += 1
        try:
            async with self._turns[_TURNS.get(question, "")]:
                with staged(self._work_folder) as folder:
                    return await self._run(question, text, asked, folder)
        finally:
            self._waiting -= 1

    async def _run(self, question: Question, text: str, asked: Asked, folder: Path) -> Any:
        seconds = self._seconds or MOST_SECONDS.get(question, ANSWER_SECONDS)
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
            env={**environment, "TMPDIR": str(folder)},
            start_new_session=True,
        )
        has_ended = False
        try:
            output = await asyncio.wait_for(
                _output_of(process, text.encode(errors="replace"), asked), seconds
            )
            has_ended = True
        except TimeoutError:
            raise PreparationFailed(
                f"{question} took longer than {seconds:.0f} s",
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


def _key_of(question: Question, order: Mapping[str, Any]) -> str:
    text = json.dumps([question, order], sort_keys=True)
    return hashlib.sha256(text.encode(errors="replace")).hexdigest()


class MalformedAnswer(Exception):
    """What a process wrote is no answer; the text says why, without a full stop."""


async def _output_of(process: asyncio.subprocess.Process, text: bytes, asked: Asked) -> bytes:
    """Give a process its question; return what it writes until it ends, or a little too much.

    That is without the lines in which it says what it does.
    """
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
        while (found := _progress_in(output)) is not None:
            asked.progress = found
        if len(output) > _LONGEST_ANSWER_BYTES:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    await process.wait()
    return bytes(output)


def _progress_in(output: bytearray) -> str | None:
    """Removes a first line that says what a process does, and returns what it says."""
    line, end, _ = output.partition(b"\n")
    if not end:
        return None
    try:
        said = json.loads(line)
    except (ValueError, RecursionError):
        return None
    match said:
        case {"progress": str(what)} if len(said) == 1:
            del output[: len(line) + 1]
            return what[:200].encode(errors="replace").decode()
    return None


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
