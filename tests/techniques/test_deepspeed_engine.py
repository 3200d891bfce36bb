"""Trainings by DeepSpeed's engine, against one process that trains the same global batches."""

import gc
import sys
from pathlib import Path
from typing import Any

import pytest

from autotune.errors import PredictionImpossible
from autotune.spec.config import TrainingConfig
from autotune.spec.workload import make_workload
from tests.building.gloo_ranks import on_ranks

linux = pytest.mark.skipif(
    sys.platform != "linux", reason="DeepSpeed's processes are those of Linux"
)

RANKS = 2
SETTINGS = {
    "layers": 3,
    "width": 60,
    "heads": 3,
    "vocab_size": 257,
    "sequence_length": 32,
    "global_batch": 8,
    "gradient_clipping": 0.5,
}
QLORA = {"precision": "bf16-mixed", "adapter": "lora", "base_weights": "nf4"}
CASES: dict[str, dict[str, Any]] = {
    "ddp": {"sharding": "ddp"},
    "ddp, accumulated": {"sharding": "ddp", "micro_batch_size": 2},
    "zero1": {"sharding": "zero1"},
    "zero2, accumulated": {"sharding": "zero2", "micro_batch_size": 1},
    "zero3": {"sharding": "zero3"},
    "zero3, accumulated": {"sharding": "zero3", "micro_batch_size": 2},
    "zero3, checkpointed": {"sharding": "zero3", "checkpointing": "block"},
    "zero3, loss in chunks": {"sharding": "zero3", "loss": "chunked"},
    "zero1, foreach": {"sharding": "zero1", "optimizer_fusion": "foreach"},
    "zero1, sgd": {"sharding": "zero1", "optimizer": "sgd"},
    "zero1, state on the host": {"sharding": "zero1", "offload": "optimizer"},
    "zero3, all on the host": {"sharding": "zero3", "offload": "all"},
    "zero3, adapters": {"sharding": "zero3", "adapter": "lora"},
    "zero3, DoRA on the host": {"sharding": "zero3", "adapter": "dora", "offload": "all"},
    # The last, as autocast stays on in a process once DeepSpeed has used it.
    "zero2, adapters beside nf4": {"sharding": "zero2", **QLORA},
    "zero3, adapters beside nf4": {"sharding": "zero3", **QLORA},
    "zero2, fused adapters": {"sharding": "zero2", **QLORA, "adapter_kernels": "fused"},
    "zero1, bf16": {"sharding": "zero1", "precision": "bf16-mixed"},
    "zero3, bf16": {"sharding": "zero3", "precision": "bf16-mixed"},
}
STEPS = 3
ROUNDING = {"fp32": 2e-6, "bf16-mixed": 2e-3}


def config_of(case, *, engine="deepspeed"):
    choices = {"micro_batch_size": SETTINGS["global_batch"] // RANKS, **CASES[case]}
    return TrainingConfig(engine=engine, **choices)


def workload(*, ranks=RANKS):
    return make_workload("cpu", {**SETTINGS, "devices_per_trial": ranks})


def train(config, workload, folder):
    """Returns the losses of the first steps, the norm of each gradient and the training."""
    import torch

    from autotune.data.batches import Batch
    from autotune.memory.cpu import CpuMeter
    from autotune.techniques import apply_techniques
    from autotune.training.step import TrainingStep

    device = torch.device("cpu")
    generator = torch.Generator().manual_seed(5)
    shape = (workload.global_batch, workload.sequence_length + 1)
    rows = torch.randint(0, SETTINGS["vocab_size"], shape, generator=generator)
    batch = Batch(rows[:, :-1], rows[:, 1:])
    training = apply_techniques(config, workload, weights_file=folder / "weights.pt", device=device)
    norms: list[float] = []
    weights = [one for one in training.parts.model.parameters() if one.requires_grad]

    def read_gradients(*_arguments):
        if not norms:
            norms.extend(training.whole_gradient(one).norm().item() for one in weights)

    training.updater.optimizer.register_step_pre_hook(read_gradients)
    step = TrainingStep(
        training, workload=workload, config=config, device=device, marker=CpuMeter()
    )
    return [step(number, batch) for number in range(STEPS)], norms, training


def measure(_rank, folder):
    """Returns {case: (losses, norms of gradients, numbers in the largest weight, in the state)}.

    They are those of one rank.
    """
    found = {}
    for case in CASES:
        gc.collect()
        losses, norms, training = train(config_of(case), workload(), folder)
        largest = max(one.numel() for one in training.parts.model.parameters())
        state = sum(one.numel() for one in training.updater.state())
        found[case] = (losses, norms, largest, state)
    return found


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    from autotune.models.weights import draw_weights

    folder: Path = tmp_path_factory.mktemp("weights")
    draw_weights(workload(), file=folder / "weights.pt")
    return folder


@pytest.fixture(scope="module")
def ranks(weights):
    pytest.importorskip("deepspeed", reason="deepspeed is not installed")
    return on_ranks(RANKS, measure, weights)


@pytest.fixture(scope="module")
def alone(weights):
    """Returns a function: losses and norms of one process with torch alone, for a case."""

    def trained(case):
        config = config_of(case)
        plain = TrainingConfig(
            precision=config.precision,
            optimizer=config.optimizer,
            adapter=config.adapter,
            base_weights=config.base_weights,
            micro_batch_size=SETTINGS["global_batch"],
        )
        return train(plain, workload(ranks=1), weights)[:2]

    return trained


@linux
@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_two_processes_of_deepspeed_train_as_one_process_does(case, ranks, alone):
    losses, norms = alone(case)
    rounding = ROUNDING[config_of(case).precision]
    for of_rank in ranks:
        assert of_rank[case][0] == pytest.approx(losses, rel=rounding)
        assert of_rank[case][1] == pytest.approx(norms, rel=30 * rounding, abs=1e-6)


@linux
@pytest.mark.slow
def test_a_process_has_a_part_of_the_optimizer_state_from_the_first_stage_of_zero_on(ranks):
    whole = ranks[0]["ddp"][3]
    for case in ("zero1", "zero2, accumulated", "zero3"):
        assert ranks[0][case][3] < 0.55 * whole


@linux
@pytest.mark.slow
def test_a_process_has_only_small_weights_whole_with_the_third_stage_of_zero(ranks):
    assert ranks[0]["zero3"][2] < 10_000 < ranks[0]["zero2, accumulated"][2]


def test_deepspeed_leaves_the_space_with_a_sentence_where_it_is_not_installed(monkeypatch):
    import torch

    from autotune.techniques import find_unavailable

    monkeypatch.setitem(sys.modules, "deepspeed", None)
    found = find_unavailable({"engine": ["torch", "deepspeed"]}, device=torch.device("cpu"))
    assert list(found["engine"]) == ["deepspeed"]
    assert 'pip install "autotune[deepspeed]"' in found["engine"]["deepspeed"]


def test_a_training_by_deepspeed_is_not_predicted():
    from autotune.execution.process import answers
    from autotune.execution.tasks import Predict
    from autotune.spec.prediction import PredictionRequest

    request = PredictionRequest(workload=workload(), config=config_of("zero3"), device="cpu")
    with pytest.raises(PredictionImpossible, match="DeepSpeed") as raised:
        answers.predict(Predict(request=request))
    assert "autotune search" in raised.value.hint


def test_a_script_keeps_its_own_engine():
    from torch import nn, optim

    from autotune.techniques.user_training import missing_in_user_model

    model = nn.Linear(2, 2)
    missing = missing_in_user_model(
        model, optim.AdamW(model.parameters()), {"engine": ["torch", "deepspeed"]}
    )
    assert list(missing["engine"]) == ["deepspeed"]
