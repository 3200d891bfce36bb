"""`autotune export`: the files, the list of what is not expressed, and errors in one sentence."""

import dataclasses
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

import autotune
from autotune.cli import app
from autotune.errors import AutotuneError, IllegalConfiguration, InvalidInput, StorageUnavailable
from autotune.exporters import TARGETS
from autotune.exporters.export import Export, Target, Unsupported
from autotune.spec.workload import make_workload
from tests.building.commands import run_here
from tests.building.studies import CAP_BYTES, MIB, measured, write_study

MEASUREMENTS = [
    measured(
        device_bytes=2 * CAP_BYTES,
        peak_memory_bytes=2 * CAP_BYTES,
        outcome="over_cap",
        message="over",
    ),
    measured(tokens_per_second=1500.0),
    measured(peak_memory_bytes=10 * MIB, device_bytes=10 * MIB),
]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current folder, with a study `by-hand` and one in which nothing is feasible."""
    url = f"sqlite:///{tmp_path}/studies/autotune.db"
    write_study(url, MEASUREMENTS)
    write_study(url, MEASUREMENTS, name="too-tight", cap_bytes=MIB)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def poor_target(monkeypatch):
    """A trainer that can express neither the micro batch nor the learning rate."""

    def write(recipe, version):
        unsupported = [
            Unsupported(
                setting="micro_batch_size",
                value=recipe.config.micro_batch_size,
                instead=8,
                why="it has no key",
            ),
            Unsupported(
                setting="learning_rate", value=0.002, instead=None, why="lr=0.002 in your script"
            ),
        ]
        return Export(
            files={"poor.txt": recipe.origin},
            command="poor poor.txt",
            unsupported=tuple(unsupported),
        )

    target = Target(title="Poor", versions=("1",), checked_with="nothing", write=write)
    monkeypatch.setitem(TARGETS, "poor", target)
    return target


def run(*arguments):
    """Returns what the command prints; raises what it raises."""
    ended = CliRunner().invoke(app, ["export", *arguments], standalone_mode=False)
    if ended.exception is not None:
        raise ended.exception
    return ended.stdout


def test_the_files_of_the_pick_are_written_and_named(folder):
    printed = run("by-hand", "--to", "pytorch")
    made = folder / "studies" / "by-hand-pytorch-1"
    assert {file.name for file in made.iterdir()} == {"train.py", "autotune_config.json"}
    assert all(str(file.relative_to(folder)) in printed for file in made.iterdir())
    assert "python train.py" in printed


def test_a_trial_can_be_named_by_its_number(folder):
    run("by-hand", "--to", "pytorch", "--trial", "2", "-o", "mine")
    assert autotune.load_config("mine/autotune_config.json").micro_batch_size == 6


def test_a_trial_can_be_picked_for_another_reason(folder):
    run("by-hand", "--to", "pytorch", "--pick", "smallest", "-o", "mine")
    assert autotune.load_config("mine/autotune_config.json").micro_batch_size == 6


def test_what_is_not_feasible_is_exported_with_a_remark(folder):
    assert "not feasible (over cap)" in run("by-hand", "--to", "pytorch", "--trial", "0")


def test_what_the_target_cannot_express_is_printed(folder, poor_target):
    printed = run("by-hand", "--to", "poor")
    assert "micro_batch_size 7 (8 instead): it has no key" in printed
    assert "learning_rate 0.002: lr=0.002 in your script" in printed


def test_strictly_a_technique_that_is_not_expressed_is_an_error_and_nothing_is_written(
    folder, poor_target
):
    with pytest.raises(
        IllegalConfiguration, match="poor cannot express micro_batch_size 7: it has no key"
    ):
        run("by-hand", "--to", "poor", "--strict")
    assert not (folder / "studies" / "by-hand-poor-1").exists()


def test_strictly_what_expresses_every_technique_is_written(folder):
    run("by-hand", "--to", "pytorch", "--strict", "-o", "mine")
    assert Path("mine/train.py").exists()


def test_strictly_a_replacement_is_an_error(folder, monkeypatch):
    error_of = Unsupported(
        setting="schedule", value="cosine", instead="constant", why="it has no other"
    )
    export = Export(files={"poor.txt": ""}, command="poor poor.txt", unsupported=(error_of,))
    target = Target(
        title="Poor", versions=("1",), checked_with="nothing", write=lambda recipe, version: export
    )
    monkeypatch.setitem(TARGETS, "poor", target)
    with pytest.raises(
        IllegalConfiguration, match="poor cannot express schedule cosine: it has no other"
    ):
        run("by-hand", "--to", "poor", "--strict")


def test_a_file_of_the_user_is_not_overwritten(folder):
    Path("train.py").write_text("mine")
    with pytest.raises(InvalidInput, match=r"train\.py already exists") as raised:
        run("by-hand", "--to", "pytorch", "-o", ".")
    assert "--force" in raised.value.hint
    assert Path("train.py").read_text() == "mine"
    assert not Path("autotune_config.json").exists()


def test_an_existing_file_can_be_overwritten(folder):
    Path("train.py").write_text("mine")
    run("by-hand", "--to", "pytorch", "-o", ".", "--force")
    assert Path("train.py").read_text() != "mine"


def test_the_same_export_twice_is_no_mistake(folder):
    for _ in range(2):
        run("by-hand", "--to", "pytorch", "-o", "mine")


def test_what_another_export_has_left_is_named(folder):
    Path("mine").mkdir()
    Path("mine/autotune_launch.py").write_text("")
    arguments = ("export", "by-hand", "--to", "pytorch", "-o", "mine")
    ended = run_here(*arguments, folder=Path.cwd())
    assert "mine also holds autotune_launch.py" in ended.stderr


def test_text_code_and_tokenizer_are_found_from_the_folder_of_the_export(folder):
    Path("text.txt").write_text("some text")
    Path("own.py").write_text("def make(): ...")
    named = {
        "dataset": "text.txt",
        "model": "own.py:make",
        "tokenizer": "somebody/tokenizer",
        "text_sha256": "f" * 64,
    }
    write_study(
        f"sqlite:///{folder}/studies/autotune.db",
        MEASUREMENTS,
        name="named",
        workload=workload(**named),
    )
    run("named", "--to", "pytorch", "-o", "mine")
    exported = json.loads(Path("mine/autotune_config.json").read_text())["workload"]
    assert (exported["dataset"], exported["model"]) == (
        str(folder / "text.txt"),
        f"{folder / 'own.py'}:make",
    )
    assert exported["tokenizer"] == "somebody/tokenizer"


def workload(**settings):
    return make_workload("cpu", {"steps": 24, **settings})


NOT_MEASURED = {
    "peak_memory_bytes": None,
    "device_bytes": None,
    "tokens_per_second": None,
    "perplexity": None,
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "outcome", ["predicted_over_cap", "out_of_memory", "crashed", "interrupted"]
)
def test_a_trial_that_has_no_numbers_is_exported(folder, outcome):
    url = f"sqlite:///{folder}/studies/autotune.db"
    write_study(
        url, [*MEASUREMENTS, measured(outcome=outcome, message="no", **NOT_MEASURED)], name=outcome
    )
    for target in TARGETS:
        printed = run(outcome, "--to", target, "--trial", "3")
        assert f"not feasible ({outcome.replace('_', ' ')})" in printed


@pytest.mark.parametrize("target", TARGETS)
def test_a_study_from_before_an_optimizer_was_known_is_exported(folder, target):
    """What stands for its optimizer in another trainer has no rate in the study."""
    from autotune.exporters.recipe import Recipe
    from autotune.spec.config import TrainingConfig

    asked = workload(text_sha256="f" * 64)
    old = dataclasses.replace(asked, learning_rates={"adamw": 1e-3, "adafactor": 1e-2, "sgd": 0.1})
    config = TrainingConfig(optimizer="adafactor", micro_batch_size=8)
    recipe = Recipe(config=config, workload=old, device_type="cuda", origin="an old study")
    for version in TARGETS[target].versions:
        assert TARGETS[target].write(recipe, version).files


def test_json_has_all_that_is_printed(folder, poor_target):
    content = json.loads(run("by-hand", "--to", "poor", "--json"))
    assert (content["files"], content["command"], content["trial"]) == (
        ["studies/by-hand-poor-1/poor.txt"],
        "poor poor.txt",
        1,
    )
    assert [(one["setting"], one["is_technique"]) for one in content["refusals"]] == [
        ("micro_batch_size", True),
        ("learning_rate", False),
    ]


@pytest.mark.parametrize(
    ("arguments", "error", "words", "hint"),
    [
        (["by-hand", "--to", "nothing"], InvalidInput, "'nothing'", "pytorch"),
        (
            ["by-hand", "--to", "pytorch", "--target-version", "9"],
            InvalidInput,
            "'9'",
            "use one of",
        ),
        (["by-hand", "--to", "pytorch", "--trial", "99"], InvalidInput, "no trial 99", "0 to 2"),
        (
            ["by-hand", "--to", "pytorch", "--trial", "1", "--pick", "fastest"],
            InvalidInput,
            "--pick",
            "one of them",
        ),
        (["by-hand", "--to", "pytorch", "--pick", "best"], InvalidInput, "'best'", "fastest"),
        (["too-tight", "--to", "pytorch"], InvalidInput, "no feasible trial", "name a trial"),
        (
            ["by-hand", "--to", "pytorch", "-o", "studies/autotune.db"],
            StorageUnavailable,
            "autotune.db",
            "--out",
        ),
        (["unknown", "--to", "pytorch"], AutotuneError, "unknown", "by-hand"),
    ],
    ids=str,
)
def test_a_mistake_is_one_sentence_with_a_hint(folder, arguments, error, words, hint):
    with pytest.raises(error) as raised:
        run(*arguments)
    assert words in raised.value.message
    assert hint in raised.value.hint
    assert raised.value.exit_code == 2


def test_a_mistake_ends_the_command_with_2_and_no_traceback(folder):
    ended = run_here("export", "by-hand", "--to", "nothing", folder=Path.cwd())
    assert (ended.returncode, ended.stdout) == (2, "")
    assert [line.partition(":")[0] for line in ended.stderr.splitlines()] == ["error", "hint"]
