"""Keeps predictions in the user's cache folder, by all that they follow from.

That is what is predicted and for which device, this package's own code, the libraries that the step
runs in, and variables that change what they do. Where kernels are run or compiled, on a CPU or of a
compiled model, it is also the machine.
A cap and the rates of a device are not part of it: they are compared with a prediction afterwards.
What code of a user's own makes is not kept: nobody knows which files it follows from.
"""

import hashlib
import os
import platform
from collections.abc import Mapping
from dataclasses import asdict, replace
from datetime import date
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from autotune.execution.cpu_shares import usable_cpus
from autotune.execution.kept_file import UNREADABLE, read_kept, write_kept
from autotune.spec.config import TECHNIQUES
from autotune.spec.prediction import Prediction, PredictionRequest
from autotune.spec.reading import parse
from autotune.spec.setting import NO_LIMIT
from autotune.spec.user_code import is_function_reference

FOLDER = "predictions"
"""Name of the folder of these files in the user's cache folder."""
LEAST = "least"
"""The same of the least activation budgets."""
_MOST_PREDICTIONS = 2000
"""One takes about 15 KB."""
_OF_TECHNIQUES = {one for technique in TECHNIQUES.values() for one in technique.packages.values()}
_LIBRARIES = ("torch", "triton", "transformers", "numpy", *sorted(_OF_TECHNIQUES))
_VARIABLES = ("TORCH", "PYTORCH", "CUBLAS", "ATEN", "OMP", "MKL")
"""How names of variables begin that decide what a step allocates."""


def read_prediction(request: PredictionRequest) -> Prediction | None:
    """Returns the prediction that was made before, with a note of its day; None without one."""
    if not _can_be_kept(request):
        return None
    try:
        kept = read_kept(FOLDER, _key(request))
        prediction = parse(Prediction, kept["prediction"])
        day = date.fromisoformat(kept["day"])
    except UNREADABLE:
        return None
    return replace(prediction, notes=(*prediction.notes, f"predicted before, on {day}, and kept"))


def write_prediction(request: PredictionRequest, prediction: Prediction) -> None:
    """Keeps a prediction; does nothing without a safe cache folder."""
    if _can_be_kept(request):
        kept = {"day": date.today().isoformat(), "prediction": prediction.to_dict()}
        write_kept(FOLDER, _key(request), kept, most_files=_MOST_PREDICTIONS)


def read_least(request: PredictionRequest) -> int | None:
    """Returns the bytes of the least activation budget that is enough, if one was too small."""
    try:
        return int(read_kept(LEAST, _key(_of_any_budget(request))))
    except UNREADABLE:
        return None


def write_least(request: PredictionRequest, least_bytes: int) -> None:
    """Keeps the least activation budget that is enough for a training."""
    if _can_be_kept(request):
        key = _key(_of_any_budget(request))
        write_kept(LEAST, key, least_bytes, most_files=_MOST_PREDICTIONS)


def _of_any_budget(request: PredictionRequest) -> PredictionRequest:
    return replace(request, config=replace(request.config, activation_budget=NO_LIMIT))


def _can_be_kept(request: PredictionRequest) -> bool:
    workload = request.workload
    return workload.script is None and not is_function_reference(workload.model)


def _key(request: PredictionRequest) -> Mapping[str, Any]:
    machine = None
    if request.device == "cpu" or request.config.compile != "none":
        machine = [platform.node(), usable_cpus()]
    return {
        "request": asdict(request),
        "code": _code_sha256(),
        "versions": {"python": platform.python_version(), **_versions()},
        "variables": {k: v for k, v in os.environ.items() if k.startswith(_VARIABLES)},
        "machine": machine,
    }


@cache
def _code_sha256() -> str:
    """Returns the hash of this package's modules: 20 ms."""
    folder = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for file in sorted(folder.rglob("*.py")):
        digest.update(str(file.relative_to(folder)).encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()


def _versions() -> Mapping[str, str | None]:
    """Returns the versions of the libraries, None for one that is not installed."""
    versions: dict[str, str | None] = {}
    for library in _LIBRARIES:
        try:
            versions[library] = version(library)
        except PackageNotFoundError:
            versions[library] = None
    return versions
