"""The reference of the interface, from its OpenAPI document, as plain values for a page."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI

from autotune.service.openapi import document_of

_METHODS = ("get", "post", "patch", "put", "delete")


@dataclass(frozen=True, kw_only=True)
class Parameter:
    name: str
    place: str
    text: str


@dataclass(frozen=True, kw_only=True)
class Example:
    title: str
    text: str


@dataclass(frozen=True, kw_only=True)
class RouteText:
    """One method of one path."""

    id: str
    method: str
    path: str
    summary: str
    description: str
    parameters: tuple[Parameter, ...]
    examples: tuple[Example, ...]
    answers: tuple[tuple[str, str], ...]


@dataclass(frozen=True, kw_only=True)
class RouteGroup:
    title: str
    routes: tuple[RouteText, ...]


def reference_of(app: FastAPI) -> tuple[RouteGroup, ...]:
    """Return the routes of the interface in groups, in the order of the document."""
    document = document_of(app)
    groups: dict[str, list[RouteText]] = {}
    for path, methods in document["paths"].items():
        for method in _METHODS:
            if method not in methods:
                continue
            route = methods[method]
            title = (route.get("tags") or ["other"])[0]
            groups.setdefault(title, []).append(_route(path, method, route))
    return tuple(
        RouteGroup(title=title.capitalize(), routes=tuple(routes))
        for title, routes in groups.items()
    )


def _route(path: str, method: str, route: Mapping[str, Any]) -> RouteText:
    return RouteText(
        id=f"{method}{path}".replace("/", "-").replace("{", "").replace("}", ""),
        method=method.upper(),
        path=path,
        summary=route.get("summary", ""),
        description=route.get("description", ""),
        parameters=tuple(_parameters(route)),
        examples=tuple(_examples(route)),
        answers=tuple(
            (status, answer.get("description", "").rstrip("."))
            for status, answer in sorted(route["responses"].items())
        ),
    )


def _parameters(route: Mapping[str, Any]) -> Iterator[Parameter]:
    for parameter in route.get("parameters", ()):
        schema = parameter.get("schema", {})
        text = parameter.get("description") or schema.get("description") or ""
        kinds = [schema, *schema.get("anyOf", ())]
        choices = [str(choice) for kind in kinds for choice in kind.get("enum", ())]
        if choices:
            text = f"{text} One of {', '.join(choices)}.".strip()
        if schema.get("default") is not None:
            text = f"{text} Default: {schema['default']}.".strip()
        yield Parameter(name=parameter["name"], place=parameter["in"], text=text)


def _examples(route: Mapping[str, Any]) -> Iterator[Example]:
    for content in route.get("requestBody", {}).get("content", {}).values():
        yield from _of_content("Request", content)
    for status, answer in sorted(route["responses"].items()):
        if not status.startswith("2"):
            continue
        for content in answer.get("content", {}).values():
            yield from _of_content(f"Answer {status}", content)


def _of_content(title: str, content: Mapping[str, Any]) -> Iterator[Example]:
    if "example" in content:
        yield Example(title=title, text=_json(content["example"]))
    for name, example in content.get("examples", {}).items():
        yield Example(title=f"{title}: {name}", text=_json(example.get("value")))


def _json(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, indent=2, ensure_ascii=False)
