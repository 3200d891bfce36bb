"""Part 1: facts of the device, clean forks, and memory outside and inside the allocator."""

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from studies.gpu.items import Item, Part, Place, Settings
from studies.gpu.processes import autotune, program

MIB = 2**20
FACTS = {
    "nvml": "what NVML, the driver's monitor, says",
    "properties": "what torch says of the device",
    "context": "size of a CUDA context, three times",
    "forks": "whether trials are forked from a process without CUDA",
    "workspaces": "bytes that the first products take of the allocator",
    "attention_choice": "kernel that torch chooses for attention",
    "attention_memory": "bytes that each attention kernel takes of the allocator",
    "outside": "bytes outside the allocator after the kernels of each technique",
}
"""Functions of `programs/facts.py`."""


def items(settings: Settings) -> list[Item]:
    made = [Item(name=name, work=partial(_fact, name=name), least_seconds=15.0) for name in FACTS]
    return [*made[:2], Item(name="doctor", work=_doctor, least_seconds=20.0), *made[2:]]


def _fact(place: Place, name: str) -> Mapping[str, Any]:
    if name != "forks":
        place.needs_cuda()
    size = ["--small"] if place.settings.rehearse else []
    return program(
        "facts.py", name, place.settings.device, *size, place=place, log_name=name, seconds=120.0
    )


def _doctor(place: Place) -> Mapping[str, Any]:
    ended = autotune(
        "doctor", "--device", place.settings.device, place=place, log_name="doctor", seconds=120.0
    )
    return {"lines": ended.output.splitlines()}


def summary(results: Mapping[str, Mapping[str, Any]]) -> Iterable[str]:
    yield from results.get("doctor", {}).get("lines", ())
    nvml = results.get("nvml", {})
    if nvml:
        mine = {
            name: nvml.get(name)
            for name in ("available", "driver", "mig", "compute_mode", "processes")
        }
        yield f"NVML: {', '.join(f'{name} {value}' for name, value in mine.items())}"
    for name in ("context", "workspaces", "outside"):
        for what, found in results.get(name, {}).items():
            yield f"{name}, {what}: {_short(found)}"
    for what, found in results.get("forks", {}).items():
        yield f"forks, {what}: {found}"
    for dtype, choices in results.get("attention_choice", {}).items():
        yield f"attention chosen, {dtype}: {_short(choices)}"
    for what, found in results.get("attention_memory", {}).items():
        yield f"attention memory, {what}: {_short(found)}"


def _short(found: Any) -> str:
    """Bytes in MiB."""
    if isinstance(found, Mapping):
        return ", ".join(
            f"{name.removesuffix('_bytes')} {_short_number(name, value)}"
            for name, value in found.items()
        )
    return str(found)


def _short_number(name: str, value: Any) -> str:
    if name.endswith("_bytes") and isinstance(value, int):
        return f"{value / MIB:.3f} MiB"
    if name.endswith("_bytes") and isinstance(value, list):
        return (
            "/".join(f"{one / MIB:.3f}" if isinstance(one, int) else str(one) for one in value)
            + " MiB"
        )
    return str(value)


PART = Part(
    name="device", minutes=3.0, about="what the device is, and forks", items=items, summary=summary
)
