"""The process of a search of a server, with trials that end at once: `python -m` runs it.

All but its trials is real. STAND_IN_SECONDS says how long a trial takes on average.
"""

import os
from functools import partial

from autotune.service.search_process import end_process, main
from tests.quick_study.quick_executor import QuickExecutor

if __name__ == "__main__":
    seconds = float(os.environ.get("STAND_IN_SECONDS", "0"))
    end_process(main(partial(QuickExecutor, seconds=seconds)))
