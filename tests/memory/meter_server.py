"""A trial server whose tasks use a `CudaMeter` as a trial does, each in a separate process.

python tests/memory/meter_server.py    # requests on stdin, replies on stdout, as
autotune.execution.server.fork_server
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from autotune.execution.tasks import Task

MIB = 1024**2


@dataclass(frozen=True, kw_only=True)
class Measured(Task[Any]):
    """What a task of this server answers; it gets `arguments`."""

    answer: ClassVar[Any] = Any

    name: str
    arguments: Mapping[str, Any]


def make_meter(
    *, uuid: str | None, context_bytes: int | None, room_mib: int | None = None, **options: Any
) -> Any:
    """Returns a meter whose cap leaves `room_mib` to the allocator; without it there is no cap."""
    import torch

    from autotune.memory.cuda import CudaMeter

    cap_bytes = None if room_mib is None else context_bytes + room_mib * MIB
    return CudaMeter(
        torch.device("cuda:0"),
        uuid=uuid,
        cap_bytes=cap_bytes,
        new_context_bytes=context_bytes,
        **options,
    )


def reading(
    *, first_step_mib: int = 2, steady_mib: int = 2, aside_mib: int = 2, **options: Any
) -> dict[str, int]:
    """Returns what a training measures whose phases allocate these sizes."""
    meter = make_meter(**options)
    _allocate(first_step_mib)
    meter.kernels_have_run()
    with meter.measuring(tuple), meter.phase("forward"):
        _allocate(steady_mib)
    with meter.excluded():
        _allocate(aside_mib)
    with meter.measuring(tuple), meter.phase("evaluation"):
        _allocate(2)
    found = meter.reading()
    return {
        "peak": found.peak_memory_bytes,
        "phase": found.peak_phase,
        "reserved": found.peak_reserved_bytes,
        "context": found.context_bytes,
        "device": found.device_bytes,
    }


def growth_of_used_memory_by_identifying(*, uuid: str) -> int:
    from autotune.execution.process.device import identify
    from autotune.memory.nvml import open_device

    device = open_device(uuid)
    before = device.used_bytes()
    identify("cuda:0")
    return device.used_bytes() - before


def _allocate(size_mib: int) -> None:
    """Allocates blocks of 2 MiB, for which the allocator reserves no more than that."""
    import torch

    blocks = [torch.empty(2 * MIB, dtype=torch.uint8, device="cuda") for _ in range(size_mib // 2)]
    torch.cuda.synchronize()
    del blocks


def main() -> None:
    from autotune.execution.server import fork_server

    import_what_trials_need = fork_server._import_what_trials_need

    def import_and_add_tasks() -> None:
        import_what_trials_need()  # first: it keeps the imports from initializing CUDA
        from autotune.execution.process import answers

        run_task = answers.run_task
        added = {task.__name__: task for task in (reading, growth_of_used_memory_by_identifying)}

        def run_or_added(request: Mapping[str, Any], told: Any) -> Any:
            if request["task"] in added:
                return added[request["task"]](**request["payload"]["arguments"])
            return run_task(request, told)

        answers.run_task = run_or_added

    fork_server._import_what_trials_need = import_and_add_tasks
    fork_server.main()


if __name__ == "__main__":
    main()
