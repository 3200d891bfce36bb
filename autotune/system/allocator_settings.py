"""The settings of torch's CUDA allocator in the environment: a user's own, and ours beside them.

torch reads them once, at the first allocation on a device. Of a key that is there twice it takes
the later value. Source: c10/core/AllocatorConfig.cpp
"""

import os

VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""The name until torch 2.9 and today's. torch 2.13 reads the older alone where both are set."""


_OURS = ("expandable_segments", "backend")
"""Settings that a trial does not take over: the first is a technique, and with another backend than
torch's caching allocator nothing counts the memory."""


def own_settings() -> str:
    """Returns the settings that torch would read, empty without any."""
    return next((os.environ[name] for name in VARIABLES if os.environ.get(name)), "")


def kept_settings() -> str:
    """Returns those settings of the user that a trial has."""
    parts = own_settings().split(",")
    return ",".join(part for part in parts if not part.strip().startswith(_OURS))


def set_segments(*, expandable: bool) -> None:
    """Sets the kind of segments, and keeps the user's other settings.

    Must be called before the first allocation on the device.
    """
    settings = kept_settings()
    for name in VARIABLES:
        os.environ.pop(name, None)
    if expandable or settings:
        joined = f"{settings},expandable_segments:{expandable}"
        os.environ[VARIABLES[-1]] = joined.lstrip(",")
