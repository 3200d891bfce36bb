"""Carries out the tasks of `execution/tasks.py`, in a forked process."""

import itertools
import os
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from autotune.errors import (
    BudgetTooSmall,
    PredictionImpossible,
    StorageUnavailable,
    StudyMismatch,
    TrialLost,
)
from autotune.execution import probe_cache
from autotune.execution.joint_outcome import together
from autotune.execution.kept_predictions import (
    read_least,
    read_prediction,
    write_least,
    write_prediction,
)
from autotune.execution.process import device as device_tasks
from autotune.execution.process import device_peaks
from autotune.execution.process.failures import measurement_of_exception
from autotune.execution.process.preparation import model_sha256, prepare, prepare_seed
from autotune.execution.process.progress import PipeProgress
from autotune.execution.process.ranks import Rank, TurnsOfRanks, run_on_ranks
from autotune.execution.server.forked import ForkFailed, run_in_fork, run_in_forks
from autotune.execution.server.infrastructure import host_memory_kills
from autotune.execution.server.replies import TrainingFailed
from autotune.execution.tasks import (
    CheckDevice,
    Examine,
    Identify,
    ListDevices,
    MeasurePeaks,
    ModelSha256,
    Predict,
    Prepare,
    PrepareSeed,
    Probe,
    Probed,
    ProfileTraining,
    Rehearse,
    Task,
    Trace,
    Train,
    TrainingTask,
    TrainInTurn,
)
from autotune.memory import torch_interfaces
from autotune.models import build_model
from autotune.predictor import predict as predictor
from autotune.predictor.activation_budget import too_small
from autotune.spec.attempt import FinishedTrial
from autotune.spec.examined import Examined
from autotune.spec.file_watch import (
    files_after_apply,
    files_until_apply,
    imported_packages,
)
from autotune.spec.node_ranks import NodeRanks
from autotune.spec.parity import ParityTrace
from autotune.spec.prediction import KeptOfBlock, Prediction, PredictionRequest
from autotune.spec.profile import Profile
from autotune.spec.reading import parse, possible, prepare_to_parse
from autotune.spec.result import DeviceInfo, Measurement
from autotune.spec.setting import NO_LIMIT
from autotune.spec.training_request import ReportsStage, TrainingRequest, unwatched
from autotune.spec.user_code import is_function_reference
from autotune.techniques import find_unavailable
from autotune.techniques.adapter import check_patterns
from autotune.techniques.requirements import missing_parts
from autotune.training import trainer
from autotune.training.profiling import profile_training
from autotune.training.script.in_turn import train_script_in_turn
from autotune.training.script.rehearsal import why_no_micro_batches, why_no_step_in_backward
from autotune.training.script.run import trace_script
from autotune.training.script.trainer import examine_script, train_script
from autotune.training.turns import Turns
from autotune.units import parse_size


def run_task(request: Mapping[str, Any], told: PipeProgress) -> Any:
    """Returns the answer to a request, with dataclasses. Raises what its task says it does.

    A training says to `told` what it does. Raises TrainingFailed, too.
    """
    kind = _KINDS[request["task"]]
    task = parse(kind, request["payload"])
    if not isinstance(task, TrainingTask):
        return FUNCTIONS[kind](task)
    training = replace(task.training, requested_at=request["requested_at"])
    return FUNCTIONS[kind](replace(task, training=training), told)


# -- devices, models and scripts -------------------------------------------------------------------


def identify(task: Identify) -> DeviceInfo:
    return device_tasks.identify(task.device)


def devices(task: ListDevices) -> Sequence[DeviceInfo]:
    return device_tasks.all_devices()


def probe(task: Probe) -> Probed:
    torch_interfaces.check_trials()
    # In a fork, because CUDA must not be initialized in this process for what follows.
    info = parse(DeviceInfo, run_in_fork(lambda: device_tasks.identify(task.device)))
    working = {} if task.anew else probe_cache.read_working(info)
    untried = probe_cache.without(task.choices, working)
    found = info
    if info.type == "cpu":
        torch_interfaces.check_cpu_meter()
    elif task.with_context:
        found = device_tasks.with_context_size(info)
    unavailable = find_unavailable(untried, device=torch.device(info.device))
    newly_working = probe_cache.without(untried, unavailable)
    for technique, values in newly_working.items():
        working[technique] = [*working.get(technique, ()), *values]
    if newly_working:
        probe_cache.write_working(info, working)
    return Probed(device=found, unavailable=unavailable)


def measure_peaks(task: MeasurePeaks) -> DeviceInfo:
    peaks = device_peaks.measure_peaks(
        torch.device(task.device.device),
        task.precisions,
        memory_bytes=task.device.total_memory_bytes,
        shape=task.shape,
    )
    return replace(task.device, **peaks)


def check_device(task: CheckDevice) -> None:
    """Raises what torch raises, and RuntimeError for a wrong result."""
    numbers = torch.arange(1000, dtype=torch.float64).to(task.device)
    if (numbers @ numbers).item() != 332833500.0:
        raise RuntimeError(f"{task.device} computes a wrong sum of squares")


def examine(task: Examine) -> Examined:
    workload, device = task.workload, torch.device(task.device)
    if workload.script is not None:
        found = examine_script(
            workload,
            task.choices,
            device=device,
            learns_global_batch=task.learns_global_batch,
        )
        return replace(found, packages=imported_packages())
    with torch.device("meta"):
        parts = build_model(workload)
    check_patterns(parts, workload)
    missing = missing_parts(
        parts,
        task.choices,
        device=device,
        sequence_length=workload.sequence_length,
        modules_to_save=workload.modules_to_save,
        own_ranks=workload.adapter_rank_pattern,
    )
    if not is_function_reference(workload.model):
        return Examined(unavailable=missing)
    return Examined(unavailable=missing, files=files_until_apply(), packages=imported_packages())


def rehearse(task: Rehearse) -> str:
    workload, device = task.workload, torch.device(task.device)
    if task.micro_batch_size == workload.global_batch:
        return why_no_step_in_backward(workload, device=device)
    return why_no_micro_batches(workload, micro_batch_size=task.micro_batch_size, device=device)


# -- trainings -------------------------------------------------------------------------------------


def train(task: Train, told: PipeProgress) -> FinishedTrial:
    """Returns what was measured, also of a training that fails.

    With the files of a user's code that the study does not know yet.
    """
    try:
        measurement = _trained(task, told)
    except TrainingFailed as failed:
        measurement = failed.ending
    return FinishedTrial(
        measurement=measurement,
        seconds=time.monotonic() - task.training.requested_at,
        script_files=files_after_apply(),
    )


def _trained(task: Train, told: PipeProgress) -> Measurement:
    training = _planned(task.training)
    is_script = training.workload.script is not None
    if task.ranks > 1:
        ranks = _run_on_ranks(training, partial(_train_rank, task), told)
        return together([parse(Measurement, possible(Measurement, one)) for one in ranks])
    if isinstance(task, TrainInTurn):
        train_in_turn = train_script_in_turn if is_script else trainer.train_in_turn
        with Turns(address=task.address, progress=told) as turns, _raising_outcomes(training):
            return train_in_turn(training, turns=turns, progress=told)
    train_one = train_script if is_script else trainer.train
    with _raising_outcomes(training):
        return train_one(training, progress=told)


def _train_rank(
    task: Train, training: TrainingRequest, rank: Rank, progress: ReportsStage
) -> Measurement:
    if not isinstance(task, TrainInTurn):
        return trainer.train(training, progress=progress)
    with TurnsOfRanks(address=task.address, progress=progress, rank=rank.index) as turns:
        return trainer.train_in_turn(training, turns=turns, progress=progress)


def trace(task: Trace, told: PipeProgress) -> ParityTrace:
    training = _planned(task.training)
    if task.ranks > 1:

        def trace_rank(own: TrainingRequest, _rank: Rank, progress: ReportsStage) -> ParityTrace:
            return trainer.trace(own, dropout=task.dropout, progress=progress)

        return parse(ParityTrace, _run_on_ranks(training, trace_rank, told)[0])
    training = replace(training, workload=training.workload.on_devices(1))
    trace_one = trainer.trace if training.workload.script is None else trace_script
    with _raising_outcomes(training):
        return trace_one(training, dropout=task.dropout, progress=told)


def profile(task: ProfileTraining, told: PipeProgress) -> Profile:
    """Returns the profile; on several devices that of rank 0.

    Each rank writes to a folder of its own.
    """
    training = _planned(task.training)
    if task.ranks == 1:
        with _raising_outcomes(training, but=StorageUnavailable):
            return _profiled(task, training, folder=task.folder, progress=told)

    def profile_rank(own: TrainingRequest, rank: Rank, progress: ReportsStage) -> Profile:
        folder = task.folder / f"rank-{rank.index}"
        folder.mkdir()
        return _profiled(task, own, folder=folder, progress=progress)

    profiles = [parse(Profile, found) for found in _run_on_ranks(training, profile_rank, told)]
    files = []
    for index, of_rank in enumerate(profiles):
        files += [f"rank-{index}/{file}" for file in of_rank.files]
    return replace(profiles[0], files=tuple(files))


def _profiled(
    task: ProfileTraining, training: TrainingRequest, *, folder: Path, progress: ReportsStage
) -> Profile:
    try:
        return profile_training(training, folder=folder, steps=task.steps, progress=progress)
    except OSError as error:
        raise StorageUnavailable(
            f"the profile cannot be written to {folder}: {error.strerror or error}",
            hint="make room there, or name another folder with --out",
        ) from None


def _planned(training: TrainingRequest) -> TrainingRequest:
    """Returns the request with what its blocks keep, where an activation budget decides that.

    It is what a prediction for the same device has planned. Of a plan for a deeper model the blocks
    keep what is kept there, each in another way as long as there are some. Raises TrainingFailed.
    """
    if training.config.activation_budget == NO_LIMIT:
        return training
    with _raising_outcomes(training):
        device = parse(DeviceInfo, run_in_fork(lambda: device_tasks.identify(training.device)))
        request = PredictionRequest(
            workload=training.planned_for or training.workload,
            config=training.config,
            device=device.type,
            compute_capability=device.compute_capability,
        )
        kept = parse(Prediction, run_in_fork(lambda: predict(Predict(request=request)))).kept
    if training.planned_for is not None:
        ways = sorted(dict.fromkeys(kept), key=lambda one: one == KeptOfBlock())
        kept = tuple(itertools.islice(itertools.cycle(ways), training.workload.layers))
    return replace(training, kept=kept)


def _run_on_ranks(
    training: TrainingRequest,
    run: Callable[[TrainingRequest, Rank, ReportsStage], Any],
    told: PipeProgress,
) -> list[Any]:
    """Returns the result of each rank of a training on this node, as JSON.

    The first one here says what they do. Raises as `run_on_ranks` does.
    """
    devices = training.workload.devices_per_trial
    ranks = training.ranks or NodeRanks(size=devices, count=devices)

    def run_rank(rank: Rank) -> Any:
        own = training
        if rank.local_index and training.other_devices:
            device, uuid = training.other_devices[rank.local_index - 1]
            own = replace(training, device=device, device_uuid=uuid)
        progress = unwatched if rank.local_index else told
        with _raising_outcomes(own, but=StorageUnavailable), rank.joined(own.device):
            return run(own, rank, progress)

    return run_on_ranks(run_rank, ranks, remark=told.remark)


@contextmanager
def _raising_outcomes(
    training: TrainingRequest, *, but: type[Exception] = TrialLost
) -> Iterator[None]:
    """Raises TrainingFailed for an error of a training, and writes its traceback to the log.

    TrialLost, StudyMismatch and `but` pass.
    """
    memory_kills = host_memory_kills()
    try:
        if training.workload.script is None and not training.folder.is_dir():
            raise StudyMismatch(
                f"the folder {training.folder} with the text and the weights is gone",
                hint="the same command prepares them again",
            )
        yield
    except (StudyMismatch, TrialLost, but):
        raise
    except Exception as error:
        try:
            traceback.print_exception(error)
        except OSError:
            pass  # the log's disk is full
        ending = measurement_of_exception(
            error,
            device_type=training.device.partition(":")[0],
            config=training.config.to_dict(),
            host_killed_for_memory=host_memory_kills() > memory_kills,
        )
        raise TrainingFailed(replace(ending, kept=training.kept)) from None


# -- predictions -----------------------------------------------------------------------------------


def predict(task: Predict) -> Prediction:
    request = task.request
    torch_interfaces.check_predictions()
    if request.workload.script is not None:
        raise PredictionImpossible(
            "what a script will do cannot be predicted", hint="measure it: autotune search --script"
        )
    if request.config.engine == "deepspeed":
        raise PredictionImpossible(
            "what DeepSpeed allocates is not predicted: its engine does not run on fake tensors",
            hint="measure it with autotune search, or predict with engine torch",
        )
    if request.workload.devices_per_trial > 1:
        predict_whole = _predict_all_ranks
    else:
        predict_whole = partial(predictor.predict, run_jobs=run_in_forks)
    if request.config.activation_budget == NO_LIMIT:
        return predict_whole(request)
    # Trials on this device keep what is planned here.
    workload = replace(request.workload, seed=0)
    plan = replace(request, workload=workload, with_timeline=False, extrapolates="nothing")
    prediction = read_prediction(plan)
    if prediction is None:
        prediction = _planned_prediction(plan, predict_whole)
        write_prediction(plan, prediction)
    if request.with_timeline:
        return predict_whole(replace(request, kept=prediction.kept))
    return prediction


def _planned_prediction(
    plan: PredictionRequest, predict_whole: Callable[[PredictionRequest], Prediction]
) -> Prediction:
    """Raises BudgetTooSmall without a prediction where the least budget is known.

    It is the one that is enough on each of several devices with every block recomputed.
    """
    budget_bytes, least_bytes = parse_size(plan.config.activation_budget), read_least(plan)
    if least_bytes is None or least_bytes <= budget_bytes:
        try:
            return predict_whole(plan)
        except BudgetTooSmall:
            recomputed = replace(plan.config, activation_budget=NO_LIMIT, checkpointing="block")
            least_bytes = predict_whole(replace(plan, config=recomputed)).peak_memory_bytes
            write_least(plan, least_bytes)
    raise too_small(budget_bytes, least_bytes=least_bytes)


def _predict_all_ranks(request: PredictionRequest) -> Prediction:
    """Returns the prediction of a training on several devices, one of each kind in a process.

    An activation budget is planned for by the one that needs most, and the others keep the same.
    Where each needs most with the plan of another, all recompute every block.
    """
    at_once = os.cpu_count() or 1

    def of_ranks(
        ranks: Sequence[int], kept: tuple[KeptOfBlock, ...] = request.kept
    ) -> list[tuple[Prediction, list[list[int]]]]:
        answers = []
        for some in (ranks[at:][:at_once] for at in range(0, len(ranks), at_once)):
            requests = [replace(request, rank=rank, kept=kept) for rank in some]
            try:
                answers += run_in_forks([partial(predictor.predict_rank, one) for one in requests])
            except ForkFailed as error:
                named = " and ".join(map(str, some))
                raise PredictionImpossible(
                    f"the prediction of rank {named} failed: {error}",
                    hint="measure the configuration: a search works without predictions",
                ) from None
        return [(parse(Prediction, prediction), alike) for prediction, alike in answers]

    def planned_by(rank: int) -> tuple[Prediction, list[list[int]]]:
        [(first, alike)] = of_ranks([rank])
        others = [group[0] for group in alike if rank not in group]
        found = [one for one, _ in of_ranks(others, first.kept)]
        own = next(number for number, group in enumerate(alike) if rank in group)
        return predictor.of_all_ranks([*found[:own], first, *found[own:]], alike), alike

    began = time.perf_counter()
    whole, alike = planned_by(0)
    budget = request.config.activation_budget
    if budget != NO_LIMIT and not request.kept:
        planners = {0}
        while whole.peak_memory_bytes > parse_size(budget):
            peaks = whole.peak_memory_bytes_by_rank
            worst = peaks.index(max(peaks))
            if worst in planners:
                nothing = (KeptOfBlock(operators=()),) * len(whole.kept)
                recomputed = [one for one, _ in of_ranks([group[0] for group in alike], nothing)]
                whole = predictor.of_all_ranks(recomputed, alike)
                break
            planners.add(worst)
            whole, alike = planned_by(worst)
        if whole.peak_memory_bytes > parse_size(budget):
            raise too_small(parse_size(budget), least_bytes=whole.peak_memory_bytes)
    return replace(whole, seconds=time.perf_counter() - began)


FUNCTIONS: Mapping[type[Task[Any]], Callable[..., Any]] = {
    Identify: identify,
    ListDevices: devices,
    Probe: probe,
    MeasurePeaks: measure_peaks,
    CheckDevice: check_device,
    Examine: examine,
    Rehearse: rehearse,
    ModelSha256: model_sha256,
    Prepare: prepare,
    PrepareSeed: prepare_seed,
    Predict: predict,
    Train: train,
    TrainInTurn: train,
    Trace: trace,
    ProfileTraining: profile,
}
_KINDS = {kind.name: kind for kind in FUNCTIONS}

for _kind in FUNCTIONS:
    prepare_to_parse(_kind)  # in the server, and not again in each of its processes
