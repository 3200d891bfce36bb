"""What a trainer that loads an export's files does, in our words: one file a target, by the names of `TARGETS`."""

from readers import axolotl, forgather, torchtitan

READERS = {
    "torchtitan": torchtitan.read,
    "axolotl": axolotl.read,
    "forgather": forgather.read,
}
