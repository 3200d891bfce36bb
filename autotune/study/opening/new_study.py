"""A new study: its definition and its prepared files, made from the request for it."""

import dataclasses
import hashlib
import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune.errors import AutotuneError, InvalidInput, Stopped, TrialLost
from autotune.execution.local import LocalExecutor
from autotune.execution.prepared_folder import PREPARED
from autotune.execution.tasks import Prepare
from autotune.spec.config import FIELD_ORDER
from autotune.spec.script_files import input_files
from autotune.spec.search_space import SearchSpace
from autotune.spec.study import DEFAULT_SAMPLER, StudyDefinition
from autotune.spec.workload import Workload, make_workload
from autotune.study.events import Listener, Notice, Preparing
from autotune.study.opening.requested_space import has_global_batch
from autotune.study.opening.staging import StagingFolder, sweep
from autotune.study.request import SearchRequest, check_snapshot, check_trials_per_device
from autotune.study.workers.outbox import OUTBOX_FOLDER


@dataclass(frozen=True, kw_only=True)
class NewStudy:
    """A study that could begin: its definition, and its prepared files in a staging directory."""

    definition: StudyDefinition
    staging: StagingFolder

    def settle(self, study_folder: Path) -> None:
        """Move the prepared files to the study's folder, and remove an earlier study's files there.

        The outbox stays: it holds results that are not in the database yet.
        """
        study_folder.mkdir(parents=True, exist_ok=True)
        for left in study_folder.iterdir():
            if left.name != OUTBOX_FOLDER:
                shutil.rmtree(left, ignore_errors=True)
        self.staging.folder.rename(study_folder / PREPARED)

    def discard(self) -> None:
        """Remove the prepared files if they are still in the staging directory."""
        self.staging.close()


def new_definition(
    request: SearchRequest,
    *,
    space: SearchSpace,
    executor: LocalExecutor,
    work: Path,
    listener: Listener,
) -> NewStudy:
    """Probe the device, prepare the workload's files and return the new study's definition.

    Raises InvalidInput for any part of the request that is invalid on this device.
    """
    sweep(work)
    listener(Preparing(what="finding out what this device can do"))
    device, _ = executor.probe(request.device, {})
    check_snapshot(request.memory_snapshot, device.device)
    check_trials_per_device(request.trials_per_device, device)
    if device.type == "cuda" and request.trials_per_device > 1:
        share = f"{request.trials_per_device} trials at a time share it"
        others = f"{device.others}; {share}" if device.others else share
        device = dataclasses.replace(device, others=others)
    workload = make_workload(device.type, space.workload, request.specified_workload())
    executor.use_devices_from(
        device, count=workload.devices_per_trial, nodes=workload.nodes_per_trial
    )
    choices = space.choices()
    _add_own(choices, workload)
    of_trainers = _OF_TRAINERS if workload.script is not None else {}
    workload, lacking = executor.examine(
        workload,
        {field: [*values, *of_trainers.get(field, ())] for field, values in choices.items()},
        device=device.device,
        learns_global_batch=not has_global_batch(request, space),
    )
    _add_own(choices, workload)
    for field in of_trainers:
        known = lacking.get(field, {})
        lacking[field] = {str(value): known[value] for value in choices[field] if value in known}
    steps_in_backward = "backward" in space.choices().get("optimizer_fusion", ())
    is_possible = "backward" not in lacking.get("optimizer_fusion", {})
    if workload.script is not None and steps_in_backward and is_possible:
        listener(Preparing(what=f"trying two steps of {workload.script}"))
        reason = executor.rehearse(
            workload, micro_batch_size=workload.global_batch, device=device.device
        )
        if reason:
            lacking.setdefault("optimizer_fusion", {})["backward"] = reason
    smaller = space.smaller_micro_batches(workload.global_batch)
    own_micro_batch = (workload.own_config or {}).get("micro_batch_size", workload.global_batch)
    if own_micro_batch < workload.global_batch:
        smaller = sorted({*smaller, own_micro_batch})
    if workload.script is not None and smaller:
        listener(Preparing(what=f"trying a micro batch of {smaller[0]} in {workload.script}"))
        reason = executor.rehearse(workload, micro_batch_size=smaller[0], device=device.device)
        if reason:
            lacking["micro_batch_size"] = {str(size): reason for size in smaller}
    # This probe compiles programs, so it runs only after the cheap checks.
    _, not_on_device = executor.probe(device.device, choices)
    unavailable = {}
    for technique in FIELD_ORDER:
        if technique in lacking or technique in not_on_device:
            unavailable[technique] = lacking.get(technique, {}) | not_on_device.get(technique, {})
    workload = _with_possible_choices(workload, unavailable, listener)
    definition = StudyDefinition(
        name=request.name or "",
        workload=workload,
        space=space,
        device=device,
        unavailable=unavailable,
        cap_bytes=device.total_memory_bytes if request.max_mem is None else request.max_mem,
        seed=workload.seed,
        sampler=request.sampler or DEFAULT_SAMPLER,
    )
    # Rejects a space in which nothing works, before anything is prepared.
    definition.legal_space()
    if workload.script is None:
        listener(Preparing(what=f"reading {workload.dataset} and drawing the initial weights"))
    staging = StagingFolder(work)
    try:
        prepared = executor.run(Prepare(workload=workload, folder=staging.folder.absolute()))
    except BaseException:
        staging.close()
        raise
    workload = dataclasses.replace(
        workload,
        text_sha256=prepared.text_sha256,
        script_files_after_apply={**workload.script_files_after_apply, **input_files(workload)},
        model_sha256=prepared.model_sha256,
        chat_column=prepared.chat_column,
        prompt_format=prepared.prompt_format,
    )
    if workload.prompts is not None and definition.workload.prompts is None:
        read = f"{workload.dataset} is read by its columns: {workload.prompts.describe()}"
        listener(Notice(message=read))
    definition = dataclasses.replace(definition, workload=workload)
    definition = dataclasses.replace(definition, name=request.name or default_name(definition))
    return NewStudy(definition=definition, staging=staging)


def _add_own(choices: dict[str, list[Any]], workload: Workload) -> None:
    """Adds what the user's own training has to the choices of a space."""
    for field, value in (workload.own_config or {}).items():
        if value not in choices[field]:
            choices[field].append(value)


_OF_TRAINERS: Mapping[str, tuple[str, ...]] = {
    "precision": ("tf32", "bf16-mixed", "fp16-mixed", "bf16-true"),
    "checkpointing": ("block",),
    "compile": ("model",),
}
"""What the trainer of a script may do by itself, which is known only once the script has run."""


def _with_possible_choices(
    workload: Workload, unavailable: Mapping[str, Mapping[str, str]], listener: Listener
) -> Workload:
    """Returns the workload with what its trainer's file asks for replaced where it does not work.

    Only by what trains nearly the same numbers. Raises InvalidInput for what has no such neighbour.
    """
    own = dict(workload.own_config or {})
    plain = dataclasses.replace(workload.legality_context, own=None)
    for field, value in own.items():
        reason = unavailable.get(field, {}).get(str(value))
        if reason is None:
            continue
        if field not in _REPLACEABLE and workload.script is None:
            raise InvalidInput(
                f"{workload.own_name} trains with {field} {value}, which is not possible here: "
                f"{reason}",
                hint="search on a machine that has it, or save a copy of the file without",
            )
        own[field] = plain.default_of(field)
        message = f"{workload.own_name} has {field} {value}, trials have {own[field]}: {reason}"
        listener(Notice(message=message))
    return dataclasses.replace(workload, own_config=own) if own else workload


_REPLACEABLE = (
    "precision",
    "compile",
    "compile_mode",
    "optimizer_fusion",
    "attention",
    "kernels",
    "allocator",
    "activation_offload",
    "offload",
)
"""Techniques of a file whose default trains what another value does, apart from rounding."""


def default_name(definition: StudyDefinition) -> str:
    """Returns a name such as `quick-gpt-48MiB-1f3c5a`, which depends on the definition alone."""
    identity = json.dumps(definition.identity(), sort_keys=True).encode()
    digest = hashlib.sha256(identity).hexdigest()[:6]
    size, unit = definition.cap_bytes, "B"
    for larger_unit in ("KiB", "MiB", "GiB"):
        if size % 1024 == 0 and size:
            size, unit = size // 1024, larger_unit
    cap = f"{size}{unit}"
    if definition.cap_bytes == definition.device.total_memory_bytes:
        cap = definition.device.type
    return f"{definition.space.name}-{definition.workload.model_name}-{cap}-{digest}"


def with_peaks(
    new: NewStudy, request: SearchRequest, *, executor: LocalExecutor, listener: Listener
) -> NewStudy:
    """Returns the new study with what its device can do at most, measured for its precisions.

    Trials are compared with it by the FLOPs in their predictions. So it is not measured where there
    are none. If it cannot be measured, the user is told, and the study goes on without.
    """
    definition = new.definition
    if definition.workload.script is not None or not request.predict:
        return new
    own = definition.baseline_config().precision
    chosen = {own, *definition.space.choices()["precision"]}
    possible = chosen - definition.unavailable.get("precision", {}).keys()
    precisions = sorted(possible, key=lambda precision: (precision != own, precision))
    listener(Preparing(what=f"measuring how fast {definition.device.device} can be at most"))
    try:
        device = executor.measure_peaks(
            definition.device, precisions, definition.workload.linear_shape
        )
    except (Stopped, TrialLost):
        raise
    except AutotuneError as error:
        message = f"no utilization of the device is given, as its peaks were not measured: {error}"
        listener(Notice(message=message))
        return new
    return NewStudy(definition=dataclasses.replace(definition, device=device), staging=new.staging)
