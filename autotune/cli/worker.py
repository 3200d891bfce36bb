"""`autotune worker`: runs searches of the queue on the devices of this machine."""

import logging
import socket
from dataclasses import dataclass, fields
from typing import Annotated

import typer

from autotune import __version__
from autotune.cli.lines import print_line
from autotune.cli.serve import check_extra, write_log
from autotune.memory.nvml import visible_devices
from autotune.service.listening import listening_sockets
from autotune.service.settings import DEFAULT_HOST, ServerSettings, WorkerSettings
from autotune.spec.setting import WHO_GETS_IN, setting, whole_number


@dataclass(frozen=True, kw_only=True)
class WorkerCommand(WorkerSettings):
    """A worker, and where servers ask it for logs."""

    host: str | None = setting(
        None,
        "Address to listen on, at which servers of other machines ask for logs and profiles. "
        "[default: 127.0.0.1 with an SQLite file, which is of this machine; else every address]",
        group=WHO_GETS_IN,
        metavar="ADDRESS",
    )
    port: Annotated[int, whole_number(0, 65535)] = setting(
        0, "Port to listen on; 0 for one that is free.", group=WHO_GETS_IN, metavar="N"
    )


def worker(request: WorkerCommand) -> None:
    """Run searches of the queue on the devices of this machine.

    Takes them from the database that servers of the same --storage put them into, and goes on until
    a signal ends it or its time is over: what runs then goes on elsewhere. Without --devices and
    --group each GPU runs a search of its own.
    """
    check_extra()
    settings, sockets = _server_of(request)
    # As in `autotune serve`.
    from autotune.service.web_server import run_server  # noqa: PLC0415

    write_log(settings.log_format)
    logging.getLogger("autotune.service.worker").setLevel(logging.INFO)
    number = run_server(settings, sockets, when_ready=lambda: _say_ready(settings))
    why = "stopped" if number else "ended, as its time is over"
    print_line(f"The worker has {why}; the next one goes on with its searches.", to_stderr=True)
    if number:
        raise typer.Exit(128 + number)


def _server_of(request: WorkerCommand) -> tuple[ServerSettings, list[socket.socket]]:
    """Returns the server that the worker is to others, and the sockets that it listens on."""
    from autotune.storage.database import sqlite_file  # noqa: PLC0415  # imports SQLAlchemy, 0.3 s

    host = request.host
    if host is None:
        host = "0.0.0.0" if sqlite_file(request.storage) is None else DEFAULT_HOST
    sockets = list(listening_sockets(host, request.port))
    said = {field.name: getattr(request, field.name) for field in fields(WorkerSettings)}
    if not request.groups and request.devices is None and request.ray is None:
        said["groups"] = _groups_of_gpus()
    port = sockets[0].getsockname()[1]
    return ServerSettings(**said, host=host, port=port, is_worker=True), sockets


def _groups_of_gpus() -> dict[str, str]:
    """Returns {name: device} with a group for each GPU that this process sees; {} without GPUs.

    Its name is the UUID of the GPU, so that two workers of one machine share those that both see.
    """
    return {gpu.uuid: f"cuda:{index}" for index, gpu in enumerate(visible_devices())}


def _say_ready(settings: ServerSettings) -> None:
    from autotune.storage.error_translation import redacted_url  # noqa: PLC0415  # as above

    print_line(
        f"autotune {__version__} takes searches from {redacted_url(settings.storage)}, a search at "
        f"a time on each of its groups of devices: {', '.join(settings.device_groups)}; Ctrl-C "
        f"stops it. Servers ask for logs at {settings.internal_address or settings.address}",
        to_stderr=True,
        flush=True,
    )
