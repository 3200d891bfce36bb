"""`autotune`, whose servers and workers run stand-ins of searches: `python -m` runs it.

SEARCH_MODULE of the environment names another module than `search_stand_in`.
"""

import os

from autotune.cli import main
from autotune.service.web_server import run_server

if __name__ == "__main__":
    module = os.environ.get("SEARCH_MODULE", "tests.building.search_stand_in")
    assert run_server.__kwdefaults__ is not None
    run_server.__kwdefaults__["search_module"] = module
    main()
