"""A pytest plugin that stores each result at once and does not repeat tests that have a result.

`KEPT_TESTS_FILE` names the file, one JSON object a line; no test begins after `KEPT_TESTS_UNTIL`,
seconds since 1970. A test that was begun and has no result is run again once: twice means that it
ends the process or never ends.
"""

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from studies.gpu.outcomes import finished

FILE = Path(os.environ["KEPT_TESTS_FILE"])
UNTIL = float(os.environ["KEPT_TESTS_UNTIL"])
LAST_LINES = 15


def _keep(**line: Any) -> None:
    with FILE.open("a") as file:
        file.write(json.dumps(line) + "\n")
        file.flush()
        os.fsync(file.fileno())


@pytest.hookimpl(trylast=True)  # after -m has chosen
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    known = finished(FILE)
    FILE.with_suffix(".collected.json").write_text(json.dumps([item.nodeid for item in items]))
    left = [item for item in items if item.nodeid not in known]
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in known])
    items[:] = left


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> bool | None:
    """True where no time is left: the test then does not run."""
    if time.time() > UNTIL:
        item.session.shouldstop = "the time is up"
        return True
    _keep(test=item.nodeid, outcome="begun")
    return None


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """A file that cannot be imported, for want of a package perhaps, is a result of its own."""
    if report.failed:
        lines = str(report.longrepr or "").splitlines()[-LAST_LINES:]
        _keep(test=report.nodeid, outcome="not collected", message="\n".join(lines))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Its call, or what went wrong before or after it."""
    if report.when != "call" and report.outcome == "passed":
        return
    lines = str(report.longrepr or "").splitlines()[-LAST_LINES:]
    _keep(
        test=report.nodeid,
        outcome=report.outcome,
        when=report.when,
        seconds=round(report.duration, 2),
        message="\n".join(lines),
    )
