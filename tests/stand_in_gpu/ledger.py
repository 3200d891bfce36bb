"""Reads the stand-in's ledger: which live process uses how many bytes of which device.

No CUDA, no torch.
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
    pid: int
    launches: int
    """Kernels that the process has launched, on all devices."""
    pinned_bytes: int
    allocated_bytes: tuple[int, ...]
    """By device."""
    context_bytes: tuple[int, ...]


def live_processes(folder: Path) -> list[Use]:
    """Those that have used a device and have not ended.

    Empty where nothing has used the ledger yet.
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
    """Of all live processes, contexts included."""
    return sum(
        use.allocated_bytes[device] + use.context_bytes[device] for use in live_processes(folder)
    )


def users(folder: Path, device: int = 0) -> list[int]:
    """Processes with a context on the device."""
    return [use.pid for use in live_processes(folder) if use.context_bytes[device]]


def _started(pid: int) -> int | None:
    """In the kernel's clock ticks; None for a process that has ended, also one that nobody has waited for."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])


if __name__ == "__main__":
    ledger_folder = Path(os.environ.get("STAND_IN_LEDGER", f"/dev/shm/stand-in-gpu-{os.getuid()}"))
    for process in live_processes(ledger_folder):
        print(process)
