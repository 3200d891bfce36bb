"""A submission chooses settings: it runs no code, and reads no file that it was not given."""

import json

import pytest

from autotune.errors import InvalidInput, NotAllowed
from autotune.service.settings import SubmissionRules
from autotune.service.submissions import check_submission, checked_workload

TOML = '[techniques]\nprecision = ["fp32", "bf16-mixed"]\nmicro_batch_size = "divisors"\n'


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """Folders for data and for code beside one that is closed, which is the current folder."""
    for name in ("data", "code", "closed"):
        (tmp_path / name).mkdir()
    lines = [f"Line {number} has a few words to train on.\n\n" for number in range(4000)]
    (tmp_path / "data" / "text.txt").write_text("".join(lines))
    (tmp_path / "data" / "tokenizer.json").write_text("{}")
    (tmp_path / "closed" / "secret.txt").write_text("secret words. " * 500)
    (tmp_path / "closed" / "space.toml").write_text(TOML)
    (tmp_path / "closed" / "model.py").write_text("def build(): ...\n")
    (tmp_path / "code" / "model.py").write_text("def build(vocab_size): ...\n")
    (tmp_path / "code" / "train.py").write_text("import autotune\nautotune.apply\n")
    (tmp_path / "data" / "large").mkdir()
    for name in ("config.json", "tokenizer.json"):
        with (tmp_path / "data" / "large" / name).open("wb") as large:
            large.truncate(200 * 2**20)
    (tmp_path / "data" / "link.txt").symlink_to(tmp_path / "closed" / "secret.txt")
    (tmp_path / "closed" / "org").mkdir()
    (tmp_path / "closed" / "org" / "name").write_text("secret words. " * 500)
    monkeypatch.chdir(tmp_path / "closed")
    return tmp_path


def rules_of(folders, **changes):
    return SubmissionRules(
        **{
            "storage": "sqlite:///autotune.db",
            "data_roots": (str(folders / "data"),),
            "code_folders": (str(folders / "code"),),
            **changes,
        }
    )


def check(folders, body, **changes):
    folder = folders / "space"
    folder.mkdir(exist_ok=True)
    return check_submission(body, rules_of(folders, **changes), folder=folder)


# -- accepted --------------------------------------------------------------------------------------


def test_an_empty_submission_is_the_default_search(folders):
    checked = check(folders, {})
    assert checked.base == "default-gpt"
    assert checked.request.storage == "sqlite:///autotune.db"


def test_a_relative_path_is_looked_up_below_the_folders_for_data(folders):
    checked = check(folders, {"dataset": "text.txt", "evaluation_sequences": 4})
    assert checked.request.workload["dataset"] == str(folders / "data" / "text.txt")


def test_a_space_comes_as_text_under_its_name(folders):
    checked = check(folders, {"space": "mine.toml", "space_content": TOML})
    assert (checked.space.name, checked.base) == ("mine", "mine-gpt")


def test_code_is_accepted_from_the_folder_that_was_allowed(folders):
    checked = check(folders, {"model": "model.py:build"})
    assert checked.request.workload["model"] == f"{folders / 'code' / 'model.py'}:build"


def test_a_group_may_come_later(folders):
    assert check(folders, {"group": "night-2"}).group == "night-2"


def test_spaces_around_a_kind_do_not_count(folders):
    assert check(folders, {"kind": " H100 "}).request.kind == "H100"


def test_preferences_limits_and_the_group_are_taken_over(folders):
    checked = check(
        folders,
        {
            "prefer": "smallest",
            "tolerance": {"speed": 0.1},
            "priority": 3,
            "group": "gpus",
            "time_budget": "10m",
        },
    )
    assert checked.request.preferences.prefer == "smallest"
    assert checked.request.preferences.tolerance.speed == 0.1
    assert (checked.priority, checked.group) == (3, "gpus")
    assert checked.request.time_budget == 600


def test_equal_submissions_have_equal_digests_and_others_do_not(folders):
    first = check(folders, {"trials": 3, "layers": 2})
    assert first.digest == check(folders, {"layers": 2, "trials": 3, "name": None}).digest
    assert first.digest != check(folders, {"layers": 2, "trials": 4}).digest


def test_limits_of_the_server_hold_where_a_submission_has_none(folders):
    request = check(folders, {}, most_trials=4, most_seconds=60.0).request
    assert (request.trials, request.time_budget) == (4, 60.0)
    request = check(folders, {"trials": 3}, most_seconds=60.0).request
    assert (request.trials, request.time_budget) == (3, 60.0)


def test_trials_of_earlier_searches_do_not_count_for_the_limit(folders):
    folder = folders / "space"
    folder.mkdir()
    checked = check_submission(
        {"trials": 6}, rules_of(folders, most_trials=4), folder=folder, trials_before=4
    )
    assert checked.request.trials == 6


def test_a_config_brings_the_name_of_its_model(folders):
    config = {
        "model_type": "llama",
        "num_hidden_layers": 2,
        "hidden_size": 32,
        "num_attention_heads": 2,
        "vocab_size": 256,
    }
    checked = check(folders, {"model_config": config})
    assert checked.request.workload["model"].startswith("llama-")


# -- not accepted ----------------------------------------------------------------------------------

HOSTILE = [
    {"dataset": "../closed/secret.txt"},
    {"dataset": "link.txt"},
    {"dataset": "/etc/passwd"},
    {"dataset": "~/.ssh/id_rsa"},
    {"dataset": "secret.txt"},
    {"dataset": "org/name"},
    {"dataset": "text.txt/../../closed/secret.txt"},
    {"dataset": "file:///etc/passwd"},
    {"tokenizer": "/etc/passwd"},
    {"tokenizer": "../closed"},
    {"model": "/etc"},
    {"model": "model.py:build", "_rules": {"code_folders": ()}},
    {"model": "../closed/model.py:build"},
    {"model": "os:system"},
    {"script": "train.py", "_rules": {"code_folders": ()}},
    {"script": "../closed/model.py"},
    {"script": "package.train"},
    {"script": "/usr/bin/python3"},
    {"space": "space.toml"},
    {"space": "../closed/space.toml"},
    {"space": "/etc/passwd"},
    {"space_content": 'extends = "space.toml"'},
    {"space_content": f'{TOML}[workload]\ndataset = "secret.txt"'},
    {"space_content": f'{TOML}[scales.a]\ndataset = "/etc/passwd"'},
    {"space_content": f'{TOML}[workload]\ntokenizer = "../closed"'},
    {"model": "x", "model_config": {"model_type": "llama", "auto_map": {"AutoModel": "m.py"}}},
    {"model": "x", "model_config": {"model_type": "a", "text_config": {"auto_map": {}}}},
    {"storage": "sqlite:////etc/x.db"},
    {"device": "cuda:7"},
    {"devices": "cuda:0,cuda:1"},
    {"devices": 500, "_rules": {"most_devices": 4}},
    {"ray": "ray://elsewhere:10001"},
    {"memory_snapshot": True},
    {"profile": "front", "_rules": {"ray": "auto"}},
    {"trials": 1000, "_rules": {"most_trials": 100}},
    {"time_budget": "2h", "_rules": {"most_seconds": 3600.0}},
    {"time_budget": "none", "_rules": {"most_seconds": 3600.0}},
    {"dataset": "text.txt", "tokenizer": "large"},
    {"model": "large"},
    {"pretrained": True, "model": "owner/name"},
    *(
        {"model_config": {"model_type": "a", "hidden_size": 64, **size}}
        for size in (
            {"n_inner": 2**45},
            {"head_dim": 2**40},
            {"text_config": {"hidden_size": 2**40}},
            {"num_hidden_layers": 96, "hidden_size": 2**20},
            {"num_hidden_layers": 96, "moe_intermediate_size": 2**20, "num_experts": 512},
        )
    ),
    {"layers": 1000, "width": 2**18, "heads": 64},
    {"vocab_size": 2**24, "width": 2**17},
    {"steps": 2**31 - 1, "global_batch": 4096},
    {"steps": 1_000_000_000},
    {"space": "quick", "steps": 1_000_000_000},
    {"global_batch": 2**20, "steps": 1_000_000},
    {"sequence_length": 2**27, "steps": 10_000},
    {"evaluation_sequences": 2**31 - 1},
    {"layers": 1000, "width": 2**17},
    {"space_content": f"{TOML}[workload]\nsteps = 1000000000\n"},
    {"evaluation_sequences": 2**31 - 1, "sequence_length": 4096},
]


@pytest.mark.parametrize("body", HOSTILE, ids=[json.dumps(body)[:60] for body in HOSTILE])
def test_what_reaches_beyond_a_submission_is_not_allowed(folders, body):
    changes = body.get("_rules", {})
    settings = {name: value for name, value in body.items() if name != "_rules"}
    with pytest.raises(NotAllowed) as raised:
        check(folders, settings, **changes)
    assert raised.value.hint


def test_what_is_only_predicted_may_be_larger_than_the_machine(folders):
    settings = {"layers": 80, "width": 8192, "heads": 64}
    assert checked_workload(settings, rules_of(folders)) == settings
    with pytest.raises(NotAllowed):
        check(folders, settings)


def test_what_is_only_predicted_has_no_number_that_no_model_has(folders):
    config = {"model_type": "llama", "hidden_size": 2**40}
    with pytest.raises(NotAllowed, match="more than any model"):
        checked_workload({"model": "llama", "model_config": config}, rules_of(folders))


def test_a_submission_may_have_the_front_profiled_at_its_end(folders):
    assert check(folders, {"profile": "front"}).request.profile == "front"


def test_weights_that_are_pickled_are_not_allowed(folders):
    model = folders / "data" / "llama"
    model.mkdir()
    config = {
        "model_type": "llama",
        "num_hidden_layers": 2,
        "hidden_size": 32,
        "num_attention_heads": 2,
        "vocab_size": 256,
    }
    (model / "config.json").write_text(json.dumps(config))
    (model / "other.safetensors").write_bytes(b"")
    (model / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    with pytest.raises(NotAllowed, match="pickled"):
        check(folders, {"model": "llama", "pretrained": True})


def test_a_model_on_disk_with_its_own_code_is_not_allowed(folders):
    model = folders / "data" / "own"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"model_type": "own", "auto_map": {}}))
    with pytest.raises(NotAllowed, match="auto_map"):
        check(folders, {"model": "own"})


DEEP: list = []
for _ in range(30):
    DEEP = [DEEP]

INVALID = [
    {"profile": "everything"},
    {"profile": True},
    {"trials": "5"},
    {"trials": 0},
    {"trials": 2**70},
    {"trials": True},
    {"trials": []},
    {"trials": [1]},
    {"max_mem": "8 apples"},
    {"max_mem": -1},
    {"max_mem": True},
    {"max_mem": 1.5},
    {"max_mem": {}},
    {"confirm_share": "a"},
    {"confirm_share": float("nan")},
    {"name": "../up"},
    {"name": "a" * 101},
    {"name": 7},
    {"name": "a\0b"},
    {"dataset": "a\0b"},
    {"dataset": "\ud800"},
    {"dataset": 5},
    {"dataset": "a" * 5000},
    {"layers": 1.5},
    {"layers": "3"},
    {"layers": -3},
    {"learning_rates": {"adamw": "fast"}},
    {"learning_rates": {"adamwish": 1}},
    {"learning_rates": []},
    {"space_content": 5},
    {"space_content": "not toml"},
    {"space_content": "a" * 70_000},
    {"space_content": "x" + ".x" * 5000 + " = 1"},
    {"space_content": "[" * 5000},
    {"model_config": 5, "model": "x"},
    {"model_config": {"a": DEEP}, "model": "x"},
    {"model_config": {"a": "b" * 300_000}, "model": "x"},
    {"priority": 1000},
    {"priority": "high"},
    {"group": "two gpus"},
    {"group": "g" * 5000},
    {"group": ["gpus"]},
    {"kind": " - "},
    {"prefer": "the best"},
    {"prefer": 3},
    {"prefer": ["fastest"]},
    {"tolerance": {"colour": 1}},
    {"tolerance": {"speed": "x"}},
    {"tolerance": 3},
    {"max_perplexity_increase": "1"},
    {"sampler": "best"},
    {"sampler": {}},
    {"predict": "yes"},
    {"seed": -1},
    {"packing": "loose"},
    {"streaming": 1},
    {"script_arguments": "a b"},
    {"script_arguments": ["a"]},
    {"trial_time_limit": "soon"},
    {"until_converged": 1},
    {"space_content": f'{TOML}[workload]\nmodel = "model.py:build"'},
    {"trialz": 5},
    {"x" * 1000: 1},
]


@pytest.mark.parametrize("body", INVALID, ids=[repr(body)[:50] for body in INVALID])
def test_an_invalid_value_is_one_sentence_that_names_it(folders, body):
    with pytest.raises(InvalidInput) as raised:
        check(folders, body)
    (name,) = list(body)[:1]
    assert len(raised.value.message) < 500
    assert name[:20] in raised.value.message.replace(" ", "_") or raised.value.hint


def test_a_message_about_a_space_does_not_name_a_file_of_the_server(folders):
    with pytest.raises(InvalidInput) as raised:
        check(folders, {"space_content": "[techniques]\nprecision = 5"})
    assert str(folders) not in raised.value.message


def test_a_setting_that_is_misspelt_is_answered_with_the_one_that_is_meant(folders):
    with pytest.raises(InvalidInput) as raised:
        check(folders, {"trialz": 5})
    assert "did you mean 'trials'" in raised.value.hint


@pytest.mark.parametrize(
    "body",
    [
        {"script_arguments": 5},
        {"script_arguments": [5]},
        {"script_arguments": "text"},
        {"model_config": {}},
        {"model_config": {"model_type": 5}},
    ],
)
def test_a_value_of_another_type_is_refused_also_where_no_option_declares_it(folders, body):
    (name,) = body
    with pytest.raises(InvalidInput, match=f"Invalid {name}"):
        check(folders, body)
    with pytest.raises(InvalidInput, match=f"Invalid {name}"):
        checked_workload(body, rules_of(folders))


FILES_READ_TOGETHER = {
    "dataset": ("README.md", "part/deep.jsonl", "state.json", "dataset_dict.json"),
    "tokenizer": ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"),
    "model": (
        *("config.json", "model.safetensors", "model.safetensors.index.json"),
        *("adapter_config.json", "generation_config.json", "tokenizer_config.json"),
    ),
}
"""Files that are read with the folder, or the file, that a setting names."""


@pytest.mark.parametrize("is_folder_named", [True, False], ids=["folder", "file"])
@pytest.mark.parametrize(
    ("setting", "name"),
    [(setting, name) for setting, names in FILES_READ_TOGETHER.items() for name in names],
)
def test_no_file_next_to_the_one_that_is_named_is_a_link_out(
    folders, setting, name, is_folder_named
):
    folder = folders / "data" / "set"
    (folder / "part").mkdir(parents=True)
    first = {"tokenizer": "tokenizer.json", "model": "config.json"}.get(setting)
    if first is not None and first != name:
        (folder / first).write_text('{"model_type": "llama", "vocab_size": 300}')
    (folder / name).symlink_to(folders / "closed" / "secret.txt")
    named = "set" if is_folder_named else f"set/{first or name}"
    with pytest.raises(NotAllowed):
        check(folders, {setting: named})


@pytest.mark.parametrize("setting", ["dataset", "tokenizer", "model", "script"])
@pytest.mark.parametrize(
    "address",
    [
        "file://{closed}/secret.txt",
        "file:{closed}/secret.txt",
        "http://127.0.0.1:9/a.txt",
        "https://example.org/a.jsonl",
        "hf://datasets/a/b",
        "s3://bucket/a.txt",
        "zip://a.txt::http://127.0.0.1:9/a.zip",
        "simplecache::{closed}/secret.txt",
    ],
)
def test_no_setting_is_an_address(folders, setting, address):
    with pytest.raises(InvalidInput):
        check(folders, {setting: address.format(closed=folders / "closed")})
