"""The reader of each target, by its name in `TARGETS`. Importing it needs every trainer."""

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

READERS = {
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
