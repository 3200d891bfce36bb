"""The command line, with trials that end at once: `python -m` runs it in place of `autotune`.

STAND_IN_SECONDS of the environment says how long a trial takes on average.
"""

import os
from functools import partial

from autotune.cli import main
from autotune.study.search import search
from tests.quick_study.quick_executor import QuickExecutor

if __name__ == "__main__":
    seconds = float(os.environ.get("STAND_IN_SECONDS", "0"))
    assert search.__kwdefaults__ is not None
    search.__kwdefaults__["make_executor"] = partial(QuickExecutor, seconds=seconds)
    main()
