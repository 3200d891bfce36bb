"""Reads the text of a script, or the tokens that a study made of it."""

import json
from pathlib import Path

import numpy

from autotune.shipped.script.written import Sequences, tokens_of
from autotune.shipped.text_parts import HELD_OUT, TRAIN


def read_text(folder: str | None, text: str) -> tuple[Sequences, Sequences]:
    """Returns the training and the held-out part.

    They are read from `folder`, a study's folder with train.npy and held_out.npy, or made of
    `text` if `folder` is None.
    """
    if folder is None:
        parts, pad_token = tokens_of(text)
        return Sequences(parts[TRAIN], pad_token), Sequences(parts[HELD_OUT], pad_token)
    pad_token = 0
    file = Path(folder) / "text.json"
    if file.exists():
        pad_token = json.loads(file.read_text(encoding="utf-8")).get("pad_token", 0)
    train = numpy.load(Path(folder) / "train.npy", mmap_mode="r")
    held_out = numpy.load(Path(folder) / "held_out.npy", mmap_mode="r")
    return Sequences(train, pad_token), Sequences(held_out, pad_token)
