"""Runs the app of a server with uvicorn until a signal ends it."""

import logging
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI

from autotune.errors import AutotuneError
from autotune.service.application import create_app
from autotune.service.connections import protocol_of_connections
from autotune.service.settings import ServerSettings
from autotune.service.state import ServiceState
from autotune.service.worker import SEARCH_MODULE

_GRACE_SECONDS = 3
"""How long answers may go on after a signal."""
_SWITCH_SECONDS = 0.0005
"""How long a thread that computes keeps others waiting. The default of Python, ten times as long,
is added to every answer wherever it goes from one thread to another."""
_LOG = logging.getLogger("uvicorn.error")


class _Server(uvicorn.Server):
    """Says when it accepts requests, and notes the signal that ends it."""

    def __init__(
        self, config: uvicorn.Config, app: FastAPI, *, when_ready: Callable[[], None]
    ) -> None:
        super().__init__(config)
        self._app = app
        self._when_ready = when_ready
        self.signals: list[int] = []
        self.error: AutotuneError | None = None
        """Why nobody was told that it is ready, or why it cannot go on."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            _LOG.setLevel(logging.WARNING)
            try:
                self._when_ready()
            except AutotuneError as error:
                self.error = error
                self.should_exit = True

    async def on_tick(self, counter: int) -> bool:
        service: ServiceState = self._app.state.service
        self.error = service.others.error
        has_ended = self.error is not None or service.worker.is_over
        return has_ended or await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        # Streams of events would not end by themselves, and what is slower than _GRACE_SECONDS is
        # cut off, which uvicorn would report.
        service: ServiceState = self._app.state.service
        service.stream.end()
        _LOG.setLevel(logging.CRITICAL)
        await super().shutdown(sockets)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Note signals instead of raising them once the server has ended, as uvicorn does.

        A terminal that closes ends the server as well, unless it runs under `nohup`.
        """
        numbers = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:
            numbers.append(signal.SIGHUP)
        previous = {number: signal.signal(number, self.handle_exit) for number in numbers}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.signals and sig != signal.SIGHUP:  # which comes several times from one terminal
            self.force_exit = True
        self.signals.append(sig)
        self.should_exit = True


def run_server(
    settings: ServerSettings,
    sockets: Sequence[socket.socket],
    *,
    when_ready: Callable[[], None],
    search_module: str = SEARCH_MODULE,
) -> int:
    """Serve on the sockets until a signal ends it, and return the number of that signal, else 0.

    `when_ready` is called once requests are answered; an AutotuneError that it raises ends the
    server. `search_module` is what the process of a search runs. Raises what keeps the app from
    starting, such as InvalidInput and StorageUnavailable.
    """
    sys.setswitchinterval(_SWITCH_SECONDS)
    # Searches number GPUs as NVML does, which CUDA by itself orders by their speed.
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    app = create_app(settings, search_module=search_module)
    errors = _errors_of_lifespan(app)
    config = uvicorn.Config(
        app,
        lifespan="on",
        http=protocol_of_connections(settings.longest_wait_seconds),
        ws="none",
        # The gate writes a log of its own, in which no URL has a token.
        access_log=False,
        log_config=None,
        server_header=False,
        # Anybody can send the headers of a proxy.
        proxy_headers=False,
        timeout_graceful_shutdown=_GRACE_SECONDS,
        ssl_certfile=settings.tls_certificate,
        ssl_keyfile=settings.tls_key,
    )
    # What keeps the server from starting is raised, so that uvicorn need not report it.
    _LOG.setLevel(logging.CRITICAL)
    server = _Server(config, app, when_ready=when_ready)
    try:
        server.run(sockets=list(sockets))
    except SystemExit:
        if not errors:
            raise
    if errors:
        raise errors[0]
    if server.error is not None:
        raise server.error
    return server.signals[0] if server.signals else 0


def _errors_of_lifespan(app: FastAPI) -> list[Exception]:
    """Returns a list that gets the error with which the app fails to start or to end."""
    errors: list[Exception] = []
    lifespan = app.router.lifespan_context

    @asynccontextmanager
    async def noting(started: Any) -> AsyncIterator[Any]:
        try:
            async with lifespan(started) as state:
                yield state
        except Exception as error:
            errors.append(error)
            raise

    app.router.lifespan_context = noting
    return errors
