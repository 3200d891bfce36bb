"""A service that listens on a port of this machine, and a proxy in front of it that misbehaves."""

import socket
import threading
from contextlib import contextmanager

import uvicorn

from autotune.service.application import create_app
from autotune.service.connections import protocol_of_connections
from autotune.service.listening import listening_sockets
from autotune.service.quick import QUICK_MODULE
from autotune.service.settings import ServerSettings
from tests.building.queued_searches import TOKEN, wait_until

SEARCH_MODULE = "tests.building.search_with_study"


@contextmanager
def listening_service(
    storage,
    *,
    search_module=SEARCH_MODULE,
    quick_module=QUICK_MODULE,
    tls=None,
    port=0,
    **settings,
):
    """Yield the URL of a server in a thread of this process; its token is TOKEN.

    `tls` are the files of its certificate and key. With port 0 it takes one that is free.
    """
    sockets = listening_sockets("127.0.0.1", port)
    port = sockets[0].getsockname()[1]
    certificate, key = tls or (None, None)
    of_server = ServerSettings(
        storage=storage,
        token=TOKEN,
        port=port,
        tls_certificate=certificate,
        tls_key=key,
        **settings,
    )
    app = create_app(of_server, search_module=search_module, quick_module=quick_module)
    configured = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        http=protocol_of_connections(of_server.longest_wait_seconds),
        ws="none",
        timeout_graceful_shutdown=1,
        ssl_certfile=certificate,
        ssl_keyfile=key,
    )
    server = uvicorn.Server(configured)
    thread = threading.Thread(target=server.run, kwargs={"sockets": sockets}, daemon=True)
    thread.start()
    wait_until(lambda: server.started)
    try:
        yield f"{'https' if tls else 'http'}://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(30)


class BreakingProxy:
    """Forwards bytes to a server, and closes each connection after `answer_bytes` of its answers.

    The first `connections` are broken so, and then no more. It says the Host of the server, because
    the client's own names the proxy.
    """

    def __init__(self, url, *, answer_bytes, connections=10**9):
        self._port = int(url.rpartition(":")[2])
        self._answer_bytes = answer_bytes
        self._connections = connections
        self.broken = 0
        self._socket = listening_sockets("127.0.0.1", 0)[0]
        self.port = self._socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"

    def __enter__(self):
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_):
        self._socket.close()

    def _accept(self):
        while True:
            try:
                client, _ = self._socket.accept()
            except OSError:
                return
            server = socket.create_connection(("127.0.0.1", self._port))
            threading.Thread(target=self._requests, args=(client, server), daemon=True).start()
            threading.Thread(target=self._answers, args=(client, server), daemon=True).start()

    def _requests(self, client, server):
        own, theirs = f"127.0.0.1:{self.port}".encode(), f"127.0.0.1:{self._port}".encode()
        try:
            while data := client.recv(65536):
                server.sendall(data.replace(b"Host: " + own, b"Host: " + theirs))
        except OSError:
            pass
        _close(client, server)

    def _answers(self, client, server):
        left = self._answer_bytes
        try:
            while data := server.recv(65536):
                if self.broken < self._connections:
                    client.sendall(data[:left])
                    left -= len(data)
                    if left <= 0:
                        self.broken += 1
                        break
                else:
                    client.sendall(data)
        except OSError:
            pass
        _close(client, server)


def _close(*sockets):
    for each in sockets:
        try:
            each.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        each.close()
