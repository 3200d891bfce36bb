"""The search space of a request, after all checks that need no device and no database.

Imports neither, so that a search can say within a second what it begins with.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Literal, TypeVar

from autotune.data.sources import check_there
from autotune.data.validation import check_data
from autotune.errors import InvalidInput
from autotune.execution.cpu_shares import check_is_one_node
from autotune.spec.model_size import check_weights_fit
from autotune.spec.search_space import SearchSpace, bind_space
from autotune.spec.space_file import load_space
from autotune.spec.study import StudyDefinition
from autotune.spec.workload import (
    DEFAULTS_BY_DEVICE,
    Workload,
    check_adapters,
    make_workload,
)
from autotune.study.request import SearchRequest
from autotune.study.running.devices import check_whole_groups, parse_devices
from autotune.units import format_size

DEFAULT_SPACE = "default"
SPACE_OF_ADAPTERS = "adapters"
_SQLITE = "sqlite:///"
_TOLERANCE = 2.0
"""The weights of some models are half as many as estimated."""


def space_of(request: SearchRequest, *, reads_data: bool = True) -> SearchSpace:
    """Returns the request's search space, after all checks that need no device.

    The data is looked at only with `reads_data`. Raises InvalidInput for any invalid part of the
    request.
    """
    named = _default_space(request) if request.space is None else request.space
    space = load_space(named)
    space = space.at_scale(request.scale)
    workload = _workload_on_some_device(request, space)
    if request.ray is None:
        check_is_one_node(workload.nodes_per_trial)
    if request.devices is not None:
        check_whole_groups(
            parse_devices(request.devices), devices_per_trial=workload.devices_per_trial
        )
    if reads_data:
        check_there(workload)
        check_data(workload)
    return space


def has_global_batch(request: SearchRequest, space: SearchSpace) -> bool:
    """Returns whether the request or its space says how many sequences an optimizer step has."""
    settings = {**space.workload, **request.specified_workload()}
    return settings.get("global_batch") is not None


def _default_space(request: SearchRequest) -> str:
    """Returns the space of a request that names none: that beside adapters, if a file has them."""
    of_file = request.workload.get("own_config") or {}
    return SPACE_OF_ADAPTERS if of_file.get("adapter", "none") != "none" else DEFAULT_SPACE


def of_each_trial(
    setting: Literal["devices_per_trial", "nodes_per_trial"],
    request: SearchRequest,
    space: SearchSpace | None,
    *,
    stored: StudyDefinition | None = None,
) -> int:
    """Returns how many devices or nodes train together, in the `stored` study or in a new one."""
    if stored is not None:
        return int(getattr(stored.workload, setting))
    of_space = {} if space is None else space.workload
    settings = {**of_space, **request.specified_workload()}
    return int(settings.get(setting) or 1)


def _workload_on_some_device(request: SearchRequest, space: SearchSpace) -> Workload:
    """Returns the workload on the first kind of device where it is valid.

    Its dataset is the same on all of them.
    """
    specified = request.specified_workload()
    results = Path()
    if request.storage.startswith(_SQLITE):
        results = Path(request.storage.removeprefix(_SQLITE)).parent

    def make(device_type: str) -> Workload:
        workload = make_workload(device_type, space.workload, specified)
        if has_global_batch(request, space) or workload.script is None:  # else its script says it
            bind_space(space, workload.legality_context, unavailable={})
        check_adapters(workload, space.choices()["adapter"])
        if workload.script is None and request.ray is None:
            check_weights_fit(workload.to_dict(), folder=results, tolerance=_TOLERANCE)
        return workload

    return on_some_device(request.device, make)


Made = TypeVar("Made")


def on_some_device(device: str | None, make: Callable[[str], Made]) -> Made:
    """Returns what `make` returns for the first kind of device that it accepts.

    Raises InvalidInput as `on_all_devices`.
    """
    return on_all_devices(device, make)[0]


def on_all_devices(device: str | None, make: Callable[[str], Made]) -> list[Made]:
    """Returns what `make` returns for each kind of device that may be meant and that it accepts.

    Which devices this machine has is not known yet. Raises the first InvalidInput if `make` accepts
    no kind.
    """
    device_types = list(DEFAULTS_BY_DEVICE) if device is None else [device.partition(":")[0]]
    made, errors = [], []
    for device_type in device_types:
        try:
            made.append(make(device_type))
        except InvalidInput as error:
            errors.append(error)
    if not made:
        raise errors[0]
    return made


def beginning_line(request: SearchRequest, space: SearchSpace) -> str:
    """Returns what a search is about to prepare, as far as it is known without the device."""
    specified = {**space.workload, **request.specified_workload()}
    devices = of_each_trial("devices_per_trial", request, space)
    trained = specified.get("script") or specified.get("model") or "gpt"
    cap = ""
    if request.max_mem is not None:
        cap = f"under {format_size(request.max_mem)}, "
    device = request.device or "a GPU or the CPU"
    if devices != 1:
        device = f"each of {devices} {request.device or 'GPUs or CPU'} devices"
    return f"Preparing a search: {trained}, space {space.name}, {cap}on {device} ..."
