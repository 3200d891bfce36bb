"""The worker on the first node of a trial over several nodes, which has the others run their ranks.

The driver asks this worker alone, as where a trial has one node; each part of a training runs
there as on one node. The worker watches the others as a driver does, and tells it which are lost.
"""

import socket
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import ray.util

from autotune.execution.cluster.joint_call import Part, joined
from autotune.execution.cluster.remote_worker import RemoteWorker, reply_in
from autotune.execution.cluster.worker import NodeWorker, WorkerReply
from autotune.execution.server.client import Doing
from autotune.execution.server.limits import TimeLimits
from autotune.execution.tasks import Task, TrainingTask
from autotune.spec.node_ranks import divided

R = TypeVar("R")


class NodeWorkerOfFirst(NodeWorker):
    """A worker that also begins the ranks on other nodes, whose workers are `others`.

    `nodes` names all nodes of a trial, this one first.
    """

    def __init__(self, *, nodes: Sequence[str], others: Sequence[Any], **settings: Any) -> None:
        super().__init__(**settings)
        self._nodes = nodes
        self._others = [
            RemoteWorker(partial(_itself, actor), place=node, node="", note=self._notes.append)
            for node, actor in zip(nodes[1:], others, strict=True)
        ]
        self._parts: dict[Future[Any], list[Part]] = {}

    def _lost(self) -> tuple[tuple[int, str], ...]:
        workers = enumerate(self._others)
        return tuple((number, worker.why_lost) for number, worker in workers if worker.is_lost)

    def _begin(self, task: Task[R], *, log_name: str, limits: TimeLimits | None) -> Future[R]:
        if not isinstance(task, TrainingTask) or task.ranks == 1:
            return super()._begin(task, log_name=log_name, limits=limits)
        store = (ray.util.get_node_ip_address(), free_port())
        own, *others = [
            replace(task, training=replace(task.training, ranks=ranks))
            for ranks in divided(task.ranks, nodes=self._nodes, store=store)
        ]
        begun: Future[Any] = super()._begin(own, log_name=log_name, limits=limits)
        cancel_own = partial(super()._cancel, begun)
        parts = [Part(future=begun, cancel=cancel_own)]
        log = self._here(task.training).folder.parent / "logs" / f"{log_name}.log"
        for worker, other in zip(self._others, others, strict=True):
            read = partial(_read, other, node=worker.place, log=log)
            future = worker.request("call", read, task=other, log_name=log_name, limits=limits)
            cancel = partial(worker.cancel, future)
            parts.append(Part(future=future, cancel=cancel, check=worker.check))
        joint = joined(parts)
        self._parts[joint] = parts
        joint.add_done_callback(self._parts.pop)
        return joint

    def _cancel(self, future: Future[Any]) -> None:
        parts = self._parts.get(future)
        if parts is None:
            super()._cancel(future)
            return
        for part in parts:
            part.cancel()

    def _doing(self, future: Future[Any]) -> Doing:
        parts = self._parts.get(future)
        return super()._doing(future if parts is None else parts[0].future)


def free_port() -> int:
    """Returns a port that nothing listens on now; one that is taken meanwhile loses a trial."""
    with socket.socket() as opened:
        opened.bind(("", 0))
        return int(opened.getsockname()[1])


def _read(task: TrainingTask[R], answer: WorkerReply, *, node: str, log: Path) -> R:
    """Returns what a part found; what it has printed is added to the log of the first node."""
    if answer.log:
        with suppress(OSError), log.open("ab") as opened:  # its disk is full
            opened.write(f"--- on {node} ---\n".encode() + answer.log)
    return task.value_of(reply_in(answer))


def _itself(actor: Any) -> Any:
    return actor
