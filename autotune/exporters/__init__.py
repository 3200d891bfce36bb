"""Exports to other trainers: one file each, a pure function from a recipe to the text of files.

Every setting of a trial is either expressed in the files or refused by name; `tests/exporters/test_contract.py` holds
every target to that for every value of every technique.
"""

from collections.abc import Mapping

from autotune.exporters import transformers, trl
from autotune.exporters.export import Target

TARGETS: Mapping[str, Target] = {
    "transformers": transformers.TARGET,
    "trl": trl.TARGET,
}
"""By the name that `--to` takes."""
