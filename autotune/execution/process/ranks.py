"""Runs a training on several devices: a process for each of this node, which is one rank of it.

The process of the trial forks them and stays outside of the training. It ends all of them as soon
as one fails: the others would wait for it, and their own errors only say that a connection broke.
So the trial has the outcome of the rank that failed first. Where the trial is ended because a rank
hangs, it is told what each of them was doing. The ranks of one node find each other through a file
in memory, of which nothing can be left, and talk through the loopback interface. Those of several
nodes, which each have such a process, find each other through a TCPStore in that of the first.
"""

import faulthandler
import fcntl
import os
import re
import selectors
import signal
import socket
import struct
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed
from torch.distributed import FileStore, Store, TCPStore  # type: ignore[attr-defined]

from autotune.errors import AutotuneError, TrialLost
from autotune.execution.cpu_shares import usable_cpus
from autotune.execution.joint_outcome import SECONDS_FOR_OTHERS, complains_of_another
from autotune.execution.server.infrastructure import host_memory_kills
from autotune.execution.server.process_exit import measurement_of_exit
from autotune.execution.server.process_tree import die_with
from autotune.execution.server.replies import (
    MalformedReply,
    TaskReply,
    TrainingFailed,
    decode,
    reply_after,
    reply_of,
    write_line,
)
from autotune.memory.host import available_bytes, share_with_others
from autotune.spec.node_ranks import NodeRanks
from autotune.spec.training_request import ReportsStage
from autotune.training.turns import Turns

COLLECTIVE_TIMEOUT = timedelta(hours=1)
"""How long a rank waits for another one. A rank that ends is noticed at once and one that hangs by
the trial's limits of time, so this is only the last resort."""
_SECONDS_TO_MEET = 120.0
"""How long a rank tries to reach the store on the first node, which may still start its server."""

SECONDS_STOPPED = 3.0
"""After this long a rank that somebody has stopped with a signal counts as lost. A debugger stops
it for a moment."""
_GRACE_SECONDS = 1.0
"""From SIGTERM to SIGKILL."""
_GRACE_SECONDS_WHEN_TOLD_TO_END = 0.3
"""The same where the server has sent SIGTERM to all, and soon sends SIGKILL to this process."""
_SECONDS_BETWEEN_LOOKS = 0.5
"""How often processes are looked at that may have ended or stopped without a word."""
_SIOCGIFADDR = 0x8915
"""Asks for the address of an interface (`linux/sockios.h`)."""


@dataclass(frozen=True, kw_only=True)
class Rank:
    """One of the processes of a training on several devices."""

    of_node: NodeRanks
    local_index: int
    """Among the ranks of its node."""
    file: int
    """Descriptor of the file in memory through which the ranks of one node find each other."""

    @property
    def index(self) -> int:
        return self.of_node.first + self.local_index

    @property
    def size(self) -> int:
        return self.of_node.size

    @contextmanager
    def joined(self, device: str) -> Iterator[None]:
        """Be this rank of torch.distributed's default process group, on a device.

        Raises TrialLost where the first node cannot be reached.
        """
        is_cuda = device.startswith("cuda")
        if is_cuda:
            torch.cuda.set_device(device)
        address = self.of_node.address
        interface = "lo" if address is None else interface_with(address)
        if interface:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
            os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)
        torch.distributed.init_process_group(
            "cpu:gloo,cuda:nccl" if is_cuda else "gloo",
            store=self._store(),
            rank=self.index,
            world_size=self.size,
            timeout=COLLECTIVE_TIMEOUT,
        )
        yield
        # Not in a `finally`: after an error the others may never come to the end.
        torch.distributed.destroy_process_group()

    def _store(self) -> Store:
        if self.of_node.store is None:
            return FileStore(f"/proc/self/fd/{self.file}", self.size)
        host, port = self.of_node.store
        try:
            store = TCPStore(
                host, port, is_master=False, timeout=timedelta(seconds=_SECONDS_TO_MEET)
            )
        except torch.distributed.DistError as error:
            raise TrialLost(
                f"the first node of the trial cannot be reached at {host}:{port}: "
                f"{str(error).splitlines()[0]}",
                hint="let the nodes of the cluster reach each other on all ports",
            ) from None
        store.set_timeout(COLLECTIVE_TIMEOUT)
        return store


def interface_with(address: str) -> str:
    """Returns the network interface that has an IPv4 address; empty where none has."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            with suppress(OSError):  # an interface without an address
                answer = fcntl.ioctl(asked.fileno(), _SIOCGIFADDR, request)
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    return ""


class _ToldToEnd(BaseException):
    """The process of the trial was sent SIGTERM."""


def run_on_ranks(
    run: Callable[[Rank], Any],
    ranks: NodeRanks,
    *,
    remark: Callable[[str], None] = lambda text: None,
) -> list[Any]:
    """Returns the result of `run` for each rank of this node, which run in processes of their own.

    Results are ready for JSON. If SIGTERM ends this process meanwhile, it first calls `remark` with
    what each rank was doing. Raises TrainingFailed where a rank does or has ended without a result,
    and the AutotuneError that a rank raises, such as TrialLost. Their messages name the rank.
    """
    memory_kills = host_memory_kills()
    file = os.memfd_create("ranks")
    # Read before any rank takes some, so that all have the same part.
    group = _Group(ranks=ranks, host_bytes=available_bytes())
    store = None
    try:
        for index in range(ranks.count):
            group.start(partial(run, Rank(of_node=ranks, local_index=index, file=file)))
        # After the forks, as it has a thread.
        store = _hosted_store(ranks)
        with _raising_when_told_to_end():
            group.wait()
    except _ToldToEnd:
        group.kill(grace_seconds=_GRACE_SECONDS_WHEN_TOLD_TO_END)
        remark(group.what_each_did())
        os.kill(os.getpid(), signal.SIGTERM)
    finally:
        group.kill()
        group.close()
        os.close(file)
        del store
    return group.results(memory_kills=memory_kills)


def _hosted_store(ranks: NodeRanks) -> TCPStore | None:
    """Returns the store of all ranks, on the first of several nodes. Raises TrialLost."""
    if ranks.store is None or ranks.first:
        return None
    host, port = ranks.store
    try:
        return TCPStore(host, port, is_master=True, wait_for_workers=False)
    except torch.distributed.DistError as error:
        raise TrialLost(
            f"the ranks of the trial cannot meet at {host}:{port}: {str(error).splitlines()[0]}",
            hint="run the same command again to continue",
        ) from None


@contextmanager
def _raising_when_told_to_end() -> Iterator[None]:
    """Raise _ToldToEnd at SIGTERM, once; the next one ends this process."""

    def end(_number: int, _frame: object) -> NoReturn:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        raise _ToldToEnd

    signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


@dataclass(kw_only=True)
class _Process:
    """The process of a rank, and what is known about it."""

    name: str
    pid: int
    pipe: int
    stack: int
    """Descriptor of a file in memory, in which it writes at SIGTERM what it is doing."""
    stopped_since: float | None = None
    """When a signal was first seen to have stopped it, such as SIGSTOP; None while it runs."""
    received: bytes = b""
    reply: TaskReply | None = None
    exit_status: int | None = None

    def read(self) -> bool:
        """Read what it has written; return whether there may be more."""
        try:
            received = os.read(self.pipe, 65536)
        except BlockingIOError:
            return False
        self.received += received
        return bool(received)

    def has_ended(self) -> bool:
        """Returns whether it has ended, and reap it."""
        if self.exit_status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.exit_status = os.waitstatus_to_exitcode(status)
        return self.exit_status is not None

    def look(self) -> None:
        try:
            stat = Path(f"/proc/{self.pid}/stat").read_bytes()
        except OSError:
            return
        is_stopped = stat.rpartition(b")")[2].split()[0] == b"T"
        if not is_stopped:
            self.stopped_since = None
        elif self.stopped_since is None:
            self.stopped_since = time.monotonic()

    def what_it_did(self) -> str:
        """Returns where it was at SIGTERM, as far as it is known."""
        if self.stopped_since is not None:
            return f"{self.name} was stopped by a signal"
        os.lseek(self.stack, 0, os.SEEK_SET)
        text = os.read(self.stack, 65536).decode(errors="replace")
        innermost = re.search(r'File "(.*)", line (\d+) in (.*)', text)
        if innermost is None:
            return ""
        file, line, function = innermost.groups()
        place = "/".join(Path(file).parts[-2:])
        return f"{self.name} was in {function} ({place}, line {line})"


@dataclass(kw_only=True)
class _Group:
    """The processes of the ranks of a training on this node."""

    ranks: NodeRanks
    host_bytes: int | None
    """What the host has left for all ranks together."""
    processes: list[_Process] = field(default_factory=list)
    ended: list[_Process] = field(default_factory=list)
    """In the order in which they ended."""

    def start(self, run: Callable[[], Any]) -> None:
        read_end, write_end = os.pipe()
        stack = os.memfd_create("stack")
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            os.close(read_end)
            for other in self.processes:
                os.close(other.pipe)
            _run_rank(
                run,
                write_end,
                size=self.ranks.count,
                parent=parent,
                stack=stack,
                host_bytes=self.host_bytes,
            )
        os.close(write_end)
        os.set_blocking(read_end, False)
        name = self.ranks.name_of(len(self.processes))
        self.processes.append(_Process(name=name, pid=pid, pipe=read_end, stack=stack))

    def wait(self) -> None:
        """Wait until every rank has ended, or one has failed.

        Raises TrialLost for one that somebody has stopped.
        """
        selector = selectors.DefaultSelector()
        for process in self.processes:
            selector.register(process.pipe, selectors.EVENT_READ, process)
        give_up_at: float | None = None
        while len(self.ended) < len(self.processes):
            # What a rank has forked may hold its pipe when it has ended.
            seconds = _SECONDS_BETWEEN_LOOKS
            if give_up_at is not None:
                seconds = min(seconds, give_up_at - time.monotonic())
                if seconds <= 0:
                    return
            for key, _ in selector.select(timeout=seconds):
                ready: _Process = key.data
                if not ready.read():
                    selector.unregister(ready.pipe)
                    _wait_a_moment_for(ready)
                    self._collect_ended()
            self._collect_ended()
            if give_up_at is None and any(map(_has_failed, self.ended)):
                give_up_at = time.monotonic() + SECONDS_FOR_OTHERS
            if give_up_at is None:
                self._check_stopped()

    def _check_stopped(self) -> None:
        for process in self.processes:
            since = process.stopped_since
            if since is not None and time.monotonic() - since > SECONDS_STOPPED:
                raise TrialLost(
                    f"{process.name}: the trial's process was stopped from outside, by a signal",
                    hint="run the same command again to continue",
                )

    def _collect_ended(self) -> None:
        for process in self.processes:
            if process in self.ended:
                continue
            process.look()
            if process.has_ended():
                process.stopped_since = None
                while process.read():
                    pass
                with suppress(MalformedReply):  # it was killed, perhaps while it wrote
                    process.reply = reply_of(decode(process.received))
                self.ended.append(process)

    def kill(self, *, grace_seconds: float = _GRACE_SECONDS) -> None:
        """End the ranks that still run, and reap them."""
        running = [process for process in self.processes if process.exit_status is None]
        for process in running:
            os.kill(process.pid, signal.SIGTERM)
            os.kill(process.pid, signal.SIGCONT)
        deadline = time.monotonic() + grace_seconds
        while running and time.monotonic() < deadline:
            running = [process for process in running if not process.has_ended()]
            time.sleep(0.01)
        for process in running:
            os.kill(process.pid, signal.SIGKILL)
            process.exit_status = os.waitstatus_to_exitcode(os.waitpid(process.pid, 0)[1])

    def close(self) -> None:
        for process in self.processes:
            os.close(process.pipe)
            os.close(process.stack)

    def what_each_did(self) -> str:
        said = [process.what_it_did() for process in self.processes]
        return ", ".join(text for text in said if text)

    def results(self, *, memory_kills: int) -> list[Any]:
        """Returns the result of every rank, in order. Raises as `run_on_ranks` does."""
        failed = [process for process in self.ended if _has_failed(process)]
        if failed:
            # Only the first one that does not complain of another rank says why.
            first = next((each for each in failed if not _lost_another(each)), failed[0])
            _raise(first, memory_kills=memory_kills)
        return [process.reply.result for process in self.processes if process.reply is not None]


def _has_failed(process: _Process) -> bool:
    reply = process.reply
    return reply is None or reply.error is not None or reply.ended is not None


def _lost_another(process: _Process) -> bool:
    """Whether a rank failed because another one had ended."""
    reply = process.reply
    why = None if reply is None else reply.error or reply.ended
    return why is not None and complains_of_another(why.message)


def _raise(process: _Process, *, memory_kills: int) -> NoReturn:
    """Raises why a rank has failed, also where its process has ended without a result."""
    rank = process.name
    reply = process.reply
    try:
        if reply is None:
            assert process.exit_status is not None
            ending = measurement_of_exit(
                process.exit_status,
                log_file=Path(os.readlink("/proc/self/fd/1")),
                host_killed_for_memory=host_memory_kills() > memory_kills,
            )
        elif reply.error is not None:
            raise reply.error.exception()
        else:
            assert reply.ended is not None
            ending = reply.ended
    except AutotuneError as error:
        raise type(error)(f"{rank}: {error.message}", hint=error.hint) from None
    raise TrainingFailed(replace(ending, message=f"{rank}: {ending.message or ending.outcome}"))


def _wait_a_moment_for(process: _Process) -> None:
    """Wait until a process that has closed its pipe has ended, which it mostly does at once."""
    deadline = time.monotonic() + _SECONDS_BETWEEN_LOOKS
    while not process.has_ended() and time.monotonic() < deadline:
        time.sleep(0.001)


def _run_rank(
    run: Callable[[], Any],
    pipe: int,
    *,
    size: int,
    parent: int,
    stack: int,
    host_bytes: int | None,
) -> NoReturn:
    """Run one rank in its process, write its reply, and leave by os._exit."""
    exit_code = 1
    try:
        die_with(parent)
        # Not a handler of Python, which would not run while the rank hangs in another language.
        faulthandler.register(signal.SIGTERM, file=stack, all_threads=False, chain=True)
        share_with_others(host_bytes, processes=size)
        # All ranks share the CPUs of the trial.
        torch.set_num_threads(max(1, len(usable_cpus()) // size))
        write_line(pipe, asdict(reply_after(run)))
        exit_code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(exit_code)


class TurnsOfRanks(Turns):
    """The turns of a training on several devices: rank 0 takes them and tells the others."""

    def __init__(self, *, address: str, progress: ReportsStage, rank: int) -> None:
        super().__init__(address=address, progress=progress)
        self._rank = rank

    def begin(self, *, step_seconds: float) -> int:
        return self._told(0 if self._rank else super().begin(step_seconds=step_seconds))

    def next(self, *, seconds: float, tokens: int) -> int:
        return self._told(0 if self._rank else super().next(seconds=seconds, tokens=tokens))

    def _told(self, steps: int) -> int:
        if self._rank:  # the server of another node has limits of time, too
            self._progress("waiting")
        number = torch.tensor(steps)
        torch.distributed.broadcast(number, 0)
        if self._rank:
            self._progress("step")
        return int(number)
