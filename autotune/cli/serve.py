"""`autotune serve`: the service with its page, and its named tokens."""

import io
import json
import logging
import os
import ssl
import sys
import threading
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import typer

from autotune import __version__
from autotune.cli.lazy import LazyCommand, LazyGroup
from autotune.cli.lines import print_line
from autotune.cli.requests import Given, request_of, takes_request
from autotune.client.address import TOKEN_VARIABLE, checked_token
from autotune.errors import InvalidInput
from autotune.printable import printable
from autotune.service.listening import listening_sockets
from autotune.service.settings import ServerSettings
from autotune.spec.setting import RESULTS, setting
from autotune.spec.user_files import open_file

_LOG = logging.getLogger("autotune.service")
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


@dataclass(frozen=True, kw_only=True)
class ServeCommand(ServerSettings):
    """A server, and what it prints."""

    verbose: bool = setting(False, "The same as --log-format text.", group=RESULTS, synonym="-v")

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_tls(self.tls_certificate, self.tls_key)


@app.callback()
@takes_request
def serve(context: typer.Context, given: Given[ServeCommand]) -> None:
    """Serve a page and an HTTP interface: submit searches from anywhere and watch them.

    Prints the URL to open, with a token that lets in; the variable AUTOTUNE_TOKEN sets another
    token, which is not printed. Searches wait in a queue, one at a time on the devices.
    """
    if context.invoked_subcommand is not None:
        return
    check_extra()
    token = os.environ.get(TOKEN_VARIABLE) or None
    if token is not None:
        given["token"] = checked_token(token, source=f"the variable {TOKEN_VARIABLE}")
    settings = request_of(ServeCommand, given)
    sockets = listening_sockets(settings.host, settings.port)
    settings = replace(settings, port=sockets[0].getsockname()[1])
    # fastapi and uvicorn take most of a second: by now the request is right.
    from autotune.service.web_server import run_server  # noqa: PLC0415

    write_log(settings.log_format or ("text" if settings.verbose else None))
    number = run_server(settings, sockets, when_ready=lambda: _say_ready(settings))
    if number:
        print("The server has stopped; the next one goes on with its searches.", file=sys.stderr)
        raise typer.Exit(128 + number)


def write_log(log_format: Literal["text", "json"] | None) -> None:
    """Have what happens written to stderr; without a format only what goes wrong, as text.

    As JSON, so is what anything prints there from now on.
    """
    if isinstance(sys.stderr, PrintedLines):
        return
    handler = logging.StreamHandler(sys.stderr)
    if log_format == "json":
        handler.setFormatter(JsonFormatter())
        logging.raiseExceptions = False  # of a log that cannot be written, told to stderr: itself
        sys.stderr = PrintedLines()
        sys.excepthook = _log_exception
        threading.excepthook = lambda ended: _log_exception(*ended[:3])
    else:
        handler.setFormatter(PrintableFormatter("%(asctime)s %(levelname)s %(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    if log_format is not None:
        logging.getLogger("autotune.service").setLevel(logging.INFO)


class PrintedLines(io.TextIOBase):
    """A text stream whose lines are logged."""

    def __init__(self) -> None:
        self._of_thread = threading.local()

    def write(self, text: str) -> int:
        unfinished = getattr(self._of_thread, "unfinished", "")
        *lines, self._of_thread.unfinished = (unfinished + text).split("\n")
        for line in filter(None, lines):
            _LOG.log(logging.ERROR if line.startswith("error: ") else logging.INFO, "%s", line)
        return len(text)


def _log_exception(
    kind: type[BaseException], error: BaseException | None, traceback: TracebackType | None
) -> None:
    """Logs an exception that nothing has caught, in one record."""
    exc_info = None if error is None else (kind, error, traceback)
    _LOG.error("%s has ended: %s", threading.current_thread().name, error, exc_info=exc_info)


class PrintableFormatter(logging.Formatter):
    """Writes one line for each message, whatever a client has sent, and below it a traceback."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  # of logging
        return printable(super().formatMessage(record))

    def formatException(self, ei: Any) -> str:  # noqa: N802  # of logging
        return printable(super().formatException(ei), keep_lines=True)


class JsonFormatter(logging.Formatter):
    """Writes one object a line, which has the request that it is of, and a traceback."""

    def format(self, record: logging.LogRecord) -> str:
        said = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(),
            "level": record.levelname,
            "message": record.getMessage(),
            **getattr(record, "request", {}),
        }
        if record.exc_info:
            said["traceback"] = self.formatException(record.exc_info)
        return json.dumps(said)


def check_extra() -> None:
    """Raise InvalidInput unless the packages of the extra `service` are installed."""
    missing = [name for name in _EXTRA if find_spec(name) is None]
    if missing:
        raise InvalidInput(
            f"this command needs {', '.join(missing)}", hint='pip install "autotune[service]"'
        )


def _say_ready(settings: ServerSettings) -> None:
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
