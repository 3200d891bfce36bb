"""Has a trainer's own parser read a file, in a process of its own, where the trainer is installed.

The parsers make the trainer's dataclass, which asks for a GPU. That question is left out: names and
types of the keys are what is checked.
"""

import importlib.util
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from autotune.system.python_environment import python_environment

MOST_SECONDS = 120
"""For a parser, whose trainer imports torch."""
_LONGEST = 300
"""Of what a parser says."""

_TRL = """
from trl import DatasetMixtureConfig, ModelConfig, ScriptArguments, SFTConfig, TrlParser

SFTConfig.__post_init__ = lambda self: None
TrlParser((ScriptArguments, SFTConfig, ModelConfig, DatasetMixtureConfig)).parse_args_and_config(
    ["--config", sys.argv[1]]
)
"""
# Keys of the user's script stand beside those of the arguments.
_ARGUMENTS = """
from transformers import HfArgumentParser, TrainingArguments
from transformers.training_args import OptimizerNames

TrainingArguments.__post_init__ = lambda self: None
(made,) = HfArgumentParser((TrainingArguments,)).parse_json_file(sys.argv[1], allow_extra_keys=True)
OptimizerNames(made.optim)
"""
# The rest of the file is of the user's classes, which are not imported.
_LIGHTNING = """
import yaml
from lightning.pytorch import Trainer
from lightning.pytorch.cli import LightningArgumentParser

with open(sys.argv[1], encoding="utf-8-sig") as file:
    trainer = yaml.safe_load(file).get("trainer", {})
own = ("callbacks", "logger", "plugins", "profiler", "strategy")
parser = LightningArgumentParser(exit_on_error=False)
parser.add_lightning_class_args(Trainer, "trainer")
parser.parse_object({"trainer": {key: trainer[key] for key in trainer if key not in own}})
"""
_PARSERS: Mapping[str, tuple[str, str, str]] = {
    "trl": ("trl", "TrlParser", _TRL),
    "transformers": ("transformers", "HfArgumentParser", _ARGUMENTS),
    "lightning": ("lightning", "LightningCLI's parser of the Trainer", _LIGHTNING),
}
"""{trainer: (its package, the name of its parser, a program that reads the file it is given)}."""


def parser_of(trainer: str) -> str | None:
    """Returns the name of the parser of a trainer that is installed; None without one."""
    package, name, _ = _PARSERS.get(trainer, ("", "", ""))
    return name if package and importlib.util.find_spec(package) is not None else None


def refusal(trainer: str, file: Path) -> str | None:
    """Returns what the trainer's parser says against a file; None if it takes it.

    Also if it took too long: that says nothing about the file.
    """
    _, _, program = _PARSERS[trainer]
    command = [sys.executable, "-P", "-c", f"import sys\n{program}", str(file)]
    environment = {**python_environment(), "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    try:
        ended = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            stdin=subprocess.DEVNULL,
            env=environment,
            timeout=MOST_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return None
    if ended.returncode == 0:
        return None
    lines = ended.stderr.strip().splitlines() or [f"it ended with {ended.returncode}"]
    return lines[-1][:_LONGEST]
