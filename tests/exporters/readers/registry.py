"""The reader of each target, by its name in `TARGETS`. Importing it needs every trainer."""

import dataclasses

from autotune.spec.config import TrainingConfig
from tests.exporters.readers import (
    accelerate_reader,
    axolotl,
    deepspeed_reader,
    forgather,
    lightning_reader,
    llamafactory,
    ms_swift,
    pytorch_script,
    torchtitan,
    transformers,
    trl,
    unsloth,
)

_READERS = {
    "pytorch": pytorch_script.read,
    "transformers": transformers.read,
    "accelerate": accelerate_reader.read,
    "deepspeed": deepspeed_reader.read,
    "trl": trl.read,
    "lightning": lightning_reader.read,
    "torchtitan": torchtitan.read,
    "axolotl": axolotl.read,
    "llamafactory": llamafactory.read,
    "ms-swift": ms_swift.read,
    "unsloth": unsloth.read,
    "forgather": forgather.read,
}


def _with_what_is_off(read):
    """Returns a reader that has a technique's default where the trainer knows nothing of it."""

    def read_all(export, version):
        return dataclasses.asdict(TrainingConfig()) | read(export, version)

    return read_all


READERS = {name: _with_what_is_off(read) for name, read in _READERS.items()}
