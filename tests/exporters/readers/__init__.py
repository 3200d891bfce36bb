"""What a trainer that loads an export's files does, in our words: one file a target, by the names of `TARGETS`."""

from readers import axolotl, forgather, pytorch_script, torchtitan

READERS = {
    "pytorch": pytorch_script.read,
    "torchtitan": torchtitan.read,
    "axolotl": axolotl.read,
    "forgather": forgather.read,
}
