"""Flows for tests: functions as flows, and flows as functions."""

from collections.abc import Callable
from functools import wraps
from inspect import isgenerator
from typing import Any

from autotune.execution.flow import Flow, result_of


def as_flow(function: Callable[..., Any]) -> Callable[..., Flow[Any]]:
    """Returns what `function` does, as a flow that never waits."""

    def flow(*arguments: Any, **options: Any) -> Flow[Any]:
        return function(*arguments, **options)
        yield

    return flow


class AtOnce:
    """An object whose methods that are flows return their results."""

    def __init__(self, of: Any) -> None:
        self._of = of

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._of, name)

        @wraps(method)
        def call(*arguments: Any, **options: Any) -> Any:
            found = method(*arguments, **options)
            return result_of(found) if isgenerator(found) else found

        return call
