"""Kills a search at every durable step, which failpoints name, and continues it.

    python studies/reliability/crash_points.py > studies/reliability/crash_points.json

Covers every point on SQLite and on PostgreSQL, at its first visits if a search visits it often. The
search must die there by SIGKILL (a point that is not reached is a failure), the next search must
end, and the checks of `watch.py` must hold before, between and after. No more attempts may be
repeated than the kills have cost. Prints a JSON object whose `violations` must be empty.
"""

import argparse
import json
import math
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from autotune.errors import Stopped
from autotune.spec.confirmation import Confirmation
from autotune.storage.store import StudyStore
from autotune.study.confirmation.request import ConfirmationRequest
from autotune.study.events import Event, TrialBegan
from autotune.study.request import SearchRequest
from autotune.study.search import search
from autotune.system.failpoints import FAILPOINTS
from studies.reliability.watch import Watch, snapshot, violations_at_the_end
from tests.building.old_databases import copy_to_postgres
from tests.quick_study.quick_executor import QuickExecutor
from tests.quick_study.worker import SPACE, predict_beside

STUDY, TRIALS = "points", 5
SCHEMA_1 = Path(__file__).parents[2] / "tests" / "storage" / "data" / "schema-1.db"


@dataclass(frozen=True, kw_only=True)
class Point:
    """Where a search is killed, and what is to happen before it comes there."""

    name: str
    visit: int = 1
    before: str = ""
    """Where a first search is killed."""
    repeated: int = 0
    """How many attempts the kills may cost."""
    lost: int = 0
    is_stopped: bool = False
    old_schema: bool = False
    confirms: bool = False
    """Whether the searches measure their finalists again."""
    beside: int = 0
    """How many predictions run at a time beside each trial, which then takes a while."""

    @property
    def words(self) -> str:
        return f"{self.name}:{self.visit}"


def points(*, visits: int) -> Iterator[Point]:
    """Every crash point, those that a search passes for every trial at their first `visits`."""
    often = {
        "device taken": 0,
        "trial claimed, not committed": 0,
        "trial claimed": 1,
        "forecast kept": 1,  # the baseline's comes with its attempt
        "trial measured": 1,
        "result written, not in place": 1,
        "result spooled": 0,
        "result kept, not committed": 0,
        "result kept": 0,
        "result delivered": 0,
        "confirmation measured": 0,
        "confirmation stored": 0,
    }
    for name in FAILPOINTS:
        if name in often:
            for visit in range(1, visits + 1):
                yield Point(
                    name=name,
                    visit=visit,
                    repeated=often[name],
                    confirms=name.startswith("confirmation"),
                )
        else:
            yield _seldom(name)


def _seldom(name: str) -> Point:
    if name in ("schema backed up", "schema upgraded, not committed"):
        return Point(name=name, old_schema=True)
    if name == "dead attempt given up":
        return Point(name=name, before="trial claimed:2", repeated=1)
    if name == "attempt lost":
        return Point(name=name, lost=1, repeated=1)
    if name == "attempt given back":
        return Point(name=name, is_stopped=True, repeated=1)
    return Point(name=name)


def found_at(point: Point, *, url: str, folder: Path) -> list[str]:
    """Returns the violations when a search is killed there and continued, in `folder` and `url`."""
    if point.old_schema:
        _begin_with_schema_1(url, folder)
    watch, found = Watch(), []
    for words in filter(None, (point.before, point.words)):
        ended = run(
            url,
            folder,
            crash_point=words,
            point=point if words == point.words else None,
            confirms=point.confirms,
            beside=point.beside,
        )
        if ended != -signal.SIGKILL:
            found.append(f"it was not killed at {words} but ended with {ended}")
        look(watch, url)
    confirmed = confirmations(url) if point.confirms else []
    if (ended := run(url, folder, confirms=point.confirms, beside=point.beside)) != 0:
        found.append(f"continued, it ended with {ended}")
    if point.confirms and confirmations(url)[: len(confirmed)] != confirmed:
        found.append("a confirmation was lost or changed")
    last = look(watch, url)
    if last > TRIALS + point.repeated:
        found.append(f"{last - TRIALS} attempts were made again, not {point.repeated}")
    before = os.getcwd()
    os.chdir(folder)
    found += [*watch.violations, *violations_at_the_end(url, STUDY, trials_wanted=TRIALS)]
    os.chdir(before)
    return [f"{point.words}: {one}" for one in found]


def look(watch: Watch, url: str) -> int:
    """How many attempts there are."""
    now = snapshot(url, STUDY)
    if now is not None:
        watch.look(now)
    return 0 if now is None else len(now.attempts)


def confirmations(url: str) -> list[Confirmation]:
    """What was measured again so far."""
    with closing(StudyStore(url, create=False)) as store:
        return store.confirmations(STUDY)


def run(
    url: str,
    folder: Path,
    *,
    crash_point: str = "",
    point: Point | None = None,
    confirms: bool = False,
    beside: int = 0,
) -> int:
    """How a search in a process of its own ended: its exit code, or its signal below zero."""
    pid = os.fork()
    if pid == 0:
        _be_the_search(url, folder, crash_point, point, confirms, beside)
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status)


def _be_the_search(
    url: str,
    folder: Path,
    crash_point: str,
    point: Point | None,
    confirms: bool,
    beside: int,
) -> None:
    exit_code = 70
    try:
        os.chdir(folder)
        os.environ["AUTOTUNE_LOCK_FOLDER"] = str(folder)
        predict_beside(beside)
        if crash_point:
            os.environ["AUTOTUNE_FAILPOINT"] = crash_point
        begin(url, point, confirms=confirms, beside=beside)
        exit_code = 0
    except Stopped:
        exit_code = 143
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(exit_code)


def begin(url: str, point: Point | None = None, *, confirms: bool = False, beside: int = 0) -> None:
    """Begins the study, or continues it."""
    began: list[int] = []

    def listener(event: Event) -> None:
        if isinstance(event, TrialBegan):
            began.append(event.number)

    request = SearchRequest(
        name=STUDY,
        storage=url,
        space=str(SPACE),
        max_mem=80 * 1024**2 if beside else 1024**3,
        device="cpu",
        sampler="ehvi" if beside else "random",
        trials=TRIALS,
        database_wait=10.0,
        fresh=True,
        confirm=confirms,
    )
    is_stopped, lost = (point.is_stopped, point.lost) if point else (False, 0)
    make_executor = partial(
        QuickExecutor, lost=lost, hangs=is_stopped, seconds=0.05 if beside else 0.0
    )
    search(
        request,
        listener=listener,
        should_stop=lambda: is_stopped and bool(began),
        make_executor=make_executor,
    )
    if confirms:
        # As `autotune confirm`: the share of so quick a search is over after one measurement.
        without_limit = ConfirmationRequest(share=0.0, seconds=math.inf)
        search(
            SearchRequest(name=STUDY, storage=url),
            make_executor=make_executor,
            confirmation=without_limit,
        )


def _begin_with_schema_1(url: str, folder: Path) -> None:
    if url.startswith("sqlite"):
        shutil.copy(SCHEMA_1, url.removeprefix("sqlite:///"))
        return
    tables = ("autotune_studies", "autotune_trials", "autotune_predictions")
    copy_to_postgres(SCHEMA_1, url, revision="0001", tables=tables)


def on_sqlite(chosen: list[Point], folder: Path) -> list[str]:
    found = []
    for index, point in enumerate(chosen):
        place = folder / f"sqlite-{index}"
        place.mkdir()
        found += found_at(point, url=f"sqlite:///{place}/points.db", folder=place)
    return found


def on_postgresql(chosen: list[Point], folder: Path) -> list[str]:
    from tests.building.postgres import PostgresServer

    found = []
    with PostgresServer(durable=True) as server:
        for index, point in enumerate(chosen):
            place = folder / f"postgresql-{index}"
            place.mkdir()
            found += found_at(point, url=server.create_database(place.name), folder=place)
    return found


def main() -> int:
    from studies.reliability.kills import about_this_machine

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--visits", type=int, default=5)
    parser.add_argument(
        "--beside", type=int, default=0, help="predictions at a time beside each trial"
    )
    parser.add_argument("--only", action="append", choices=FAILPOINTS, help="one point, repeatable")
    arguments = parser.parse_args()
    said: dict[str, Any] = about_this_machine()
    chosen = [
        replace(point, beside=arguments.beside)
        for point in points(visits=arguments.visits)
        if not arguments.only or point.name in arguments.only
    ]
    said["points"] = [point.words for point in chosen]
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        said["violations"] = {
            "sqlite": on_sqlite(chosen, Path(folder)),
            "postgresql": on_postgresql(chosen, Path(folder)),
        }
    said["seconds"] = round(time.monotonic() - began, 1)
    print(json.dumps(said, indent=2))
    return 1 if any(said["violations"].values()) else 0


if __name__ == "__main__":
    sys.exit(main())
