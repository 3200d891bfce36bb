"""The devices that one trial uses together: their name, and whether they are alike."""

from collections.abc import Sequence

from autotune.errors import InvalidInput
from autotune.spec.result import DeviceInfo


def joint_name(devices: Sequence[DeviceInfo]) -> str:
    """Returns a name for the devices of one trial: `cuda:0`, `cuda:0-3` or `cuda:0,2,4-5`."""
    if len(devices) == 1:
        return devices[0].device
    runs: list[list[int]] = []
    for number in sorted(int(one.device.partition(":")[2]) for one in devices):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    parts = []
    for run in runs:
        last = f"-{run[-1]}" if len(run) > 1 else ""
        parts.append(f"{run[0]}{last}")
    return f"{devices[0].type}:{','.join(parts)}"


def check_one_model(devices: Sequence[DeviceInfo]) -> None:
    """Raise InvalidInput where the devices of one trial are not all of one model."""
    first = devices[0]
    for other in devices:
        if not other.is_of_model(first):
            names = ", ".join(device.device for device in devices)
            raise InvalidInput(
                f"{names} are not of one model and cannot train together: {first.device} is "
                f"{first.model}, {other.device} is {other.model}",
                hint="--devices cuda:0,cuda:2 names devices of one model; --devices all finds them",
            )
