"""A worker process of a search, `python -m autotune.study.workers.worker`.

`processes.py` starts it and writes its request to its stdin.
"""

import json
import signal
import sys
import threading

from autotune.errors import AutotuneError
from autotune.study.search import SearchRequest, search


def main() -> int:
    """Runs the search that stdin describes until it ends or stdin closes; returns the exit code."""
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    request = SearchRequest.from_dict(json.loads(sys.stdin.readline()))
    threading.Thread(target=_stop_at_end_of_input, args=(stop,), daemon=True).start()
    try:
        search(request, should_stop=stop.is_set, joins=True)
    except AutotuneError as error:
        print(f"error: {error.message}", f"hint: {error.hint}", sep="\n", file=sys.stderr)
        return error.exit_code
    return 0


def _stop_at_end_of_input(stop: threading.Event) -> None:
    sys.stdin.read()
    stop.set()


if __name__ == "__main__":
    sys.exit(main())
