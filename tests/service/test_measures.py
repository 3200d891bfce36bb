"""What Prometheus reads, by the rules of its text format."""

import re

import pytest

from autotune.service.metrics import HttpMetrics, Metric, lines_of
from tests.building.service import BEARER, serving, write_example
from tests.service.test_url_of_database import rename_tables

LINE = re.compile(r'[a-z_]+({([a-z]+="([^"\\\n]|\\.)*",?)*})? (\+Inf|-?[0-9.e+-]+)')


@pytest.fixture(scope="module")
def measured_text(tmp_path_factory):
    url = f"sqlite:///{tmp_path_factory.mktemp('measures')}/a.db"
    write_example(url)
    with serving(url) as client:
        client.headers.update(BEARER)
        for path in ("studies/quick", "studies/quick/trials/1", "studies/unknown", "nothing"):
            client.get(f"/api/v1/{path}")
        yield client.get("/metrics").text


def test_every_line_has_the_format(measured_text):
    for line in measured_text.splitlines():
        assert line.startswith("# ") or LINE.fullmatch(line), line
    assert measured_text.endswith("\n")


def test_every_metric_has_its_help_and_type_before_its_values(measured_text):
    names = re.findall(r"# TYPE (\w+) \w+", measured_text)
    assert names == re.findall(r"# HELP (\w+) .+", measured_text)
    assert len(names) == len(set(names))
    assert {
        "autotune_info",
        "autotune_leader",
        "autotune_database_up",
        "autotune_disk_free_bytes",
        "autotune_disk_full",
        "autotune_searches",
        "autotune_group_busy",
        "autotune_trials_total",
        "autotune_events_total",
        "autotune_streams",
        "autotune_http_requests_total",
        "autotune_http_request_seconds",
    } == set(names)


@pytest.mark.parametrize(
    "line",
    [
        'autotune_trials_total{outcome="ok"} 3',
        'autotune_trials_total{outcome="crashed"} 1',
        'autotune_searches{state="queued"} 0',
        "autotune_database_up 1",
        "autotune_disk_full 0",
        'autotune_http_requests_total{route="/api/v1/studies/{name}",method="GET",status="200"} 1',
        'autotune_http_requests_total{route="/api/v1/studies/{name}",method="GET",status="404"} 1',
        'autotune_http_requests_total{route="other",method="GET",status="404"} 1',
    ],
)
def test_what_was_done_is_counted_by_the_route_and_not_by_names(measured_text, line):
    assert line in measured_text.splitlines()


def test_without_the_database_what_else_is_known_is_said(tmp_path):
    file = tmp_path / "a.db"
    with serving(f"sqlite:///{file}") as client:
        token = client.app.state.service.tokens.add("prometheus", role="reader")
        client.headers["Authorization"] = f"Bearer {token}"
        assert "autotune_database_up 1" in client.get("/metrics").text.splitlines()
        rename_tables(file)
        answer = client.get("/metrics")
        assert answer.status_code == 200
        lines = answer.text.splitlines()
        assert "autotune_database_up 0" in lines
        assert any(line.startswith("autotune_disk_free_bytes ") for line in lines)
        assert "autotune_trials_total" not in answer.text
        stranger = client.get("/metrics", headers={"Authorization": "Bearer wrong"})
        assert stranger.status_code == 503


def test_a_full_disk_is_said_and_takes_no_server_away(tmp_path, monkeypatch):
    for route in ("health", "measures"):
        monkeypatch.setattr(f"autotune.service.routes.{route}.LEAST_FREE_BYTES", 2**62)
    with serving(f"sqlite:///{tmp_path}/a.db") as client:
        answer = client.get("/api/v1/health")
        assert (answer.status_code, answer.json()["status"]) == (200, "degraded")
        assert (answer.json()["database"], answer.json()["disk"]) == ("ok", "full")
        assert "autotune_disk_full 1" in client.get("/metrics", headers=BEARER).text.splitlines()


def test_the_buckets_of_a_histogram_count_all_that_are_faster():
    metrics = HttpMetrics()
    for seconds in (0.001, 0.03, 0.03, 99.0):
        metrics.count(route="/a", method="GET", status=200, seconds=seconds)
    lines = list(metrics.lines())
    assert 'autotune_http_request_seconds_bucket{route="/a",le="0.005"} 1' in lines
    assert 'autotune_http_request_seconds_bucket{route="/a",le="0.05"} 3' in lines
    assert 'autotune_http_request_seconds_bucket{route="/a",le="10"} 3' in lines
    assert 'autotune_http_request_seconds_bucket{route="/a",le="+Inf"} 4' in lines
    assert 'autotune_http_request_seconds_count{route="/a"} 4' in lines


def test_a_label_cannot_end_its_line():
    metric = Metric(name="a", help="b", kind="gauge", values={(("c", 'd"\n\\'),): 1})
    assert list(lines_of(metric))[-1] == 'a{c="d\\"\\n\\\\"} 1'


def test_odd_methods_make_no_further_labels():
    metrics = HttpMetrics()
    for method in ("BREW", "X" * 50):
        metrics.count(route="/a", method=method, status=405, seconds=0.1)
    assert 'autotune_http_requests_total{route="/a",method="other",status="405"} 2' in list(
        metrics.lines()
    )
