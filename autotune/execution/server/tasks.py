"""The tasks of a forked process, such as preparing files, probing a device, or training a trial.

Each task takes and returns JSON-ready values.
"""

import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from autotune.errors import PredictionImpossible, StudyMismatch, TrialLost
from autotune.execution.server import device as device_tasks
from autotune.execution.server.failures import measurement_of_exception
from autotune.execution.server.forked import run_in_fork
from autotune.execution.server.infrastructure import host_memory_kills
from autotune.execution.server.prepared import model_sha256, prepare, prepare_seed
from autotune.memory import torch_interfaces
from autotune.models import build_model
from autotune.predictor import predict as predictor
from autotune.spec.config import TrainingConfig
from autotune.spec.early_stopping import PruningBound
from autotune.spec.parity import ParityTrace
from autotune.spec.result import DeviceInfo, Measurement
from autotune.spec.training_request import Progress, TrainingRequest, unwatched
from autotune.spec.workload import Workload
from autotune.techniques import find_unavailable
from autotune.techniques.requirements import missing_parts
from autotune.training import trainer
from autotune.training.script.files import files_after_apply
from autotune.training.script.in_turn import train_script_in_turn
from autotune.training.script.rehearsal import why_no_step_in_backward
from autotune.training.script.run import trace_script
from autotune.training.script.trainer import examine_script, train_script
from autotune.training.turns import Turns


def identify(*, device: str | None) -> dict[str, Any]:
    """Returns the DeviceInfo of `device`; None is the first CUDA device, else the CPU.

    Creates no CUDA context. Raises InvalidInput for a device that does not exist.
    """
    return asdict(device_tasks.identify(device))


def probe(
    *, device: str | None, choices: dict[str, list[Any]], with_context: bool = True
) -> dict[str, Any]:
    """Finds out what `device` is and which of `choices`, {technique: values}, do not work on it.

    None is the first CUDA device, else the CPU. Returns {"device": DeviceInfo, "unavailable":
    {technique: {value: reason}}}. With `with_context`, also measures the size of a new CUDA
    context. Raises InvalidInput, and AutotuneError for a torch on which no trial could run.
    """
    torch_interfaces.check_trials()
    # In a fork, because CUDA must not be initialized in this process for what follows.
    info = DeviceInfo(**run_in_fork(lambda: identify(device=device)))
    if info.type == "cpu":
        torch_interfaces.check_cpu_meter()
    if info.type == "cuda" and with_context:
        info = device_tasks.with_context_size(info)
    return {
        "device": asdict(info),
        "unavailable": find_unavailable(choices, device=torch.device(info.device)),
    }


def examine(
    *, workload: dict[str, Any], choices: dict[str, list[Any]], device: str
) -> dict[str, Any]:
    """Returns which of `choices`, {technique: values}, the model does not support on `device`.

    The result is {"unavailable": {technique: {value: reason}}}, for a script an `ExaminedScript`.
    Raises InvalidInput for a model that cannot be built.
    """
    if workload["script"] is not None:
        return asdict(examine_script(Workload(**workload), choices, device=torch.device(device)))
    with torch.device("meta"):
        parts = build_model(Workload(**workload))
    length = workload["sequence_length"]
    missing = missing_parts(parts, choices, device=torch.device(device), sequence_length=length)
    return {"unavailable": missing}


def rehearse(*, workload: dict[str, Any], device: str) -> str:
    """Returns why the optimizer of the workload's script cannot step during backward, or ""."""
    return why_no_step_in_backward(Workload(**workload), device=torch.device(device))


def devices() -> list[dict[str, Any]]:
    """Returns a DeviceInfo of every device that this torch can use: the CUDA devices, then the CPU.

    Creates no CUDA context. Where CUDA does not start, the CPU is the only one.
    """
    return [asdict(info) for info in device_tasks.all_devices()]


def check_device(*, device: str) -> dict[str, Any]:
    """Runs a tiny computation on `device`; returns an empty dictionary.

    Raises what torch raises, and RuntimeError for a wrong result.
    """
    numbers = torch.arange(1000, dtype=torch.float64).to(device)
    if (numbers @ numbers).item() != 332833500.0:
        raise RuntimeError(f"{device} computes a wrong sum of squares")
    return {}


def train(*, progress: Progress = unwatched, **request: Any) -> dict[str, Any]:
    """Trains one configuration; returns a Measurement, also where the training fails.

    That of a script also has "script_files", {path: SHA-256} of those that it has first read after
    `autotune.apply`. Raises TrialLost for a failure of the machine, and StudyMismatch where the
    study's text, model or script has changed.
    """
    train_one = trainer.train if request["workload"]["script"] is None else train_script
    measurement = _measured(request, lambda training: train_one(training, progress=progress))
    if request["workload"]["script"] is None:
        return asdict(measurement)
    return {**asdict(measurement), "script_files": files_after_apply()}


def train_in_turn(
    *, turns: dict[str, Any], progress: Progress = unwatched, **request: Any
) -> dict[str, Any]:
    """Trains one configuration while the search lets it, which gets the time of its steps.

    `turns` is {"address": that of `Turns`}. Returns a Measurement with only the outcome. Raises
    TrialLost and StudyMismatch as `train` does.
    """
    train_one = trainer.train_in_turn
    if request["workload"]["script"] is not None:
        train_one = train_script_in_turn
    with Turns(**turns, progress=progress) as own_turns:
        measurement = _measured(
            request, lambda training: train_one(training, turns=own_turns, progress=progress)
        )
    return asdict(measurement)


def trace(*, dropout: bool, progress: Progress = unwatched, **request: Any) -> dict[str, Any]:
    """Runs a configuration's first steps.

    Returns {"trace": ParityTrace or None, "failure": why there is none}. Raises TrialLost and
    StudyMismatch as `train` does.
    """
    memory_kills = host_memory_kills()
    try:
        training = _training_request(**request)
        first_steps = trainer.trace if training.workload.script is None else trace_script
        return {
            "trace": first_steps(training, dropout=dropout, progress=progress).to_dict(),
            "failure": "",
        }
    except (StudyMismatch, TrialLost):
        raise
    except Exception as error:
        failed = _failed(error, request, memory_kills=memory_kills)
        return {"trace": None, "failure": failed.message}


def _measured(
    request: Mapping[str, Any], train_one: Callable[[TrainingRequest], Measurement]
) -> Measurement:
    """Returns the measurement of a training, also of one that fails. Raises as `train` does."""
    memory_kills = host_memory_kills()
    try:
        return train_one(_training_request(**request))
    except (StudyMismatch, TrialLost):
        raise
    except Exception as error:
        return _failed(error, request, memory_kills=memory_kills)


def _failed(error: Exception, request: Mapping[str, Any], *, memory_kills: int) -> Measurement:
    """Returns the outcome for an error, and writes its traceback to the log. Raises TrialLost."""
    try:
        traceback.print_exception(error)
    except OSError:
        pass  # the log's disk is full
    killed = host_memory_kills() > memory_kills
    return measurement_of_exception(
        error,
        device_type=request["device"].partition(":")[0],
        config=request["config"],
        host_killed_for_memory=killed,
    )


def _training_request(
    *,
    workload: dict[str, Any],
    config: dict[str, Any],
    folder: str,
    reference: dict[str, Any] | None = None,
    pruning_bounds: Sequence[dict[str, Any]] = (),
    snapshot_file: str | None = None,
    **options: Any,
) -> TrainingRequest:
    if workload["script"] is None and not Path(folder).is_dir():
        raise StudyMismatch(
            f"the folder {folder} with the text and the weights is gone",
            hint="the same command prepares them again",
        )
    return TrainingRequest(
        workload=Workload(**workload),
        config=TrainingConfig(**config),
        folder=Path(folder),
        reference=None if reference is None else ParityTrace.from_dict(reference),
        pruning_bounds=tuple(PruningBound(**bound) for bound in pruning_bounds),
        snapshot_file=None if snapshot_file is None else Path(snapshot_file),
        **options,
    )


def predict(
    *, workload: dict[str, Any], config: dict[str, Any], device: str, **options: Any
) -> dict[str, Any]:
    """Predicts the peak memory of one configuration on fake tensors; returns a Prediction as JSON.

    Raises PredictionImpossible.
    """
    torch_interfaces.check_predictions()
    if workload["script"] is not None:
        raise PredictionImpossible(
            "what a script will do cannot be predicted", hint="measure it: autotune search --script"
        )
    request = predictor.PredictionRequest(
        workload=Workload(**workload), config=TrainingConfig(**config), device=device, **options
    )
    return predictor.predict(request).to_dict()


TASKS: Mapping[str, Callable[..., Any]] = {
    "prepare": prepare,
    "identify": identify,
    "probe": probe,
    "examine": examine,
    "rehearse": rehearse,
    "model_sha256": model_sha256,
    "devices": devices,
    "check_device": check_device,
    "predict": predict,
    "train": train,
    "train_in_turn": train_in_turn,
    "trace": trace,
    "prepare_seed": prepare_seed,
}
