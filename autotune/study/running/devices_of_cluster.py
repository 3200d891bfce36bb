"""The devices of a search on a Ray cluster: chooses nodes, and gives each device a place.

Each place has a worker on a node, a Ray actor that has the device, or the devices of a trial, for
as long as the search runs trials. Nodes that join are used, and a worker that is lost is replaced
while its node lives.
"""

import dataclasses
import os
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Self

import ray
import ray.exceptions

from autotune.errors import InvalidInput, Stopped, TrialLost
from autotune.execution.cluster.address import AUTO, LOCAL
from autotune.execution.cluster.connection import Connection, connected
from autotune.execution.cluster.executor import ClusterExecutor
from autotune.execution.cluster.files import Shipment
from autotune.execution.cluster.nodes import ClusterNode, Nodes, look_at, on_node
from autotune.execution.cluster.remote_worker import CALLS_AT_ONCE, RemoteWorker
from autotune.execution.cluster.worker import NodeWorker
from autotune.execution.cpu_shares import check_ranks_on_cpu
from autotune.execution.flow import POLL_SECONDS
from autotune.execution.local import LocalExecutor
from autotune.execution.prepared_folder import PREPARED
from autotune.spec.attempt import MAX_RETRIES
from autotune.spec.result import DeviceInfo
from autotune.spec.study import StudyDefinition
from autotune.storage.database import sqlite_file
from autotune.study.events import Preparing, WaitingForDevice
from autotune.study.request import SearchRequest
from autotune.study.running.devices import check_whole_groups, parse_devices
from autotune.study.running.devices_of_search import Devices, forecast_by
from autotune.study.running.places import Places, ThreadedListener, TrialPlace

_SECONDS_BETWEEN_LOOKS = 3.0
"""How often the search looks for nodes that have joined."""
_SECONDS_UNTIL_SAID = 10.0
"""After this long without a device, the user is told that the search waits for one."""
SECONDS_WITHOUT_A_DEVICE = 120.0
"""How long a search that has lost all of its devices waits for another."""
_SECONDS_FOR_THE_FREE = 5.0
"""How long a search that needs some of the devices waits to see which are free."""
_LONGEST_PAUSE_SECONDS = 60.0
"""Between two workers at a place where workers are lost again and again."""
_LOOKS_AT_A_SILENT_NODE = 3
"""After which it is not looked at again: its disk may have been slow for a while."""
_MOST_LOSSES = 8
"""In a row, without a trial between them, at a place that is then given up."""


@dataclass(kw_only=True, eq=False)
class _Slot:
    """The devices for a trial on a node, or a part of one, that a worker can have."""

    node: ClusterNode
    number: int
    of: int
    started: ClusterExecutor | None = None
    """That of its worker, or of its last one; None before the first was started."""
    losses: int = 0
    """How many of its workers were lost in a row, without a trial that they ran."""
    lost_at: float | None = None
    is_refused: bool = False
    """Whether the device turned out to be of another model."""

    @property
    def executor(self) -> ClusterExecutor:
        assert self.started is not None, "a slot is used once its worker was started"
        return self.started

    @property
    def worker(self) -> RemoteWorker:
        return self.executor.worker

    @property
    def is_ready(self) -> bool:
        """Whether Ray has given the worker its device."""
        ready = self.worker.ready
        return ready.done() and ready.exception() is None

    def shutdown(self) -> None:
        """End its worker, if there is one."""
        if self.started is not None:
            self.started.shutdown()


class DevicesOfCluster(Devices):
    """Those of a Ray cluster; `make_executor` makes the executor on a node."""

    def __init__(
        self,
        work: Path,
        *,
        address: str,
        make_executor: Callable[..., LocalExecutor],
        should_stop: Callable[[], bool],
        listener: ThreadedListener,
    ) -> None:
        super().__init__(
            work, make_executor=make_executor, should_stop=should_stop, listener=listener
        )
        self._address = address
        self._search = uuid.uuid4().hex[:16]
        self._shipment = Shipment()
        self._thread = threading.get_ident()
        self._open = ExitStack()
        self._connection: Connection | None = None
        self._kind = ""
        self._model = ""
        """The GPU model of the nodes that are used, as NVML or Ray names it."""
        self._nodes: list[ClusterNode] = []
        """The living nodes that can run trials."""
        self._slots: list[_Slot] = []
        self._most_slots: int | None = None
        self._slots_on_each_cpu = 1
        self._devices_per_trial = 1
        self._silences: Counter[str] = Counter()
        """How often each node did not answer."""
        self._seen: set[str] = set()
        """The ids of nodes that were looked at."""
        self._first: _Slot | None = None
        self._replaced = 0
        """How often the first was lost while the study was prepared."""

    def __enter__(self) -> Self:
        doing = f"connecting to the Ray cluster at {self._address}"
        if self._address == AUTO:
            doing = "connecting to the Ray cluster of this machine"
        elif self._address == LOCAL:
            doing = "starting Ray on this machine"
        self._listener(Preparing(what=doing))
        self._connection = self._open.enter_context(connected(self._address))
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        with self._open:
            slots = {*self._slots, self._first}
            closing = [threading.Thread(target=slot.shutdown) for slot in slots if slot is not None]
            for thread in closing:
                thread.start()
            for thread in closing:
                thread.join()

    @property
    def executor(self) -> ClusterExecutor:
        assert self._first is not None, "devices are chosen first"
        return self._first.executor

    @property
    def trials_at_once(self) -> int:
        return len(self._slots)

    def should_stop(self) -> bool:
        """Whether the search is to stop, or all places are to end because one of them failed.

        Raises TrialLost in the thread of the main loop where the head of the cluster is lost.
        """
        if super().should_stop():
            return True
        if self._connection is not None and threading.get_ident() == self._thread:
            self._connection.check()
        return False

    def _check_stop(self) -> None:
        if self.should_stop():
            raise Stopped("the search was stopped", hint="run the same command again to continue")

    def _pause(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self._check_stop()
            time.sleep(POLL_SECONDS)

    # -- which devices -----------------------------------------------------------------------------

    def choose(
        self,
        request: SearchRequest,
        *,
        devices_per_trial: int,
        stored: StudyDefinition | None,
        is_confirmation: bool,
    ) -> SearchRequest:
        """Choose the nodes, start a worker for each trial, and wait until one of them is there."""
        self._request = request
        self._devices_per_trial = devices_per_trial
        wanted = None if request.devices is None else parse_devices(request.devices)
        assert not isinstance(wanted, tuple), "a request with --ray names no devices"
        check_whole_groups(wanted, devices_per_trial=devices_per_trial)
        devices = devices_per_trial if is_confirmation else wanted
        self._look()
        nodes = self._nodes
        kind = (request.device or (stored.device.type if stored is not None else "")).split(":")[0]
        if not kind:
            kind = "cuda" if any(node.gpus for node in nodes) else "cpu"
        self._kind = kind
        self._model = self._choose_model(nodes, stored)
        if kind == "cpu":
            self._divide_cpus(1 if devices is None else devices // devices_per_trial)
        elif devices_per_trial > 1 and request.trials_per_device > 1:
            raise InvalidInput(
                f"--trials-per-device {request.trials_per_device} is not possible with "
                f"{devices_per_trial} GPUs a trial on a Ray cluster: Ray lets workers share one "
                "GPU, but not the same several",
                hint="leave it out, or search without --ray on the machine that has the GPUs",
            )
        self._add_slots()
        wanted_slots = None
        if devices is not None:
            wanted_slots = devices // devices_per_trial * request.trials_per_device
        if not self._slots or len(self._slots) < (wanted_slots or 0):
            has = len(self._slots) // request.trials_per_device * devices_per_trial
            usable = "" if devices_per_trial == 1 else f" in groups of {devices_per_trial}"
            raise InvalidInput(
                f"{devices or devices_per_trial} devices are asked for, and the Ray cluster has "
                f"{has}{usable}: {_what_they_have(nodes)}",
                hint="ask for fewer, or use --devices all",
            )
        for slot in self._slots:
            self._start(slot)
        self._first = self._wait_for_first()
        if wanted_slots is not None:
            self._keep_the_free(wanted_slots)
        return dataclasses.replace(request, device=kind, devices=None, workers=None)

    def _divide_cpus(self, trials: int) -> None:
        """Choose how many slots each CPU has, so that so many trials run at once.

        Raises InvalidInput for more ranks than the CPU of a node can take turns with.
        """
        cpus = [node.cpus for node in self._nodes if node.cpus > 0]
        trials_on_each = -(-trials // max(1, len(cpus)))
        self._slots_on_each_cpu = trials_on_each * self._request.trials_per_device
        if cpus and self._devices_per_trial > 1:
            check_ranks_on_cpu(
                self._devices_per_trial, trials=self._slots_on_each_cpu, cores=min(cpus)
            )

    def _look(self) -> None:
        """Forget the nodes that have left, and look at those that have joined since the last look.

        Raises InvalidInput where there is no usable node from the beginning.
        """
        alive = self._alive()
        self._nodes = [node for node in self._nodes if node.id in alive]
        joined = {node_id: node for node_id, node in alive.items() if node_id not in self._seen}
        if not joined:
            return
        found: Nodes = look_at(joined, others=alive, should_stop=self.should_stop)
        self._check_stop()
        self._silences.update(found.silent)
        for node in joined:
            is_silent = node in found.silent
            if not is_silent or self._silences[node] == _LOOKS_AT_A_SILENT_NODE:
                self._seen.add(node)
        for sentence in found.left_out:
            self._note(sentence)
        if not found.usable and not self._slots:
            raise InvalidInput(
                "no node of the Ray cluster can run trials: " + "; ".join(found.left_out),
                hint="install the same autotune and torch on its nodes",
            )
        self._nodes += found.usable

    def _alive(self) -> Mapping[str, Mapping[str, Any]]:
        """Returns what Ray says of each living node."""
        assert self._connection is not None
        while (nodes := self._connection.nodes) is None:
            self._check_stop()
            time.sleep(POLL_SECONDS)
        return nodes

    def _choose_model(self, nodes: Sequence[ClusterNode], stored: StudyDefinition | None) -> str:
        """Returns the model of the GPUs to use: the study's, or the one of which there are most.

        Of a node only as many GPUs count as trials can use.
        """
        if self._kind == "cpu":
            return ""
        gpus: Counter[str] = Counter()
        for node in nodes:
            if node.gpus:
                gpus[node.gpu_model] += self._gpus_used_on(node)
        if not gpus:
            raise InvalidInput(
                "no node of the Ray cluster has a GPU",
                hint=f"it has {_what_they_have(nodes)}; --device cpu searches on its CPUs",
            )
        model = gpus.most_common(1)[0][0]
        if stored is not None and stored.device.name in gpus:
            model = stored.device.name
        if not gpus[model]:
            # All counts are 0, or those of the study's model.
            of_model = [node for node in nodes if stored is None or node.gpu_model == model]
            largest = max(of_model, key=lambda node: node.gpus)
            raise InvalidInput(
                f"a trial uses {self._devices_per_trial} GPUs of one node, and no node of the Ray "
                f"cluster has as many: the largest is {_what_they_have([largest])}",
                hint="use a smaller --devices-per-trial",
            )
        return model

    def _gpus_used_on(self, node: ClusterNode) -> int:
        """Returns how many GPUs of a node trials use, which have several each or one."""
        return node.gpus - node.gpus % self._devices_per_trial

    def _add_slots(self) -> None:
        """Add a slot for each device that has none yet, but no more than are asked for.

        Those of nodes that have left count no more.
        """
        nodes = {node.id for node in self._nodes}
        for slot in list(self._slots):
            is_lost = slot.started is None or slot.started.is_lost
            if slot.node.id not in nodes and is_lost:
                self._slots.remove(slot)
                if slot is not self._first:
                    slot.shutdown()
        known = {(slot.node.id, slot.number) for slot in self._slots}
        for node in self._nodes:
            count = self._devices_on(node)
            for number in range(count):
                used = sum(not slot.is_refused for slot in self._slots)
                if self._most_slots is not None and used >= self._most_slots:
                    return
                if (node.id, number) not in known:
                    self._slots.append(_Slot(node=node, number=number, of=count))

    def _devices_on(self, node: ClusterNode) -> int:
        """Returns how many slots a node has; says why where its GPUs are not used."""
        if self._kind == "cpu":
            return self._slots_on_each_cpu if node.cpus else 0
        if node.gpus and node.gpu_model != self._model:
            self._note(
                f"{node.name} is left out: it has {node.gpu_model or 'another GPU'}, and "
                f"speeds on it do not compare with those on {self._model}"
            )
            return 0
        used = self._gpus_used_on(node)
        if node.gpus and used < node.gpus:
            idle = node.gpus - used
            what = "left out" if not used else "used in part"
            self._note(
                f"{node.name} is {what}: a trial uses {self._devices_per_trial} GPUs of one node, "
                f"so that {idle} of its {node.gpus} GPUs {'is' if idle == 1 else 'are'} left idle"
            )
        return used // self._devices_per_trial * self._request.trials_per_device

    # -- workers -----------------------------------------------------------------------------------

    def _start(self, slot: _Slot) -> None:
        slot.shutdown()  # a lost worker may have a server here
        node = slot.node
        resources: dict[str, float] = {"num_cpus": node.cpus // slot.of, "num_gpus": 0}
        if slot.of > node.cpus:
            resources["num_cpus"] = node.cpus / slot.of
        if self._kind == "cuda":
            # Of one actor, so that all are on its node.
            resources["num_gpus"] = self._devices_per_trial / self._request.trials_per_device
            resources["num_cpus"] = min(1, node.cpus / slot.of)

        def start() -> Any:
            actor = ray.remote(NodeWorker).options(
                **resources,
                max_restarts=0,
                max_task_retries=0,
                max_concurrency=CALLS_AT_ONCE,
                scheduling_strategy=on_node(node.id),
            )
            return actor.remote(
                search=self._search,
                slot=slot.number,
                slots=slot.of,
                cpus=node.cpus,
                threads=os.environ.get("OMP_NUM_THREADS"),
                make_executor=self._make_executor,
            )

        slot.started = ClusterExecutor(
            self._work,
            worker=RemoteWorker(start, place=self._name(slot), node=node.id, note=self._note),
            shipment=self._shipment,
            excluded=self._excluded(),
            cores=node.cpus,
            should_stop=self.should_stop,
            note=self._note,
        )
        slot.lost_at = None

    def _name(self, slot: _Slot) -> str:
        """Returns what the user is told of a slot. Which GPUs a worker gets, Ray decides."""
        if slot.of == 1:
            return slot.node.name
        if self._kind == "cpu":
            return f"{slot.node.name} cpu {slot.number}"
        if self._devices_per_trial == 1:
            return f"{slot.node.name} gpu {slot.number}"
        first = slot.number * self._devices_per_trial
        return f"{slot.node.name} gpus {first}-{first + self._devices_per_trial - 1}"

    def _excluded(self) -> list[Path]:
        excluded = [self._work.absolute()]
        database = sqlite_file(self._request.storage)
        if database is not None:
            for suffix in ("", "-wal", "-shm"):
                excluded.append(Path(f"{database.absolute()}{suffix}"))
        return excluded

    def _wait_for_first(self) -> _Slot:
        """Wait until Ray has given the first worker its device.

        Where all workers are lost before, they are started again a few times.
        """
        said_at = time.monotonic() + _SECONDS_UNTIL_SAID
        for _ in range(MAX_RETRIES + 1):
            while waiting := [slot for slot in self._slots if not slot.worker.is_lost]:
                for slot in waiting:
                    if slot.is_ready:
                        return slot
                if time.monotonic() > said_at:
                    self._note(
                        "waiting for a device of the Ray cluster: all are taken, by other jobs or "
                        "by other searches"
                    )
                self._check_stop()
                time.sleep(POLL_SECONDS)
            lost = [slot.worker.why_lost for slot in self._slots]
            why = lost[0] if lost else "no node that can run trials is left"
            self._start_lost()
        raise TrialLost(
            f"no worker has started on the Ray cluster: {why}",
            hint="see the logs of Ray on its nodes",
        )

    def _keep_the_free(self, count: int) -> None:
        """Keep so many slots, those first whose worker has its device, and end the other workers.

        Ray alone knows which devices are free: it gives each worker one that has none.
        """
        end = time.monotonic() + _SECONDS_FOR_THE_FREE
        while sum(slot.is_ready for slot in self._slots) < count and time.monotonic() < end:
            self._check_stop()
            time.sleep(POLL_SECONDS)
        self._slots.sort(key=lambda slot: (slot is not self._first, not slot.is_ready))
        self._most_slots = count
        spare, self._slots = self._slots[count:], self._slots[:count]
        for slot in spare:
            threading.Thread(target=slot.shutdown, daemon=True).start()

    def _start_lost(self) -> None:
        """Start a worker in place of each lost one whose node lives, and on nodes that joined."""
        self._pause(_SECONDS_BETWEEN_LOOKS)  # until the head knows of a node that was killed
        self._look()
        self._add_slots()
        alive = {node.id for node in self._nodes}
        for slot in self._slots:
            if slot.started is None or (slot.started.is_lost and slot.node.id in alive):
                self._start(slot)

    def replace_first(self) -> bool:
        if not self.executor.is_lost or self._replaced == MAX_RETRIES:
            return False
        self._replaced += 1
        self._start_lost()
        self._first = self._wait_for_first()
        return True

    # -- places ------------------------------------------------------------------------------------

    @contextmanager
    def places(self, definition: StudyDefinition, *, predicts: bool) -> Iterator[Places]:
        place_of = partial(self._place, definition=definition, predicts=predicts)
        assert self._first is not None
        slots = [self._first, *(slot for slot in self._slots if slot is not self._first)]
        places = [place_of(slot) for slot in slots]
        self.uuids = {place.name: () for place in places}
        joined: SimpleQueue[TrialPlace] = SimpleQueue()
        with Places(
            places,
            listener=self._listener,
            ending=self._ending,
            joined=joined,
            seconds_without_place=SECONDS_WITHOUT_A_DEVICE,
        ) as several:
            looking = threading.Thread(
                target=self._look_for_devices, args=(several, joined, place_of), daemon=True
            )
            looking.start()
            try:
                yield several
            finally:
                self._ending.set()
                looking.join(timeout=2 * _SECONDS_BETWEEN_LOOKS)

    def _place(self, slot: _Slot, *, definition: StudyDefinition, predicts: bool) -> TrialPlace:
        executor, device = slot.executor, definition.device
        place = TrialPlace(
            executor=executor,
            device=device,
            trials_on_device=self._request.trials_per_device if self._kind == "cuda" else slot.of,
            name=executor.worker.place,
            queue=executor.worker.place,
            predict=forecast_by(executor, device, definition) if predicts else None,
            is_lost=lambda: executor.is_lost,
        )
        place.prepare = lambda: self._prepare(slot, executor, definition)
        return place

    def _prepare(
        self, slot: _Slot, executor: ClusterExecutor, definition: StudyDefinition
    ) -> DeviceInfo:
        """Wait for the worker, look at its device, and bring what the study needs.

        The slot may have another worker by now.
        """
        name, ready = executor.worker.place, executor.worker.ready
        said_at = time.monotonic() + _SECONDS_UNTIL_SAID
        while not ready.done():
            if time.monotonic() > said_at:
                said_at = float("inf")
                holder = "another job of the cluster"
                self._listener(WaitingForDevice(device=name, holder=holder, place=name))
            self._check_stop()
            time.sleep(POLL_SECONDS)
        ready.result()
        model = definition.device
        try:
            device = model
            if slot is not self._first or slot.losses:
                device, _ = executor.probe(self._kind, {})
            if device.name != model.name or not device.is_of_model(model):
                raise InvalidInput(
                    f"it has {device.model}, and speeds on it do not compare with those on "
                    f"{model.model}"
                )
            self._examine(device, name=name)
            executor.use_devices_from(device, count=self._devices_per_trial)
            executor.bring(definition.workload, self._work / definition.name / PREPARED)
        except InvalidInput:
            slot.is_refused = True
            raise
        return device

    def _look_for_devices(
        self,
        places: Places,
        joined: "SimpleQueue[TrialPlace]",
        place_of: Callable[[_Slot], TrialPlace],
    ) -> None:
        """Add places for nodes that join, and for workers that are lost on a living node."""
        while not self._ending.wait(_SECONDS_BETWEEN_LOOKS) and places.takes_more:
            # Without an answer of the head, as where the search ends, there is nothing to join.
            with suppress(Exception):
                self._look()
                self._add_slots()
                alive = {node.id for node in self._nodes}
                for slot in self._slots:
                    if slot.node.id in alive and not slot.is_refused and self._is_due(slot):
                        self._start(slot)
                        joined.put(place_of(slot))

    def _is_due(self, slot: _Slot) -> bool:
        """Whether a slot needs a worker now: it never had one, or lost its last a while ago."""
        if slot.started is None:
            return True
        if not slot.worker.is_lost:
            return False
        if slot.lost_at is None:
            slot.lost_at = time.monotonic()
            slot.losses = 1 if slot.worker.has_worked else slot.losses + 1
            if slot.losses >= _MOST_LOSSES:
                slot.is_refused = True
                self._note(
                    f"{slot.worker.place} is used no more: {_MOST_LOSSES} of its workers were "
                    "lost, none of which had run a trial"
                )
        pause = min(2.0**slot.losses, _LONGEST_PAUSE_SECONDS)
        return time.monotonic() - slot.lost_at >= pause


def _what_they_have(nodes: Sequence[ClusterNode]) -> str:
    """Returns the nodes with what they have, such as `node7: 8 GPUs (NVIDIA H100)`."""
    described = []
    for node in nodes:
        has = f"{node.gpus} GPUs ({node.gpu_model})" if node.gpus else f"{node.cpus} CPUs"
        described.append(f"{node.name}: {has}")
    return "; ".join(described)
