"""Exports of a trial's configuration to other trainers, one module or folder for each trainer.

Each target is a pure function from a `Recipe` (configuration and workload of a trial) to an
`Export` (texts of files, the command that uses them, and notes). Every setting of the trial is
either expressed in the files or listed by name as not expressed. A contract suite checks this for
every target and every value of every technique (`tests/exporters/`).
"""

from collections.abc import Mapping

from autotune.exporters import (
    accelerate_config,
    axolotl_yaml,
    deepspeed_config,
    forgather_template,
    lightning_cli,
    llamafactory_yaml,
    ms_swift_yaml,
    pytorch,
    torchtitan,
    transformers,
    trl,
    unsloth_script,
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
    "llamafactory": llamafactory_yaml.TARGET,
    "ms-swift": ms_swift_yaml.TARGET,
    "unsloth": unsloth_script.TARGET,
    "forgather": forgather_template.TARGET,
}
"""{name that `--to` takes: target}."""
