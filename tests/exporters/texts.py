"""Small data sets of every kind, as settings of a workload."""

import json
import sys
import types

from tests.building import chat

LINES = [
    f"the {number} quick brown foxes jumped over {number * 7} lazy dogs" * 3
    for number in range(400)
]
HELD_OUT = LINES[::7]
TRAIN = [line for line in LINES if line not in set(HELD_OUT)]


def settings_of_text(folder, kind):
    """Written below `folder`."""
    where = folder / kind.replace(" ", "_")
    where.mkdir(exist_ok=True)
    return _KINDS[kind](where)


def _bpe(where):
    (where / "text.txt").write_text("\n".join(LINES))
    return {"dataset": str(where / "text.txt"), "tokenizer": "bpe", "vocab_size": 300}


def _rows(where, **settings):
    """With rows without text, and a column of numbers before the only one of strings."""
    rows = [
        json.dumps({"number": number, "story": line}) for number, line in enumerate([*LINES, ""])
    ]
    (where / "rows.JSONL").write_text("\n".join(rows))
    return {"dataset": str(where / "rows.JSONL"), **settings}


def _folder(where, suffix, write):
    """As on the hub: a card, and a file for each split."""
    (where / "README.md").write_text("# a card, which is no text to train on\n")
    (where / f"train{suffix}").write_text(write(TRAIN))
    (where / f"test{suffix}").write_text(write(HELD_OUT))
    return {"dataset": str(where), "held_out_split": "test"}


def _jsonl(lines):
    return "\n".join(json.dumps({"text": line}) for line in lines)


def _saved(where):
    import datasets

    parts = {"train": TRAIN, "test": HELD_OUT}
    made = {name: datasets.Dataset.from_dict({"text": part}) for name, part in parts.items()}
    datasets.DatasetDict(made).save_to_disk(where / "saved")
    return {"dataset": str(where / "saved"), "held_out_split": "test"}


def _tokens(where, **settings):
    """Tokenized, with padding under a mask, and a prompt that is only read."""
    import datasets

    tokens = [list(line.encode()[:40]) for line in LINES]
    padded = [
        {"input_ids": [*row, 0, 0], "attention_mask": [1] * len(row) + [0, 0]} for row in tokens
    ]
    if settings.get("packing") == "padded":
        padded = [{**row, "labels": [-100, -100, *row["input_ids"][2:]]} for row in padded]
    datasets.Dataset.from_list(padded).save_to_disk(where / "saved")
    return {"dataset": str(where / "saved"), **settings}


def _chat(where, **settings):
    tokenizer = chat.write_tokenizer(where / "tokenizer", template=chat.LIKE_LLAMA)
    file = chat.write_rows(where / "chat.jsonl", chat.conversations())
    return {
        "dataset": str(file),
        "tokenizer": str(tokenizer),
        "vocab_size": chat.VOCABULARY,
        "chat_column": "messages",
        **settings,
    }


_KINDS = {
    "a text with a BPE": _bpe,
    "rows": _rows,
    "padded rows": lambda where: _rows(where, packing="padded", text_column="story"),
    "a slice of rows": lambda where: _rows(where, dataset_split="train[:300]"),
    "streamed rows": lambda where: _rows(where, streaming=True),
    "streamed rows with a BPE": lambda where: _rows(
        where, streaming=True, tokenizer="bpe", vocab_size=300
    ),
    "a folder of texts": lambda where: _folder(where, ".txt", "\n".join),
    "a folder of rows": lambda where: _folder(where, ".jsonl", _jsonl),
    "a saved set": _saved,
    "tokens": _tokens,
    "packed conversations": _chat,
    "padded conversations": lambda where: _chat(where, packing="padded"),
    "streamed conversations": lambda where: _chat(where, streaming=True),
    "padded tokens": lambda where: _tokens(where, packing="padded"),
}
KINDS = tuple(_KINDS)


def imported(text, *, name="exported"):
    """Returns the module of a text, as Python would import it from a file."""
    module = sys.modules[name] = types.ModuleType(name)
    exec(compile(text, f"{name}.py", "exec"), module.__dict__)
    return module
