"""The exported script reads the parts and tokens of the study from every kind of data set."""

import numpy
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from autotune.execution.process.preparation import prepare
from autotune.execution.tasks import Prepare
from autotune.exporters import TARGETS
from autotune.spec.workload import make_workload
from tests.exporters.readers.pytorch_script import loaded
from tests.exporters.recipes import recipe
from tests.exporters.texts import KINDS, settings_of_text


def exported(workload):
    return TARGETS["pytorch"].write(recipe(**workload.to_dict()), "2")


def assert_same_tokens(workload, folder):
    prepare(Prepare(workload=workload, folder=folder))
    with loaded(exported(workload)) as script:
        made = script.read_text(None, script.TEXT)
        kept = script.read_text(str(folder), script.TEXT)
    for one, other in zip(made, kept, strict=True):
        assert numpy.array_equal(one.tokens, other.tokens)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_the_tokens_are_those_of_the_study(tmp_path, workload, kind):
    settings = {**workload.to_dict(), "text_sha256": "", **settings_of_text(tmp_path, kind)}
    assert_same_tokens(make_workload("cpu", settings), tmp_path / "prepared")


@pytest.mark.parametrize("packing", ["packed", "padded"])
def test_special_tokens_of_a_tokenizer_stand_where_the_study_has_them(tmp_path, workload, packing):
    words = {
        word: index
        for index, word in enumerate(["<unknown>", "<s>", "</s>", "<pad>", "the", "quick", "dogs"])
    }
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unknown>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    text = {**settings_of_text(tmp_path, "rows"), "tokenizer": str(tmp_path), "packing": packing}
    assert_same_tokens(
        make_workload("cpu", {**workload.to_dict(), "text_sha256": "", **text}),
        tmp_path / "prepared",
    )


def test_the_default_text_has_the_tokens_of_the_study(workload, tmp_path):
    assert_same_tokens(workload, tmp_path / "prepared")


def test_a_study_from_before_there_were_facts_of_its_text_is_read(workload, prepared, tmp_path):
    for name in ("train.npy", "held_out.npy"):
        (tmp_path / name).symlink_to(prepared / name)
    with loaded(exported(workload)) as script:
        train, _ = script.read_text(str(tmp_path), script.TEXT)
    assert len(train) > 0
