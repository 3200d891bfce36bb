"""The real trial server without torch, which takes seconds to import, for tests of the server."""

import sys
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from autotune.execution.server import fork_server

ROOT = Path(__file__).parents[2]


def light_command(program: str) -> tuple[str, ...]:
    """Returns the command of a program that can import what is in this folder."""
    return (sys.executable, "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{program}")


LIGHT_COMMAND = light_command(
    "from tests.building.light_server import serve_without_torch\n"
    "serve_without_torch({'check_device': lambda request: None})"
)
"""A server on which every device answers."""


def serve_without_torch(tasks: Mapping[str, Callable[[Mapping[str, Any]], Any]]) -> None:
    """Serve with these tasks, by their names, in the place of the real ones.

    Each gets the whole request. A training's progress is not seen.
    """

    def run_task(request: Mapping[str, Any], _told: object) -> Any:
        return tasks[request["task"]](request)

    tasks_module = types.ModuleType("autotune.execution.process.answers")
    vars(tasks_module)["run_task"] = run_task
    progress = types.ModuleType("autotune.execution.process.progress")
    vars(progress)["PipeProgress"] = lambda pipe: types.SimpleNamespace(remark=None)
    for module in (tasks_module, progress):
        sys.modules[module.__name__] = module
        setattr(
            sys.modules["autotune.execution.server"], module.__name__.rpartition(".")[2], module
        )
    fork_server._import_what_trials_need = lambda: None
    fork_server.main()
