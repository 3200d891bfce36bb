"""What a trainer that loads an export's files does, in our words: one file a target, by the names of `TARGETS`."""

from readers import accelerate_reader, deepspeed_reader, lightning_reader

READERS = {
    "accelerate": accelerate_reader.read,
    "deepspeed": deepspeed_reader.read,
    "lightning": lightning_reader.read,
}
