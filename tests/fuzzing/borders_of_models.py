"""Borders of a user's model: its config.json, its weights, its tokenizer, and its Python code."""

import contextlib
import io
import json
import re
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from hypothesis import strategies
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from autotune.data.tokenizer import load_tokenizer
from autotune.errors import InvalidInput
from autotune.models import config_class
from autotune.models.weights import Placement, draw_weights, load_model
from autotune.spec.model_file import (
    largest_sequence_length,
    model_name,
    read_model_config,
    sizes_of,
    with_layers,
)
from autotune.spec.user_code import (
    check_function,
    check_script,
    parameters_of,
    read_reference,
    takes_size,
)
from autotune.spec.workload import make_workload
from tests.fuzzing.judging import Border, Reader
from tests.fuzzing.mutations import (
    changed_bytes,
    changed_files,
    changed_trees,
    json_bytes,
    json_text,
    with_changed_bytes,
)

# -- config.json -----------------------------------------------------------------------------------

_LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 1,
    "hidden_size": 8,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 16,
    "vocab_size": 256,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
_CONFIGS: tuple[dict[str, Any], ...] = (
    _LLAMA,
    {
        "model_type": "gpt2",
        "n_layer": 2,
        "n_embd": 8,
        "n_head": 2,
        "vocab_size": 256,
        "n_positions": 64,
        "bos_token_id": 0,
    },
    {**_LLAMA, "model_type": "mixtral", "num_local_experts": 2, "num_experts_per_tok": 1},
    {
        **_LLAMA,
        "model_type": "gemma3_text",
        "layer_types": ["sliding_attention"],
        "sliding_window": 16,
        "head_dim": 4,
    },
)


class TransformersRejects(Exception):
    """The config class itself rejects its settings, as it does in the process of a trial."""


class _Configs(Reader):
    """Reads a config.json up to where the model would be built."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "config.json"

    def passes_first_check(self, given: bytes) -> bool:
        try:
            content = json.loads(given.decode("utf-8-sig"))
        except (ValueError, RecursionError):
            return False
        return isinstance(content, dict) and isinstance(content.get("model_type"), str)

    def read(self, given: bytes) -> Iterator[str]:
        self._file.write_bytes(given)
        content = _completed(read_model_config(str(self._file)))
        sizes = sizes_of(content)
        yield model_name(content)
        largest_sequence_length(content)
        settings = {"model": model_name(content), "model_config": content, "sequence_length": 16}
        workload = make_workload("cpu", settings)
        yield workload.describe()
        json.dumps(workload.to_dict(), allow_nan=False)
        assert sizes["vocab_size"] == workload.vocab_size
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                config_class.make_config(with_layers(content, workload.layers))
        except InvalidInput:
            raise
        except Exception as error:  # each class checks its settings in its own way
            raise TransformersRejects(config_class.describe_error(error)) from error


def _completed(content: dict[str, Any]) -> dict[str, Any]:
    """Returns the config with the sizes of its class, by the program that a search asks for them.

    It is run in this process, as importing transformers takes seconds.
    """
    answer = io.StringIO()
    before, sys.stdin = sys.stdin, io.StringIO(json.dumps(content))
    try:
        with contextlib.redirect_stdout(answer):
            config_class.main()
    finally:
        sys.stdin = before
    found = json.loads(answer.getvalue())
    if "message" in found:
        raise InvalidInput(found["message"], hint=found["hint"])
    completed: dict[str, Any] = found["content"]
    return completed


@contextmanager
def _reading_configs(folder: Path) -> Iterator[Reader]:
    with _quiet_transformers():
        yield _Configs(folder)


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    import transformers

    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    with warnings.catch_warnings(action="ignore"):
        config_class.make_config(_LLAMA)  # what is imported now writes into caches
        yield
    transformers.logging.set_verbosity(verbosity)


MODEL_CONFIG = Border(
    first_check="it is a JSON object whose model_type is a text",
    inputs=lambda: changed_files(_CONFIGS, json_bytes),
    valid=lambda: [json_bytes(content) for content in _CONFIGS],
    reader=_reading_configs,
    modules=("spec/model_file.py", "models/config_class.py"),
    errors=(InvalidInput, TransformersRejects),
)


# -- weights ---------------------------------------------------------------------------------------


@cache
def _weights() -> tuple[dict[str, Any], bytes]:
    """Returns the header and the data of the weights of a tiny model."""
    import transformers

    with TemporaryDirectory() as folder, _quiet_transformers():
        torch.manual_seed(0)
        config = transformers.LlamaConfig(**_LLAMA)
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        content = (Path(folder) / "model.safetensors").read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    return json.loads(content[8:end]), content[end:]


def _safetensors(header: Any) -> bytes:
    text = json_text(header).encode()
    return len(text).to_bytes(8, "little") + text + _weights()[1]


@strategies.composite
def _weight_files(draw: Any) -> bytes:
    """A changed header, bytes that are changed anywhere, or another length of the header."""
    kind = draw(strategies.sampled_from(("header", "header", "header", "bytes", "length")))
    header, _ = _weights()
    if kind == "header":
        return _safetensors(draw(changed_trees([header])))
    content = _safetensors(header)
    if kind == "bytes":
        return draw(with_changed_bytes(content))
    length = draw(strategies.sampled_from((0, 1, 7, len(content), 2**31, 2**63, 2**64 - 1)))
    return int(length).to_bytes(8, "little") + content[8:]


class _Weights(Reader):
    """Loads weights as the preparation of a study does, and then as a trial does."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "model"
        self._folder.mkdir()
        (self._folder / "config.json").write_text(json.dumps(_LLAMA))
        self._file = self._folder / "model.safetensors"

    def passes_first_check(self, given: bytes) -> bool:
        end = 8 + int.from_bytes(given[:8], "little")
        try:
            header = json.loads(given[8:end].decode())
        except (ValueError, RecursionError):
            return False
        return end <= len(given) and isinstance(header, dict)

    def read(self, given: bytes) -> Iterator[str]:
        self._file.write_bytes(given)
        settings = {"model": str(self._folder), "pretrained": True, "sequence_length": 16}
        workload = make_workload("cpu", settings)
        drawn = self._folder.parent / "weights.pt"
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            draw_weights(workload, file=drawn)
            cpu = torch.device("cpu")
            load_model(workload, file=drawn, placement=Placement(dtype=torch.float32, device=cpu))
        yield from ()


@contextmanager
def _reading_weights(folder: Path) -> Iterator[Reader]:
    with _quiet_transformers():
        yield _Weights(folder)


WEIGHTS = Border(
    first_check="the header has the length that is said, and is a JSON object",
    inputs=_weight_files,
    valid=lambda: [_safetensors(_weights()[0])],
    reader=_reading_weights,
    modules=("spec/weight_files.py", "models/pretrained.py", "models/transformers_network.py"),
    inputs_in_suite=25,
)


# -- tokenizers ------------------------------------------------------------------------------------

_TEXTS = ("", "hello world", "caf\u00e9 \N{GRINNING FACE}\n\n", "a" * 300, "<|endoftext|> lo")
_SETTINGS = {"bos_token": "<s>", "eos_token": {"content": "</s>", "lstrip": False}, "pad_token": 1}


@cache
def _tokenizers() -> tuple[Any, ...]:
    words = {word: number for number, word in enumerate(("<s>", "</s>", "[UNK]", "hello", "world"))}
    letters = {letter: number for number, letter in enumerate("helo wrda\u00e9")}
    bpe = Tokenizer(models.BPE({**letters, "he": 10, "lo": 11}, [("h", "e"), ("l", "o")]))
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split("\\s+", "isolated"), pre_tokenizers.ByteLevel()]
    )
    bpe.decoder = decoders.ByteLevel()
    bpe.add_special_tokens(["<|endoftext|>"])
    of_words = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    of_words.pre_tokenizer = pre_tokenizers.Whitespace()
    of_words.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    of_words.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    pieces = Tokenizer(models.WordPiece(words, unk_token="[UNK]"))
    pieces.normalizer = normalizers.BertNormalizer()
    pieces.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    scored = [(letter, -float(number)) for letter, number in letters.items()]
    unigram = Tokenizer(models.Unigram([("<unk>", 0.0), *scored], 0, False))
    unigram.normalizer = normalizers.Replace("o", "0")
    unigram.pre_tokenizer = pre_tokenizers.Metaspace()
    return tuple(json.loads(each.to_str()) for each in (bpe, of_words, pieces, unigram))


@strategies.composite
def _tokenizer_files(draw: Any) -> bytes:
    """An input is the name of the changed file on a line of its own, and the file."""
    if draw(strategies.sampled_from((True, True, True, False))):
        return b"tokenizer.json\n" + draw(changed_files(_tokenizers(), json_bytes))
    return b"tokenizer_config.json\n" + draw(changed_files([_SETTINGS], json_bytes))


class _Tokenizers(Reader):
    """Loads a tokenizer and encodes some texts with it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "tokenizer"
        self._folder.mkdir()

    def passes_first_check(self, given: bytes) -> bool:
        name, _, text = given.partition(b"\n")
        try:
            content = json.loads(text.decode())
        except (ValueError, RecursionError):
            return False
        is_settings = name == b"tokenizer_config.json"
        return isinstance(content, dict) and (is_settings or isinstance(content.get("model"), dict))

    def read(self, given: bytes) -> Iterator[str]:
        for name, content in (
            ("tokenizer.json", json_bytes(_tokenizers()[1])),
            ("tokenizer_config.json", json_bytes(_SETTINGS)),
        ):
            (self._folder / name).write_bytes(content)
        changed_name, _, changed = given.partition(b"\n")
        (self._folder / changed_name.decode()).write_bytes(changed)
        settings = {"tokenizer": str(self._folder), "vocab_size": 2**20}
        tokenizer = load_tokenizer(make_workload("cpu", settings))
        texts = [text.encode() for text in _TEXTS]
        for longest in (None, 0, 3):
            for tokens, size_bytes in tokenizer.encode(texts, longest=longest):
                assert longest is None or len(tokens) <= longest
                assert size_bytes >= 0
                assert len(tokens) == 0 or tokens.max() < tokenizer.vocab_size
        for tokens in (tokenizer.beginning, tokenizer.separator):
            assert len(tokens) == 0 or tokens.max() < tokenizer.vocab_size
        assert 0 <= tokenizer.pad_token < max(tokenizer.vocab_size, 1)
        yield from ()


@contextmanager
def _reading_tokenizers(folder: Path) -> Iterator[Reader]:
    yield _Tokenizers(folder)


TOKENIZER = Border(
    first_check="it is a JSON object, and a tokenizer.json has the table of a model",
    inputs=_tokenizer_files,
    valid=lambda: [b"tokenizer.json\n" + json_bytes(each) for each in _tokenizers()],
    reader=_reading_tokenizers,
    modules=("data/tokenizer.py",),
)


# -- code ------------------------------------------------------------------------------------------

_CODE = b'''"""A model."""
from math import *
import torch.nn as nn

def build(layers: int = 2, *, width=8, **_: "int"):
    if (found := [layers for _ in range(3)]):
        return nn.Sequential(*(nn.Linear(width, width) for _ in found))

class Net(nn.Module):
    x: int = 1_000 ** 2

small = lambda layers, width: build(layers, width=width)
'''
_SECOND = (
    b"def build(layers, /, width):\n    match layers:\n        case [1, *_]:\n            pass\n"
)
_NESTED = (b"(" * 150, b"[" * 5000, b"-" * 20_000 + b"1", b"1" + b"+1" * 20_000, b"x." * 9000)


_WORDS = (b"build", b"layers", b"Net", b"x.y", b"int", b"__getattr__", b"\xc3\xa9", b"1", b"*")


@strategies.composite
def _code_files(draw: Any) -> bytes:
    """Changed bytes, or a word in the place of another, or something that is nested deeply."""
    change = draw(strategies.sampled_from(("word", "word", "word", "word", "bytes", "nested")))
    if change == "bytes":
        return draw(changed_bytes([_CODE, _SECOND]))
    if change == "nested":
        return _CODE + b"\ny = " + draw(strategies.sampled_from(_NESTED)) + b"\n"
    code = draw(strategies.sampled_from((_CODE, _SECOND)))
    place = draw(strategies.sampled_from(list(re.finditer(rb"[A-Za-z_]+|[0-9]+", code))))
    return code[: place.start()] + draw(strategies.sampled_from(_WORDS)) + code[place.end() :]


class _Code(Reader):
    """Looks for a function in a file, without running it."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "model.py"

    def passes_first_check(self, given: bytes) -> bool:
        try:
            with warnings.catch_warnings(action="ignore"):
                compile(given, "model.py", "exec", flags=0x400)  # only the syntax tree
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return False
        return True

    def read(self, given: bytes) -> Iterator[str]:
        self._file.write_bytes(given)
        model = f"{self._file}:build"
        parameters_of(read_reference(model))
        check_function(model, {"layers": 2})
        takes_size(model, "width")
        check_script({"script": str(self._file)})
        yield from ()


@contextmanager
def _reading_code(folder: Path) -> Iterator[Reader]:
    yield _Code(folder)


USERS_CODE = Border(
    first_check="Python makes a syntax tree of it",
    inputs=_code_files,
    valid=lambda: [_CODE, _SECOND],
    reader=_reading_code,
    modules=("spec/user_code.py",),
)
