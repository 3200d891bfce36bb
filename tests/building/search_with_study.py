"""The process of a search that writes a study by hand, without training: `python -m` runs it.

It makes `trials` results, one every STAND_IN_SECONDS, with the events that a search has.
"""

import json
import os
import sys
import time

from autotune.service.processes import this_process
from autotune.spec.queued_search import SearchEnd
from autotune.storage.database import Database
from autotune.storage.leases import LeaseLost
from autotune.storage.searches import Searches
from tests.building.studies import config, definition, keep, measured, open_store


def main():
    order = json.load(sys.stdin)
    searches = Searches(Database(order["storage"], was_reached=True))
    number, run = order["search"], order["run"]
    found = searches.begin_run(number, run, this_process(), version="stand-in")
    trials = found.request.get("trials", 1)
    name = found.study
    with open_store(order["storage"]) as store:
        if not store.has_study(name):
            store.create_study(definition(name), trials_wanted=trials)

        told = 0

        def say(kind, **data):
            nonlocal told
            progress = {"trials": len(store.trials(name)), "trials_wanted": trials}
            is_cancelled = searches.renew_run(
                number,
                run,
                progress=progress,
                study=name,
                has_results=True,
                events=[(kind, data)],
                after=told,
            )
            told += 1
            return is_cancelled

        say("opened", trials_wanted=trials, places=[], lines=[f"Study {name} by hand"])
        for trial in range(len(store.trials(name)), trials):
            named = {"number": trial, "name": f"trial {trial}", "device": ""}
            say("trial_began", config=config(trial).to_dict(), **named)
            say("step", number=trial, doing="training", steps=[1, 2], device="")
            time.sleep(float(os.environ.get("STAND_IN_SECONDS", "0")))
            is_feasible = found.request.get("max_mem") not in ("1MiB", 2**20)
            result = measured(tokens_per_second=1000.0 + trial)
            if not is_feasible:
                result = measured(outcome="over_cap")
            keep(store, config(trial), result, study=name, name=f"trial {trial}")
            if say("trial_ended", trial=store.trials(name)[trial].to_dict()):
                searches.end_run(number, run, SearchEnd(state="cancelled", exit_code=75))
                return
    if found.request.get("seed") == 13:
        reason, hint = "the workload cannot be built", "use another seed"
        end = SearchEnd(state="failed", reason=reason, hint=hint, exit_code=70)
        searches.end_run(number, run, end)
        return
    searches.end_run(number, run, SearchEnd(state="finished", exit_code=0))


if __name__ == "__main__":
    try:
        main()
    except LeaseLost:
        sys.exit(75)
