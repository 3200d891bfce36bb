"""`autotune fit`: predictions of a small model on a CPU, and one real trial."""

import json

import pytest

from autotune.units import parse_size
from tests.building.commands import run_here

pytestmark = pytest.mark.usefixtures("one_trial_server")

SMALL = ["--width", "32", "--heads", "2", "--seq-len", "32", "--global-batch", "2", "--layers", "2"]
ROW_KEYS = {
    "devices",
    "peak_memory_bytes_by_rank",
    "technique",
    "config",
    "value",
    "parameters",
    "predicted_peak_memory_bytes",
    "upper_bound_bytes",
    "predicted_tokens_per_second",
    "predicted_tokens_per_second_bounds",
    "bound_by",
    "phase",
    "bytes_by_category",
    "predictions_made",
    "message",
}
SPACE = """
[techniques]
checkpointing = ["none", "block", "attention"]
optimizer_fusion = ["none", "backward"]
"""


def fit(*arguments, folder):
    return run_here("fit", "--device", "cpu", *SMALL, *arguments, folder=folder, COLUMNS="200")


def found(*arguments, folder):
    """The JSON of a run that found something."""
    ended = fit(*arguments, "--json", "--quiet", folder=folder)
    assert (ended.returncode, ended.stderr) == (0, "")
    return json.loads(ended.stdout)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fit")
    (folder / "space.toml").write_text(SPACE)
    return folder


@pytest.fixture(scope="module")
def confirmed(folder, one_trial_server):
    """One configuration, with its real trial."""
    return found("--max-mem", "3MiB", "--checkpointing", "block", folder=folder)


def test_a_row_keeps_the_contract(confirmed):
    assert {"schema", "vary", "cap_bytes", "device", "rows", "confirmed"} <= set(confirmed)
    assert (confirmed["schema"], confirmed["vary"], confirmed["device"]) == (1, "layers", "cpu")
    assert confirmed["cap_bytes"] == parse_size("3MiB")
    assert [set(row) for row in confirmed["rows"]] == [ROW_KEYS]


def test_what_fits_is_the_upper_bound(confirmed):
    (row,) = confirmed["rows"]
    assert row["predicted_peak_memory_bytes"] <= row["upper_bound_bytes"] <= confirmed["cap_bytes"]
    assert row["message"].startswith(f"{row['value'] + 1} layers would need up to 3.")


def test_the_largest_was_trained_and_stayed_under_the_cap(confirmed):
    (row,), trial = confirmed["rows"], confirmed["confirmed"]
    assert (trial["value"], trial["config"]) == (row["value"], row["config"])
    assert (trial["outcome"], trial["stayed_under"]) == ("ok", True)
    assert trial["peak_memory_bytes"] <= row["upper_bound_bytes"]


@pytest.mark.slow
def test_the_ablation_is_a_table_with_a_row_per_technique(folder):
    ended = fit(
        "--max-mem",
        "3MiB",
        "--no-trial",
        "--vary",
        "micro-batch",
        "--micro-batch",
        "2",
        folder=folder,
    )
    assert ended.returncode == 0, ended.stderr
    techniques = (
        "plain fp32",
        "+ block checkpointing",
        "+ bf16-mixed",
        "bf16-true for mixed",
        "+ compile block",
    )
    rows = [line for line in ended.stdout.splitlines() if line.startswith(techniques)]
    assert [
        line for name, line in zip(techniques, rows, strict=True) if not line.startswith(name)
    ] == []
    assert "Not confirmed by a trial: not asked for." in ended.stdout


@pytest.mark.slow
def test_in_a_pipe_all_progress_is_printed_only_where_it_is_wanted(folder):
    arguments = ("--max-mem", "2MiB", "--no-trial", "--compile", "none", "--vary", "seq-len")
    # A slow machine prints a line of progress now and then.
    *progress, found = fit(*arguments, folder=folder).stderr.splitlines()
    assert found.startswith("as given: ")
    verbose = fit(*arguments, "-v", folder=folder)
    assert len(progress) < len(verbose.stderr.splitlines()) - 1
    assert "as given: 32 tokens a sequence would need up to" in verbose.stderr
    assert verbose.stderr.splitlines()[-1] == found
    assert "\x1b" not in verbose.stderr
    assert "Not confirmed by a trial: not asked for." in verbose.stdout


def test_a_former_option_means_the_same_and_is_not_in_the_help(folder):
    arguments = ("--max-mem", "2MiB", "--compile", "none", "--vary", "micro-batch")
    former = fit(*arguments, "--no-confirm", folder=folder)
    assert "Not confirmed by a trial: not asked for." in former.stdout
    shown = fit("--help", folder=folder).stdout
    assert "--no-trial" in shown
    assert "--no-confirm" not in shown


@pytest.mark.slow
def test_at_80_columns_no_word_is_cut_and_the_largest_is_named_with_its_configuration(folder):
    command = ("fit", "--device", "cpu", *SMALL, "--max-mem", "2MiB", "--no-trial", "--quiet")
    printed = run_here(*command, "--checkpointing", "block", folder=folder, COLUMNS="80").stdout
    lines = printed.splitlines()
    assert any(line.rstrip().endswith("at most") for line in lines)
    assert "would need up to" in " ".join(printed.split())
    assert any(line.startswith("The largest: ") and "checkpointing block" in line for line in lines)


@pytest.mark.slow
def test_a_device_that_is_not_there_gets_predictions_with_room_for_its_context(folder):
    arguments = (
        "--device",
        "cuda:77",
        "--max-mem",
        "760MiB",
        "--precision",
        "fp32",
        "--vary",
        "width",
    )
    result = found(*arguments, folder=folder)
    (row,) = result["rows"]
    assert row["upper_bound_bytes"] + result["context_bytes"] <= result["cap_bytes"]
    assert result["confirmed"] is None
    assert "no device cuda:77" in result["not_confirmed"]


@pytest.mark.slow
def test_the_best_of_a_space_is_at_least_what_each_of_its_configurations_reaches(folder):
    (best,) = found("--max-mem", "3MiB", "--no-trial", "--space", "space.toml", folder=folder)[
        "rows"
    ]
    alone = ["--checkpointing", "block", "--optimizer-fusion", "backward"]
    (one,) = found("--max-mem", "3MiB", "--no-trial", *alone, folder=folder)["rows"]
    assert best["value"] >= one["value"]
    assert best["technique"] == "best of 6 in space space"


@pytest.fixture
def named(folder):
    """Arguments for a space of six configurations that names two of them."""
    configurations = (
        f'[[configurations]]\nname = "{value}"\ncheckpointing = "{value}"\n'
        for value in ("none", "block")
    )
    (folder / "named.toml").write_text(SPACE + "".join(configurations))
    return ["--max-mem", "600KiB", "--no-trial", "--space", "named.toml"]


@pytest.mark.slow
def test_of_a_space_the_named_configurations_are_tried(folder, named):
    assert "predicting the 2 named configurations" in fit(*named, folder=folder).stderr
    without = fit("--max-mem", "600KiB", "--all", folder=folder)
    assert (without.returncode, "--all tries every" in without.stderr) == (2, True)


@pytest.mark.slow
def test_with_all_every_legal_configuration_is_tried(folder, named):
    every = fit(*named, "--all", folder=folder)
    assert "predicting the 6 legal configurations" in every.stderr


def test_where_nothing_fits_it_says_so_and_ends_with_1(folder):
    ended = fit("--max-mem", "600KiB", "--checkpointing", "none", folder=folder)
    assert ended.returncode == 1, ended.stderr
    assert "does not fit: 1 layer would need up to" in ended.stdout
    assert "Nothing fits under 600.0 KiB" in ended.stdout


@pytest.mark.slow
def test_the_rank_of_an_adapter_ends_with_the_widest_layer(tmp_path):
    pytest.importorskip("peft")
    options = ["--vary", "rank", "--adapter", "lora", "--max-mem", "1GiB", "--no-confirm"]
    ended = run_here("fit", *SMALL, *options, "--device", "cpu", "--json", folder=tmp_path)
    (row,) = json.loads(ended.stdout)["rows"]
    assert row["value"] == 32
    assert "larger than layer" in row["message"]
