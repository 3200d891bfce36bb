"""Imports optional packages that techniques need, where importing them takes care."""

import logging
import warnings
from typing import Any


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
