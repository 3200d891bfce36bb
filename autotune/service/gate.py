"""Decides who gets in, before anything else of the app sees a request.

In this order: the Host header must be this server's (421), and so must the Origin (403); only a
trusted proxy may name a person (403); the body must not be too large (413); there must be a token
or such a person (401); a person, and a token in a cookie, only write where the browser says that a
page of this server asks for it (403); a reader only reads (403); and the body must arrive in time
(408). It also adds the security headers to every response, counts requests and writes the access
log, which has no query string and so no token.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import parse_qs, parse_qsl, quote, unquote, urlencode

import anyio
from fastapi import Request
from starlette.datastructures import MutableHeaders
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from autotune.errors import AutotuneError, InvalidInput, StorageUnavailable
from autotune.service.callers import Callers
from autotune.service.hosts import OwnHosts, Proxies
from autotune.service.metrics import HttpMetrics
from autotune.service.plain_page import plain_page, sign_in_page
from autotune.service.problems import Problem, answer, is_navigation, problem_of
from autotune.service.settings import ServerSettings
from autotune.service.state import Caller, ServiceState
from autotune.storage.tokens import check_token_name

_LOG = logging.getLogger("autotune.service")

HEALTH = "/api/v1/health"
SIGN_IN = "/sign-in"
SIGN_OUT = "/sign-out"

_READING = ("GET", "HEAD", "OPTIONS")
_LONGEST_TOKEN = 1000
_LARGEST_OPEN_BODY_BYTES = 128 * 1024
"""Of a request that needs no token: the form to sign in, with the address to go on to."""
_LONGEST_LOCATION = 2000
"""A proxy takes headers of 4 KiB in all from a server, unless it is told otherwise."""

CONTENT_SECURITY_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self' 'unsafe-inline'",
        "img-src 'self' data: blob:",
        "font-src 'self'",
        "connect-src 'self'",
        "frame-src 'self'",
        "form-action 'self'",
        "base-uri 'none'",
        "frame-ancestors 'none'",
    )
)

_HEADERS: Mapping[str, str] = {
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "X-Content-Type-Options": "nosniff",
    # With no-referrer, browsers would also hide the origin of our own forms (`_check_origin`).
    "Referrer-Policy": "same-origin",
    "Cache-Control": "no-store",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}
"""Headers of every response that does not set them itself."""


_WITH_PATHS = ("location", "hx-redirect", "hx-replace-url")
"""Headers of answers that lead to a path of this server."""


class Gate:
    """ASGI middleware in front of the whole app, whose state has the `ServiceState`."""

    def __init__(self, app: ASGIApp, *, settings: ServerSettings, metrics: HttpMetrics) -> None:
        self._app = app
        self._settings = settings
        self._hosts = OwnHosts(settings)
        self._proxies = Proxies(settings.trusted_proxies)
        self._callers = Callers(settings.owner_token, servers_only=settings.is_worker)
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            path = _below(self._settings.root_path, scope["path"])
            await self._serve({**scope, "path": path}, receive, send)
        else:  # there are no websockets
            await send({"type": "websocket.close", "code": 1008})

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        began = time.monotonic()
        status = 500
        has_begun = False
        request_id = secrets.token_hex(8)

        async def send_with_headers(message: Message) -> None:
            nonlocal status, has_begun
            if message["type"] == "http.response.start":
                status, has_begun = message["status"], True
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers.setdefault(name, value)
                headers["X-Request-Id"] = request_id
                for name in _WITH_PATHS:
                    if headers.get(name, "").startswith("/"):
                        headers[name] = self._settings.root_path + headers[name]
            await send(message)

        request = Request(scope, receive)
        try:
            await self._admit_and_answer(request, send_with_headers)
        except Exception as error:
            if has_begun and _is_of_leaving(error):
                return
            _LOG.exception("request %s failed", request_id)
            if has_begun:
                raise  # the client sees that the connection breaks
            problem = Problem(
                500,
                f"the server has failed to answer: {type(error).__name__}",
                hint=f"see its log for request {request_id}",
            )
            await answer(request, problem)(scope, receive, send_with_headers)
        finally:
            seconds = time.monotonic() - began
            route = _route_of(scope)
            self._metrics.count(route=route, method=scope["method"], status=status, seconds=seconds)
            caller = scope.get("state", {}).get("caller")
            fields = {
                "method": scope["method"],
                "path": _printable_path(scope),
                "route": route,
                "status": status,
                "milliseconds": round(1000 * seconds, 1),
                "person": None if caller is None else caller.name,
                "request_id": request_id,
            }
            _LOG.info(
                "%s %s %d %.0f ms %s",
                fields["method"],
                fields["path"],
                status,
                1000 * seconds,
                fields["person"] or "-",
                extra={"request": fields},
            )

    async def _admit_and_answer(self, request: Request, send: Send) -> None:
        scope, receive = request.scope, request.receive
        try:
            self._check_host(request)
            self._check_origin(request)
            person = self._person_of(request)
            self._check_announced_length(request)
            if _gives_token_in_url(request):
                response = await self._sign_in_by_url(request)
                await response(scope, receive, send)
                return
            if _is_open(request):
                self._check_page(request)
            else:
                await self._check_caller(request, person)
            body = await self._body_in_time(request)
            if body is None:
                return  # the client has left
            if _is_open(request) and request.url.path in (SIGN_IN, SIGN_OUT):
                if request.url.path == SIGN_IN:
                    response = await self._sign_in(request, body)
                else:
                    response = self._sign_out(request, person)
                await response(scope, receive, send)
                return
        except Problem as problem:
            await self._refusal(request, problem)(scope, receive, send)
            return
        except AutotuneError as error:
            await answer(request, problem_of(error))(scope, receive, send)
            return
        await self._app(scope, _replayed(body, receive), send)

    # -- where the request comes from ------------------------------------------------------------

    def _check_host(self, request: Request) -> None:
        found = request.headers.getlist("host")
        server = request.scope.get("server") or (None, None)
        if len(found) != 1 or not self._hosts.is_own_host(found[0], address=server[0]):
            named = ", ".join(found)
            raise Problem(
                421,
                f"the Host header {named!r} does not name this server",
                hint="use the URL that autotune serve has printed; a proxy's name is allowed with "
                "--allow-host",
            )

    def _check_origin(self, request: Request) -> None:
        headers = request.headers
        site = headers.get("sec-fetch-site", "")
        is_navigation_here = (
            request.method == "GET"
            and headers.get("sec-fetch-mode") == "navigate"
            and headers.get("sec-fetch-dest") == "document"
        )
        if site in ("cross-site", "same-site") and not is_navigation_here:
            raise _foreign("of another site")
        host = headers["host"]
        for origin in headers.getlist("origin"):
            if not self._hosts.is_own_origin(origin, host=host):
                raise _foreign(f"of {origin!r}")

    def _check_page(self, request: Request) -> None:
        """Raises Problem for a write of which no browser says that a page of this server sends it.

        The cookie does not show it: browsers send it for pages of this host's other ports, too,
        which are of the same site but not of the same origin. On plain http by another name than
        localhost they send no Sec-Fetch-Site, but all send the Origin of a write.
        """
        if request.method in _READING:
            return
        headers = request.headers
        is_own_page = headers.get("sec-fetch-site") == "same-origin"
        if not is_own_page and not self._hosts.is_own_origin(
            headers.get("origin", ""), host=headers["host"]
        ):
            raise Problem(
                403,
                "the request does not say that a page of this server sends it",
                hint="use a browser that sends Origin or Sec-Fetch-Site; a program sends its token "
                "as Authorization: Bearer",
            )

    # -- who it is -------------------------------------------------------------------------------

    def _person_of(self, request: Request) -> str:
        """Returns whom a trusted proxy names; empty where it names nobody. Raises Problem."""
        header = self._settings.trusted_user_header
        given = request.headers.getlist(header) if header else []
        if not given:
            return ""
        peer = request.client.host if request.client else ""
        if not self._proxies.have(peer):
            raise Problem(
                403,
                f"only a trusted proxy may send {header}, and {peer or 'the sender'} is none",
                hint=f"send the request to the proxy, or leave {header} out and send a token",
            )
        if len(given) > 1:
            raise Problem(
                403,
                f"{header} stands {len(given)} times in the request",
                hint="let the proxy replace what a client sends, and not add to it",
            )
        if given[0]:
            try:
                check_token_name(given[0])
            except InvalidInput as error:
                raise Problem(
                    403,
                    f"{header} cannot name a person: {error.message}",
                    hint="let the proxy send a login or an e-mail address",
                ) from None
        return given[0]

    async def _check_caller(self, request: Request, person: str) -> None:
        """Notes who has the token, or else `person`, in the request's state. Raises Problem."""
        token, is_of_browser = _token_of(request, _state_of(request).cookie)
        is_person = bool(person) and not _has_bearer_token(request)
        caller = await self._who(request, token, person if is_person else "")
        if caller is None:
            raise _token_needed(token)
        if is_of_browser or is_person:
            self._check_page(request)
        request.state.caller = caller

        async def is_still_let_in() -> bool:
            try:
                return await self._who(request, token, person if is_person else "") is not None
            except StorageUnavailable:
                return True  # as nobody can say otherwise

        request.state.is_still_let_in = is_still_let_in
        if caller.is_read_only and request.method not in _READING:
            raise Problem(
                403,
                f"{caller.name!r} may only read",
                hint="use the token of a member: autotune serve tokens add NAME",
            )

    async def _who(self, request: Request, token: str, person: str) -> Caller | None:
        """Returns the person whom a proxy has let in, or else who has the token."""
        state = _state_of(request)
        if person:
            return await self._callers.person(person, state.tokens, state.servers)
        if not token:
            return None
        return await self._callers.caller_of(token, state.tokens, state.servers)

    async def _sign_in_by_url(self, request: Request) -> Response:
        """Answers a page's URL with ?token=: sets the cookie and redirects to the same page."""
        pairs = parse_qsl(_query(request), keep_blank_values=True)
        given = [value for name, value in pairs if name == "token"]
        caller = await self._caller_of(given[0], request)
        if caller is None:
            raise _token_needed(given[0])
        return self._signed_in(request, given[0], _address_of(request))

    async def _sign_in(self, request: Request, body: bytes) -> Response:
        """Answers the sign-in page, or its form: with the right token sets the cookie."""
        if request.method == "GET":
            return HTMLResponse(self._sign_in_page("A token is needed", next_path="/"))
        fields = parse_qs(body.decode("utf-8", errors="replace"), keep_blank_values=True)
        token = fields.get("token", [""])[0].strip()
        next_path = own_path(fields.get("next", ["/"])[0])
        caller = await self._caller_of(token, request)
        if caller is None:
            page = self._sign_in_page("The token is wrong", next_path=next_path)
            return HTMLResponse(page, 401, headers={"WWW-Authenticate": "Bearer"})
        return self._signed_in(request, token, next_path)

    def _signed_in(self, request: Request, token: str, path: str) -> Response:
        """Returns an answer that sets the cookie and leads to a path of this server.

        A path that is too long for a header is in a page that leads there.
        """
        response: Response = RedirectResponse(path, 303)
        if len(path) > _LONGEST_LOCATION:
            root = self._settings.root_path
            text = plain_page(
                title="Signed in", sentence="The page follows", root=root, goes_on_to=path
            )
            response = HTMLResponse(text)
        is_by_tls = self._settings.has_tls or request.headers.get("origin", "").startswith("https:")
        response.set_cookie(
            _state_of(request).cookie,
            quote(token, safe=""),
            httponly=True,
            samesite="strict",
            secure=is_by_tls,
            path=self._settings.root_path or "/",
        )
        return response

    def _sign_out(self, request: Request, person: str) -> Response:
        """Removes the cookie; a person whom a proxy names is told to sign out there."""
        response: Response = RedirectResponse(SIGN_IN, 303)
        if person:
            response = HTMLResponse(
                plain_page(
                    title="Sign out",
                    sentence=f"the proxy in front of this server has signed you in as {person}",
                    hint="sign out there: oauth2-proxy does it at /oauth2/sign_out of this host, "
                    "Authelia at /logout of its own",
                    root=self._settings.root_path,
                )
            )
        path = self._settings.root_path or "/"
        response.delete_cookie(_state_of(request).cookie, path=path)
        return response

    def _sign_in_page(self, sentence: str, *, next_path: str, goes_on: bool = False) -> str:
        return sign_in_page(
            sentence=sentence,
            next_path=next_path,
            goes_on=goes_on,
            root=self._settings.root_path,
        )

    async def _caller_of(self, token: str, request: Request) -> Caller | None:
        if not token or len(token) > _LONGEST_TOKEN:
            return None
        state = _state_of(request)
        return await self._callers.caller_of(token, state.tokens, state.servers)

    def _refusal(self, request: Request, problem: Problem) -> Response:
        if problem.status_code == 401 and is_navigation(request):
            page = self._sign_in_page(
                problem.detail,
                next_path=_address_of(request),
                goes_on=request.headers.get("sec-fetch-site") == "cross-site",
            )
            return HTMLResponse(page, 401, headers=problem.headers)
        return answer(request, problem)

    # -- what it sends ---------------------------------------------------------------------------

    def _check_announced_length(self, request: Request) -> None:
        announced = request.headers.get("content-length", "0")
        if not announced.isascii() or not announced.isdigit():
            raise Problem(400, "the Content-Length header is not a number")
        largest_bytes = self._largest_body_bytes(request)
        if len(announced) > 15 or int(announced) > largest_bytes:
            raise _too_large(largest_bytes)

    async def _body_in_time(self, request: Request) -> bytes | None:
        """As `_read_body`; raises Problem for a client that takes too long."""
        seconds = self._settings.longest_wait_seconds
        try:
            async with asyncio.timeout(seconds):
                return await self._read_body(request)
        except TimeoutError:
            raise Problem(
                408,
                f"the body has not arrived within {seconds:g} s",
                hint="send it at once",
                headers={"Connection": "close"},
            ) from None

    async def _read_body(self, request: Request) -> bytes | None:
        """Returns the body of the request; None where the client leaves meanwhile."""
        headers = request.headers
        largest_bytes = self._largest_body_bytes(request)
        if "content-length" not in headers and "transfer-encoding" not in headers:
            return b""
        parts = []
        size = 0
        while True:
            message = await request.receive()
            if message["type"] == "http.disconnect":
                return None
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > largest_bytes:
                raise _too_large(largest_bytes)
            if not message.get("more_body", False):
                return b"".join(parts)

    def _largest_body_bytes(self, request: Request) -> int:
        largest_bytes = self._settings.largest_body_bytes
        return min(largest_bytes, _LARGEST_OPEN_BODY_BYTES) if _is_open(request) else largest_bytes


def _too_large(largest_bytes: int) -> Problem:
    return Problem(
        413,
        f"the body is larger than {largest_bytes} bytes",
        hint="send less",
        headers={"Connection": "close"},
    )


def _below(root: str, path: str) -> str:
    """Returns a path of this server as its routes have it; a proxy may have removed `root`."""
    if path == root:
        return "/"
    return path.removeprefix(root) if path.startswith(f"{root}/") else path


def _address_of(request: Request) -> str:
    """Returns the path and the query of a page, without a token."""
    pairs = parse_qsl(_query(request), keep_blank_values=True)
    others = urlencode([pair for pair in pairs if pair[0] != "token"])
    path = own_path(quote(request.scope["path"], safe="/:@!$&'()*+,;=~-._"))
    return path + (f"?{others}" if others else "")


def own_path(path: str) -> str:
    """Returns a path of this server that a redirect may lead to.

    Browsers take `//name` and `/\\name` for another server, and ignore control characters.
    """
    visible = "".join(character for character in path if character > " " and character != "\x7f")
    return "/" + visible.lstrip("/\\") if visible.startswith("/") else "/"


def _is_of_leaving(error: Exception) -> bool:
    """Whether an error is what FastAPI raises where the client of a full stream has left."""
    if not isinstance(error, ExceptionGroup):
        return False
    _, others = error.split(anyio.BrokenResourceError)
    return others is None


def _gives_token_in_url(request: Request) -> bool:
    """Whether this is a page with ?token=; the interface does not take tokens in URLs."""
    if request.method != "GET" or request.url.path.startswith("/api/"):
        return False
    return any(name == "token" for name, _ in parse_qsl(_query(request), keep_blank_values=True))


def _is_open(request: Request) -> bool:
    """Whether a request needs no token."""
    asked = (request.method, request.url.path)
    return asked in (("GET", HEALTH), ("GET", SIGN_IN), ("POST", SIGN_IN), ("POST", SIGN_OUT))


def _token_of(request: Request, name: str) -> tuple[str, bool]:
    """Returns the token of a request, empty without one, and whether it is that of the cookie."""
    authorization = request.headers.get("authorization")
    if authorization is not None:
        token = authorization.partition(" ")[2].strip() if _has_bearer_token(request) else ""
        return (token if len(token) <= _LONGEST_TOKEN else ""), False
    token = unquote(request.cookies.get(name, ""))
    return (token if len(token) <= 3 * _LONGEST_TOKEN else ""), True


def _has_bearer_token(request: Request) -> bool:
    """Whether a program sends a token; proxies send the Basic authorization of a person on."""
    return request.headers.get("authorization", "").partition(" ")[0].lower() == "bearer"


def _token_needed(token: str) -> Problem:
    return Problem(
        401,
        "the token is wrong" if token else "a token is needed",
        hint="send it as Authorization: Bearer TOKEN, or open the URL that autotune serve has "
        "printed",
        headers={"WWW-Authenticate": "Bearer"},
    )


def _foreign(whose: str) -> Problem:
    return Problem(
        403,
        f"the request comes from a page {whose}",
        hint="use the pages of this server, or a program that sends no Origin header",
    )


def _state_of(request: Request) -> ServiceState:
    state: ServiceState = request.app.state.service
    return state


def _query(request: Request) -> str:
    query: bytes = request.scope.get("query_string", b"")
    return query.decode("latin-1")


def _route_of(scope: Scope) -> str:
    """Returns the path of the route with its parameters by name; `other` for an unknown path.

    The framework may leave out the prefix that a router is included with, which has no parameters.
    """
    template = getattr(scope.get("route"), "path", None)
    if not template:
        return "other"
    parts, named = scope["path"].split("/"), template.split("/")
    prefix = parts[1 : len(parts) - len(named) + 1]
    return "".join(f"/{part}" for part in prefix) + str(template)


def _printable_path(scope: Scope) -> str:
    raw: Any = scope.get("raw_path") or quote(scope["path"]).encode()
    return bytes(raw).partition(b"?")[0].decode("latin-1").encode("unicode_escape").decode()


def _replayed(body: bytes, receive: Receive) -> Receive:
    """Returns a `receive` that gives the body, which was read already, and then what follows."""
    is_given = False

    async def replay() -> Message:
        nonlocal is_given
        if is_given:
            return await receive()
        is_given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay
