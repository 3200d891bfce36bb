"""Which nodes of a cluster can run trials."""

import re
from typing import Any

import pytest

pytest.importorskip("ray", reason="Ray is not installed: autotune[ray]")

from autotune.errors import InvalidInput
from autotune.execution.cluster import greeting, nodes
from autotune.execution.cluster.nodes import ClusterNode
from autotune.execution.local import LocalExecutor
from autotune.study.events import Notice
from autotune.study.request import SearchRequest
from autotune.study.running import devices_of_cluster
from autotune.study.running.devices_of_cluster import DevicesOfCluster
from autotune.study.running.places import ThreadedListener

HERE = greeting.greet()


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({}, ""),
        ({"autotune": None}, "autotune is not installed there"),
        ({"autotune": "0.0.1"}, "it has autotune 0.0.1, and this machine"),
        ({"torch": "2.11.0"}, "it has torch 2.11.0, and this machine"),
        ({"torch": None}, "it has no torch"),
        ({"source": "0" * 64}, "other files than that of this machine"),
    ],
    ids=str,
)
def test_a_node_with_another_autotune_or_torch_is_left_out_with_the_reason(changed, reason):
    found = nodes._difference({**HERE, **changed}, HERE)
    assert reason in found
    assert bool(found) == bool(reason)


def test_the_greeting_needs_nothing_that_a_node_may_not_have():
    imported = {name.split(".")[0] for name in vars(greeting) if not name.startswith("_")}
    assert "ray" not in imported
    assert "torch" not in imported


def node(number, *, gpus=0, model="", cpus=8):
    return ClusterNode(
        id=f"{number}" * 8,
        name=f"node{number}",
        gpus=gpus,
        cpus=cpus,
        gpu_model=model,
        folder="/home/ada/.cache",
        free_bytes=2**40,
    )


def devices_kept(devices):
    """Returns what keeps the first slots, as where the devices of all are free."""

    def keep(count):
        del devices._slots[count:]

    return keep


def chosen(listed, monkeypatch, tmp_path, *, devices_per_trial=1, nodes_per_trial=1, **settings):
    """Returns the nodes of the slots that a search on these nodes has, and what it says."""
    events = []
    devices = DevicesOfCluster(
        tmp_path,
        address="auto",
        make_executor=LocalExecutor,
        should_stop=lambda: False,
        listener=ThreadedListener(events.append),
    )
    monkeypatch.setattr(devices, "_look", lambda: None)
    monkeypatch.setattr(devices, "_start", lambda slot: None)
    monkeypatch.setattr(devices, "_wait_for_first", lambda: devices._slots[0])
    monkeypatch.setattr(devices, "_keep_the_free", devices_kept(devices))
    devices._nodes = list(listed)
    request = SearchRequest(storage=f"sqlite:///{tmp_path}/a.db", ray="auto", **settings)
    devices.choose(
        request,
        devices_per_trial=devices_per_trial,
        nodes_per_trial=nodes_per_trial,
        stored=None,
        is_confirmation=False,
    )
    notes = [event.message for event in events if isinstance(event, Notice)]
    names = ["+".join(share.node.name for share in slot.shares) for slot in devices._slots]
    return names, notes


def test_every_gpu_of_the_model_of_which_there_are_most_is_used(monkeypatch, tmp_path):
    listed = [node(1, gpus=2, model="A100"), node(2, gpus=4, model="H100"), node(3)]
    used, notes = chosen(listed, monkeypatch, tmp_path)
    assert used == ["node2"] * 4
    assert notes == [
        "node1 is left out: it has A100, and speeds on it do not compare with those on H100"
    ]


def test_a_number_of_devices_is_a_number_of_gpus(monkeypatch, tmp_path):
    listed = [node(1, gpus=2, model="H100"), node(2, gpus=2, model="H100")]
    assert chosen(listed, monkeypatch, tmp_path, devices="3")[0] == ["node1", "node1", "node2"]


def test_a_number_of_devices_has_as_many_slots_as_trials_run_on_each(monkeypatch, tmp_path):
    listed = [node(1, gpus=2, model="H100"), node(2, gpus=2, model="H100")]
    used, _ = chosen(listed, monkeypatch, tmp_path, devices="3", trials_per_device=2)
    assert used == ["node1"] * 4 + ["node2"] * 2


def test_on_cpus_each_node_has_one_slot(monkeypatch, tmp_path):
    assert chosen([node(1), node(2)], monkeypatch, tmp_path)[0] == ["node1", "node2"]


def test_a_number_of_cpu_slots_is_spread_over_the_nodes(monkeypatch, tmp_path):
    used, _ = chosen([node(1), node(2)], monkeypatch, tmp_path, devices="4", device="cpu")
    assert sorted(used) == ["node1", "node1", "node2", "node2"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"device": "cuda"}, "no node of the Ray cluster has a GPU"),
        ({"device": "cuda", "devices": "all"}, "no node of the Ray cluster has a GPU"),
    ],
)
def test_a_cluster_without_a_gpu_says_what_it_has(settings, message, monkeypatch, tmp_path):
    with pytest.raises(InvalidInput, match=message) as caught:
        chosen([node(1), node(2)], monkeypatch, tmp_path, **settings)
    assert "node1: 8 CPUs; node2: 8 CPUs" in caught.value.hint


def test_nodes_without_cpus_have_no_slots_of_a_cpu(monkeypatch, tmp_path):
    with pytest.raises(InvalidInput, match="the Ray cluster has 0"):
        chosen([node(1, cpus=0)], monkeypatch, tmp_path, device="cpu")


def of_several_gpus(listed, monkeypatch, tmp_path, *, devices_per_trial=4, **settings):
    return chosen(listed, monkeypatch, tmp_path, devices_per_trial=devices_per_trial, **settings)


def test_the_gpus_of_a_trial_are_on_one_node(monkeypatch, tmp_path):
    listed = [node(1, gpus=4, model="H100"), node(2, gpus=8, model="H100")]
    used, notes = of_several_gpus(listed, monkeypatch, tmp_path)
    assert (used, notes) == (["node1", "node2", "node2"], [])
    assert of_several_gpus(listed, monkeypatch, tmp_path, devices="8")[0] == ["node1", "node2"]


def test_gpus_that_make_no_whole_group_are_left_idle_and_said_so(monkeypatch, tmp_path):
    listed = [node(1, gpus=2, model="H100"), node(2, gpus=5, model="H100")]
    used, notes = of_several_gpus(listed, monkeypatch, tmp_path)
    assert used == ["node2"]
    assert notes == [
        "node1 is left out: a trial uses 4 GPUs of one node, so that 2 of its 2 GPUs are left idle",
        "node2 is used in part: a trial uses 4 GPUs of one node, so that 1 of its 5 GPUs is left "
        "idle",
    ]


def test_the_model_is_that_of_which_trials_can_use_most(monkeypatch, tmp_path):
    listed = [node(1, gpus=3, model="A100"), node(2, gpus=3, model="A100")]
    listed.append(node(3, gpus=4, model="H100"))
    assert of_several_gpus(listed, monkeypatch, tmp_path)[0] == ["node3"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"devices_per_trial": 8},
            "a trial uses 8 GPUs of one node, and no node of the Ray cluster has as many: the "
            "largest is node2: 6 GPUs (H100)",
        ),
        ({"devices": "8"}, "8 devices are asked for, and the Ray cluster has 4 in groups of 4"),
        ({"devices": "6"}, "--devices 6 cannot be divided into groups of 4"),
        (
            {"trials_per_device": 2},
            "--trials-per-device 2 is not possible with 4 GPUs a trial on a Ray cluster",
        ),
        (
            {"device": "cpu", "devices": "160"},
            "20 trials of 4 devices cannot run at a time on a CPU with 8 cores",
        ),
    ],
)
def test_a_cluster_without_the_devices_of_a_trial_says_so(settings, message, monkeypatch, tmp_path):
    listed = [node(1, gpus=2, model="H100"), node(2, gpus=6, model="H100")]
    with pytest.raises(InvalidInput, match=re.escape(message)) as raised:
        of_several_gpus(listed, monkeypatch, tmp_path, **settings)
    assert raised.value.hint


def test_cpu_slots_are_divided_among_the_processes_of_a_trial(monkeypatch, tmp_path):
    listed = [node(1), node(2)]
    used, _ = of_several_gpus(
        listed, monkeypatch, tmp_path, devices_per_trial=2, devices="8", device="cpu"
    )
    assert sorted(used) == ["node1", "node1", "node2", "node2"]


class Ready:
    """A worker's slot that Ray has given its device, or not yet."""

    def __init__(self, name, *, is_ready):
        self.name, self.is_ready = name, is_ready

    def shutdown(self):
        """It has nothing to end."""


def test_a_search_on_some_devices_takes_those_that_are_free(monkeypatch, tmp_path):
    monkeypatch.setattr(devices_of_cluster, "_SECONDS_FOR_THE_FREE", 0.0)
    devices = DevicesOfCluster(
        tmp_path,
        address="auto",
        make_executor=LocalExecutor,
        should_stop=lambda: False,
        listener=ThreadedListener(lambda event: None),
    )
    slots = [Ready(name, is_ready=name in "cd") for name in "abcd"]
    devices._slots, devices._first = list(slots), slots[3]
    devices._keep_the_free(2)
    kept: Any = devices._slots
    assert [slot.name for slot in kept] == ["d", "c"]


def test_more_gpus_than_the_cluster_has_are_an_error_that_says_how_many_there_are(
    monkeypatch, tmp_path
):
    with pytest.raises(InvalidInput, match="9 devices are asked for") as caught:
        chosen([node(1, gpus=8, model="H100")], monkeypatch, tmp_path, devices="9")
    assert "node1: 8 GPUs (H100)" in caught.value.message


# -- several nodes a trial -------------------------------------------------------------------------


def of_two_nodes(listed, monkeypatch, tmp_path, *, devices_per_trial=8, **settings):
    return chosen(
        listed,
        monkeypatch,
        tmp_path,
        devices_per_trial=devices_per_trial,
        nodes_per_trial=2,
        **settings,
    )


def test_a_trial_has_the_same_number_of_gpus_on_each_of_its_nodes(monkeypatch, tmp_path):
    listed = [node(number, gpus=4, model="H100") for number in range(1, 5)]
    used, notes = of_two_nodes(listed, monkeypatch, tmp_path)
    assert (used, notes) == (["node1+node2", "node3+node4"], [])


def test_nodes_with_the_most_free_gpus_are_used_first_so_that_fewest_are_left_over(
    monkeypatch, tmp_path
):
    listed = [
        node(1, gpus=4, model="H100"),
        node(2, gpus=4, model="H100"),
        node(3, gpus=8, model="H100"),
    ]
    assert of_two_nodes(listed, monkeypatch, tmp_path)[0] == ["node3+node1", "node2+node3"]


def test_a_number_of_devices_is_that_of_all_nodes_of_all_trials(monkeypatch, tmp_path):
    listed = [node(number, gpus=4, model="H100") for number in range(1, 5)]
    assert of_two_nodes(listed, monkeypatch, tmp_path, devices="8")[0] == ["node1+node2"]


def test_cpus_of_two_nodes_have_as_many_slots_as_trials_are_asked_for(monkeypatch, tmp_path):
    listed = [node(1), node(2), node(3)]
    used, _ = of_two_nodes(
        listed, monkeypatch, tmp_path, devices_per_trial=4, device="cpu", devices="8"
    )
    assert len(used) == 2
    assert all(len(set(names.split("+"))) == 2 for names in used)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"devices_per_trial": 4},
            "a trial uses 2 nodes, with 2 GPUs each, and the Ray cluster has 1 that it can use: "
            "node1: 4 GPUs (H100); node2: 1 GPUs (H100)",
        ),
        (
            {"devices_per_trial": 16},
            "a trial uses 8 GPUs of one node, and no node of the Ray cluster has as many: the "
            "largest is node1: 4 GPUs (H100)",
        ),
        ({"devices_per_trial": 64, "device": "cpu"}, "a trial uses 2 nodes, and the Ray cluster"),
    ],
)
def test_a_cluster_without_the_nodes_of_a_trial_says_so(settings, message, monkeypatch, tmp_path):
    listed = [node(1, gpus=4, model="H100"), node(2, gpus=1, model="H100", cpus=0)]
    with pytest.raises(InvalidInput, match=re.escape(message)) as raised:
        of_two_nodes(listed, monkeypatch, tmp_path, **settings)
    assert raised.value.hint
