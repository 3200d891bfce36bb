"""Records what a folder of prepared files was made of; `prepared.py` makes them, with torch."""

import json
from pathlib import Path

from autotune.spec.workload import Workload

_MADE_OF = "made_of.json"


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
