"""The first SIGINT or SIGTERM ends a search within ten seconds, wherever it is; nothing is left.

The second: at once.

    python studies/reliability/signals.py > studies/reliability/signals.json

The searches are those of `tests/quick_study/worker.py`, and in the end
`autotune search --devices 3` with real trainings.
"""

import signal
import sys
import time
from collections.abc import Callable
from typing import Any

from studies.reliability.quick_study import QuickStudy, Worker, quick_study, report, say
from tests.building.postgres import PostgresServer
from tests.quick_study.checks import processes

MOST_SECONDS = 10.0
SPACE = """
[techniques]
checkpointing = ["none", "block", "sqrt"]
optimizer_fusion = ["none", "kernel", "backward"]
micro_batch_size = "divisors"

[workload]
layers = 2
width = 32
heads = 2
sequence_length = 32
global_batch = 4
steps = 100000
warmup_steps = 2
evaluation_sequences = 4
"""


def main() -> int:
    found: list[str] = []
    rows: list[dict[str, Any]] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        rows.append(_preparing(found, number))
        rows.append(_in_a_trial(found, number))
        rows.append(_waiting_for_the_device(found, number))
    with PostgresServer() as server:
        rows.append(_without_database(found, server))
    rows += [_with_several_devices(found, signals=1), _with_several_devices(found, signals=2)]
    return report(rows, found)


def _preparing(found: list[str], number: signal.Signals) -> dict[str, Any]:
    with quick_study(trials=3) as study:
        worker = study.start()
        study.wait_until(lambda: len(processes(study.mark)) > 1, what="its trial server")
        time.sleep(1)
        return _end(study, worker, number, "preparing", found, states={}, is_begun=False)


def _in_a_trial(found: list[str], number: signal.Signals) -> dict[str, Any]:
    with quick_study(trials=3) as study:
        worker = study.start(STAND_IN_GATE=str(study.folder / "gate"))
        study.wait_until(lambda: study.running() == 1, what="a trial")
        time.sleep(0.5)
        return _end(study, worker, number, "in a trial", found, states={"given_back": 1})


def _waiting_for_the_device(found: list[str], number: signal.Signals) -> dict[str, Any]:
    with quick_study(trials=3) as study:
        first = study.start("--time-limit", "300", STAND_IN_GATE=str(study.folder / "gate"))
        study.wait_until(lambda: study.running() == 1, what="a trial")
        waits = study.start("--events")
        study.wait_until(lambda: waits.has_said("WaitingForDevice"), what="the second to wait")
        row = _timed_end(waits, number, found, "waiting for the device")
        first.process.send_signal(number)
        first.exit_code()
        return row | _afterwards(study, found, states={"given_back": 1})


def _without_database(found: list[str], server: PostgresServer) -> dict[str, Any]:
    with quick_study(storage=server.create_database("signals"), trials=3) as study:
        worker = study.start(
            "--events", "--time-limit", "300", STAND_IN_GATE=str(study.folder / "gate")
        )
        study.wait_until(lambda: study.running() == 1, what="a trial")
        with server.stopped(mode="immediate"):
            (study.folder / "gate").touch()
            study.wait_until(lambda: worker.has_said("WaitingForStorage"), what="it to wait")
            row = _timed_end(worker, signal.SIGTERM, found, "the database is away")
        # Its result waits on disk; its attempt is not given back, and the next worker delivers it.
        return row | _afterwards(study, found, states={"finished": 3})


def _with_several_devices(found: list[str], *, signals: int) -> dict[str, Any]:
    what = f"--devices 3, signal {signals}"
    with quick_study(trials=9, places=3) as study:
        (study.folder / "small.toml").write_text(SPACE)
        search = study.start_command(
            *(
                sys.executable,
                "-m",
                "autotune",
                "search",
                "--name",
                "quick",
                "--space",
                "small.toml",
                "--quiet",
            ),
            *("--storage", study.storage, "--no-predict", "--no-confirm", "--device", "cpu"),
            *("--sampler", "random"),
            *(
                "--trials",
                "9",
                "--devices",
                "3",
                "--trial-time-limit",
                "20m",
            ),
        )
        study.wait_until(lambda: study.running() == 3, what="three trials", seconds=300)
        time.sleep(2)
        if signals == 2:
            search.process.send_signal(signal.SIGTERM)
            time.sleep(0.05)
        row = _timed_end(search, signal.SIGTERM, found, what)
        row["said"] = search.said[-2:]
        left = _seconds_until(lambda: not processes(study.mark), most=MOST_SECONDS)
        row["seconds_until_no_process_was_left"] = left
        row["attempts"] = study.attempts()
        found += [f"{what}: there is still {one}" for one in processes(study.mark)]
        if signals == 1 and row["attempts"] != {"given_back": 3}:
            found.append(f"{what}: the attempts are {row['attempts']}")
        return row


def _end(
    study: QuickStudy,
    worker: Worker,
    number: signal.Signals,
    what: str,
    found: list[str],
    *,
    states: dict[str, int],
    is_begun: bool = True,
) -> dict[str, Any]:
    row = _timed_end(worker, number, found, what)
    if not is_begun:
        return row | {"processes_left": _left(study, found, what)}
    return row | _afterwards(study, found, states=states)


def _timed_end(
    worker: Worker, number: signal.Signals, found: list[str], what: str
) -> dict[str, Any]:
    began = time.monotonic()
    worker.process.send_signal(number)
    code = worker.exit_code()
    seconds = round(time.monotonic() - began, 2)
    say(f"{number.name} while {what}: {code} after {seconds} s")
    if code != 128 + number:
        found.append(f"{number.name} while {what}: exit code {code}, it said {worker.said[-3:]}")
    if seconds > MOST_SECONDS:
        found.append(f"{number.name} while {what}: took {seconds} s")
    return {"while": what, "signal": number.name, "exit_code": code, "seconds": seconds}


def _afterwards(study: QuickStudy, found: list[str], *, states: dict[str, int]) -> dict[str, Any]:
    """What is left, and whether the same command ends the study."""
    left, attempts = _left(study, found, "afterwards"), study.attempts()
    code = study.start().exit_code()
    found += study.violations()
    if code:
        found.append(f"the same command ended with {code}: {study.last_words()}")
    ended = study.attempts()
    if any(ended.get(state) != count for state, count in states.items()):
        found.append(f"the attempts are {ended}")
    return {"processes_left": left, "attempts": attempts, "attempts_after_the_same_command": ended}


def _left(study: QuickStudy, found: list[str], what: str) -> int:
    _seconds_until(lambda: not processes(study.mark), most=2.0)
    left = processes(study.mark)
    found += [f"{what}: there is still {one}" for one in left]
    return len(left)


def _seconds_until(is_so: Callable[[], bool], *, most: float) -> float:
    began = time.monotonic()
    while not is_so() and time.monotonic() - began < most:
        time.sleep(0.05)
    return round(time.monotonic() - began, 2)


if __name__ == "__main__":
    sys.exit(main())
