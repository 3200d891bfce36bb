"""Makes the trainer of a script searched that has no line of ours.

The script imports its trainer when it likes. So a module of a trainer is changed when it has been
imported, in the process that runs the script, and nowhere else: what the script runs in another
process is not reached. A script that calls a function of ours by itself is left as it is.
"""

import functools
import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

_TRAINERS = {
    "transformers.trainer": "injected_callback",
    "lightning.pytorch": "injected_lightning",
    "pytorch_lightning": "injected_lightning",
    "accelerate.accelerator": "injected_accelerate",
}
"""{module of a trainer: our module whose `change` makes it searched}. Ours import their trainer."""


def inject_into_trainers() -> None:
    """From now on, makes each trainer searched whose script calls nothing of ours."""
    for trainer, ours in _TRAINERS.items():
        change = functools.partial(_change, trainer, ours)
        if trainer in sys.modules:
            change()
        else:
            sys.meta_path.insert(0, _AfterImport(trainer, change))


def _change(trainer: str, ours: str) -> None:
    import_module(f"autotune.training.script.{ours}").change(sys.modules[trainer])


class _AfterImport(MetaPathFinder):
    """Calls a function once a module has been imported."""

    def __init__(self, name: str, then: Callable[[], None]) -> None:
        self._name = name
        self._then = then

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                self._then()

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
