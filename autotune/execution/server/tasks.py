"""The tasks of a forked process, such as preparing files, probing a device, or training a trial.

Each task takes and returns JSON-ready values.
"""

import os
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from autotune.errors import (
    PredictionImpossible,
    StorageUnavailable,
    StudyMismatch,
    TrialLost,
)
from autotune.execution.server import device as device_tasks
from autotune.execution.server import device_peaks
from autotune.execution.server.failures import measurement_of_exception
from autotune.execution.server.forked import ForkFailed, run_in_fork, run_in_forks
from autotune.execution.server.infrastructure import host_memory_kills
from autotune.execution.server.prepared import model_sha256, prepare, prepare_seed
from autotune.execution.server.process_exit import measurement_of_exit
from autotune.execution.server.ranks import Rank, RankFailed, TurnsOfRanks, run_on_ranks, together
from autotune.memory import torch_interfaces
from autotune.models import build_model
from autotune.predictor import predict as predictor
from autotune.spec.config import Precision, TrainingConfig
from autotune.spec.early_stopping import PruningBound
from autotune.spec.file_watch import (
    files_after_apply,
    files_until_apply,
    imported_packages,
)
from autotune.spec.parity import ParityTrace
from autotune.spec.prediction import Prediction
from autotune.spec.reading import parse, possible
from autotune.spec.result import DeviceInfo, Measurement, Outcome
from autotune.spec.training_request import ReportsStage, TrainingRequest, unwatched
from autotune.spec.user_code import is_function_reference
from autotune.spec.workload import Workload
from autotune.techniques import find_unavailable
from autotune.techniques.requirements import missing_parts
from autotune.training import trainer
from autotune.training.profiling import profile_training
from autotune.training.script.in_turn import train_script_in_turn
from autotune.training.script.rehearsal import why_no_micro_batches, why_no_step_in_backward
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
    info = parse(DeviceInfo, run_in_fork(lambda: identify(device=device)))
    if info.type == "cpu":
        torch_interfaces.check_cpu_meter()
    if info.type == "cuda" and with_context:
        info = device_tasks.with_context_size(info)
    return {
        "device": asdict(info),
        "unavailable": find_unavailable(choices, device=torch.device(info.device)),
    }


def measure_peaks(
    *, device: str, precisions: list[Precision], shape: list[int] | None
) -> dict[str, Any]:
    """Returns the fields of a DeviceInfo that say what `device` can do."""
    return device_peaks.measure_peaks(
        torch.device(device),
        precisions,
        memory_bytes=device_tasks.identify(device).total_memory_bytes,
        shape=None if shape is None else (shape[0], shape[1], shape[2]),
    )


def examine(
    *, workload: dict[str, Any], choices: dict[str, list[Any]], device: str
) -> dict[str, Any]:
    """Returns which of `choices`, {technique: values}, the model does not support on `device`.

    The result is {"unavailable": {technique: {value: reason}}}, for a script an `ExaminedScript`;
    with code of the user's, the files and packages that it has read. Raises InvalidInput for a
    model that cannot be built.
    """
    if workload["script"] is not None:
        examined = examine_script(Workload(**workload), choices, device=torch.device(device))
        return {**asdict(examined), "packages": imported_packages()}
    with torch.device("meta"):
        parts = build_model(Workload(**workload))
    length = workload["sequence_length"]
    missing = missing_parts(parts, choices, device=torch.device(device), sequence_length=length)
    if not is_function_reference(workload["model"]):
        return {"unavailable": missing}
    return {
        "unavailable": missing,
        "files": files_until_apply(),
        "packages": imported_packages(),
    }


def rehearse(*, workload: dict[str, Any], micro_batch_size: int, device: str) -> str:
    """Returns why the workload's script has no such micro batch, or "".

    With the whole global batch: why its optimizer cannot step during backward.
    """
    script = Workload(**workload)
    if micro_batch_size == script.global_batch:
        return why_no_step_in_backward(script, device=torch.device(device))
    return why_no_micro_batches(
        script, micro_batch_size=micro_batch_size, device=torch.device(device)
    )


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


def _ignore_remark(text: str) -> None:
    pass


def train(
    *,
    progress: ReportsStage = unwatched,
    remark: Callable[[str], None] = _ignore_remark,
    **request: Any,
) -> dict[str, Any]:
    """Trains one configuration; returns a Measurement, also where the training fails.

    `remark` is called with what each of several devices was doing where the training is ended.

    That of a user's code also has "script_files", {path: SHA-256} of those that the study does not
    know yet. Raises TrialLost for a failure of the machine, and StudyMismatch where the
    study's text, model or script has changed.
    """
    if request["workload"].get("devices_per_trial", 1) > 1:
        return asdict(_train_on_ranks(request, progress=progress, remark=remark))
    train_one = trainer.train if request["workload"]["script"] is None else train_script
    measurement = _measured(request, lambda training: train_one(training, progress=progress))
    files = files_after_apply()
    return {**asdict(measurement), **({"script_files": files} if files else {})}


def _train_on_ranks(
    request: Mapping[str, Any],
    *,
    progress: ReportsStage,
    remark: Callable[[str], None],
    turns: Mapping[str, Any] | None = None,
) -> Measurement:
    """Trains on several devices, a process for each; in turn with others where `turns` is given.

    Raises as `train` does.
    """

    def train_rank(rank: Rank) -> dict[str, Any]:
        own_request = _request_of_rank(request, rank)
        own_progress = unwatched if rank.index else progress

        def train_one(training: TrainingRequest) -> Measurement:
            with rank.joined(own_request["device"]):
                if turns is None:
                    return trainer.train(training, progress=own_progress)
                with TurnsOfRanks(**turns, progress=own_progress, rank=rank.index) as own_turns:
                    return trainer.train_in_turn(training, turns=own_turns, progress=own_progress)

        return asdict(_measured(own_request, train_one))

    memory_kills = host_memory_kills()
    try:
        results = run_on_ranks(
            train_rank,
            size=request["workload"]["devices_per_trial"],
            why_failed=lambda result: result["message"] if result["outcome"] in _FAILED else "",
            remark=remark,
        )
    except RankFailed as failed:
        if failed.result is None:
            return _measurement_of_ended_rank(failed, memory_kills=memory_kills)
        measured = parse(Measurement, possible(Measurement, failed.result))
        return replace(measured, message=f"{failed}: {measured.message}")
    return together([parse(Measurement, possible(Measurement, one)) for one in results])


_FAILED: tuple[Outcome, ...] = ("out_of_memory", "diverged", "parity_failed", "crashed")
"""Outcomes that one rank of a training may have while the others wait for it."""


def _measurement_of_ended_rank(failed: RankFailed, *, memory_kills: int) -> Measurement:
    """Returns the outcome for a rank whose process has ended without a result.

    Raises TrialLost where it was killed from outside.
    """
    try:
        measured = measurement_of_exit(
            failed.exit_status,
            log_file=Path(os.readlink("/proc/self/fd/1")),
            host_killed_for_memory=host_memory_kills() > memory_kills,
        )
    except TrialLost as lost:
        raise TrialLost(f"{failed}: {lost.message}", hint=lost.hint) from None
    return replace(measured, message=f"{failed}: {measured.message}")


def _request_of_rank(request: Mapping[str, Any], rank: Rank) -> dict[str, Any]:
    """Returns the request of a training with the device of one rank; on a CPU it is the same."""
    own_device = {}
    if rank.index and request.get("other_devices"):
        own_device = request["other_devices"][rank.index - 1]
    return {**request, **own_device}


def _trace_on_ranks(
    request: Mapping[str, Any], *, dropout: bool, remark: Callable[[str], None]
) -> dict[str, Any]:
    """Runs the first steps on several devices; returns what `trace` does. Raises TrialLost."""

    def trace_rank(rank: Rank) -> dict[str, Any]:
        own_request = _request_of_rank(request, rank)

        def first_steps(training: TrainingRequest) -> ParityTrace:
            with rank.joined(own_request["device"]):
                return trainer.trace(training, dropout=dropout)

        return _traced(own_request, first_steps)

    size = request["workload"]["devices_per_trial"]
    memory_kills = host_memory_kills()
    try:
        return run_on_ranks(
            trace_rank, size=size, why_failed=lambda result: result["failure"], remark=remark
        )[0]
    except RankFailed as failed:
        if failed.result is None:
            ended = _measurement_of_ended_rank(failed, memory_kills=memory_kills)
            return {"trace": None, **_why(ended)}
        return {**failed.result, "failure": f"{failed}: {failed.result['failure']}"}


def train_in_turn(
    *,
    turns: dict[str, Any],
    progress: ReportsStage = unwatched,
    remark: Callable[[str], None] = _ignore_remark,
    **request: Any,
) -> dict[str, Any]:
    """Trains one configuration while the search lets it, which gets the time of its steps.

    `turns` is {"address": that of `Turns`}. Returns a Measurement with only the outcome. Raises
    TrialLost and StudyMismatch as `train` does.
    """
    if request["workload"].get("devices_per_trial", 1) > 1:
        measured = _train_on_ranks(request, progress=progress, remark=remark, turns=turns)
        return asdict(measured)
    train_one = trainer.train_in_turn
    if request["workload"]["script"] is not None:
        train_one = train_script_in_turn
    with Turns(**turns, progress=progress) as own_turns:
        measurement = _measured(
            request, lambda training: train_one(training, turns=own_turns, progress=progress)
        )
    return asdict(measurement)


def trace(
    *,
    dropout: bool,
    progress: ReportsStage = unwatched,
    remark: Callable[[str], None] = _ignore_remark,
    **request: Any,
) -> dict[str, Any]:
    """Runs a configuration's first steps.

    Returns {"trace": ParityTrace or None, "failure": why there is none, "outcome": how it ended}.
    Raises TrialLost and StudyMismatch as `train` does.
    """
    config = TrainingConfig(**request["config"])
    if config.sharding == "none" and config.tensor_parallel == 1:
        # The plain training, with which others are compared, is that of one process.
        request["workload"] = {**request["workload"], "devices_per_trial": 1}
    if request["workload"].get("devices_per_trial", 1) > 1:
        return _trace_on_ranks(request, dropout=dropout, remark=remark)

    def first_steps(training: TrainingRequest) -> ParityTrace:
        run = trainer.trace if training.workload.script is None else trace_script
        return run(training, dropout=dropout, progress=progress)

    return _traced(request, first_steps)


def profile(
    *,
    steps: int,
    profile_folder: str,
    progress: ReportsStage = unwatched,
    remark: Callable[[str], None] = _ignore_remark,
    **request: Any,
) -> dict[str, Any]:
    """Profiles some steps of a configuration, and writes their files to `profile_folder`.

    Returns {"profile": Profile or None, "failure": why there is none}. On several devices each rank
    writes to a folder of its own, and the profile is that of rank 0. Raises TrialLost and
    StudyMismatch as `train` does, and StorageUnavailable where a file cannot be written.
    """
    folder = Path(profile_folder)
    size = request["workload"].get("devices_per_trial", 1)
    if size == 1:
        return _profiled(request, folder=folder, steps=steps, progress=progress)

    def profile_rank(rank: Rank) -> dict[str, Any]:
        own_request = _request_of_rank(request, rank)
        own_folder = folder / f"rank-{rank.index}"
        own_folder.mkdir()
        own_progress = unwatched if rank.index else progress
        with rank.joined(own_request["device"]):
            return _profiled(own_request, folder=own_folder, steps=steps, progress=own_progress)

    memory_kills = host_memory_kills()
    try:
        ranks = run_on_ranks(
            profile_rank, size=size, why_failed=lambda result: result["failure"], remark=remark
        )
    except RankFailed as failed:
        if failed.result is None:
            message = _measurement_of_ended_rank(failed, memory_kills=memory_kills).message
            return {"profile": None, "failure": message}
        return {"profile": None, "failure": f"{failed}: {failed.result['failure']}"}
    files = [
        f"rank-{index}/{file}"
        for index, result in enumerate(ranks)
        for file in result["profile"]["files"]
    ]
    return {"profile": {**ranks[0]["profile"], "files": files}, "failure": ""}


def _profiled(
    request: Mapping[str, Any], *, folder: Path, steps: int, progress: ReportsStage
) -> dict[str, Any]:
    """Returns what `profile` does, of one device. Raises as it does."""
    memory_kills = host_memory_kills()
    try:
        training = _training_request(**request)
        found = profile_training(training, folder=folder, steps=steps, progress=progress)
    except (StudyMismatch, TrialLost):
        raise
    except OSError as error:
        raise StorageUnavailable(
            f"the profile cannot be written to {folder}: {error.strerror or error}",
            hint="make room there, or name another folder with --out",
        ) from None
    except Exception as error:
        failed = _failed(error, request, memory_kills=memory_kills)
        return {"profile": None, "failure": failed.message or failed.outcome}
    return {"profile": found.to_dict(), "failure": ""}


def _traced(
    request: Mapping[str, Any], first_steps: Callable[[TrainingRequest], ParityTrace]
) -> dict[str, Any]:
    """Returns what `trace` does. Raises as `train` does."""
    memory_kills = host_memory_kills()
    try:
        training = _training_request(**request)
        return {"trace": first_steps(training).to_dict(), "failure": "", "outcome": "ok"}
    except (StudyMismatch, TrialLost):
        raise
    except Exception as error:
        return {"trace": None, **_why(_failed(error, request, memory_kills=memory_kills))}


def _why(failed: Measurement) -> dict[str, str]:
    """Returns the parts of the reply that say why there is no trace."""
    return {"failure": failed.message or failed.outcome, "outcome": failed.outcome}


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
    other_devices: object = (),  # those of other ranks
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
        reference=None if reference is None else parse(ParityTrace, reference),
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
    if TrainingConfig(**config).engine == "deepspeed":
        raise PredictionImpossible(
            "what DeepSpeed allocates is not predicted: its engine does not run on fake tensors",
            hint="measure it with autotune search, or predict with engine torch",
        )
    request = predictor.PredictionRequest(
        workload=Workload(**workload), config=TrainingConfig(**config), device=device, **options
    )
    if request.workload.devices_per_trial > 1:
        return _predict_all_ranks(request).to_dict()
    return predictor.predict(request, run_jobs=run_in_forks).to_dict()


def _predict_all_ranks(request: predictor.PredictionRequest) -> Prediction:
    """Returns the prediction of a training on several devices, one of each kind in a process."""

    def of_ranks(ranks: Sequence[int]) -> list[tuple[Prediction, list[list[int]]]]:
        def run(rank: int) -> tuple[dict[str, Any], list[list[int]]]:
            prediction, alike = predictor.predict_rank(replace(request, rank=rank))
            return prediction.to_dict(), alike

        try:
            answers = run_in_forks([partial(run, rank) for rank in ranks])
        except ForkFailed as error:
            named = " and ".join(map(str, ranks))
            raise PredictionImpossible(
                f"the prediction of rank {named} failed: {error}",
                hint="measure the configuration: a search works without predictions",
            ) from None
        return [(parse(Prediction, prediction), alike) for prediction, alike in answers]

    began = time.perf_counter()
    [(first, alike)] = of_ranks([0])
    predictions = [first]
    others = [group[0] for group in alike[1:]]
    at_once = os.cpu_count() or 1
    for start in range(0, len(others), at_once):
        predictions += [found for found, _ in of_ranks(others[start : start + at_once])]
    whole = predictor.of_all_ranks(predictions, alike)
    return replace(whole, seconds=time.perf_counter() - began)


TASKS: Mapping[str, Callable[..., Any]] = {
    "prepare": prepare,
    "identify": identify,
    "probe": probe,
    "measure_peaks": measure_peaks,
    "examine": examine,
    "rehearse": rehearse,
    "model_sha256": model_sha256,
    "devices": devices,
    "check_device": check_device,
    "predict": predict,
    "train": train,
    "train_in_turn": train_in_turn,
    "trace": trace,
    "profile": profile,
    "prepare_seed": prepare_seed,
}
