"""The device that a prediction is for: one that is there, or one that is only described."""

from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace

from autotune.errors import AutotuneError
from autotune.execution.local import LocalExecutor
from autotune.execution.tasks import ListDevices
from autotune.spec.data_sheets import DATA_SHEETS, requested_device, sheet_of
from autotune.spec.result import DeviceInfo
from autotune.spec.search_space import SearchSpace
from autotune.spec.workload import Workload

_STUDIES_LOOKED_AT = 50


@dataclass(frozen=True, kw_only=True)
class PredictedDevice:
    """What is known of the device that a prediction is for."""

    type: str
    """cpu or cuda."""
    compute_capability: str | None = None
    """None for a CPU, and for a GPU that this machine has not and that is not described."""
    there: DeviceInfo | None = None
    """The device itself, where this machine has it and no data sheet was named."""
    described: DeviceInfo | None = None
    """The device with its rates, by which speed is predicted; None where they are not known."""
    rates_from: str = ""
    """Where they were found, such as `study 'first'`."""

    def found_in(self, devices: Sequence[DeviceInfo]) -> DeviceInfo | None:
        """Returns the device itself if it is one of `devices`, those of this machine."""
        if self.there is not None or self.described is None:
            return self.there
        sheet = sheet_of(self.described.name)
        return next((info for info in devices if sheet_of(info.name) is sheet), None)


def predicted_device_of(
    device: str | None,
    *,
    compute_capability: str | None = None,
    executor: LocalExecutor,
    storage: str | None = None,
) -> PredictedDevice:
    """Returns what is known of the device to predict for.

    `device` None is a GPU where this machine has one. The machine need not have the device:
    `compute_capability`, such as 9.0, then describes the GPU, or the name of a data sheet does. A
    device that a study in `storage` was searched on has the rates that were probed for it. Raises
    InvalidInput.
    """
    kind = requested_device(device, compute_capability)
    sheet = DATA_SHEETS.get(device or "")
    if sheet is not None:
        return PredictedDevice(
            type="cuda",
            compute_capability=sheet.compute_capability,
            described=sheet.device(),
            rates_from=f"the data sheet, {sheet.source}",
        )
    devices = executor.run(ListDevices())
    there = device_there(kind, devices, compute_capability=compute_capability)
    if there is None:
        assert kind is not None, "the CPU is always there"
        return PredictedDevice(type=kind.partition(":")[0], compute_capability=compute_capability)
    described, rates_from = with_rates(there, storage=storage)
    return PredictedDevice(
        type=there.type,
        compute_capability=there.compute_capability,
        there=there,
        described=described,
        rates_from=rates_from,
    )


def probed(
    device: PredictedDevice, *, executor: LocalExecutor, space: SearchSpace, workload: Workload
) -> PredictedDevice:
    """Returns a device of this machine whose rates are not known with those that are probed now."""
    if device.described is not None or device.there is None:
        return device
    plain = space.baseline_config(workload.legality_context).precision
    precisions = list(dict.fromkeys((plain, *space.choices()["precision"])))
    try:
        described = executor.measure_peaks(device.there, precisions, workload.linear_shape)
    except AutotuneError:  # a device that cannot be used now is predicted without speeds
        return device
    return replace(device, described=described, rates_from="probed just now")


def with_rates(device: DeviceInfo, *, storage: str | None) -> tuple[DeviceInfo | None, str]:
    """Returns the device with its rates, and where they are from; None where they are not known.

    They are those that the last study on a device of the same model has probed, else those of its
    data sheet.
    """
    for study, probed in () if storage is None else _probed_devices(storage):
        if probed.name == device.name and probed.is_of_model(device):
            return probed, f"study {study!r}, which probed it"
    sheet = sheet_of(device.name)
    return (None, "") if sheet is None else (sheet.device(), f"the data sheet, {sheet.source}")


def _probed_devices(storage: str) -> Iterator[tuple[str, DeviceInfo]]:
    """Yield the probed devices of studies with their names, the last one first.

    A database that cannot be read has none: a prediction needs no study.
    """
    # Half a second, which a prediction for a data sheet does without.
    from autotune.storage.store import StudyStore  # noqa: PLC0415

    with suppress(AutotuneError), closing(StudyStore(storage)) as store:
        for name in reversed(store.names()[-_STUDIES_LOOKED_AT:]):
            with suppress(AutotuneError):
                device = store.definition(name)[0].device
                if device.matrix_flops_per_second:
                    yield name, device


def device_there(
    name: str | None, devices: Sequence[DeviceInfo], *, compute_capability: str | None = None
) -> DeviceInfo | None:
    """Returns the first of `devices` with this name or kind, and compute capability if given.

    With `name` None, every device matches. Returns None if no device does.
    """
    for info in devices:
        is_meant = compute_capability is None or info.compute_capability == compute_capability
        if is_meant and name in (None, info.device, info.type):
            return info
    return None
