"""Runs tasks on devices of this machine, each in its own process, and trials one at a time.

The processes are forked from a trial server, which ends with the search.
"""

import math
import os
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeVar

from autotune.errors import AutotuneError, InvalidInput, ProcessEnded, Stopped, TrialLost
from autotune.execution.compile_cache import CompilerCaches
from autotune.execution.cpu_shares import (
    check_is_one_node,
    check_ranks_on_cpu,
    check_system_for_ranks,
)
from autotune.execution.device_slots import DeviceSlots, device_node, waiting_message
from autotune.execution.flow import POLL_SECONDS, Flow, Pause, result_of
from autotune.execution.in_turn import RunInTurn, TimedInTurn, TrainingInTurn, time_in_turn
from autotune.execution.prepared_folder import prepared_folder
from autotune.execution.server.client import SERVER_COMMAND, Doing, TrialServer
from autotune.execution.server.limits import TimeLimits, time_limits
from autotune.execution.tasks import (
    CheckDevice,
    Choices,
    Examine,
    Identify,
    ListDevices,
    MeasurePeaks,
    Predict,
    Probe,
    Rehearse,
    Task,
)
from autotune.execution.trial_options import TrialOptions
from autotune.printable import printable
from autotune.spec.config import Precision, TrainingConfig, configuration_of
from autotune.spec.device_group import check_one_model, joint_name
from autotune.spec.examined import Examined
from autotune.spec.prediction import PredictionRequest
from autotune.spec.result import DeviceInfo
from autotune.spec.script_files import is_code
from autotune.spec.study import StudyDefinition
from autotune.spec.training_request import TrainingRequest
from autotune.spec.user_code import is_function_reference
from autotune.spec.workload import LinearShape, Workload

R = TypeVar("R")

_SECONDS_TO_END_A_TASK = 5.0
"""How long to wait for a cancelled task to end."""
_NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}
"""Environment of a prediction, which needs no GPU: a context there would disturb a trial."""


def warn(sentence: str) -> None:
    """Shows a note as a Python warning."""
    warnings.warn(printable(sentence), stacklevel=2)


def _ignore_note(sentence: str) -> None:
    pass


class LocalExecutor:
    """Carries out tasks by a trial server, which is started when it is first needed.

    Logs and the compilers' cache are in `folder`, those of a training in its study's. `note` is
    called with a sentence for the user where something could not be done as usual. Methods that
    wait for the server or for a device slot raise Stopped once `should_stop` returns true. An
    executor that `only_predicts` has its server import the libraries of models and adapters, once
    for all predictions.
    """

    def __init__(
        self,
        folder: Path,
        *,
        should_stop: Callable[[], bool] = lambda: False,
        server_command: Sequence[str] = SERVER_COMMAND,
        note: Callable[[str], None] = warn,
        only_predicts: bool = False,
    ) -> None:
        self._folder = folder
        self._caches = CompilerCaches(note)
        self._server_command = server_command
        self._should_stop = should_stop
        self._note = note
        self._only_predicts = only_predicts
        self._started: TrialServer | None = None
        self._starting = threading.Lock()
        self.cpus: tuple[int, ...] | None = None
        """The CPUs on which everything that is forked runs; None: all."""
        self.cpus_of_slots: Sequence[tuple[int, ...] | None] = ()
        """The CPUs that go with each slot on the device, by its number; empty: always `cpus`."""
        self.cores: int | None = None
        """How many cores of a CPU the ranks of a trial share; None: those of this machine."""
        self.sharing = ""
        """How trials share these CPUs, in words; empty where they do not."""
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
    def predictions_at_once(self) -> int:
        """How many predictions run at a time where many are wanted."""
        return os.cpu_count() or 1

    @property
    def _server(self) -> TrialServer:
        """The trial server, started when it is first needed, and again where it has died.

        A request that is rejected before costs no start.
        """
        with self._starting:  # a search may ask in its own thread and in that of a place
            if self._started is None and self._is_shut_down:
                raise Stopped("the search has ended", hint="run the same command again to continue")
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

    # -- tasks -------------------------------------------------------------------------------------

    def call(
        self, task: Task[R], *, log_name: str | None = None, limits: TimeLimits | None = None
    ) -> Future[R]:
        """Carries out a task in a process of its own; the future's error is the task's.

        It is TrialLost where the machine ended the process, which says nothing about a task.
        """
        folder = task.folder_in(self._folder)
        environment = self._caches.environment(folder)
        modules: list[str] = []
        if isinstance(task, Predict):
            environment |= _NO_GPU
            if self._only_predicts:
                modules = _libraries_of(task.request)
        if limits is None and task.most_seconds is not None:
            limits = time_limits(task.most_seconds)
        return self._server.submit(
            task,
            log_file=folder / "logs" / f"{log_name or task.log_name}.log",
            limits=limits,
            environment=environment,
            slots=self._held,
            cpus=self.cpus,
            modules=modules,
        )

    def run(
        self, task: Task[R], *, log_name: str | None = None, limits: TimeLimits | None = None
    ) -> R:
        """Returns what `call` finds. Raises its error, and Stopped where the search is stopped."""
        return self.wait_for(self.call(task, log_name=log_name, limits=limits))

    def wait_for(self, future: Future[R]) -> R:
        """Waits for a task and returns what it finds, as `run` does."""
        check_stop = partial(self.check_stop, hint="the same command begins again")
        return result_of(self._watch(future), each=check_stop)

    def check_stop(self, *, hint: str = "run the same command again to continue") -> None:
        """Raises Stopped once the search is to stop, or this executor was shut down."""
        if self._should_stop() or self._is_shut_down:
            raise Stopped("the search was stopped", hint=hint)

    def perform(
        self,
        task: Task[R],
        *,
        log_name: str | None = None,
        limits: TimeLimits | None = None,
        each: Callable[[Doing], None] = lambda doing: None,
    ) -> Flow[R]:
        """Returns what `call` finds, and tells `each` meanwhile what the task does.

        What ends the flow, or what `each` raises, ends the task.
        """
        return self._watch(self.call(task, log_name=log_name, limits=limits), each)

    def _watch(
        self, future: Future[R], each: Callable[[Doing], None] = lambda doing: None
    ) -> Flow[R]:
        try:
            while not future.done():
                each(self.doing(future))
                yield Pause(POLL_SECONDS, unless=future)
        except BaseException:
            self.cancel(future)
            yield Pause(_SECONDS_TO_END_A_TASK, unless=future)
            raise
        return future.result()

    def doing(self, future: Future[Any]) -> Doing:
        """Returns what a task does: start, step, compile, parity or evaluation.

        Its phase is empty where it is not known, as before its process has reported anything.
        """
        return Doing() if self._started is None else self._started.doing(future)

    def cancel(self, future: Future[Any]) -> None:
        """Ends a task; within seconds a training has the outcome `interrupted`."""
        if self._started is not None:
            self._started.cancel(future)

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

    # -- device slots ------------------------------------------------------------------------------

    @contextmanager
    def slot(
        self,
        device: DeviceInfo,
        *,
        places: int = 1,
        on_wait: Callable[[str], None],
        alone: bool = False,
    ) -> Iterator[None]:
        """Waits for a slot on each device of a trial, as `take_slot`, and holds it in the block.

        Raises Stopped where the search is stopped while waiting.
        """
        taken = self.take_slot(device, places=places, on_wait=on_wait, alone=alone)
        with result_of(taken, each=self.check_stop):
            yield

    def take_slot(
        self,
        device: DeviceInfo,
        *,
        places: int = 1,
        on_wait: Callable[[str], None],
        alone: bool = False,
    ) -> Flow[ExitStack]:
        """Waits for a slot on each device of a trial; processes started here hold them.

        `device` is the first of them, which `places` trials share. With `alone`, no other trial
        runs there meanwhile. Returns what gives them back.
        Calls `on_wait` once where it has to wait, with the holder of the slot, or "" where that is
        not known.
        """
        was_reported = False

        def report_wait(awaited: DeviceSlots) -> None:
            nonlocal was_reported
            if not was_reported:
                was_reported = True
                on_wait(awaited.holder())

        slots = self._slots_on(device, places)
        all_slots = [slots, *(self._slots_on(one, places) for one in self.other_devices)]
        with ExitStack() as stack:
            held = []
            # All searches take them in the same order, so that no two wait for each other. Numbers
            # of devices would not do: CUDA_VISIBLE_DEVICES may change them.
            for awaited in sorted(all_slots, key=lambda one: one.name):
                wait = partial(report_wait, awaited)
                held.append((yield from awaited.take(stack, wait, alone=alone)))
            self._held = tuple(held)
            self._shares_device = places > 1 and not alone
            stack.callback(self._forget_slot)
            if self.cpus_of_slots:
                # Of another search with as many slots, a trial may be on the CPUs used before.
                self.cpus = self.cpus_of_slots[slots.number]
            return stack.pop_all()

    def _forget_slot(self) -> None:
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
        with self.slot(device, on_wait=note_wait):
            self.seconds_waited += time.monotonic() - began
            yield

    def _slots_on(self, device: DeviceInfo, places: int) -> DeviceSlots:
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

    # -- devices -----------------------------------------------------------------------------------

    def identify(self, device: str | None) -> DeviceInfo:
        """Returns what `device` is, without a CUDA context on it; None is the best device there is.

        Raises InvalidInput.
        """
        return self._named(self.run(Identify(device=device)))

    def _named(self, device: DeviceInfo) -> DeviceInfo:
        """Returns the device that was found; of a CPU that trials share, the name says so."""
        if device.type == "cpu" and self.sharing:
            return replace(device, name=f"{device.name}, {self.sharing}")
        return device

    def probe(
        self, device: str | None, choices: Choices, *, anew: bool = False
    ) -> tuple[DeviceInfo, dict[str, dict[str, str]]]:
        """Returns what `device` is, and which of `choices` do not work on it and why.

        The second result is {technique: {value: reason}}. None as a device is the first CUDA
        device, else the CPU. A CUDA device is probed while this search has a slot on it; the first
        probe measures the size of a new context in bytes. What worked for an earlier probe on the
        same device with the same versions is not tried again, unless `anew` is true. Raises
        InvalidInput.
        """
        info = self.identify(device)
        known = self._probed.get(info.device)
        if known is not None and not choices:
            return known, {}
        task = Probe(device=info.device, choices=choices, with_context=known is None, anew=anew)
        with nullcontext() if info.type == "cpu" else self.slot_on(info):
            found = self.run(task)
        info = self._named(found.device)
        if info.type != "cpu":
            info = self._probed.setdefault(info.device, info)
        return info, {technique: dict(values) for technique, values in found.unavailable.items()}

    def measure_peaks(
        self, device: DeviceInfo, precisions: Sequence[Precision], shape: LinearShape | None
    ) -> DeviceInfo:
        """Returns the device with its rates of matrix products and of copies, and of its host.

        It is measured while this search has a slot on the device, and with the CPUs of a trial.
        """
        task = MeasurePeaks(device=device, precisions=precisions, shape=shape)
        with self.slot_on(device):
            return self.run(task)

    def use_devices_from(self, first: DeviceInfo, *, count: int, nodes: int = 1) -> None:
        """From now on, use `count` devices for each trial: `first` and the next ones.

        Those that were chosen before, as `other_devices`, stay. On a CPU all ranks share the same
        one. Raises InvalidInput where there are not as many, or not of one model, and for devices
        on more `nodes` than this machine.
        """
        check_is_one_node(nodes)
        if count == 1 or self.other_devices:
            return
        check_system_for_ranks(count)
        if first.type == "cpu":
            check_ranks_on_cpu(count, cores=self.cores)
            return
        gpus = [device for device in self.run(ListDevices()) if device.type == first.type]
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
        """Does as `checking_device`."""
        result_of(self.checking_device(device), each=self.check_stop)

    def checking_device(self, device: str) -> Flow[None]:
        """Runs a tiny computation on the device, and on those that trials use besides it.

        Raises TrialLost where one no longer answers.
        """
        for name in (device, *(other.device for other in self.other_devices)):
            try:
                yield from self.perform(CheckDevice(device=name))
            except (Stopped, TrialLost):
                raise
            except AutotuneError as error:
                hint = "see what the device's driver says; run the same command again to continue"
                raise TrialLost(f"{name} does not answer: {error.message}", hint=hint) from error

    # -- models and scripts ------------------------------------------------------------------------

    def examine(
        self,
        workload: Workload,
        choices: Choices,
        *,
        device: str,
        learns_global_batch: bool = False,
    ) -> tuple[Workload, dict[str, dict[str, str]]]:
        """Returns the workload, and which of `choices` its model does not support.

        The second result is {technique: {value: reason}}. The workload of a script has the files
        that it was seen to read, says whether it needs the environment of torchrun and, with
        `learns_global_batch`, has the sequences of a step that the script has. Raises InvalidInput.
        """
        # Attention is tried on the device, and a script runs until it has built its model.
        with self._slot_if_gpu(device):
            task = Examine(
                workload=workload,
                choices=choices,
                device=device,
                learns_global_batch=learns_global_batch,
            )
            return self._examine(task)

    def _slot_if_gpu(self, device: str) -> AbstractContextManager[None]:
        if not device.startswith("cuda"):
            return nullcontext()
        return self.slot_on(self.identify(device))

    def _examine(self, task: Examine) -> tuple[Workload, dict[str, dict[str, str]]]:
        workload = task.workload
        try:
            found = self.run(task)
        except ProcessEnded as error:
            if workload.script is None and not is_function_reference(workload.model):
                raise
            code = workload.script or workload.model
            raise InvalidInput(
                f"{code} ended its process before its first step: {error.message}",
                hint="run it without autotune; it must not end the process that it is in",
            ) from None
        if found.missing_variable:
            self._note(
                f"{workload.script} needs {found.missing_variable}, which torchrun sets: every "
                "trial runs it as the only rank of a training"
            )
            return self._examine(replace(task, workload=replace(workload, one_rank=True)))
        if found.files is not None:
            files = found.files
            workload = replace(
                workload,
                script_files={path: files[path] for path in files if is_code(path)},
                script_files_after_apply={path: files[path] for path in files if not is_code(path)},
                packages=found.packages,
            )
        if found.injected:
            workload = replace(workload, is_injected=True)
            self._note(
                f"{workload.script} has no line of autotune: {found.injected} in every trial; "
                "--no-callback leaves it as it is"
            )
        if found.global_batch is not None:
            workload = replace(workload, global_batch=found.global_batch)
        if found.own_precision is not None and found.own_fusion is not None:
            workload = replace(
                workload, own_precision=found.own_precision, own_fusion=found.own_fusion
            )
        if found.own_choices:
            workload = replace(workload, own_config=_own_config(task, workload, found))
        return workload, {
            technique: dict(values) for technique, values in found.unavailable.items()
        }

    def rehearse(self, workload: Workload, *, micro_batch_size: int, device: str) -> str:
        """Runs the first steps of the workload's script without a cap.

        Returns why it has no such micro batch or, with the whole global batch, why its optimizer
        cannot step during backward; empty if nothing is known, as for a script that fails or that
        needs too long.
        """
        task = Rehearse(workload=workload, micro_batch_size=micro_batch_size, device=device)
        with self._slot_if_gpu(device):
            try:
                return self.run(task)
            except Stopped:
                raise
            except AutotuneError:
                return ""

    # -- trainings ---------------------------------------------------------------------------------

    def training(
        self,
        definition: StudyDefinition,
        config: TrainingConfig,
        *,
        study_folder: Path,
        enforce_cap: bool,
        workload: Workload | None = None,
    ) -> TrainingRequest:
        """Returns what a training of `config` on the devices of this executor is to do.

        It is on the study's workload, or on `workload` where that is given.
        """
        of_study = definition.workload
        workload = workload or of_study
        others = self.other_devices[: workload.devices_per_trial - 1]
        return TrainingRequest(
            workload=workload,
            config=config,
            folder=(study_folder / prepared_folder(of_study, workload)).absolute(),
            device=definition.device.device,
            device_uuid=definition.device.uuid_of_nvml,
            new_context_bytes=definition.device.context_bytes,
            shares_device=self._shares_device,
            cap_bytes=definition.cap_bytes,
            enforce_cap=enforce_cap,
            other_devices=tuple((other.device, other.uuid_of_nvml) for other in others),
        )

    def time_in_turn(
        self,
        definition: StudyDefinition,
        trainings: Sequence[TrainingInTurn],
        *,
        study_folder: Path,
        log_name: str,
        trial_options: TrialOptions,
        rounds: int,
        seed: int,
        seconds: float = math.inf,
    ) -> TimedInTurn:
        """Times trainings in turn, as `execution/in_turn.py` says; the first is the partner.

        After `seconds` it ends with fewer rounds. A model goes on with its text for as many rounds;
        a script has the steps that it has. This search must have a slot on the device. Raises
        TrialLost, Stopped, and StudyMismatch.
        """
        workload = definition.workload
        if workload.script is None:
            steps = max(workload.steps, workload.warmup_steps + rounds)
            workload = replace(workload, steps=steps)
        count = workload.devices_per_trial // workload.nodes_per_trial - 1
        others = self.other_devices[:count] or (definition.device,) * count
        run = RunInTurn(
            trainings=tuple(
                self.training(
                    definition,
                    each.config,
                    study_folder=study_folder,
                    enforce_cap=each.enforce_cap,
                    workload=workload,
                )
                for each in trainings
            ),
            device_bytes=tuple(each.device_bytes for each in trainings),
            devices=(definition.device, *others),
            rounds=rounds,
            seconds=seconds,
            seed=seed,
            log_name=log_name,
            limits=trial_options.time_limits(),
        )
        return self.carry_out(run)

    def carry_out(self, run: RunInTurn) -> TimedInTurn:
        """Times the trainings of a run in turn, with a process for each, as `time_in_turn`."""
        return time_in_turn(
            run,
            call=self.call,
            cancel=self.cancel,
            should_stop=self._should_stop,
        )


def _libraries_of(request: PredictionRequest) -> list[str]:
    """Returns the modules of other packages that building this model takes seconds to import.

    A name that does not exist does no harm: the process that builds the model finds what it needs.
    """
    modules = []
    if request.workload.model_config is not None:
        kind = request.workload.model_config.get("model_type")
        modules += [
            "autotune.models.transformers_network",
            "transformers.modeling_utils",
            f"transformers.models.{kind}.modeling_{kind}",
        ]
    if request.config.adapter != "none":
        modules.append("peft")
    return modules


def _own_config(task: Examine, workload: Workload, found: Examined) -> dict[str, Any]:
    """Returns what a script trains with, where its trainer does what a configuration decides.

    Weights that are not in float32 have decided the precision before the trainer does.
    """
    choices = dict(found.own_choices)
    if workload.own_precision != "fp32":
        choices["precision"] = workload.own_precision
    for optimizer in task.choices.get("optimizer", ())[:1]:  # stands for that of the script
        choices["optimizer"] = optimizer
    return configuration_of(choices, workload.legality_context).to_dict()
