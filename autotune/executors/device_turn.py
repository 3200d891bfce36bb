"""One trial at a time on a device, over all searches of this user on this machine.

Whoever has the turn holds the lock of a file. The trials hold another one, shared, until the last of their processes
is gone: a turn begins when both are free, so that the trial of a killed search, still ending, is not measured together
with the next one.
"""

import fcntl
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from autotune.result import DeviceInfo


class DeviceTurns:
    """Turns on one device, of `places` trials at a time."""

    def __init__(self, device: DeviceInfo, *, places: int = 1, folder: Path | None = None) -> None:
        folder = lock_folder() if folder is None else folder
        name = device.uuid or device.device.replace(":", "-")
        self._turns = [_open(folder / f"{name}-{place}.turn") for place in range(places)]
        self._trials = [folder / f"{name}-{place}.trials" for place in range(places)]
        # Who waits stands in line: the one that has just ended does not take every turn.
        self._line = _open(folder / f"{name}.line")

    @contextmanager
    def turn(self, pause: Callable[[], None]) -> Iterator[Path]:
        """Waits for a place, calling `pause` between two looks, and holds it; the file is for its trials to hold."""
        while not _lock(self._line):
            pause()
        try:
            while (place := next((n for n, one in enumerate(self._turns) if _lock(one)), None)) is None:
                pause()
        finally:
            fcntl.flock(self._line, fcntl.LOCK_UN)
        try:
            while not _is_free(self._trials[place]):
                pause()
            yield self._trials[place]
        finally:
            fcntl.flock(self._turns[place], fcntl.LOCK_UN)

    def close(self) -> None:
        for descriptor in (*self._turns, self._line):
            os.close(descriptor)


def lock_folder() -> Path:
    """Of this user on this machine."""
    folder = Path(tempfile.gettempdir()) / f"autotune-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def _open(file: Path) -> int:
    return os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


def _lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_free(file: Path) -> bool:
    descriptor = _open(file)
    try:
        return _lock(descriptor)
    finally:
        os.close(descriptor)  # which lets go of it
