"""Techniques that the small model of other tests has no use for: those of experts, and tiles."""

import json

import pytest

from tests.stand_in_gpu.machine import SMALL_MODEL, Machine
from tests.techniques.families import CONFIGS

pytestmark = pytest.mark.timeout(1800)  # the first test waits for two searches
TOKENS = 512
TILES = 'precision = "bf16-mixed", feed_forward = "tiled"'
OF_EXPERTS = 'precision = "bf16-mixed", adapter = "lora", adapter_targets = "experts"'
OF_A_MIXTURE = {
    "adapters on experts": f'{OF_EXPERTS}, base_weights = "bf16"',
    "adapters on experts in 4 bits": f'{OF_EXPERTS}, base_weights = "nf4-experts"',
    "adapters on experts in fp8": f'{OF_EXPERTS}, base_weights = "fp8-experts"',
    "experts in tiles": TILES,
}
OF_LONG_SEQUENCES = {
    "tiles of long sequences": f'{TILES}, checkpointing = "block"',
    "a budget": 'activation_budget = "40MiB"',
}
NAMES = [*OF_A_MIXTURE, *OF_LONG_SEQUENCES]


@pytest.fixture(scope="module")
def trials(shared_machine: Machine):
    """The trials of one search over each of two models, by name."""
    config = {**CONFIGS["mixtral"], "max_position_embeddings": TOKENS}
    mixture = shared_machine.folder / "mixtral.json"
    mixture.write_text(json.dumps(config))
    found = {}
    for study, model, configurations in (
        ("mixture", ("--model", str(mixture), *SMALL_MODEL[8:]), OF_A_MIXTURE),
        ("long", SMALL_MODEL, OF_LONG_SEQUENCES),
    ):
        result = shared_machine.search(
            *("--name", study, "--space", shared_machine.space(*configurations.values())),
            *("--trials", str(1 + len(configurations)), "--no-predict", "--full-trainings"),
            *("--seq-len", str(TOKENS)),
            model=model,
        )
        trained = {trial["name"]: trial for trial in result["trials"]}
        for number, name in enumerate(configurations):
            found[name] = (study, trained[f"configuration {number}"])
    return found


@pytest.mark.parametrize("name", NAMES)
def test_a_configuration_trains_to_its_end(trials, name):
    _, trial = trials[name]
    assert trial["outcome"] == "ok", trial["message"]


@pytest.mark.parametrize("name", NAMES)
def test_the_prediction_for_a_trial_is_its_peak(trials, shared_machine, name):
    study, trial = trials[name]
    done = shared_machine.autotune(
        "predict", "--study", study, "--trial", str(trial["number"]), "--json"
    )
    predicted_bytes = json.loads(done.stdout)["peak_memory_bytes"]
    assert predicted_bytes == pytest.approx(trial["peak_memory_bytes"], rel=0.005)
