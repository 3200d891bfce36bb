"""What a trainer that loads an export's files does, in our words: one file a target, by the names of `TARGETS`."""

from readers import transformers, trl

READERS = {
    "transformers": transformers.read,
    "trl": trl.read,
}
