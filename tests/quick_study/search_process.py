"""The process of a search of a server, with the trainings of `stand_in.py`: `python -m` runs it."""

import sys
from collections.abc import Sequence
from functools import partial

from autotune.execution.local import LocalExecutor
from autotune.service import search_process
from tests.quick_study.worker import STAND_IN


def main(_words: Sequence[str] = ()) -> int:
    executor = partial(LocalExecutor, server_command=(sys.executable, str(STAND_IN)))
    return search_process.main(executor)


if __name__ == "__main__":
    search_process.end_process(main())
