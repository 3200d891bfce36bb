"""One worker of a study of quick trials: a real search with the trainings of `stand_in.py`.

    python tests/quick_study/worker.py --name quick --storage sqlite:///quick.db \\
        --trials 1000 --own-device

Ends as `autotune search` does: 0, 75 with what to do, 130 and 143 on signals.
"""

import argparse
import os
import signal
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import FrameType
from unittest import mock

from autotune.errors import AutotuneError, Stopped
from autotune.execution.device_slots import LOCK_FOLDER_VARIABLE
from autotune.execution.local import LocalExecutor
from autotune.study.events import Event, Preparing
from autotune.study.request import SearchRequest
from autotune.study.search import search
from tests.quick_study.quick_executor import QuickExecutor

STAND_IN = Path(__file__).with_name("stand_in.py")
SPACE = Path(__file__).with_name("space.toml")


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--name", default="quick")
    parser.add_argument("--storage", required=True)
    parser.add_argument("--trials", type=int, default=None)
    parser.add_argument("--places", type=int, default=1, help="trials at a time on the device")
    parser.add_argument("--ray", default=None, help="run trials on a Ray cluster")
    parser.add_argument("--devices", default=None, help="of the cluster")
    parser.add_argument(
        "--own-device", action="store_true", help="do not wait for the trials of other workers"
    )
    parser.add_argument(
        "--quick", type=float, default=None, help="run trials of so many seconds without processes"
    )
    parser.add_argument("--sampler", default="random")
    parser.add_argument(
        "--beside", type=int, default=None, help="predict, so many beside each trial"
    )
    parser.add_argument("--cap-mib", type=int, default=80)
    parser.add_argument("--database-wait", type=float, default=300.0)
    parser.add_argument("--time-limit", type=float, default=60.0)
    parser.add_argument("--events", action="store_true", help="say on stderr what happens")
    arguments = parser.parse_args(words)
    received: list[int] = []

    def note(number: int, _: FrameType | None) -> None:
        received.append(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, note)

    def listener(event: Event) -> None:
        if arguments.events and not isinstance(event, Preparing):
            said = vars(event).get("number", vars(event).get("message", ""))
            print(
                f"{type(event).__name__} {said} @{time.monotonic():.4f}",
                file=sys.stderr,
                flush=True,
            )

    if arguments.own_device:
        os.environ[LOCK_FOLDER_VARIABLE] = f"locks-{os.getpid()}"
    request = SearchRequest(
        name=arguments.name,
        storage=arguments.storage,
        space=str(SPACE),
        max_mem=arguments.cap_mib * 2**20,
        device="cpu",
        sampler=arguments.sampler,
        trials=arguments.trials,
        ray=arguments.ray,
        devices=arguments.devices,
        trials_per_device=arguments.places,
        database_wait=arguments.database_wait,
        trial_time_limit=arguments.time_limit,
        predict=arguments.beside is not None,
        fresh=True,
        confirm=False,  # the stand-in has no steps to time in turn
    )
    if arguments.beside is not None:
        predict_beside(arguments.beside)
    executor: partial[LocalExecutor]
    try:
        executor = partial(LocalExecutor, server_command=(sys.executable, str(STAND_IN)))
        if arguments.quick is not None:
            executor = partial(QuickExecutor, seconds=arguments.quick)
        search(
            request, listener=listener, should_stop=lambda: bool(received), make_executor=executor
        )
    except Stopped:
        return 128 + received[0]
    except AutotuneError as error:
        print(f"error: {error.message}\nhint: {error.hint}", file=sys.stderr)
        return error.exit_code
    return 0


def predict_beside(count: int) -> None:
    """Have so many predictions run beside each trial, however many cores there are."""
    name = "autotune.study.running.devices_of_search.processes_beside"
    mock.patch(name, return_value=count).start()


if __name__ == "__main__":
    sys.exit(main())
