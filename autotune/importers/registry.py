"""The trainers whose files are read, and how a file is found to be one of them."""

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from autotune.errors import InvalidInput
from autotune.importers import axolotl, lightning, llamafactory, torchtitan, transformers, trl
from autotune.importers.accelerate_file import ACCELERATE
from autotune.importers.deepspeed_file import DEEPSPEED
from autotune.importers.imported import ImportedTraining, Trainer
from autotune.importers.keys_of_file import KeysOfFile, unknown_keys
from autotune.importers.trainer_file import parse_trainer_file, read_trainer_file

TRAINERS: Mapping[str, Trainer] = {
    "axolotl": axolotl.TRAINER,
    "trl": trl.TRAINER,
    "llamafactory": llamafactory.TRAINER,
    "transformers": transformers.TRAINER,
    "torchtitan": torchtitan.TRAINER,
    "lightning": lightning.TRAINER,
}
"""{name: trainer whose files `--from` takes}."""

_SIGNS_OF_ACCELERATE = frozenset(("compute_environment", "distributed_type"))
_SIGNS_OF_DEEPSPEED = frozenset(
    ("zero_optimization", "train_micro_batch_size_per_gpu", "train_batch_size")
)


def import_file(file: Path, options: Mapping[str, Any] | None = None) -> ImportedTraining:
    """Returns what a trainer's file trains, beside settings that are given with it."""
    return import_files((file,), options)


def import_files(
    files: Sequence[Path], options: Mapping[str, Any] | None = None
) -> ImportedTraining:
    """Returns what a trainer's file trains, with accelerate's own file beside it, if any.

    `options` are settings that are given beside them: they say what a file leaves out, such as the
    number of devices. Raises InvalidInput for a file that cannot be read, that is of none of the
    trainers, or that asks for what autotune cannot train.
    """
    return _import({file: read_trainer_file(file) for file in files}, options)


def import_text(text: str, options: Mapping[str, Any] | None = None) -> ImportedTraining:
    """Returns what the text of a trainer's file trains; no file is read, also none that it names.

    Raises InvalidInput.
    """
    file = Path(f"pasted{_suffix_of(text)}")
    return _import({file: parse_trainer_file(text.encode(), file)}, options, is_alone=True)


def _suffix_of(text: str) -> str:
    """Returns the ending of files in the language of a text: JSON, TOML or else YAML."""
    if text.lstrip().startswith("{"):
        return ".json"
    try:
        tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        return ".yaml"
    except RecursionError:  # which reading it as TOML says in a sentence
        return ".toml"
    return ".toml"


def _import(
    contents: Mapping[Path, Mapping[str, Any]],
    options: Mapping[str, Any] | None,
    *,
    is_alone: bool = False,
) -> ImportedTraining:
    files = list(contents)
    launchers = [file for file, content in contents.items() if _is_of_accelerate(content)]
    trainings = [file for file in files if file not in launchers]
    if len(launchers) > 1 or len(trainings) > 1:
        raise InvalidInput(
            f"{' and '.join(map(str, files))} are several trainings",
            hint="name one file of a trainer, and beside it at most one of accelerate",
        )
    if not trainings:
        raise InvalidInput(
            f"{launchers[0]} is accelerate's: it says how processes are started, and of the "
            "training neither model nor batch",
            hint="name the training's own file first, and this one after it: "
            f"--from train.yaml --from {launchers[0]}",
        )
    [file] = trainings
    trainer = trainer_of(contents[file], file=file)
    keys = KeysOfFile(contents[file], trainer.table, file=file, options=options, is_alone=is_alone)
    for launcher in launchers:
        keys.launched_by(KeysOfFile(contents[launcher], ACCELERATE, file=launcher))
    return trainer.read(keys)


def _is_of_accelerate(content: Mapping[str, object]) -> bool:
    return bool(_SIGNS_OF_ACCELERATE & content.keys())


def trainer_of(content: Mapping[str, object], *, file: Path) -> Trainer:
    """Returns the trainer that has the keys of a file. Raises InvalidInput if none has.

    A key that only one of them has decides, then the number of unknown ones, then the ending.
    """
    candidates = [one for one in TRAINERS.values() if one.signs & content.keys()]
    if not candidates and _SIGNS_OF_DEEPSPEED & content.keys():
        raise InvalidInput(
            f"{file} is {DEEPSPEED.title}'s: it says how a training is shared out, and not what is "
            "trained",
            hint="name the trainer's own file, whose key deepspeed names this one",
        )
    if not candidates:
        raise InvalidInput(
            f"{file} is the file of no trainer that autotune knows",
            hint=f"name a file of {_titles(list(TRAINERS.values()))}",
        )

    def unlikeness(one: Trainer) -> tuple[int, bool]:
        return len(unknown_keys(content, one.table)), file.suffix.lower() not in one.suffixes

    return min(candidates, key=unlikeness)


def _titles(trainers: Sequence[Trainer]) -> str:
    return ", ".join(one.table.title for one in trainers)
