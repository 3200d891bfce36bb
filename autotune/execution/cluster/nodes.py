"""The nodes of a Ray cluster: which of them can run trials, and with how many devices.

A node takes part where it has the driver's autotune and torch, and answers. Ray itself compares the
versions of Python and Ray. A request that no node can serve would wait in Ray for ever without a
word, so that nothing is asked of Ray that no node has.
"""

import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import ray
import ray.cloudpickle
import ray.exceptions
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from autotune.execution.cluster import greeting
from autotune.execution.flow import POLL_SECONDS

SECONDS_TO_GREET = 30.0
"""A node starts a process for it, which imports nothing large."""

_SECONDS_TO_ANSWER = 10.0
_ALIVE = 0
"""Of the states in Ray's gcs.proto."""

ray.cloudpickle.register_pickle_by_value(greeting)  # a node may have another autotune, or none


@dataclass(frozen=True, kw_only=True)
class ClusterNode:
    """A node that can run trials."""

    id: str
    name: str
    """Its host name, with the beginning of Ray's id where two nodes have the same."""
    gpus: int
    cpus: int
    gpu_model: str
    """As NVML names its first GPU, or Ray; empty where neither does, or without a GPU."""
    folder: str
    """Where a search keeps its files on the node."""
    free_bytes: int
    """Of the disk of that folder."""


@dataclass(frozen=True, kw_only=True)
class Nodes:
    """The nodes that can run trials, and a sentence on each that cannot."""

    usable: Sequence[ClusterNode]
    left_out: Sequence[str]
    silent: frozenset[str]
    """The ids of those that did not answer in time, and may do so later."""


def alive_nodes() -> dict[str, Mapping[str, Any]]:
    """Returns what Ray says of each living node, by its id. Raises what Ray does.

    `ray.nodes` ends the process where the head is started anew while it waits for an answer (Ray
    2.60: a failed check in global_state_accessor.cc), so that the head is asked as Ray's own
    autoscaler does.
    """
    head = getattr(ray._private.worker.global_worker, "gcs_client", None)
    if head is None:  # connected through the Ray client
        return {node["NodeID"]: node for node in ray.nodes() if node["Alive"]}
    return {
        node_id.hex(): {
            "NodeManagerHostname": node.node_manager_hostname,
            "Resources": dict(node.resources_total),
        }
        for node_id, node in head.get_all_node_info(timeout=_SECONDS_TO_ANSWER).items()
        if node.state == _ALIVE
    }


def look_at(
    nodes: Mapping[str, Mapping[str, Any]],
    *,
    others: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
    should_stop: Callable[[], bool] = lambda: False,
) -> Nodes:
    """Returns which of `nodes`, as `alive_nodes` returns them, can run trials.

    Their names differ from those of `others`. It waits for their answers, and returns at once where
    `should_stop`.
    """
    greetings, silent = _greet(nodes, should_stop)
    here = greeting.greet()
    hosts = [node["NodeManagerHostname"] for node in {**others, **nodes}.values()]
    usable, left_out = [], []
    for node_id, node in nodes.items():
        name = node["NodeManagerHostname"]
        if hosts.count(name) > 1:
            name = f"{name} {node_id[:6]}"
        found = greetings[node_id]
        reason = found if isinstance(found, str) else _difference(found, here)
        if reason:
            left_out.append(f"{name} is left out: {reason}")
            continue
        assert not isinstance(found, str)
        resources = node["Resources"]
        usable.append(
            ClusterNode(
                id=node_id,
                name=name,
                gpus=int(resources.get("GPU", 0)),
                cpus=int(resources.get("CPU", 0)),
                gpu_model=_gpu_model(resources, found["gpus"]),
                folder=found["folder"],
                free_bytes=found["free_bytes"],
            )
        )
    return Nodes(usable=usable, left_out=left_out, silent=silent)


def on_node(node_id: str) -> NodeAffinitySchedulingStrategy:
    """Returns the strategy by which Ray runs something on that node or not at all."""
    return NodeAffinitySchedulingStrategy(node_id, soft=False)


def _greet(
    nodes: Iterable[str], should_stop: Callable[[], bool]
) -> tuple[dict[str, Mapping[str, Any] | str], frozenset[str]]:
    """Returns each node's greeting, or why there is none, and the nodes that did not answer."""
    remote = ray.remote(num_cpus=0, max_retries=0)(greeting.greet)
    references = {
        remote.options(scheduling_strategy=on_node(node)).remote(): node for node in nodes
    }
    end = time.monotonic() + SECONDS_TO_GREET
    done: list[Any] = []
    silent = list(references)
    while silent and time.monotonic() < end and not should_stop():
        done, silent = ray.wait(list(references), num_returns=len(references), timeout=POLL_SECONDS)
    found: dict[str, Mapping[str, Any] | str] = {}
    for reference in done:
        try:
            found[references[reference]] = ray.get(reference)
        except ray.exceptions.RayTaskError as error:
            found[references[reference]] = f"it cannot say what it has: {error.cause!r}"
        except ray.exceptions.RayError as error:
            found[references[reference]] = f"it has left the cluster ({type(error).__name__})"
    for reference in silent:
        ray.cancel(reference, force=True)
        found[references[reference]] = f"it did not answer for {SECONDS_TO_GREET:.0f} s"
    return found, frozenset(references[reference] for reference in silent)


def _difference(found: Mapping[str, Any], here: Mapping[str, Any]) -> str:
    """Returns what a node has that the driver's machine has not; empty if they are the same."""
    if found["autotune"] is None:
        return f"autotune is not installed there, {here['autotune']} is needed"
    if found["torch"] is None:
        return f"it has no torch, and this machine has {here['torch']}"
    for package in ("autotune", "torch"):
        if found[package] != here[package]:
            return f"it has {package} {found[package]}, and this machine {here[package]}"
    if found["source"] != here["source"]:
        return f"its autotune {found['autotune']} has other files than that of this machine"
    return ""


def _gpu_model(resources: Mapping[str, Any], gpus: Sequence[Sequence[Any]]) -> str:
    if not resources.get("GPU"):
        return ""
    if gpus:
        return str(gpus[0][0])
    for name in resources:
        kind, _, model = name.partition("accelerator_type:")
        if model and not kind:
            return model
    return ""


def free_resources() -> tuple[float, float]:
    """Returns how many GPUs and CPUs of the cluster Ray has not given to any process."""
    free = ray.available_resources()
    return free.get("GPU", 0.0), free.get("CPU", 0.0)


def versions_here() -> str:
    """Returns the versions of Ray and Python that a cluster must have, too."""
    return f"Ray {ray.__version__} and Python {'.'.join(map(str, sys.version_info[:3]))}"
