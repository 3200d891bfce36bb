"""How the rows of a trainer's data set are put into prompts, as its file says."""

import json

import pytest
import yaml

from autotune.data.sources import read_documents
from autotune.errors import InvalidInput
from autotune.importers.registry import import_file
from autotune.spec.prompt_format import PromptFormat, named, of_axolotl, prompt_formats
from autotune.spec.workload import make_workload
from tests.building import chat
from tests.importers.examples import SMALLEST

OF_AXOLOTL = [name for name in prompt_formats() if of_axolotl(name)]


@pytest.fixture
def imported(tmp_path):
    """imported(trainer, **keys) returns what the smallest file with these keys trains."""

    def imported(trainer, **keys):
        file = tmp_path / "train.yaml"
        file.write_text(yaml.safe_dump({**SMALLEST[trainer], **keys}))
        return import_file(file)

    return imported


def reasons(found):
    return {one.key: one.why for one in found.not_taken}


# -- axolotl ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OF_AXOLOTL)
def test_a_type_of_axolotl_is_the_format_of_that_name(name, imported):
    found = imported("axolotl", datasets=[{"path": "a/b", "type": name}])
    assert found.workload["prompt_format"] == named(name).to_dict()
    assert "datasets" not in reasons(found)
    found = imported("axolotl", datasets=[{"path": "a/b", "type": name}], train_on_inputs=True)
    assert found.workload["prompt_format"]["learned"] == "all"


def test_a_type_that_autotune_lacks_is_named_with_the_ways_out(imported):
    found = imported("axolotl", datasets=[{"path": "a/b", "type": "reflection"}])
    assert "prompt_format" not in found.workload
    assert "--prompt-format" in reasons(found)["datasets"]


OWN = {
    "field_instruction": "question",
    "field_input": "context",
    "field_output": "answer",
    "format": "[Q] {instruction} [C] {input}",
    "no_input_format": "[Q] {instruction}",
    "system_format": "[S] {system}\n",
    "system_prompt": "Use {braces}.",
}


def test_a_format_that_a_file_of_axolotl_describes_has_its_columns(imported):
    found = imported("axolotl", datasets=[{"path": "a/b", "type": OWN}])
    assert PromptFormat(**found.workload["prompt_format"]) == PromptFormat(
        prompt="[Q] {question} [C] {context}",
        shorter_prompt="[Q] {question}",
        answer="{answer}",
        system="[S] {system}\n",
        default_system="[S] Use {{braces}}.\n",
    )


def test_a_format_of_axolotl_that_says_little_has_its_defaults(imported):
    found = imported("axolotl", datasets=[{"path": "a/b", "type": {"field_output": "answer"}}])
    assert PromptFormat(**found.workload["prompt_format"]) == PromptFormat(
        prompt="{instruction} {input} ",
        shorter_prompt="{instruction} ",
        answer="{answer}",
        system="{system}",
    )


INVALID = {
    "an unknown key": ({"field_outpt": "a"}, "field_output"),
    "a value that is no text": ({"format": 3}, "as a text"),
    "a name that stands for nothing": ({"format": "{question}"}, "{instruction}"),
    "an input where there is none": ({"no_input_format": "{input}"}, "{instruction}"),
    "a brace that is not closed": ({"format": "{instruction"}, "in braces"),
}


@pytest.mark.parametrize(("type_", "way_out"), INVALID.values(), ids=INVALID)
def test_a_format_that_axolotl_could_not_fill_in_is_one_sentence(type_, way_out, imported):
    with pytest.raises(InvalidInput) as error:
        imported("axolotl", datasets=[{"path": "a/b", "type": type_}])
    assert way_out in error.value.hint


def test_messages_with_other_names_are_read_by_those_of_the_file(imported):
    entry = {
        "path": "a/b",
        "type": "chat_template",
        "field_messages": "talk",
        "message_property_mappings": {"role": "who", "content": "says"},
        "roles": {"user": ["person"], "assistant": ["machine", "robot"]},
    }
    found = imported("axolotl", datasets=[entry])
    assert PromptFormat(**found.workload["prompt_format"]) == PromptFormat(
        messages="talk",
        role="who",
        content="says",
        roles={"person": "user", "machine": "assistant", "robot": "assistant"},
    )
    usual = {**entry, "message_property_mappings": {"role": "from", "content": "value"}}
    del usual["roles"]
    assert imported("axolotl", datasets=[usual]).workload["text_column"] == "talk"


# -- LLaMA-Factory ---------------------------------------------------------------------------------

COLUMNS_OF_LLAMAFACTORY = {
    "by default": ({}, named("instruction-chat")),
    "named": (
        {
            "columns": {
                "prompt": "q",
                "query": "more",
                "response": "a",
                "system": "s",
                "history": "h",
            }
        },
        PromptFormat(
            prompt="{q}\n{more}",
            shorter_prompt="{q}",
            answer="{a}",
            system="{s}",
            history="h",
            is_chat=True,
        ),
    ),
    "without a query": (
        {"columns": {"prompt": "q", "response": "a"}},
        PromptFormat(prompt="{q}", answer="{a}", is_chat=True),
    ),
    "tags": (
        {
            "formatting": "sharegpt",
            "columns": {"messages": "talk", "system": "s"},
            "tags": {"role_tag": "who", "content_tag": "says", "user_tag": "person"},
        },
        PromptFormat(
            messages="talk",
            role="who",
            content="says",
            roles={
                "person": "user",
                "gpt": "assistant",
                "observation": "tool",
                "function_call": "assistant",
                "system": "system",
            },
            system="{s}",
        ),
    ),
}


@pytest.mark.parametrize(
    ("info", "format"), COLUMNS_OF_LLAMAFACTORY.values(), ids=COLUMNS_OF_LLAMAFACTORY
)
def test_a_data_set_of_llamafactory_has_the_columns_of_its_info(info, format, imported, tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "dataset_info.json").write_text(
        json.dumps({"mine": {"file_name": "rows.json", **info}})
    )
    found = imported("llamafactory", dataset="mine")
    assert PromptFormat(**found.workload["prompt_format"]) == format
    assert found.workload["dataset"] == str(tmp_path / "data" / "rows.json")
    assert "dataset" not in reasons(found)
    found = imported("llamafactory", dataset="mine", train_on_prompt=True)
    assert found.workload["prompt_format"]["learned"] == "all"
    found = imported("llamafactory", dataset="mine", mask_history=True)
    assert found.workload["prompt_format"]["learned"] == "last"


def test_the_info_of_data_sets_is_found_from_the_folder_of_the_command(
    imported, tmp_path, monkeypatch
):
    (tmp_path / "there" / "data").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "there")
    info = {"mine": {"file_name": "rows.json"}}
    (tmp_path / "there" / "data" / "dataset_info.json").write_text(json.dumps(info))
    found = imported("llamafactory", dataset="mine")
    assert found.workload["dataset"].endswith("data/rows.json")


def test_a_text_to_pretrain_on_is_no_prompt(imported, tmp_path):
    info = {"mine": {"file_name": "rows.json", "columns": {"prompt": "body"}}}
    (tmp_path / "dataset_info.json").write_text(json.dumps(info))
    found = imported("llamafactory", dataset="mine", dataset_dir=".", stage="pt")
    assert found.workload["text_column"] == "body"


def test_rows_without_a_response_are_named(imported, tmp_path):
    info = {"mine": {"file_name": "rows.json", "columns": {"prompt": "body"}}}
    (tmp_path / "dataset_info.json").write_text(json.dumps(info))
    found = imported("llamafactory", dataset="mine", dataset_dir=".")
    assert "response" in reasons(found)["dataset"]


# -- TRL -------------------------------------------------------------------------------------------


def test_prompts_that_trl_learns_as_well_are_named(imported):
    assert "completion_only_loss" in reasons(imported("trl", completion_only_loss=False))
    assert "completion_only_loss" not in reasons(imported("trl", completion_only_loss=True))
    assert "completion_only_loss" not in reasons(imported("trl"))


# -- from the file to the rows ---------------------------------------------------------------------

ROW = {"instruction": "Add them.", "input": "1, 2", "output": "They make 3."}
FILES = {
    "axolotl": {"datasets": [{"path": "{rows}", "type": "alpaca"}]},
    "trl": {
        "dataset_name": None,
        "datasets": [{"path": "{rows}"}],
    },
    "llamafactory": {"dataset": "mine", "dataset_dir": "."},
}


@pytest.mark.parametrize("trainer", FILES)
def test_the_rows_of_a_file_are_read_as_it_says(trainer, imported, tmp_path):
    rows = chat.write_rows(tmp_path / "rows.jsonl", [ROW])
    if trainer == "trl":
        chat.write_rows(rows, [{"prompt": "Add 1, 2: ", "completion": ROW["output"]}])
    info = {"mine": {"file_name": "rows.jsonl"}}
    (tmp_path / "dataset_info.json").write_text(json.dumps(info))
    keys = yaml.safe_load(yaml.safe_dump(FILES[trainer]).replace("{rows}", str(rows)))
    settings = {
        **imported(trainer, **keys).workload,
        "tokenizer": str(chat.write_tokenizer(tmp_path / "tokenizer")),
        "model": "gpt",
        "pretrained": False,
        "vocab_size": chat.VOCABULARY,
    }
    documents = read_documents(
        make_workload("cpu", settings), cache_folder=tmp_path / "cache"
    ).train
    [sample] = documents
    assert 0 < (sample >= 0).sum() < len(sample) - 5
