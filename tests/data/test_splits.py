"""Splits, tokenized datasets and streaming, in the layouts of the hub."""

import json

import datasets
import numpy
import pyarrow
import pyarrow.parquet
import pytest

from autotune.data.batches import TokenSequences
from autotune.data.sources import read_documents
from autotune.data.token_file import TextFacts
from autotune.data.tokens import write_tokens
from autotune.errors import InvalidDataset
from autotune.spec.workload import make_workload

TRAIN = [f"training document {number}" for number in range(200)]
VALIDATION = [f"validation document {number}" for number in range(100)]
SETTINGS = {"sequence_length": 16, "global_batch": 4, "evaluation_sequences": 4, "steps": 12}
CARD = """---
configs:
- config_name: small
  data_files:
  - {split: train, path: data/train-*}
  - {split: heldout, path: data/validation-*}
---
# A dataset
"""


def on_the_hub(folder):
    (folder / "data").mkdir(parents=True)
    (folder / "README.md").write_text(CARD)
    for split, texts in (("train", TRAIN), ("validation", VALIDATION)):
        file = folder / "data" / f"{split}-00000-of-00001.parquet"
        pyarrow.parquet.write_table(pyarrow.table({"text": texts}), file)


def text_files(folder):
    folder.mkdir()
    for split, texts in (("train", TRAIN), ("validation", VALIDATION)):
        (folder / f"{split}.txt").write_text("".join(texts))


def jsonl_folders(folder):
    for split, texts in (("train", TRAIN), ("validation", VALIDATION)):
        (folder / split).mkdir(parents=True)
        (folder / split / "part.jsonl").write_text(
            "\n".join(json.dumps({"text": text}) for text in texts)
        )


def saved(folder):
    datasets.disable_progress_bars()
    parts = {name: datasets.Dataset.from_dict({"text": texts}) for name, texts in SPLITS.items()}
    datasets.DatasetDict(parts).save_to_disk(folder)


SPLITS = {"train": TRAIN, "validation": VALIDATION}
LAYOUTS = {"hub": on_the_hub, "text": text_files, "jsonl": jsonl_folders, "saved": saved}


@pytest.fixture(params=LAYOUTS)
def folder(request, tmp_path):
    """A dataset with the splits train and validation, in each layout."""
    LAYOUTS[request.param](tmp_path / "set")
    return tmp_path / "set"


@pytest.fixture
def hub_folder(tmp_path):
    on_the_hub(tmp_path / "set")
    return tmp_path / "set"


@pytest.fixture
def read(tmp_path):
    """read(folder) returns (training text, held-out text or None)."""

    def read(dataset, **settings):
        parts = read_documents(
            make_workload("cpu", {"dataset": str(dataset), **settings}),
            cache_folder=tmp_path / "cache",
        )
        return "".join(parts.train), None if parts.held_out is None else "".join(parts.held_out)

    return read


@pytest.fixture
def write(tmp_path):
    """write(dataset) writes its tokens and returns their folder."""

    def write(dataset, **settings):
        workload = make_workload("cpu", SETTINGS, {"dataset": str(dataset)}, settings)
        target = tmp_path / "written"
        target.mkdir()
        write_tokens(
            read_documents(workload, cache_folder=tmp_path / "cache"), workload, folder=target
        )
        return target

    return write


# -- splits ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("streaming", [False, True])
def test_a_held_out_split_is_read_by_its_name(folder, read, streaming):
    assert read(folder, held_out_split="validation", streaming=streaming) == (
        "".join(TRAIN),
        "".join(VALIDATION),
    )


def test_only_the_training_split_is_trained_on_where_files_are_named_by_split(folder, read):
    assert read(folder) == ("".join(TRAIN), None)


def test_another_split_can_be_trained_on(folder, read):
    assert read(folder, dataset_split="validation")[0] == "".join(VALIDATION)


def test_a_missing_split_is_rejected_with_those_that_exist(folder, read):
    with pytest.raises(InvalidDataset) as raised:
        read(folder, held_out_split="nope")
    said = raised.value.message + raised.value.hint
    assert all(name in said for name in ("nope", "train", "validation"))


def test_a_part_of_a_split_can_be_named(hub_folder, read):
    assert read(hub_folder, dataset_split="train[:40]")[0] == "".join(TRAIN[:40])


def test_a_configuration_of_the_datasets_card_can_be_named(hub_folder, read):
    assert read(hub_folder, dataset_config="small", held_out_split="heldout") == (
        "".join(TRAIN),
        "".join(VALIDATION),
    )


def test_a_missing_configuration_is_rejected_with_those_that_exist(hub_folder, read):
    with pytest.raises(InvalidDataset, match=r"'nope' not found.*small"):
        read(hub_folder, dataset_config="nope")


def test_files_that_only_happen_to_be_called_as_splits_are_all_read(tmp_path, read):
    text_files(tmp_path / "set")
    (tmp_path / "set" / "other.txt").write_text("more")
    assert read(tmp_path / "set")[0] == "more" + "".join(TRAIN) + "".join(VALIDATION)


def test_a_folder_of_nothing_but_a_card_is_read_as_text(tmp_path, read):
    (tmp_path / "README.md").write_text("text")
    assert read(tmp_path)[0] == "text"


def test_a_single_file_has_no_split_to_hold_out(tmp_path, read):
    (tmp_path / "book.txt").write_text("text")
    with pytest.raises(InvalidDataset, match="without a split 'validation'"):
        read(tmp_path / "book.txt", held_out_split="validation")


def test_a_named_split_is_held_out_whole_and_nothing_else(hub_folder, write):
    held_out = numpy.load(write(hub_folder, held_out_split="validation") / "held_out.npy")
    assert held_out.tobytes().decode().split("\n\n") == VALIDATION


# -- already tokenized -----------------------------------------------------------------------------


@pytest.fixture
def tokenized(tmp_path):
    """tokenized(columns) returns a folder saved by `datasets` with those columns."""

    def save(**columns):
        datasets.disable_progress_bars()
        # The usual format for a training loop; the rows are then returned as tensors.
        datasets.Dataset.from_dict(columns).with_format("torch").save_to_disk(
            tmp_path / "tokenized"
        )
        return tmp_path / "tokenized"

    return save


IDS = [[number % 200, 1, 2, 3, 4, 5] for number in range(200)]


def test_tokens_are_used_as_they_are(tokenized, write):
    folder = write(tokenized(input_ids=IDS))
    stream = numpy.concatenate(
        [numpy.load(folder / name) for name in ("train.npy", "held_out.npy")]
    )
    assert sorted(stream.reshape(-1, 6).tolist()) == sorted(IDS)


def test_tokens_are_taken_before_the_text_they_were_made_of(tokenized, write):
    folder = write(tokenized(input_ids=IDS, text=["text"] * 200))
    assert numpy.load(folder / "train.npy").size % 6 == 0


def test_bytes_per_token_of_a_tokenized_dataset_are_unknown(tokenized, write):
    assert TextFacts.read(write(tokenized(input_ids=IDS))).bytes_per_token is None


def test_masked_tokens_are_left_out(tokenized, write):
    folder = write(
        tokenized(input_ids=IDS, attention_mask=[[1, 1, 1, 0, 0, 0]] * 200), evaluation_sequences=2
    )
    assert not {3, 4, 5} & set(numpy.load(folder / "train.npy").reshape(-1, 3)[:, 1:].ravel())


def test_labels_of_minus_100_are_read_and_not_learned(tokenized, write):
    labels = [[-100, -100, -100, *ids[3:]] for ids in IDS]
    folder = write(tokenized(input_ids=IDS, labels=labels), packing="padded")
    batch = TokenSequences(folder / "train.npy", sequence_length=16).batch([0])
    assert batch.tokens[0, 1:6].tolist() == [1, 2, 3, 4, 5]
    assert batch.labels[0, :6].tolist() == [-100, -100, 3, 4, 5, -100]


def test_labels_that_leave_tokens_out_cannot_be_packed(tokenized, write):
    dataset = tokenized(input_ids=IDS, labels=[[-100, *ids[1:]] for ids in IDS])
    with pytest.raises(InvalidDataset, match="ignore some tokens") as raised:
        write(dataset)
    assert "--packing padded" in raised.value.hint


def test_labels_that_are_other_tokens_are_rejected(tokenized, write):
    with pytest.raises(InvalidDataset, match="labels that are not its input_ids"):
        write(tokenized(input_ids=IDS, labels=[ids[::-1] for ids in IDS]))


@pytest.mark.parametrize(
    "columns",
    [
        {"input_ids": [[[1, 2], [3, 4]]] * 200},
        {"input_ids": [[1, None]] * 200},
        {"input_ids": IDS, "labels": [[1, 2]] * 200},
        {"input_ids": IDS, "attention_mask": [[1, 1]] * 200},
    ],
)
def test_rows_that_are_no_tokens_are_rejected(tokenized, write, columns):
    with pytest.raises(InvalidDataset, match="are not whole numbers or differ in length"):
        write(tokenized(**columns))


@pytest.mark.parametrize("token", [256, -1])
def test_a_token_outside_the_vocabulary_is_rejected_with_both_numbers(tokenized, write, token):
    with pytest.raises(InvalidDataset, match=rf"token {token}, the model's vocabulary is 0 to 255"):
        write(tokenized(input_ids=[*IDS, [token]]))


# -- streaming -------------------------------------------------------------------------------------


def test_streaming_reads_what_the_steps_need_and_little_more(tmp_path, write):
    (tmp_path / "data.jsonl").write_text(
        "\n".join(json.dumps({"text": f"{n} " * 20}) for n in range(100_000))
    )
    folder = write(tmp_path / "data.jsonl", streaming=True)
    needed = 12 * 4 * 16 + 1
    assert needed <= numpy.load(folder / "train.npy").size < needed + 4096


def test_streaming_finds_the_column_of_text(tmp_path, read):
    (tmp_path / "data.csv").write_text("year,body\n1999,one\n2001,two\n")
    assert read(tmp_path / "data.csv", streaming=True)[0] == "onetwo"


def test_a_broken_file_is_rejected_in_one_sentence_when_it_is_streamed(tmp_path, read):
    (tmp_path / "broken.jsonl").write_bytes(bytes(range(256)))
    with pytest.raises(InvalidDataset, match=r"broken\.jsonl.* cannot be read"):
        read(tmp_path / "broken.jsonl", streaming=True)


@pytest.mark.network
def test_a_dataset_of_the_hub_is_streamed(write):
    folder = write("roneneldan/TinyStories", held_out_split="validation", streaming=True)
    assert numpy.load(folder / "held_out.npy").size >= 4 * 16 + 1
