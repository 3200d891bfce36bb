"""The devices of a search: chooses them, and gives each an executor and a place.

Those of this machine are here, and those of a Ray cluster in `devices_of_cluster.py`.
"""

import dataclasses
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property, partial
from pathlib import Path
from typing import Self

from autotune.execution.cluster.environment import check_ray_is_installed, prepare_environment
from autotune.execution.cpu_shares import (
    check_is_one_node,
    check_ranks_on_cpu,
    cpu_shares,
    processes_beside,
    sharing_of_cpus,
    usable_cpus,
)
from autotune.execution.local import LocalExecutor
from autotune.execution.tasks import ListDevices
from autotune.spec.device_group import joint_name
from autotune.spec.result import DeviceInfo
from autotune.spec.study import StudyDefinition
from autotune.study.events import Notice
from autotune.study.prediction.prediction_cache import Predictor
from autotune.study.prediction.predictions import Forecaster, extrapolates_in
from autotune.study.request import SearchRequest, check_trials_per_device
from autotune.study.running.devices import (
    ChosenDevices,
    choose_devices,
    parse_devices,
    sharing_of,
    threads_of,
)
from autotune.study.running.places import Places, ThreadedListener, TrialPlace


class Devices(ABC):
    """The devices of a search, wherever they are. Use it as a context manager."""

    def __init__(
        self,
        work: Path,
        *,
        make_executor: Callable[..., LocalExecutor],
        should_stop: Callable[[], bool],
        listener: ThreadedListener,
    ) -> None:
        self._work = work
        self._make_executor = make_executor
        self._asked_to_stop = should_stop
        self._listener = listener
        self._ending = threading.Event()
        self._said: set[str] = set()
        self._request = SearchRequest()
        self.uuids: Mapping[str, tuple[str, ...]] = {}
        """The names of the places and what NVML of this machine knows their GPUs by; empty for a
        single place of this machine."""

    def __enter__(self) -> Self:
        return self

    @abstractmethod
    def __exit__(self, *_: object) -> None:
        """End what the executors run."""

    @property
    @abstractmethod
    def executor(self) -> LocalExecutor:
        """The executor of the first place, which prepares and confirms the study, too.

        It exists once `choose` has returned.
        """

    @property
    @abstractmethod
    def trials_at_once(self) -> int:
        """How many places the search has."""

    @abstractmethod
    def choose(
        self,
        request: SearchRequest,
        *,
        devices_per_trial: int,
        nodes_per_trial: int = 1,
        stored: StudyDefinition | None,
        is_confirmation: bool,
    ) -> SearchRequest:
        """Choose the devices; return the request with the first of them as its device.

        `stored` is the study that it continues. A confirmation uses those of one trial. Raises
        InvalidInput.
        """

    def replace_first(self) -> bool:
        """Have another machine's `executor` where the first is lost; return whether it was."""
        return False

    @abstractmethod
    def places(
        self, definition: StudyDefinition, *, predicts: bool
    ) -> AbstractContextManager[Places]:
        """Yield the places of the search; `definition` has the first device as it was probed."""

    def should_stop(self) -> bool:
        """Whether the search is to stop, or all places are to end because one of them failed."""
        return self._ending.is_set() or self._asked_to_stop()

    def _note(self, sentence: str) -> None:
        if sentence not in self._said:  # each place would say it
            self._said.add(sentence)
            self._listener(Notice(message=sentence))

    def _examine(self, device: DeviceInfo, *, name: str) -> None:
        """Say what else uses a device.

        Raises InvalidInput where it cannot run as many trials at once as requested.
        """
        check_trials_per_device(self._request.trials_per_device, device)
        if device.others:
            self._note(f"{name}: {device.others}")


def forecast_by(
    executor: LocalExecutor, device: DeviceInfo, definition: StudyDefinition
) -> Predictor:
    """Returns what predicts the configurations of a study in processes of an executor."""
    return Forecaster.of_device(
        device,
        executor=executor,
        workload=definition.workload,
        extrapolates=extrapolates_in(definition.space),
    ).forecasting


def devices_of(
    request: SearchRequest,
    work: Path,
    *,
    make_executor: Callable[..., LocalExecutor],
    should_stop: Callable[[], bool],
    listener: ThreadedListener,
) -> Devices:
    """Returns the devices of this machine, or those of a Ray cluster. Raises InvalidInput."""
    if request.ray is None:
        return DevicesOfMachine(
            work, make_executor=make_executor, should_stop=should_stop, listener=listener
        )
    check_ray_is_installed(request.ray)
    prepare_environment()
    # Ray is an extra, and its import takes half a second that other searches do not need.
    from autotune.study.running.devices_of_cluster import DevicesOfCluster  # noqa: PLC0415

    return DevicesOfCluster(
        work,
        address=request.ray,
        make_executor=make_executor,
        should_stop=should_stop,
        listener=listener,
    )


class DevicesOfMachine(Devices):
    """Those of this machine: each place has an executor, with a trial server of its own."""

    _chosen: ChosenDevices | None = None
    _shares: Sequence[tuple[int, ...] | None] = (None,)
    """The CPUs of each place."""

    @cached_property
    def executor(self) -> LocalExecutor:
        return self._new_executor()

    def _new_executor(self) -> LocalExecutor:
        return self._make_executor(self._work, should_stop=self.should_stop, note=self._note)

    def __exit__(self, *_: object) -> None:
        self.executor.shutdown()

    def choose(
        self,
        request: SearchRequest,
        *,
        devices_per_trial: int,
        nodes_per_trial: int = 1,
        stored: StudyDefinition | None,
        is_confirmation: bool,
    ) -> SearchRequest:
        check_is_one_node(nodes_per_trial)
        self._request = request
        if request.devices is not None:
            self._chosen = choose_devices(
                parse_devices(request.devices),
                self.executor.run(ListDevices()),
                device=request.device,
                devices_per_trial=devices_per_trial,
                trials_per_device=request.trials_per_device,
                model=None if stored is None else stored.device,
            )
            for sentence in self._chosen.left_out:
                self._note(sentence)
            first, *others = self._chosen.groups[0]
            self.executor.other_devices = tuple(others)
            request = dataclasses.replace(request, device=first.device, devices=None, workers=None)
        if devices_per_trial > 1 and self.trials_at_once > 1:
            device = request.device or (None if stored is None else stored.device.device)
            if self.executor.identify(device).type == "cpu":
                check_ranks_on_cpu(devices_per_trial, trials=self.trials_at_once)
        self._shares = cpu_shares(self.trials_at_once)
        if stored is not None and stored.device.type == "cpu":
            self._shares = self._shares_as_before(stored.device)
        self.executor.cpus = self._shares[0]
        self.executor.sharing = sharing_of_cpus(self.trials_at_once)
        if is_confirmation and stored is not None:  # alone, and compared only within one run
            self.executor.sharing = sharing_of(stored.device)
        if is_confirmation:
            self._chosen = None
        return request

    @property
    def trials_at_once(self) -> int:
        if self._chosen is None:
            return self._request.trials_per_device
        return self._chosen.places

    def _shares_as_before(self, device: DeviceInfo) -> Sequence[tuple[int, ...] | None]:
        """Returns the shares with as many CPUs each as a study on slots of a CPU was begun with.

        Such a study goes on, and is confirmed, with any number of slots.
        """
        threads = threads_of(device)
        if not hasattr(os, "sched_getaffinity"):
            return self._shares
        if threads is None or threads_of(self.executor.identify("cpu")) == threads:
            return self._shares
        return [(share or usable_cpus())[:threads] for share in self._shares]

    @contextmanager
    def places(self, definition: StudyDefinition, *, predicts: bool) -> Iterator[Places]:
        groups = [(definition.device, *self.executor.other_devices)]
        slots_on_each = self._request.trials_per_device
        if self._chosen is not None:
            groups += self._chosen.groups[1:]
            slots_on_each = self._chosen.slots_on_each
        places: list[TrialPlace] = []
        for device, *others in groups:
            for other in others:
                context_bytes = definition.device.context_bytes
                known = dataclasses.replace(other, context_bytes=context_bytes)
                self._examine(known, name=other.device)
            probe = _OnceProbed(device, examine=self._examine)
            name = joint_name([device, *others])
            for number in range(1, slots_on_each + 1):
                place = TrialPlace(
                    executor=self._new_executor() if places else self.executor,
                    device=device,
                    trials_on_device=slots_on_each,
                    name=name if slots_on_each == 1 else f"{name} slot {number}",
                )
                place.executor.other_devices = tuple(others)
                if device is not definition.device:
                    place.prepare = partial(probe.on, place)
                elif places:
                    place.prepare = partial(_start_server, place)
                if predicts and places:
                    place.predict = forecast_by(place.executor, device, definition)
                places.append(place)
        for place in places:
            place.predictions_beside = processes_beside(places=len(places))
        if len(places) == 1:
            places[0].name = ""
            with Places(places, listener=self._listener) as only:
                yield only
            return
        self.uuids = {place.name: _known_uuids(place) for place in places}
        for number, (place, cpus) in enumerate(zip(places, self._shares, strict=True)):
            first = number - number % slots_on_each
            place.executor.cpus = cpus
            place.executor.cpus_of_slots = self._shares[first : first + slots_on_each]
        if sharing_of_cpus(len(places)):
            self._note(
                f"{len(places)} trials at a time share {len(usable_cpus())} CPUs: their "
                "speeds are those of sharing them"
            )
        with Places(places, listener=self._listener, ending=self._ending) as several:
            yield several


def _known_uuids(place: TrialPlace) -> tuple[str, ...]:
    """Returns the UUIDs of the GPUs of a place that NVML knows."""
    devices = (place.device, *place.executor.other_devices)
    return tuple(one.uuid_of_nvml for one in devices if one.uuid_of_nvml is not None)


def _start_server(place: TrialPlace) -> DeviceInfo:
    """Wait until the trial server of a place has started; return the device."""
    place.executor.identify(place.device.device)
    return place.device


class _OnceProbed:
    """A device that its first place probes, and that the others wait for."""

    def __init__(self, device: DeviceInfo, *, examine: Callable[..., None]) -> None:
        self._device = device
        self._examine = examine
        self._lock = threading.Lock()
        self._found: DeviceInfo | None = None

    def on(self, place: TrialPlace) -> DeviceInfo:
        """Returns the device as it was probed in a process of `place`, or of another one before."""
        with self._lock:
            if self._found is None:
                found, _ = place.executor.probe(self._device.device, {})
                self._examine(found, name=found.device)
                self._found = found
            return self._found
