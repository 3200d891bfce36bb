"""Requests to the trial server other than trainings: the device, the model, a study's files.

The server ends with the search.
"""

import os
import platform
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYet
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, Self

from autotune.errors import AutotuneError, InvalidInput, ProcessEnded, Stopped, TrialLost
from autotune.execution import probe_cache
from autotune.execution.compile_cache import CompilerCaches
from autotune.execution.device_slots import DeviceSlots, device_node, waiting_message
from autotune.execution.server.client import SERVER_COMMAND, Reply, TrialServer
from autotune.execution.server.limits import time_limits
from autotune.printable import printable
from autotune.spec.device_group import check_one_model, joint_name
from autotune.spec.reading import parse
from autotune.spec.result import DeviceInfo
from autotune.spec.script_files import is_code
from autotune.spec.study import StudyDefinition
from autotune.spec.user_code import is_function_reference
from autotune.spec.workload import LinearShape, Workload

POLL_SECONDS = 0.1
"""How often a wait checks whether it should end."""

PREPARED = "prepared"
"""Folder of a study's token streams and initial weights."""

_SECONDS_TO_ANSWER = 60.0
"""Time limit of `check_device`: creating a context takes seconds, longer with many devices."""

_REHEARSAL_SECONDS = 600.0
"""Time limit of `rehearse`: the start of a script and one or two plain steps."""


def prepared_folder(of_study: Workload, workload: Workload) -> str:
    """Returns the folder's name for `workload`, which may have another seed than the study's."""
    if workload.seed == of_study.seed:
        return PREPARED
    return f"{PREPARED}-seed-{workload.seed}"


def warn(sentence: str) -> None:
    """Shows a note as a Python warning."""
    warnings.warn(printable(sentence), stacklevel=2)


def _ignore_note(sentence: str) -> None:
    pass


RANKS_PER_CORE = 4
"""How many ranks of a trial a core of a CPU may have. Each needs hundreds of MiB, too."""


def check_ranks_on_cpu(count: int, *, trials: int = 1, cores: int | None = None) -> None:
    """Raise InvalidInput for more ranks than a CPU can take turns with.

    `count` are those of a trial, of which `trials` run at a time. `cores` None: this machine's.
    """
    if cores is None:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
    most = RANKS_PER_CORE * cores
    if count > most:
        raise InvalidInput(
            f"a trial cannot use {count} devices on a CPU with {cores} cores, which would be "
            f"{count} processes",
            hint=f"use --devices-per-trial {most} or fewer; autotune predict needs no devices",
        )
    if count * trials > most:
        raise InvalidInput(
            f"{trials} trials of {count} devices cannot run at a time on a CPU with {cores} cores, "
            f"which would be {count * trials} processes",
            hint=f"run at most {most // count} at a time, with --devices {most // count * count}",
        )


def check_system_for_ranks(count: int) -> None:
    """Raise InvalidInput where this system has no file in memory, through which ranks meet."""
    if not hasattr(os, "memfd_create"):
        raise InvalidInput(
            f"trials on {count} devices run on Linux only, and this is {platform.system()}",
            hint="search on Linux; autotune predict, and fit --no-trial, work here",
        )


class ServerTasks:
    """Sends requests to a trial server, which is started when it is first needed.

    Logs and the compilers' cache of the probe are in `folder`. `note` is called with a sentence for
    the user where something could not be done as usual. Methods that wait for the server or for a
    device slot raise Stopped once `should_stop` returns true.
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
        self._starting = threading.Lock()
        self.cpus: tuple[int, ...] | None = None
        """The CPUs on which everything that is forked runs; None: all."""
        self.cpus_of_slots: Sequence[tuple[int, ...] | None] = ()
        """The CPUs that go with each slot on the device, by its number; empty: always `cpus`."""
        self.sharing = ""
        """How trials share these CPUs, as `study/devices.py` says it; empty where they do not."""
        self.seconds_waited = 0.0
        """For how long `slot_on` has waited for other users of the devices."""
        self._is_shut_down = False
        self._held: tuple[str, ...] = ()
        """The locks that processes hold while this search has its device slots; empty without."""
        self._shares_device = False
        """Whether other trials may run on the device at the same time."""
        self.other_devices: tuple[DeviceInfo, ...] = ()
        """What each trial uses besides the first device; locked together with it."""
        self._probed: dict[str, DeviceInfo] = {}
        """The CUDA devices whose context was measured, by torch's name."""
        self._slots: dict[tuple[str, int], DeviceSlots] = {}
        """By torch's name of the device and the number of slots."""

    @property
    def _server(self) -> TrialServer:
        """The trial server, started when it is first needed, and again where it has died.

        A request that is rejected before costs no start.
        """
        with self._starting:  # a search may ask in its own thread and in that of a place
            if self._started is None or (self._started.is_lost and not self._is_shut_down):
                log_file = self._folder / "logs" / "server.log"
                # For tasks without their own cache: torch's default is in a folder that another
                # user may have created.
                environment = self._caches.environment(self._folder)
                self._started = TrialServer(
                    log_file=log_file, command=self._server_command, environment=environment
                )
                if self.cpus is not None:
                    # It imports torch while trials of other places may be timed.
                    os.sched_setaffinity(self._started.pid, self.cpus)
            return self._started

    def end_server(self) -> None:
        """Ends the trial server; the next request starts another, in the folder of that moment."""
        with self._starting:
            if self._started is not None:
                self._started.close()
                self._started = None

    @property
    def server_pid(self) -> int:
        return self._server.pid

    # -- device slots ------------------------------------------------------------------------------

    @contextmanager
    def slot(
        self,
        slots: DeviceSlots,
        *,
        on_wait: Callable[[str], None],
        alone: bool = False,
    ) -> Iterator[None]:
        """Waits for a slot on each device of a trial; processes started here hold them.

        `slots` are those of the first device. With `alone`, no other trial runs there meanwhile.
        Calls `on_wait` once where it has to wait, with the holder of the slot, or "" where that is
        not known. Raises Stopped where the search is stopped while waiting.
        """
        was_reported = False
        awaited = slots

        def pause() -> None:
            nonlocal was_reported
            if not was_reported:
                was_reported = True
                on_wait(awaited.holder())
            if self._should_stop():
                raise Stopped(
                    "the search was stopped", hint="run the same command again to continue"
                )
            time.sleep(POLL_SECONDS)

        all_slots = [slots]
        all_slots += [self.slots_on(one, places=slots.places) for one in self.other_devices]
        with ExitStack() as stack:
            held = []
            # All searches take them in the same order, so that no two wait for each other. Numbers
            # of devices would not do: CUDA_VISIBLE_DEVICES may change them.
            for awaited in sorted(all_slots, key=lambda one: one.name):
                held.append(stack.enter_context(awaited.slot(pause, alone=alone)))
            self._held = tuple(held)
            self._shares_device = slots.places > 1 and not alone
            if self.cpus_of_slots:
                # Of another search with as many slots, a trial may be on the CPUs used before.
                self.cpus = self.cpus_of_slots[slots.number]
            try:
                yield
            finally:
                self._held = ()
                self._shares_device = False

    @contextmanager
    def slot_on(self, device: DeviceInfo) -> Iterator[None]:
        """Waits for a slot on `device`, unless this search has one already; a wait is noted.

        The devices that trials use besides it are waited for, too.
        """
        if self._held:
            yield
            return

        def note_wait(holder: str) -> None:
            self._note(waiting_message(joint_name((device, *self.other_devices)), holder))

        began = time.monotonic()
        with self.slot(self.slots_on(device), on_wait=note_wait):
            self.seconds_waited += time.monotonic() - began
            yield

    def slots_on(self, device: DeviceInfo, *, places: int = 1) -> DeviceSlots:
        """Returns the slots on `device` for `places` trials at a time.

        Later calls return the same object, so that a note about other users appears once a device.
        """
        key = (device.device, places)
        if key not in self._slots:
            is_noted = any(name == device.device for name, _ in self._slots)
            note = _ignore_note if is_noted else self._note
            self._slots[key] = DeviceSlots(
                device, places=places, node=device_node(device), note=note
            )
        return self._slots[key]

    # -- requests to the server --------------------------------------------------------------------

    def identify(self, device: str | None) -> DeviceInfo:
        """Returns what `device` is, without a CUDA context on it; None is the best device there is.

        Raises InvalidInput.
        """
        return self._named(self._call("identify", {"device": device}))

    def _named(self, found: Mapping[str, Any]) -> DeviceInfo:
        """Returns the device that was found; of a CPU that trials share, the name says so."""
        device = parse(DeviceInfo, found)
        if device.type == "cpu" and self.sharing:
            device = replace(device, name=f"{device.name}, {self.sharing}")
        return device

    def probe(
        self,
        device: str | None,
        choices: Mapping[str, Sequence[Any]],
        *,
        anew: bool = False,
    ) -> tuple[DeviceInfo, dict[str, dict[str, str]]]:
        """Returns what `device` is, and which of `choices` do not work on it and why.

        `choices` are {technique: values}; the second result is {technique: {value: reason}}. None
        as a device is the first CUDA device, else the CPU. A CUDA device is probed while this
        search has a slot on it; the first probe measures the size of a new context in bytes. What
        worked for an earlier probe on the same device with the same versions is not tried again,
        unless `anew` is true. Raises InvalidInput.
        """
        info = self.identify(device)
        working = {} if anew or not choices else probe_cache.read_working(info)
        untried = probe_cache.without(choices, working)
        if info.type == "cpu":
            found, unavailable = self._probe(info, untried)
        elif not untried and info.device in self._probed:
            return self._probed[info.device], {}
        else:
            with self.slot_on(info):
                found, unavailable = self._probe(info, untried)
            found = self._probed.setdefault(found.device, found)
        newly_working = probe_cache.without(untried, unavailable)
        for technique, values in newly_working.items():
            working[technique] = [*working.get(technique, ()), *values]
        if newly_working:
            probe_cache.write_working(info, working)
        return found, unavailable

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
        return self._named(found["device"]), found["unavailable"]

    def measure_peaks(
        self, device: DeviceInfo, precisions: Sequence[str], shape: LinearShape | None
    ) -> DeviceInfo:
        """Returns the device with its rates of matrix products and of copies, and of its host.

        It is measured while this search has a slot on the device, and with the CPUs of a trial.
        """
        payload = {"device": device.device, "precisions": list(precisions), "shape": shape}
        with self.slot_on(device):
            return replace(device, **self._call("measure_peaks", payload))

    def examine(
        self, workload: Workload, choices: Mapping[str, Sequence[Any]], *, device: str
    ) -> tuple[Workload, dict[str, dict[str, str]]]:
        """Returns the workload, and which of `choices` its model does not support.

        `choices` are {technique: values}; the second result is {technique: {value: reason}}. The
        workload of a script has the files that it was seen to read, and says whether it needs the
        environment of torchrun. Raises InvalidInput.
        """
        if not device.startswith("cuda"):
            return self._examine(workload, choices, device=device)
        # Attention is tried on the device, and a script runs until it has built its model.
        with self.slot_on(self.identify(device)):
            return self._examine(workload, choices, device=device)

    def _examine(
        self, workload: Workload, choices: Mapping[str, Sequence[Any]], *, device: str
    ) -> tuple[Workload, dict[str, dict[str, str]]]:
        payload = {
            "workload": workload.to_dict(),
            "choices": {technique: list(values) for technique, values in choices.items()},
            "device": device,
        }
        try:
            found = self._call("examine", payload)
        except ProcessEnded as error:
            if workload.script is None and not is_function_reference(workload.model):
                raise
            code = workload.script or workload.model
            raise InvalidInput(
                f"{code} ended its process before its first step: {error.message}",
                hint="run it without autotune; it must not end the process that it is in",
            ) from None
        if found.get("missing_variable"):
            self._note(
                f"{workload.script} needs {found['missing_variable']}, which torchrun sets: every "
                "trial runs it as the only rank of a training"
            )
            return self._examine(replace(workload, one_rank=True), choices, device=device)
        if found.get("files") is not None:
            files = found["files"]
            workload = replace(
                workload,
                script_files={path: files[path] for path in files if is_code(path)},
                script_files_after_apply={path: files[path] for path in files if not is_code(path)},
                packages=found["packages"],
            )
        if found.get("own_precision") is not None:
            workload = replace(
                workload, own_precision=found["own_precision"], own_fusion=found["own_fusion"]
            )
        return workload, found["unavailable"]

    def rehearse(self, workload: Workload, *, micro_batch_size: int, device: str) -> str:
        """Runs the first steps of the workload's script without a cap.

        Returns why it has no such micro batch or, with the whole global batch, why its optimizer
        cannot step during backward; empty if nothing is known, as for a script that fails or that
        needs too long.
        """
        info = self.identify(device)
        with self.slot_on(info) if info.type == "cuda" else nullcontext():
            future = self._server.submit(
                "rehearse",
                {
                    "workload": workload.to_dict(),
                    "micro_batch_size": micro_batch_size,
                    "device": device,
                },
                log_file=self._folder / "logs" / "rehearse.log",
                limits=time_limits(_REHEARSAL_SECONDS),
                environment=self._caches.environment(self._folder),
                limit_host_memory=info.type == "cpu",
                slots=self._held,
                cpus=self.cpus,
            )
            try:
                return str(self.wait_for(future).result)
            except Stopped:
                raise
            except AutotuneError:
                return ""

    def model_sha256(self, workload: Workload) -> str:
        """Returns the SHA-256 of the current Python file or weights of the workload's model.

        Raises InvalidInput.
        """
        return str(self._call("model_sha256", {"workload": workload.to_dict()}))

    def devices(self) -> list[DeviceInfo]:
        """Returns every device that torch can use."""
        return [parse(DeviceInfo, info) for info in self._call("devices", {})]

    def use_devices_from(self, first: DeviceInfo, *, count: int) -> None:
        """From now on, use `count` devices for each trial: `first` and the next ones.

        Those that were chosen before, as `other_devices`, stay. On a CPU all ranks share the same
        one. Raises InvalidInput where there are not as many, or not of one model.
        """
        if count == 1 or self.other_devices:
            return
        check_system_for_ranks(count)
        if first.type == "cpu":
            check_ranks_on_cpu(count)
            return
        gpus = [device for device in self.devices() if device.type == first.type]
        names = [device.device for device in gpus]
        start = names.index(first.device)
        if len(gpus) - start < count:
            raise InvalidInput(
                f"a trial cannot use {count} devices from {first.device} on: this machine has "
                f"{', '.join(names)}",
                hint="use a smaller --devices-per-trial, or --device cuda:0",
            )
        check_one_model(gpus[start : start + count])
        self.other_devices = tuple(gpus[start + 1 : start + count])

    def check_device(self, device: str) -> None:
        """Runs a tiny computation on the device, and on those that trials use besides it.

        Raises TrialLost where one no longer answers.
        """
        for name in (device, *(other.device for other in self.other_devices)):
            self._check_one_device(name)

    def _check_one_device(self, device: str) -> None:
        future = self._server.submit(
            "check_device",
            {"device": device},
            log_file=self._folder / "logs" / "check_device.log",
            limits=time_limits(_SECONDS_TO_ANSWER),
            slots=self._held,
            cpus=self.cpus,
        )
        try:
            self.wait_for(future)
        except (Stopped, TrialLost):
            raise
        except AutotuneError as error:
            hint = "see what the device's driver says; run the same command again to continue"
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
        """Prepares the study's text with the initial weights of another seed, unless it exists."""
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
        """Runs `task` and returns its result. Raises its error, and Stopped."""
        log_file = self._folder / "logs" / f"{task}.log"
        future = self._server.submit(
            task,
            payload,
            log_file=log_file,
            environment=environment,
            slots=self._held,
            cpus=self.cpus,
        )
        return self.wait_for(future).result

    def wait_for(self, future: Future[Reply]) -> Reply:
        """Waits for a task and returns its reply.

        Raises the error that the task ended with, and Stopped where the search is stopped.
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
        self._caches.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
