"""A trial server whose tasks do what a hostile trial may do.

The real server, without torch. Each request names the attack; the process of the trial carries it
out, and then does nothing until it is ended, unless it leaves.
"""

import os
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autotune.execution.server import trial_log
from autotune.execution.server.replies import TaskReply
from autotune.execution.tasks import Task, Train
from autotune.spec.attempt import FinishedTrial
from autotune.spec.config import TrainingConfig
from autotune.spec.result import Measurement
from autotune.spec.training_request import TrainingRequest
from autotune.spec.workload import make_workload
from tests.building.light_server import light_command, serve_without_torch

RESULT = FinishedTrial(measurement=Measurement(outcome="ok"), seconds=1.0)
TRAINING = TrainingRequest(
    workload=make_workload("cpu", {}),
    config=TrainingConfig(),
    folder=Path("nowhere"),
    device="cpu",
    cap_bytes=2**40,
)


@dataclass(frozen=True, kw_only=True)
class Attack:
    """What a client sends in the place of a task, whose process then does something else."""

    doing: str
    """Name of a function of this module."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    instead_of: Task[Any] = field(default_factory=lambda: Train(training=TRAINING))
    limits_host_memory: bool = False
    rests: bool = False

    @property
    def name(self) -> str:
        return self.instead_of.name

    @property
    def is_training(self) -> bool:
        return self.instead_of.is_training

    def value_of(self, reply: TaskReply) -> Any:
        return self.instead_of.value_of(reply)

    def value_of_end(self, ending: Measurement, *, seconds: float) -> Any:
        return self.instead_of.value_of_end(ending, seconds=seconds)


def hostile_command(*, before: str = "") -> tuple[str, ...]:
    """Returns the command of the server, which runs the statements `before` first."""
    program = f"""
{before}
from tests.building.hostile_server import serve
serve()
"""
    return light_command(program)


def result_pipe() -> int:
    """Returns the descriptor of this process's pipe to the server."""
    pipes = []
    for name in os.listdir("/proc/self/fd"):
        link = f"/proc/self/fd/{name}"
        if os.path.exists(link) and os.readlink(link).startswith("pipe:") and int(name) > 2:
            pipes.append(int(name))
    (pipe,) = pipes
    return pipe


def sleep() -> None:
    time.sleep(3600)


def report_what_is_in(file: str) -> None:
    """Report the phase that is in a file, whenever it changes; without the file, return."""
    reported = ""
    while os.path.exists(file):
        phase = Path(file).read_text()
        if phase not in ("", reported):
            os.write(result_pipe(), b'{"phase": "%s"}\n' % phase.encode())
            reported = phase
        time.sleep(0.01)


def stop_the_server() -> None:
    os.kill(os.getppid(), signal.SIGSTOP)
    sleep()


def stop_the_server_again_and_again() -> None:
    while True:
        os.kill(os.getppid(), signal.SIGSTOP)
        time.sleep(0.01)


def stop_the_server_once_and_return() -> None:
    os.kill(os.getppid(), signal.SIGSTOP)


def kill_the_server_and_hold_its_pipes(file: str) -> None:
    """Hold them in a process that neither the signal nor the mark of the server ends.

    Its number is in `file`.
    """
    server = os.getppid()
    for name in os.listdir(f"/proc/{server}/fd"):
        link = f"/proc/{server}/fd/{name}"
        if os.readlink(link).startswith("pipe:"):
            os.set_inheritable(os.open(link, os.O_RDWR | os.O_NONBLOCK), True)
    if os.fork() == 0:
        os.setsid()
        Path(file).write_text(str(os.getpid()))
        os.execve("/bin/sleep", ["sleep", "600"], {})
    while not os.path.exists(file):
        time.sleep(0.01)
    os.kill(server, signal.SIGKILL)


def raise_an_error_of_ours() -> None:
    raise TypeError("as where a script has replaced what we use")


def close_the_pipe() -> None:
    os.close(result_pipe())


def leave_a_child_with_the_pipe() -> None:
    if os.fork() == 0:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        while True:
            os.write(result_pipe(), b'{"phase": "step"}\n' * 1000)


def flood_with_progress() -> None:
    lines = b'{"phase": "step"}\n{"phase": "compile"}\n' * 100
    while True:
        os.write(result_pipe(), lines)


def write(data: bytes) -> None:
    os.write(result_pipe(), data)
    sleep()


def write_half_a_line_without_end() -> None:
    while True:
        os.write(result_pipe(), b"x" * 65536)


def ignore_sigterm_with_the_whole_group() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    for _ in range(3):
        os.fork()
    sleep()


def print_without_end() -> None:
    for number in range(10**9):
        os.write(1, b"%099d\n" % number)


def print_much(size: int) -> None:
    os.write(1, b"the first line\n")
    for number in range(size // 100):
        os.write(1, b"%099d\n" % number)
    while os.fstat(1).st_size > trial_log.LARGEST_LOG_BYTES:
        time.sleep(0.01)  # a line that is written while the log is cut is left out, too
    os.write(1, b"the last line\n")


def attack(request: Mapping[str, Any]) -> Any:
    arguments = dict(request["payload"]["arguments"])
    if "data" in arguments:
        arguments["data"] = arguments["data"].encode()
    globals()[request["payload"]["doing"]](**arguments)
    return RESULT


def serve() -> None:
    serve_without_torch(dict.fromkeys(("train", "trace", "rehearse", "list_devices"), attack))
