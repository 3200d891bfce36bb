"""Experts: weights of three dimensions, stored in fewer than 16 bits and with adapters beside them.

A mixture of one's own, whose experts are multiplied one by one, stands beside models of
transformers, which multiply them in one grouped product.
"""

from unittest import mock

import peft
import pytest
import torch
from torch import nn

from autotune.data.batches import Batch
from autotune.errors import IllegalConfiguration
from autotune.memory.device_meter import make_meter
from autotune.models import build_model
from autotune.models.parts import ModelParts
from autotune.models.weights import draw_weights
from autotune.predictor.predict import predict
from autotune.shipped import experts
from autotune.shipped.quantized import dequantize, is_quantized, tensors_behind
from autotune.spec.config import QUANTIZED_EXPERTS, QUANTIZED_WEIGHTS, TrainingConfig
from autotune.spec.model_file import model_name
from autotune.spec.parity import TOLERANCES
from autotune.spec.prediction import PredictionRequest
from autotune.spec.workload import make_workload
from autotune.techniques import apply_techniques
from autotune.techniques.adapter import missing_layers, target_experts, target_layers
from autotune.techniques.base_weights import quantize
from autotune.techniques.sharding import make_mesh
from autotune.training.step import TrainingStep

CPU = torch.device("cpu")
OWN = '''
import torch
from torch import nn


class Mixture(nn.Module):
    """Every expert's two matrices in one parameter each, read once for each expert."""

    def __init__(self, width, experts):
        super().__init__()
        self.inner = nn.Parameter(torch.randn(experts, width, 2 * width) * 0.1)
        self.outer = nn.Parameter(torch.randn(experts, 2 * width, width) * 0.1)

    def forward(self, x, shares):
        return sum(
            shares[..., expert, None] * ((x @ self.inner[expert]).relu() @ self.outer[expert])
            for expert in range(len(self.inner))
        )


class Block(nn.Module):
    def __init__(self, width, experts):
        super().__init__()
        self.norm, self.router = nn.LayerNorm(width), nn.Linear(width, experts)
        self.mixture, self.mix = Mixture(width, experts), nn.Linear(width, width)

    def forward(self, x):
        x = x + self.mix(self.norm(x).cumsum(1) / 8)
        normed = self.norm(x)
        scores = self.router(normed)
        best = scores >= scores.topk(2, dim=-1).values[..., -1:]
        return x + self.mixture(normed, torch.where(best, scores, -torch.inf).softmax(-1))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(256, 64), nn.Linear(64, 256)
        self.blocks = nn.ModuleList(Block(64, 4) for _ in range(2))

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def make():
    return Model()
'''
SIZES = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 128,
    "num_experts_per_tok": 2,
    "vocab_size": 256,
    "max_position_embeddings": 64,
}
CONFIGS = {
    "mixtral": {**SIZES, "model_type": "mixtral", "num_local_experts": 4},
    "qwen3_moe": {
        **SIZES,
        "model_type": "qwen3_moe",
        "num_experts": 8,
        "moe_intermediate_size": 64,
    },
    "gpt_oss": {
        **SIZES,
        "model_type": "gpt_oss",
        "num_local_experts": 8,
        "sliding_window": 16,
    },
}
MODELS = ("own", *CONFIGS)
STEPS = {"sequence_length": 32, "global_batch": 4}


@pytest.fixture(scope="module")
def workloads(tmp_path_factory):
    """{model: (its workload, the file of its initial weights)}."""
    folder = tmp_path_factory.mktemp("experts")
    (folder / "mixture.py").write_text(OWN)
    made = {"own": make_workload("cpu", {**STEPS, "model": f"{folder / 'mixture.py'}:make"})}
    for name, config in CONFIGS.items():
        settings = {**STEPS, "model": model_name(config), "model_config": config}
        made[name] = make_workload("cpu", settings)
    for name, workload in made.items():
        draw_weights(workload, file=folder / f"{name}.pt")
    return {name: (workload, folder / f"{name}.pt") for name, workload in made.items()}


def config_of(base_weights="nf4-experts", targets="experts", **choices):
    return TrainingConfig(
        **{
            "precision": "bf16-mixed",
            "adapter": "lora",
            "adapter_rank": 4,
            "adapter_targets": targets,
            "base_weights": base_weights,
            "micro_batch_size": 4,
            **choices,
        }
    )


@pytest.fixture
def training_of(workloads):
    def make(model, config, **options):
        workload, weights = workloads[model]
        return apply_techniques(config, workload, weights_file=weights, device=CPU, **options)

    return make


def batch():
    tokens = torch.arange(132).reshape(4, 33) * 7 % 256
    return Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())


def meter():
    return make_meter(CPU, uuid=None, cap_bytes=None, new_context_bytes=None, shares_device=False)


def steps_of(training, config, workload, *, steps=3, marker=None):
    """The losses of the first steps on one batch."""
    step = TrainingStep(
        training, workload=workload, config=config, device=CPU, marker=marker or meter()
    )
    return [step(number, batch()) for number in range(steps)]


def weights_of(training):
    """{name as in the model without adapters: what is stored} of the weights of experts."""
    found = {}
    for name, weight in training.parts.model.named_parameters():
        if ".lora_" not in name:
            found[name.replace(".base_layer", "")] = weight
    return found


# -- what is stored --------------------------------------------------------------------------------


@pytest.mark.parametrize("value", QUANTIZED_EXPERTS)
def test_experts_take_the_bytes_of_their_format(value, training_of, workloads):
    plain = build_model(workloads["own"][0])
    stored = weights_of(training_of("own", config_of(value)))
    numbers = {path: plain.model.get_parameter(path).numel() for path in target_experts(plain)}
    assert len(numbers) == 4
    held = sum(part.nbytes for path in numbers for part in tensors_behind(stored[path]))
    expected = {"int8": 1.0, "fp8": 1.0, "nf4": 0.5}[QUANTIZED_WEIGHTS[value]]
    # Scales add a little: relatively most in weights as small as these.
    assert expected <= held / sum(numbers.values()) < expected + 0.12


@pytest.mark.parametrize("model", MODELS)
def test_all_matrices_of_blocks_are_stored_in_codes(model, training_of, workloads):
    config = config_of()
    training = training_of(model, config)
    plain = build_model(workloads[model][0])
    quantized = [
        *target_experts(plain),
        *(f"{p}.weight" for p, _ in target_layers(plain, "all-linear")),
    ]
    assert training.unquantized[1] == sum(
        plain.model.get_parameter(one).numel() for one in quantized
    )


def test_codes_of_experts_stay_as_they_are_through_a_training(training_of, workloads):
    training, config = training_of("own", config_of()), config_of()
    before = {name: weight.detach().clone() for name, weight in weights_of(training).items()}
    steps_of(training, config, workloads["own"][0])
    after = weights_of(training)
    assert list(before) == list(after)
    assert all(torch.equal(before[name], after[name]) for name in before)


# -- what is computed ------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("targets", ["experts", "all-linear"])
@pytest.mark.parametrize("value", QUANTIZED_EXPERTS)
@pytest.mark.parametrize("model", MODELS)
def test_quantized_experts_compute_what_they_stand_for(
    model, value, targets, training_of, workloads
):
    config, workload = config_of(value, targets), workloads[model][0]
    losses = steps_of(training_of(model, config), config, workload)
    expected = steps_of(training_of(model, config, dequantized=True), config, workload)
    assert losses == pytest.approx(expected, rel=TOLERANCES["bf16-mixed"].loss)
    assert losses[2] < losses[0]


def test_a_wrong_conversion_of_codes_is_seen_in_the_losses(training_of, workloads):
    config, workload = config_of(), workloads["own"][0]
    expected = steps_of(training_of("own", config, dequantized=True), config, workload)
    training = training_of("own", config)

    def scaled(weight):
        return dequantize(weight) * 1.5

    with mock.patch.object(experts, "dequantize", scaled):
        losses = steps_of(training, config, workload)
    assert losses != pytest.approx(expected, rel=TOLERANCES["bf16-mixed"].loss)


@pytest.mark.parametrize("checkpointing", ["none", "block"])
@pytest.mark.parametrize("model", ["own", "mixtral"])
def test_the_adapter_of_each_weight_of_experts_is_trained(
    model, checkpointing, training_of, workloads
):
    """peft 0.21.2 leaves out all but the last where the weights have a parametrization."""
    config = config_of(checkpointing=checkpointing)
    training = training_of(model, config)
    second = {
        name: weight
        for name, weight in training.parts.model.named_parameters()
        if ".lora_B." in name
    }
    assert sum("mixture" in name or "experts" in name for name in second) == 4
    steps_of(training, config, workloads[model][0])
    assert all(weight.any() for weight in second.values())


@pytest.mark.slow
@pytest.mark.parametrize("choices", [{"compile": "block"}, {"checkpointing": "block"}])
def test_techniques_around_experts_change_no_loss(choices, training_of, workloads):
    config, workload = config_of(targets="all-linear"), workloads["own"][0]
    expected = steps_of(training_of("own", config), config, workload)
    other = config_of(targets="all-linear", **choices)
    losses = steps_of(training_of("own", other), other, workload)
    assert losses == pytest.approx(expected, rel=TOLERANCES["bf16-mixed"].loss)


@pytest.mark.slow
@pytest.mark.parametrize("targets", ["experts", "all-linear"])
def test_codes_of_experts_that_fsdp2_gathers_have_their_scales(targets, training_of, workloads):
    workload = workloads["own"][0]
    here = config_of(targets=targets)
    expected = steps_of(training_of("own", here), here, workload)
    moved = config_of(targets=targets, offload="all", checkpointing="block")
    try:
        mesh = make_mesh(moved, devices=1, device=CPU)
        losses = steps_of(training_of("own", moved, mesh=mesh), moved, workload)
    finally:
        torch.distributed.destroy_process_group()
    assert losses == pytest.approx(expected, rel=TOLERANCES["bf16-mixed"].loss)


LARGEST_SHARES = {"int8": 0.02, "fp8": 0.05, "nf4": 0.15}
"""Of the tokens, those that quantized weights may send to another expert in a block."""


@pytest.mark.parametrize("value", QUANTIZED_EXPERTS)
def test_few_tokens_are_routed_to_other_experts(value, training_of):
    chosen = routes_of(training_of("own", config_of(value)))
    exact = routes_of(training_of("own", config_of("bf16")))
    share = (chosen != exact).any(-1).float().mean().item()
    assert share < LARGEST_SHARES[QUANTIZED_WEIGHTS[value]]


@torch.no_grad()
def routes_of(training):
    """Which experts each token goes to in each block, [blocks, sequences, tokens, experts]."""
    routes = []

    def note(_module, _inputs, scores):
        routes.append(scores >= scores.topk(2, dim=-1).values[..., -1:])

    handles = [block.router.register_forward_hook(note) for block in training.parts.blocks]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        training.parts.model(*batch()[:2])
    for handle in handles:
        handle.remove()
    return torch.stack(routes)


class AroundHeld(nn.Module):
    """Reads the weights of a module that only holds them, and so is never called."""

    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(64, 64)
        self.held = nn.ParameterDict({"inner": nn.Parameter(torch.randn(4, 64, 64))})

    def forward(self, x):
        return torch.einsum("...c,eci->...i", self.mix(x), self.held["inner"])


@pytest.mark.parametrize("value", QUANTIZED_EXPERTS)
def test_experts_that_are_only_held_are_converted_where_they_are_read(value):
    model, x = nn.Sequential(AroundHeld()).bfloat16(), torch.randn(2, 64).bfloat16()
    held = model[0].held
    held["inner"] = quantize(held["inner"].requires_grad_(False), value, dequantized=False)
    plain = AroundHeld().bfloat16()
    plain.load_state_dict({**plain.state_dict(), **model[0].mix.state_dict(prefix="mix.")})
    plain.held["inner"] = nn.Parameter(dequantize(held["inner"]))
    experts.dequantize_in_calls(model, ["0.held.inner"])
    assert torch.equal(model(x), plain(x))
    assert is_quantized(held["inner"])


def test_adapters_on_experts_that_are_only_held_are_excluded_in_one_sentence():
    parts = ModelParts(model=nn.Sequential(AroundHeld()))
    assert missing_layers(parts, "base_weights", "nf4-experts", saved={}) is None
    assert missing_layers(parts, "adapter_targets", "experts", saved={}) == (
        "peft adds adapters where a module is called, and 0.held only holds weights"
    )


# -- names -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", ["bf16", "nf4-experts"])
@pytest.mark.parametrize("model", ["own", "mixtral"])
def test_adapters_of_experts_load_into_a_model_in_16_bits(model, value, training_of, workloads):
    training = training_of(model, config_of(value))
    ours = {
        name: tuple(weight.shape)
        for name, weight in training.parts.model.named_parameters()
        if weight.requires_grad
    }
    plain = build_model(workloads[model][0])
    paths = target_experts(plain)
    settings = peft.LoraConfig(
        r=4,
        target_modules=[path for path, _ in target_layers(plain, "all-linear")],
        target_parameters=paths,
    )
    theirs = peft.inject_adapter_in_model(settings, plain.model)
    assert ours == {
        name: tuple(weight.shape)
        for name, weight in theirs.named_parameters()
        if weight.requires_grad
    }


# -- predictions -----------------------------------------------------------------------------------

SORTING_BYTES = 4096
"""Of the indices that distribute tokens over experts, as in `test_mixture_of_experts.py`."""
SCRATCH_BYTES = 2 * 64 * 72
"""Of the product of one expert in bf16, which oneDNN takes by how many tokens the expert got: a
prediction has equal parts of them."""


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", ["none", "block"])
@pytest.mark.parametrize("targets", ["experts", "all-linear"])
@pytest.mark.parametrize("value", QUANTIZED_EXPERTS)
@pytest.mark.parametrize("model", MODELS)
def test_the_peak_with_quantized_experts_is_predicted(
    model, value, targets, checkpointing, training_of, workloads
):
    config = config_of(value, targets, checkpointing=checkpointing)
    training, workload = training_of(model, config), workloads[model][0]
    steps_of(training, config, workload, steps=2)
    measuring = meter()
    step = TrainingStep(training, workload=workload, config=config, device=CPU, marker=measuring)

    def resident():
        whole = training.parts.model
        weights = [part for weight in whole.parameters() for part in tensors_behind(weight)]
        return [*weights, *whole.buffers(), *training.updater.state()]

    with measuring.measuring(resident):
        step(2, batch())
    measured = measuring.reading().peak_memory_bytes
    prediction = predict(PredictionRequest(workload=workload, config=config, device="cpu"))
    allowed = SORTING_BYTES + SCRATCH_BYTES
    assert prediction.peak_memory_bytes == pytest.approx(measured, rel=0, abs=allowed)


# -- models that cannot have them ------------------------------------------------------------------


@pytest.mark.parametrize("choices", [{"targets": "experts"}, {"base_weights": "nf4-experts"}])
def test_a_model_without_experts_is_one_sentence(choices, tmp_path):
    workload = make_workload("cpu", {"layers": 1, "width": 32, "heads": 2, **STEPS})
    draw_weights(workload, file=tmp_path / "weights.pt")
    config = config_of(**{"base_weights": "bf16", "targets": "all-linear", **choices})
    with pytest.raises(IllegalConfiguration, match="no weights of three dimensions, as experts"):
        apply_techniques(config, workload, weights_file=tmp_path / "weights.pt", device=CPU)


def test_convolutions_and_scales_of_layers_are_no_experts():
    model = nn.Sequential(nn.Conv1d(8, 8, 4))
    model[0].scales = nn.Parameter(torch.ones(1, 1, 8))
    assert experts.expert_weights(model, [model]) == []
