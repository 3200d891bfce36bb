"""Exports to other trainers: one file each, a pure function from a recipe to the text of files.

Every setting of a trial is either expressed in the files or refused by name; a contract suite holds
every target to that, for every value of every technique (`tests/exporters/`).
"""

from collections.abc import Mapping

from autotune.exporters import (
    accelerate_config,
    axolotl_yaml,
    deepspeed_config,
    forgather_template,
    lightning_cli,
    pytorch,
    torchtitan,
    transformers,
    trl,
)
from autotune.exporters.export import Target

TARGETS: Mapping[str, Target] = {
    "pytorch": pytorch.TARGET,
    "transformers": transformers.TARGET,
    "accelerate": accelerate_config.TARGET,
    "deepspeed": deepspeed_config.TARGET,
    "trl": trl.TARGET,
    "lightning": lightning_cli.TARGET,
    "torchtitan": torchtitan.TARGET,
    "axolotl": axolotl_yaml.TARGET,
    "forgather": forgather_template.TARGET,
}
"""By the name that `--to` takes."""
