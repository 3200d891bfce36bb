"""Adapters and frozen weights: what is trained, how it begins, and what is stored."""

import peft
import pytest
import torch
from torch import nn

from autotune.data.batches import Batch
from autotune.errors import IllegalConfiguration, InvalidInput
from autotune.memory.device_meter import make_meter
from autotune.models import build_model
from autotune.models.parts import ModelParts
from autotune.models.weights import draw_weights
from autotune.predictor.predict import predict
from autotune.shipped.adapter_weights import principal_matrices
from autotune.shipped.quantized import tensors_behind
from autotune.spec.config import TrainingConfig
from autotune.spec.model_file import model_name
from autotune.spec.parity import TOLERANCES
from autotune.spec.prediction import PredictionRequest
from autotune.spec.workload import make_workload
from autotune.techniques import apply_techniques, extras
from autotune.techniques.adapter import missing_layers, target_layers
from autotune.techniques.requirements import missing_parts
from autotune.training.step import TrainingStep

CPU = torch.device("cpu")
SIZES = {"layers": 2, "width": 64, "heads": 4, "sequence_length": 32, "global_batch": 2}
WORKLOAD = make_workload("cpu", SIZES)
QUANTIZED = ("int8", "fp8", "nf4")


def config_of(**choices):
    return TrainingConfig(micro_batch_size=2, **{"adapter": "lora", **choices})


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    file = tmp_path_factory.mktemp("weights") / "weights.pt"
    draw_weights(WORKLOAD, file=file)
    return file


@pytest.fixture
def training_of(weights):
    """training_of(config) has the techniques of a configuration applied to a small GPT."""
    return lambda config, workload=WORKLOAD, **options: apply_techniques(
        config, workload, weights_file=weights, device=CPU, **options
    )


def workload_with(**beside):
    """The workload with what is said of adapters; the weights are those of the plain one."""
    return make_workload("cpu", {**SIZES, **beside})


WHOLE = ("embedding", "head")
"""Modules of the built-in GPT that are trained whole beside adapters."""


def meter():
    return make_meter(CPU, uuid=None, cap_bytes=None, new_context_bytes=None, shares_device=False)


def steps_of(training, config, *, steps=3):
    """The losses of the first steps on one batch."""
    tokens = torch.arange(66).reshape(2, 33) * 7 % 256
    batch = Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
    step = TrainingStep(training, workload=WORKLOAD, config=config, device=CPU, marker=meter())
    return [step(number, batch) for number in range(steps)]


def adapters_of(training):
    return {
        name: weight.detach().clone()
        for name, weight in training.parts.model.named_parameters()
        if "lora_" in name
    }


# -- what is trained -------------------------------------------------------------------------------


def test_only_the_linear_layers_of_blocks_have_adapters(training_of):
    model = training_of(config_of()).parts.model
    adapted = {name.rpartition(".base_layer")[0] for name, _ in model.named_modules()}
    assert adapted - {""} == {
        f"blocks.{block}.{layer}"
        for block in (0, 1)
        for layer in (
            "attention.query_key_value",
            "attention.output",
            "feed_forward.gate",
            "feed_forward.up",
            "feed_forward.down",
        )
    }


def test_the_adapters_of_attention_are_in_no_other_layer(training_of):
    names = adapters_of(training_of(config_of(adapter_targets="attention")))
    assert names
    assert all(".attention." in name for name in names)


@pytest.mark.parametrize("base_weights", ["trained", "int8", "nf4"])
def test_frozen_weights_stay_as_they_are(base_weights, training_of):
    config = config_of(precision="bf16-mixed", base_weights=base_weights)
    training = training_of(config)
    frozen = [weight for weight in training.parts.model.parameters() if not weight.requires_grad]
    before = [part.clone() for weight in frozen for part in tensors_behind(weight)]
    steps_of(training, config)
    after = [part for weight in frozen for part in tensors_behind(weight)]
    assert all(map(torch.equal, before, after))


def test_every_matrix_of_every_adapter_is_trained(training_of):
    training = training_of(config_of())
    before = adapters_of(training)
    steps_of(training, config_of())
    after = adapters_of(training)
    assert not any(torch.equal(before[name], after[name]) for name in before)


# -- how it begins ---------------------------------------------------------------------------------


@pytest.mark.parametrize("adapter", ["lora", "dora"])
def test_a_new_adapter_changes_nothing(adapter, training_of):
    adapted = steps_of(training_of(config_of(adapter=adapter)), config_of(adapter=adapter), steps=1)
    plain = config_of(adapter="none")
    assert adapted == pytest.approx(steps_of(training_of(plain), plain, steps=1), rel=1e-6)


def test_adapters_of_one_rank_begin_alike_whatever_the_weights_are_stored_in(training_of):
    first = adapters_of(training_of(config_of(precision="bf16-mixed")))
    second = adapters_of(training_of(config_of(precision="bf16-mixed", base_weights="nf4")))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_the_scale_is_sixteen_over_the_rank_at_every_rank(training_of):
    model = training_of(config_of(adapter_rank=32)).parts.model
    scales = {module.scaling["default"] for module in model.modules() if hasattr(module, "scaling")}
    assert scales == {0.5}


def test_ranks_and_alphas_of_single_layers_are_those_of_peft(training_of):
    workload = workload_with(
        adapter_alpha=32,
        adapter_scaling="rslora",
        adapter_rank_pattern={"output": 4, r"1\.feed_forward\.\w+": 16},
        adapter_alpha_pattern={"gate": 8},
    )
    ours = training_of(config_of(), workload).parts.model
    layers = [path for path, _ in target_layers(build_model(workload), "all-linear")]
    theirs = peft.get_peft_model(
        build_model(workload).model,
        peft.LoraConfig(
            target_modules=layers,
            lora_alpha=32,
            use_rslora=True,
            rank_pattern=dict(workload.adapter_rank_pattern),
            alpha_pattern=dict(workload.adapter_alpha_pattern),
        ),
    ).get_base_model()

    def scaled(model):
        return {
            name: (part.r["default"], part.scaling["default"])
            for name, part in model.named_modules()
            if hasattr(part, "lora_A")
        }

    assert scaled(ours) == scaled(theirs)
    assert len(set(scaled(ours).values())) == 5


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ({"ouput": 4}, "no linear layer of the blocks is 'ouput', which has its own rank"),
        ({"output": 65}, r"rank 65 of output is larger than layer blocks\.0\.attention\.output"),
    ],
)
def test_a_rank_that_fits_no_layer_is_one_sentence(pattern, message, training_of):
    with pytest.raises(InvalidInput, match=message):
        training_of(config_of(), workload_with(adapter_rank_pattern=pattern))


# -- a start by PiSSA ------------------------------------------------------------------------------

PISSA = workload_with(adapter_init="pissa")


@pytest.mark.parametrize("adapter", ["lora", "dora"])
@pytest.mark.parametrize("scaling", ["standard", "rslora"])
def test_a_start_by_pissa_changes_nothing(adapter, scaling, training_of):
    config = config_of(adapter=adapter)
    workload = workload_with(adapter_init="pissa", adapter_scaling=scaling)
    plain = config_of(adapter="none")
    adapted = steps_of(training_of(config, workload), config, steps=1)
    assert adapted == pytest.approx(steps_of(training_of(plain), plain, steps=1), rel=1e-5)


def test_pissa_begins_as_the_part_with_the_largest_singular_values(training_of):
    layer = training_of(config_of(), PISSA).parts.blocks[0].feed_forward.up
    whole = training_of(config_of(adapter="none")).parts.blocks[0].feed_forward.up.weight
    first, second = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    taken_out = layer.scaling["default"] * second @ first
    assert torch.allclose(layer.base_layer.weight, whole - taken_out, atol=1e-6)
    # The least that a part of this rank can leave: Eckart and Young (1936).
    least = torch.linalg.norm(torch.linalg.svdvals(whole)[8:])
    assert torch.linalg.norm(layer.base_layer.weight) < 1.01 * least
    assert torch.allclose(first @ first.t(), second.t() @ second, atol=1e-5)


@pytest.mark.parametrize("adapter", ["lora", "dora"])
def test_pissa_in_bf16_leaves_the_rest_frozen_and_trains_both_matrices(adapter, training_of):
    config = config_of(adapter=adapter, precision="bf16-mixed", base_weights="bf16")
    training = training_of(config, PISSA)
    before = {name: one.detach().clone() for name, one in training.parts.model.named_parameters()}
    losses = steps_of(training, config)
    changed = {
        name
        for name, one in training.parts.model.named_parameters()
        if not torch.equal(one, before[name])
    }
    assert changed == {name for name in before if ".lora_" in name}
    assert losses[2] < losses[0]


@pytest.mark.slow
@pytest.mark.parametrize("adapter", ["lora", "dora"])
@pytest.mark.parametrize("choices", [{}, {"precision": "bf16-mixed", "base_weights": "bf16"}])
def test_the_peak_with_ranks_of_their_own_and_a_start_by_pissa_is_predicted(
    choices, adapter, training_of
):
    workload = workload_with(adapter_init="pissa", adapter_rank_pattern={"output": 64, "up": 2})
    predicted, measured = peaks_of(config_of(adapter=adapter, **choices), workload, training_of)
    assert predicted == pytest.approx(measured, rel=0.001)


# -- quantized weights -----------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("adapter", ["lora", "dora"])
@pytest.mark.parametrize("base_weights", QUANTIZED)
def test_quantized_weights_compute_what_they_stand_for(base_weights, adapter, training_of):
    config = config_of(precision="bf16-mixed", base_weights=base_weights, adapter=adapter)
    losses = steps_of(training_of(config), config)
    expected = steps_of(training_of(config, dequantized=True), config)
    assert losses == pytest.approx(expected, rel=TOLERANCES["bf16-mixed"].loss)


def test_what_quantized_weights_stand_for_is_not_the_weights_themselves(training_of):
    """Otherwise the comparison above would not see what quantization does."""
    config = config_of(precision="bf16-mixed", base_weights="nf4")
    plain = config_of(precision="bf16-mixed", base_weights="bf16")
    dequantized = training_of(config, dequantized=True).parts.model.state_dict()
    exact = training_of(plain).parts.model.state_dict()
    name = "blocks.0.feed_forward.up.base_layer.weight"
    difference = (dequantized[name] - exact[name]).float().norm() / exact[name].float().norm()
    assert 0.05 < difference < 0.15


@pytest.mark.parametrize(
    ("base_weights", "bytes_a_weight"), [("bf16", 2.0), ("int8", 1.0), ("fp8", 1.0), ("nf4", 0.5)]
)
def test_the_layers_of_the_blocks_take_the_bytes_of_their_format(
    base_weights, bytes_a_weight, training_of
):
    config = config_of(precision="bf16-mixed", base_weights=base_weights)
    layers = target_layers(training_of(config).parts, "all-linear")
    weights = [layer.weight for path, layer in layers if path.endswith("base_layer")]
    stored = sum(part.nbytes for weight in weights for part in tensors_behind(weight))
    exact = training_of(config_of(precision="bf16-mixed")).parts
    elements = sum(
        layer.weight.numel()
        for path, layer in target_layers(exact, "all-linear")
        if path.endswith("base_layer")
    )
    # Scales add a little: relatively most in layers as small as these.
    assert bytes_a_weight <= stored / elements < bytes_a_weight + 0.2


@torch.no_grad()
def test_an_evaluation_leaves_nf4_weights_as_they_are(training_of):
    model = training_of(config_of(precision="bf16-mixed", base_weights="nf4")).parts.model
    before = [part.clone() for weight in model.parameters() for part in tensors_behind(weight)]
    model.eval()
    tokens = torch.zeros(1, 32, dtype=torch.long)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(tokens, tokens)
    after = [part for weight in model.parameters() for part in tensors_behind(weight)]
    assert all(map(torch.equal, before, after))


# -- predictions -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "choices",
    [
        {"precision": "bf16-mixed"},
        {"precision": "bf16-mixed", "base_weights": "int8"},
        {"precision": "bf16-mixed", "base_weights": "nf4"},
        {"precision": "fp16-mixed", "base_weights": "fp16"},
        # At the peak it multiplies a 16-bit weight by scales in fp32, and a 16-bit product runs.
        {"precision": "bf16-true", "base_weights": "int8", "checkpointing": "block"},
        {"precision": "bf16-true", "base_weights": "nf4", "checkpointing": "block"},
    ],
    ids=lambda choices: " ".join(choices.values()),
)
def test_the_peak_of_adapters_is_predicted(choices, training_of):
    config = config_of(**choices)
    predicted, measured = peaks_of(config, WORKLOAD, training_of)
    assert predicted == pytest.approx(measured, rel=0.01)


def peaks_of(config, workload, training_of):
    """The predicted and the measured peak of a step, in bytes."""
    training = training_of(config, workload)
    steps_of(training, config, steps=2)
    tokens = torch.arange(66).reshape(2, 33) * 7 % 256
    batch = Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
    measuring = meter()
    step = TrainingStep(training, workload=WORKLOAD, config=config, device=CPU, marker=measuring)

    def resident():
        model = training.parts.model
        weights = [part for weight in model.parameters() for part in tensors_behind(weight)]
        return [*weights, *model.buffers(), *training.updater.state()]

    with measuring.measuring(resident):
        step(2, batch)
    prediction = predict(PredictionRequest(workload=workload, config=config, device="cpu"))
    return prediction.peak_memory_bytes, measuring.reading().peak_memory_bytes


@pytest.mark.slow
@pytest.mark.parametrize("saved_dtype", ["adapter", "base"])
@pytest.mark.parametrize(
    "choices",
    [
        {},
        {"precision": "bf16-mixed", "base_weights": "bf16", "checkpointing": "block"},
        {"precision": "bf16-mixed", "base_weights": "nf4", "loss": "chunked"},
    ],
    ids=lambda choices: " ".join(choices.values()) or "float32",
)
def test_the_peak_of_what_is_beside_adapters_is_predicted(choices, saved_dtype, training_of):
    workload = workload_with(
        adapter_dropout=0.05, modules_to_save=WHOLE, modules_to_save_dtype=saved_dtype
    )
    predicted, measured = peaks_of(config_of(**choices), workload, training_of)
    assert predicted == pytest.approx(measured, rel=0.001)


# -- modules trained whole -------------------------------------------------------------------------


def test_copies_are_trained_and_their_originals_are_not(training_of):
    training = training_of(config_of(), workload_with(modules_to_save=WHOLE))
    model = training.parts.model
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    steps_of(training, config_of())
    for name in WHOLE:
        original, copied = (
            f"{name}.original_module.weight",
            f"{name}.modules_to_save.default.weight",
        )
        assert torch.equal(before[original], before[copied])
        after = dict(model.named_parameters())
        assert torch.equal(before[original], after[original])
        assert not torch.equal(before[copied], after[copied])


@pytest.mark.parametrize(
    ("saved_dtype", "choices", "expected"),
    [
        ("adapter", {"precision": "bf16-mixed", "base_weights": "bf16"}, torch.float32),
        ("base", {"precision": "bf16-mixed", "base_weights": "bf16"}, torch.bfloat16),
        ("base", {"precision": "bf16-mixed", "base_weights": "nf4"}, torch.bfloat16),
        ("base", {}, torch.float32),
        # GradScaler unscales no gradients in float16.
        ("base", {"precision": "fp16-mixed", "base_weights": "int8"}, torch.float32),
    ],
)
def test_copies_are_in_the_format_of_adapters_or_of_the_base(
    saved_dtype, choices, expected, training_of
):
    workload = workload_with(modules_to_save=WHOLE, modules_to_save_dtype=saved_dtype)
    parts = training_of(config_of(**choices), workload).parts
    head = parts.head
    assert (head.weight.dtype, head.weight.requires_grad) == (expected, True)
    frozen = parts.model.get_parameter("head.original_module.weight")
    assert torch.equal(head.weight, frozen.to(expected)), "they begin as peft's, as trainers' do"


def test_a_loss_in_chunks_reads_the_copy_of_the_head(training_of):
    workload = workload_with(modules_to_save=WHOLE)
    chunked = config_of(loss="chunked")
    losses = steps_of(training_of(chunked, workload), chunked)
    expected = steps_of(training_of(config_of(), workload), config_of())
    assert losses == pytest.approx(expected, rel=1e-6)
    assert losses != pytest.approx(steps_of(training_of(config_of()), config_of()), rel=1e-4)


def test_names_of_parameters_are_those_that_peft_gives(training_of):
    workload = workload_with(modules_to_save=("head", "attention_norm"), adapter_dropout=0.1)
    ours = training_of(config_of(), workload).parts.model
    layers = [path for path, _ in target_layers(build_model(workload), "all-linear")]
    theirs = peft.get_peft_model(
        build_model(workload).model,
        peft.LoraConfig(target_modules=layers, modules_to_save=["head", "attention_norm"]),
    )
    assert {*ours.state_dict()} == {*theirs.get_base_model().state_dict()}


def test_tied_weights_become_two_copies_beside_one_original(tmp_path):
    config = {"model_type": "llama", "tie_word_embeddings": True, "num_hidden_layers": 2}
    config |= {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2}
    config |= {"vocab_size": 300, "max_position_embeddings": 64}
    content = {"model": model_name(config), "model_config": config, "sequence_length": 32}
    workload = make_workload(
        "cpu", {**content, "global_batch": 2, "modules_to_save": ["embed_tokens", "lm_head"]}
    )
    draw_weights(workload, file=tmp_path / "weights.pt")
    training = apply_techniques(
        config_of(), workload, weights_file=tmp_path / "weights.pt", device=CPU
    )
    names = [name for name, _ in training.parts.model.named_parameters() if "layers" not in name]
    assert [name.removeprefix("network.") for name in names] == [
        "model.embed_tokens.original_module.weight",
        "model.embed_tokens.modules_to_save.default.weight",
        "model.norm.weight",
        "lm_head.modules_to_save.default.weight",
    ]


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("heads",), "the model has no module 'heads' to train beside adapters"),
        (("blocks",), r"'blocks\.0'|'blocks' cannot be trained whole .* has blocks of the model"),
        (("feed_forward", "gate"), "others of modules_to_save, in it"),
    ],
)
def test_modules_that_cannot_be_trained_whole_are_one_sentence(names, message, training_of):
    with pytest.raises(InvalidInput, match=message) as raised:
        training_of(config_of(), workload_with(modules_to_save=names))
    assert raised.value.hint


def test_layers_that_are_trained_whole_have_no_adapter_and_cannot_be_quantized(training_of):
    workload = workload_with(modules_to_save=("gate",))
    names = adapters_of(training_of(config_of(), workload))
    assert not any(".gate." in name for name in names)
    with pytest.raises(IllegalConfiguration, match=r"quantized cannot be .* has blocks\.0"):
        training_of(config_of(precision="bf16-mixed", base_weights="int8"), workload)


# -- models that cannot have them ------------------------------------------------------------------


def test_a_rank_larger_than_a_layer_is_one_sentence(training_of):
    with pytest.raises(IllegalConfiguration, match=r"larger than layer blocks\.0\.attention"):
        training_of(config_of(adapter_rank=65))


class Mixture(nn.Module):
    def __init__(self, experts):
        super().__init__()
        self.down, self.shared_gate = nn.Linear(64, 48), nn.Linear(64, 1)
        self.router, self.experts = nn.Linear(64, 4), experts


STACKED = nn.ParameterDict({"up": nn.Parameter(torch.zeros(4, 64, 64))})
LISTED = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))


@pytest.mark.parametrize("experts", [STACKED, LISTED], ids=["stacked", "listed"])
def test_a_router_of_few_experts_does_not_limit_the_rank(experts):
    parts = ModelParts(model=nn.Sequential(Mixture(experts)))
    assert missing_layers(parts, "adapter_rank", 48, saved={}) is None
    assert missing_layers(parts, "adapter_rank", 49, saved={}) == (
        "it is larger than layer 0.down, which is 48 x 64"
    )


OWN = {"up": 4, "attention.0": 4}


class Narrow(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.up = nn.Sequential(nn.Linear(64, 32)), nn.Linear(64, 16)


@pytest.mark.parametrize(("targets", "limit"), [("attention", 32), ("all-linear", 16)])
def test_the_narrowest_layer_of_the_targets_limits_the_rank(targets, limit):
    model = nn.Module()
    model.blocks = nn.ModuleList([Narrow()])
    parts = ModelParts(
        model=model, blocks_owner=model, blocks_name="blocks", attention_name="attention"
    )
    choices = {"adapter": ["lora"], "adapter_rank": [limit, limit + 1]}
    found = missing_parts(parts, {**choices, "adapter_targets": [targets]})
    assert list(found["adapter_rank"]) == [str(limit + 1)]
    assert missing_parts(parts, {**choices, "adapter_targets": [targets]}, own_ranks=OWN) == {}


def test_a_part_by_pissa_of_a_weight_that_is_narrower_than_the_rank_is_all_of_it():
    weight = torch.randn(4, 64)
    first, second = principal_matrices(weight, rank=8, scale=2.0, seed=0)
    assert (first.shape, second.shape) == ((8, 64), (4, 8))
    torch.testing.assert_close(2 * second @ first, weight)


def test_a_model_without_linear_layers_has_no_adapters():
    parts = ModelParts(model=nn.Sequential(nn.Embedding(4, 4), nn.LayerNorm(4)))
    choices = {"adapter": ("none", "lora"), "adapter_targets": ("all-linear", "attention")}
    reasons = missing_parts(parts, choices)["adapter_targets"]
    assert reasons["all-linear"] == "the model's blocks have no linear layers"
    assert reasons["attention"].startswith("no linear layers were found in the attention")


def test_a_space_without_adapters_asks_nothing_about_them():
    parts = ModelParts(model=nn.Sequential(nn.Embedding(4, 4), nn.LayerNorm(4)))
    choices = {"adapter": ("none",), "adapter_targets": ("all-linear",), "adapter_rank": (8,)}
    assert missing_parts(parts, choices) == {}


def layers_and_weights(workload):
    """Numbers in the linear layers of the blocks, and in all weights."""
    model = build_model(workload).model
    layers = [one for one in model.blocks.modules() if isinstance(one, nn.Linear)]
    numbers = sum(parameter.numel() for parameter in model.parameters())
    return sum(layer.weight.numel() for layer in layers), numbers


@pytest.mark.parametrize("value", [None, *QUANTIZED])
def test_weights_that_quantization_leaves_are_counted(value, training_of):
    in_layers, numbers = layers_and_weights(WORKLOAD)
    config = config_of(precision="bf16-mixed", base_weights=value or "trained")
    quantized = in_layers if value else 0
    assert training_of(config).unquantized == (numbers - quantized, quantized)


@pytest.mark.slow
def test_layers_that_are_extrapolated_count_in_the_share_of_weights():
    sizes = {"layers": 16, "width": 32, "heads": 2, "sequence_length": 16}
    deep = make_workload("cpu", {**SIZES, **sizes})
    config = config_of(precision="bf16-mixed", base_weights="nf4")
    request = PredictionRequest(workload=deep, config=config, device="cpu", extrapolates="any")
    prediction = predict(request)
    in_layers, numbers = layers_and_weights(deep)
    assert prediction.extrapolated_from
    assert prediction.unquantized_share == pytest.approx(1 - in_layers / numbers)


def test_without_peft_no_adapter_is_there_and_full_training_is(monkeypatch):
    monkeypatch.setattr(extras, "find_spec", lambda name: None)
    assert "peft is not installed" in (extras.missing_package("adapter", "lora") or "")
    assert extras.missing_package("adapter", "none") is None
