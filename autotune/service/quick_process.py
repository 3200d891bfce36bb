"""Answers one question of `quick.py`: `python -m autotune.service.quick_process`.

Reads the question as JSON from stdin and writes the answer, or the error, as JSON to stdout; before
it, lines that say what is done.
"""

import contextlib
import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from autotune import api
from autotune.errors import AutotuneError, InvalidInput, PredictionImpossible, StorageUnreachable
from autotune.memory.nvml import all_devices
from autotune.reporting.figures import FigureOptions
from autotune.result import draw
from autotune.service.settings import SubmissionRules
from autotune.service.submissions import (
    check_space_name,
    check_submission,
    checked_workload,
    default_time_budget_seconds,
)
from autotune.storage.hidden_url import HiddenUrl, told_to_others
from autotune.study.dry_run import plan
from autotune.study.prediction.pasted import PastedTraining, Progress, answer_part

_NICENESS = 10


def main() -> int:
    """Answer the question on stdin; return the exit code."""
    with contextlib.suppress(OSError):
        os.nice(_NICENESS)
    question, order = json.load(sys.stdin)
    # What a library or a user's model prints must not be taken for the answer.
    answers = os.dup(1)
    os.dup2(2, 1)
    with os.fdopen(answers, "w") as pipe:

        def progress(what: str) -> None:
            pipe.write(json.dumps({"progress": what}) + "\n")
            pipe.flush()

        try:
            answer = {"answer": _ANSWERS[question](order, progress)}
        except AutotuneError as error:
            hidden = HiddenUrl(order["rules"]["storage"])
            message, hint = map(hidden.without, told_to_others(error))
            answer = {"error": message, "hint": hint, "kind": _kind(error)}
        json.dump(answer, pipe, allow_nan=False)
    return 0


def _kind(error: AutotuneError) -> str:
    for kind in (InvalidInput, PredictionImpossible, StorageUnreachable):
        if isinstance(error, kind):
            return kind.__name__
    return "PreparationFailed"


def _dry_run(order: Mapping[str, Any], progress: Progress) -> dict[str, Any]:
    rules = SubmissionRules.of(order["rules"])
    is_elsewhere = rules.device_type == "cuda" and not all_devices()
    here = replace(rules, devices=None) if is_elsewhere else rules
    with TemporaryDirectory() as folder:
        checked = check_submission(order["settings"], here, folder=Path(folder))
        planned = plan(checked.request, space=checked.space).to_dict()
    if not is_elsewhere:
        return planned
    # Peaks and times are those of this machine; when the search ends is not.
    return {
        **planned,
        "runs_on": rules.device_kind or rules.device_type,
        "default_time_budget_seconds": default_time_budget_seconds(checked.request, rules),
    }


def _predict(order: Mapping[str, Any], progress: Progress) -> dict[str, Any]:
    return api.predict(**_of_study_or_workload(order), storage=order["rules"]["storage"]).to_dict()


def _fit(order: Mapping[str, Any], progress: Progress) -> dict[str, Any]:
    settings = _of_study_or_workload(order)
    return api.fit(**settings, confirm=False, storage=order["rules"]["storage"]).to_dict()


def _of_study_or_workload(order: Mapping[str, Any]) -> dict[str, Any]:
    rules = SubmissionRules.of(order["rules"])
    settings = dict(order["settings"])
    check_space_name(settings.get("space"))
    workload = checked_workload(settings.pop("workload", {}), rules)
    return {**settings, **workload}


def _timeline(order: Mapping[str, Any], progress: Progress) -> dict[str, Any]:
    view = api.view(order["study"], storage=order["rules"]["storage"])
    figure = draw(view, "timeline", FigureOptions(trial=order["trial"]))
    drawn: dict[str, Any] = json.loads(figure.to_json())
    return drawn


def _will_it_fit(order: Mapping[str, Any], progress: Progress) -> dict[str, Any]:
    # No file of the server is read, also none that a search may read.
    rules = replace(SubmissionRules.of(order["rules"]), data_roots=(), code_folders=())
    pasted = PastedTraining.of(order["settings"])
    settings = {name: value for name, value in pasted.read.settings.items() if value is not None}
    return answer_part(
        order["part"],
        pasted,
        checked_workload(settings, rules),
        storage=rules.storage,
        progress=progress,
    )


_ANSWERS: Mapping[str, Callable[[Mapping[str, Any], Progress], Any]] = {
    "dry-run": _dry_run,
    "predict": _predict,
    "fit": _fit,
    "timeline": _timeline,
    "bound": _will_it_fit,
    "will-it-fit": _will_it_fit,
}


if __name__ == "__main__":
    sys.exit(main())
