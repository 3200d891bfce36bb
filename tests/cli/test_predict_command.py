"""`autotune predict` as a user types it."""

import json

import pytest

from autotune.spec.config import CHOICES
from tests.building.commands import run_here

pytestmark = pytest.mark.usefixtures("one_trial_server")

DEVICE = ("--device", "cpu")
SMALL = (
    "--layers",
    "2",
    "--width",
    "32",
    "--heads",
    "2",
    "--seq-len",
    "32",
    "--global-batch",
    "4",
    *DEVICE,
)


def run(*arguments, folder):
    return run_here("predict", *arguments, folder=folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("predict")


def test_it_prints_the_peak_its_position_and_what_holds_the_bytes(folder):
    ended = run(*SMALL, "--checkpointing", "block", folder=folder)
    assert ended.returncode == 0
    for word in ("Peak ", "in backward", "blocks.0", "gradients", "Largest holders"):
        assert word in ended.stdout


def test_it_leaves_nothing_behind(folder):
    run(*SMALL, folder=folder)
    assert list(folder.iterdir()) == []


def test_json_is_one_object_whose_categories_add_up(folder):
    ended = run(*SMALL, "--json", "--max-mem", "64MiB", folder=folder)
    answer = json.loads(ended.stdout)
    assert sum(answer["bytes_by_category"].values()) == answer["peak_memory_bytes"]
    assert answer["margin_bytes"] == 64 * 1024**2 - answer["upper_bound_bytes"]


@pytest.mark.slow
def test_a_prediction_for_several_devices_says_how_many_and_the_peak_of_each(folder):
    three = ("--global-batch", "3", "--world-size", "3", "--sharding", "zero3")
    printed = run(*SMALL, *three, "--max-mem", "1GiB", folder=folder).stdout
    assert "3 x 32 tokens a step, for each of 3 cpu devices" in printed
    assert "below 1.00 GiB of each device" in printed
    assert " on ranks 0-1; " in printed
    assert "2 ranks were predicted" in printed


@pytest.mark.slow
def test_the_peaks_of_all_devices_are_in_the_json(folder):
    three = ("--global-batch", "3", "--world-size", "3", "--sharding", "zero3")
    answer = json.loads(run(*SMALL, *three, "--json", folder=folder).stdout)
    assert (answer["workload"]["devices_per_trial"], answer["devices"]) == (3, 3)
    by_rank = answer["peak_memory_bytes_by_rank"]
    assert (len(by_rank), answer["distinct_ranks"]) == (3, 2)
    assert max(by_rank) == answer["peak_memory_bytes"] > min(by_rank)


def test_the_parts_of_gradients_are_counted_as_gradients(folder):
    two = ("--seq-len", "1", "--global-batch", "2", "--world-size", "2", "--sharding", "zero3")
    held = json.loads(run(*SMALL, *two, "--json", folder=folder).stdout)["bytes_by_category"]
    assert 0 < held["gradients"] <= held["parameters"]


def test_a_cap_that_is_surely_exceeded_is_exit_code_1(folder):
    ended = run("--layers", "6", "--device", "cpu", "--max-mem", "8MiB", folder=folder)
    assert (ended.returncode, "more than 8.00 MiB" in ended.stdout) == (1, True)


def test_a_bound_from_shapes_is_said_before_the_prediction(folder):
    ended = run(*SMALL, "--max-mem", "1GiB", folder=folder)
    first, second, *_ = ended.stderr.splitlines()
    assert first.startswith("At least ")
    assert first.endswith(", a bound from the shapes of weights and batches.")
    assert second == "Predicting ..."


def test_what_cannot_fit_by_its_shapes_is_said_before_the_prediction(folder):
    ended = run(*SMALL, "--max-mem", "100KiB", folder=folder)
    assert ended.stderr.splitlines()[0].endswith(": it cannot fit 100.0 KiB.")
    assert (ended.returncode, "more than 100.0 KiB" in ended.stdout) == (1, True)


def test_a_space_is_predicted_whole_and_sorted(folder, tmp_path):
    space = tmp_path / "space.toml"
    space.write_text(
        '[techniques]\ncheckpointing = ["none", "block"]\n[defaults]\nmicro_batch_size = 4\n'
    )
    ended = run(*SMALL, "--space", str(space), "--json", folder=folder)
    predictions = json.loads(ended.stdout)["predictions"]
    assert [one["config"]["checkpointing"] for one in predictions] == ["block", "none"]


NAMED = """
[techniques]
checkpointing = ["none", "block"]
[[configurations]]
name = "plain"
[[configurations]]
name = "small steps"
checkpointing = "block"
"""


@pytest.fixture(scope="module")
def named(tmp_path_factory):
    file = tmp_path_factory.mktemp("named") / "named.toml"
    file.write_text(NAMED)
    return str(file)


@pytest.mark.slow
def test_the_named_configurations_of_a_space_are_predicted(folder, named):
    answer = json.loads(run(*SMALL, "--space", named, "--json", folder=folder).stdout)
    names = {one["name"] for one in answer["predictions"]}
    assert (names, answer["is_whole_space"]) == ({"plain", "small steps"}, False)


@pytest.mark.slow
def test_a_space_on_several_devices_says_how_many_and_whose_peak_a_row_is(folder, named):
    printed = run(*SMALL, "--world-size", "2", "--space", named, folder=folder).stdout
    assert "predicted for each of 2 cpu devices" in printed.splitlines()[0]
    assert "Note: the peak of a row is that of the rank that needs most" in printed


@pytest.mark.slow
def test_all_configurations_of_a_space_are_predicted_on_request(folder, tmp_path):
    space = tmp_path / "space.toml"
    space.write_text(NAMED.replace('"none", "block"', '"none", "block", "sqrt"'))
    ended = run(*SMALL, "--space", str(space), "--all", "--json", folder=folder)
    assert len(json.loads(ended.stdout)["predictions"]) == 3


@pytest.mark.slow
def test_a_space_is_answered_first_by_how_many_fit(folder, named):
    ended = run(*SMALL, "--space", named, "--max-mem", "1GiB", folder=folder)
    lines = ended.stdout.splitlines()
    assert "2 layers" in lines[0]
    assert lines[1].startswith("2 of 2 configurations fit 1.00 GiB: the least memory is")


def test_a_space_of_which_nothing_fits_is_exit_code_1(folder, named):
    ended = run(*SMALL, "--space", named, "--max-mem", "100KiB", folder=folder)
    assert ended.returncode == 1
    assert "None of 2 configurations fits 100.0 KiB" in ended.stdout
    assert "--global-batch 1" in ended.stdout


@pytest.mark.slow
def test_a_deep_model_says_by_which_depths_it_was_predicted(folder, tmp_path):
    space = tmp_path / "space.toml"
    space.write_text('[[configurations]]\nname = "plain"\n')
    deep = (*SMALL, "--layers", "14", "--space", str(space))
    answer = json.loads(run(*deep, "--json", folder=folder).stdout)
    (row,) = answer["predictions"]
    assert (row["extrapolated_from"], row["checked_at"]) == ([2, 3], 4)
    assert row["check_error_bytes"] == 0
    printed = run(*deep, folder=folder).stdout
    assert "2 and 3; 4: 0 B off" in printed
    assert "--whole-depth" in printed


@pytest.mark.slow
def test_a_deep_compiled_model_says_by_which_depths_it_was_predicted(folder):
    printed = run(*SMALL, "--layers", "16", "--compile", "model", folder=folder).stdout
    assert "Note: extrapolated from predictions of 2 and 3 layers" in printed
    assert "--whole-depth predicts all layers" in printed


@pytest.mark.slow
def test_all_layers_of_a_compiled_model_are_predicted_on_request(folder):
    deep = (*SMALL, "--layers", "16", "--compile", "model", "--whole-depth", "--json")
    answer = json.loads(run(*deep, folder=folder).stdout)
    assert (answer["extrapolated_from"], answer["plan"] is None) == ([], False)


@pytest.mark.slow
def test_the_whole_depth_is_predicted_on_request(folder, tmp_path):
    space = tmp_path / "space.toml"
    space.write_text('[[configurations]]\nname = "plain"\n')
    deep = (*SMALL, "--layers", "14", "--space", str(space), "--whole-depth", "--json")
    (row,) = json.loads(run(*deep, folder=folder).stdout)["predictions"]
    assert row["extrapolated_from"] == []


def test_a_prediction_for_a_gpu_says_that_none_was_compared(folder, named):
    ended = run(*SMALL, "--device", "cuda", "--space", named, folder=folder)
    assert "Note: not compared with such a model on such a GPU" in ended.stdout


def test_a_gpu_that_is_not_there_can_be_predicted_for(folder):
    ended = run(*SMALL, "--device", "cuda", folder=folder)
    assert (
        ended.returncode,
        "for cuda" in ended.stdout,
        "Note: the CUDA context" in ended.stdout,
    ) == (0, True, True)


@pytest.mark.slow
def test_the_speed_on_a_card_that_nobody_has_is_that_of_its_data_sheet(folder):
    ended = run(*SMALL[:-2], "--device", "l4", folder=folder)
    assert " tokens/s (" in ended.stdout
    assert "Rates of the device: the data sheet, https://www.nvidia.com/" in ended.stdout
    answer = json.loads(run(*SMALL[:-2], "--device", "l4", "--json", folder=folder).stdout)
    least, most = answer["predicted_tokens_per_second_bounds"]
    assert least < answer["predicted_tokens_per_second"] < most
    assert answer["bound_by"] == "host"


@pytest.mark.slow
def test_where_nobody_knows_the_rates_it_says_how_to_get_a_speed(folder):
    ended = run(*SMALL, folder=folder)
    assert "No speed: the rates of this device are not known; a search on it" in ended.stdout
    answer = json.loads(run(*SMALL, "--json", folder=folder).stdout)
    assert answer["predicted_tokens_per_second"] is None


@pytest.mark.slow
def test_the_front_of_a_space_is_predicted_before_the_first_step(folder, tmp_path):
    space = tmp_path / "few.toml"
    space.write_text(
        "[techniques]\n"
        'checkpointing = ["none", "block"]\n'
        "micro_batch_size = [4, 2]\n"
        "[[configurations]]\n"
        'name = "checkpointed"\n'
        'checkpointing = "block"\n'
    )
    options = (*SMALL[:-2], "--device", "l4", "--space", str(space), "--max-mem", "2GiB")
    ended = run(*options, folder=folder)
    assert "legal configurations were predicted whole" in ended.stdout
    assert "Fastest that fits: micro-batch 4" in ended.stdout.replace("fp32, ", "")
    assert "A search would add what this cannot say: the perplexity" in ended.stdout
    answer = json.loads(run(*options, "--json", folder=folder).stdout)
    assert answer["front"]["legal_configurations"] == 4
    assert answer["front"]["is_complete"] is True
    assert any(row["is_on_front"] for row in answer["predictions"])


def test_every_technique_of_the_configuration_can_be_named(folder):
    named = run("--help", folder=folder).stdout.split()
    missing = [
        name
        for name in (*CHOICES, "memory_budget", "activation_budget", "micro_batch")
        if f"--{name.replace('_', '-')}" not in named
    ]
    assert missing == []


def test_the_allocator_and_the_gpu_that_are_meant_can_be_named(folder):
    named = (
        "--allocator",
        "expandable",
        "--compute-capability",
        "9.0",
        "--torch",
        "2.11",
        "--json",
    )
    answer = json.loads(run(*SMALL[:-2], *named, folder=folder).stdout)
    assert (answer["device"], answer["config"]["allocator"]) == ("cuda", "expandable")
    assert answer["bytes_by_category"]["workspace"] == 2 * 32 * 1024**2


def test_the_step_is_drawn_on_a_page(folder, tmp_path):
    page = tmp_path / "step.html"
    ended = run(*SMALL, "--plot", str(page), folder=folder)
    assert (ended.returncode, "activations" in page.read_text()) == (0, True)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--study", "x"), "--study and --trial belong together"),
        (("--study", "x", "--trial", "1", "--layers", "3"), "--study and --trial set workload"),
        (("--space", "quick", "--precision", "fp32"), "selects one"),
        (("--all",), "--all needs a search space"),
        (("--precision", "fp7"), "Invalid --precision: 'fp7'"),
        (("--memory-budget", "0.5"), "needs torch.compile"),
        (("--micro-batch", "3", "--global-batch", "4"), "does not divide"),
        (("--world-size", "3", "--global-batch", "4"), "cannot be divided among 3 devices"),
        (("--max-mem", "8,5GiB"), "is not a memory size"),
        (("--torch", "two"), "'two' is not a release of torch"),
        (("--compute-capability", "9"), "'9' is not a compute capability"),
        (
            ("--compute-capability", "9.0"),
            "compute capability 9.0 is a GPU's, and the device is cpu",
        ),
        (("--allocator", "pooled"), "Invalid --allocator: 'pooled'"),
    ],
)
def test_bad_input_gets_one_sentence_and_exit_code_2(folder, arguments, sentence):
    ended = run(*arguments, *DEVICE, folder=folder)
    assert ended.returncode == 2
    assert sentence in ended.stderr
    assert "Traceback" not in ended.stderr
