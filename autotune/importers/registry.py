"""The trainers whose files are read, and how a file is found to be one of them."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from autotune.errors import InvalidInput
from autotune.importers import axolotl, trl
from autotune.importers.imported import ImportedTraining, Trainer
from autotune.importers.keys_of_file import KeysOfFile, unknown_keys
from autotune.importers.trainer_file import read_trainer_file

TRAINERS: Mapping[str, Trainer] = {"axolotl": axolotl.TRAINER, "trl": trl.TRAINER}
"""{name: trainer whose files `--from` takes}."""


def import_file(file: Path) -> ImportedTraining:
    """Returns what a trainer's file trains.

    Raises InvalidInput for a file that cannot be read, that is of none of the trainers, or that
    asks for what autotune cannot train.
    """
    content = read_trainer_file(file)
    trainer = _trainer_of(content, file=file)
    return trainer.read(KeysOfFile(content, trainer.table, file=file))


def _trainer_of(content: Mapping[str, object], *, file: Path) -> Trainer:
    """Returns the trainer that has the keys of a file. Raises InvalidInput if none has.

    A key that only one of them has decides, and then the number of unknown ones.
    """
    candidates = [one for one in TRAINERS.values() if one.signs & content.keys()]
    if not candidates:
        raise InvalidInput(
            f"{file} is the file of no trainer that autotune knows",
            hint=f"name a file of {_titles(list(TRAINERS.values()))}",
        )
    unknown = [unknown_keys(content, one.table) for one in candidates]
    return min(zip(unknown, candidates, strict=True), key=lambda pair: len(pair[0]))[1]


def _titles(trainers: Sequence[Trainer]) -> str:
    return ", ".join(one.table.title for one in trainers)
