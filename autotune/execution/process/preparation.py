"""Prepares the files of a study: its text as tokens, its initial weights, and their SHA-256."""

import shutil
import uuid

from autotune.data.chat import ChatColumn
from autotune.data.prompts import PromptColumns
from autotune.data.sources import read_documents
from autotune.data.tokens import write_tokens
from autotune.execution.prepared_folder import write_made_of
from autotune.execution.tasks import ModelSha256, Prepare, Prepared, PrepareSeed
from autotune.models.pretrained import weights_sha256
from autotune.models.user_model import code_sha256
from autotune.models.weights import draw_weights
from autotune.spec.user_code import is_function_reference, script_sha256
from autotune.spec.workload import Workload


def prepare(task: Prepare) -> Prepared:
    workload, folder = task.workload, task.folder
    made_of = {"text_sha256": "", "model_sha256": _sha256(workload)}
    if workload.script is not None:
        folder.mkdir(parents=True)  # a script reads its text and draws its weights itself
        write_made_of(folder, made_of)
        return Prepared(**made_of, chat_column=None, prompt_format=None, parameters=None)
    unfinished = folder.with_name(f"{folder.name}.unfinished-{uuid.uuid4().hex}")
    unfinished.mkdir(parents=True)
    try:
        parts = read_documents(workload, cache_folder=unfinished / "datasets")
        made_of["text_sha256"] = write_tokens(parts, workload, folder=unfinished)
        parameters = draw_weights(workload, file=unfinished / "weights.pt")
        shutil.rmtree(unfinished / "datasets", ignore_errors=True)
        write_made_of(unfinished, made_of)
        shutil.rmtree(folder, ignore_errors=True)
        unfinished.rename(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    train = parts.train
    format = train.format if isinstance(train, ChatColumn | PromptColumns) else None
    return Prepared(
        **made_of,
        chat_column=train.column if isinstance(train, ChatColumn) else None,
        prompt_format=None if format is None else format.to_dict(),
        parameters=parameters,
    )


def model_sha256(task: ModelSha256) -> str:
    return _sha256(task.workload)


def _sha256(workload: Workload) -> str:
    if workload.script is not None:
        return script_sha256(workload.script)
    if workload.pretrained:
        return weights_sha256(workload)
    if is_function_reference(workload.model):
        return code_sha256(workload)
    return ""


def prepare_seed(task: PrepareSeed) -> None:
    workload, folder = task.workload, task.folder
    unfinished = folder.with_name(f"{folder.name}.unfinished-{uuid.uuid4().hex}")
    unfinished.mkdir(parents=True)
    try:
        for file in task.prepared.iterdir():
            # With pretrained weights, the seed changes only the order of the text.
            if file.name != "weights.pt" or workload.pretrained:
                (unfinished / file.name).symlink_to(file.absolute())
        if not workload.pretrained:
            draw_weights(workload, file=unfinished / "weights.pt")
        try:
            unfinished.rename(folder)
        except OSError:
            if not folder.exists():  # otherwise another worker has drawn the same weights
                raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
