"""The border of other trainers' files, in JSON, which YAML contains."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from autotune.importers.registry import TRAINERS, import_file
from autotune.spec.config import TrainingConfig
from tests.fuzzing.judging import Border, Reader
from tests.fuzzing.mutations import changed_files, json_bytes
from tests.importers.examples import MODEL, contents

_OPTIONS = {"model": MODEL, "sequence_length": 128}


def _files() -> list[dict[str, Any]]:
    return [content for trainer in TRAINERS for content in contents(trainer)]


class _Files(Reader):
    """Imports a file, and makes the configuration that it describes."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "file.yaml"

    def passes_first_check(self, given: bytes) -> bool:
        try:
            content = json.loads(given)
        except (ValueError, RecursionError):
            return False
        return isinstance(content, dict) and any(
            trainer.signs & content.keys() for trainer in TRAINERS.values()
        )

    def read(self, given: bytes) -> Iterator[str]:
        self._file.write_bytes(given)
        found = import_file(self._file, _OPTIONS)
        assert TrainingConfig(**found.config).to_dict() == found.config
        yield from found.lines()


@contextmanager
def _reading_files(folder: Path) -> Iterator[Reader]:
    yield _Files(folder)


TRAINER_FILE = Border(
    first_check="it is JSON with a key by which a trainer's file is known",
    inputs=lambda: changed_files(_files(), json_bytes),
    valid=lambda: [json_bytes(content) for content in _files()],
    reader=_reading_files,
    modules=(
        "importers/registry.py",
        "importers/trainer_file.py",
        "importers/keys_of_file.py",
        "importers/transformers_keys.py",
        "importers/several_devices.py",
        *(f"importers/{trainer}.py" for trainer in TRAINERS),
    ),
)
