"""The process of a search whose trials have no process: `python -m studies.service.quick_search`.

Everything else of it is real: it opens, prepares, claims, stores, reports and ends as always.
STAND_IN_SECONDS of the environment is how long a trial takes on average.
"""

import os
from functools import partial

from autotune.service.search_process import end_process, main
from tests.quick_study.quick_executor import QuickExecutor

if __name__ == "__main__":
    seconds = float(os.environ.get("STAND_IN_SECONDS", "0.05"))
    end_process(main(partial(QuickExecutor, seconds=seconds)))
