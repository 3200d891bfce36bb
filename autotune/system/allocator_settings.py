"""The settings of torch's CUDA allocator in the environment: a user's own, and ours beside them.

torch reads them once, at the first allocation on a device. Of a key that is there twice it takes
the later value. Source: c10/core/AllocatorConfig.cpp
"""

import os

VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""The older name and today's. torch takes expandable segments from the older alone until 2.9.1
(https://github.com/pytorch/pytorch/issues/183387), and 2.13 from the older where both are set
(c10/cuda/CUDAAllocatorConfig.h): what is set for any torch stands in both."""


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


def for_any_torch(*, expandable: bool) -> dict[str, str]:
    """Returns the variables that give a process this kind of segments, whichever torch it has."""
    return dict.fromkeys(VARIABLES, f"expandable_segments:{expandable}")


def assignments(*, expandable: bool) -> str:
    """Returns the same as a shell has it before a command."""
    variables = for_any_torch(expandable=expandable)
    return " ".join(f"{name}={value}" for name, value in variables.items())


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
