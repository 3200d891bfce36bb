"""`autotune doctor`: what this machine can do."""

from typing import Annotated

import typer


def doctor(
    device: Annotated[
        str | None, typer.Option(metavar="DEVICE", help="Only this device: cpu, cuda or cuda:1.")
    ] = None,
) -> None:
    """List versions, devices, who else uses them, and every technique that was found not to work, with the reason."""
    import sys
    from importlib.metadata import version
    from pathlib import Path
    from tempfile import TemporaryDirectory

    from rich.text import Text

    from autotune.build_tools import c_compiler, cpp_compiler, python_headers
    from autotune.cli.tables import make_console
    from autotune.errors import InvalidInput, TrialLost
    from autotune.execution.device_slots import reach_of_slots
    from autotune.execution.local import LocalExecutor
    from autotune.spec.config import CHOICES
    from autotune.study.request import check_device
    from autotune.units import format_size

    check_device(device)
    console = make_console()

    def say(line: str) -> None:
        console.print(Text(line), soft_wrap=True)

    def note(sentence: str) -> None:
        make_console(sys.stderr).print(
            Text(f"{sentence[0].upper()}{sentence[1:]}."), soft_wrap=True
        )

    for package in ("autotune", "torch", "optuna", "datasets", "sqlalchemy"):
        say(f"{package} {version(package)}")
    for tool in (c_compiler(), cpp_compiler(), python_headers()):
        say(
            f"{tool.name}: {tool.found}"
            if tool.found
            else f"no {tool.name}, for torch.compile: {tool.way_out}"
        )
    # A question leaves nothing behind, and may be asked from a folder that cannot be written to.
    with TemporaryDirectory() as folder, LocalExecutor(Path(folder), note=note) as executor:
        there = executor.devices() if device is None else []
        names = [info.device for info in there] if device is None else [device]
        for sentence in (
            sentence for info in there if info.type == "cpu" for sentence in info.notes
        ):
            say(sentence)
        for name in names:
            try:
                info, unavailable = executor.probe(name, CHOICES)
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
            say(f"  takes turns with: {reach_of_slots(info)}")
            for technique, values in CHOICES.items():
                works = [value for value in values if value not in unavailable.get(technique, {})]
                say(f"  {technique}: {', '.join(works)}")
            for technique, reasons in unavailable.items():
                for value, reason in reasons.items():
                    say(f"  not {technique} {value}: {reason}")
