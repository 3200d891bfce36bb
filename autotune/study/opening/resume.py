"""Checks before a study is resumed: its options, device, text and model must be the same."""

import shlex
import shutil
import uuid
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from autotune.analysis.number_of_seeds import number_of_seeds
from autotune.errors import StudyMismatch
from autotune.execution.local import LocalExecutor
from autotune.execution.prepared_folder import PREPARED, is_made_of
from autotune.execution.tasks import ModelSha256, Prepare
from autotune.spec.config import TECHNIQUES, TrainingConfig
from autotune.spec.result import DeviceInfo, TrialRecord
from autotune.spec.script_files import check_files_unchanged
from autotune.spec.setting import option_of
from autotune.spec.space_file import load_space
from autotune.spec.study import StudyDefinition
from autotune.spec.workload import Workload
from autotune.study.request import SearchRequest
from autotune.units import exact_size

_AGAIN = ".prepared-again-"


def check_same_study(request: SearchRequest, stored: StudyDefinition) -> None:
    """Raise StudyMismatch if the request specifies an option that differs from the stored study."""
    options: dict[str, tuple[Any, Any]] = {
        "--max-mem": (
            None if request.max_mem is None else exact_size(request.max_mem),
            exact_size(stored.cap_bytes),
        ),
        "--sampler": (request.sampler, stored.sampler),
        "--scale": (request.scale, stored.space.scale or "none"),
    }
    workload = stored.workload.to_dict()
    for name, value in request.specified_workload().items():
        if name == "learning_rates":
            options[option_of(Workload, name).flag] = ({**workload[name], **value}, workload[name])
        elif name == "script_arguments":
            requested = shlex.join(value) or "none"
            options["script arguments"] = (requested, shlex.join(workload[name]) or "none")
        elif name == "own_config":
            options["a file that has"] = _of_files(value, stored)
        elif name == "own_file":
            continue  # another name of the same training
        else:
            options[option_of(Workload, name).flag] = (value, workload[name])
    for option, (requested, known) in options.items():
        if requested is not None and requested != known:
            raise StudyMismatch(
                f"study {stored.name!r} was begun with {option} {known}, not {requested}",
                hint="leave the option out to continue the study, or give the new one another "
                "--name",
            )
    if request.space is not None and not stored.space.is_a_scale_of(load_space(request.space)):
        raise StudyMismatch(
            f"study {stored.name!r} was begun with search space {stored.space.name!r} as it was "
            f"then, not with {request.space!r}",
            hint="leave --space out to continue the study, or give the new one another --name",
        )


def _of_files(requested: Mapping[str, Any], stored: StudyDefinition) -> tuple[str, str]:
    """Returns the configurations of a trainer's file as requested and as stored, as texts.

    What the device cannot do was replaced when the study began.
    """
    known = stored.workload.own_config or {}
    possible: dict[str, Any] = {
        field: known.get(field) if str(value) in stored.unavailable.get(field, {}) else value
        for field, value in requested.items()
    }
    return TrainingConfig(**possible).describe(), TrainingConfig(**known).describe()


def check_fresh(request: SearchRequest, stored: StudyDefinition, *, reused: int) -> None:
    """Raise StudyMismatch if --fresh is given and the stored study reuses earlier results."""
    if request.fresh and reused:
        raise StudyMismatch(
            f"study {stored.name!r} was begun with {reused} results of earlier studies, which "
            "--fresh excludes",
            hint=f"begin another with --fresh --name {stored.name[:80]}-fresh, or leave --fresh "
            "out to continue it",
        )


def check_same_seeds(
    request: SearchRequest, stored: StudyDefinition, records: Sequence[TrialRecord]
) -> int | None:
    """Returns with how many seeds the study's perplexities were trained; None: it has none yet.

    Raises StudyMismatch if the request wants another number: a perplexity of one seed and a mean of
    several do not compare.
    """
    known = number_of_seeds(records)
    if None not in (known, request.perplexity_seeds) and known != request.perplexity_seeds:
        raise StudyMismatch(
            f"the perplexities of study {stored.name!r} are of --seeds {known}, and one of "
            f"--seeds {request.perplexity_seeds} does not compare with them",
            hint="leave --seeds out to continue the study, or give the new one another --name",
        )
    return known


def check_same_device(stored: StudyDefinition, device: DeviceInfo) -> None:
    """Raise StudyMismatch if results measured now could not be compared with the study's."""
    known, found = {"device": stored.device.name}, {"device": device.name}
    for package in _packages_of(stored) & stored.device.versions.keys():
        known[package] = stored.device.versions[package]
        found[package] = device.versions.get(package, "none")
    if device.type == "cuda":
        settings = "settings of PYTORCH_ALLOC_CONF:"
        known[settings] = stored.device.versions.get("allocator", "none")
        found[settings] = device.versions.get("allocator", "none")
    packages = stored.workload.packages or {}
    known.update(packages)
    for package in packages:
        found[package] = _installed_version(package)
    for what in sorted(known):
        if known[what] != found[what]:
            raise StudyMismatch(
                f"study {stored.name!r} was measured on {what} {known[what]}, here is "
                f"{found[what]}",
                hint="continue it where it began, or begin another with --name",
            )


def _packages_of(stored: StudyDefinition) -> set[str]:
    """Returns the packages that compute in trials of the study, apart from those of user's code."""
    names = {"torch"}
    if stored.workload.model_config is not None:
        names.add("transformers")
    for technique, values in stored.space.choices().items():
        packages = TECHNIQUES[technique].packages
        names.update(packages[value] for value in values if value in packages)
    return names


def _installed_version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


def check_same_model(stored: StudyDefinition, *, executor: LocalExecutor) -> None:
    """Raise StudyMismatch if code, text, tokenizer or weights of the study have changed since."""
    workload = stored.workload
    check_files_unchanged(workload)
    if not workload.model_sha256 or workload.pretrained:
        return  # the weights are among the files
    if executor.run(ModelSha256(workload=workload)) != workload.model_sha256:
        raise StudyMismatch(
            f"{workload.describe_model()} is no longer what study {stored.name!r} was begun with",
            hint="bring the old content back, or begin another study with --name",
        )


def prepare_again(definition: StudyDefinition, *, executor: LocalExecutor, folder: Path) -> None:
    """Make a stored study's prepared files if they are missing or another study's of that name.

    Raises StudyMismatch if the text or the weights are no longer those of the study.
    """
    if is_made_of(folder / PREPARED, definition.workload):
        return
    for left in folder.glob(f"{_AGAIN}*"):
        shutil.rmtree(left, ignore_errors=True)
    staging = folder / f"{_AGAIN}{uuid.uuid4().hex}"
    prepared = executor.run(Prepare(workload=definition.workload, folder=staging.absolute()))
    if prepared.text_sha256 != definition.workload.text_sha256:
        shutil.rmtree(staging)
        raise StudyMismatch(
            f"the text of dataset {definition.workload.dataset!r} is no longer the one study "
            f"{definition.name!r} was begun with",
            hint="bring the old text back, or begin another study with --name",
        )
    if prepared.model_sha256 != definition.workload.model_sha256:
        shutil.rmtree(staging)
        raise StudyMismatch(
            f"the weights of {definition.workload.model_source} are no longer those study "
            f"{definition.name!r} was begun with",
            hint="bring the old weights back, or begin another study with --name",
        )
    for left in folder.glob(f"{PREPARED}*"):  # and the weights of other seeds
        shutil.rmtree(left, ignore_errors=True)
    staging.rename(folder / PREPARED)
