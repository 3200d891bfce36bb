"""The process of a search as the queue sees it, without a search: `python -m` runs it.

The request says what it does: `trials` results, one every `seconds`, then its end. Submissions over
HTTP cannot name seconds: then STAND_IN_SECONDS of the environment has them. With `ignores` it does
not stop when asked to, with `dies_at` it kills itself at that trial in its first run.
"""

import json
import os
import signal
import sys
import time

from autotune.errors import StorageUnreachable
from autotune.service.processes import this_process
from autotune.spec.queued_search import SearchEnd
from autotune.storage.database import Database
from autotune.storage.leases import LeaseLost
from autotune.storage.searches import Searches


def main():
    order = json.load(sys.stdin)
    stops = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda received, _: stops.append(received))
    searches = Searches(Database(order["storage"], was_reached=True))
    number, run = order["search"], order["run"]
    found = searches.begin_run(number, run, this_process(), version="stand-in")
    wanted = found.request
    # What it has told before it was killed.
    done = sum(
        event.search == number and event.kind == "trial_ended"
        for event in searches.events_after(0, limit=1_000_000)
    )
    told = 0
    print("token" if "AUTOTUNE_TOKEN" in os.environ else "no token", flush=True)
    while done < wanted.get("trials", 1):
        time.sleep(wanted.get("seconds", float(os.environ.get("STAND_IN_SECONDS", "0"))))
        if wanted.get("dies_at") == done and run == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        done += 1
        while True:
            try:
                is_cancelled = searches.renew_run(
                    number,
                    run,
                    progress={"trials": done},
                    study=found.study,
                    has_results=True,
                    events=[("trial_ended", {"trial": {"number": done - 1}})],
                    after=told,
                )
                break
            except StorageUnreachable:
                time.sleep(1.0)
        told += 1
        if wanted.get("ignores"):
            continue
        if is_cancelled:
            searches.end_run(number, run, SearchEnd(state="cancelled", exit_code=75))
            return
        if stops:
            searches.end_run(number, run, SearchEnd(state="queued", reason="stopped"))
            return
    searches.end_run(number, run, SearchEnd(state="finished", exit_code=0))


if __name__ == "__main__":
    try:
        main()
    except LeaseLost:
        sys.exit(75)
