"""What is asked of the trial server beside trainings: the device, the model, a study's files.

Ends with the search.
"""

import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYet
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any, Self

from autotune.errors import AutotuneError, Stopped, TrialLost
from autotune.execution.compile_cache import CompilerCaches
from autotune.execution.device_slots import DeviceSlots, device_node, waiting_words
from autotune.execution.server.client import SERVER_COMMAND, Reply, TrialServer
from autotune.execution.server.limits import time_limits
from autotune.spec.result import DeviceInfo
from autotune.spec.study import StudyDefinition
from autotune.spec.workload import Workload

POLL_SECONDS = 0.1
"""How often a wait looks whether it should end."""

PREPARED = "prepared"
"""Folder of a study's token streams and initial weights."""

_SECONDS_TO_ANSWER = 60.0
"""A device's context takes seconds, on a machine with many devices more."""


def prepared_folder(of_study: Workload, workload: Workload) -> str:
    """The folder for `workload`, which may have another seed than the study's own."""
    return PREPARED if workload.seed == of_study.seed else f"{PREPARED}-seed-{workload.seed}"


def warn(sentence: str) -> None:
    warnings.warn(sentence, stacklevel=2)


def _leave_unsaid(sentence: str) -> None:
    pass


class ServerTasks:
    """A trial server, started when it is first needed.

    `folder` keeps logs and the compiler's cache of the probe.

    `note` takes a sentence that the user should read, where something could not be done as usual.
    """

    def __init__(
        self,
        folder: Path,
        *,
        should_stop: Callable[[], bool] = lambda: False,
        server_command: Sequence[str] = SERVER_COMMAND,
        note: Callable[[str], None] = warn,
    ) -> None:
        self._folder = folder
        self._caches = CompilerCaches(note)
        self._server_command = server_command
        self._should_stop = should_stop
        self._note = note
        self._started: TrialServer | None = None
        self._is_shut_down = False
        self._slot: str | None = None
        """What processes hold while it is our turn on a device; None: it is not."""
        self._shares_device = False
        """Whether other trials run on the device in our turn."""
        self._probed: dict[str, DeviceInfo] = {}
        """The CUDA devices whose context was measured, by torch's name."""
        self._slots: dict[tuple[str, int], DeviceSlots] = {}
        """By torch's name of the device and the number of places."""

    @property
    def _server(self) -> TrialServer:
        """Started when it is first needed, for what is refused before costs no start; and again when it was lost."""
        if self._started is None or (self._started.is_lost and not self._is_shut_down):
            log_file = self._folder / "logs" / "server.log"
            # For tasks without a cache of their own: torch's default is in a folder that anybody
            # can have made.
            environment = self._caches.environment(self._folder)
            self._started = TrialServer(
                log_file=log_file, command=self._server_command, environment=environment
            )
        return self._started

    @property
    def server_pid(self) -> int:
        return self._server.pid

    # -- turns on a device -------------------------------------------------------------------------

    @contextmanager
    def slot(self, slots: DeviceSlots, *, on_wait: Callable[[str], None]) -> Iterator[None]:
        """Waits until it is this search's turn on the device; what it runs until the end of the block holds it.

        Calls `on_wait` once where it has to wait, with the holder of the turn where it is known.
        Raises Stopped when asked to stop meanwhile.
        """
        was_said = False

        def pause() -> None:
            nonlocal was_said
            if not was_said:
                was_said = True
                on_wait(slots.holder())
            self._pause()

        with slots.slot(pause) as self._slot:
            self._shares_device = slots.places > 1
            try:
                yield
            finally:
                self._slot, self._shares_device = None, False

    @contextmanager
    def slot_on(self, device: DeviceInfo) -> Iterator[None]:
        """As `slot`, for what needs the device once; nothing where it is our turn already.

        A wait is noted.
        """
        if self._slot is not None:
            yield
            return

        def say(holder: str) -> None:
            self._note(waiting_words(device.device, holder))

        with self.slot(self.slots_on(device), on_wait=say):
            yield

    def slots_on(self, device: DeviceInfo, *, places: int = 1) -> DeviceSlots:
        """Returns the turns on `device`, of `places` trials at a time, which `shutdown` closes.

        Asked again it returns the same ones: where other users are not waited for, that is noted
        once a device.
        """
        key = device.device, places
        if key not in self._slots:
            is_noted = any(name == device.device for name, _ in self._slots)
            note = _leave_unsaid if is_noted else self._note
            self._slots[key] = DeviceSlots(
                device, places=places, node=device_node(device), note=note
            )
        return self._slots[key]

    def _pause(self) -> None:
        if self._should_stop():
            raise Stopped("the search was stopped", hint="the same command goes on from here")
        time.sleep(POLL_SECONDS)

    # -- questions to the server -------------------------------------------------------------------

    def identify(self, device: str | None) -> DeviceInfo:
        """Returns what `device` is, without a CUDA context on it; None is the best there is.

        Raises InvalidInput.
        """
        return DeviceInfo(**self._call("identify", {"device": device}))

    def probe(
        self, device: str | None, choices: Mapping[str, Sequence[Any]]
    ) -> tuple[DeviceInfo, dict[str, dict[str, str]]]:
        """Returns what `device` is, and {technique: {value: reason}} of those of `choices` that do not work on it.

        `choices` are {technique: values}; None as a device is the first CUDA device, else the CPU.
        A CUDA device is probed in its turn, where the size of a new context, in bytes, is measured
        the first time. Raises InvalidInput.
        """
        info = self.identify(device)
        if info.type == "cpu":
            return self._probe(info, choices)
        if not choices and info.device in self._probed:
            return self._probed[info.device], {}
        with self.slot_on(info):
            found, unavailable = self._probe(info, choices)
        return self._probed.setdefault(found.device, found), unavailable

    def _probe(
        self, info: DeviceInfo, choices: Mapping[str, Sequence[Any]]
    ) -> tuple[DeviceInfo, dict[str, dict[str, str]]]:
        payload = {
            "device": info.device,
            "choices": {technique: list(values) for technique, values in choices.items()},
            "with_context": info.device not in self._probed,
        }
        cache = self._folder / f"probe-{version('torch')}"
        found = self._call("probe", payload, environment=self._caches.environment(cache))
        return DeviceInfo(**found["device"]), found["unavailable"]

    def examine(
        self, workload: Workload, choices: Mapping[str, Sequence[Any]], *, device: str
    ) -> dict[str, dict[str, str]]:
        """Which of `choices`, {technique: values}, the workload's model cannot take on `device`.

        Raises InvalidInput.
        """
        listed = {technique: list(values) for technique, values in choices.items()}
        payload = {"workload": workload.to_dict(), "choices": listed, "device": device}
        if not device.startswith("cuda"):
            return dict(self._call("examine", payload))
        with self.slot_on(
            self.identify(device)
        ):  # attention is tried there, and a script runs until it has its model
            return dict(self._call("examine", payload))

    def model_sha256(self, workload: Workload) -> str:
        """SHA-256 of what the workload's model is made of today: Python file or weights.

        Raises InvalidInput.
        """
        return str(self._call("model_sha256", {"workload": workload.to_dict()}))

    def devices(self) -> list[DeviceInfo]:
        return [DeviceInfo(**info) for info in self._call("devices", {})]

    def check_device(self, device: str) -> None:
        """Computes a little on the device. Raises TrialLost where it does not answer any more."""
        future = self._server.submit(
            "check_device",
            {"device": device},
            log_file=self._folder / "logs" / "check_device.log",
            limits=time_limits(_SECONDS_TO_ANSWER),
            slot=self._slot,
        )
        try:
            self.wait_for(future)
        except (Stopped, TrialLost):
            raise
        except AutotuneError as error:
            hint = "see what the device's driver says; the same command goes on from here"
            raise TrialLost(f"{device} does not answer: {error.message}", hint=hint) from error

    def prepare(self, workload: Workload, folder: Path) -> dict[str, Any]:
        """Writes token streams and initial weights into `folder`. Raises InvalidDataset."""
        return dict(
            self._call(
                "prepare", {"workload": workload.to_dict(), "folder": str(folder.absolute())}
            )
        )

    def prepare_seed(
        self, definition: StudyDefinition, workload: Workload, study_folder: Path
    ) -> None:
        """Draws the initial weights of another seed for the study's text, where that was not done yet."""
        folder = study_folder / prepared_folder(definition.workload, workload)
        if not folder.exists():
            prepared = str((study_folder / PREPARED).absolute())
            payload = {
                "workload": workload.to_dict(),
                "prepared": prepared,
                "folder": str(folder.absolute()),
            }
            self._call("prepare_seed", payload)

    def _call(
        self, task: str, payload: dict[str, Any], *, environment: dict[str, str] | None = None
    ) -> Any:
        """Runs `task` and waits for what it returns.

        Raises Stopped when asked to stop meanwhile.
        """
        log_file = self._folder / "logs" / f"{task}.log"
        future = self._server.submit(
            task, payload, log_file=log_file, environment=environment, slot=self._slot
        )
        return self.wait_for(future).result

    def wait_for(self, future: "Future[Reply]") -> Reply:
        """What a task returned.

        Raises the error it ended with, and Stopped when asked to stop meanwhile.
        """
        while True:
            try:
                return future.result(timeout=POLL_SECONDS)
            except NotYet:
                if self._should_stop():
                    self._server.cancel(future)
                    raise Stopped(
                        "the search was stopped", hint="the same command begins again"
                    ) from None

    def shutdown(self) -> None:
        """Ends every trial and the server."""
        self._is_shut_down = True
        if self._started is not None:
            self._started.close()
        for slots in self._slots.values():
            slots.close()
        self._caches.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
