"""Borders of the service: submissions to it, queries, and what a server answers to a client."""

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from hypothesis import strategies
from starlette.routing import Match

import autotune
from autotune.errors import AutotuneError
from autotune.service.problems import MEDIA_TYPE
from autotune.spec.config import TrainingConfig
from tests.building.service import BEARER, serving, write_example
from tests.fuzzing.judging import Border, Reader, quick_folder
from tests.fuzzing.mutations import changed_files, changed_trees, json_bytes, with_changed_bytes
from tests.fuzzing.showing import run_command, shown

STUDY = "quick"


class ServerFailed(Exception):
    """A server answered with a status above 499, or with problem details without a sentence."""


class Rejected(Exception):
    """The server rejects a request, with problem details; or a command ended with exit code 2."""


@contextmanager
def _idle_server(folder: Path, **settings: Any) -> Iterator[Any]:
    """Yield a client of a server that starts no search."""
    storage = f"sqlite:///{folder}/autotune.db"
    write_example(storage)
    with serving(storage, worker=False, **settings) as client:
        client.headers.update(BEARER)
        yield client


def _answer_of(response: Any) -> Any:
    """Returns the JSON of an answer. Raises Rejected and ServerFailed."""
    status = response.status_code
    if status >= 500:
        raise ServerFailed(f"{status}: {response.text[:500]}")
    if status >= 400 and "html" in response.headers.get("content-type", ""):
        raise Rejected("what a browser is shown instead of problem details")
    is_json = "json" in response.headers.get("content-type", "")
    content = json.loads(response.content) if is_json and response.content else None
    if status >= 400:
        if response.headers.get("content-type") != MEDIA_TYPE or not content.get("detail"):
            raise ServerFailed(f"{status} without problem details: {response.text[:300]}")
        if status == 401:
            raise ServerFailed("the token was lost")
        raise Rejected(f"{content['type'].rpartition('/')[2]}: {content['detail']}")
    return content


# -- a submission ----------------------------------------------------------------------------------

_SPACE = '[techniques]\nprecision = ["fp32", "bf16-mixed"]\nmicro_batch_size = "divisors"\n'
_SUBMISSIONS: tuple[dict[str, Any], ...] = (
    {"max_mem": "8GiB", "trials": 4, "space": "quick", "priority": 3, "name": "mine"},
    {
        "space_content": _SPACE,
        "trials": 2,
        "layers": 2,
        "width": 64,
        "learning_rates": {"adamw": 1e-3},
        "time_budget": "10m",
        "prefer": "balanced",
        "tolerance": {"speed": 0.05, "perplexity": 0.01},
        "seed": 7,
        "until_converged": True,
        "devices": "1",
        "group": "default",
    },
    {
        "model_config": {
            "model_type": "llama",
            "num_hidden_layers": 1,
            "hidden_size": 16,
            "num_attention_heads": 2,
            "intermediate_size": 16,
            "vocab_size": 256,
        },
        "trials": 1,
        "sequence_length": 32,
        "confirm": False,
        "max_perplexity_increase": 0.1,
    },
)


class _Submissions(Reader):
    """Submits a search, looks at it, and takes it off the list."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def passes_first_check(self, given: bytes) -> bool:
        try:
            return isinstance(json.loads(given.decode()), dict)
        except (ValueError, RecursionError):
            return False

    def read(self, given: bytes) -> Iterator[str]:
        search = _answer_of(
            self._client.post(
                "/api/v1/searches", content=given, headers={"Content-Type": "application/json"}
            )
        )
        path = f"/api/v1/searches/{search['id']}"
        assert _answer_of(self._client.get(path))["state"] == "queued"
        _answer_of(self._client.get("/api/v1/searches"))
        assert self._client.get("/").status_code == 200
        assert self._client.get(f"/searches/{search['id']}").status_code == 200
        _answer_of(self._client.post(f"{path}/cancel"))
        _answer_of(self._client.delete(path))
        yield from ()


@contextmanager
def _reading_submissions(folder: Path) -> Iterator[Reader]:
    with _idle_server(folder) as client:
        yield _Submissions(client)


SUBMISSION = Border(
    first_check="the body is a JSON object",
    inputs=lambda: changed_files(_SUBMISSIONS, json_bytes),
    valid=lambda: [json_bytes(body) for body in _SUBMISSIONS],
    reader=_reading_submissions,
    modules=("service/submissions.py", "service/routes/searches.py"),
    errors=(Rejected,),
    inputs_in_suite=40,
)


# -- queries ---------------------------------------------------------------------------------------

_STUDY_PATH = ["api", "v1", "studies", STUDY]
_QUERIES: tuple[dict[str, Any], ...] = tuple(
    {"method": method, "path": path, "query": query, "headers": headers, "body": body}
    for method, path, query, headers, body in (
        ("GET", ["api", "v1", "studies"], {"query": "qu", "sort": "name", "limit": 5}, {}, None),
        ("GET", _STUDY_PATH, {"prefer": "balanced", "speed_tolerance": 0.05}, {}, None),
        (
            "GET",
            [*_STUDY_PATH, "trials"],
            {
                "outcome": "ok",
                "technique": "precision:fp32",
                "sort": "-tokens_per_second",
                "limit": 3,
                "offset": 0,
            },
            {},
            None,
        ),
        ("GET", [*_STUDY_PATH, "trials", "1"], {}, {"If-None-Match": '"x"'}, None),
        ("GET", [*_STUDY_PATH, "report"], {"download": "true"}, {}, None),
        ("GET", [*_STUDY_PATH, "front"], {"max_perplexity_increase": 0.5}, {}, None),
        (
            "GET",
            [*_STUDY_PATH, "figures", "pareto"],
            {"x": "memory", "y": "speed", "three_d": "false"},
            {},
            None,
        ),
        ("GET", [*_STUDY_PATH, "exports", "pytorch"], {"trial": 1, "strict": "false"}, {}, None),
        ("GET", ["api", "v1", "compare"], {"study": [STUDY, "other"]}, {}, None),
        ("GET", ["api", "v1", "searches"], {"state": ["queued"], "limit": 2}, {}, None),
        ("GET", ["api", "v1", "actions"], {"limit": 2, "offset": 0}, {}, None),
        ("GET", ["studies", STUDY], {}, {"Accept": "text/html", "Accept-Language": "de"}, None),
        ("PATCH", ["api", "v1", "searches", "1"], {}, {}, {"priority": 3}),
        ("POST", ["api", "v1", "searches", "1", "continue"], {}, {}, {"trials": 3}),
        ("PATCH", _STUDY_PATH, {}, {}, {"name": STUDY}),
        ("DELETE", _STUDY_PATH, {"confirm": "code"}, {}, None),
    )
)


class _Queries(Reader):
    """Sends a request and reads its answer."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def passes_first_check(self, given: bytes) -> bool:
        try:
            request = _request_of(given)
        except (ValueError, RecursionError):
            return False
        scope = {"type": "http", "method": request["method"], "path": request["path"]}
        routes = self._client.app.routes
        return any(_matches(route, {**scope, "root_path": ""}) for route in routes)

    def read(self, given: bytes) -> Iterator[str]:
        request = _request_of(given)
        url = quote(request["path"].encode(errors="surrogatepass"))
        query = urlencode(request["query"], doseq=True, errors="surrogatepass")
        response = self._client.request(
            request["method"],
            f"{url}?{query}",
            headers=request["headers"],
            content=request["body"],
        )
        if response.status_code == 304:
            return
        _answer_of(response)
        yield from ()


def _matches(route: Any, scope: dict[str, Any]) -> bool:
    return bool(route.matches(scope)[0] == Match.FULL)


def _request_of(given: bytes) -> dict[str, Any]:
    """Returns the parts of a request as texts; parts that no client can send are left out."""
    content = json.loads(given)
    content = content if isinstance(content, dict) else {}
    path = content.get("path")
    query, headers = content.get("query"), content.get("headers")
    method = str(content.get("method"))
    body = content.get("body")
    return {
        "method": method if method.isascii() and method.isalpha() else "GET",
        "path": "/" + "/".join(map(_text, path[:9] if isinstance(path, list) else [path])),
        "query": [
            (_text(name), _text(each))
            for name, value in (query.items() if isinstance(query, dict) else [("", query)])
            for each in (value[:9] if isinstance(value, list) else [value])
        ],
        "headers": {
            _header(name): _header(value)
            for name, value in (headers.items() if isinstance(headers, dict) else [])
            if _header(name).replace("-", "").isalnum()
        },
        "body": None if body is None else json.dumps(body).encode(),
    }


def _text(value: Any) -> str:
    """Returns a value as text of at most 5,000 characters: a client sends no URL of any length."""
    return (value if isinstance(value, str) else json.dumps(value))[:5000]


def _header(value: Any) -> str:
    return "".join(letter for letter in _text(value) if " " <= letter <= "~").strip()[:2000]


@contextmanager
def _reading_queries(folder: Path) -> Iterator[Reader]:
    with _idle_server(folder) as client:
        write_example(f"sqlite:///{folder}/autotune.db", name="other")
        _answer_of(client.post("/api/v1/searches", json=_SUBMISSIONS[0]))
        yield _Queries(client)


QUERY = Border(
    first_check="a route of the server takes its method and its path",
    inputs=lambda: changed_trees(_QUERIES, verbatim=()).map(json_bytes),
    valid=lambda: [
        json_bytes(query)
        for query in _QUERIES
        if query["path"][-1] != "continue" and query["method"] not in ("DELETE", "PATCH")
    ],
    reader=_reading_queries,
    modules=(
        "service/parameters.py",
        "service/trial_query.py",
        "service/routes/studies.py",
        "service/routes/study_changes.py",
    ),
    errors=(Rejected,),
    inputs_in_suite=40,
)


# -- what a server answers -------------------------------------------------------------------------

_PROBLEM = {
    "type": "/problems/unknown-study",
    "title": "Not found",
    "status": 404,
    "detail": "there is no study 'quick'",
    "hint": "the studies are quick",
}
_CONFIG = TrainingConfig(micro_batch_size=8).to_dict()


_JSON = {"Accept": "application/json"}


@cache
def _answers() -> Mapping[str, tuple[int, str, Any]]:
    """Returns {request: (status, content type, content)} as a real server answers."""
    paths = {
        "show": f"/api/v1/studies/{STUDY}",
        "trial": f"/api/v1/studies/{STUDY}/trials/1",
        "studies": "/api/v1/studies",
        "export": f"/api/v1/studies/{STUDY}/exports/pytorch?trial=1",
        "figure": f"/api/v1/studies/{STUDY}/figures/pareto",
        "queue": "/api/v1/searches",
        "search": "/api/v1/searches/1",
        "actions": "/api/v1/actions",
    }
    with quick_folder() as folder, _idle_server(folder) as client:
        _answer_of(client.post("/api/v1/searches", json=_SUBMISSIONS[0]))
        found = {
            asked: (200, "application/json", _answer_of(client.get(path, headers=_JSON)))
            for asked, path in paths.items()
        }
    figure = found["figure"][2]
    figure["layout"].pop("template", None)  # of plotly, with hundreds of values
    ended = {**found["search"][2], "state": "finished", "exit_code": 0, "study": STUDY}
    events = [
        {"event": kind, "data": {"search": 1, "study": STUDY, **data}}
        for kind, data in (
            ("search", {**found["search"][2], "state": "running"}),
            ("opened", {"lines": ["A new study"], "trials_wanted": 4, "places": ["cpu"]}),
            ("trial_began", {"number": 9, "config": _CONFIG, "name": None, "device": "cpu"}),
            ("step", {"doing": "step", "steps": [3, 40], "device": "cpu"}),
            ("notice", {"message": "the database was away"}),
            ("trial_ended", {"trial": {**found["trial"][2], "number": 9}}),
            ("confirming", {"doing": "1 of 8", "device": "cpu"}),
            ("search", ended),
        )
    ]
    for number, event in enumerate(events, start=1):
        event["id"] = number
    return {
        **found,
        "watch": (200, "text/event-stream", events),
        "ended": (200, "application/json", ended),
        "problem": (404, MEDIA_TYPE, _PROBLEM),
        "conflict": (409, MEDIA_TYPE, {**_PROBLEM, "type": "/problems/search-conflict"}),
        "health": (200, "application/json", {"version": autotune.__version__, "role": "leader"}),
    }


_ASKED = (
    "show",
    "trial",
    "studies",
    "export",
    "figure",
    "queue",
    "search",
    "actions",
    "watch",
    "problem",
    "conflict",
)
"""Of the answers those that are changed."""


def _stream(events: Any) -> bytes:
    """Returns events as a stream has them; what is no event is sent as a comment or as data."""
    parts = []
    for event in events if isinstance(events, list) else [events]:
        if not isinstance(event, dict):
            parts.append(b"data: " + json_bytes(event) + b"\n\n")
            continue
        for name, value in event.items():
            text = json_bytes(value) if name == "data" else str(value).encode(errors="replace")
            parts.append(str(name).encode(errors="replace") + b": " + text + b"\n")
        parts.append(b"\n")
    return b"".join(parts)


def _body(asked: str, content: Any) -> bytes:
    return _stream(content) if asked == "watch" else json_bytes(content)


@strategies.composite
def _server_answers(draw: Any) -> bytes:
    """An input is what the client asks on a line of its own, and the body of the answer."""
    asked = draw(strategies.sampled_from(_ASKED))
    _, _, content = _answers()[asked]
    if draw(strategies.sampled_from((True, True, True, False))):
        changed = _body(asked, draw(changed_trees([content])))
    else:
        changed = draw(with_changed_bytes(_body(asked, content)))
    return asked.encode() + b"\n" + changed


class _AnsweringServer(ThreadingHTTPServer):
    """Answers the next request with what an input says, and others as a real server does."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.ask("health", b"{}")
        self.url = f"http://127.0.0.1:{self.server_address[1]}"

    def ask(self, asked: str, body: bytes) -> None:
        """Answer the next request with this body."""
        self.asked, self.body, self.streams = asked, body, 0

    def answer_of(self, path: str) -> tuple[int, str, bytes]:
        asked = self.asked
        if path.startswith("/api/v1/health"):
            asked = "health"
        elif asked == "watch" and "/events" not in path:
            asked = "ended" if "/searches" in path else "show"
        elif asked == "watch":
            self.streams += 1
            if self.streams > 1:  # the first has not told of the end
                return 200, "text/event-stream", b"event: reset\ndata: {}\n\n"
        elif asked == "export" and "/exports/" not in path:
            asked = "show"
        status, kind, content = _answers()[asked]
        return status, kind, self.body if asked == self.asked else _body(asked, content)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of a client that has left."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _AnsweringServer

    def do_GET(self) -> None:
        status, kind, body = self.server.answer_of(self.path)
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.do_GET()

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing of requests."""


class _Answers(Reader):
    """Asks a server as programs and commands do."""

    def __init__(self, server: _AnsweringServer, folder: Path) -> None:
        self._server, self._folder = server, folder
        self._client = autotune.Client(server.url, token="token")
        self._asks: Mapping[str, Callable[[], Iterator[str]]] = {
            "show": self._show,
            "trial": lambda: _nothing(self._client.trial(STUDY, 1).to_dict()),
            "studies": lambda: _nothing(self._client.studies()),
            "export": self._export,
            "figure": lambda: _nothing(self._client.figure(STUDY).to_json()),
            "queue": lambda: self._command("queue"),
            "search": lambda: _nothing(repr(self._client.search(1))),
            "actions": lambda: _nothing(self._client.actions()),
            "watch": self._watch,
            "problem": lambda: self._command("show", STUDY),
            "conflict": lambda: _nothing(self._client.cancel(1)),
        }

    def passes_first_check(self, given: bytes) -> bool:
        asked, _, body = given.partition(b"\n")
        try:
            if asked == b"watch":
                return b"\ndata: {" in body.replace(b"\r", b"\n") and bool(body.decode())
            return isinstance(json.loads(body.decode()), dict)
        except (ValueError, RecursionError):
            return False

    def read(self, given: bytes) -> Iterator[str]:
        asked, _, body = given.partition(b"\n")
        self._server.ask(asked.decode(), body)
        yield from self._asks[asked.decode()]()

    def _show(self) -> Iterator[str]:
        result = self._client.show(STUDY)
        yield from shown(result)
        yield repr(result)
        yield from self._command("show", STUDY)

    def _export(self) -> Iterator[str]:
        yield str(self._client.export(STUDY, "pytorch", out=self._folder / "out", overwrite=True))

    def _watch(self) -> Iterator[str]:
        yield from self._command("watch", "1")

    def _command(self, *arguments: str) -> Iterator[str]:
        code, text = run_command(*arguments, "--server", f"{self._server.url}/?token=token")
        yield text
        if code != 0:
            raise Rejected(text)


def _nothing(_value: object) -> Iterator[str]:
    """Show nothing of a value that was made."""
    return iter(())


@contextmanager
def _reading_answers(folder: Path) -> Iterator[Reader]:
    with _AnsweringServer() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield _Answers(server, folder)
        server.shutdown()


SERVER_ANSWER = Border(
    first_check="it is a JSON object, or a stream with the data of an event",
    inputs=_server_answers,
    valid=lambda: [
        asked.encode() + b"\n" + _body(asked, content)
        for asked, (status, _, content) in _answers().items()
        if status == 200 and asked in _ASKED
    ],
    reader=_reading_answers,
    modules=(
        "client/client.py",
        "client/connection.py",
        "client/study_json.py",
        "client/searches.py",
        "client/events.py",
    ),
    errors=(AutotuneError, Rejected),
)
