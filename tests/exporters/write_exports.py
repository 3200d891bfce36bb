"""Writes the exports of the contract's configurations to a folder.

    python write_exports.py FOLDER

Runs where autotune is installed; `load_exports.py` continues where a trainer is. Each export gets a
folder FOLDER/TARGET-VERSION/CASE with its files and `asked.json`: the command, the settings that
the files should have (those of the recipe, replaced where they cannot be expressed) and the
learning rate of every step.
"""

import json
import sys
from pathlib import Path

import torch

from autotune.exporters import TARGETS
from autotune.training.step import TrainingStep
from tests.exporters.recipes import configurations, recipe

TRAINERS = ("torchtitan", "axolotl", "forgather")
WORKLOADS = {
    "cosine": {"schedule": "cosine", "learning_rate_warmup_steps": 3},
    "cosine-10": {"schedule": "cosine", "steps": 40},
    "warm-up-1": {"learning_rate_warmup_steps": 1},
    "warm-up-2": {"learning_rate_warmup_steps": 2},
    "long-warm-up": {"learning_rate_warmup_steps": 30},
    "clipped": {"gradient_clipping": 1.0},
    "seeded": {"seed": 7, "sequence_length": 64},
}


def main(folder):
    cases = {name.replace("=", "-"): recipe(config) for name, config in configurations().items()}
    cases |= {name: recipe(**workload) for name, workload in WORKLOADS.items()}
    for name in TRAINERS:
        for version in TARGETS[name].versions:
            for case, asked in cases.items():
                write(
                    TARGETS[name].write(asked, version), asked, folder / f"{name}-{version}" / case
                )
    print(f"{len(cases)} cases for {', '.join(TRAINERS)} in {folder}")


def write(export, asked, folder):
    folder.mkdir(parents=True)
    for file, text in export.files.items():
        (folder / file).write_text(text)
    done = {**asked.settings(), **{entry.setting: entry.instead for entry in export.unsupported}}
    step = TrainingStep(
        None, workload=asked.workload, config=asked.config, device=torch.device("cpu"), marker=None
    )
    share = done["learning_rate"] / asked.settings()["learning_rate"]
    rates = [step.learning_rate(index) * share for index in range(asked.workload.steps)]
    said = {"command": export.command, "done": done, "rates": rates}
    (folder / "asked.json").write_text(json.dumps(said, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
