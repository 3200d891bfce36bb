"""`autotune serve` with searches of quick trials: `python tests/quick_study/server.py --port 0`."""

import sys
from collections.abc import Sequence
from functools import partial
from unittest import mock

import autotune.cli
from autotune.service import web_server

SEARCH_MODULE = "tests.quick_study.search_process"


def main(words: Sequence[str] | None = None) -> int:
    """Serves until a signal ends it; returns the exit code of the command."""
    run_server = partial(web_server.run_server, search_module=SEARCH_MODULE)
    command = ["autotune", "serve", *(sys.argv[1:] if words is None else words)]
    with (
        mock.patch.object(web_server, "run_server", run_server),
        mock.patch.object(sys, "argv", command),
    ):
        try:
            autotune.cli.main()
        except SystemExit as ended:
            return int(ended.code or 0)
    return 0


if __name__ == "__main__":
    sys.exit(main())
