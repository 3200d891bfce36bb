"""Every technique through the whole command, and commands for the resulting study."""

import json
import subprocess
import tomllib

import pytest

from autotune.spec.config import CUDA_GRAPHS, OF_SEVERAL_DEVICES, QUANTIZED_WEIGHTS, SEARCHED
from tests.stand_in_gpu.machine import FOLDER, SMALL_MODEL, Machine

pytestmark = pytest.mark.timeout(1800)  # the first test waits for a search of 36 full trainings
SPACE = FOLDER / "every_technique.toml"
CONTENT = tomllib.loads(SPACE.read_text())
NAMES = ["baseline", *(configuration["name"] for configuration in CONTENT["configurations"])]
MIB = 1024**2
CONTEXT_BYTES = 480 * MIB
MODEL = SMALL_MODEL[:10]
"""What a prediction must know of the device."""


@pytest.fixture(scope="module")
def study(shared_machine: Machine):
    """The trials of one search over every technique, by name."""
    arguments = (
        "--space",
        str(SPACE),
        "--max-mem",
        "4GiB",
        "--trials",
        str(len(NAMES)),
        "--name",
        "every",
    )
    result = shared_machine.search(
        *arguments, "--full-trainings", "--memory-snapshot", "--no-predict"
    )
    return {trial["name"] or "baseline": trial for trial in result["trials"]}


HOLLOW = {
    "attention": {"cudnn"},
    "adapter_targets": {"experts"},
    "base_weights": set(QUANTIZED_WEIGHTS),
    "compile_mode": {*CUDA_GRAPHS, "max-autotune-no-cudagraphs"},
    "feed_forward": {"tiled"},
    "kernels": {"liger"},
}
"""Values that the stand-in's missing numbers make crash, or fail the parity check; what needs a
model with experts or longer sequences, trained by test_other_models.py; and CUDA graphs, which it
does not have, and measuring kernels that do nothing.
"""


@pytest.mark.parametrize(
    "technique", [name for name in SEARCHED if name not in (*OF_SEVERAL_DEVICES, "engine")]
)
def test_the_space_has_every_value_of_a_technique(technique):
    values = set(SEARCHED[technique]) - HOLLOW.get(technique, set())
    assert set(CONTENT["techniques"][technique]) == values


@pytest.mark.parametrize("technique", CONTENT["techniques"])
def test_every_value_of_the_space_is_trained(study, technique):
    values = CONTENT["techniques"][technique]
    wanted = {4, 2} if values == "divisors" else set(values)
    assert wanted <= {trial["config"][technique] for trial in study.values()}


@pytest.mark.parametrize("name", NAMES)
def test_a_configuration_trains_to_its_end_while_its_history_is_recorded(study, name):
    assert study[name]["outcome"] == "ok", study[name]["message"]


@pytest.mark.parametrize("name", NAMES)
def test_the_device_must_have_the_context_and_what_the_allocator_reserved(study, name):
    trial = study[name]
    assert trial["context_bytes"] == CONTEXT_BYTES
    assert trial["device_bytes"] == trial["peak_reserved_bytes"] + CONTEXT_BYTES


@pytest.mark.parametrize("name", NAMES)
def test_the_history_of_a_trial_is_stored(study, shared_machine, name):
    folder = shared_machine.folder / "studies" / "work" / "autotune" / "every" / "snapshots"
    assert (folder / f"trial-{study[name]['number']}.pickle").stat().st_size > 10_000


def test_the_search_leaves_nothing_on_the_device(study, shared_machine):
    assert shared_machine.processes() == []


PREDICTED = {
    "baseline": (),
    "state on the host, step in backward": (
        *("--offload", "optimizer", "--optimizer-fusion", "backward"),
    ),
    "weights on the host, checkpointed": ("--offload", "all", "--checkpointing", "block"),
    "sgd, efficient attention": (
        "--optimizer-fusion",
        "foreach",
        "--optimizer",
        "sgd",
        "--attention",
        "efficient",
    ),
    "stochastic, step in backward, every second block": (
        *("--precision", "bf16-stochastic", "--optimizer-fusion", "backward"),
        *("--checkpointing", "every-2"),
    ),
}


@pytest.mark.parametrize("name", PREDICTED)
def test_a_prediction_is_the_peak_of_torchs_allocator(study, shared_machine, name):
    done = shared_machine.autotune(
        "predict", "--device", "cuda", *MODEL, *PREDICTED[name], "--json"
    )
    predicted_bytes = json.loads(done.stdout)["peak_memory_bytes"]
    assert predicted_bytes == pytest.approx(study[name]["peak_memory_bytes"], rel=0.005)


def test_a_prediction_uses_no_device(machine):
    machine.autotune("predict", "--device", "cuda", *MODEL)
    assert machine.logged("context on device") == []


def test_the_largest_model_that_fits_is_confirmed_by_a_training(machine):
    model = (
        "--width",
        "256",
        "--heads",
        "2",
        "--seq-len",
        "256",
        "--global-batch",
        "4",
        "--precision",
        "bf16-mixed",
    )
    done = machine.autotune(
        "fit", "--max-mem", "1GiB", "--vary", "layers", "--device", "cuda", *model, "--json"
    )
    confirmed = json.loads(done.stdout)["confirmed"]
    assert (confirmed["outcome"], confirmed["stayed_under"]) == ("ok", True)


def test_the_peak_of_a_trial_is_explained(study, shared_machine):
    done = shared_machine.autotune("explain", "every", str(study["baseline"]["number"]), "--json")
    explained = json.loads(done.stdout)
    assert {change["technique"] for change in explained["alternatives"]} >= {
        "checkpointing",
        "precision",
    }


@pytest.mark.parametrize("name", ["baseline", "fp16, math", "adafactor, block"])
def test_an_exported_script_trains_on_the_device_with_the_trial_s_peak(study, shared_machine, name):
    number = str(study[name]["number"])
    folder = shared_machine.folder / f"exported-{number}"
    shared_machine.autotune(
        "export", "every", "--to", "pytorch", "--trial", number, "--out", str(folder)
    )
    done = shared_machine.run(str(folder / "train.py"))
    assert done.returncode == 0, done.stderr
    assert _printed_peak_mib(done) == pytest.approx(
        study[name]["peak_memory_bytes"] / MIB, abs=0.01
    )


def _printed_peak_mib(done: "subprocess.CompletedProcess[str]") -> float:
    line = next(line for line in done.stdout.splitlines() if line.startswith("peak memory"))
    return float(line.split()[2].replace(",", ""))
