"""A proxy in front of a server that is away for a few requests."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Self

import httpx

PROBLEM = {
    "type": "/problems/storage-unreachable",
    "title": "Service Unavailable",
    "status": 503,
    "detail": "the studies database cannot be reached",
    "hint": "start it",
}


class OutageProxy:
    """Forwards requests to a server, but `lasts` of them, from number `begins` on.

    As it is away it answers 503 as the server does without its database, or, with `closes`, closes
    the connection. Each event stream begins with a sign of life.
    """

    def __init__(self, url: str, *, begins: int, lasts: float, closes: bool) -> None:
        self.requests = 0
        self.refused = 0
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                number, proxy.requests = proxy.requests, proxy.requests + 1
                if begins <= number < begins + lasts:
                    proxy.refused += 1
                    if not closes:
                        self._answer(503, "application/problem+json", [json.dumps(PROBLEM)])
                    return
                length = int(self.headers.get("Content-Length", 0))
                passed = {
                    name: value
                    for name, value in self.headers.items()
                    if name.lower() not in ("host", "content-length", "accept-encoding")
                }
                with httpx.stream(
                    self.command,
                    url + self.path,
                    headers={**passed, "Accept-Encoding": "identity"},
                    content=self.rfile.read(length),
                    timeout=60,
                ) as response:
                    kind = response.headers.get("Content-Type", "")
                    begun = [":\n\n"] if "event-stream" in kind else []
                    self._answer(response.status_code, kind, begun)
                    for piece in response.iter_raw():
                        self.wfile.write(piece)

            do_POST = do_GET  # noqa: N815

            def _answer(self, status: int, kind: str, texts: list[str]) -> None:
                self.send_response(status)
                self.send_header("Content-Type", kind)
                self.end_headers()
                for text in texts:
                    self.wfile.write(text.encode())

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.handle_error = lambda *_: None  # a stream that its reader has left
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
