"""Optional packages that techniques need: what to install, and imports that take care."""

import logging
import warnings
from importlib.util import find_spec
from typing import Any

from autotune.spec.config import TECHNIQUES

_EXTRAS = {
    "torchao": "torchao",
    "deepspeed": "deepspeed",
    "peft": "finetune",
    "bitsandbytes": "finetune",
    "liger_kernel": "liger",
}
"""{package: the extra of autotune that installs it}."""


def missing_package(technique: str, value: object) -> str | None:
    """Returns what to install for a value of a technique; None if that is there."""
    package = TECHNIQUES[technique].packages.get(str(value))
    if package is None or find_spec(package) is not None:
        return None
    return f'{package} is not installed: pip install "autotune[{_EXTRAS[package]}]"'


def bitsandbytes() -> Any:
    """Returns the package; quantized weights and paged optimizers need it.

    Raises ImportError if it is not installed.
    """
    # It logs that the package `kernels` is missing, with which it would fetch code from a hub.
    logging.getLogger("bitsandbytes").setLevel(logging.CRITICAL)
    # About what does not exist on a CPU, such as paging.
    warnings.filterwarnings("ignore", module="bitsandbytes")
    import bitsandbytes as package  # noqa: PLC0415

    return package
