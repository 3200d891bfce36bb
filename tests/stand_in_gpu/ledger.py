"""Reads from the stand-in's ledger how many bytes of each device every live process uses.

Needs neither CUDA nor torch.
"""

import os
import struct
from dataclasses import dataclass
from pathlib import Path

DEVICES = 16
"""GPUs, or all MIG instances of all GPUs."""
_HEADER_BYTES = DEVICES * 8
_PROCESS = struct.Struct(f"qQQQ{DEVICES}Q{DEVICES}Q")  # struct ledger_process of libraries/ledger.h


@dataclass(frozen=True, kw_only=True)
class Use:
    """What one process uses."""

    pid: int
    launches: int
    """Kernels that the process has launched, on all devices."""
    pinned_bytes: int
    allocated_bytes: tuple[int, ...]
    """By device."""
    context_bytes: tuple[int, ...]


def live_processes(folder: Path) -> list[Use]:
    """Returns the processes that have used a device and have not ended.

    Empty where no process has used the ledger yet.
    """
    try:
        data = (folder / "ledger").read_bytes()[_HEADER_BYTES:]
    except FileNotFoundError:
        return []
    uses = []
    for pid, started, launches, pinned_bytes, *by_device in _PROCESS.iter_unpack(data):
        if pid and _started(pid) == started:
            use = Use(
                pid=pid,
                launches=launches,
                pinned_bytes=pinned_bytes,
                allocated_bytes=tuple(by_device[:DEVICES]),
                context_bytes=tuple(by_device[DEVICES:]),
            )
            uses.append(use)
    return uses


def used_bytes(folder: Path, device: int = 0) -> int:
    """Returns the bytes that all live processes use, contexts included."""
    return sum(
        use.allocated_bytes[device] + use.context_bytes[device] for use in live_processes(folder)
    )


def users(folder: Path, device: int = 0) -> list[int]:
    """Returns the pids of processes with a context on the device."""
    return [use.pid for use in live_processes(folder) if use.context_bytes[device]]


def _started(pid: int) -> int | None:
    """Returns the start in clock ticks of the kernel; None for ended and zombie processes."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])


if __name__ == "__main__":
    ledger_folder = Path(os.environ.get("STAND_IN_LEDGER", f"/dev/shm/stand-in-gpu-{os.getuid()}"))
    for process in live_processes(ledger_folder):
        print(process)
