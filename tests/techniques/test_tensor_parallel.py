"""Trainings whose matrices two processes split, against one process and their prediction."""

import gc
import json
from pathlib import Path
from typing import Any

import pytest

from autotune.errors import IllegalConfiguration
from autotune.spec.config import LegalityContext, TrainingConfig, configuration_of, rule_violations
from autotune.spec.workload import make_workload
from tests.building.gloo_ranks import on_ranks

STEPS = 4
ROUNDING = {"fp32": 2e-6, "bf16-mixed": 4e-3}
GRADIENT_ROUNDING = 2e-5
"""Of the largest number of a gradient: sums in another order."""
PREDICTION_ERROR = 1e-4
"""Products with a number keep it, as 8 bytes each: up to 48 bytes of 1.3 MiB here."""
RUN = {"sequence_length": 32, "global_batch": 4}
OWN_SIZES = {"layers": 2, "width": 64, "heads": 4, "vocab_size": 257}
SIZES = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 128,
    "vocab_size": 256,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
SPLIT_FAMILIES = ("deep-one", "llama", "olmo2", "phi3", "qwen3", "granite", "gpt_neox")
OWN = ("gpt", "deep-one")


def workload_of(model, folder, *, ranks=1, **settings):
    sizes: dict[str, Any] = OWN_SIZES
    if model not in OWN:
        file = folder / f"{model}.json"
        file.write_text(json.dumps({"model_type": model, **SIZES}))
        model, sizes = str(file), {}
    return make_workload(
        "cpu", {"model": model, **sizes, **RUN, "devices_per_trial": ranks, **settings}
    )


def train(config, workload, weights_file):
    """Returns losses, gradients of the first step by place, and the peak of the last two steps."""
    import torch

    from autotune.data.batches import Batch
    from autotune.memory.cpu import CpuMeter
    from autotune.techniques import apply_techniques
    from autotune.techniques.sharding import make_mesh
    from autotune.training.parity import GradientSketch, Stopwatch
    from autotune.training.step import TrainingStep

    device = torch.device("cpu")
    generator = torch.Generator().manual_seed(5)
    rows = torch.randint(
        1, 256, (workload.global_batch, workload.sequence_length + 1), generator=generator
    )
    batch = Batch(rows[:, :-1], rows[:, 1:])
    mesh = make_mesh(config, devices=workload.devices_per_trial, device=device)
    training = apply_techniques(
        config, workload, weights_file=weights_file, device=device, mesh=mesh
    )
    meter = CpuMeter()
    step = TrainingStep(training, workload=workload, config=config, device=device, marker=meter)
    gradients = {}

    class WholeGradients(GradientSketch):
        def _add(self, parameter, gradient, *, scale):
            _, index = self._position_of[parameter]
            gradients[index] = gradient.clone().numpy()

    with WholeGradients(
        training.parameters_by_block,
        device=device,
        stopwatch=Stopwatch(device),
        whole_gradient=training.whole_gradient,
        reads_backward=False,
    ).taken():
        losses = [step(0, batch)]
    losses.append(step(1, batch))
    with meter.measuring(lambda: resident(training)):
        losses += [step(number, batch) for number in range(2, STEPS)]
    return losses, gradients, meter.reading().peak_memory_bytes


def resident(training):
    from autotune.shipped.quantized import tensors_behind
    from autotune.shipped.tensors import held_tensors

    model = training.parts.model
    weights = [part for weight in model.parameters() for part in tensors_behind(weight)]
    held = [tensor for module in model.modules() for _, tensor in held_tensors(module)]
    return [*weights, *held, *training.updater.state(), *training.devices.held()]


def measure(rank, cases, folder, ranks):
    """Returns [(losses, gradients, peak, predicted peak)] of one rank, for each case."""
    import torch

    from autotune.predictor.predict import predict
    from autotune.spec.prediction import PredictionRequest

    measured, requests = [], []
    for model, choices, settings in cases:
        gc.collect()  # what is left of the training before must not be freed in this one
        config = configuration_of(choices, LegalityContext(global_batch=4, devices=ranks))
        workload = workload_of(model, folder, ranks=ranks, **settings)
        assert not rule_violations(config.to_dict(), workload.legality_context)
        measured.append(train(config, workload, folder / f"{model}.pt"))
        requests.append(
            PredictionRequest(workload=workload, config=config, device="cpu", rank=rank)
        )
    torch.distributed.destroy_process_group()
    return [
        (*found, predict(request).peak_memory_bytes)
        for found, request in zip(measured, requests, strict=True)
    ]


def compare(cases, folder, *, ranks=2):
    """Returns [(case, of one process, [of each rank])]."""
    from autotune.models.weights import draw_weights

    for model in {model for model, _, _ in cases}:
        draw_weights(workload_of(model, folder), file=folder / f"{model}.pt")
    of_ranks = on_ranks(ranks, measure, cases, folder, ranks)
    compared = []
    for index, (model, choices, settings) in enumerate(cases):
        plain = TrainingConfig(
            micro_batch_size=4,
            optimizer=choices.get("optimizer", "adamw"),
            precision=choices.get("precision", "fp32"),
        )
        alone = train(plain, workload_of(model, folder, **settings), folder / f"{model}.pt")
        compared.append((choices, alone, [found[index] for found in of_ranks]))
    return compared


def check(compared):
    """Assert that all ranks train as one process does and need what was predicted."""
    for choices, alone, of_ranks in compared:
        precision = choices.get("precision", "fp32")
        for losses, gradients, peak, predicted in of_ranks:
            assert losses == pytest.approx(alone[0], rel=ROUNDING[precision]), choices
            assert peak == pytest.approx(predicted, rel=PREDICTION_ERROR), choices
            assert gradients.keys() == alone[1].keys()
            for place, gradient in alone[1].items():
                if precision == "fp32":
                    error = abs(gradients[place] - gradient).max()
                    assert error < GRADIENT_ROUNDING * abs(gradient).max(), (choices, place)


def test_two_processes_that_split_matrices_train_as_one_does(tmp_path):
    choices = {"tensor_parallel": 2, "optimizer_fusion": "foreach", "micro_batch_size": 2}
    check(compare([("gpt", choices, {"gradient_clipping": 0.1})], tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("family", SPLIT_FAMILIES)
def test_a_family_with_a_plan_is_split_as_it_says(family, tmp_path):
    check(compare([(family, {"tensor_parallel": 2}, {})], tmp_path))


@pytest.mark.slow
def test_other_techniques_work_in_split_models(tmp_path):
    choices: list[dict[str, Any]] = [
        {"checkpointing": "block"},
        {"checkpointing": "attention"},
        {"checkpointing": "selective"},
        {"checkpointing": "sqrt"},
        {"loss": "chunked"},
        {"optimizer_fusion": "kernel"},
        {"optimizer_fusion": "backward"},
        {"optimizer": "sgd", "micro_batch_size": 1},
        {"precision": "bf16-mixed"},
        {"compile": "block"},
    ]
    check(compare([("gpt", {"tensor_parallel": 2, **one}, {}) for one in choices], tmp_path))


@pytest.mark.slow
def test_compiled_blocks_gather_what_is_not_split(tmp_path):
    plain: dict[str, Any] = {"tensor_parallel": 2}
    # What ran before in a process decides how long gloo's threads hold on to tensors.
    check(compare([("phi3", plain, {}), ("phi3", {**plain, "compile": "block"}, {})], tmp_path))


@pytest.mark.slow
def test_a_step_in_the_backward_pass_uses_whole_gradients_of_norms_of_heads(tmp_path):
    check(
        compare([("qwen3", {"tensor_parallel": 2, "optimizer_fusion": "backward"}, {})], tmp_path)
    )


@pytest.mark.slow
def test_sharding_divides_what_is_split(tmp_path):
    cases: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
        ("gpt", {"tensor_parallel": 2, "sharding": sharding}, {"gradient_clipping": 0.1})
        for sharding in ("ddp", "zero1", "zero2", "zero3")
    ]
    norms_of_heads = ("qwen3", {"tensor_parallel": 2, "sharding": "zero3"}, {})
    check(compare([*cases, norms_of_heads], tmp_path, ranks=4))


# -- what cannot be split --------------------------------------------------------------------------


def parts_of(model, folder, **settings):
    import torch

    from autotune.models import build_model

    with torch.device("meta"):
        return build_model(workload_of(model, folder, **settings))


@pytest.mark.parametrize("family", ["gpt2", "opt", "stablelm"])
def test_a_family_without_a_plan_is_rejected_by_name(family, tmp_path):
    from autotune.techniques.requirements import missing_parts

    parts = parts_of(family, tmp_path)
    missing = missing_parts(parts, {"tensor_parallel": [1, 2]})
    assert set(missing["tensor_parallel"]) == {"2"}
    assert f"no plan of how to split the matrices of {family}" in missing["tensor_parallel"]["2"]


def test_a_mixture_of_experts_is_rejected_by_its_plan(tmp_path):
    from autotune.techniques.tensor_parallel import why_not

    assert "the plan of mixtral splits" in why_not(parts_of("mixtral", tmp_path), 2)


def test_a_model_of_ones_own_has_no_plan():
    import torch

    from autotune.models.parts import ModelParts
    from autotune.techniques.requirements import check_parts

    with pytest.raises(IllegalConfiguration, match="a model of your own"):
        check_parts(ModelParts(model=torch.nn.Linear(2, 2)), TrainingConfig(tensor_parallel=2))


@pytest.mark.parametrize(
    ("model", "degree", "sentence"),
    [
        ("gpt", 8, "its 4 heads cannot be divided among 8 devices"),
        ("llama", 4, "its 2 heads of keys and values cannot be divided among 4 devices"),
    ],
)
def test_heads_that_the_degree_does_not_divide_are_named(model, degree, sentence, tmp_path):
    from autotune.techniques.tensor_parallel import why_not

    assert why_not(parts_of(model, tmp_path), degree) == sentence


def test_an_inner_width_that_the_degree_does_not_divide_is_named(tmp_path):
    from autotune.techniques.tensor_parallel import why_not

    parts = parts_of("gpt", tmp_path, heads=1, width=64, feed_forward_width=33)
    parts.blocks[0].attention.heads = 2
    reason = why_not(parts, 2)
    assert "33 outputs of its layer blocks.0.feed_forward.gate" in reason


@pytest.mark.parametrize(
    "choices",
    [
        {"sharding": "hsdp"},
        {"precision": "fp16-mixed"},
        {"precision": "fp8"},
        {"precision": "int8-mixed"},
        {"precision": "bf16-stochastic"},
        {"optimizer": "adafactor"},
        {"optimizer": "adamw-8bit"},
        {"adapter": "lora"},
    ],
    ids=lambda choices: next(iter(choices.values())),
)
def test_what_does_not_work_in_split_models_is_illegal(choices):
    at = LegalityContext(global_batch=8, devices=8)
    whole = configuration_of({"sharding": "zero3", "sharding_group": 1, **choices}, at)
    split = configuration_of({**whole.to_dict(), "tensor_parallel": 2}, at)
    more = set(rule_violations(split.to_dict(), at)) - set(rule_violations(whole.to_dict(), at))
    assert any("tensor_parallel 2" in sentence for sentence in more)


def test_a_part_is_of_each_matrix_of_a_fused_weight():
    import torch

    from autotune.techniques.tensor_parallel import Split

    query_key_value = torch.arange(12.0)[:, None]
    split = Split(dimension=0, matrices=3)
    parts = [split.part(query_key_value, index, of=2) for index in range(2)]
    assert parts[0].flatten().tolist() == [0, 1, 4, 5, 8, 9]
    assert torch.equal(split.together(parts), query_key_value)


def held_while_loading(rank, folder):
    """Returns the most bytes that are alive while the training is built, and those of a model."""
    import torch
    from torch.profiler import ProfilerActivity, profile, record_function

    from autotune.shipped.cpu_peak import peak_of
    from autotune.techniques import apply_techniques
    from autotune.techniques.sharding import make_mesh

    config = TrainingConfig(tensor_parallel=2, micro_batch_size=4)
    device = torch.device("cpu")
    mesh = make_mesh(config, devices=2, device=device)
    with (
        profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recording,
        record_function("loading"),
    ):
        training = apply_techniques(
            config,
            workload_of("gpt", folder, ranks=2),
            weights_file=folder / "gpt.pt",
            device=device,
            mesh=mesh,
        )
    mapped = (folder / "gpt.pt").stat().st_size  # pages of the file, which are not memory
    return peak_of(recording, within="loading")[0] - mapped, 4 * training.number_of_parameters


@pytest.mark.slow
def test_no_rank_ever_holds_the_whole_model(tmp_path):
    from autotune.models.weights import draw_weights

    draw_weights(workload_of("gpt", tmp_path), file=tmp_path / "gpt.pt")
    for held, whole in on_ranks(2, held_while_loading, Path(tmp_path)):
        assert held < 0.75 * whole
