"""Checks that a search killed at trial k and continued suggests what an uninterrupted one does.

    python studies/reliability/resume.py > studies/reliability/resume.json

Recorded results replace measurements (`studies/search_efficiency/`), so that two searches differ in
nothing else. Each search of 20 trials runs in a separate process, which is killed at the k-th visit
of a failpoint, for every k from 1 to 19; another process continues it. Prints a JSON object whose
`differences` must be empty.
"""

import argparse
import json
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from autotune.execution.trial_options import TrialOptions
from autotune.spec.study import SAMPLERS
from autotune.storage.store import StudyStore
from autotune.study.prediction.prediction_cache import PredictionCache
from autotune.study.running.loop import StudySession
from autotune.study.running.running_study import RunningStudy
from autotune.study.workers.coordinator import Coordinator
from studies.search_efficiency.replay import cap_of, the_table
from studies.search_efficiency.table import ReplayExecutor

TRIALS = 20
FAILPOINTS = ("trial claimed", "result kept")


def suggestions(
    sampler: str, folder: Path, *, kill_at: Iterable[str] = (), seed: int = 0
) -> list[str]:
    """Returns the fingerprints of the trials of a search that is killed at each of `kill_at`."""
    folder.mkdir(parents=True)
    for crash_point in (*kill_at, ""):
        ended = _run(sampler, folder, crash_point, seed)
        if ended != (-signal.SIGKILL if crash_point else 0):
            raise RuntimeError(
                f"the search with {sampler}, to be killed at {crash_point!r}, ended with {ended}"
            )
    store = StudyStore(_url(folder))
    try:
        [name] = store.names()
        return [record.config.fingerprint for record in store.trials(name) if record.is_finished]
    finally:
        store.close()


def _run(sampler: str, folder: Path, crash_point: str, seed: int) -> int:
    """In a process of its own; its exit code, or its signal below zero."""
    pid = os.fork()
    if pid == 0:
        exit_code = 70
        try:
            if crash_point:
                os.environ["AUTOTUNE_FAILPOINT"] = crash_point
            search(sampler, folder, seed=seed)
            exit_code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(exit_code)
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status)


def search(sampler: str, folder: Path, *, seed: int = 0) -> None:
    """Begins the study in `folder`, or continues it."""
    table = the_table()
    definition = table.definition(cap_bytes=cap_of("middle"), sampler=sampler, seed=seed)
    store = StudyStore(_url(folder), create=True)
    if not store.has_study(definition.name):
        store.create_study(definition, trials_wanted=TRIALS)
    executor = ReplayExecutor(table, seed=seed)
    with Coordinator(definition, store=store, folder=folder, listener=lambda event: None) as shared:
        session = StudySession(
            RunningStudy(
                definition=definition,
                shared=shared,
                prediction_cache=PredictionCache(definition, store=store, predict=executor.predict),
                folder=folder,
                listener=lambda event: None,
                trial_options=TrialOptions(trial_time_limit_seconds=600.0),
                clock=executor.clock,
            ),
            executor=executor,
            should_stop=lambda: False,
        )
        session.run(trials_wanted=TRIALS, deadline=None)
    store.close()


def _url(folder: Path) -> str:
    return f"sqlite:///{folder}/resume.db"


def difference(whole: list[str], continued: list[str]) -> str:
    """Where they differ first; empty where they do not."""
    if whole == continued:
        return ""
    at = next(
        (n for n, (one, other) in enumerate(zip(whole, continued, strict=False)) if one != other),
        None,
    )
    return f"{len(continued)} of {len(whole)} trials" if at is None else f"from trial {at} on"


def main() -> int:
    from studies.reliability.kills import about_this_machine

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samplers", default=",".join(SAMPLERS))
    arguments = parser.parse_args()
    said: dict[str, Any] = {**about_this_machine(), "searches": {}, "differences": []}
    began = time.monotonic()
    place = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=place) as temporary:
        folder = Path(temporary)
        for sampler in arguments.samplers.split(","):
            whole = suggestions(sampler, folder / sampler)
            kills = [[f"{point}:{k}"] for point in FAILPOINTS for k in range(1, TRIALS)]
            kills.append([f"{point}:2" for point in FAILPOINTS] * 4)  # again and again
            for number, kill_at in enumerate(kills):
                found = difference(
                    whole, suggestions(sampler, folder / f"{sampler}-{number}", kill_at=kill_at)
                )
                if found:
                    said["differences"].append(
                        f"{sampler}, killed at {', '.join(kill_at)}: {found}"
                    )
            said["searches"][sampler] = {"trials": len(whole), "killed": len(kills)}
    said["seconds"] = round(time.monotonic() - began, 1)
    print(json.dumps(said, indent=2))
    return 1 if said["differences"] else 0


if __name__ == "__main__":
    sys.exit(main())
