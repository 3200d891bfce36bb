"""Tokenizers: bytes, trained on the text, or from a file; and the tokens written to disk."""

import json

import numpy
import pytest

from autotune.data.sources import Parts
from autotune.data.token_file import TextFacts
from autotune.data.tokenizer import load_tokenizer
from autotune.data.tokens import write_tokens
from autotune.errors import InvalidInput
from autotune.shipped.bpe import train_bpe
from autotune.shipped.byte_tokenizer import ByteTokenizer
from autotune.shipped.subword_tokenizer import END_OF_TEXT, PADDING
from autotune.spec.workload import make_workload

SETTINGS = {"sequence_length": 32, "global_batch": 4, "evaluation_sequences": 4}
DOCUMENTS = [f"document {number}: " + "word ünï " * (number % 50) for number in range(400)]
TEXTS = [document.encode() for document in DOCUMENTS]
VOCABULARY = 300


@pytest.fixture(scope="module")
def bpe_file(tmp_path_factory):
    """A tokenizer.json of 300 tokens."""
    file = tmp_path_factory.mktemp("bpe") / "tokenizer.json"
    train_bpe(TEXTS, vocab_size=VOCABULARY, file=file)
    return file


@pytest.fixture
def write(tmp_path):
    """write(tokenizer=...) writes the tokens of DOCUMENTS and returns the folder and the hash."""

    def write(*, documents=DOCUMENTS, name="written", **settings):
        folder = tmp_path / name
        folder.mkdir()
        workload = make_workload("cpu", SETTINGS, settings)
        return folder, write_tokens(Parts(train=documents), workload, folder=folder)

    return write


def decoded(file, tokens):
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(file)).decode(list(tokens), skip_special_tokens=False)


# -- trained on the text ---------------------------------------------------------------------------


def test_a_trained_tokenizer_is_stored_next_to_its_tokens(write):
    folder, _ = write(tokenizer="bpe", vocab_size=VOCABULARY)
    text = decoded(folder / "tokenizer.json", numpy.load(folder / "held_out.npy"))
    assert set(text.split(END_OF_TEXT)) <= set(DOCUMENTS)


def test_a_trained_tokenizer_has_no_more_tokens_than_asked_for(write):
    folder, _ = write(tokenizer="bpe", vocab_size=VOCABULARY)
    assert numpy.load(folder / "train.npy").max() < VOCABULARY


def test_training_a_tokenizer_again_gives_the_same_tokens(write):
    assert (
        len(
            {write(tokenizer="bpe", vocab_size=VOCABULARY, name=name)[1] for name in ("one", "two")}
        )
        == 1
    )


def test_a_tokenizer_is_not_trained_on_what_is_held_out(tmp_path):
    workload = make_workload("cpu", SETTINGS, {"tokenizer": "bpe", "vocab_size": VOCABULARY})
    held_out = ["zq" * 500] * 4
    write_tokens(Parts(train=DOCUMENTS, held_out=held_out), workload, folder=tmp_path)
    assert "zq" not in json.loads((tmp_path / "tokenizer.json").read_text())["model"]["vocab"]


def test_a_tokenizer_learns_nothing_from_words_that_are_none(tmp_path):
    train_bpe(
        [b"zqzq" * 1000 + b" words and words"],
        vocab_size=VOCABULARY,
        file=tmp_path / "tokenizer.json",
    )
    assert "zq" not in json.loads((tmp_path / "tokenizer.json").read_text())["model"]["vocab"]


def test_a_trained_tokenizer_has_8000_tokens_by_default():
    assert make_workload("cpu", {"tokenizer": "bpe"}).vocab_size == 8000


# -- from a file -----------------------------------------------------------------------------------


def test_a_tokenizer_can_be_named_by_its_file_or_its_folder(write, bpe_file):
    hashes = {
        write(tokenizer=str(path), vocab_size=VOCABULARY, name=path.name)[1]
        for path in (bpe_file, bpe_file.parent)
    }
    assert len(hashes) == 1


def test_a_vocabulary_larger_than_the_models_is_rejected_with_both_numbers(bpe_file):
    workload = make_workload("cpu", {"tokenizer": str(bpe_file), "vocab_size": VOCABULARY - 1})
    with pytest.raises(InvalidInput, match=r"300 tokens, more than the 299") as raised:
        load_tokenizer(workload)
    assert "--vocab-size 300" in raised.value.hint


@pytest.mark.parametrize("content", ["", "{}", "not json", '{"model": 1}'])
def test_a_file_that_is_no_tokenizer_is_rejected_by_name(tmp_path, content):
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(InvalidInput, match=r"tokenizer\.json.* cannot be read"):
        load_tokenizer(make_workload("cpu", {"tokenizer": str(tmp_path)}))


def test_a_folder_without_a_tokenizer_is_rejected_with_the_way_to_make_one(tmp_path):
    with pytest.raises(InvalidInput, match=r"has no tokenizer\.json") as raised:
        load_tokenizer(make_workload("cpu", {"tokenizer": str(tmp_path)}))
    assert "save_pretrained" in raised.value.hint


def test_a_missing_file_is_rejected_without_asking_the_hub():
    with pytest.raises(InvalidInput, match=r"there is no tokenizer './nowhere'"):
        load_tokenizer(make_workload("cpu", {"tokenizer": "./nowhere"}))


def test_a_text_that_the_vocabulary_has_no_token_for_is_rejected_with_the_tokenizer(tmp_path):
    words = {
        "type": "WordPiece",
        "unk_token": "[UNK]",
        "continuing_subword_prefix": "##",
        "max_input_chars_per_word": 100,
        "vocab": {"hello": 0},
    }
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps({"version": "1.0", "added_tokens": [], "model": words}))
    tokenizer = load_tokenizer(make_workload("cpu", {"tokenizer": str(file)}))
    with pytest.raises(InvalidInput, match=r"tokenizer\.json' has no tokens for a text: .*UNK"):
        tokenizer.encode([b"hello world"], longest=None)


def test_special_tokens_are_those_that_its_settings_file_names(bpe_file, tmp_path):
    (tmp_path / "tokenizer.json").write_text(bpe_file.read_text())
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": None, "eos_token": {"content": PADDING}})
    )
    tokenizer = load_tokenizer(
        make_workload("cpu", {"tokenizer": str(tmp_path), "vocab_size": VOCABULARY})
    )
    assert (list(tokenizer.beginning), list(tokenizer.separator)) == ([], [1])


def test_the_models_tokenizer_is_in_the_folder_of_its_config(bpe_file, tmp_path):
    llama = {
        "model_type": "llama",
        "num_hidden_layers": 2,
        "hidden_size": 32,
        "num_attention_heads": 2,
    }
    (tmp_path / "config.json").write_text(json.dumps({**llama, "vocab_size": VOCABULARY}))
    for model in (tmp_path, tmp_path / "config.json"):
        workload = make_workload("cpu", {"model": str(model), "tokenizer": "model"})
        assert workload.tokenizer == str(tmp_path)


# -- on disk ---------------------------------------------------------------------------------------


def test_packed_tokens_are_in_the_smallest_type_that_holds_the_vocabulary(write, bpe_file):
    types = [
        numpy.load(
            write(tokenizer=tokenizer, vocab_size=VOCABULARY, name=name)[0] / "train.npy"
        ).dtype
        for name, tokenizer in (("bytes", "bytes"), ("bpe", str(bpe_file)))
    ]
    assert types == [numpy.uint8, numpy.uint16]


def test_bytes_a_token_are_those_of_the_held_out_text(write, bpe_file):
    folder, _ = write(tokenizer=str(bpe_file), vocab_size=VOCABULARY, evaluation_sequences=40)
    stream = numpy.load(folder / "held_out.npy")
    text = decoded(bpe_file, stream).replace(END_OF_TEXT, "")
    assert TextFacts.read(folder).bytes_per_token == pytest.approx(
        len(text.encode()) / len(stream), rel=0.02
    )


def test_of_bytes_a_token_is_exactly_one_byte_however_they_are_packed(write):
    for packing in ("packed", "padded"):
        folder, _ = write(packing=packing, name=packing)
        assert TextFacts.read(folder).bytes_per_token == 1.0


def test_a_folder_prepared_before_there_were_tokenizers_holds_bytes(tmp_path):
    assert TextFacts.read(tmp_path).bytes_per_token == 1.0


@pytest.mark.parametrize("longest", [0, 1, 2, 5, None])
def test_the_bytes_of_a_text_that_is_cut_are_those_before_the_cut(bpe_file, longest):
    workload = make_workload("cpu", {"tokenizer": str(bpe_file), "vocab_size": VOCABULARY})
    ((tokens, size_bytes),) = load_tokenizer(workload).encode([TEXTS[3]], longest=longest)
    assert TEXTS[3][:size_bytes].decode() == decoded(bpe_file, tokens)


def test_bytes_are_cut_as_other_tokens_are():
    ((tokens, size_bytes),) = ByteTokenizer().encode([b"abcdef"], longest=4)
    assert (tokens.tobytes(), size_bytes) == (b"abcd", 4)
