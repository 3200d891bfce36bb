"""What must be the same when a study is continued: what was asked for, the device, the text and the model."""

import shutil
import uuid
from pathlib import Path
from typing import Any

from autotune.errors import StudyMismatch
from autotune.execution.local import LocalExecutor
from autotune.execution.server.prepared import is_made_of
from autotune.execution.server_tasks import PREPARED
from autotune.spec.result import DeviceInfo
from autotune.spec.space_file import load_space
from autotune.spec.study import StudyDefinition
from autotune.spec.workload_settings import option_of
from autotune.study.request import SearchRequest

_AGAIN = ".prepared-again-"


def check_same_study(request: SearchRequest, stored: StudyDefinition) -> None:
    """Raises StudyMismatch when the request says something that the stored study was not made with."""
    said: dict[str, tuple[Any, Any]] = {
        "--max-mem": (request.cap_bytes, stored.cap_bytes),
        "--sampler": (request.sampler, stored.sampler),
        "--scale": (request.scale, stored.space.scale or "none"),
    }
    workload = stored.workload.to_dict()
    for name, value in request.said_about_workload().items():
        if name == "learning_rates":
            said[option_of(name)] = ({**workload[name], **value}, workload[name])
        else:
            said[option_of(name)] = (value, workload[name])
    for option, (asked, known) in said.items():
        if asked is not None and asked != known:
            raise StudyMismatch(
                f"study {stored.name!r} was begun with {option} {known}, not {asked}",
                hint="leave the option out to continue the study, or give the new one another --name",
            )
    if request.space is not None and not stored.space.is_a_scale_of(load_space(request.space)):
        raise StudyMismatch(
            f"study {stored.name!r} was begun with search space {stored.space.name!r} as it was then, "
            f"not with {request.space!r}",
            hint="leave --space out to continue the study, or give the new one another --name",
        )


def check_fresh(request: SearchRequest, stored: StudyDefinition, *, reused: int) -> None:
    """Raises StudyMismatch where nothing of earlier studies is wanted and the stored one began with their results."""
    if request.fresh and reused:
        raise StudyMismatch(
            f"study {stored.name!r} was begun with {reused} results of earlier studies, which --fresh has no use for",
            hint=f"begin another with --fresh --name {stored.name[:80]}-fresh, or leave --fresh out to continue it",
        )


def check_same_device(stored: StudyDefinition, device: DeviceInfo) -> None:
    """Raises StudyMismatch when results measured now could not stand beside those of the study."""
    for what, known, found in (
        ("device", stored.device.name, device.name),
        ("torch", stored.device.versions.get("torch"), device.versions.get("torch")),
    ):
        if known != found:
            raise StudyMismatch(
                f"study {stored.name!r} was measured on {what} {known}, here is {found}",
                hint="continue it where it began, or begin another with --name",
            )


def check_same_model(stored: StudyDefinition, *, executor: LocalExecutor) -> None:
    """Raises StudyMismatch when the Python file that makes the model is no longer that of the study."""
    workload = stored.workload
    is_run_again = (
        workload.model_sha256 and not workload.pretrained
    )  # weights were taken down when it began
    if is_run_again and executor.model_sha256(workload) != workload.model_sha256:
        raise StudyMismatch(
            f"{workload.describe_model()} is no longer what study {stored.name!r} was begun with",
            hint="bring the old content back, or begin another study with --name",
        )


def prepare_again(definition: StudyDefinition, *, executor: LocalExecutor, folder: Path) -> None:
    """Makes the prepared files of a stored study where they are missing, or another study's of that name.

    Raises StudyMismatch where the text or the weights are no longer those of the study.
    """
    if is_made_of(folder / PREPARED, definition.workload):
        return
    for left in folder.glob(f"{_AGAIN}*"):
        shutil.rmtree(left, ignore_errors=True)
    waiting = folder / f"{_AGAIN}{uuid.uuid4().hex}"
    prepared = executor.prepare(definition.workload, waiting)
    if prepared["text_sha256"] != definition.workload.text_sha256:
        shutil.rmtree(waiting)
        raise StudyMismatch(
            f"the text of dataset {definition.workload.dataset!r} is no longer the one study {definition.name!r} "
            "was begun with",
            hint="bring the old text back, or begin another study with --name",
        )
    if prepared["model_sha256"] != definition.workload.model_sha256:
        shutil.rmtree(waiting)
        raise StudyMismatch(
            f"the weights of {definition.workload.model_source} are no longer those study {definition.name!r} "
            "was begun with",
            hint="bring the old weights back, or begin another study with --name",
        )
    for left in folder.glob(f"{PREPARED}*"):  # and the weights of other seeds
        shutil.rmtree(left, ignore_errors=True)
    waiting.rename(folder / PREPARED)
