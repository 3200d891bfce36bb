"""`autotune doctor`: show what this machine can do."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory

from autotune import __version__
from autotune.cli.tables import as_text, make_console
from autotune.errors import InvalidInput, TrialLost
from autotune.execution.cluster.address import AUTO, LOCAL, check_address
from autotune.execution.cluster.environment import check_ray_is_installed, prepare_environment
from autotune.execution.device_slots import describe_slot_scope
from autotune.execution.local import LocalExecutor
from autotune.execution.tasks import ListDevices
from autotune.spec.config import SEARCHED
from autotune.spec.setting import Settings, setting
from autotune.spec.study import check_device
from autotune.system.build_tools import c_compiler, cpp_compiler, python_headers
from autotune.units import format_size


@dataclass(frozen=True, kw_only=True)
class DoctorCommand(Settings):
    """What to check."""

    device: str | None = setting(
        None,
        "Check only this device: cpu, cuda or cuda:1.",
        metavar="DEVICE",
        choices=("cpu", "cuda"),
    )
    ray: str | None = setting(
        None,
        "Check the nodes of a Ray cluster instead, as a search with --ray does.",
        metavar="auto|ADDRESS",
        choices=(AUTO, LOCAL),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_device(self.device)


def doctor(request: DoctorCommand) -> None:
    """Check this machine: versions, devices, and which techniques work on them.

    Gives the reason for every technique that does not work, and says who else uses a device. Tries
    everything anew; a search does not try again what worked before with the same versions.
    """
    device, ray = request.device, request.ray
    console = make_console()

    def say(line: str) -> None:
        console.print(as_text(line), soft_wrap=True)

    if ray is not None:
        _check_cluster(ray, device, say)
        return

    def note(sentence: str) -> None:
        make_console(sys.stderr).print(
            as_text(f"{sentence[0].upper()}{sentence[1:]}."), soft_wrap=True
        )

    say(f"autotune {__version__}")
    for package in ("torch", "optuna", "datasets", "sqlalchemy"):
        say(f"{package} {version(package)}")
    for tool in (c_compiler(), cpp_compiler(), python_headers()):
        if tool.found:
            say(f"{tool.name}: {tool.found}")
        else:
            say(f"no {tool.name}, which torch.compile needs: {tool.hint}")
    # A temporary folder: this command leaves no files behind, and also works in a folder that
    # cannot be written to.
    with TemporaryDirectory() as folder, LocalExecutor(Path(folder), note=note) as executor:
        if device is None:
            devices = executor.run(ListDevices())
            names = [info.device for info in devices]
            for info in devices:
                if info.type == "cpu":
                    for sentence in info.notes:
                        say(sentence)
        else:
            names = [device]
        for name in names:
            try:
                info, unavailable = executor.probe(name, SEARCHED, anew=True)
            except (InvalidInput, TrialLost) as error:
                if device is not None:
                    raise
                say("")
                say(f"{name}: {error.message}; {error.hint}")
                continue
            say("")
            say(f"{info.device}: {info.name}, {format_size(info.total_memory_bytes)}")
            for key, value in info.versions.items():
                say(f"  {key} {value}")
            if info.compute_capability:
                say(f"  compute capability {info.compute_capability}")
            if info.context_bytes is not None:
                say(f"  a CUDA context takes {format_size(info.context_bytes)} of it")
            if info.others:
                say(f"  in use by others: {info.others}")
            for sentence in info.notes:
                say(f"  note: {sentence}")
            say(f"  device slots shared with: {describe_slot_scope(info)}")
            for technique, values in SEARCHED.items():
                works = [value for value in values if value not in unavailable.get(technique, {})]
                say(f"  {technique}: {', '.join(works)}")
            for technique, reasons in unavailable.items():
                for value, reason in reasons.items():
                    say(f"  not {technique} {value}: {reason}")


def _check_cluster(address: str, device: str | None, say: Callable[[str], None]) -> None:
    """Say of each node of a Ray cluster whether a search could run trials there, and why not."""
    check_address(address)
    if device is not None:
        raise InvalidInput(
            "--device and --ray are both given", hint="give only --ray to check a cluster"
        )
    check_ray_is_installed(address)
    prepare_environment()
    # Ray is an extra, and its import takes half a second that other commands do not need.
    from autotune.execution.cluster.connection import connected  # noqa: PLC0415
    from autotune.execution.cluster.nodes import (  # noqa: PLC0415
        alive_nodes,
        free_resources,
        look_at,
        versions_here,
    )

    with connected(address):
        nodes = look_at(alive_nodes())
        count = len(nodes.usable) + len(nodes.left_out)
        say(f"{versions_here()}, a cluster of {count} {'node' if count == 1 else 'nodes'}")
        gpus, cpus = free_resources()
        say(f"not given to any job at the moment: {gpus:g} GPUs, {cpus:g} CPUs")
        for node in nodes.usable:
            say("")
            what = f"{node.cpus} CPUs"
            if node.gpus:
                model = node.gpu_model or "of a model that neither NVML nor Ray names"
                what = f"{node.gpus} GPUs ({model}), {what}"
            say(f"{node.name}: {what}")
            say(f"  room for a search in {node.folder}: {format_size(node.free_bytes)}")
        for sentence in nodes.left_out:
            say("")
            say(sentence)
    if nodes.left_out and not nodes.usable:
        raise InvalidInput(
            "no node of the Ray cluster can run trials",
            hint="install the same autotune and torch on its nodes",
        )
