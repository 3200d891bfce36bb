"""The environment of another Python process that imports this same package."""

import os
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[2]


def python_environment() -> dict[str, str]:
    """Returns the variables of this process, with this package on the path of Python.

    A checkout that is not installed is found, too: `python -m autotune` has it on its path only
    because it is the current folder.
    """
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    if _ROOT.name != "site-packages" and str(_ROOT) not in paths:
        paths.append(str(_ROOT))
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
