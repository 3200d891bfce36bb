"""`autotune export --into FILE`: what is written, what is said, and what is refused."""

import dataclasses
import json

import pytest
from typer.testing import CliRunner

import autotune
from autotune.cli import app
from autotune.errors import IllegalConfiguration, InvalidInput
from autotune.exporters.into import trainer_parser
from autotune.importers.registry import import_file
from autotune.spec.config import TrainingConfig
from autotune.spec.workload import make_workload
from tests.building.studies import MIB, definition, keep, measured, open_store
from tests.exporters.into.files import FILES

MODEL = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 300,
    "max_position_embeddings": 2048,
}
FILE = """\
base_model: model   # ours
datasets:
  - {path: rows.jsonl, type: completion}
sequence_len: 1024
micro_batch_size: 2  # fits
gradient_accumulation_steps: 4
optimizer: adamw_torch
learning_rate: 1e-5
bf16: false
tf32: false
attn_implementation: sdpa
gradient_checkpointing: true
"""
OWN = TrainingConfig(
    micro_batch_size=2,
    checkpointing="block",
    optimizer_fusion="foreach",
    allocator="expandable",
)
PICK = dataclasses.replace(OWN, micro_batch_size=8, checkpointing="none")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current folder, with the file, its model, and a study of it."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(MODEL))
    (tmp_path / "run.yaml").write_text(FILE)
    monkeypatch.chdir(tmp_path)
    workload = make_workload(
        "cpu",
        {
            "model": "model",
            "sequence_length": 1024,
            "steps": 24,
            "text_sha256": "f" * 64,
            "own_config": OWN.to_dict(),
            "own_file": "run.yaml",
            "packing": "padded",
        },
    )
    with open_store(f"sqlite:///{tmp_path}/studies/autotune.db") as store:
        store.create_study(definition("tuned", workload=workload), trials_wanted=4)
        for config, peak, speed in (
            (OWN, 20, 1000.0),
            (PICK, 40, 1600.0),
            (dataclasses.replace(PICK, checkpointing="block"), 30, 1280.0),
            (dataclasses.replace(PICK, loss="chunked"), 10, 100.0),
        ):
            measurement = measured(
                peak_memory_bytes=peak * MIB, device_bytes=peak * MIB, tokens_per_second=speed
            )
            keep(store, config, measurement, study="tuned")
    return tmp_path


def export(*arguments):
    """Returns what the command prints; raises what it raises."""
    ended = CliRunner().invoke(app, ["export", "tuned", *arguments], standalone_mode=False)
    if ended.exception is not None:
        raise ended.exception
    return ended.stdout


def test_a_copy_has_the_pick_and_the_file_stays(folder):
    export("--into", "run.yaml")
    assert (folder / "run.yaml").read_text() == FILE
    written = (folder / "run.autotune.yaml").read_text()
    assert written == (
        FILE.replace("micro_batch_size: 2", "micro_batch_size: 8")
        .replace("steps: 4", "steps: 1")
        .replace("checkpointing: true", "checkpointing: false")
    )


def test_the_written_file_is_imported_as_the_pick(folder):
    export("--into", "run.yaml")
    config = import_file(folder / "run.autotune.yaml").config
    assert TrainingConfig(**config) == PICK


def test_the_difference_and_what_each_change_brings_are_printed(folder):
    printed = export("--into", "run.yaml")
    assert "-gradient_checkpointing: true\n+gradient_checkpointing: false\n" in printed
    assert "1.60 times as fast as #0, the file as it is" in printed
    assert "a peak of 40.00 MiB instead of 20.00 MiB" in printed
    assert (
        "checkpointing none (gradient_checkpointing): 10.00 MiB more (33 %), 25 % faster than "
        "with checkpointing block"
    ) in printed
    assert "the trial was not measured without it" in printed  # the micro batch
    assert "axolotl train run.autotune.yaml" in printed


def test_another_trial_is_named_by_its_number(folder):
    export("--into", "run.yaml", "--trial", "2", "--out", "other.yaml")
    assert TrainingConfig(**import_file(folder / "other.yaml").config).checkpointing == "block"


def test_into_what_was_written_nothing_changes(folder):
    export("--into", "run.yaml")
    printed = export("--into", "run.autotune.yaml")
    assert "run.autotune.yaml already describes it: nothing was written" in printed
    assert {file.name for file in folder.glob("*.yaml")} == {"run.yaml", "run.autotune.yaml"}


def test_in_place_keeps_the_original(folder):
    printed = export("--into", "run.yaml", "--in-place")
    assert (folder / "run.yaml.orig").read_text() == FILE
    assert "micro_batch_size: 8" in (folder / "run.yaml").read_text()
    assert "run.yaml.orig (the original)" in printed


def test_no_original_is_written_over(folder):
    (folder / "run.yaml.orig").write_text("an earlier one")
    export("--into", "run.yaml", "--in-place")
    assert (folder / "run.yaml.orig").read_text() == "an earlier one"
    assert (folder / "run.yaml.orig1").read_text() == FILE


def test_a_link_stays_one(folder):
    (folder / "run.yaml").rename(folder / "real.yaml")
    (folder / "run.yaml").symlink_to("real.yaml")
    export("--into", "run.yaml", "--in-place")
    assert (folder / "run.yaml").is_symlink()
    assert "micro_batch_size: 8" in (folder / "real.yaml").read_text()


def test_another_file_of_that_name_is_replaced_by_force_alone(folder):
    (folder / "run.autotune.yaml").write_text("mine: 1\n")
    with pytest.raises(InvalidInput, match=r"run\.autotune\.yaml already exists"):
        export("--into", "run.yaml")
    assert (folder / "run.autotune.yaml").read_text() == "mine: 1\n"
    export("--into", "run.yaml", "--force")
    assert "micro_batch_size: 8" in (folder / "run.autotune.yaml").read_text()


def test_strict_writes_nothing_where_something_is_not_expressed(folder):
    with pytest.raises(IllegalConfiguration, match="cannot express loss chunked"):
        export("--into", "run.yaml", "--trial", "3", "--strict")
    assert not (folder / "run.autotune.yaml").exists()


def test_json_has_the_changes_and_the_files(folder):
    told = json.loads(export("--into", "run.yaml", "--json"))
    assert told["files"] == ["run.autotune.yaml"]
    assert {tuple(change["key"]): change["after"] for change in told["changes"]} == {
        ("micro_batch_size",): 8,
        ("gradient_accumulation_steps",): 1,
        ("gradient_checkpointing",): False,
    }


def test_python_has_it_as_a_method_and_as_a_function(folder):
    url = f"sqlite:///{folder}/studies/autotune.db"
    written = autotune.show("tuned", storage=url).export_into("run.yaml", out="a.yaml")
    assert "+gradient_checkpointing: false" in str(written)
    autotune.export_into("tuned", "run.yaml", out="b.yaml", storage=url)
    assert (folder / "a.yaml").read_bytes() == (folder / "b.yaml").read_bytes()


def test_a_mark_of_byte_order_stays(folder):
    (folder / "run.yaml").write_bytes(b"\xef\xbb\xbf" + FILE.encode())
    export("--into", "run.yaml")
    assert (folder / "run.autotune.yaml").read_bytes().startswith(b"\xef\xbb\xbfbase_model")


def test_a_file_that_has_changed_since_is_said(folder):
    (folder / "run.yaml").write_text(FILE.replace("steps: 4", "steps: 2"))
    with pytest.raises(InvalidInput, match=r"a step of run\.yaml has 4 sequences"):
        export("--into", "run.yaml")
    edited = FILE.replace("checkpointing: true", "checkpointing: false")
    (folder / "run.yaml").write_text(edited)
    assert (
        "run.yaml is not as it was when the study began: checkpointing none (then block)"
    ) in export("--into", "run.yaml")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("sequence_len: 1024", "sequence_len: 2048", "sequences of 1024 tokens"),
        ("base_model: model", "base_model: Qwen/Qwen2.5-0.5B", "its numbers do not hold there"),
        ("base_model", "bose_model", "is the file of no trainer"),
        ("micro_batch_size", "micro_batchsize", "no key of axolotl"),
        ("bf16: false", "bf16: false\nbf16: true", "twice"),
        ("bf16: false", "bf16: [", "is not valid YAML"),
        ("bf16: false", "bf16: !!python/object:os.system {}", "nothing in a file is run"),
        ("optimizer: adamw_torch", "optimizer: nadam", "autotune has no such optimizer"),
        ("learning_rate: 1e-5", "learning_rate: ${RATE}", "which something else fills in"),
    ],
)
def test_a_file_that_the_study_says_nothing_about_is_one_sentence(folder, old, new, message):
    (folder / "run.yaml").write_text(FILE.replace(old, new))
    with pytest.raises(InvalidInput, match=message):
        export("--into", "run.yaml")
    assert not (folder / "run.autotune.yaml").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "nothing says what to export to"),
        (("--into", "run.yaml", "--to", "trl"), "are two exports"),
        (("--to", "trl", "--in-place"), "belongs to --into"),
        (("--into", "run.yaml", "--target-version", "1"), "belongs to --to"),
        (("--into", "run.yaml", "--in-place", "--out", "a.yaml"), "both say what to write"),
        (("--into", "run.yaml", "--out", "run.yaml"), "is the file itself"),
        (("--into", "run.yaml", "--out", "run.json"), "does not end in .yaml"),
        (("--into", "missing.yaml"), "missing.yaml"),
    ],
)
def test_options_that_contradict_are_one_sentence(folder, arguments, message):
    with pytest.raises(InvalidInput, match=message):
        export(*arguments)


@pytest.mark.slow  # the trainers import torch
@pytest.mark.parametrize("case", ["arguments", "lightning", "trl with anchors"])
def test_a_trainers_own_parser_takes_its_file_and_refuses_a_wrong_one(tmp_path, case):
    name, text, trainer = FILES[case]
    pytest.importorskip(trainer)
    file = tmp_path / name
    file.write_text(text)
    assert trainer_parser.refusal(trainer, file) is None
    wrong = {"adamw_torch": "adamw_toch", "batches: 2": "batches: two", "use_peft": "use_paft"}
    for old, new in wrong.items():
        text = text.replace(old, new)
    file.write_text(text)
    assert trainer_parser.refusal(trainer, file)
