"""Somebody who submits a search of quick trials to a server and watches it to its end.

    AUTOTUNE_TOKEN=... python tests/quick_study/person.py http://127.0.0.1:8321 ada-1 40

The same command, after it was killed, goes on with the search that it has submitted before. Ends
with 0 where the search has finished, and each event has come once and in its order.
"""

import sys
import time
from collections.abc import Sequence

from autotune import Client
from autotune.client.searches import RemoteSearch
from autotune.errors import SearchConflict, ServerUnreachable, StorageUnreachable
from tests.quick_study.worker import SPACE

PATIENCE_SECONDS = 120.0
"""For a server that has not answered yet, as one that was just started anew."""


def main(words: Sequence[str] | None = None) -> int:
    url, study, trials = sys.argv[1:] if words is None else words
    last = 0
    with Client(url) as client:
        search = submitted(client, study, trials=int(trials))
        for event in client.watch(search.id):
            if event.kind == "reset" or 0 < event.id <= last:
                print(f"event {event.id}, {event.kind}, comes after {last}", file=sys.stderr)
                return 3
            last = max(last, event.id)
        end = client.patient().search(search.id)
    print(f"search {end.id} of {study}: {end.state} {end.reason}", file=sys.stderr)
    return 0 if end.state == "finished" else 1


def submitted(client: Client, study: str, *, trials: int) -> RemoteSearch:
    """Returns the search of that study, which is submitted unless it is there."""
    until = time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            there = client.searches(study=study)
            return there[0] if there else submit(client, study, trials=trials)
        except (SearchConflict, ServerUnreachable, StorageUnreachable):
            # A conflict: what this command submitted before it was killed has just arrived.
            if time.monotonic() > until:
                raise
            time.sleep(0.2)


def submit(client: Client, study: str, *, trials: int) -> RemoteSearch:
    return client.submit(
        name=study,
        space=str(SPACE),
        sampler="random",
        trials=trials,
        max_mem="80MiB",
        fresh=True,
        predict=False,
        confirm=False,
    )


if __name__ == "__main__":
    sys.exit(main())
