"""The prepared files of a study: its text as tokens, its initial weights, and what they were made of.

Each task takes and returns JSON-ready values, in a process of its own.
"""

import json
import shutil
import uuid
from pathlib import Path
from typing import Any

from autotune.spec.user_code import is_function_reference, script_sha256
from autotune.spec.workload import Workload

_MADE_OF = "made_of.json"


def is_made_of(folder: Path, workload: Workload) -> bool:
    """Whether the prepared files are there, and those of the workload's own text and model."""
    try:
        content = json.loads((folder / _MADE_OF).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return bool(
        content == {"text_sha256": workload.text_sha256, "model_sha256": workload.model_sha256}
    )


def prepare(*, workload: dict[str, Any], folder: str) -> dict[str, Any]:
    """Writes tokens and initial weights into `folder`; returns {"text_sha256", "model_sha256", "parameters"}.

    The folder appears whole or not at all. Raises InvalidDataset, and InvalidInput for a model or a
    tokenizer.
    """
    from autotune.data.sources import read_documents
    from autotune.data.tokens import write_tokens
    from autotune.models.weights import draw_weights

    wanted, target = Workload(**workload), Path(folder)
    made_of = {"text_sha256": "", "model_sha256": model_sha256(workload=workload)}
    if wanted.script is not None:
        target.mkdir(parents=True)  # a script reads its own text and draws its own weights
        _write_made_of(target, made_of)
        return {**made_of, "parameters": None}
    unfinished = target.with_name(f"{target.name}.unfinished-{uuid.uuid4().hex}")
    unfinished.mkdir(parents=True)
    try:
        parts = read_documents(wanted, cache_folder=unfinished / "datasets")
        made_of["text_sha256"] = write_tokens(parts, wanted, folder=unfinished)
        parameters = draw_weights(wanted, file=unfinished / "weights.pt")
        shutil.rmtree(unfinished / "datasets", ignore_errors=True)
        _write_made_of(unfinished, made_of)
        shutil.rmtree(target, ignore_errors=True)
        unfinished.rename(target)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return {**made_of, "parameters": parameters}


def model_sha256(*, workload: dict[str, Any]) -> str:
    """SHA-256 of what the model is made of beside its config.json: a Python file, trained weights; else empty.

    Raises InvalidInput.
    """
    from autotune.models.pretrained import weights_sha256
    from autotune.models.user_model import code_sha256

    wanted = Workload(**workload)
    if wanted.script is not None:
        return script_sha256(wanted.script)
    if wanted.pretrained:
        return weights_sha256(wanted)
    return code_sha256(wanted) if is_function_reference(wanted.model) else ""


def prepare_seed(*, workload: dict[str, Any], prepared: str, folder: str) -> dict[str, Any]:
    """Makes `folder` as `prepared` with the same text and the initial weights of the workload's own seed."""
    from autotune.models.weights import draw_weights

    source, target = Path(prepared), Path(folder)
    unfinished = target.with_name(f"{target.name}.unfinished-{uuid.uuid4().hex}")
    unfinished.mkdir(parents=True)
    try:
        wanted = Workload(**workload)
        for file in source.iterdir():
            if (
                file.name != "weights.pt" or wanted.pretrained
            ):  # another seed is then another order only
                (unfinished / file.name).symlink_to(file.absolute())
        if not wanted.pretrained:
            draw_weights(wanted, file=unfinished / "weights.pt")
        try:
            unfinished.rename(target)
        except OSError:
            if not target.exists():  # else another worker has drawn the same weights meanwhile
                raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return {}


def _write_made_of(folder: Path, made_of: dict[str, str]) -> None:
    (folder / _MADE_OF).write_text(json.dumps(made_of), encoding="utf-8")
