"""Rows of several columns: the prompt that they are put into, and what of it is learned."""

import json

import numpy
import pyarrow
import pyarrow.parquet
import pytest
from datasets import Dataset
from tokenizers import Tokenizer

from autotune.data.batches import TokenSequences
from autotune.data.sources import read_documents
from autotune.data.tokens import write_tokens
from autotune.errors import InvalidDataset, InvalidInput
from autotune.shipped.labels import IGNORED_LABEL
from autotune.spec.prompt_format import (
    PromptFormat,
    named,
    prompt_formats,
    read_prompt_format,
    write_prompt_format,
)
from autotune.spec.workload import make_workload
from tests.building import chat

LENGTH = 640
ALPACA = {"instruction": "Add the numbers.", "input": "1, 2", "output": "They make 3."}
WITHOUT_INPUT = {**ALPACA, "input": ""}
IS_CHAT = {name: named(name).is_chat for name in prompt_formats()}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return chat.write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def workload(tmp_path, tokenizer):
    """workload(dataset) names a dataset, or writes rows as one."""

    def workload(dataset, **settings):
        if isinstance(dataset, list):
            dataset = chat.write_rows(tmp_path / "rows.jsonl", dataset)
        return make_workload(
            "cpu",
            {
                "dataset": str(dataset),
                "tokenizer": str(tokenizer),
                "vocab_size": chat.VOCABULARY,
                "packing": "padded",
                "sequence_length": LENGTH,
                "global_batch": 1,
                "evaluation_sequences": 1,
                **settings,
            },
        )

    return workload


@pytest.fixture
def read(tmp_path, workload):
    """read(dataset) returns the samples of the training part."""

    def read(dataset, **settings):
        of = workload(dataset, **settings)
        return list(read_documents(of, cache_folder=tmp_path / "cache").train)

    return read


@pytest.fixture
def texts(read, tokenizer):
    """texts(dataset) returns (text, learned text) of every row."""

    def texts(dataset, **settings):
        decode = Tokenizer.from_file(str(tokenizer / "tokenizer.json")).decode
        samples = read(dataset, **settings)
        return [
            (
                decode(
                    [int(max(token, -2 - token)) for token in sample], skip_special_tokens=False
                ),
                decode([int(token) for token in sample if token >= 0], skip_special_tokens=False),
            )
            for sample in samples
        ]

    return texts


@pytest.fixture
def error_for(read):
    def error_for(dataset, **settings):
        with pytest.raises((InvalidDataset, InvalidInput)) as raised:
            read(dataset, **settings)
        return raised.value

    return error_for


# -- the formats that have a name ------------------------------------------------------------------


def test_a_row_of_alpaca_is_the_prompt_that_was_published(texts):
    [(text, learned)] = texts([ALPACA], prompt_format="alpaca")
    assert text == (
        "Below is an instruction that describes a task, paired with an input that provides further "
        "context. Write a response that appropriately completes the request.\n\n"
        "### Instruction:\nAdd the numbers.\n\n### Input:\n1, 2\n\n### Response:\n"
        f"They make 3.{chat.END}"
    )
    assert learned == f"They make 3.{chat.END}"


@pytest.mark.parametrize("nothing", ["", None])
def test_a_row_of_alpaca_without_an_input_has_the_shorter_prompt(nothing, texts):
    [(text, learned)] = texts([{**ALPACA, "input": nothing}], prompt_format="alpaca")
    assert text == (
        "Below is an instruction that describes a task. "
        "Write a response that appropriately completes the request.\n\n"
        f"### Instruction:\nAdd the numbers.\n\n### Response:\nThey make 3.{chat.END}"
    )
    assert learned == f"They make 3.{chat.END}"


@pytest.mark.parametrize("name", prompt_formats())
def test_a_format_puts_in_every_column_and_learns_the_answer_alone(name, texts):
    format = named(name)
    columns = (*format.columns, *format.optional_columns)
    row = {column: f"of {column}" for column in columns}
    [(text, learned)] = texts([row], prompt_format=name)
    assert all(value in text for value in row.values())
    assert [value for value in row.values() if value in learned] == [
        format.answer.replace("{", "of ").replace("}", "").removeprefix("what is ")
    ]
    assert learned.strip().endswith(chat.END)


@pytest.mark.parametrize("name", prompt_formats())
def test_a_format_is_written_as_a_text_that_is_read_as_the_same(name):
    for learned in ("answers", "all"):
        fields = {**named(name).to_dict(), "learned": learned}
        assert read_prompt_format(write_prompt_format(fields)) == fields
        assert PromptFormat(**fields).name == name


def test_every_format_says_where_it_comes_from():
    assert all(facts["source"] for facts in prompt_formats().values())


# -- formats without a name ------------------------------------------------------------------------


def test_a_text_with_columns_in_braces_is_a_format_whose_last_column_is_the_answer(texts):
    rows = [{"my question": "Why?", "answer": "So."}]
    [(text, learned)] = texts(rows, prompt_format=r"Q: {my question}\nA: {answer}")
    assert text == f"Q: Why?\nA: So.{chat.END}"
    assert learned == f"So.{chat.END}"


def test_all_of_a_row_is_learned_where_the_format_says_so(texts):
    format = {**named("alpaca").to_dict(), "learned": "all"}
    [(text, learned)] = texts([ALPACA], prompt_format=format)
    assert text == learned
    [(text, learned)] = texts([ALPACA], prompt_format={**format, "is_chat": True})
    assert text == learned


def test_the_text_of_a_system_is_of_the_row_or_of_the_whole_data_set(texts):
    format = {
        "prompt": "{q} ",
        "answer": "{a}",
        "system": "<{system}> ",
        "default_system": "Be brief. ",
    }
    row = {"q": "Why?", "a": "So."}
    assert [text for text, _ in texts([{**row, "system": "Be nice."}], prompt_format=format)] == [
        f"<Be nice.> Why? So.{chat.END}"
    ]
    assert [text for text, _ in texts([{**row, "system": ""}], prompt_format=format)] == [
        f"Why? So.{chat.END}"
    ]
    assert [text for text, _ in texts([row], prompt_format=format)] == [
        f"Be brief. Why? So.{chat.END}"
    ]


def test_earlier_turns_are_messages_of_their_own(texts):
    format = {**named("instruction-chat").to_dict(), "history": "history"}
    row = {**ALPACA, "history": [["Hi", "Hello"]]}
    [(text, learned)] = texts([row], prompt_format=format)
    assert text.count(chat.TURN) == 4
    assert learned == f"Hello{chat.END}\nThey make 3.{chat.END}\n"
    [(_, learned)] = texts([row], prompt_format={**format, "learned": "last"})
    assert learned == f"They make 3.{chat.END}\n"


def test_messages_are_read_by_the_names_that_a_format_gives(texts):
    row = {"talk": [{"who": "person", "says": "Hi"}, {"who": "machine", "says": "Hello"}]}
    format = {
        "messages": "talk",
        "role": "who",
        "content": "says",
        "roles": {"person": "user", "machine": "assistant"},
    }
    [(text, learned)] = texts([row], prompt_format=format)
    assert text.startswith(f"{chat.TURN}user\nHi{chat.END}")
    assert learned == f"Hello{chat.END}\n"


INVALID_FORMATS = {
    "alpac": "did you mean 'alpaca'",
    "{q}": "--text-column",
    "{q} {a": "in braces",
    "{q!r} {a}": "in braces",
    "{} {a}": "in braces",
    '{"prompt": 3}': "in braces",
    '{"prompt": ': "in braces",
    '{"prompt": "{q}"}': "in braces",
    '{"promt": "{q}", "answer": "{a}"}': "in braces",
}


@pytest.mark.parametrize(("format", "way_out"), INVALID_FORMATS.items())
def test_a_text_that_is_no_format_is_one_sentence_with_the_way_out(format, way_out):
    with pytest.raises(InvalidInput) as raised:
        make_workload("cpu", {"prompt_format": format})
    assert way_out in raised.value.hint


def test_a_column_of_text_beside_a_format_is_rejected():
    with pytest.raises(InvalidInput, match="only one"):
        make_workload("cpu", {"prompt_format": "alpaca", "text_column": "output"})


# -- the format that columns have by their names ---------------------------------------------------

MESSAGES = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
DETECTED = {
    "alpaca": ALPACA,
    "alpaca without an input": {"instruction": "a", "output": "b"},
    "alpaca beside a number": {**ALPACA, "id": 3},
    "prompt-completion": {"prompt": "a", "completion": "b"},
    "prompt-completion-chat": {"prompt": MESSAGES[:1], "completion": MESSAGES[1:]},
}


@pytest.mark.parametrize(("name", "row"), DETECTED.items(), ids=DETECTED)
def test_columns_have_the_format_of_exactly_these_names(name, row, read, workload, tmp_path):
    documents = read_documents(workload([row]), cache_folder=tmp_path / "cache").train
    assert documents.format == named(name.partition(" ")[0])


def test_an_input_that_no_row_has_is_no_other_column(texts):
    [(text, _)] = texts([{**ALPACA, "input": None}])
    assert "### Input" not in text


NOT_DETECTED = {
    "a system beside": {**ALPACA, "system": "a"},
    "another name": {"instruction": "a", "context": "b", "response": "c"},
}


@pytest.mark.parametrize("row", NOT_DETECTED.values(), ids=NOT_DETECTED)
def test_other_columns_need_the_option(row, error_for):
    assert "--prompt-format" in error_for([row]).hint


def test_a_column_called_text_is_learned_whatever_is_beside_it(read):
    assert read([{**ALPACA, "text": "whole"}]) == ["whole"]


def test_a_named_column_is_learned_alone(read):
    assert read([ALPACA], text_column="output") == ["They make 3."]


# -- forms of data ---------------------------------------------------------------------------------


def write_csv(rows, folder):
    lines = ["instruction,input,output"]
    lines += [",".join(f'"{value}"' for value in row.values()) for row in rows]
    (folder / "rows.csv").write_text("\n".join(lines))
    return folder / "rows.csv"


def write_parquet(rows, folder):
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "rows.parquet")
    return folder / "rows.parquet"


def write_json(rows, folder):
    (folder / "rows.json").write_text(json.dumps(rows))
    return folder / "rows.json"


def write_folder(rows, folder):
    (folder / "data").mkdir()
    for name in ("train", "test"):
        chat.write_rows(folder / "data" / f"{name}.jsonl", rows)
    return folder / "data"


def save_to_disk(rows, folder):
    Dataset.from_list(rows).save_to_disk(str(folder / "saved"))
    return folder / "saved"


FORMS = (write_csv, write_parquet, write_json, write_folder, save_to_disk)


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("write", FORMS)
def test_rows_are_the_same_in_every_form_of_data(write, streaming, read, tmp_path):
    rows = [ALPACA, WITHOUT_INPUT]
    expected = [sample.tolist() for sample in read(rows)]
    assert len(expected) == 2
    found = read(write(rows, tmp_path), streaming=streaming)
    assert [sample.tolist() for sample in found] == expected


def test_rows_of_a_split_can_be_held_out(workload, tmp_path):
    of = workload(write_folder([ALPACA, WITHOUT_INPUT], tmp_path), held_out_split="test")
    parts = read_documents(of, cache_folder=tmp_path / "cache")
    assert len(list(parts.held_out)) == 2


@pytest.mark.parametrize("packing", ["padded", "packed"])
def test_only_answers_are_labels_of_what_is_trained_on(packing, workload, tokenizer, tmp_path):
    rows = [{**ALPACA, "instruction": f"Add them, {index}."} for index in range(60)]
    of = workload(rows, packing=packing, global_batch=2)
    write_tokens(read_documents(of, cache_folder=tmp_path / "cache"), of, folder=tmp_path)
    batches = TokenSequences(tmp_path / "train.npy", sequence_length=LENGTH)
    labels = batches.batch(range(len(batches))).labels.numpy()
    decode = Tokenizer.from_file(str(tokenizer / "tokenizer.json")).decode
    text = decode(labels[labels != IGNORED_LABEL].tolist())
    assert "They make 3." in text
    assert "Add" not in text
    assert "Response" not in text


def test_the_tokens_may_be_bytes(read):
    [sample] = read([{"prompt": "ä", "completion": "b"}], tokenizer="bytes", vocab_size=256)
    assert bytes(numpy.where(sample < 0, -2 - sample, sample).tolist()).decode() == "äb\n\n"
    assert (sample >= 0).sum() == len(b"b\n\n")


def test_a_tokenizer_that_has_to_be_trained_is_rejected_with_others(error_for):
    assert "--tokenizer bytes" in error_for([ALPACA], tokenizer="bpe").hint


# -- rows that are not as they should be -----------------------------------------------------------


def test_a_row_without_an_answer_is_not_learned_from(texts):
    for nothing in ("", None):
        row = {**ALPACA, "output": nothing}
        assert [learned for _, learned in texts([row], prompt_format="alpaca")] == [""]
        assert texts([row], prompt_format="instruction-chat") == []


def test_numbers_are_put_in_as_they_are_written(texts, tmp_path):
    [(text, learned)] = texts([{"prompt": 3, "completion": 4.5}], prompt_format="prompt-completion")
    assert text.startswith("34.5")
    assert learned.startswith("4.5")
    (tmp_path / "sums.csv").write_text("prompt,completion\n1+1=,2\n2+2=,\n")
    assert [one[1] for one in texts(tmp_path / "sums.csv")] == [f"2.0{chat.END}", ""]


@pytest.mark.parametrize("value", [["a"], {"a": "b"}, True])
@pytest.mark.parametrize("name", ["alpaca", "instruction-chat"])
def test_a_value_that_is_no_text_is_one_sentence_with_its_row(value, name, error_for):
    error = error_for([{**ALPACA, "input": value}], prompt_format=name)
    assert "row 1 of dataset" in error.message
    assert "in input" in error.message


def test_a_history_that_is_no_pairs_is_one_sentence_with_its_row(error_for):
    format = {**named("instruction-chat").to_dict(), "history": "history"}
    error = error_for([{**ALPACA, "history": [["a", "b", "c"]]}], prompt_format=format)
    assert "no pair" in error.message


def test_messages_that_are_none_are_one_sentence_with_their_row(error_for):
    format = {"messages": "talk", "role": "who", "content": "says"}
    for value in ("text", None, [1]):
        error = error_for([{"talk": value, "other": [{"a": "b"}]}], prompt_format=format)
        assert "row 1 of dataset" in error.message


@pytest.mark.parametrize("name", prompt_formats())
def test_a_missing_column_is_named_with_those_that_exist(name, error_for):
    error = error_for([{"year": "1999"}], prompt_format=name)
    assert "no column" in error.message
    assert "year" in error.message
    assert "--prompt-format" in error.hint


# -- as the trainer has it -------------------------------------------------------------------------

OF_TRL = {
    "text": [{"prompt": "Count to three: ", "completion": "one two three"}],
    "messages": [{"prompt": MESSAGES[:1], "completion": MESSAGES[1:]}],
    "earlier answers": [
        {"prompt": [*MESSAGES, *MESSAGES[:1]], "completion": MESSAGES[1:]},
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize("rows", OF_TRL.values(), ids=OF_TRL)
def test_prompts_and_completions_are_learned_as_by_trl(rows, read, tokenizer, tmp_path):
    from transformers import AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    from tests.exporters.readers.hugging_face import tiny_llama

    trainer = SFTTrainer(
        tiny_llama(),
        SFTConfig(output_dir=str(tmp_path / "out"), use_cpu=True, bf16=False, max_length=LENGTH),
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(tokenizer),
    )
    batch = trainer.data_collator([trainer.train_dataset[index] for index in range(len(rows))])
    expected = [
        (tokens.tolist(), [label for label in labels.tolist() if label != IGNORED_LABEL])
        for tokens, labels in zip(batch["input_ids"], batch["labels"], strict=True)
    ]
    found = [
        (numpy.where(sample < 0, -2 - sample, sample).tolist(), sample[sample >= 0].tolist())
        for sample in read(rows)
    ]
    assert found == expected
