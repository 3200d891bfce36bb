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
        """Return the answer, what JSON can hold.

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
            limit=_LONGEST_ANSWER_BYTES,
        )
        try:
            output, _ = await asyncio.wait_for(
                process.communicate(text.encode(errors="replace")), self._seconds
            )
        except TimeoutError:
            raise PreparationFailed(
                f"{question} took longer than {self._seconds:.0f} s",
                hint="ask for a smaller model, or run it on the command line",
            ) from None
        finally:
            if process.returncode is None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                await process.wait()
        try:
            answer = json.loads(output)
        except ValueError:
            raise PreparationFailed(
                f"{question} ended without an answer (exit code {process.returncode})",
                hint="run it on the command line of the server to see why",
            ) from None
        if "error" in answer:
            kind = _ERRORS.get(answer["kind"], PreparationFailed)
            raise kind(answer["error"], hint=answer["hint"])
        return answer["answer"]
