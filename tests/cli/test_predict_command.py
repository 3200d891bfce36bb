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


def test_a_cap_that_is_surely_exceeded_is_exit_code_1(folder):
    ended = run("--layers", "6", "--device", "cpu", "--max-mem", "8MiB", folder=folder)
    assert (ended.returncode, "more than 8.00 MiB" in ended.stdout) == (1, True)


def test_a_space_is_predicted_whole_and_sorted(folder, tmp_path):
    space = tmp_path / "space.toml"
    space.write_text(
        '[techniques]\ncheckpointing = ["none", "block"]\n[defaults]\nmicro_batch_size = 4\n'
    )
    ended = run(*SMALL, "--space", str(space), "--json", folder=folder)
    predictions = json.loads(ended.stdout)["predictions"]
    assert [one["config"]["checkpointing"] for one in predictions] == ["block", "none"]


def test_a_gpu_that_is_not_there_can_be_predicted_for(folder):
    ended = run(*SMALL, "--device", "cuda", folder=folder)
    assert (
        ended.returncode,
        "for cuda" in ended.stdout,
        "Note: the CUDA context" in ended.stdout,
    ) == (0, True, True)


def test_every_technique_of_the_configuration_can_be_named(folder):
    named = run("--help", folder=folder).stdout.split()
    missing = [
        name
        for name in (*CHOICES, "memory_budget", "micro_batch")
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
        (("--precision", "fp7"), "precision = 'fp7' is not possible"),
        (("--memory-budget", "0.5"), "needs torch.compile"),
        (("--micro-batch", "3", "--global-batch", "4"), "does not divide"),
        (("--max-mem", "8,5GiB"), "is not a memory size"),
        (("--torch", "two"), "'two' is not a release of torch"),
        (("--compute-capability", "9"), "'9' is not a compute capability"),
        (
            ("--compute-capability", "9.0"),
            "compute capability 9.0 is a GPU's, and the device is cpu",
        ),
        (("--allocator", "pooled"), "allocator = 'pooled' is not possible"),
    ],
)
def test_bad_input_gets_one_sentence_and_exit_code_2(folder, arguments, sentence):
    ended = run(*arguments, *DEVICE, folder=folder)
    assert ended.returncode == 2
    assert sentence in ended.stderr
    assert "Traceback" not in ended.stderr
