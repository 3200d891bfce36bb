"""Requests to a server: repeated where that is safe, with every failure as one sentence.

A request that changes nothing, or that has an Idempotency-Key, is sent again after a failure of the
network or of the database behind the server. What the server rejects is raised as the error of
`errors.py` that the server raised, with its message and its hint: the problem details name the
class, as `/problems/unknown-study` for UnknownStudy.
"""

import ssl
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import httpx

from autotune import errors
from autotune.client.address import TOKEN_VARIABLE, tokens_file
from autotune.errors import (
    AutotuneError,
    InvalidInput,
    ServerUnreachable,
    StorageUnreachable,
    problem_name,
)

API = "/api/v1"
_WAITS_SECONDS = (0.2, 0.6, 1.5)
"""Before each repetition; together short enough for somebody who mistyped a port."""
_CONNECT_SECONDS = 10.0
_ANSWER_SECONDS = 120.0
"""Predictions and figures of large studies take this long at most."""
_AWAY = (502, 503, 504)
"""The database is away, or a proxy does not reach the server."""
_ON_THIS_MACHINE = ("all://localhost", "all://127.0.0.1", "all://[::1]")
"""Hosts that no proxy of the environment leads to."""
Parameters = Mapping[str, Any]


class Connection:
    """A server at a URL, with the token that every request carries."""

    def __init__(self, url: str, *, token: str | None, version: str) -> None:
        self.url = url
        self._version = version
        headers = {"User-Agent": f"autotune/{version}"}
        if token is not None:
            headers["Authorization"] = f"Bearer {token}"
        self._has_token = token is not None
        self._http = httpx.Client(
            base_url=url,
            headers=headers,
            timeout=httpx.Timeout(_ANSWER_SECONDS, connect=_CONNECT_SECONDS),
            # A redirect could carry the token to another server.
            follow_redirects=False,
            mounts=dict.fromkeys(_ON_THIS_MACHINE),
        )

    def close(self) -> None:
        self._http.close()

    def json(
        self,
        method: str,
        path: str,
        *,
        parameters: Parameters | None = None,
        body: Any = None,
        idempotency_key: str | None = None,
        accepts: str = "application/json",
    ) -> Any:
        """Return the JSON of an answer; None for one without content. Raises AutotuneError."""
        response = self.send(
            method,
            path,
            parameters=parameters,
            body=body,
            idempotency_key=idempotency_key,
            accepts=accepts,
        )
        if not response.content:
            return None
        try:
            return response.json()
        except ValueError:
            raise self._no_server_of_autotune(response) from None

    def send(
        self,
        method: str,
        path: str,
        *,
        parameters: Parameters | None = None,
        body: Any = None,
        idempotency_key: str | None = None,
        accepts: str = "*/*",
        expected: tuple[int, ...] = (),
    ) -> httpx.Response:
        """Return a successful answer, or one with a status in `expected`.

        Raises AutotuneError for every other.
        """
        headers = {"Accept": accepts}
        if idempotency_key is not None:
            headers["Idempotency-Key"] = idempotency_key
        request = self._http.build_request(
            method, f"{API}{path}", params=_given(parameters), json=body, headers=headers
        )
        is_repeatable = method == "GET" or idempotency_key is not None
        waits = list(_WAITS_SECONDS) if is_repeatable else []
        while True:
            try:
                with self._failures():
                    response = self._http.send(request)
                    if response.status_code not in expected:
                        self.check(response)
                return response
            except (ServerUnreachable, StorageUnreachable):
                if not waits:
                    raise
                time.sleep(waits.pop(0))

    @contextmanager
    def stream(
        self, path: str, *, parameters: Parameters, headers: Mapping[str, str], read_seconds: float
    ) -> Iterator[httpx.Response]:
        """Yield an answer that is read as it arrives. Raises AutotuneError, also while reading."""
        with (
            self._failures(),
            self._http.stream(
                "GET",
                f"{API}{path}",
                params=_given(parameters),
                headers={"Accept": "text/event-stream", **headers},
                timeout=httpx.Timeout(read_seconds, connect=_CONNECT_SECONDS),
            ) as response,
        ):
            if not response.is_success:
                response.read()
            self.check(response)
            yield response

    def check(self, response: httpx.Response) -> None:
        """Raise the AutotuneError that an answer means, if it is not a success."""
        if response.is_success:
            return
        problem = _problem_of(response)
        if problem is None:
            if response.status_code in _AWAY:
                raise ServerUnreachable(
                    f"the proxy at {self.url} does not reach the server: it answered "
                    f"{response.status_code}",
                    hint="start the server with autotune serve, and run the same command again",
                )
            raise self._no_server_of_autotune(response)
        raise self._error_of(problem, response.status_code)

    def _error_of(self, problem: Mapping[str, Any], status: int) -> AutotuneError:
        message = str(problem.get("detail") or problem.get("title") or f"status {status}")
        hint = str(problem.get("hint") or "")
        if status == 401:
            what = "does not accept the token" if self._has_token else "asks for a token"
            return InvalidInput(
                f"the server at {self.url} {what}",
                hint=f"set {TOKEN_VARIABLE} to the token that autotune serve printed or autotune "
                f"serve tokens add made, or write it to {tokens_file()}",
            )
        known = _CLASSES.get(str(problem.get("type", "")).rpartition("/")[2])
        if known is None and status in (404, 405, 422) and (other := self._other_version()):
            hint = f"{hint}; {other}" if hint else other
        if known is None:
            known = _class_of(status)
        return known(message, hint=hint)

    @contextmanager
    def _failures(self) -> Iterator[None]:
        """Translate what goes wrong on the way to the server."""
        try:
            yield
        except httpx.TransportError as error:
            raise self._translated(error) from None
        except (httpx.InvalidURL, httpx.DecodingError, UnicodeError) as error:
            raise InvalidInput(
                f"the server at {self.url} cannot be used: {error}",
                hint="write the URL that autotune serve prints",
            ) from None

    def _translated(self, error: httpx.TransportError) -> AutotuneError:
        of_tls = _tls_error_of(error)
        if isinstance(of_tls, ssl.SSLCertVerificationError):
            return InvalidInput(
                f"the certificate of {self.url} cannot be verified: {of_tls.verify_message}",
                hint="name the certificate of the one who signed it: "
                "SSL_CERT_FILE=certificate.pem autotune ...",
            )
        if of_tls is not None:
            plain = self.url.replace("https://", "http://", 1)
            return InvalidInput(
                f"{self.url} does not speak TLS as this program does: {of_tls.reason or of_tls}",
                hint=f"a server without --tls-certificate is {plain}",
            )
        if isinstance(error, httpx.RemoteProtocolError) and self.url.startswith("http://"):
            reason = "it closes the connection without an answer; one with a certificate is https"
        elif isinstance(error, httpx.TimeoutException):
            reason = "it does not answer in time"
        else:
            reason = _reason_of(error)
        return ServerUnreachable(
            f"the server at {self.url} cannot be reached: {reason}",
            hint="start it with autotune serve, or name another one with --server; then run the "
            "same command again",
        )

    def _no_server_of_autotune(self, response: httpx.Response) -> AutotuneError:
        if other := self._other_version():
            return InvalidInput(
                f"the server at {self.url} does not know "
                f"{response.request.method} {response.request.url.path}",
                hint=other,
            )
        kind = response.headers.get("Content-Type", "nothing").partition(";")[0]
        return InvalidInput(
            f"{self.url} is not a server of autotune: it answered {response.status_code} with "
            f"{kind}",
            hint="write the URL that autotune serve prints, for example http://127.0.0.1:8321",
        )

    def _other_version(self) -> str:
        """Return what to do about a server of another version; empty if it has the same one."""
        try:
            answer = self._http.get(f"{API}/health", timeout=_CONNECT_SECONDS).json()
            theirs = str(answer["version"])
        except (httpx.HTTPError, ValueError, KeyError, TypeError):
            return ""
        if theirs == self._version:
            return ""
        return (
            f"the server runs autotune {theirs} and this program is {self._version}: install the "
            "same version"
        )


def _given(parameters: Parameters | None) -> dict[str, Any]:
    return {name: value for name, value in (parameters or {}).items() if value is not None}


def _problem_of(response: httpx.Response) -> Mapping[str, Any] | None:
    """Return the problem details of an answer; None if it has none."""
    if "problem+json" not in response.headers.get("Content-Type", ""):
        return None
    try:
        problem = response.json()
    except ValueError:
        return None
    return problem if isinstance(problem, dict) else None


def _is_error(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, AutotuneError)


_CLASSES: Mapping[str, type[AutotuneError]] = {
    problem_name(error): error for error in vars(errors).values() if _is_error(error)
}


def _class_of(status: int) -> type[AutotuneError]:
    """Return the error for a problem that names none of ours."""
    if status in _AWAY:
        return StorageUnreachable
    if status == 429:
        return ServerUnreachable  # it has too much to do at the moment
    if status >= 500:
        return AutotuneError
    return InvalidInput


def _tls_error_of(error: BaseException) -> ssl.SSLError | None:
    """Return the error of TLS that a failure was caused by; None if it was not."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ssl.SSLError):
            return cause
        cause = cause.__cause__ or cause.__context__
    return None


def _reason_of(error: httpx.TransportError) -> str:
    """Return why a connection failed, as the operating system says it."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.strerror:
            return cause.strerror
        cause = cause.__cause__ or cause.__context__
    return str(error) or type(error).__name__
