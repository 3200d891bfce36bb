"""Invariants of a study at every moment, checked in the database and the work folder.

`Watch.look` compares the database with its earlier state and with the result that each trial must
have (`stand_in.measurement_of`); `violations_at_the_end` checks that nothing is left over.
"""

import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from sqlalchemy import Connection, inspect, select
from sqlalchemy.engine import make_url

from autotune.spec.attempt import MAX_RETRIES
from autotune.spec.config import TrainingConfig
from autotune.storage.database import Database, sqlite_file
from autotune.storage.identity import find_work_folder
from autotune.storage.tables import ATTEMPTS, CONFIRMATIONS, STUDIES, TRIALS
from autotune.study.workers.coordinator import WORKERS
from autotune.study.workers.outbox import OUTBOX_FOLDER
from tests.quick_study.stand_in import measurement_of

JUDGED_BY_THE_STUDY = ("parity", "parity_message")
"""What the study adds to what the trial's process said."""

_NEXT_STATES = {
    "running": {"running", "finished", "lost", "forgiven", "given_up", "given_back", "late"},
    "finished": {"finished"},
    "lost": {"lost", "forgiven", "late"},
    "forgiven": {"forgiven", "late"},
    "given_up": {"given_up", "late"},
    "given_back": {"given_back", "late"},
    "late": {"late"},
}


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """One moment of a study."""

    revision: int
    trials: tuple[Mapping[str, Any], ...]
    attempts: tuple[Mapping[str, Any], ...]
    confirmations: tuple[Mapping[str, Any], ...]

    @property
    def finished(self) -> int:
        return sum(trial["finished_at"] is not None for trial in self.trials)

    @property
    def states(self) -> Counter[str]:
        return Counter(attempt["state"] for attempt in self.attempts)

    @property
    def retries(self) -> int:
        return len(self.attempts) - len(self.trials)


def snapshot(url: str, study: str) -> Snapshot | None:
    """None while there is no such study."""
    file = sqlite_file(url)
    if file is not None and not file.exists():
        return None
    database = Database(url, create=True)
    try:
        if not inspect(database.engine).has_table(
            CONFIRMATIONS.name
        ):  # or those of an older autotune
            return None
        with database.engine.connect() as connection:
            _begin(connection)
            row = connection.execute(select(STUDIES).where(STUDIES.c.name == study)).one_or_none()
            if row is None:
                return None
            trials = connection.execute(
                select(TRIALS).where(TRIALS.c.study_id == row.id).order_by(TRIALS.c.number)
            )
            attempts = (
                select(ATTEMPTS)
                .where(
                    ATTEMPTS.c.trial_id.in_(select(TRIALS.c.id).where(TRIALS.c.study_id == row.id))
                )
                .order_by(ATTEMPTS.c.trial_id, ATTEMPTS.c.ordinal)
            )
            confirmations = (
                select(CONFIRMATIONS)
                .where(CONFIRMATIONS.c.study_id == row.id)
                .order_by(CONFIRMATIONS.c.ordinal)
            )
            return Snapshot(
                revision=row.revision,
                trials=tuple(trials.mappings()),
                attempts=tuple(connection.execute(attempts).mappings()),
                confirmations=tuple(
                    dict(row) for row in connection.execute(confirmations).mappings()
                ),
            )
    finally:
        database.close()


def _begin(connection: Connection) -> None:
    """All that follows sees the same moment."""
    if connection.dialect.name == "sqlite":
        connection.exec_driver_sql("BEGIN")
    else:
        connection.exec_driver_sql("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")


@dataclass(kw_only=True)
class Watch:
    """What was seen of one study so far."""

    last: Snapshot | None = None
    looks: int = 0
    violations: list[str] = field(default_factory=list)

    def look(self, now: Snapshot) -> None:
        self.looks += 1
        found = [*_of_one_moment(now), *(_of_two_moments(self.last, now) if self.last else ())]
        self.violations += [one for one in found if one not in self.violations]
        self.last = now


def _of_one_moment(now: Snapshot) -> Iterator[str]:
    numbers = [trial["number"] for trial in now.trials]
    if numbers != list(range(len(numbers))):
        yield f"numbers are not 0, 1, 2, ...: {numbers}"
    of_trial: dict[int, list[Mapping[str, Any]]] = defaultdict(list)
    for attempt in now.attempts:
        of_trial[attempt["trial_id"]].append(attempt)
    fingerprints = Counter(TrainingConfig(**trial["config"]).fingerprint for trial in now.trials)
    yield from (
        f"configuration {one} has {count} numbers"
        for one, count in fingerprints.items()
        if count > 1
    )
    for trial in now.trials:
        yield from _of_trial(trial, of_trial[trial["id"]])


def _of_trial(trial: Mapping[str, Any], attempts: list[Mapping[str, Any]]) -> Iterator[str]:
    name, states = f"trial {trial['number']}", Counter(attempt["state"] for attempt in attempts)
    if [attempt["ordinal"] for attempt in attempts] != list(range(1, len(attempts) + 1)):
        yield f"{name}: ordinals are {[attempt['ordinal'] for attempt in attempts]}"
    has_result = trial["finished_at"] is not None
    if has_result != (trial["measurement"] is not None) or states["finished"] != has_result:
        yield f"{name}: finished {has_result}, attempts {dict(states)}"
    if states["running"] + has_result > 1:
        yield f"{name}: {states['running']} attempts run, result {has_result}"
    if states["lost"] > MAX_RETRIES + 1:
        yield f"{name}: {states['lost']} attempts were lost"
    if has_result and not _is_right(trial["config"], trial["measurement"]):
        yield f"{name}: says {json.dumps(trial['measurement'])}"
    for attempt in attempts:
        if (attempt["state"] == "late") != (attempt["measurement"] is not None):
            yield f"{name}: a late result is not with its attempt"
        elif attempt["state"] == "late" and not _is_right(trial["config"], attempt["measurement"]):
            yield f"{name}: a late attempt says {json.dumps(attempt['measurement'])}"


def _is_right(config: Mapping[str, Any], measurement: Mapping[str, Any]) -> bool:
    """Exactly what the stand-in measures; both have been through JSON.

    A plain training with another micro batch has the perplexity of the first one.
    """
    expected = json.loads(json.dumps(asdict(measurement_of(TrainingConfig(**config)))))
    known = dict.fromkeys(JUDGED_BY_THE_STUDY)
    if (measurement["perplexity_source"] or {}).get("kind") == "shared":
        known |= {name: expected[name] for name in ("perplexity", "perplexity_source")}
    return {**measurement, **known} == expected


def _of_two_moments(before: Snapshot, now: Snapshot) -> Iterator[str]:
    if now.revision < before.revision:
        yield f"the revision went back from {before.revision} to {now.revision}"
    trials = {trial["id"]: trial for trial in now.trials}
    for old in before.trials:
        new = trials.get(old["id"])
        if new is None or any(
            new[name] != old[name] for name in ("number", "fingerprint", "config")
        ):
            yield f"trial {old['number']} has gone or become another"
        elif old["finished_at"] is not None and dict(new) != dict(old):
            yield f"the result of trial {old['number']} has changed from {dict(old)} to {dict(new)}"
    if now.confirmations[: len(before.confirmations)] != before.confirmations:
        yield "a confirmation has gone or become another"
    attempts = {attempt["id"]: attempt for attempt in now.attempts}
    for old in before.attempts:
        new = attempts.get(old["id"])
        if new is None or new["state"] not in _NEXT_STATES[old["state"]]:
            yield f"attempt {old['id']} went from {old['state']} to {new and new['state']}"


def violations_at_the_end(url: str, study: str, *, trials_wanted: int) -> list[str]:
    """Of a study that is complete, after the last of its processes has ended.

    Run where the study was run.
    """
    now = snapshot(url, study)
    if now is None:
        return [f"there is no study {study!r}"]
    found = []
    if (len(now.trials), now.finished) != (trials_wanted, trials_wanted):
        found.append(f"{len(now.trials)} trials, {now.finished} with a result, of {trials_wanted}")
    if now.states["running"]:
        found.append(f"{now.states['running']} attempts run for ever")
    work = find_work_folder(url)
    left = [
        *(work / study / OUTBOX_FOLDER).glob("*"),
        *(work / study / WORKERS).glob("*"),
        *work.glob(".waiting-*"),
    ]
    found += [f"left over: {file.relative_to(work)}" for file in left]
    if message := broken(url):
        found.append(f"the database is damaged: {message}")
    return found


def broken(url: str) -> str:
    """Returns the errors of SQLite's integrity check; empty without errors and for PostgreSQL."""
    if make_url(url).get_backend_name() == "sqlite":
        database = Database(url, create=True)
        try:
            with database.reading() as connection:
                said = [row[0] for row in connection.exec_driver_sql("PRAGMA integrity_check")]
                return "" if said == ["ok"] else "; ".join(map(str, said))
        finally:
            database.close()
    return ""
