"""Requests to a server: repeated where that is safe, with every failure as one sentence.

A request that changes nothing, or that has an Idempotency-Key, is sent again after a failure of the
network or of the database behind the server: for a moment, or, by a patient connection, for as long
as an outage may last. What the server rejects is raised as the error of
`errors.py` that the server raised, with its message and its hint: the problem details name the
class, as `/problems/unknown-study` for UnknownStudy.
"""

import copy
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from autotune import errors
from autotune.client.address import TOKEN_VARIABLE, tokens_file
from autotune.errors import (
    AutotuneError,
    InvalidInput,
    ServerUnreachable,
    StorageUnreachable,
    causes_of,
    problem_name,
)
from autotune.units import format_size

API = "/api/v1"
GIVE_UP_SECONDS = 300.0
"""For how long a patient connection waits for a server that it has reached."""
_BRIEF_SECONDS = 2.0
"""For how long other failures are waited out: short enough for somebody who mistyped a port."""
_FIRST_WAIT_SECONDS = 0.2
"""Before the first repetition; each further wait is twice as long."""
_LONGEST_WAIT_SECONDS = 10.0
_CONNECT_SECONDS = 10.0
_ANSWER_SECONDS = 120.0
"""Predictions and figures of large studies take this long at most."""
_LONGEST_ANSWER_SECONDS = 600.0
"""From a request to the last byte of its answer."""
_LARGEST_ANSWER_BYTES = 2**28
"""Of an answer as it is unpacked; ten thousand trials are a tenth of it."""
_LARGEST_PROBLEM_BYTES = 2**20
"""Of a stream that the server rejects: a few sentences."""
_VERSION_ANSWER_SECONDS = 10.0
_VERSION_ANSWER_BYTES = 2**16
"""Of the answer that says which version a server has: three short values."""
_AWAY = (502, 503, 504)
"""The database is away, or a proxy does not reach the server."""
_ON_THIS_MACHINE = ("all://localhost", "all://127.0.0.1", "all://[::1]")
"""Hosts that no proxy of the environment leads to."""
Parameters = Mapping[str, Any]


class Connection:
    """A server at a URL, with the token that every request carries."""

    def __init__(self, url: str, *, token: str | None, version: str) -> None:
        self.url = url
        self._on_wait: Callable[[str], None] | None = None
        """Is told that the server is away; None for a connection that is not patient."""
        self._was_reached = False
        self._away_since: float | None = None
        self._wait_seconds = _FIRST_WAIT_SECONDS
        self._version = version
        headers = {"User-Agent": f"autotune/{version}"}
        if token is not None:
            headers["Authorization"] = f"Bearer {token}"
        self._has_token = token is not None
        self._headers = headers
        self._http = self._opened()

    def _opened(self) -> httpx.Client:
        return httpx.Client(
            base_url=self.url,
            headers=self._headers,
            timeout=httpx.Timeout(_ANSWER_SECONDS, connect=_CONNECT_SECONDS),
            # A redirect could carry the token to another server.
            follow_redirects=False,
            mounts=dict.fromkeys(_ON_THIS_MACHINE),
        )

    def patient(self, on_wait: Callable[[str], None]) -> "Connection":
        """Returns another connection to the server, which waits for it for GIVE_UP_SECONDS.

        `on_wait` is told of each outage once.
        """
        other = copy.copy(self)
        other._on_wait = on_wait
        other._http = other._opened()
        return other

    def wait_after(self, error: AutotuneError) -> None:
        """Wait before a request is repeated. Raises its error where the outage lasts too long."""
        now = time.monotonic()
        is_patient = self._on_wait is not None and self._was_reached
        if self._away_since is None:
            self._away_since = now
            if is_patient and self._on_wait is not None:
                self._on_wait(error.message)
        if now - self._away_since > (GIVE_UP_SECONDS if is_patient else _BRIEF_SECONDS):
            self._end_outage()
            raise error
        time.sleep(self._wait_seconds)
        self._wait_seconds = min(2 * self._wait_seconds, _LONGEST_WAIT_SECONDS)

    def _end_outage(self) -> None:
        self._away_since, self._wait_seconds = None, _FIRST_WAIT_SECONDS

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
        """Returns the JSON of an answer; None for one without content. Raises AutotuneError."""
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
        except (ValueError, RecursionError):
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
        """Returns a successful answer, or one with a status in `expected`.

        Raises AutotuneError for every other.
        """
        headers = {"Accept": accepts}
        if idempotency_key is not None:
            headers["Idempotency-Key"] = idempotency_key
        request = self._http.build_request(
            method, f"{API}{path}", params=_given(parameters), json=body, headers=headers
        )
        is_repeatable = method == "GET" or idempotency_key is not None
        while True:
            try:
                with self._failures():
                    response = self._received(
                        request,
                        most_bytes=_LARGEST_ANSWER_BYTES,
                        most_seconds=_LONGEST_ANSWER_SECONDS,
                    )
                    if response.status_code not in expected:
                        self.check(response)
            except (ServerUnreachable, StorageUnreachable) as error:
                if not is_repeatable:
                    raise
                self.wait_after(error)
            else:
                self._was_reached = True
                self._end_outage()
                return response

    def _received(
        self, request: httpx.Request, *, most_bytes: int, most_seconds: float
    ) -> httpx.Response:
        """Returns a whole answer. Raises InvalidInput for one without end."""
        is_late = threading.Event()

        def end() -> None:
            is_late.set()
            self._http.close()

        # The library does not return from headers without end, nor from content that unpacks to
        # nothing. Closing its sockets ends both.
        watch = threading.Timer(most_seconds, end)
        watch.daemon = True
        watch.start()
        try:
            response = self._http.send(request, stream=True)
            try:
                return self._read(response, most_bytes=most_bytes, most_seconds=most_seconds)
            finally:
                response.close()
        except (httpx.HTTPError, RuntimeError):
            if not is_late.is_set():
                raise
            self._http = self._opened()
            raise InvalidInput(
                f"the answer of {self.url} has not ended after {most_seconds:g} s",
                hint="check that this is the URL of an autotune server",
            ) from None
        finally:
            watch.cancel()

    def _read(
        self, response: httpx.Response, *, most_bytes: int, most_seconds: float
    ) -> httpx.Response:
        """Returns an answer with its content, which only began to arrive.

        Raises InvalidInput for one without end.
        """
        end = time.monotonic() + most_seconds
        content = bytearray()
        for piece in response.iter_bytes():
            content += piece
            if len(content) > most_bytes or time.monotonic() > end:
                raise InvalidInput(
                    f"the answer of {self.url} does not end: {format_size(len(content))} have "
                    "arrived",
                    hint="check that this is the URL of an autotune server",
                )
        headers = httpx.Headers(response.headers)
        for name in ("content-encoding", "content-length", "transfer-encoding"):
            headers.pop(name, None)  # it is unpacked
        return httpx.Response(
            response.status_code, headers=headers, content=bytes(content), request=response.request
        )

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
                problem = self._read(
                    response,
                    most_bytes=_LARGEST_PROBLEM_BYTES,
                    most_seconds=_LONGEST_ANSWER_SECONDS,
                )
                self.check(problem)
            self._was_reached = True
            self._end_outage()
            yield response

    def download(self, path: str, file: Path, *, size_bytes: int) -> None:
        """Write an answer of a known size to a file. Raises AutotuneError and OSError."""
        received_bytes = 0
        headers = {"Accept": "*/*", "Accept-Encoding": "identity"}
        with (
            file.open("wb") as written,
            self.stream(
                path, parameters={}, headers=headers, read_seconds=_ANSWER_SECONDS
            ) as response,
        ):
            for piece in response.iter_raw():
                received_bytes += len(piece)
                if received_bytes > size_bytes:
                    break
                written.write(piece)
        if received_bytes != size_bytes:
            raise InvalidInput(
                f"the file {file.name} of {self.url} was to have {format_size(size_bytes)}, and "
                f"{format_size(received_bytes)} have arrived",
                hint="run the same command again",
            )

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
        self._was_reached = True
        texts = (str(problem.get(part) or "").strip() for part in ("detail", "title"))
        message = next(filter(None, texts), f"the server answers with status {status}")
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
        """Returns what to do about a server of another version; empty if it has the same one."""
        try:
            request = self._http.build_request("GET", f"{API}/health", timeout=_CONNECT_SECONDS)
            answer = self._received(
                request, most_bytes=_VERSION_ANSWER_BYTES, most_seconds=_VERSION_ANSWER_SECONDS
            )
            theirs = str(answer.json()["version"])
        except (httpx.HTTPError, InvalidInput, ValueError, LookupError, TypeError, RecursionError):
            return ""
        if theirs == self._version:
            return ""
        return (
            f"the server runs autotune {theirs} and this program is {self._version}: install the "
            "same version"
        )


@contextmanager
def reading_answer() -> Iterator[None]:
    """Translates what goes wrong while an answer is read, as one of another version may be.

    Raises InvalidInput.
    """
    try:
        yield
    except AutotuneError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise _unreadable_answer(f"{error!r:.300}") from error
    except RecursionError as error:
        raise _unreadable_answer("it is nested too deeply") from error


def _unreadable_answer(why: str) -> InvalidInput:
    return InvalidInput(
        f"the server's answer is not one that this version of autotune can read: {why}",
        hint="install the version of the server; autotune --version says that of this program",
    )


def _given(parameters: Parameters | None) -> dict[str, Any]:
    return {name: value for name, value in (parameters or {}).items() if value is not None}


def _problem_of(response: httpx.Response) -> Mapping[str, Any] | None:
    """Returns the problem details of an answer; None if it has none."""
    if "problem+json" not in response.headers.get("Content-Type", ""):
        return None
    try:
        problem = response.json()
    except (ValueError, RecursionError):
        return None
    return problem if isinstance(problem, dict) else None


def _is_error(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, AutotuneError)


_CLASSES: Mapping[str, type[AutotuneError]] = {
    problem_name(error): error for error in vars(errors).values() if _is_error(error)
}


def _class_of(status: int) -> type[AutotuneError]:
    """Returns the error for a problem that names none of ours."""
    if status in _AWAY:
        return StorageUnreachable
    if status == 429:
        return ServerUnreachable  # it has too much to do at the moment
    if status >= 500:
        return AutotuneError
    return InvalidInput


def _tls_error_of(error: BaseException) -> ssl.SSLError | None:
    """Returns the error of TLS that a failure was caused by; None if it was not."""
    for cause in causes_of(error):
        if isinstance(cause, ssl.SSLError):
            return cause
    return None


def _reason_of(error: httpx.TransportError) -> str:
    """Returns why a connection failed, as the operating system says it."""
    for cause in causes_of(error):
        if isinstance(cause, OSError) and cause.strerror:
            return cause.strerror
    return str(error) or type(error).__name__
