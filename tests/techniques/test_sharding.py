"""Trainings divided among two processes, against one process and against their prediction."""

import functools
import gc
from pathlib import Path
from typing import Any

import pytest

from autotune.spec.config import TrainingConfig
from autotune.spec.workload import make_workload
from tests.building.gloo_ranks import on_ranks

RANKS = 2
# Neither the width nor the vocabulary can be divided by two without a rest in every weight.
SETTINGS = {
    "layers": 3,
    "width": 60,
    "heads": 3,
    "vocab_size": 257,
    "sequence_length": 32,
    "global_batch": 8,
}
ADAPTED: dict[str, Any] = {"adapter": "lora", "precision": "bf16-mixed"}
CASES: dict[str, dict[str, Any]] = {
    "ddp": {"sharding": "ddp"},
    "ddp, accumulated": {"sharding": "ddp", "micro_batch_size": 2},
    "zero1": {"sharding": "zero1"},
    "zero1, foreach": {"sharding": "zero1", "optimizer_fusion": "foreach"},
    "zero1, muon": {"sharding": "zero1", "optimizer": "muon"},
    "ddp, apollo": {"sharding": "ddp", "optimizer": "apollo"},
    "zero3, adamw-bf16": {"sharding": "zero3", "optimizer": "adamw-bf16"},
    "zero2": {"sharding": "zero2"},
    "zero3": {"sharding": "zero3"},
    "zero3, accumulated": {"sharding": "zero3", "micro_batch_size": 1},
    "zero3, checkpointed": {"sharding": "zero3", "checkpointing": "block"},
    "zero3, step in backward": {"sharding": "zero3", "optimizer_fusion": "backward"},
    "zero3, loss in chunks": {"sharding": "zero3", "loss": "chunked"},
    "zero3, bf16": {"sharding": "zero3", "precision": "bf16-mixed"},
    "zero3, adapters": {"sharding": "zero3", "adapter": "lora"},
    "zero3, DoRA": {"sharding": "zero3", "adapter": "dora"},
    "zero3, adapters beside bf16": {**ADAPTED, "sharding": "zero3", "base_weights": "bf16"},
    "zero3, adapters beside nf4": {**ADAPTED, "sharding": "zero3", "base_weights": "nf4"},
    "zero3, DoRA beside nf4, checkpointed": {
        **ADAPTED,
        "sharding": "zero3",
        "adapter": "dora",
        "base_weights": "nf4",
        "checkpointing": "block",
    },
    "zero2, fused adapters": {"sharding": "zero2", "adapter": "lora", "adapter_kernels": "fused"},
    "zero3, fused adapters beside nf4, checkpointed": {
        **ADAPTED,
        "sharding": "zero3",
        "adapter_kernels": "fused",
        "base_weights": "nf4",
        "checkpointing": "block",
    },
    "zero2, adapters beside nf4, accumulated": {
        **ADAPTED,
        "sharding": "zero2",
        "base_weights": "nf4",
        "micro_batch_size": 2,
    },
    "zero3, adapters beside nf4, step in backward": {
        **ADAPTED,
        "sharding": "zero3",
        "base_weights": "nf4",
        "optimizer_fusion": "backward",
        "loss": "chunked",
    },
}
PLAIN = ("ddp", "zero1", "zero2", "zero3", "zero3, adapters beside nf4")
EACH_CASE = [pytest.param(case, marks=() if case in PLAIN else pytest.mark.slow) for case in CASES]
STEPS = 4
ROUNDING = {"fp32": 2e-6, "bf16-mixed": 2e-3}
SCALAR_BYTES = 8
"""Gloo's threads may hold on to a sum of losses for a moment longer. Of each adapter the backward
pass keeps such a number, too, which predictions leave out: its scale."""
LAYERS_OF_A_BLOCK = 5


def config_of(case, *, ranks=RANKS):
    choices = {"micro_batch_size": SETTINGS["global_batch"] // ranks, **CASES[case]}
    return TrainingConfig(**choices)


def workload(*, ranks=RANKS):
    return make_workload("cpu", {**SETTINGS, "devices_per_trial": ranks})


def train(config, workload, folder):
    """Returns the losses of the first steps, the meter of the last two and the training."""
    import torch

    from autotune.data.batches import Batch
    from autotune.memory.cpu import CpuMeter
    from autotune.techniques import apply_techniques
    from autotune.techniques.sharding import make_mesh
    from autotune.training.step import TrainingStep

    device = torch.device("cpu")
    generator = torch.Generator().manual_seed(5)
    shape = (workload.global_batch, workload.sequence_length + 1)
    rows = torch.randint(0, SETTINGS["vocab_size"], shape, generator=generator)
    batch = Batch(rows[:, :-1], rows[:, 1:])
    training = apply_techniques(
        config,
        workload,
        weights_file=folder / "weights.pt",
        device=device,
        mesh=make_mesh(config, devices=workload.devices_per_trial, device=device),
    )
    meter = CpuMeter()
    step = TrainingStep(training, workload=workload, config=config, device=device, marker=meter)
    losses = [step(number, batch) for number in range(STEPS - 2)]
    training.devices.begin_evaluation()
    training.devices.end_evaluation()  # the steps that follow are as those before
    with meter.measuring(lambda: resident(training)):
        losses += [step(number, batch) for number in range(STEPS - 2, STEPS)]
    return losses, meter, training


def resident(training):
    from autotune.shipped.quantized import tensors_behind
    from autotune.shipped.tensors import held_tensors

    model = training.parts.model
    weights = [part for weight in model.parameters() for part in tensors_behind(weight)]
    held = [tensor for module in model.modules() for _, tensor in held_tensors(module)]
    return [*weights, *held, *training.updater.state(), *training.devices.held()]


def measure(rank, folder, cases):
    """Returns {case: (losses, peak, prediction, communication)} of one rank."""
    import torch

    from autotune.predictor.predict import predict
    from autotune.spec.prediction import PredictionRequest

    measured = {}
    for case in cases:
        gc.collect()  # what is left of the training before must not be freed in this one
        losses, meter, _ = train(config_of(case), workload(), folder)
        measured[case] = losses, meter.reading().peak_memory_bytes, meter.communication()
    torch.distributed.destroy_process_group()
    found = {}
    for case, (losses, peak, communication) in measured.items():
        request = PredictionRequest(
            workload=workload(), config=config_of(case), device="cpu", rank=rank
        )
        found[case] = (losses, peak, predict(request), communication)
    return found


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    from autotune.models.weights import draw_weights

    folder = tmp_path_factory.mktemp("weights")
    draw_weights(workload(), file=folder / "weights.pt")
    return folder


@pytest.fixture(scope="module")
def ranks(weights):
    """What each rank has measured of the plain cases."""
    return on_ranks(RANKS, measure, weights, PLAIN)


@pytest.fixture(scope="module")
def ranks_of_all(weights):
    """What each rank has measured, by case: more cases take half a minute."""
    found = {}

    def of(case, plain):
        if case in PLAIN:
            return [of_rank[case] for of_rank in plain]
        if not found:
            others = tuple(one for one in CASES if one not in PLAIN)
            for one in others:
                found[one] = []
            for of_rank in on_ranks(RANKS, measure, weights, others):
                for one in others:
                    found[one].append(of_rank[one])
        return found[case]

    return of


@pytest.fixture(scope="module")
def alone(weights):
    """alone(config) are the losses of one process with the numerics of a configuration."""

    @functools.cache
    def losses(**numerics):
        config = TrainingConfig(micro_batch_size=SETTINGS["global_batch"], **numerics)
        return train(config, workload(ranks=1), weights)[0]

    return lambda config: losses(
        precision=config.precision,
        optimizer=config.optimizer,
        adapter=config.adapter,
        base_weights=config.base_weights,
    )


@pytest.mark.parametrize("case", EACH_CASE)
def test_two_processes_train_as_one_does(case, ranks, ranks_of_all, alone):
    config = config_of(case)
    for losses, *_ in ranks_of_all(case, ranks):
        assert losses == pytest.approx(alone(config), rel=ROUNDING[config.precision])


@pytest.mark.parametrize("case", EACH_CASE)
def test_every_rank_needs_what_was_predicted_for_it(case, ranks, ranks_of_all):
    adapters = LAYERS_OF_A_BLOCK * SETTINGS["layers"] * (config_of(case).adapter != "none")
    for _, peak, prediction, _ in ranks_of_all(case, ranks):
        scalars = (1 + adapters) * SCALAR_BYTES
        assert peak == pytest.approx(prediction.peak_memory_bytes, abs=scalars)


@pytest.mark.slow
def test_each_process_stores_half_of_the_frozen_codes_and_all_of_their_scales(ranks):
    """The bytes of nf4 are half a byte a weight, of which one of two processes has half."""
    from autotune.predictor.predict import predict
    from autotune.spec.prediction import PredictionRequest

    sizes = {"precision": "bf16-mixed", "adapter": "lora", "base_weights": "nf4"}
    config = TrainingConfig(micro_batch_size=SETTINGS["global_batch"], **sizes)
    request = PredictionRequest(workload=workload(ranks=1), config=config, device="cpu")
    of_one = predict(request).bytes_by_category["parameters"]
    for of_rank in ranks:
        stored = of_rank["zero3, adapters beside nf4"][2].bytes_by_category["parameters"]
        assert 0.5 < stored / of_one < 0.55


def gathered_bytes(case, ranks):
    return [of_rank[case][2].bytes_by_category["gathered_weights"] for of_rank in ranks]


def test_weights_gathered_until_the_backward_pass_are_all_there_at_the_peak(ranks):
    weights_bytes = 4 * ranks[0]["zero2"][2].parameters
    most_of_a_block = weights_bytes / SETTINGS["layers"]
    for size_bytes in gathered_bytes("zero2", ranks):
        # Beside them there may be a buffer in which a block arrives.
        assert weights_bytes <= size_bytes < weights_bytes + most_of_a_block


def test_weights_gathered_a_block_at_a_time_are_never_all_there(ranks):
    for zero2, zero3 in zip(
        gathered_bytes("zero2", ranks), gathered_bytes("zero3", ranks), strict=True
    ):
        assert 0 < zero3 < 0.8 * zero2


def test_weights_that_each_device_has_are_not_gathered(ranks):
    assert gathered_bytes("ddp", ranks) == gathered_bytes("zero1", ranks) == [0, 0]


@pytest.mark.parametrize("case", EACH_CASE)
def test_every_rank_knows_how_long_its_steps_are_in_collectives(case, ranks, ranks_of_all):
    for *_, communication in ranks_of_all(case, ranks):
        assert 0 < communication.share < 1
        assert communication.seconds > 0


def held_while_loading(rank, folder, sharding):
    """Returns the most bytes that are alive while the training is built, and the model's bytes.

    The weights' file is mapped, which the profiler reports like an allocation of its size. Its
    pages are not memory of the process.
    """
    import torch
    from torch.profiler import ProfilerActivity, profile, record_function

    from autotune.shipped.cpu_peak import peak_of
    from autotune.techniques import apply_techniques
    from autotune.techniques.sharding import make_mesh

    config = TrainingConfig(sharding=sharding, micro_batch_size=4)
    device = torch.device("cpu")
    mesh = make_mesh(config, devices=RANKS, device=device)
    with (
        profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recording,
        record_function("loading"),
    ):
        training = apply_techniques(
            config, workload(), weights_file=folder / "weights.pt", device=device, mesh=mesh
        )
    whole = sum(4 * parameter.numel() for parameter in training.parts.model.parameters())
    mapped = (folder / "weights.pt").stat().st_size
    return peak_of(recording, within="loading")[0] - mapped, whole


@pytest.mark.slow
@pytest.mark.parametrize("sharding", ["zero2", "zero3"])
def test_no_rank_ever_holds_the_whole_model(sharding, weights):
    for held, whole in on_ranks(RANKS, held_while_loading, Path(weights), sharding):
        assert held < 0.7 * whole
