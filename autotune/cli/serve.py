"""`autotune serve`: the service with its page, and its named tokens."""

import logging
import os
import ssl
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import urlsplit

import typer

from autotune import __version__
from autotune.cli import options
from autotune.cli.lazy import LazyCommand, LazyGroup
from autotune.cli.lines import print_line
from autotune.client.address import TOKEN_VARIABLE, checked_token
from autotune.errors import InvalidInput
from autotune.execution.cluster.address import check_address
from autotune.printable import printable
from autotune.service.listening import listening_sockets
from autotune.spec.option import (
    EVERYDAY,
    LIMITS,
    RESULTS,
    THE_DATA,
    THE_DEVICE,
    WHO_GETS_IN,
)
from autotune.spec.user_files import open_file
from autotune.study.devices import parse_devices
from autotune.study.request import SEARCH_OPTIONS
from autotune.units import parse_duration, parse_size

if TYPE_CHECKING:
    from autotune.service.settings import ServerSettings

DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 8321
_EXTRA = ("fastapi", "uvicorn", "python_multipart")
_LOOPBACK = ("127.", "localhost", "::1")


class _Commands(LazyGroup):
    lazy_commands = (
        LazyCommand(
            "tokens",
            "autotune.cli.serve_tokens:app",
            help="Add, list and remove the named tokens of a server's users.",
        ),
    )


app = typer.Typer(
    cls=_Commands, invoke_without_command=True, add_completion=False, rich_markup_mode=None
)


@app.callback()
def serve(
    context: typer.Context,
    storage: options.StorageOption = options.STORAGE,
    host: Annotated[
        str,
        typer.Option(
            "--host",
            rich_help_panel=EVERYDAY,
            metavar="ADDRESS",
            help="Address to listen on: 127.0.0.1 for this machine alone, 0.0.0.0 for every "
            "network of it.",
        ),
    ] = DEFAULT_HOST,
    port: Annotated[
        int,
        typer.Option(
            "--port",
            rich_help_panel=EVERYDAY,
            metavar="N",
            help="Port to listen on; 0 for one that is free.",
        ),
    ] = DEFAULT_PORT,
    devices: Annotated[str | None, options.typer_option(SEARCH_OPTIONS["devices"])] = None,
    ray: Annotated[str | None, options.typer_option(SEARCH_OPTIONS["ray"])] = None,
    group: Annotated[
        list[str] | None,
        typer.Option(
            "--group",
            rich_help_panel=THE_DEVICE,
            metavar="NAME=DEVICES",
            help="Name a group of devices that runs a search of its own at the same time, such as "
            "left=cuda:0,cuda:1. Can be repeated, instead of --devices. [default: one group]",
        ),
    ] = None,
    data_root: Annotated[
        list[str] | None,
        typer.Option(
            "--data-root",
            rich_help_panel=THE_DATA,
            metavar="FOLDER",
            help="Folder that searches may read datasets, tokenizers and models from. Can be "
            "repeated. [default: none]",
        ),
    ] = None,
    allow_code: Annotated[
        list[str] | None,
        typer.Option(
            "--allow-code",
            rich_help_panel=WHO_GETS_IN,
            metavar="FOLDER",
            help="Folder that searches may run scripts and models in Python from, as the user of "
            "the server. Can be repeated. [default: none]",
        ),
    ] = None,
    allow_host: Annotated[
        list[str] | None,
        typer.Option(
            "--allow-host",
            rich_help_panel=WHO_GETS_IN,
            metavar="NAME",
            help="Name that a proxy serves it under, such as tuning.example.org. Can be repeated.",
        ),
    ] = None,
    tls_certificate: Annotated[
        Path | None,
        typer.Option(
            "--tls-certificate",
            rich_help_panel=WHO_GETS_IN,
            metavar="FILE",
            help="Certificate in PEM format, to serve https.",
        ),
    ] = None,
    tls_key: Annotated[
        Path | None,
        typer.Option(
            "--tls-key",
            rich_help_panel=WHO_GETS_IN,
            metavar="FILE",
            help="Its private key in PEM format.",
        ),
    ] = None,
    max_trials: Annotated[
        int | None,
        typer.Option(
            "--max-trials",
            rich_help_panel=LIMITS,
            metavar="N",
            help="Largest number of trials of a search.",
        ),
    ] = None,
    max_time: Annotated[
        str | None,
        typer.Option(
            "--max-time",
            rich_help_panel=LIMITS,
            metavar="TIME",
            help="Largest time budget of a search: 2h.",
        ),
    ] = None,
    max_devices: Annotated[
        int | None,
        typer.Option(
            "--max-devices",
            rich_help_panel=LIMITS,
            metavar="N",
            help="Largest number of trials of a search that run at once. [default: that of the "
            "devices]",
        ),
    ] = None,
    webhook: Annotated[
        str | None,
        typer.Option(
            "--webhook",
            rich_help_panel=RESULTS,
            metavar="URL",
            help="Send a message to this URL when a search ends.",
        ),
    ] = None,
    keep: Annotated[
        int | None,
        typer.Option(
            "--keep",
            rich_help_panel=LIMITS,
            metavar="DAYS",
            help="Delete logs and profiles of trials after this many days; results stay. "
            "[default: never]",
        ),
    ] = None,
    quota: Annotated[
        str | None,
        typer.Option(
            "--quota",
            rich_help_panel=LIMITS,
            metavar="SIZE",
            help="Delete the oldest logs and profiles where all together are larger: 10GiB. "
            "[default: never]",
        ),
    ] = None,
    verbose: Annotated[
        bool,
        typer.Option(
            "--verbose", "-v", rich_help_panel=RESULTS, help="Print a line for each request."
        ),
    ] = False,
) -> None:
    """Serve a page and an HTTP interface: submit searches from anywhere and watch them.

    Prints the URL to open, with a token that lets in; the variable AUTOTUNE_TOKEN sets another
    token, which is not printed. Searches wait in a queue, one at a time on the devices.
    """
    if context.invoked_subcommand is not None:
        return
    check_extra()
    if devices is not None:
        parse_devices(devices)
    if ray is not None:
        check_address(ray)
    token = os.environ.get(TOKEN_VARIABLE) or None
    if token is not None:
        checked_token(token, source=f"the variable {TOKEN_VARIABLE}")
    _check_tls(tls_certificate, tls_key)
    for name in allow_host or ():
        _check_host_name(name)
    if webhook is not None:
        _check_webhook(webhook)
    data_roots = tuple(_folder("--data-root", folder) for folder in data_root or ())
    code_folders = tuple(_folder("--allow-code", folder) for folder in allow_code or ())
    groups = _groups(group or (), devices=devices)
    most_seconds = None if max_time is None else parse_duration(max_time)
    quota_bytes = None if quota is None else parse_size(quota)
    counts = {"--max-trials": max_trials, "--max-devices": max_devices, "--keep": keep}
    for option, number in counts.items():
        if number is not None and number < 1:
            raise InvalidInput(
                f"Invalid value of {option}: {number}", hint="give a whole number of at least 1"
            )
    sockets = listening_sockets(host, port)
    # fastapi, uvicorn and the database take most of a second: by now the request is right.
    from autotune.service.settings import ServerSettings  # noqa: PLC0415
    from autotune.service.web_server import run_server  # noqa: PLC0415

    settings = ServerSettings(
        storage=storage,
        host=host,
        port=sockets[0].getsockname()[1],
        devices=devices,
        groups=groups,
        ray=ray,
        data_roots=data_roots,
        code_folders=code_folders,
        token=token,
        tls_certificate=tls_certificate,
        tls_key=tls_key,
        most_trials=max_trials,
        most_seconds=most_seconds,
        most_devices=max_devices,
        webhook=webhook,
        allowed_hosts=tuple(allow_host or ()),
        keep_days=keep,
        quota_bytes=quota_bytes,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(PrintableFormatter("%(asctime)s %(levelname)s %(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    if verbose:
        logging.getLogger("autotune.service").setLevel(logging.INFO)
    number = run_server(settings, sockets, when_ready=lambda: _say_ready(settings))
    if number:
        print("The server has stopped; the next one goes on with its searches.", file=sys.stderr)
        raise typer.Exit(128 + number)


class PrintableFormatter(logging.Formatter):
    """Writes one line for each message, whatever a client has sent, and below it a traceback."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  # of logging
        return printable(super().formatMessage(record))

    def formatException(self, ei: Any) -> str:  # noqa: N802  # of logging
        return printable(super().formatException(ei), keep_lines=True)


def check_extra() -> None:
    """Raise InvalidInput unless the packages of the extra `service` are installed."""
    missing = [name for name in _EXTRA if find_spec(name) is None]
    if missing:
        raise InvalidInput(
            f"autotune serve needs {', '.join(missing)}", hint='pip install "autotune[service]"'
        )


def _say_ready(settings: "ServerSettings") -> None:
    from autotune.storage.error_translation import redacted_url  # noqa: PLC0415  # as above

    what = f"autotune {__version__} serves {redacted_url(settings.storage)}"
    how = "open this URL"
    if settings.token is not None:
        how = f"open this URL and enter the token of {TOKEN_VARIABLE}"
    print_line(f"{what}; {how}, Ctrl-C stops the server:", to_stderr=True, flush=True)
    print_line(settings.url, flush=True)
    if not settings.has_tls and not settings.host.startswith(_LOOPBACK):
        print(
            "note: without --tls-certificate, or a proxy with one, everybody on the way can read "
            "tokens",
            file=sys.stderr,
            flush=True,
        )


def _groups(given: Sequence[str], *, devices: str | None) -> dict[str, str]:
    """Return the devices of each group by its name. Raises InvalidInput."""
    groups: dict[str, str] = {}
    for text in given:
        name, _, of_group = text.partition("=")
        if not name.replace("-", "").replace("_", "").isalnum() or not name.isascii():
            raise InvalidInput(
                f"Invalid value of --group: {text!r}",
                hint="write --group left=cuda:0,cuda:1 --group right=cuda:2,cuda:3",
            )
        if name in groups:
            raise InvalidInput(f"--group names {name} twice", hint="give each group its own name")
        parse_devices(of_group)
        groups[name] = of_group
    if groups and devices is not None:
        raise InvalidInput(
            "--devices and --group both say which devices there are", hint="leave --devices out"
        )
    return groups


def _folder(option: str, given: str) -> Path:
    """Return the folder with an absolute path, links followed. Raises InvalidInput."""
    found = None
    if given:  # an empty path would be the current folder
        try:
            found = Path(given).resolve(strict=True)
        except (OSError, RuntimeError, ValueError):
            found = None
    if found is None or not found.is_dir():
        raise InvalidInput(
            f"Invalid value of {option}: there is no folder {given!r}",
            hint="name a folder that is there",
        )
    if found == Path(found.anchor):
        raise InvalidInput(
            f"Invalid value of {option}: {given} would allow every file of this machine",
            hint="name the folder that is meant",
        )
    return found


def _check_tls(certificate: Path | None, key: Path | None) -> None:
    if certificate is None and key is None:
        return
    if certificate is None or key is None:
        raise InvalidInput(
            "--tls-certificate and --tls-key belong together", hint="give both, or neither"
        )
    try:
        for file in (certificate, key):
            open_file(file).close()  # not by the library, which would wait at a pipe
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(
            # An empty password, so that nobody is asked for that of an encrypted key.
            certificate,
            key,
            password="",
        )
    except ssl.SSLError as error:
        raise InvalidInput(
            f"{certificate} and {key} are no certificate with its key: "
            f"{error.reason or error.strerror}",
            hint="give a certificate and its key, both in PEM format and without a password",
        ) from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InvalidInput(
            f"the certificate cannot be read: {reason}",
            hint="name a certificate and its key, both in PEM format and without a password",
        ) from None


def _check_host_name(name: str) -> None:
    try:
        parts = urlsplit(f"//{name}")
        is_name = parts.netloc == name and parts.hostname and parts.username is None
        _ = parts.port
    except ValueError:
        is_name = False
    if not is_name or not name.isascii() or not name.isprintable() or " " in name or "*" in name:
        raise InvalidInput(
            f"Invalid value of --allow-host: {name!r}",
            hint="give a name as it stands in the URL: tuning.example.org, or tuning.lan:8443",
        )


def _check_webhook(url: str) -> None:
    try:
        parts = urlsplit(url)
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and url.isprintable()
        _ = parts.port
    except ValueError:
        is_url = False
    if not is_url:
        raise InvalidInput(
            f"Invalid value of --webhook: {url!r}", hint="give a URL that begins with https://"
        )
