"""Prepares the files of a study: its text as tokens, its initial weights, and their SHA-256.

Each task takes and returns JSON-ready values, and runs in its own process.
"""

import shutil
import uuid
from pathlib import Path
from typing import Any

from autotune.data.chat import ChatColumn
from autotune.data.sources import read_documents
from autotune.data.tokens import write_tokens
from autotune.execution.server.prepared_folder import write_made_of
from autotune.models.pretrained import weights_sha256
from autotune.models.user_model import code_sha256
from autotune.models.weights import draw_weights
from autotune.spec.user_code import is_function_reference, script_sha256
from autotune.spec.workload import Workload


def prepare(*, workload: dict[str, Any], folder: str) -> dict[str, Any]:
    """Writes tokens and initial weights into `folder`, atomically.

    Returns {"text_sha256", "model_sha256", "chat_column", "parameters"}. Raises InvalidDataset, and
    InvalidInput for an invalid model or tokenizer.
    """
    study_workload = Workload(**workload)
    target = Path(folder)
    made_of = {"text_sha256": "", "model_sha256": model_sha256(workload=workload)}
    if study_workload.script is not None:
        target.mkdir(parents=True)  # a script reads its text and draws its weights itself
        write_made_of(target, made_of)
        return {**made_of, "chat_column": None, "parameters": None}
    unfinished = target.with_name(f"{target.name}.unfinished-{uuid.uuid4().hex}")
    unfinished.mkdir(parents=True)
    try:
        parts = read_documents(study_workload, cache_folder=unfinished / "datasets")
        made_of["text_sha256"] = write_tokens(parts, study_workload, folder=unfinished)
        parameters = draw_weights(study_workload, file=unfinished / "weights.pt")
        shutil.rmtree(unfinished / "datasets", ignore_errors=True)
        write_made_of(unfinished, made_of)
        shutil.rmtree(target, ignore_errors=True)
        unfinished.rename(target)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    chat_column = parts.train.column if isinstance(parts.train, ChatColumn) else None
    return {**made_of, "chat_column": chat_column, "parameters": parameters}


def model_sha256(*, workload: dict[str, Any]) -> str:
    """Returns the SHA-256 of the model's Python file, script or trained weights.

    Empty for a model that its config.json describes completely. Raises InvalidInput.
    """
    study_workload = Workload(**workload)
    if study_workload.script is not None:
        return script_sha256(study_workload.script)
    if study_workload.pretrained:
        return weights_sha256(study_workload)
    if is_function_reference(study_workload.model):
        return code_sha256(study_workload)
    return ""


def prepare_seed(*, workload: dict[str, Any], prepared: str, folder: str) -> dict[str, Any]:
    """Creates `folder` with the text of `prepared` and the initial weights of the workload's seed.

    Returns an empty dictionary.
    """
    source = Path(prepared)
    target = Path(folder)
    unfinished = target.with_name(f"{target.name}.unfinished-{uuid.uuid4().hex}")
    unfinished.mkdir(parents=True)
    try:
        seed_workload = Workload(**workload)
        for file in source.iterdir():
            # With pretrained weights, the seed changes only the order of the text.
            if file.name != "weights.pt" or seed_workload.pretrained:
                (unfinished / file.name).symlink_to(file.absolute())
        if not seed_workload.pretrained:
            draw_weights(seed_workload, file=unfinished / "weights.pt")
        try:
            unfinished.rename(target)
        except OSError:
            if not target.exists():  # otherwise another worker has drawn the same weights
                raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return {}
