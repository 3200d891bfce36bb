"""`autotune explain`, the real command: of a study's trial, of options, of a search space's row."""

import json
import re

import pytest

from autotune.spec.config import CHOICES, TrainingConfig
from autotune.spec.workload import make_workload
from tests.building.commands import run_here
from tests.building.studies import MIB, definition, keep, measured, open_store

pytestmark = pytest.mark.usefixtures("one_trial_server")

SIZES = {"layers": 2, "width": 16, "heads": 2, "sequence_length": 16, "global_batch": 2}
FLAGS = (
    "--device",
    "cpu",
    "--layers",
    "2",
    "--width",
    "16",
    "--heads",
    "2",
    "--seq-len",
    "16",
    "--global-batch",
    "2",
)
PLAIN = TrainingConfig(micro_batch_size=2)
CHECKPOINTED = TrainingConfig(micro_batch_size=2, checkpointing="block")
UNAVAILABLE = {
    "compile": dict.fromkeys(("block", "model"), "there is no compiler"),
    # Fewer alternatives to predict.
    "checkpointing": dict.fromkeys(("attention", "selective", "every-2", "sqrt"), "it is not here"),
    "optimizer": dict.fromkeys(
        (name for name in CHOICES["optimizer"] if name not in ("adamw", "sgd")), "it is not here"
    ),
    "precision": dict.fromkeys(("bf16-true", "fp16-mixed"), "it is not here"),
}
SPACE = """
[defaults]
checkpointing = "block"
[workload]
layers = 1
width = 16
heads = 2
sequence_length = 16
global_batch = 2
[[configurations]]
name = "one"
optimizer_fusion = "backward"
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a search space and a study of two trials, on a device without a compiler."""
    folder = tmp_path_factory.mktemp("explain")
    (folder / "rows.toml").write_text(SPACE)
    with open_store(f"sqlite:///{folder}/studies/autotune.db") as store:
        workload = make_workload("cpu", SIZES)
        store.create_study(definition(workload=workload, unavailable=UNAVAILABLE), trials_wanted=2)
        for config, speed in [(PLAIN, 1000.0), (CHECKPOINTED, 760.0)]:
            keep(store, config, measured(tokens_per_second=speed, peak_memory_bytes=MIB))
    return folder


def run(*arguments, folder):
    return run_here("explain", *arguments, folder=folder, COLUMNS="200")


def output(*arguments, folder):
    ended = run(*arguments, folder=folder)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@pytest.fixture(scope="module")
def ended(folder, one_trial_server):
    """The explanation of a study's pick, as the command that has ended."""
    return run("by-hand", folder=folder)


@pytest.fixture(scope="module")
def of_the_pick(ended):
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@pytest.mark.slow
def test_without_a_trial_explain_takes_the_pick(of_the_pick):
    assert of_the_pick.startswith("#0 fp32, micro-batch 2")


def test_explain_says_where_the_peak_of_the_pick_is(of_the_pick):
    assert "is at the start of backward" in of_the_pick
    assert "no gradient exists yet" in of_the_pick
    assert "Measured: 1.00 MiB" in of_the_pick


def test_explain_says_what_another_trial_measured(of_the_pick):
    (line,) = [
        line for line in of_the_pick.splitlines() if line.startswith("  checkpointing block: ")
    ]
    assert line.endswith(
        "measured in #1: 1.00 MiB, 760 tokens/s (24 % slower), the same perplexity"
    )


def test_explain_says_why_a_step_in_backward_cannot_help_alone(of_the_pick):
    (line,) = [
        line
        for line in of_the_pick.splitlines()
        if line.startswith("  optimizer-fusion backward saves nothing")
    ]
    assert "before any gradient exists; with " in line


def test_explain_says_what_the_device_cannot_do(of_the_pick):
    assert "compile block does not work on this device: there is no compiler" in of_the_pick


@pytest.fixture(scope="module")
def as_json(folder, one_trial_server):
    return json.loads(output("by-hand", "1", "--json", folder=folder))


def test_the_json_has_one_object_with_everything(as_json):
    assert set(as_json) >= {
        "schema", "study", "trial", "workload", "config", "prediction", "peak", "in_use",
        "alternatives", "others", "no_help", "pairs",
    }  # fmt: skip
    assert (as_json["study"], as_json["trial"]) == ("by-hand", 1)
    assert as_json["workload"]["layers"] == 2


def test_alternatives_in_the_json_hold_configuration_bytes_and_sentence(as_json):
    peak = as_json["prediction"]["peak_memory_bytes"]
    assert as_json["alternatives"]
    for one in [*as_json["alternatives"], *as_json["others"]]:
        assert one["saved_bytes"] == peak - one["predicted_peak_memory_bytes"]
        assert one["config"][one["technique"]] == one["value"]
        assert str(one["value"]) in one["sentence"]


def test_techniques_in_use_are_weighed(as_json):
    assert [one["technique"] for one in as_json["in_use"]] == ["checkpointing"]
    assert as_json["in_use"][0]["saved_bytes"] > 0


@pytest.mark.slow
def test_a_row_of_a_search_space_brings_its_own_workload(folder):
    text = output(
        "--device", "cuda", "--torch", "2.8", "--space", "rows.toml", "--name", "one", folder=folder
    )
    assert text.startswith("fp32, checkpointing block, optimizer-fusion backward, micro-batch 2")
    assert "gpt of 1 layers, width 16, 2 x 16 tokens a step, for cuda" in text
    assert "compute capability 8.0 with torch 2.8 is assumed" in text
    assert re.search(r"compile (block|model)", text)


@pytest.mark.slow
def test_options_name_a_configuration(folder):
    choices = (
        "--precision",
        "bf16-true",
        "--optimizer",
        "sgd",
        "--optimizer-fusion",
        "foreach",
        "--layers",
        "1",
    )
    text = output(*FLAGS, *choices, folder=folder)
    assert text.startswith("bf16-true, optimizer sgd, optimizer-fusion foreach, micro-batch 2")
    assert "precision bf16-true saves" in text.partition("In use")[2]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["nope", "0"], "there is by-hand"),
        (["by-hand", "9"], "its trials are 0 to 1"),
        (["by-hand", "0", "--seq-len", "3"], "--seq-len: the trial sets"),
        (["by-hand", "0", "--compute-capability", "9.0"], "--compute-capability: the trial sets"),
        (["by-hand", "x"], "TRIAL"),
        (["--space", "rows.toml"], "--space and --name belong together"),
        (["--space", "rows.toml", "--name", "two", "--device", "cpu"], "it names one"),
        (["--space", "rows.toml", "--name", "one", "--checkpointing", "none"], "checkpointing"),
        (["--device", "gpu"], "'gpu' is not a device"),
        ([*FLAGS, "--torch", "newest"], "'newest' is not a release of torch"),
        ([*FLAGS, "--memory-budget", "0.5"], "needs torch.compile"),
        ([*FLAGS, "--precision", "fp3"], "fp3"),
    ],
    ids=lambda value: " ".join(value[-2:]) if isinstance(value, list) else "",
)
def test_a_mistake_is_rejected_with_what_there_is(arguments, named, folder):
    ended = run(*arguments, folder=folder)
    lines = ended.stderr.splitlines()
    assert (ended.returncode, ended.stdout) == (2, "")
    assert [line.partition(":")[0] for line in lines] == ["error", "hint"]
    assert named in ended.stderr


def test_a_model_that_cannot_be_predicted_is_one_sentence(folder):
    batch = str(2**20)
    sizes = ("--width", str(2**20), "--seq-len", str(2**27), "--global-batch", batch)
    ended = run(*FLAGS, *sizes, "--micro-batch", batch, folder=folder)
    lines = ended.stderr.splitlines()
    assert (ended.returncode, ended.stdout) == (2, "")
    assert [line.partition(":")[0] for line in lines[-2:]] == ["error", "hint"]
    assert "the prediction failed: RuntimeError: Storage size calculation overflowed" in lines[-2]


def test_in_a_pipe_the_phases_are_lines(ended):
    starting, first, *others = ended.stderr.splitlines()
    assert (starting, first) == ("Starting torch ...", "Predicting ...")
    assert all(re.match(r"\d+ of \d+ predicted, after \d", line) for line in others)


def test_no_study_is_left_behind(folder, of_the_pick):
    assert sorted(path.name for path in (folder / "studies").iterdir()) == ["autotune.db"]
