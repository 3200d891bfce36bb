"""The page of trainers' files states what the tables of keys have."""

import re
import tomllib
from importlib import resources
from pathlib import Path

from autotune.importers.registry import TRAINERS

PAGE = (Path(__file__).parents[2] / "docs" / "trainer-files.md").read_text()


def test_the_page_counts_the_keys_of_every_trainer():
    rows = re.findall(r"^\| .* \| (.+) \| (\d+) \| (\d+) \| (\d+) \|$", PAGE, re.MULTILINE)
    tables = [trainer.table for trainer in TRAINERS.values()]
    assert rows == [
        (one.title, *(str(len(keys)) for keys in (one.defaults, one.no_effect, one.not_taken)))
        for one in tables
    ]


def test_the_page_counts_the_models_whose_sizes_are_known():
    text = resources.files("autotune.spec").joinpath("model_shapes.toml").read_text("utf-8")
    models = tomllib.loads(text)["model"]
    ids = sum(len(model["ids"]) for model in models)
    assert f"{len(models)} shapes with {ids} ids" in PAGE
