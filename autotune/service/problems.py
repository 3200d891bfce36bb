"""Turns errors into problem details (RFC 9457), with the sentence and hint of the command line.

A browser that opens a page gets the same as a small page.
"""

import copy
import logging
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import HTMLResponse, Response

from autotune.errors import (
    AutotuneError,
    InvalidInput,
    NotYours,
    PredictionImpossible,
    PreparationFailed,
    Stopped,
    StorageUnavailable,
    StudyMismatch,
    TrialLost,
    UnknownSearch,
    UnknownStudy,
    problem_name,
)
from autotune.printable import printable
from autotune.service.answers import AsciiResponse
from autotune.service.pages.field_names import LABELS_OF_ACTIONS, in_fields
from autotune.service.plain_page import plain_page
from autotune.service.quick import TooBusy
from autotune.storage.hidden_url import HiddenUrl, told_to_others

_LOG = logging.getLogger("autotune.service")

MEDIA_TYPE = "application/problem+json"
SCHEMA_NAME = "Problem"

SENT_BY, PAGE = "X-Requested-With", "page"
"""The header, and its value, by which the script of a page says what it is."""
_DOCUMENT = "/api/v1/openapi.json"
_RETRY_AFTER_SECONDS = 2

_STATUS_OF: Sequence[tuple[type[AutotuneError], int]] = (
    # The first that fits counts: a class stands before those that it inherits from.
    (UnknownStudy, 404),
    (UnknownSearch, 404),
    (NotYours, 403),
    (StudyMismatch, 409),
    (InvalidInput, 422),
    (TooBusy, 429),
    (PredictionImpossible, 422),
    (PreparationFailed, 422),
    (StorageUnavailable, 503),
    (TrialLost, 503),
    (Stopped, 503),
)

_TYPE_OF: Mapping[int, str] = {
    400: "malformed-request",
    401: "token-needed",
    403: "not-allowed",
    404: "not-found",
    405: "method-not-allowed",
    409: "conflict",
    408: "body-too-slow",
    413: "body-too-large",
    421: "foreign-host",
    422: "invalid-input",
    429: "too-busy",
    500: "internal-error",
    503: "unavailable",
}
"""The last part of a problem's type, by its status."""

_DESCRIPTION_OF: Mapping[int, str] = {
    400: "The request cannot be read.",
    401: "There is no token, or a wrong one.",
    403: "The token may not do this, or the page of another server sends the request.",
    404: "There is no such thing.",
    405: "The address does not take this method.",
    409: "The present state does not allow it.",
    408: "The body of the request takes too long to arrive.",
    413: "The body of the request is too large.",
    421: "The Host header names another server.",
    422: "A value is invalid.",
    429: "Too many questions wait for an answer.",
    500: "An error inside of the server; its log has more.",
    503: "The database cannot be reached at the moment.",
}

OF_GATE = (400, 401, 403, 408, 413, 421, 500, 503)
"""What the gate may answer to any request."""


class Problem(HTTPException):
    """An answer that is an error: `detail` is one sentence, `hint` the way out.

    `extra` are further members of the JSON object.
    """

    def __init__(
        self,
        status: int,
        detail: str,
        *,
        hint: str = "",
        kind: str = "",
        headers: Mapping[str, str] | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(status, detail, headers=None if headers is None else dict(headers))
        self.hint = hint
        self.kind = kind or _TYPE_OF.get(status, "")
        self.extra = dict(extra or {})

    def to_dict(self) -> dict[str, Any]:
        """Returns the JSON object."""
        shown = {
            "type": f"/problems/{self.kind}" if self.kind else "about:blank",
            "title": _title(self.status_code),
            "status": self.status_code,
            "detail": self.detail,
        }
        if self.hint:
            shown["hint"] = self.hint
        return {**shown, **self.extra}


def problem_of(error: AutotuneError) -> Problem:
    """Returns the problem that an error of autotune is."""
    status = 500
    for kind, of_kind in _STATUS_OF:
        if isinstance(error, kind):
            status = of_kind
            break
    message, hint = told_to_others(error)
    if message != error.message:
        _LOG.warning("%s: %s (%s)", message, printable(error.message), printable(error.hint))
    headers = {"Retry-After": str(_RETRY_AFTER_SECONDS)} if status in (429, 503) else None
    name = problem_name(type(error))
    return Problem(status, message, hint=hint, kind=name, headers=headers)


def answer(request: Request, problem: Problem) -> Response:
    """Returns the response: JSON, or a page where a browser navigates to one.

    No URL of the server's database is in it. For the script of a page it has names of fields in
    place of options.
    """
    hidden: HiddenUrl = request.app.state.hidden_url
    if request.headers.get(SENT_BY) == PAGE:
        problem = copy.copy(problem)  # it may be answered again, to a program
        problem.detail = in_fields(problem.detail, here=LABELS_OF_ACTIONS)
        is_of_programs = _DOCUMENT in problem.hint
        problem.hint = "" if is_of_programs else in_fields(problem.hint, here=LABELS_OF_ACTIONS)
    if is_navigation(request):
        text = plain_page(
            title=_title(problem.status_code),
            sentence=hidden.without(problem.detail),
            hint=hidden.without(problem.hint),
            root=request.app.state.settings.root_path,
            caller=getattr(request.state, "caller", None),
        )
        return HTMLResponse(text, problem.status_code, headers=problem.headers)
    return AsciiResponse(
        hidden.without_in(problem.to_dict()),
        problem.status_code,
        headers=problem.headers,
        media_type=MEDIA_TYPE,
    )


def is_navigation(request: Request) -> bool:
    """Whether a browser opens a page with this request, as opposed to a program or a script."""
    accepts_html = "text/html" in request.headers.get("accept", "")
    return accepts_html and not request.url.path.startswith("/api/")


def add_handlers(app: FastAPI) -> None:
    """Makes the app answer every error with problem details."""

    async def of_autotune(request: Request, error: Exception) -> Response:
        assert isinstance(error, AutotuneError)
        return answer(request, problem_of(error))

    async def of_http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return answer(request, _from_http(request, error))

    async def of_validation(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return answer(request, _from_validation(error))

    app.add_exception_handler(AutotuneError, of_autotune)
    app.add_exception_handler(HTTPException, of_http)
    app.add_exception_handler(RequestValidationError, of_validation)


def documented(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Returns the `responses` of a route: these problems and those of the gate."""
    content = {MEDIA_TYPE: {"schema": {"$ref": f"#/components/schemas/{SCHEMA_NAME}"}}}
    return {
        status: {"description": _DESCRIPTION_OF[status], "content": content}
        for status in sorted({*statuses, *OF_GATE})
    }


SCHEMA: Mapping[str, Any] = {
    "title": SCHEMA_NAME,
    "description": "Problem details of RFC 9457.",
    "type": "object",
    "required": ["type", "title", "status", "detail"],
    "properties": {
        "type": {"type": "string", "description": "What kind of problem, as a relative URI."},
        "title": {"type": "string", "description": "The name of the status."},
        "status": {"type": "integer"},
        "detail": {"type": "string", "description": "What is wrong, in one sentence."},
        "hint": {"type": "string", "description": "What to do about it."},
        "errors": {
            "type": "array",
            "description": "Every value that is invalid.",
            "items": {
                "type": "object",
                "required": ["where", "message"],
                "properties": {"where": {"type": "string"}, "message": {"type": "string"}},
            },
        },
    },
    "example": {
        "type": "/problems/not-found",
        "title": "Not Found",
        "status": 404,
        "detail": "there is no study 'quik' in the database of the server",
        "hint": "did you mean 'quick'? otherwise there is quick",
    },
}
"""The schema of a problem in the OpenAPI document."""


def _title(status: int) -> str:
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return "Error"


def _from_http(request: Request, error: HTTPException) -> Problem:
    """Returns the problem of an error that the framework raises."""
    if isinstance(error, Problem):
        return error
    detail, hint = str(error.detail), ""
    path = request.scope.get("path", "")
    if error.status_code == 404:
        detail = f"there is nothing at {path!r}"
        if not is_navigation(request):
            hint = f"see {_DOCUMENT} for what there is"
    elif error.status_code == 405:
        detail = f"{path!r} does not take {request.method}"
        allowed = (error.headers or {}).get("Allow", "")
        hint = f"use {allowed}" if allowed else ""
    elif error.status_code == 400:
        detail, hint = "the body of the request cannot be read", "send JSON in UTF-8"
    return Problem(error.status_code, detail, hint=hint, headers=error.headers)


def _from_validation(error: RequestValidationError) -> Problem:
    """Returns the problem of values that are of a wrong type or out of range."""
    errors = []
    for entry in error.errors():
        where = ".".join(str(part) for part in entry["loc"])
        errors.append({"where": where, "message": str(entry["msg"])})
    first = errors[0]
    detail = f"Invalid {first['where']}: {first['message']}"
    if len(errors) > 1:
        detail += f" (and {len(errors) - 1} more)"
    return Problem(422, detail, hint=f"see {_DOCUMENT}", extra={"errors": errors})
