"""Remembers which techniques a probe has seen to work, in the user's cache folder.

A probe compiles programs, which takes from seconds to half a minute, and its result changes only
with the device, the driver, torch, this program, the compilers and what the probe compares. Those
are the key of a file (`kept_file.py`).

Only what works is remembered. What does not work may have failed because the machine was loaded or
full, so every search tries it again; most of it is rejected without any work.
"""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from autotune.execution.kept_file import UNREADABLE, read_kept, write_kept
from autotune.spec.result import DeviceInfo
from autotune.system.build_tools import c_compiler, cpp_compiler, python_headers
from autotune.techniques import tried_layer

FOLDER = "probes"
"""Name of the folder of these files in the user's cache folder."""
_MOST_DEVICES = 1000

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
    try:
        working = read_kept(FOLDER, _key(device))
        return {str(technique): list(values) for technique, values in working.items()}
    except UNREADABLE:
        return {}  # the device is probed


def write_working(device: DeviceInfo, working: Choices) -> None:
    """Replace what is known to work on the device; does nothing without a safe cache folder."""
    write_kept(FOLDER, _key(device), working, most_files=_MOST_DEVICES)


def _key(device: DeviceInfo) -> dict[str, Any]:
    tools = (c_compiler(), cpp_compiler(), python_headers())
    return {
        "name": device.name,
        "uuid": device.uuid,
        "compute_capability": device.compute_capability,
        "versions": dict(device.versions),
        "python": sys.prefix,
        "compared": tried_layer.COMPARED,
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
