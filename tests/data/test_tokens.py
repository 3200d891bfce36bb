"""From documents to token streams and batches."""

import random
from itertools import islice

import numpy
import pytest

from autotune.data.batches import batch_of, sequences_in
from autotune.data.columns import documents_of
from autotune.data.sources import Parts
from autotune.data.tokens import write_tokens
from autotune.errors import InvalidDataset
from autotune.shipped import python_docs
from autotune.shipped.text_parts import PASSAGE_CHARACTERS, is_held_out, passages
from autotune.shipped.training_order import training_order
from autotune.spec.workload import BYTE_VOCABULARY, make_workload

DOCUMENTS = [f"document {number}: " + "word " * (number % 50) for number in range(500)]
WORKLOAD = make_workload(
    "cpu", {"sequence_length": 32, "global_batch": 8, "evaluation_sequences": 8}
)


def streams(documents, folder):
    """Returns the two token streams of `documents`, and their hash."""
    folder.mkdir()
    text_sha256 = write_tokens(Parts(train=documents), WORKLOAD, folder=folder)
    return numpy.load(folder / "train.npy"), numpy.load(folder / "held_out.npy"), text_sha256


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    return streams(DOCUMENTS, tmp_path_factory.mktemp("tokens") / "written")


def passages_in(stream):
    return stream.tobytes().split(b"\n\n")


# -- documents to passages -------------------------------------------------------------------------


def test_the_passages_of_a_document_put_together_are_the_document():
    document = "".join(chr(0x100 + index % 5000) for index in range(3 * PASSAGE_CHARACTERS + 5))
    assert b"".join(passages([document])).decode() == document


def test_no_passage_is_longer_than_agreed():
    lengths = [len(passage) for passage in passages(["x" * (2 * PASSAGE_CHARACTERS + 1)])]
    assert lengths == [PASSAGE_CHARACTERS, PASSAGE_CHARACTERS, 1]


def test_no_passage_spans_two_documents():
    assert list(passages(["one", "two"])) == [b"one", b"two"]


def test_text_that_is_no_unicode_is_replaced_and_not_rejected():
    assert list(passages(["half a pair \ud800"])) == [b"half a pair ?"]


# -- the held-out part -----------------------------------------------------------------------------


def test_every_passage_is_in_exactly_one_part(written):
    train, held_out, _ = written
    assert sorted(passages_in(train) + passages_in(held_out)) == sorted(passages(DOCUMENTS))


def test_the_parts_are_disjoint_even_when_documents_are_repeated(tmp_path):
    train, held_out, _ = streams(DOCUMENTS * 2, tmp_path / "tokens")
    assert set(passages_in(train)).isdisjoint(passages_in(held_out))


def test_about_a_tenth_of_the_passages_is_held_out():
    held_out = sum(is_held_out(str(number).encode()) for number in range(10_000))
    assert 900 < held_out < 1100


def test_the_same_documents_give_the_same_tokens(written, tmp_path):
    train, held_out, text_sha256 = streams(DOCUMENTS, tmp_path / "tokens")
    assert numpy.array_equal(train, written[0])
    assert numpy.array_equal(held_out, written[1])
    assert text_sha256 == written[2]


def test_bytes_are_the_tokens_they_have_always_been(written):
    """Stored studies identify the tokens they were measured on by this hash."""
    assert written[2] == "ba01410805be48f6a35e6614324f3486a1d6fa3eaab1fb7213426a994d671a0e"


def test_what_is_held_out_does_not_depend_on_the_order_of_the_documents(written, tmp_path):
    shuffled = random.Random(0).sample(DOCUMENTS, len(DOCUMENTS))
    _, held_out, _ = streams(shuffled, tmp_path / "tokens")
    assert sorted(passages_in(held_out)) == sorted(passages_in(written[1]))


def test_another_text_has_another_hash(written, tmp_path):
    assert streams([*DOCUMENTS[:-1], "changed"], tmp_path / "tokens")[2] != written[2]


def test_the_tokens_are_bytes_in_one_dimension(written):
    assert {(stream.dtype, stream.ndim) for stream in written[:2]} == {
        (numpy.dtype(numpy.uint8), 1)
    }


# -- too little text -------------------------------------------------------------------------------


def test_too_little_text_to_train_on_is_rejected_with_both_numbers(tmp_path):
    with pytest.raises(
        InvalidDataset, match=r"training part .* has 4 tokens and 257 are needed"
    ) as raised:
        write_tokens(Parts(train=["text"]), WORKLOAD, folder=tmp_path)
    assert "--global-batch" in raised.value.hint


def test_too_little_text_to_hold_out_is_rejected_with_both_numbers(tmp_path):
    trained_on = [document for document in DOCUMENTS if not is_held_out(document.encode())]
    with pytest.raises(
        InvalidDataset, match=r"held-out part .* has 0 tokens and 257 are needed"
    ) as raised:
        write_tokens(Parts(train=trained_on), WORKLOAD, folder=tmp_path)
    assert "--eval-sequences" in raised.value.hint


def test_no_text_at_all_is_rejected(tmp_path):
    with pytest.raises(InvalidDataset, match="has 0 tokens"):
        write_tokens(Parts(train=[]), WORKLOAD, folder=tmp_path)


def test_a_tokenized_split_and_one_of_text_are_rejected(tmp_path):
    import datasets

    tokens = documents_of(datasets.Dataset.from_dict({"input_ids": [[1, 2]]}), WORKLOAD)
    with pytest.raises(InvalidDataset, match="one split of tokens and one of text"):
        write_tokens(Parts(train=tokens, held_out=DOCUMENTS), WORKLOAD, folder=tmp_path)


# -- batches ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("tokens", "sequences"), [(1, 0), (32, 0), (33, 1), (64, 1), (65, 2)])
def test_a_sequence_needs_its_tokens_and_the_one_that_follows(tokens, sequences):
    assert sequences_in(numpy.zeros(tokens, dtype=numpy.uint8), sequence_length=32) == sequences


def test_a_batch_has_a_row_a_sequence_with_the_token_that_follows(written):
    batch = batch_of(written[0], [4, 0, 2], sequence_length=32)
    assert (batch.shape, batch.dtype) == ((3, 33), numpy.dtype(numpy.int64))


def test_the_sequences_are_the_stream_without_gaps(written):
    batch = batch_of(written[0], range(5), sequence_length=32)
    assert numpy.array_equal(batch[:, :-1].ravel(), written[0][: 5 * 32])
    assert numpy.array_equal(batch[:-1, -1], batch[1:, 0])


def test_the_last_sequence_is_whole():
    tokens = numpy.arange(97, dtype=numpy.uint8)
    last = sequences_in(tokens, sequence_length=32) - 1
    assert list(batch_of(tokens, [last], sequence_length=32)[0]) == list(range(64, 97))


def test_every_token_is_in_the_byte_vocabulary(written):
    batch = batch_of(written[0], range(5), sequence_length=32)
    assert 0 <= batch.min() <= batch.max() < BYTE_VOCABULARY


# -- the order of training -------------------------------------------------------------------------


def epochs(*, sequences=24, global_batch=8, seed=0, count=3):
    batches = list(
        islice(training_order(sequences=sequences, global_batch=global_batch, seed=seed), 3 * count)
    )
    return [numpy.concatenate(batches[3 * index : 3 * index + 3]) for index in range(count)]


def test_each_epoch_sees_every_sequence_once():
    for epoch in epochs():
        assert sorted(epoch) == list(range(24))


def test_each_epoch_is_shuffled_anew():
    first, second, third = (tuple(epoch) for epoch in epochs())
    assert len({first, second, third, tuple(range(24))}) == 4


def test_an_incomplete_batch_is_dropped():
    for epoch in epochs(sequences=31):
        assert len(set(epoch)) == 24


def test_every_batch_has_the_size_of_the_global_batch():
    batches = islice(training_order(sequences=31, global_batch=8, seed=0), 20)
    assert {len(batch) for batch in batches} == {8}


def test_the_seed_fixes_the_order():
    assert numpy.array_equal(epochs(seed=3), epochs(seed=3))


def test_another_seed_gives_another_order():
    assert not numpy.array_equal(epochs(seed=3), epochs(seed=4))


# -- the default text ------------------------------------------------------------------------------


def test_the_default_text_is_the_same_at_every_reading():
    assert python_docs.standard_library_texts() == python_docs.standard_library_texts()


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_the_default_text_is_long_enough_for_the_default_workload(device_type, tmp_path):
    workload = make_workload(device_type)
    write_tokens(Parts(train=python_docs.standard_library_texts()), workload, folder=tmp_path)
    sequences = sequences_in(
        numpy.load(tmp_path / "train.npy"), sequence_length=workload.sequence_length
    )
    assert sequences >= 10 * workload.global_batch


def test_the_default_text_holds_language_topics_and_module_docstrings():
    text = "\n".join(python_docs.standard_library_texts())
    assert 'The "if" statement is used for conditional execution' in text
    assert "JSON (JavaScript Object Notation)" in text
