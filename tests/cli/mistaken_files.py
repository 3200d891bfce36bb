"""Files that are not what they seem, for the command lines of `mistakes.py`."""

import json
import os
import pickle
import sqlite3
from pathlib import Path

from tests.building.studies import measured, write_study
from tests.cli.mistaken_spaces import SPACES, space_file

IN_REAL = "--storage sqlite:///real.db"

USER = '{"role": "user", "content": "word1"}'
ANSWER = '{"role": "assistant", "content": "word2"}'


def _chat(*messages: str) -> str:
    return f'{{"messages": [{", ".join(messages)}]}}\n'


CHATS = (
    ("a tokenizer of bytes", _chat(USER, ANSWER), "bytes"),
    ("a tokenizer of its own", _chat(USER, ANSWER), "bpe"),
    ("no template", _chat(USER, ANSWER), "large.json"),
    ("a template that fails", _chat(USER, ANSWER), "chat-failing"),
    ("a template that is no text", _chat(USER, ANSWER), "chat-binary"),
    ("a template that forgets", _chat(USER, ANSWER, USER, ANSWER), "chat-forgetting"),
    ("no messages", _chat(), "chat"),
    ("no objects", _chat('"Hi"', '"Hello"'), "chat"),
    ("an unknown role", _chat('{"role": "narrator", "content": "word1"}', ANSWER), "chat"),
    ("no answer", _chat(USER), "chat"),
    (
        "an image",
        _chat('{"role": "user", "content": [{"type": "image", "url": "a.png"}]}', ANSWER),
        "chat",
    ),
)
"""(name, row, tokenizer) of conversations that cannot be learned from."""

_LINE = '{"text": "hello"}\n'
DATASETS: dict[str, tuple[str, dict[str, str | bytes], str]] = {
    # name: (what --dataset names, files to write, more options)
    "empty text": ("e.txt", {"e.txt": ""}, ""),
    "short text": ("s.txt", {"s.txt": "hello"}, ""),
    "short held-out part": ("h.txt", {"h.txt": "hello " * 900}, "--eval-sequences 64"),
    "latin 1": ("l.txt", {"l.txt": "caf\xe9 ".encode("latin-1") * 90}, ""),
    "utf 16": ("u.txt", {"u.txt": ("hello " * 90).encode("utf-16")}, ""),
    "binary": ("b.txt", {"b.txt": bytes(range(128)) * 90}, ""),
    "unknown kind": ("k.zip", {"k.zip": b"PK\3\4"}, ""),
    "no suffix": ("plain", {"plain": "hello"}, ""),
    "empty folder": ("none", {"none/.keep": ""}, ""),
    "mixed folder": ("mix", {"mix/a.txt": "a", "mix/b.csv": "text\na"}, ""),
    "folder of empty files": ("zero", {"zero/a.txt": "", "zero/b.txt": ""}, ""),
    "split of one text": ("o.txt", {"o.txt": "hello " * 90}, "--held-out-split test"),
    "unknown split": (
        "two",
        {"two/train.txt": "a" * 900, "two/test.txt": "b" * 900},
        "--dataset-split dev",
    ),
    "unknown held-out split": (
        "duo",
        {"duo/train.txt": "a" * 9, "duo/test.txt": "b" * 9},
        "--held-out-split dev",
    ),
    "broken json lines": ("j.jsonl", {"j.jsonl": '{"text": \n'}, ""),
    "no objects": ("n.jsonl", {"n.jsonl": "1\n2\n"}, ""),
    "no text column": ("c.jsonl", {"c.jsonl": '{"n": 1}\n'}, ""),
    "two columns of text": ("t.jsonl", {"t.jsonl": '{"a": "x", "b": "y"}\n'}, ""),
    "unknown column": ("w.jsonl", {"w.jsonl": _LINE * 9}, "--text-column body"),
    "short json lines": ("r.jsonl", {"r.jsonl": _LINE * 9}, ""),
    "short streamed": ("m.jsonl", {"m.jsonl": _LINE * 9}, "--streaming"),
    "short padded": ("p.jsonl", {"p.jsonl": _LINE * 9}, "--packing padded"),
    "ragged csv": ("g.csv", {"g.csv": 'a,b\n1,2,3,4\n"x'}, ""),
    "empty csv": ("v.csv", {"v.csv": "\n"}, ""),
    "no parquet": ("q.parquet", {"q.parquet": b"PAR1 not really PAR1"}, ""),
    "saved, broken": ("saved", {"saved/state.json": "{"}, ""),
    "saved, no splits": ("splits", {"splits/dataset_dict.json": '{"splits": []}'}, ""),
    "token beyond the vocabulary": ("x.jsonl", {"x.jsonl": '{"input_ids": [1, 999]}\n' * 90}, ""),
    "negative token": ("y.jsonl", {"y.jsonl": '{"input_ids": [1, -7]}\n' * 90}, ""),
    "tokens are words": (
        "z.jsonl",
        {"z.jsonl": '{"input_ids": ["a", "b"], "labels": [1]}\n' * 90},
        "",
    ),
    "labels are others": (
        "a.jsonl",
        {"a.jsonl": '{"input_ids": [1, 2], "labels": [3, 4]}\n' * 90},
        "",
    ),
    "mask is shorter": (
        "d.jsonl",
        {"d.jsonl": '{"input_ids": [1, 2], "attention_mask": [1]}\n' * 90},
        "",
    ),
    **{
        f"chat: {name}": (
            f"chat-{index}.jsonl",
            {f"chat-{index}.jsonl": row * 90},
            f"--tokenizer {tokenizer} --vocab-size 300 --packing padded",
        )
        for index, (name, row, tokenizer) in enumerate(CHATS)
    },
    "chat, too short a sequence": (
        "chat-cut.jsonl",
        {"chat-cut.jsonl": _chat(USER, ANSWER) * 90},
        "--tokenizer chat --vocab-size 300 --packing padded --seq-len 2",
    ),
    "tokenizer too large": ("f.txt", {"f.txt": "hello " * 900}, "--tokenizer large.json"),
    "tokenizer broken": ("i.txt", {"i.txt": "hello " * 900}, "--tokenizer garbage.json"),
    "bpe of a short text": ("bpe.txt", {"bpe.txt": "hello"}, "--tokenizer bpe"),
    "large and binary": ("big.txt", {"big.txt": b"hello \0" * 300_000}, ""),
}


def dataset_options(name: str) -> list[str]:
    place, _, more = DATASETS[name]
    return ["--dataset", f"data/{place}", *more.split()]


_LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 2,
    "vocab_size": 256,
    "max_position_embeddings": 2048,
}
_PYTHON = "import torch\n\n\ndef build():\n    return torch.nn.Linear(3, 3)\n"


def _tokenizer(size: int) -> str:
    vocabulary = {f"word{number}": number for number in range(size)}
    return json.dumps(
        {
            "version": "1.0",
            "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "word0"},
        }
    )


_TEMPLATE = (
    "{% for message in messages %}{{ message.role + ' ' + message.content + ' ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant ' }}{% endif %}"
)
CHAT_TOKENIZERS: dict[str, str | bytes] = {
    "chat": _TEMPLATE,
    "chat-failing": "{{ raise_exception('no') }}",
    "chat-binary": bytes(range(256)),
    "chat-forgetting": "{{ messages | length }} " + _TEMPLATE,
}

_FILES: dict[str, str | bytes] = {
    "garbage.db": b"this is no database at all " * 100,
    "empty.db": b"",
    "garbage.toml": bytes(range(256)),
    "huge.toml": "# large\n" * 200_000,
    "huge.json": " " * 2_000_000,
    "chain-a.toml": 'extends = "chain-b.toml"',
    "chain-b.toml": 'extends = "chain-a.toml"',
    "file": "",
    "good.txt": "all is well " * 2000,
    "parts/train.txt": "a" * 900,
    "parts/test.txt": "b" * 900,
    "table.csv": "text,number\nhello,1\n" * 90,
    "records.jsonl": '{"text": "hello", "number": 1}\n' * 90,
    "garbage.json": bytes(range(256)),
    "empty.json": "",
    "list.json": "[1, 2]",
    "large.json": _tokenizer(300),
    **{f"{name}/tokenizer.json": _tokenizer(300) for name in CHAT_TOKENIZERS},
    **{f"{name}/chat_template.jinja": text for name, text in CHAT_TOKENIZERS.items()},
    "typo.json": '{"model_typ": "llama"}',
    "no_layers.json": json.dumps({**_LLAMA, "num_hidden_layers": 0}),
    "many_layers.json": json.dumps({**_LLAMA, "num_hidden_layers": 10**6}),
    "minus.json": json.dumps({**_LLAMA, "hidden_size": -32}),
    "nan.json": '{"model_type": "llama", "hidden_size": NaN}',
    "deep.json": "[" * 100_000,
    "llama/config.json": json.dumps(_LLAMA),
    "broken/config.json": json.dumps(_LLAMA),
    "broken/model.safetensors": b"no weights at all",
    "pickled/config.json": json.dumps(_LLAMA),
    "pickled/pytorch_model.bin": pickle.dumps({"a": print}),
    "own.py": _PYTHON,
    "train.py": "import autotune\n",
    "ends.py": "import sys\nsys.exit(3)\n",
    "raising.py": "def build():\n    raise ValueError('no\\nmodel')\n",
    "nothing.py": "def build():\n    return None\n",
    "nosuch.json": json.dumps({**_LLAMA, "model_type": "nosuch"}),
    "broken.py": "def build(:\n",
    "binary.py": bytes(range(256)),
    "latin.py": "build = 'caf\xe9'\n".encode("latin-1"),
    "deep.py": f"x = {'(' * 100_000}",
}


def write_files(folder: Path) -> None:
    """Write every file that the mistakes name into `folder`."""
    files = dict(_FILES)
    files |= {space_file(name): content for name, content in SPACES.items()}
    files |= {
        f"data/{place}": content
        for _, of_set, _ in DATASETS.values()
        for place, content in of_set.items()
    }
    for name, content in files.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
    for name in ("folder", "folder.html", "folder.py"):
        (folder / name).mkdir()
    for name in ("pipe", "pipe.py", "pipe.html"):
        os.mkfifo(folder / name)
    for name in ("loop", "loop.db", "loop.txt", "loop.toml", "loop.json", "loop.py", "loop.html"):
        (folder / name).symlink_to(name)
    with sqlite3.connect(folder / "foreign.db") as foreign:
        foreign.execute("CREATE TABLE songs (title TEXT)")
    foreign.close()
    write_study(
        f"sqlite:///{folder / 'real.db'}", [measured(), measured(perplexity=19.0)], name="real"
    )
