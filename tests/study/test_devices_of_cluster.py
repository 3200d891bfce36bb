"""Which devices of a Ray cluster a search has while nodes and workers come and go.

The cluster is a table of nodes, and workers are ready at once: nothing of Ray runs.
"""

import time
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from autotune.errors import InvalidInput, TrialLost

pytest.importorskip("ray")

from autotune.execution.cluster.executor import ClusterExecutor
from autotune.execution.cluster.nodes import ClusterNode, Nodes
from autotune.execution.cluster.worker import WorkerState
from autotune.execution.tasks import Identify, Probe, Probed
from autotune.spec.attempt import MAX_RETRIES
from autotune.study.events import PlaceJoined
from autotune.study.request import SearchRequest
from autotune.study.running import devices_of_cluster
from autotune.study.running.devices_of_cluster import DevicesOfCluster
from autotune.study.running.places import ThreadedListener
from tests.quick_study.quick_executor import CPU, QuickExecutor


def done(result):
    future = Future()
    future.set_result(result)
    return future


class Worker:
    """A worker that is ready at once, and that a test loses."""

    def __init__(self, start, *, place, node, note):
        self.place, self.node = place, node
        self.is_lost, self.has_worked, self.why_lost = False, False, "it was killed"
        self.state = WorkerState()
        self.actor = f"the actor on {node}"
        self.folder, self.sharing = Path("nowhere"), ""
        self.ready = done(None)
        self.asked = []

    def request(self, method, read, **arguments):
        self.asked.append(method)
        match arguments.get("task"):
            case Identify():
                return done(CPU)
            case Probe():
                return done(Probed(device=CPU, unavailable={}))
        return done(None)

    def check(self):
        pass

    def give_up(self, why):
        self.is_lost, self.why_lost = True, why

    def close(self):
        self.is_lost = True


class Cluster:
    """Nodes by their ids, with the CPUs that each has."""

    def __init__(self, **cpus):
        self.cpus = dict(cpus)
        self.is_lost = False

    @property
    def nodes(self):
        return {node: {} for node in self.cpus}

    def check(self):
        if self.is_lost:
            raise TrialLost("the head does not answer")

    def look_at(self, nodes, **_):
        usable = [
            ClusterNode(
                id=node,
                name=node,
                gpus=0,
                cpus=self.cpus[node],
                gpu_model="",
                folder="",
                free_bytes=0,
            )
            for node in nodes
        ]
        return Nodes(usable=usable, left_out=(), silent=frozenset())


@pytest.fixture
def cluster():
    return Cluster(head=0, a=1, b=1)


@pytest.fixture
def events():
    """What the search says."""
    return []


@pytest.fixture
def devices(cluster, events, tmp_path, monkeypatch):
    """The devices of a search that is connected to the cluster."""
    monkeypatch.chdir(tmp_path)

    @contextmanager
    def connected(_):
        yield cluster

    monkeypatch.setattr(devices_of_cluster, "connected", connected)
    monkeypatch.setattr(devices_of_cluster, "look_at", cluster.look_at)
    monkeypatch.setattr(devices_of_cluster, "RemoteWorker", Worker)
    monkeypatch.setattr(devices_of_cluster, "_SECONDS_BETWEEN_LOOKS", 0.02)
    monkeypatch.setattr(ClusterExecutor, "bring", lambda *_: None)
    monkeypatch.setattr(devices_of_cluster, "placement_group", lambda bundles, **_: bundles)
    monkeypatch.setattr(devices_of_cluster, "remove_placement_group", lambda group: None)
    with DevicesOfCluster(
        tmp_path,
        address="head:6379",
        make_executor=QuickExecutor,
        should_stop=lambda: False,
        listener=ThreadedListener(events.append),
    ) as found:
        yield found


def choose(devices, wanted, *, nodes_per_trial=1):
    request = SearchRequest(ray="head:6379", devices=wanted, device="cpu")
    return devices.choose(
        request,
        devices_per_trial=nodes_per_trial,
        nodes_per_trial=nodes_per_trial,
        stored=None,
        is_confirmation=False,
    )


def joined(events, places, count):
    """The names of the places that have joined, once there are so many."""
    end = time.monotonic() + 10
    while True:
        list(places.newly_joined())
        time.sleep(0.02)
        names = [event.device for event in events if isinstance(event, PlaceJoined)]
        if len(names) >= count or time.monotonic() > end:
            return names


@contextmanager
def places_of(devices):
    definition = SimpleNamespace(name="s", device=CPU, workload=None)
    with devices.places(definition, predicts=False) as places:
        yield places


def test_a_head_without_cpus_has_no_place(devices):
    choose(devices, "all")
    assert devices.trials_at_once == 2


def test_a_node_that_joins_is_used_with_all_devices(devices, cluster, events):
    choose(devices, "all")
    with places_of(devices) as places:
        cluster.cpus["c"] = 1
        assert joined(events, places, 1) == ["c"]


def test_a_node_that_joins_is_not_used_where_there_are_enough(devices, cluster):
    choose(devices, "2")
    with places_of(devices):
        cluster.cpus["c"] = 1
        time.sleep(0.3)
        assert devices.trials_at_once == 2


def test_a_node_takes_the_place_of_one_that_has_left(devices, cluster, events):
    cluster.cpus["c"] = 1
    choose(devices, "2")
    with places_of(devices) as places:
        del cluster.cpus["b"]
        [lost] = [slot.worker for slot in devices._slots if not slot.is_on({"a", "c"})]
        lost.is_lost = True
        assert joined(events, places, 1) == ["c"]


def test_a_lost_worker_is_replaced_on_its_node(devices, events):
    choose(devices, "2")
    with places_of(devices) as places:
        devices._slots[1].worker.is_lost = True
        assert joined(events, places, 1) == ["b"]


def test_a_place_whose_workers_are_lost_without_a_trial_is_given_up(devices, events, monkeypatch):
    monkeypatch.setattr(devices_of_cluster, "_LONGEST_PAUSE_SECONDS", 0.0)
    choose(devices, "2")
    with places_of(devices) as places:
        for _ in range(500):
            devices._slots[1].worker.is_lost = True
            list(places.newly_joined())
            time.sleep(0.02)
            if devices._slots[1].is_refused:
                break
        assert devices._slots[1].is_refused
    assert "b is used no more" in "".join(str(event) for event in events)


def test_a_worker_that_ran_a_trial_is_replaced_without_a_longer_pause(devices):
    choose(devices, "2")
    slot = devices._slots[1]
    slot.losses = 7
    slot.worker.has_worked = slot.worker.is_lost = True
    devices._is_due(slot)
    assert slot.losses == 1
    assert not slot.is_refused


def test_another_worker_prepares_where_the_first_is_lost(devices):
    choose(devices, "2")
    first = devices.executor
    assert not devices.replace_first()
    first.worker.is_lost = True
    assert devices.replace_first()
    assert devices.executor is not first
    assert not devices.executor.is_lost


def test_a_study_is_not_prepared_for_ever_on_workers_that_are_lost(devices):
    choose(devices, "1")
    for _ in range(MAX_RETRIES):
        devices.executor.worker.is_lost = True
        assert devices.replace_first()
    devices.executor.worker.is_lost = True
    assert not devices.replace_first()


def test_a_lost_head_is_said_in_the_thread_of_the_search(devices, cluster):
    assert not devices.should_stop()
    cluster.is_lost = True
    with pytest.raises(TrialLost, match="does not answer"):
        devices.should_stop()


def test_a_cluster_of_which_no_node_can_run_trials_is_refused_with_the_reasons(
    devices, monkeypatch
):
    nothing = Nodes(usable=[], left_out=("a has torch 2.9",), silent=frozenset())
    monkeypatch.setattr(devices_of_cluster, "look_at", lambda *_, **__: nothing)
    with pytest.raises(InvalidInput, match=r"no node of the Ray cluster .*: a has torch 2\.9"):
        choose(devices, "all")


def gpu_node(name, *, gpus, gpu_model):
    return ClusterNode(
        id=name, name=name, gpus=gpus, cpus=8, gpu_model=gpu_model, folder="", free_bytes=0
    )


def test_a_study_goes_on_with_its_model_of_gpu_and_a_new_one_takes_the_most_frequent(devices):
    devices._kind = "cuda"
    nodes = [
        gpu_node("a", gpus=2, gpu_model="NVIDIA L4"),
        gpu_node("b", gpus=8, gpu_model="NVIDIA H100"),
    ]
    of_study = SimpleNamespace(device=SimpleNamespace(name="NVIDIA L4"))
    assert devices._choose_model(nodes, None) == "NVIDIA H100"
    assert devices._choose_model(nodes, of_study) == "NVIDIA L4"


# -- several nodes a trial -------------------------------------------------------------------------


def test_a_place_of_two_nodes_has_a_worker_on_each(devices):
    choose(devices, "2", nodes_per_trial=2)
    assert devices.trials_at_once == 1
    assert [worker.place for worker in devices.executor.workers] == ["a", "b"]


def test_a_lost_node_gives_the_other_one_back_and_a_third_takes_its_place(devices, cluster, events):
    choose(devices, "2", nodes_per_trial=2)
    with places_of(devices) as places:
        first, second = devices.executor.workers
        del cluster.cpus["b"]
        second.is_lost = True
        cluster.cpus["c"] = 1
        assert joined(events, places, 1) == ["a + c"]
        assert first.is_lost, "it was ended: Ray can give its node to others"


def test_a_place_that_waits_for_a_node_that_has_left_is_given_up(devices, cluster, events):
    choose(devices, "2", nodes_per_trial=2)
    with places_of(devices) as places:
        first, second = devices.executor.workers
        second.ready = Future()  # Ray has not given it its device
        del cluster.cpus["b"]
        cluster.cpus["c"] = 1
        assert joined(events, places, 1) == ["a + c"]
        assert first.why_lost == "b has left the cluster"


def test_slots_are_taken_on_every_node_once_its_devices_are_known(devices):
    choose(devices, "2", nodes_per_trial=2)
    executor = devices.executor
    for number_of_slots in ((1, 0), (2, 1)):
        with executor.slot(CPU, on_wait=lambda holder: None):
            taken = [worker.asked.count("take_slot") for worker in executor.workers]
            assert tuple(taken) == number_of_slots
        executor.use_devices_from(CPU, count=2, nodes=2)


def test_nodes_with_devices_of_two_models_cannot_train_together(devices, monkeypatch):
    choose(devices, "2", nodes_per_trial=2)
    other = devices.executor.others[0]
    monkeypatch.setattr(other, "probe", lambda *_: (replace(CPU, name="another CPU"), {}))
    with pytest.raises(InvalidInput, match="they cannot train together"):
        devices.executor.use_devices_from(CPU, count=2, nodes=2)
