"""A name that is nearly one that exists is answered with that one, and with how to find others."""

import pytest

from autotune.errors import near_misses, suggestion
from tests.building.commands import run_here
from tests.building.studies import measured, write_study

SHAPES = ("bf16-mixed", "bf16-true", "fp32", "quick", "--max-mem")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("suggestions")
    write_study(f"sqlite:///{folder}/studies/autotune.db", [measured()], name="by-hand")
    return folder


@pytest.mark.parametrize(
    ("line", "near"),
    [
        ("search --space qick", "'quick'"),
        ("search --sampler tep", "'tpe'"),
        ("search --prefer fast", "'fastest'"),
        ("search --schedule cosin", "'cosine'"),
        ("predict --precision bf16", "'bf16-mixed', 'bf16-true' or 'bf16-stochastic'"),
        ("predict --space peak_memory --scale tny", "'tiny'"),
        ("fit --max-mem 8GiB --vary layer", "'layers'"),
        ("explain --space quick --name checkpoint --device cpu", "'checkpoint every block'"),
        ("plot by-hand laddr", "'ladder'"),
        ("plot by-hand --x sped", "'speed'"),
        ("export by-hand --to pytroch", "'pytorch'"),
        ("show by-hnad", "'by-hand'"),
        ("studies check by-hnad", "'by-hand'"),
        ("studies export by_hand", "'by-hand'"),
    ],
)
def test_a_near_miss_is_answered_with_what_was_meant(line, near, folder):
    ended = run_here(*line.split(), folder=folder)
    error, hint = ended.stderr.splitlines()
    assert (ended.returncode, error.startswith("error: ")) == (2, True)
    assert f"did you mean {near}" in hint


@pytest.mark.parametrize(
    ("line", "near"),
    [
        ("search --trails 5", "--trials"),
        ("search --max-memory 8GiB", "--max-mem"),
        ("--vresion", "--version"),
        ("serch", "'search', 'serve'"),
        ("studies chekc", "'check'"),
    ],
)
def test_a_misspelt_option_or_command_is_answered_with_near_ones(line, near, folder):
    ended = run_here(*line.split(), folder=folder)
    error, hint = ended.stderr.splitlines()
    assert ended.returncode == 2
    assert near in error
    assert "--help" in hint


@pytest.mark.parametrize(
    ("given", "near"),
    [
        ("bf16", ["bf16-mixed", "bf16-true"]),
        ("QUICK", ["quick"]),
        ("qick", ["quick"]),
        ("b", []),
        ("", []),
        (32, ["fp32"]),
        ("x" * 10_000, []),
    ],
)
def test_near_are_the_names_that_begin_so_or_resemble_it(given, near):
    assert near_misses(given, SHAPES) == near


def test_without_a_near_name_the_hint_is_how_to_find_the_others():
    assert suggestion("zzz", SHAPES, otherwise="see the list") == "see the list"
