"""What NVIDIA's data sheets say of GPUs, for predictions where a GPU was never probed.

Rates are dense, without structured sparsity, and accumulated in fp32: half of what a sheet states
with sparsity. A GPU reaches about 0.85 of them; the two that were probed here, an H200 and an H100,
reached 0.86 of the rate in bf16 and 0.85 of the bandwidth.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from autotune.errors import InvalidInput, suggestion
from autotune.spec.prediction import parse_compute_capability
from autotune.spec.result import DeviceInfo
from autotune.spec.study import check_device

REACHED = 0.85
"""The share of a stated rate that is expected of a GPU that was not probed."""


@dataclass(frozen=True, kw_only=True)
class DataSheet:
    """A GPU as its vendor describes it."""

    names: tuple[str, ...]
    """As the driver reports them, without `NVIDIA`."""
    compute_capability: str
    memory_gigabytes: int
    matrix_teraflops: Mapping[str, float]
    """By number format; for int8 10^12 integer operations per second."""
    bandwidth_gigabytes: float
    """Per second."""
    source: str
    link_gigabytes: float = 32.0
    """Per second in one direction to the other GPUs of a node: half of what the sheet states for
    NVLink, else for PCIe, which is 4.0 x16 unless it says otherwise."""
    network_gigabytes: float = 12.5
    """Per second in one direction to other nodes, for each GPU: 400 Gb/s in a DGX H100 or H200,
    200 Gb/s in a DGX A100 (https://docs.nvidia.com/dgx/), and 100 Gb/s where there is no such
    system."""

    def device(self) -> DeviceInfo:
        """Returns the GPU with the rates that are expected of it."""
        return DeviceInfo(
            device="cuda",
            name=f"NVIDIA {self.names[0]}",
            total_memory_bytes=self.memory_gigabytes * 10**9,
            versions={},
            compute_capability=self.compute_capability,
            matrix_flops_per_second={
                kind: REACHED * rate * 1e12 for kind, rate in self.matrix_teraflops.items()
            },
            bandwidth_bytes_per_second=REACHED * self.bandwidth_gigabytes * 1e9,
        )


_HOPPER_SXM = {
    "fp32": 67.0,
    "tf32": 494.7,
    "bf16": 989.4,
    "fp16": 989.4,
    "fp8": 1978.9,
    "int8": 1978.9,
}
_AMPERE = {"fp32": 19.5, "tf32": 156.0, "bf16": 312.0, "fp16": 312.0, "int8": 624.0}
_A100 = (
    "https://www.nvidia.com/content/dam/en-zz/Solutions/Data-Center/a100/pdf/"
    "nvidia-a100-datasheet-us-nvidia-1758950-r4-web.pdf"
)
_H100 = "https://www.nvidia.com/en-us/data-center/h100/"

DATA_SHEETS: Mapping[str, DataSheet] = {
    "h200": DataSheet(
        names=("H200",),
        compute_capability="9.0",
        memory_gigabytes=141,
        matrix_teraflops=_HOPPER_SXM,
        bandwidth_gigabytes=4800,
        source="https://www.nvidia.com/en-us/data-center/h200/",
        link_gigabytes=450.0,
        network_gigabytes=50.0,
    ),
    "h100": DataSheet(
        names=("H100 80GB HBM3",),
        compute_capability="9.0",
        memory_gigabytes=80,
        matrix_teraflops=_HOPPER_SXM,
        bandwidth_gigabytes=3350,
        source=_H100,
        link_gigabytes=450.0,
        network_gigabytes=50.0,
    ),
    "h100-pcie": DataSheet(
        names=("H100 PCIe",),
        compute_capability="9.0",
        memory_gigabytes=80,
        matrix_teraflops={
            "fp32": 51.0,
            "tf32": 378.0,
            "bf16": 756.0,
            "fp16": 756.0,
            "fp8": 1513.0,
            "int8": 1513.0,
        },
        bandwidth_gigabytes=2000,
        source=_H100,
        link_gigabytes=64.0,
    ),
    "a100": DataSheet(
        names=("A100-SXM4-80GB",),
        compute_capability="8.0",
        memory_gigabytes=80,
        matrix_teraflops=_AMPERE,
        bandwidth_gigabytes=2039,
        source=_A100,
        link_gigabytes=300.0,
        network_gigabytes=25.0,
    ),
    "a100-pcie": DataSheet(
        names=("A100 80GB PCIe",),
        compute_capability="8.0",
        memory_gigabytes=80,
        matrix_teraflops=_AMPERE,
        bandwidth_gigabytes=1935,
        source=_A100,
    ),
    "a100-40gb": DataSheet(
        names=("A100-SXM4-40GB", "A100-PCIE-40GB"),
        compute_capability="8.0",
        memory_gigabytes=40,
        matrix_teraflops=_AMPERE,
        bandwidth_gigabytes=1555,
        source=_A100,
        link_gigabytes=300.0,
        network_gigabytes=25.0,
    ),
    "l40s": DataSheet(
        names=("L40S",),
        compute_capability="8.9",
        memory_gigabytes=48,
        matrix_teraflops={
            "fp32": 91.6,
            "tf32": 183.0,
            "bf16": 362.0,
            "fp16": 362.0,
            "fp8": 733.0,
            "int8": 733.0,
        },
        bandwidth_gigabytes=864,
        source="https://www.nvidia.com/en-us/data-center/l40s/",
    ),
    "l4": DataSheet(
        names=("L4",),
        compute_capability="8.9",
        memory_gigabytes=24,
        matrix_teraflops={
            "fp32": 30.3,
            "tf32": 60.0,
            "bf16": 121.0,
            "fp16": 121.0,
            "fp8": 242.5,
            "int8": 242.5,
        },
        bandwidth_gigabytes=300,
        source="https://www.nvidia.com/en-us/data-center/l4/",
    ),
    "a10": DataSheet(
        names=("A10",),
        compute_capability="8.6",
        memory_gigabytes=24,
        matrix_teraflops={"fp32": 31.2, "tf32": 62.5, "bf16": 125.0, "fp16": 125.0, "int8": 250.0},
        bandwidth_gigabytes=600,
        source="https://www.nvidia.com/en-us/data-center/products/a10-gpu/",
    ),
    "t4": DataSheet(
        names=("T4",),
        compute_capability="7.5",
        memory_gigabytes=16,
        matrix_teraflops={"fp32": 8.1, "fp16": 65.0, "int8": 130.0},
        bandwidth_gigabytes=320,
        source="https://www.nvidia.com/en-us/data-center/tesla-t4/",
        link_gigabytes=16.0,
    ),
    "rtx-4090": DataSheet(
        names=("GeForce RTX 4090",),
        compute_capability="8.9",
        memory_gigabytes=24,
        matrix_teraflops={
            "fp32": 82.6,
            "tf32": 82.6,
            "bf16": 165.2,
            "fp16": 165.2,
            "fp8": 330.3,
            "int8": 660.6,
        },
        bandwidth_gigabytes=1008,
        source="https://images.nvidia.com/aem-dam/Solutions/geforce/ada/"
        "nvidia-ada-gpu-architecture.pdf",
    ),
    "rtx-3090": DataSheet(
        names=("GeForce RTX 3090",),
        compute_capability="8.6",
        memory_gigabytes=24,
        matrix_teraflops={"fp32": 35.6, "tf32": 35.6, "bf16": 71.0, "fp16": 71.0, "int8": 284.0},
        bandwidth_gigabytes=936,
        source="https://www.nvidia.com/content/PDF/"
        "nvidia-ampere-ga-102-gpu-architecture-whitepaper-v2.pdf",
    ),
}
"""By the name that `--device` takes."""


def sheet_of(reported_name: str) -> DataSheet | None:
    """Returns the data sheet of a GPU by the name that its driver reports; None for none."""
    name = reported_name.removeprefix("NVIDIA ").removeprefix("Tesla ")
    return next((sheet for sheet in DATA_SHEETS.values() if name in sheet.names), None)


def check_described_device(name: str | None) -> None:
    """Raise InvalidInput unless `name` is that of a device or of a data sheet."""
    if name is None or name in DATA_SHEETS:
        return
    try:
        check_device(name)
    except InvalidInput as error:
        known = ", ".join(DATA_SHEETS)
        otherwise = f"use cpu, cuda, or a GPU whose data sheet is known: {known}"
        hint = suggestion(name, DATA_SHEETS, otherwise=otherwise)
        raise InvalidInput(error.message, hint=hint) from None


def requested_device(device: str | None, compute_capability: str | None) -> str | None:
    """Returns the name of the device, or cuda where a GPU is only described.

    `device` may be the name of a data sheet. Raises InvalidInput for a text that is not a compute
    capability, and for a compute capability together with another device.
    """
    check_described_device(device)
    sheet = DATA_SHEETS.get(device or "")
    if compute_capability is None:
        return "cuda" if sheet else device
    parse_compute_capability(compute_capability)
    if device == "cpu":
        raise InvalidInput(
            f"compute capability {compute_capability} is a GPU's, and the device is cpu",
            hint="leave one of them out",
        )
    if sheet and sheet.compute_capability != compute_capability:
        raise InvalidInput(
            f"compute capability {compute_capability} is not that of {device}, which has "
            f"{sheet.compute_capability}",
            hint="leave one of them out",
        )
    return "cuda" if sheet else device or "cuda"
