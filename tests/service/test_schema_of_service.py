"""Whatever is sent to a route, it answers as the OpenAPI document says, and never with a 5xx.

AUTOTUNE_SCHEMA_CASES sets the number of requests a route.
"""

import os

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.strategies import booleans, integers
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from autotune.service.application import create_app
from autotune.service.openapi import document_of
from autotune.service.settings import ServerSettings
from tests.building.listening_service import listening_service
from tests.building.service import BEARER, STAND_IN, TOKEN, write_example

CASES = int(os.environ.get("AUTOTUNE_SCHEMA_CASES", "50"))
CHECKS = (
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
)
STREAM = "/api/v1/events"
QUICK = "tests.building.quick_stand_in"
DOCUMENT = document_of(create_app(ServerSettings(token=TOKEN)))
OPERATIONS = [
    (method.upper(), path)
    for path, methods in DOCUMENT["paths"].items()
    for method in methods
    if path != STREAM
]


@pytest.fixture(scope="module")
def schema(tmp_path_factory):
    storage = f"sqlite:///{tmp_path_factory.mktemp('schema')}/autotune.db"
    write_example(storage)
    with listening_service(storage, search_module=STAND_IN, quick_module=QUICK) as url:
        yield schemathesis.openapi.from_url(f"{url}/api/v1/openapi.json", headers=BEARER)


def test_the_document_is_there_for_programs(get):
    assert get("/api/v1/openapi.json").json() == DOCUMENT


def test_every_route_says_what_it_may_answer():
    for path, methods in DOCUMENT["paths"].items():
        for method, operation in methods.items():
            answers = set(operation["responses"])
            assert {"401", "403", "413", "421", "503"} <= answers, (method, path)
            assert operation["summary"], (method, path)


@pytest.mark.slow
@pytest.mark.parametrize("operation", OPERATIONS, ids=" ".join)
def test_every_request_gets_a_documented_answer(schema, operation):
    method, path = operation
    strategy = schema[path][method].as_strategy()

    @settings(
        max_examples=CASES,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.explicit, Phase.generate],
    )
    @given(case=strategy, is_known=booleans(), number=integers(0, 5))
    def send(case, is_known, number):
        if is_known and method == "GET" and "{name}" in path:
            case.path_parameters["name"] = "quick"
            if "{number}" in path:
                case.path_parameters["number"] = number
        response = case.call(headers=BEARER)
        case.validate_response(response, checks=CHECKS)

    send()


@pytest.mark.slow
def test_every_request_for_the_stream_gets_a_documented_answer(schema):
    """The stream does not end: only its beginning is read."""
    documented = DOCUMENT["paths"][STREAM]["get"]["responses"]

    @settings(
        max_examples=CASES,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.explicit, Phase.generate],
    )
    @given(case=schema[STREAM]["GET"].as_strategy())
    def listen(case):
        sent = case.as_transport_kwargs(base_url=schema.get_base_url(), headers=BEARER)
        with requests.request(**sent, stream=True, timeout=30) as answer:
            assert str(answer.status_code) in documented
            assert answer.status_code < 500
            content_type = answer.headers["Content-Type"].partition(";")[0]
            assert content_type in documented[str(answer.status_code)]["content"]
            if answer.status_code == 200:
                assert next(answer.iter_content(8)).startswith(b": events")

    listen()


@pytest.mark.slow
def test_requests_that_follow_each_other_get_documented_answers(schema):
    """A search that was submitted is looked at, changed, cancelled, continued and removed."""
    machine = schema.exclude(path=STREAM).as_state_machine()

    class Following(machine):  # type: ignore[valid-type]  # made at run time
        def get_call_kwargs(self, case):
            return {"headers": BEARER}

        def validate_response(self, response, case, additional_checks=(), **kwargs):
            case.validate_response(response, checks=CHECKS)

    Following.run(
        settings=settings(
            max_examples=max(CASES // 10, 1),
            stateful_step_count=6,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        )
    )
