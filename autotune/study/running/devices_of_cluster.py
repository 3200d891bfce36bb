"""The devices of a search on a Ray cluster: chooses nodes, and gives each device a place.

Each place has a worker on a node, a Ray actor that has the device, or the devices of a trial, for
as long as the search runs trials. Nodes that join are used, and a worker that is lost is replaced
while its node lives. Where a trial uses several nodes, a place has a worker on each; Ray gives them
their devices together, as a placement group, so that no two searches wait for each other.
"""

import dataclasses
import os
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Self

import ray
import ray.exceptions
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from autotune.errors import InvalidInput, Stopped, TrialLost
from autotune.execution.cluster.address import AUTO, LOCAL
from autotune.execution.cluster.connection import Connection, connected
from autotune.execution.cluster.executor import ClusterExecutor
from autotune.execution.cluster.files import Shipment
from autotune.execution.cluster.first_worker import NodeWorkerOfFirst
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


@dataclass(frozen=True, kw_only=True)
class _NodeShare:
    """The devices that a trial uses on a node: all, or one of so many equal parts."""

    node: ClusterNode
    number: int
    of: int


@dataclass(kw_only=True, eq=False)
class _Slot:
    """The devices for a trial, on one node or on several, that workers can have."""

    shares: tuple[_NodeShare, ...]
    """Of each of its nodes."""
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
    def is_lost(self) -> bool:
        """Whether its last worker was lost, of several any, or none was started."""
        return self.started is None or self.started.is_lost

    @property
    def is_ready(self) -> bool:
        """Whether Ray has given each worker its device."""
        ready = [worker.ready for worker in self.executor.workers]
        return all(one.done() and one.exception() is None for one in ready)

    @property
    def why_lost(self) -> str:
        return next((one.why_lost for one in self.executor.workers if one.is_lost), "")

    def is_on(self, nodes: Collection[str]) -> bool:
        """Whether all of its nodes are among these ids."""
        return all(share.node.id in nodes for share in self.shares)

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
        self._nodes_per_trial = 1
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

    def __exit__(self, *raised: Any) -> None:
        self._ending.set()
        try:
            slots = {*self._slots, self._first}
            closing = [threading.Thread(target=slot.shutdown) for slot in slots if slot is not None]
            for thread in closing:
                thread.start()
            for thread in closing:
                thread.join()
        finally:
            self._open.__exit__(*raised)  # the connection says what an error of Ray is

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
        nodes_per_trial: int = 1,
        stored: StudyDefinition | None,
        is_confirmation: bool,
    ) -> SearchRequest:
        """Choose the nodes, start a worker for each trial, and wait until one of them is there."""
        self._request = request
        self._devices_per_trial = devices_per_trial
        self._nodes_per_trial = nodes_per_trial
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
        self._check_enough_nodes()
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
        trials_on_each = -(-trials // max(1, len(cpus) // self._nodes_per_trial))
        self._slots_on_each_cpu = trials_on_each * self._request.trials_per_device
        if cpus and self._devices_on_each_node > 1:
            check_ranks_on_cpu(
                self._devices_on_each_node, trials=self._slots_on_each_cpu, cores=min(cpus)
            )

    @property
    def _devices_on_each_node(self) -> int:
        """How many devices a trial uses of one node."""
        return self._devices_per_trial // self._nodes_per_trial

    def _check_enough_nodes(self) -> None:
        """Raise InvalidInput where a trial uses more nodes than there are."""
        usable = [node for node in self._nodes if self._devices_on(node)]
        if self._nodes_per_trial > max(1, len(usable)):
            of_each = (
                "" if self._kind == "cpu" else f", with {self._devices_on_each_node} GPUs each"
            )
            raise InvalidInput(
                f"a trial uses {self._nodes_per_trial} nodes{of_each}, and the Ray cluster has "
                f"{len(usable)} that it can use: {_what_they_have(self._nodes)}",
                hint="use a smaller --nodes-per-trial, or start Ray on more machines",
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
                f"a trial uses {self._devices_on_each_node} GPUs of one node, and no node of the "
                f"Ray cluster has as many: the largest is {_what_they_have([largest])}",
                hint="use a smaller --devices-per-trial, or divide it by --nodes-per-trial",
            )
        return model

    def _gpus_used_on(self, node: ClusterNode) -> int:
        """Returns how many GPUs of a node trials use, which have several each or one."""
        return node.gpus - node.gpus % self._devices_on_each_node

    def _add_slots(self) -> None:
        """Add a slot for each device that has none yet, but no more than are asked for.

        Those of nodes that have left count no more.
        """
        nodes = {node.id for node in self._nodes}
        for slot in list(self._slots):
            is_over = slot.is_lost
            gone = [share.node.name for share in slot.shares if share.node.id not in nodes]
            if gone and len(slot.shares) > 1 and not is_over and not slot.is_ready:
                # Ray waits for all nodes of a trial, also for one that will not come back.
                for worker in slot.executor.workers:
                    worker.give_up(f"{gone[0]} has left the cluster")
                is_over = True
            if is_over and gone:
                self._slots.remove(slot)
                if slot is not self._first:
                    slot.shutdown()
                elif slot.started is not None:
                    slot.started.close_workers()
        known = {(share.node.id, share.number) for slot in self._slots for share in slot.shares}
        free = []
        for node in self._nodes:
            count = self._devices_on(node)
            shares = [_NodeShare(node=node, number=number, of=count) for number in range(count)]
            free.append([one for one in shares if (node.id, one.number) not in known])
        while of_trial := _next_shares(free, self._nodes_per_trial):
            used = sum(not slot.is_refused for slot in self._slots)
            if self._most_slots is not None and used >= self._most_slots:
                return
            self._slots.append(_Slot(shares=of_trial))

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
            are = "is" if idle == 1 else "are"
            self._note(
                f"{node.name} is {what}: a trial uses {self._devices_on_each_node} GPUs of one "
                f"node, so that {idle} of its {node.gpus} GPUs {are} left idle"
            )
        return used // self._devices_on_each_node * self._request.trials_per_device

    # -- workers -----------------------------------------------------------------------------------

    def _start(self, slot: _Slot) -> None:
        slot.shutdown()  # a lost worker may have a server here
        group = self._placement_group(slot) if len(slot.shares) > 1 else None
        executors: list[ClusterExecutor] = []
        # That of the first node is told of the others.
        for number in reversed(range(len(slot.shares))):
            executors.insert(
                0, self._executor_on(slot, number, group=group, others=tuple(executors))
            )
        slot.started = executors[0]
        slot.lost_at = None

    def _placement_group(self, slot: _Slot) -> Any:
        """Have Ray reserve the devices of all nodes of a slot together, once they are free."""
        return placement_group(
            [self._resources(share) for share in slot.shares],
            strategy="STRICT_SPREAD",
            bundle_label_selector=[{"ray.io/node-id": share.node.id} for share in slot.shares],
        )

    def _resources(self, share: _NodeShare) -> dict[str, float]:
        """Returns what Ray is asked for on a node."""
        cpus = share.node.cpus
        of_each = cpus / share.of if share.of > cpus else float(cpus // share.of)
        if self._kind == "cpu":
            return {"CPU": of_each}
        # Of one actor, so that all are on its node.
        gpus = self._devices_on_each_node / self._request.trials_per_device
        return {"GPU": gpus, "CPU": min(1.0, cpus / share.of)}

    def _executor_on(
        self, slot: _Slot, number: int, *, group: Any, others: Sequence[ClusterExecutor]
    ) -> ClusterExecutor:
        """Start the worker on one of a slot's nodes; `others` are those of the nodes after it."""
        share = slot.shares[number]
        node = share.node
        resources = self._resources(share)
        kind: type[NodeWorker] = NodeWorker
        settings: dict[str, Any] = {}
        is_first_of_several = number == 0 and bool(others)
        if is_first_of_several:
            kind = NodeWorkerOfFirst
            settings = {
                "nodes": [one.node.name for one in slot.shares],
                "others": [other.worker.actor for other in others],
            }

        def start() -> Any:
            strategy: Any = on_node(node.id)
            if group is not None:
                strategy = PlacementGroupSchedulingStrategy(
                    placement_group=group, placement_group_bundle_index=number
                )
            actor = ray.remote(kind).options(
                num_cpus=resources["CPU"],
                num_gpus=resources.get("GPU", 0),
                max_restarts=0,
                max_task_retries=0,
                max_concurrency=CALLS_AT_ONCE,
                scheduling_strategy=strategy,
            )
            return actor.remote(
                search=self._search,
                slot=share.number,
                slots=share.of,
                cpus=node.cpus,
                threads=os.environ.get("OMP_NUM_THREADS"),
                make_executor=self._make_executor,
                **settings,
            )

        return ClusterExecutor(
            self._work,
            worker=RemoteWorker(start, place=self._name(share), node=node.id, note=self._note),
            shipment=self._shipment,
            excluded=self._excluded(),
            cores=node.cpus,
            should_stop=self.should_stop,
            note=self._note,
            others=others if is_first_of_several else (),
            release=partial(_remove, group) if is_first_of_several else lambda: None,
        )

    def _name(self, share: _NodeShare) -> str:
        """Returns what the user is told of a share. Which GPUs a worker gets, Ray decides."""
        if share.of == 1:
            return share.node.name
        if self._kind == "cpu":
            return f"{share.node.name} cpu {share.number}"
        if self._devices_on_each_node == 1:
            return f"{share.node.name} gpu {share.number}"
        first = share.number * self._devices_on_each_node
        return f"{share.node.name} gpus {first}-{first + self._devices_on_each_node - 1}"

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
            while waiting := [slot for slot in self._slots if not slot.is_lost]:
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
            lost = [slot.why_lost for slot in self._slots]
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
            if slot.started is None or (slot.is_lost and slot.is_on(alive)):
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
        name = " + ".join(worker.place for worker in executor.workers)
        of_cpu = max(share.of for share in slot.shares)
        place = TrialPlace(
            executor=executor,
            device=device,
            trials_on_device=self._request.trials_per_device if self._kind == "cuda" else of_cpu,
            name=name,
            queue=name,
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
        name = " + ".join(worker.place for worker in executor.workers)
        ready = [worker.ready for worker in executor.workers]
        said_at = time.monotonic() + _SECONDS_UNTIL_SAID
        while not all(one.done() for one in ready):
            if time.monotonic() > said_at:
                said_at = float("inf")
                holder = "another job of the cluster"
                self._listener(WaitingForDevice(device=name, holder=holder, place=name))
            self._check_stop()
            time.sleep(POLL_SECONDS)
        for one in ready:
            one.result()
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
            executor.use_devices_from(
                device, count=self._devices_per_trial, nodes=self._nodes_per_trial
            )
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
                    if slot.is_on(alive) and not slot.is_refused and self._is_due(slot):
                        self._start(slot)
                        joined.put(place_of(slot))

    def _is_due(self, slot: _Slot) -> bool:
        """Whether a slot needs a worker now: it never had one, or lost its last a while ago."""
        if slot.started is None:
            return True
        if not slot.is_lost:
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


def _next_shares(free: Sequence[list[_NodeShare]], nodes_per_trial: int) -> tuple[_NodeShare, ...]:
    """Take the shares of one more trial out of those that are `free` on each node.

    Empty where too few nodes have any. The first node has its shares used first; of several nodes
    those with the most are taken, which leaves the fewest shares over.
    """
    left = [shares for shares in free if shares]
    if len(left) < nodes_per_trial:
        return ()
    if nodes_per_trial > 1:
        left.sort(key=len, reverse=True)
    return tuple(shares.pop(0) for shares in left[:nodes_per_trial])


def _remove(group: Any) -> None:
    """Give the devices of a placement group back to Ray."""
    with suppress(Exception):  # the cluster is gone, and the group with it
        remove_placement_group(group)


def _what_they_have(nodes: Sequence[ClusterNode]) -> str:
    """Returns the nodes with what they have, such as `node7: 8 GPUs (NVIDIA H100)`."""
    described = []
    for node in nodes:
        has = f"{node.gpus} GPUs ({node.gpu_model})" if node.gpus else f"{node.cpus} CPUs"
        described.append(f"{node.name}: {has}")
    return "; ".join(described)
