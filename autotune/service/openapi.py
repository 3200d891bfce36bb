"""The OpenAPI document of the interface."""

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from autotune.service import problems

_DESCRIPTION = """\
Searches for the fastest configuration that trains a model inside the memory that you have.

Every request but `GET /api/v1/health` needs a token: `Authorization: Bearer TOKEN`. Errors are
problem details (RFC 9457) with the sentence and the hint that the command line prints. Field names
are those of `autotune show --json`. Sizes are bytes, durations seconds, moments ISO 8601 in UTC.
"""


def document_of(app: FastAPI) -> dict[str, Any]:
    """Returns the document, with problems in it and the token that every route but one needs."""
    document = get_openapi(
        title=app.title,
        version=app.version,
        description=_DESCRIPTION,
        routes=app.routes,
        separate_input_output_schemas=False,
    )
    root = app.state.settings.root_path
    if root:
        document["servers"] = [{"url": root}]
    components = document.setdefault("components", {})
    schemas = components.setdefault("schemas", {})
    schemas[problems.SCHEMA_NAME] = dict(problems.SCHEMA)
    for unused in ("HTTPValidationError", "ValidationError"):
        schemas.pop(unused, None)
    components["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
    document["security"] = [{"token": []}]
    document["paths"]["/api/v1/health"]["get"]["security"] = []
    return document
