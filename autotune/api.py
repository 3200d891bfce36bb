"""The Python interface: the functions of the command line, with dataclasses as results.

Importing it takes a fraction of a second and does not import torch, because training scripts do
`import autotune`: each function imports the search or the database when it is called.
"""

# ruff: noqa: PLC0415

import dataclasses
import inspect
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from autotune.analysis.pick import DEFAULT_PREFERENCES, Preferences, check_preferences, chosen_trial
from autotune.errors import InvalidInput
from autotune.importers import with_trainer_file
from autotune.result import Result, report_file
from autotune.spec.config import configuration_of
from autotune.spec.model_choice import with_model_config
from autotune.spec.prediction import Extrapolation, Prediction
from autotune.spec.study import DEFAULT_STORAGE, Sampler
from autotune.study.notebook import is_notebook, live_progress, status_line
from autotune.system.interrupt import stoppable

if TYPE_CHECKING:
    import optuna
    import plotly.graph_objects as go

    from autotune.analysis.explanation import Explanation
    from autotune.exporters.into.written import WrittenInto
    from autotune.exporters.written import WrittenExport
    from autotune.predictor.memory_fit import Fitting
    from autotune.reporting.study_view import StudyView
    from autotune.spec.kept_activations import KeptActivations
    from autotune.spec.memory_fit import MemoryFit
    from autotune.storage.store import StudySummary
    from autotune.study.dry_run import Plan
    from autotune.study.events import Listener
    from autotune.study.fit.request import FitRequest
    from autotune.study.fit.result import FitResult
    from autotune.study.optuna_export import OptunaExport
    from autotune.study.prediction.predicted_training import PredictedTraining
    from autotune.study.profiling import StoredProfile
    from autotune.study.request import SearchRequest

Parameters = ParamSpec("Parameters")
Returned = TypeVar("Returned")


def _takes_parameters_of(
    function: Callable[Parameters, object],
) -> Callable[[Callable[..., Returned]], Callable[Parameters, Returned]]:
    """Give a function the signature of another one, for type checkers, editors and `help`.

    Keywords that only the function itself has are added to it.
    """

    def with_signature(decorated: Callable[..., Returned]) -> Callable[Parameters, Returned]:
        given, own = inspect.signature(function), inspect.signature(decorated)
        *parameters, others = given.parameters.values()  # the last one is **workload
        for name, parameter in own.parameters.items():
            if parameter.kind is parameter.KEYWORD_ONLY and name not in given.parameters:
                parameters.append(parameter)
        decorated.__signature__ = given.replace(  # type: ignore[attr-defined]
            parameters=[*parameters, others], return_annotation=own.return_annotation
        )
        return decorated

    return with_signature


def _ignore(_event: object) -> None:
    """Listen to nothing."""


def _never() -> bool:
    return False


def search(
    *,
    from_file: str | os.PathLike[str] | Sequence[str] | None = None,
    max_mem: str | int | None = None,
    space: str | None = None,
    scale: str | None = None,
    name: str | None = None,
    device: str | None = None,
    trials: int | None = None,
    time_budget: str | float | None = None,
    until_converged: bool = False,
    trial_time_limit: str | float = 600.0,
    compile_time_limit: str | float | None = None,
    step_time_limit: str | float | None = None,
    sampler: Sampler | None = None,
    seed: int | None = None,
    predict: bool = True,
    full_trainings: bool = False,
    perplexity_seeds: int | None = None,
    confirm: bool = True,
    confirm_share: float = 0.2,
    fresh: bool = False,
    devices: str | None = None,
    workers: int | None = None,
    ray: str | None = None,
    trials_per_device: int = 1,
    database_wait: str | float = 300.0,
    memory_snapshot: bool = False,
    profile: str | None = None,
    storage: str = DEFAULT_STORAGE,
    preferences: Preferences = DEFAULT_PREFERENCES,
    listener: "Listener | None" = None,
    should_stop: Callable[[], bool] | None = None,
    **workload: Any,
) -> Result:
    """Run a study, or resume the one of that name, and return its records, front and pick.

    Every setting of `autotune search` is a parameter; `dry_run` takes the same ones and says what a
    search would do. `space` is the name of a search space or the path of a TOML file, `scale` one
    of its scales. Sizes and durations are numbers of bytes and seconds, or strings such as "8GiB"
    and "30m". `workload` takes the fields of `Workload`: `layers=12, width=768, dataset="my.txt"`;
    the search space or the device decides the others. Works in a plain script, without a main
    guard.

    A new study reuses what earlier studies in `storage` measured for the same workload, device and
    versions, in addition to its `trials`; with `fresh` it measures everything again.

    After the trials the finalists are measured again, in at most `confirm_share` of the whole time;
    `confirm=False` leaves it out.

    A new study without `trials`, `time_budget` and `until_converged` takes about 10 minutes on a
    CPU and 30 on a GPU; `time_budget="none"` lifts that.

    A trial is stopped after `trial_time_limit`, or if a step takes longer than `step_time_limit`
    (by default a fifth of it); a step that compiles code may take `compile_time_limit` (by default
    half of it). With `memory_snapshot`, torch's allocation history of each trial is stored in the
    study's folder (CUDA only). With `profile`, the "pick" or every trial of the "front" is profiled
    at the end, as by `autotune.profile`.

    With `devices`, a trial runs on each of several devices of one model at once: "all" GPUs, a
    number such as "4", or names such as "cuda:0,cuda:1"; on a CPU a number of slots, each with its
    share of the cores. `workers=4` is another way to say "4". With `ray`, trials run on a Ray
    cluster: that of this machine ("auto"), a new one on this machine ("local"), or one at an
    address such as "ray://host:10001"; a Ray that this process is connected to is used as it is.
    The same call from another process joins the study, also from another machine if `storage` is in
    PostgreSQL. `database_wait` is how long to wait for an unreachable database.

    `listener` is called with each event. Without one, a notebook shows the progress.

    Raises AutotuneError for a request that cannot be carried out. Ctrl-C and the stop button of a
    notebook end the running trial, then the call, with KeyboardInterrupt; all results are stored,
    and the same call resumes the study. A second Ctrl-C interrupts at once.
    """
    settings = dict(locals())  # a test compares the parameters with the fields of the request
    for name in ("workload", "listener", "should_stop"):
        del settings[name]
    from autotune.study.events import Notice
    from autotune.study.profiling import profile_at_end
    from autotune.study.request import SearchRequest
    from autotune.study.search import search as run

    settings = with_trainer_file({**settings, **workload}, SearchRequest)
    request = SearchRequest.of(with_model_config(settings))
    stopped = "the search was stopped; every finished trial is stored, and the same call continues"
    with (
        _heard_by(listener, request) as listen,
        stoppable(should_stop, what_happened=stopped) as is_stopping,
    ):
        found = run(request, listener=listen, should_stop=is_stopping)
        profile_at_end(
            found,
            request,
            should_stop=is_stopping,
            note=lambda sentence: listen(Notice(message=sentence)),
        )
    return Result.of(found, url=storage, preferences=preferences)


def confirm(
    study: str,
    *,
    trial: int | None = None,
    time_budget: str | float | None = None,
    confirm_share: float = 0.2,
    ray: str | None = None,
    storage: str = DEFAULT_STORAGE,
    preferences: Preferences = DEFAULT_PREFERENCES,
    listener: "Listener | None" = None,
    should_stop: Callable[[], bool] | None = None,
) -> Result:
    """Measure the finalists of a study again, or its trial of that number, and return the result.

    Each is trained in turn with the baseline, so that the same disturbances meet both. It goes on
    until nothing is uncertain, for `time_budget`, or for what `confirm_share` of the search's time
    leaves. With `ray` it uses a device of that Ray cluster, as `search` does. Everything measured
    is stored, and the same call goes on. Raises UnknownStudy, InvalidInput for a trial without a
    speed, and KeyboardInterrupt as `search` does.
    """
    from autotune.study.confirmation.request import ConfirmRequest
    from autotune.study.search import search as run

    asked = ConfirmRequest(
        study=study,
        trial=trial,
        time_budget=time_budget,  # type: ignore[arg-type]  # also text, which it reads
        confirm_share=confirm_share,
        ray=ray,
        storage=storage,
        preferences=preferences,
    )
    request = asked.search
    stopped = (
        "the confirmation was stopped; what was measured is stored, and the same call continues"
    )
    with (
        _heard_by(listener, request) as listen,
        stoppable(should_stop, what_happened=stopped) as is_stopping,
    ):
        found = run(
            request, listener=listen, should_stop=is_stopping, confirmation=asked.confirmation
        )
    return Result.of(found, url=storage, preferences=preferences)


def _heard_by(
    listener: "Listener | None", request: "SearchRequest"
) -> "AbstractContextManager[Listener]":
    """Returns the listener of a search; where it has none a notebook's cell shows the progress."""
    if listener is not None or not is_notebook():
        return nullcontext(listener or _ignore)
    return live_progress(
        preferences=request.preferences,
        until_converged=request.until_converged,
    )


@_takes_parameters_of(search)
def dry_run(
    *,
    time_trials: bool = False,
    preferences: Preferences = DEFAULT_PREFERENCES,
    listener: "Listener | None" = None,
    should_stop: Callable[[], bool] | None = None,
    **settings: Any,
) -> "Plan":
    """Returns what a search with these settings would do, with predicted peaks of its first trials.

    Takes the parameters of `search`. Creates no study and runs no trial: it checks the request and
    prepares the files of the workload, and runs a script for the two steps that show what it can
    have. With `time_trials`, it times a few short trainings and estimates how long the search would
    take. Raises AutotuneError for a request that cannot be carried out.
    """
    from autotune.study.dry_run import plan
    from autotune.study.request import SearchRequest

    settings |= {"preferences": preferences}
    settings = with_trainer_file(settings, SearchRequest)
    request = SearchRequest.of(with_model_config(settings), besides=("time_trials",))
    with _heard_by(listener, request) as listen:
        return plan(
            request, time_trials=time_trials, listener=listen, should_stop=should_stop or _never
        )


def predict(
    study: str | None = None,
    *,
    trial: int | None = None,
    device: str | None = None,
    configuration: Mapping[str, Any] | None = None,
    compute_capability: str | None = None,
    torch_version: str | None = None,
    with_timeline: bool = False,
    whole_depth: bool = False,
    storage: str = DEFAULT_STORAGE,
    **workload: Any,
) -> Prediction:
    """Predict the peak memory of one configuration, in bytes, by a training step on fake tensors.

    This needs no GPU, no text and none of the memory of the model. Either `study` names a study:
    its trial of that number, by default its pick, is predicted for its device. Or `configuration`
    takes the fields of `TrainingConfig`, such as {"checkpointing": "block", "compile": "block"},
    and `workload` those of `Workload`; `device` is "cpu" or "cuda", also on a machine without a
    GPU, or a card by its data sheet, such as "h100" (`spec/data_sheets.py`). Where the device's
    rates are known, from a study in `storage` or the data sheet, the prediction has a speed.
    `compute_capability`, such as "9.0", selects another GPU than that of the study or of this
    machine. A deep model that is compiled as a whole is extrapolated from shallower ones, unless
    `whole_depth` has all its layers predicted. Raises InvalidInput for invalid settings,
    UnknownStudy, and PredictionImpossible for a model that cannot run on fake tensors.
    """
    from autotune.execution.local import LocalExecutor
    from autotune.study.prediction.predicted_device import predicted_device_of
    from autotune.study.prediction.predicted_training import PredictedTraining
    from autotune.study.prediction.predictions import Forecaster, forecaster_of, workload_of

    _check_configuration(configuration)
    given = {
        "study": study,
        "trial": trial,
        "device": device,
        "configuration": configuration or {},
        "compute_capability": compute_capability,
        "torch_version": torch_version,
        "storage": storage,
    }
    given = with_trainer_file({**workload, **given}, PredictedTraining)
    request = PredictedTraining.of(with_model_config(given))
    result = _result_of(request)
    extrapolates: Extrapolation = "nothing" if whole_depth else "compiled"
    with TemporaryDirectory() as folder, LocalExecutor(Path(folder)) as executor:
        if result is not None:
            forecaster = forecaster_of(
                result,
                executor=executor,
                compute_capability=compute_capability,
                torch_version=torch_version,
            )
            forecaster = dataclasses.replace(forecaster, extrapolates=extrapolates)
            config = chosen_trial(result, trial).config
            return forecaster.predict(config, with_timeline=with_timeline)
        predicted = predicted_device_of(
            device, compute_capability=compute_capability, executor=executor, storage=storage
        )
        complete_workload = workload_of(predicted.type, request.workload)
        forecaster = Forecaster.for_device(
            predicted,
            executor=executor,
            workload=complete_workload,
            torch_version=torch_version,
            extrapolates=extrapolates,
        )
        config = configuration_of(request.configuration, complete_workload.legality_context)
        return forecaster.predict(config, with_timeline=with_timeline)


def fit(
    study: str | None = None,
    *,
    trial: int | None = None,
    max_mem: str | int | None = None,
    vary: str = "layers",
    space: str | None = None,
    scale: str | None = None,
    try_all: bool = False,
    device: str | None = None,
    configuration: Mapping[str, Any] | None = None,
    compute_capability: str | None = None,
    torch_version: str | None = None,
    context: str | int | None = None,
    confirm: bool = True,
    storage: str = DEFAULT_STORAGE,
    **workload: Any,
) -> "FitResult":
    """Find the largest model, sequence length or micro batch that fits under a memory cap.

    Works by prediction. `vary` is "layers", "width", "seq-len", "micro-batch", "rank" (of
    adapters) or "devices" (the fewest of a trial that hold the model). Either `study` names a
    study: its workload and device, its cap unless `max_mem` is given, and the configuration of its
    trial of that number, by default of its pick; techniques are added one by one if it has no pick.
    Or `workload` takes the fields of `Workload` and `configuration` those of `TrainingConfig`;
    without a configuration techniques are added one by one, and with `space` the configurations
    that this search space names are tried, or with `try_all` every legal one. `context` is the
    memory of a CUDA context. With `confirm`, one short real trial follows if this machine has the
    device. Raises InvalidInput.
    """
    from autotune.study.fit.fit import fit as run
    from autotune.study.fit.request import FitRequest

    _check_configuration(configuration)
    given = {
        "study": study,
        "trial": trial,
        "max_mem": max_mem,
        "vary": vary,
        "space": space,
        "scale": scale,
        "try_all": try_all,
        "device": device,
        "configuration": configuration or {},
        "compute_capability": compute_capability,
        "torch_version": torch_version,
        "context": context,
        "confirm": confirm,
        "storage": storage,
    }
    given = with_trainer_file({**workload, **given}, FitRequest)
    request = resolved(FitRequest.of(with_model_config(given)))
    with status_line("fit") as say:
        return run(request, listener=lambda progress: say(progress.what))


def will_it_fit(
    model: Any,
    batch: Any,
    optimizer: Any = None,
    max_mem: str | int | None = None,
    device: str = "cuda",
    step: Callable[..., Any] | None = None,
) -> "MemoryFit":
    """Returns whether a training step of any torch module fits under a memory cap, by prediction.

    Needs no GPU, no study, and none of the memory: it runs copies with fake tensors, and `model`,
    which may be on the meta device, a CPU or a GPU, is left as it is, as is everything else. The
    answer is true where the training surely fits; `print` shows the peak, what holds it, and what
    would make it fit: fewer rows, recomputed blocks, an optimizer with less state.

    `batch` is what the model is called with: a mapping by name, a tuple or list by position, else
    as it is. The model gives the loss: its output, or `loss` of it. Otherwise `step` makes one
    whole training step, or returns the loss. It takes any of `model`, `batch` and `optimizer` by
    these names, or in this order, and may use what else its surroundings have. `model` and
    `optimizer` may be sequences or mappings of several; `optimizer` may be the name of one that
    does not exist yet, such as "adamw".

    `max_mem` is by default all memory of the device, where it is known; `device` is "cpu", "cuda",
    or a GPU by its data sheet, such as "l4". Raises InvalidInput for what cannot be trained so, and
    PredictionImpossible, with the line, where what is allocated depends on values.
    """
    return _fitting(model, batch, optimizer, max_mem=max_mem, device=device, step=step).answer()


def fit_to(
    model: Any,
    batch: Any,
    optimizer: Any = None,
    max_mem: str | int | None = None,
    device: str = "cuda",
    step: Callable[..., Any] | None = None,
) -> "MemoryFit":
    """Make a module recompute as few blocks as surely fit under a cap, and return the answer.

    Takes what `will_it_fit` takes. The model computes the same and keeps the names of its
    parameters and modules; nothing is changed where it fits as it is. Raises IllegalConfiguration,
    and changes nothing, where recomputing every block is not enough.
    """
    return _fitting(model, batch, optimizer, max_mem=max_mem, device=device, step=step).apply()


def checkpoint(
    model: Any,
    batch: Any,
    optimizer: Any = "adamw",
    *,
    budget: str | int,
    device: str | None = None,
    step: Callable[..., Any] | None = None,
) -> "KeptActivations":
    """Make a module keep the activations that a peak allows, recompute the rest, and return which.

    `budget` is the peak memory of a steady training step, with weights, gradients and the state of
    the optimizer. For each block it is chosen, operator by operator, what is kept for the backward
    pass and what runs again, so that the predicted peak is within the budget and what runs again
    takes the least time. The model computes the same and keeps the names of its parameters and
    modules; nothing is changed where all of it fits.

    `model`, `batch`, `optimizer` and `step` are as of `will_it_fit`; nothing runs but on copies
    with fake tensors. `device` is by default that of the model, which may be on the meta device.
    Raises InvalidInput and PredictionImpossible as `will_it_fit` does, and IllegalConfiguration,
    with the least that is possible, where recomputing every block is not enough.
    """
    from autotune.spec.kept_activations import BudgetRequest
    from autotune.spec.memory_fit import MemoryFitRequest

    size = BudgetRequest.of({"budget": budget}).budget
    # These import torch, which the caller has.
    from autotune.predictor.activation_budget import checkpointing_within, device_of
    from autotune.predictor.user_training import UserTraining

    training = UserTraining(model=model, batch=batch, optimizer=optimizer, step=step)
    request = MemoryFitRequest.of({"max_mem": size, "device": str(device or device_of(training))})
    return checkpointing_within(training, request, say=_said_after(_QUICK_SECONDS))


def _fitting(
    model: Any,
    batch: Any,
    optimizer: Any,
    *,
    max_mem: str | int | None,
    device: str,
    step: Callable[..., Any] | None,
) -> "Fitting":
    from autotune.spec.memory_fit import MemoryFitRequest

    request = MemoryFitRequest.of({"max_mem": max_mem, "device": str(device)})
    # These import torch, which the caller has.
    from autotune.predictor.memory_fit import fitting
    from autotune.predictor.user_training import UserTraining

    training = UserTraining(model=model, batch=batch, optimizer=optimizer, step=step)
    return fitting(training, request, say=_said_after(_QUICK_SECONDS))


_QUICK_SECONDS = 3.0
"""A prediction that takes longer says on stderr what it does."""


def _said_after(seconds: float) -> Callable[[str], None]:
    """Returns a function that prints a line to stderr, once so many seconds have passed."""
    begun = time.monotonic()

    def say(line: str) -> None:
        if time.monotonic() - begun > seconds:
            print(f"autotune: {line}", file=sys.stderr, flush=True)

    return say


def resolved(request: "FitRequest") -> "FitRequest":
    """Returns a request of `fit` with what its study says. Raises InvalidInput and UnknownStudy."""
    from autotune.study.opening.trusted_code import check_trusted

    if request.study is None:
        return request
    result = show(request.study, storage=request.storage)
    check_trusted(result.workload, study=result.study, storage=result.storage, folder=result.folder)
    has_trial = request.trial is not None or result.pick is not None
    record = chosen_trial(result, request.trial) if has_trial else None
    return request.of_study(result, trial=record)


def _check_configuration(configuration: object) -> None:
    """Raise InvalidInput for anything but a mapping of choices by field."""
    if configuration is not None and not isinstance(configuration, Mapping):
        raise InvalidInput(
            f"configuration = {configuration!r} is no dictionary of fields",
            hint='write configuration={"checkpointing": "block"}, or use to_dict() of a trial\'s '
            "config",
        )


def _result_of(request: "PredictedTraining") -> Result | None:
    """Returns the result of a study that is named. Raises InvalidInput for what contradicts it."""
    if request.study is None:
        if request.trial is not None:
            raise InvalidInput(
                f"trial {request.trial} is of no study", hint="give the study's name, too"
            )
        return None
    if given := request.described():
        raise InvalidInput(
            f"{', '.join(given)}: the study sets workload, device and configuration",
            hint="leave these out, or the study",
        )
    return show(request.study, storage=request.storage)


def show(
    study: str,
    *,
    storage: str = DEFAULT_STORAGE,
    preferences: Preferences = DEFAULT_PREFERENCES,
) -> Result:
    """Returns the records of a study with its front and pick. Raises UnknownStudy."""
    from autotune.storage.store import StudyStore
    from autotune.study.records import result_of

    check_preferences(preferences)
    with closing(StudyStore(storage)) as store:
        found = result_of(store, study, preferences)
    return Result.of(found, url=storage, preferences=preferences)


def studies(*, storage: str = DEFAULT_STORAGE) -> "list[StudySummary]":
    """Returns the studies of a database, oldest first: name, when it was begun, and its trials.

    Raises UnknownStudy if there is no such database.
    """
    from autotune.storage.store import StudyStore

    with closing(StudyStore(storage)) as store:
        return store.studies()


def compare(
    *studies: str,
    storage: str = DEFAULT_STORAGE,
    preferences: Preferences = DEFAULT_PREFERENCES,
) -> "go.Figure":
    """Returns a figure with the fronts of several studies, as `autotune compare` draws it.

    Raises InvalidInput for fewer than two studies, and UnknownStudy.
    """
    from autotune.reporting.figures import comparison

    views = [view(study, storage=storage, preferences=preferences) for study in studies]
    return comparison.draw(comparison.compute(views))


def plot(
    study: str,
    kind: str = "pareto",
    *,
    x: str | None = None,
    y: str | None = None,
    three_d: bool = False,
    feasible: bool = False,
    trials: Sequence[int] | None = None,
    trial: int | None = None,
    storage: str = DEFAULT_STORAGE,
    preferences: Preferences = DEFAULT_PREFERENCES,
) -> "go.Figure":
    """Returns a figure of a study, as `Result.plot` does. Raises UnknownStudy."""
    return show(study, storage=storage, preferences=preferences).plot(
        kind, x=x, y=y, three_d=three_d, feasible=feasible, trials=trials, trial=trial
    )


def write_report(
    study: str,
    path: str | Path | None = None,
    *,
    storage: str = DEFAULT_STORAGE,
    preferences: Preferences = DEFAULT_PREFERENCES,
) -> Path:
    """Write a study as one HTML page, as `Result.write_report` does. Raises UnknownStudy."""
    file = report_file(study, path)
    return show(study, storage=storage, preferences=preferences).write_report(file)


def export(
    study: str,
    to: str,
    *,
    trial: int | None = None,
    out: str | Path | None = None,
    target_version: str | None = None,
    strict: bool = False,
    overwrite: bool = False,
    storage: str = DEFAULT_STORAGE,
    preferences: Preferences = DEFAULT_PREFERENCES,
) -> "WrittenExport":
    """Write a trial for another trainer, as `Result.export` does. Raises UnknownStudy."""
    return show(study, storage=storage, preferences=preferences).export(
        to,
        trial=trial,
        out=out,
        target_version=target_version,
        strict=strict,
        overwrite=overwrite,
    )


def export_into(
    study: str,
    file: str | Path,
    *,
    trial: int | None = None,
    out: str | Path | None = None,
    in_place: bool = False,
    strict: bool = False,
    overwrite: bool = False,
    storage: str = DEFAULT_STORAGE,
    preferences: Preferences = DEFAULT_PREFERENCES,
) -> "WrittenInto":
    """Write a trial into a trainer's own file, as `Result.export_into` does.

    Raises UnknownStudy.
    """
    return show(study, storage=storage, preferences=preferences).export_into(
        file, trial=trial, out=out, in_place=in_place, strict=strict, overwrite=overwrite
    )


def explain(
    study: str,
    trial: int | None = None,
    *,
    torch_version: str | None = None,
    storage: str = DEFAULT_STORAGE,
    preferences: Preferences = DEFAULT_PREFERENCES,
) -> "Explanation":
    """Explain a trial's memory peak, as `Result.explain` does. Raises UnknownStudy."""
    result = show(study, storage=storage, preferences=preferences)
    return result.explain(trial, torch_version=torch_version)


def profile(
    study: str,
    trial: int | None = None,
    *,
    steps: int = 3,
    out: str | Path | None = None,
    fresh: bool = False,
    storage: str = DEFAULT_STORAGE,
    preferences: Preferences = DEFAULT_PREFERENCES,
    note: Callable[[str], None] = _ignore,
) -> "StoredProfile":
    """Run a trial, by default the pick, again under torch's profiler, for `steps` steady steps.

    The files are written to `out`, or to the study's work folder. A profile of as many steps that
    is there already is returned, except with `fresh`. `note` is called with sentences on what is
    done. No number of the trial changes. Raises UnknownStudy, InvalidInput for a trial that never
    came to a steady step, StudyMismatch on another device than the study's, StorageUnavailable
    where there is no room, PreparationFailed where the training fails, and KeyboardInterrupt.
    """
    from autotune.study.profiling import ProfileRequest, profile_trial

    request = ProfileRequest(
        study=study,
        trial=trial,
        steps=steps,
        out=None if out is None else Path(out),
        fresh=fresh,
        storage=storage,
        preferences=preferences,
    )
    with stoppable(None, what_happened="the profile was stopped; nothing was written") as stopping:
        return profile_trial(request, should_stop=stopping, note=note)


def optuna_study(study: str, *, storage: str = DEFAULT_STORAGE) -> "optuna.Study":
    """Returns the results as an in-memory Optuna study, as a sampler is told them.

    Each trial has the constraints `device_memory` and `training`, feasible at or below zero, and
    the user attributes `autotune_number` and `outcome`. An objective that was not measured has the
    worst value seen until then; `write_optuna_study` writes only what was measured. Raises
    UnknownStudy.
    """
    from autotune.storage.store import StudyStore
    from autotune.study.sampler.optuna_samplers import optuna_study_of

    with closing(StudyStore(storage)) as store:
        return optuna_study_of(store.definition(study)[0], store.trials(study))


def write_optuna_study(study: str, url: str, *, storage: str = DEFAULT_STORAGE) -> "OptunaExport":
    """Write a study to the Optuna database at `url`, for optuna-dashboard and Optuna's plots.

    Trials that were trained are COMPLETE, also those over the cap; those that were predicted over
    it, ran out of memory or were stopped early are PRUNED, those that failed FAIL; those without a
    result are left out. Each has the constraints `device_memory` and `training`, feasible at or
    below zero, and everything else that is known of it as user attributes. Writes all of it, or
    nothing. Raises UnknownStudy, StudyMismatch where there is an Optuna study of that name, and
    StorageUnavailable.
    """
    from autotune.storage.store import StudyStore
    from autotune.study.optuna_export import export_to_optuna

    with closing(StudyStore(storage)) as store:
        (exported,) = export_to_optuna(store, [study], url)
    return exported


def view(
    study: str,
    *,
    storage: str = DEFAULT_STORAGE,
    preferences: Preferences = DEFAULT_PREFERENCES,
) -> "StudyView":
    """Returns the result with the definition and the predictions, as figures and reports need them.

    Raises UnknownStudy.
    """
    from autotune.storage.store import StudyStore
    from autotune.study.records import view_of

    with closing(StudyStore(storage)) as store:
        return view_of(store, study, preferences)
