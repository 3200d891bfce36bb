"""The folders of prepared files: their names, and records of what they were made of.

`process/preparation.py` makes them, with torch.
"""

import json
from pathlib import Path

from autotune.spec.workload import Workload

PREPARED = "prepared"
"""Folder of a study's token streams and initial weights."""
_MADE_OF = "made_of.json"


def prepared_folder(of_study: Workload, workload: Workload) -> str:
    """Returns the folder's name for `workload`, which may have another seed than the study's."""
    if workload.seed == of_study.seed:
        return PREPARED
    return f"{PREPARED}-seed-{workload.seed}"


def is_made_of(folder: Path, workload: Workload) -> bool:
    """Whether the prepared files exist and are those of the workload's text and model."""
    try:
        content = json.loads((folder / _MADE_OF).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    return bool(
        content == {"text_sha256": workload.text_sha256, "model_sha256": workload.model_sha256}
    )


def write_made_of(folder: Path, made_of: dict[str, str]) -> None:
    """Writes {"text_sha256", "model_sha256"} into the folder."""
    (folder / _MADE_OF).write_text(json.dumps(made_of), encoding="utf-8")
