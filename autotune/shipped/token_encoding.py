"""Tokens as they are stored, some of which are no labels."""

from typing import Any

import numpy
from numpy.typing import NDArray

Tokens = NDArray[numpy.integer]
NO_TOKEN = -1
"""Padding: the pad token as input, and no label."""


def read_token_of(encoded: Any) -> Any:
    """Encode a token of padded text that is not a label, or decode it: the inverse is the same."""
    return NO_TOKEN - 1 - encoded
