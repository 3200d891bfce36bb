"""Every mistake on the command line ends with exit code 2, one `error:` line and one `hint:` line, and no traceback.

Each case is the real command in a process of its own, begun in a folder with some files that are not what they seem.
"""

import os
import subprocess
import sys

import pytest

MISTAKES = {
    "search": [
        ["--max-mem", "8,5GiB"],
        ["--max-mem", "-1"],
        ["--max-mem", "0"],
        ["--max-mem", ""],
        ["--max-mem", "abc"],
        ["--max-mem", "8gib"],
        ["--max-mem", "1e400"],
        ["--trials", "0"],
        ["--trials", "x"],
        ["--seed", "-1"],
        ["--device", "gpu"],
        ["--device", "cuda:x"],
        ["--device", "tpu"],
        ["--sampler", "foo"],
        ["--name", "a/b"],
        ["--name", ""],
        ["--name", "../x"],
        ["--name", "x" * 101],
        ["--time-budget", "soon"],
        ["--time-budget", "-1"],
        ["--time-budget", "0"],
        ["--trial-time-limit", "nonsense"],
        ["--prefer", "speed"],
        ["--tolerance", "x"],
        ["--tolerance", "speed=a"],
        ["--tolerance", "speed=2"],
        ["--tolerance", "speed=nan"],
        ["--max-perplexity-increase", "-1"],
        ["--max-perplexity-increase", "nan"],
        ["--learning-rate", "adamw"],
        ["--learning-rate", "foo=1"],
        ["--layers", "x"],
        ["--space", "nope"],
        ["--space", "typo.toml"],
        ["--space", "garbage.toml"],
        ["--space", "folder"],
        ["--storage", "nonsense"],
        ["--name", "any", "--storage", "nonsense"],
        ["--storage", "nonesuch://localhost/studies"],
        ["--storage", "sqlite:///garbage.db"],
        ["--name", "any", "--storage", "sqlite:///garbage.db"],
        ["--storage", "sqlite:///file/autotune.db"],
        ["--storage", "sqlite:///folder"],
        ["--bogus"],
        ["--layers", "0"],
        ["--feed-forward-width", "0"],
        ["--dataset", "missing.txt"],
        ["--packing", "loose"],
        ["--tokenizer", "model"],
        ["--tokenizer", "bpe", "--vocab-size", "257"],
        ["--learning-rate", "adamw=-1"],
        ["--learning-rate", "adamw=nan"],
        ["--width", "130", "--heads", "4"],
        ["--vocab-size", "10"],
        ["--steps", "1"],
        ["--schedule", "linear"],
        ["--model", "nope"],
        ["--model", ""],
        ["--model", "folder"],
        ["--model", "garbage.toml"],
        ["--model", "typo.toml"],
        ["--model", "missing/config.json"],
        ["--model", "llama", "--width", "64"],
        ["--model", "llama", "--feed-forward-width", "64"],
        ["--model", "llama", "--seq-len", "4096"],
    ],
    "fit": [
        [],
        ["--max-mem", "8,5GiB"],
        ["--max-mem", "8"],
        ["--max-mem", "8GiB", "--vary", "depth"],
        ["--max-mem", "8GiB", "--context", "much"],
        ["--max-mem", "8GiB", "--device", "tpu"],
        ["--max-mem", "8GiB", "--precision", "fp64"],
        ["--max-mem", "8GiB", "--micro-batch", "3"],
        ["--max-mem", "8GiB", "--compile", "block", "--memory-budget", "2"],
        ["--max-mem", "8GiB", "--space", "nope"],
        ["--max-mem", "8GiB", "--space", "quick", "--precision", "fp32"],
        ["--max-mem", "8GiB", "--width", "130", "--heads", "4"],
        ["--max-mem", "8GiB", "--model", "llama", "--vary", "width"],
    ],
    "show": [
        [],
        ["nope"],
        ["nope", "--storage", "nonsense"],
        ["nope", "--storage", "sqlite:///garbage.db"],
        ["nope", "--prefer", "speed"],
        ["nope", "more"],
        ["nope", "--csv", "--json"],
        ["nope", "--csv", "--markdown"],
    ],
    "report": [
        [],
        ["nope"],
        ["nope", "--prefer", "speed"],
        ["nope", "--storage", "sqlite:///garbage.db"],
        ["nope", "--out", "page.pdf"],
    ],
    "plot": [
        [],
        ["nope"],
        ["nope", "--tolerance", "x"],
        ["nope", "pie"],
        ["nope", "--out", "figure.pdf"],
        ["nope", "--out", "figure"],
        ["nope", "--width", "800"],
        ["nope", "--out", "figure.png", "--width", "0"],
        ["nope", "--out", "figure.png", "--scale", "nan"],
        ["nope", "--out", "figure.png", "--scale", "1000"],
        ["nope", "ladder", "--3d"],
        ["nope", "--trial", "3"],
        ["nope", "memory", "--trials", "1;2"],
    ],
    "compare": [[], ["nope"], ["nope", "neither"], ["nope", "neither", "--out", "figure.gif"]],
    "studies": [[], ["--storage", "sqlite:///folder"], ["--storage", "sqlite:///garbage.db"]],
    "explain": [
        ["nope", "0"],
        ["nope"],
        ["--device", "tpu"],
        ["--space", "quick"],
        ["--layers", "0", "--device", "cpu"],
    ],
    "doctor": [["--device", "gpu"]],
    "frobnicate": [[]],
}


LLAMA = """{"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 2,
"vocab_size": 256, "max_position_embeddings": 2048}"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mistakes")
    (folder / "garbage.db").write_bytes(b"this is no database at all " * 100)
    (folder / "garbage.toml").write_bytes(bytes(range(256)))
    (folder / "typo.toml").write_text('[techniques]\nprecison = ["fp32"]\n')
    (folder / "file").touch()
    (folder / "folder").mkdir()
    (folder / "llama").mkdir()
    (folder / "llama" / "config.json").write_text(LLAMA)
    return folder


def refused(arguments, folder):
    """Runs the command, checks that it is refused as all mistakes are, and returns what it says.

    The folder stays without a studies database of its own.
    """
    ended = subprocess.run(
        [sys.executable, "-m", "autotune", *arguments],
        cwd=folder,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "COLUMNS": "80"},
        check=False,
    )
    (folder / "studies" / "autotune.db").unlink(missing_ok=True)
    lines = ended.stderr.splitlines()
    assert "Traceback" not in ended.stderr, ended.stderr
    assert ended.returncode == 2, ended.stderr
    assert [line.partition(":")[0] for line in lines[-2:]] == ["error", "hint"], ended.stderr
    assert sum(line.startswith(("error:", "hint:")) for line in lines) == 2, ended.stderr
    assert ended.stdout == ""
    return lines


def case_name(arguments):
    return " ".join(argument[:24] or "''" for argument in arguments)


@pytest.mark.parametrize(
    "arguments",
    [[command, *mistake] for command, mistakes in MISTAKES.items() for mistake in mistakes],
    ids=case_name,
)
def test_a_mistake_is_refused_at_once_with_an_error_and_a_hint(arguments, folder):
    lines = refused(arguments, folder)
    assert len(lines) == 2, lines  # nothing was begun, not even the look at the device


def test_a_device_that_is_not_there_is_refused_once_the_device_was_looked_at(folder):
    lines = refused(["search", "--space", "quick", "--device", "cuda:99"], folder)
    assert "cuda:99" in lines[-2]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["search", "--max-mem", "8,5GiB"], "'8,5GiB'"),
        (["search", "--space", "typo.toml"], "typo.toml: unknown key 'precison'"),
        (["search", "--bogus"], "--bogus"),
        (["show", "nope", "--storage", "sqlite:///garbage.db"], "sqlite:///garbage.db"),
        (["frobnicate"], "'frobnicate'"),
    ],
    ids=lambda value: case_name(value) if isinstance(value, list) else "",
)
def test_the_error_names_what_is_wrong(arguments, named, folder):
    lines = refused(arguments, folder)
    assert named in lines[0]


def test_a_misspelt_option_is_answered_with_a_near_one(folder):
    lines = refused(["search", "--trails", "5"], folder)
    assert "--trials" in " ".join(lines)
