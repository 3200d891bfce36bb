"""What a node says of itself before anything runs there.

Ray sends this module's code to the node, where autotune may be missing or another version: it
imports nothing that Python does not bring.
"""

import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import socket
from pathlib import Path
from typing import Any

PACKAGE = "autotune"


def greet() -> dict[str, Any]:
    """Returns host, versions, GPUs and disk of the process that it runs in.

    "autotune" is None where the node has none, and "source" the SHA-256 of its Python files.
    "gpus" are [name, bytes of memory] of each GPU that NVML knows.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME", ""))
    folder = cache if cache.is_absolute() else Path("~/.cache").expanduser()
    found = {
        "host": socket.gethostname(),
        "python": platform.python_version(),
        "autotune": None,
        "source": None,
        "torch": _version("torch"),
        "gpus": _gpus(),
        "folder": str(folder),
        "free_bytes": shutil.disk_usage(_existing(folder)).free,
    }
    spec = importlib.util.find_spec(PACKAGE)
    if spec is not None and spec.origin is not None:
        found["autotune"] = _version(PACKAGE) or "a checkout"
        found["source"] = _source_digest(Path(spec.origin).parent)
    return found


def _existing(folder: Path) -> Path:
    while not folder.exists():
        folder = folder.parent
    return folder


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _source_digest(folder: Path) -> str:
    digest = hashlib.sha256()
    for file in sorted(folder.rglob("*.py")):
        digest.update(str(file.relative_to(folder)).encode())
        digest.update(hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()


def _gpus() -> list[list[Any]]:
    try:
        import pynvml  # noqa: PLC0415 - the node may not have it

        pynvml.nvmlInit()
    except Exception:  # no driver, or no package: then Ray's own count is all that is known
        return []
    try:
        found = []
        for number in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(number)
            name = pynvml.nvmlDeviceGetName(handle)
            found.append([name, pynvml.nvmlDeviceGetMemoryInfo(handle).total])
        return found
    except pynvml.NVMLError:
        return []
    finally:
        pynvml.nvmlShutdown()
