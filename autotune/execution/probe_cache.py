"""Remembers which techniques a probe has seen to work, in the user's cache folder.

A probe compiles programs, which takes from seconds to half a minute, and its result changes only
with the device, the driver, torch, this program and the compilers. Those are the key of a file.

Only what works is remembered. What does not work may have failed because the machine was loaded or
full, so every search tries it again; most of it is rejected without any work.
"""

import hashlib
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from autotune.execution.private_folder import safe_cache_folder
from autotune.spec.result import DeviceInfo
from autotune.system.build_tools import c_compiler, cpp_compiler, python_headers
from autotune.system.files import durable_file

FOLDER = "probes"
"""Name of the folder of these files in the user's cache folder."""

Choices = Mapping[str, Sequence[Any]]
"""Values by the name of their technique."""


def without(choices: Choices, excluded: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Returns the choices that are not excluded, without techniques that have none left."""
    remaining = {}
    for technique, values in choices.items():
        left = [value for value in values if value not in excluded.get(technique, ())]
        if left:
            remaining[technique] = left
    return remaining


def read_working(device: DeviceInfo) -> dict[str, list[Any]]:
    """Returns the choices that are known to work on the device; empty without a readable file."""
    key = _key(device)
    try:
        stored = json.loads(_file(key).read_text(encoding="utf-8"))
        if stored["device"] != key:
            return {}
        return {str(technique): list(values) for technique, values in stored["working"].items()}
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return {}  # there is none, or nobody can read it: the device is probed


def write_working(device: DeviceInfo, working: Choices) -> None:
    """Replace what is known to work on the device; does nothing without a safe cache folder."""
    key = _key(device)
    content = json.dumps({"device": key, "working": working}, indent=2, sort_keys=True)
    try:
        with durable_file(_file(key)) as unfinished:
            unfinished.write_text(content, encoding="utf-8")
    except OSError:
        pass  # the next search probes again


def _file(key: Mapping[str, Any]) -> Path:
    """Returns the file of a device. Raises OSError where no cache folder is safe."""
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    return safe_cache_folder(FOLDER) / f"{digest[:32]}.json"


def _key(device: DeviceInfo) -> dict[str, Any]:
    tools = (c_compiler(), cpp_compiler(), python_headers())
    return {
        "name": device.name,
        "uuid": device.uuid,
        "compute_capability": device.compute_capability,
        "versions": dict(device.versions),
        "python": sys.prefix,
        "tools": {tool.name: _identity(tool.found) for tool in tools},
    }


def _identity(tool: str | None) -> str | None:
    """Returns the path of a tool with its size and date, which another version changes."""
    if tool is None:
        return None
    try:
        status = Path(tool).stat()
    except OSError:
        return tool
    return f"{tool} {status.st_size} {status.st_mtime_ns}"
