"""The tokenizer of a script, from a tokenizer.json."""

import json
from pathlib import Path
from typing import Any

from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError
from tokenizers import Tokenizer

from autotune.shipped.script.written import TOKENIZER
from autotune.shipped.subword_tokenizer import SubwordTokenizer


def tokenizer_file() -> Path:
    """Returns a tokenizer.json, local or from the hub, next to its settings if it has any."""
    path = Path(TOKENIZER).expanduser()
    file = path / "tokenizer.json" if path.is_dir() else path
    if file.is_file():
        return file
    for optional in ("tokenizer_config.json", "chat_template.jinja"):
        try:
            hf_hub_download(TOKENIZER, optional)
        except EntryNotFoundError:
            pass  # SubwordTokenizer knows the usual names of special tokens
    return Path(hf_hub_download(TOKENIZER, "tokenizer.json"))


def tokenizer_settings() -> dict[str, Any]:
    file = tokenizer_file().with_name("tokenizer_config.json")
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}


def make_tokenizer(text: str) -> SubwordTokenizer:
    tokenizer = Tokenizer.from_str(tokenizer_file().read_text(encoding="utf-8"))
    return SubwordTokenizer(tokenizer, settings=tokenizer_settings())
