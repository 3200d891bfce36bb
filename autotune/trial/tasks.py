"""What a forked process can be asked to do: prepare a study's files, probe a device, predict or train one trial.

Each task takes and returns JSON-ready values.
"""

import os
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from autotune.config import TrainingConfig
from autotune.errors import InvalidInput, PredictionImpossible, StudyMismatch
from autotune.parity import ParityTrace
from autotune.result import DeviceInfo, Measurement
from autotune.rival import Rival
from autotune.training_request import Progress, TrainingRequest, unwatched
from autotune.trial.infrastructure import host_memory_kills
from autotune.trial.prepared import model_sha256, prepare, prepare_seed
from autotune.workload import Workload


def probe(*, device: str | None, choices: dict[str, list[Any]]) -> dict[str, Any]:
    """What `device` is and which of `choices`, {technique: values}, do not work on it.

    None is the first CUDA device, else the CPU. Returns {"device": DeviceInfo, "unavailable": {technique: {value:
    reason}}}. Raises InvalidInput.
    """
    from autotune.techniques import find_unavailable

    chosen = torch.device(device or ("cuda:0" if torch.cuda.is_available() else "cpu"))
    info = _cuda_info(chosen) if chosen.type == "cuda" else _cpu_info()
    return {"device": asdict(info), "unavailable": find_unavailable(choices, device=chosen)}


def examine(*, workload: dict[str, Any], choices: dict[str, list[Any]], device: str) -> dict[str, dict[str, str]]:
    """What of `choices`, {technique: values}, the model cannot take on `device`: {technique: {value: reason}}.

    Raises InvalidInput for a model that cannot be built.
    """
    from autotune.models import build_model
    from autotune.techniques.requirements import missing_parts

    if workload["script"] is not None:
        from autotune.script_trainer import examine_script

        return examine_script(Workload(**workload), choices, device=torch.device(device))
    with torch.device("meta"):
        parts = build_model(Workload(**workload))
    length = workload["sequence_length"]
    return missing_parts(parts, choices, device=torch.device(device), sequence_length=length)


def devices() -> list[dict[str, Any]]:
    """Every device this torch can use: the CUDA devices in order, then the CPU."""
    cuda = [_cuda_info(torch.device("cuda", index)) for index in range(torch.cuda.device_count())]
    return [asdict(info) for info in [*cuda, _cpu_info()]]


def check_device(*, device: str) -> dict[str, Any]:
    """A tiny computation on `device`. Raises whatever torch raises, and RuntimeError for a wrong result."""
    numbers = torch.arange(1000, dtype=torch.float64, device=device)
    if (numbers @ numbers).item() != 332833500.0:
        raise RuntimeError(f"{device} computes a wrong sum of squares")
    return {}


def train(*, progress: Progress = unwatched, **request: Any) -> dict[str, Any]:
    """Trains one configuration; returns a Measurement, whatever happens short of the process's death.

    Raises TrialLost for what the machine has done to it, and StudyMismatch where what the study is made of has changed.
    """
    from autotune.script_trainer import train_script
    from autotune.trainer import train as run

    memory_kills = host_memory_kills()
    try:
        training = _training_request(**request)
        train_one = run if training.workload.script is None else train_script
        return asdict(train_one(training, progress=progress))
    except StudyMismatch:
        raise
    except Exception as error:
        return asdict(_failed(error, device=request["device"], memory_kills=memory_kills))


def trace(*, dropout: bool, progress: Progress = unwatched, **request: Any) -> dict[str, Any]:
    """A configuration's first steps; returns {"trace": ParityTrace or None, "failure": why there is none}.

    Raises TrialLost as `train` does.
    """
    from autotune.script_run import trace_script
    from autotune.trainer import trace as run

    memory_kills = host_memory_kills()
    try:
        training = _training_request(**request)
        first_steps = run if training.workload.script is None else trace_script
        return {"trace": first_steps(training, dropout=dropout, progress=progress).to_dict(), "failure": ""}
    except StudyMismatch:
        raise
    except Exception as error:
        failed = _failed(error, device=request["device"], memory_kills=memory_kills)
        return {"trace": None, "failure": failed.message}


def _failed(error: Exception, *, device: str, memory_kills: int) -> Measurement:
    """With the whole story in the trial's log. Raises TrialLost."""
    import traceback

    from autotune.trial.failures import measurement_of_exception

    try:
        traceback.print_exception(error)
    except OSError:
        pass  # the log's disk is full
    killed = host_memory_kills() > memory_kills
    return measurement_of_exception(error, device_type=device.partition(":")[0], host_killed_for_memory=killed)


def _training_request(
    *,
    workload: dict[str, Any],
    config: dict[str, Any],
    folder: str,
    reference: dict[str, Any] | None = None,
    rivals: Sequence[dict[str, Any]] = (),
    snapshot_file: str | None = None,
    **options: Any,
) -> TrainingRequest:
    if workload["script"] is None and not Path(folder).is_dir():
        raise StudyMismatch(f"{folder} is gone, the text and the weights", hint="the same command prepares them again")
    return TrainingRequest(
        workload=Workload(**workload),
        config=TrainingConfig(**config),
        folder=Path(folder),
        reference=None if reference is None else ParityTrace.from_dict(reference),
        rivals=tuple(Rival(**rival) for rival in rivals),
        snapshot_file=None if snapshot_file is None else Path(snapshot_file),
        **options,
    )


def predict(*, workload: dict[str, Any], config: dict[str, Any], device: str, **options: Any) -> dict[str, Any]:
    """Peak memory of one configuration on fake tensors; returns a Prediction. Raises PredictionImpossible."""
    from autotune.predictor import PredictionRequest
    from autotune.predictor import predict as run

    if workload["script"] is not None:
        raise PredictionImpossible(
            "what a script will do cannot be predicted", hint="measure it: autotune search --script"
        )
    request = PredictionRequest(
        workload=Workload(**workload), config=TrainingConfig(**config), device=device, **options
    )
    return run(request).to_dict()


TASKS: Mapping[str, Callable[..., Any]] = {
    "prepare": prepare,
    "probe": probe,
    "examine": examine,
    "model_sha256": model_sha256,
    "devices": devices,
    "check_device": check_device,
    "predict": predict,
    "train": train,
    "trace": trace,
    "prepare_seed": prepare_seed,
}


_MEASURED_WITH = ("autotune", "transformers", "torchao")
"""Packages beside torch whose code a trial runs: another release may need other memory or run at another speed."""


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version(), "torch": torch.__version__, "system": platform.platform()}
    for package in _MEASURED_WITH:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            pass  # an extra
    return versions


def _cpu_info() -> DeviceInfo:
    return DeviceInfo(
        device="cpu",
        name=f"{_cpu_name()}, {torch.get_num_threads()} threads",
        total_memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        versions=_versions(),
    )


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _cuda_info(device: torch.device) -> DeviceInfo:
    from autotune.memory import nvml

    index = device.index or 0
    if index >= torch.cuda.device_count():
        found = ", ".join(f"cuda:{i}" for i in range(torch.cuda.device_count())) or "no CUDA device"
        raise InvalidInput(f"there is no device cuda:{index}", hint=f"this torch sees {found}; cpu is always there")
    properties = torch.cuda.get_device_properties(index)
    uuid = f"GPU-{properties.uuid}"
    return DeviceInfo(
        device=f"cuda:{index}",
        name=properties.name,
        total_memory_bytes=properties.total_memory,
        versions={**_versions(), "cuda": str(torch.version.cuda), "driver": nvml.driver_version()},
        uuid=uuid,
        others=_other_users(uuid, index),
    )


_IDLE_CUDA_BYTES = 1024**3
"""A GPU with less memory in use than this, driver and our own probe's context included, counts as free."""


def _other_users(uuid: str, index: int) -> str:
    from autotune.memory import nvml
    from autotune.quantities import format_size

    free_bytes, total_bytes = torch.cuda.mem_get_info(index)
    used_bytes, busy_percent = total_bytes - free_bytes, nvml.utilization_percent(uuid) or 0
    if used_bytes < _IDLE_CUDA_BYTES and busy_percent < 10:
        return ""
    return f"{format_size(used_bytes)} of its memory and {busy_percent} % of its time are in use"
