"""The cap: the one rule by which a trial is over it, whether trained, predicted or taken over.

What a device must have is compared: allocated or reserved memory and, on a GPU, its context. Of a
prediction that is the lower bound, so that nothing is left out that might fit.
"""

from autotune.units import different_sizes


def is_over_cap(needed_bytes: float, cap_bytes: int) -> bool:
    """Returns whether a device that has `cap_bytes` has too little."""
    return needed_bytes > cap_bytes


def need_and_cap(needed_bytes: int, cap_bytes: int) -> str:
    """Returns both in words that differ where they do: `26.12 MiB of 24 MiB`."""
    needed, cap = different_sizes(needed_bytes, cap_bytes)
    return f"{needed} of {cap}"
