"""Runs a training script, which needs no line of autotune, with one configuration.

    AUTOTUNE_CONFIG=autotune_config.json python -m autotune.run train.py --its --arguments
    AUTOTUNE_CONFIG=autotune_config.json python -m autotune.run -m package.train --its --arguments
    AUTOTUNE_CONFIG=autotune_config.json torchrun --standalone -m autotune.run train.py

Its Trainer gets the callback that it had in the trials of its search. A script with lines of
autotune runs as it does by itself.
"""

import os
import runpy
import sys
from typing import NoReturn

from autotune.errors import InvalidInput
from autotune.system.allocator_settings import set_segments
from autotune.training.script import interface


def main() -> None:
    """Runs the script that the command line names. Exits with 2 where there is none to run."""
    if sys.argv[1:2] in ([], ["-m"], ["-h"], ["--help"]) and len(sys.argv) < 3:
        print(__doc__, file=sys.stderr)
        sys.exit(0 if sys.argv[1:2] in (["-h"], ["--help"]) else 2)
    file = os.environ.get(interface.CONFIG_VARIABLE)
    if not file:
        _fail(
            f"{interface.CONFIG_VARIABLE} names no configuration",
            hint="set it to the autotune_config.json of autotune export STUDY --to pytorch",
        )
    try:
        config = interface.load_config(file)
    except InvalidInput as error:
        _fail(str(error), hint=error.hint)
    if config.allocator == "expandable":  # before torch is imported, which reads it once
        set_segments(expandable=True)
    # torch, after its settings
    from autotune.training.script.injection import inject_into_trainers  # noqa: PLC0415

    inject_into_trainers()
    if sys.argv[1] == "-m":
        sys.argv[:] = sys.argv[2:]
        sys.path[0] = os.getcwd()
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv[:] = sys.argv[1:]
        sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
        runpy.run_path(sys.argv[0], run_name="__main__")
    if not interface.was_called():
        print(
            f"warning: {sys.argv[0]} has made no Trainer that autotune knows: nothing of the "
            "configuration was applied",
            file=sys.stderr,
        )


def _fail(message: str, *, hint: str) -> NoReturn:
    print(f"error: {message}\nhint: {hint}", file=sys.stderr)
    sys.exit(2)


if __name__ == "__main__":
    main()
