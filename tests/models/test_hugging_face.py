"""Models built by transformers: their parts are found, and every model technique applies."""

import copy
import json
import math
import sys

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from autotune.errors import IllegalConfiguration, InvalidInput
from autotune.models import build_model
from autotune.models.hugging_face import find_parts
from autotune.models.weights import Placement, draw_weights, load_model
from autotune.shipped.hugging_face import HuggingFaceModel
from autotune.spec.config import TrainingConfig
from autotune.spec.workload import make_workload
from autotune.techniques.checkpointing import checkpoint_in_blocks, checkpoint_segments
from autotune.techniques.compilation import compile_blocks, compile_model
from autotune.techniques.requirements import check_parts
from autotune.techniques.user_training import apply_to_user_training

LAYERS, CPU = 4, torch.device("cpu")
FLOAT32 = Placement(dtype=torch.float32, device=CPU)
BFLOAT16 = Placement(dtype=torch.bfloat16, device=CPU)
SIZES = {
    "num_hidden_layers": LAYERS,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "vocab_size": 256,
    "max_position_embeddings": 64,
}
GROUPED_QUERY = {"num_key_value_heads": 2, "head_dim": 8}
CONFIGS = {
    "llama": {"model_type": "llama", **SIZES, **GROUPED_QUERY, "dtype": "bfloat16"},
    "gpt2": {
        "model_type": "gpt2",
        "n_layer": LAYERS,
        "n_embd": 32,
        "n_head": 4,
        "vocab_size": 256,
        "n_positions": 64,
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
    },
    "qwen3": {
        "model_type": "qwen3",
        **SIZES,
        **GROUPED_QUERY,
        "vocab_size": 1000,
        "tie_word_embeddings": True,
    },
    "mixtral": {
        "model_type": "mixtral",
        **SIZES,
        **GROUPED_QUERY,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
}
PARTS = {
    "llama": ("layers", "self_attn"),
    "gpt2": ("h", "attn"),
    "qwen3": ("layers", "self_attn"),
    "mixtral": ("layers", "self_attn"),
}
MAMBA = {
    "model_type": "mamba",
    "num_hidden_layers": LAYERS,
    "hidden_size": 32,
    "state_size": 4,
    "vocab_size": 256,
}
"""A state-space model: it has no attention, and its config no heads."""
HYBRID = {
    "model_type": "jamba",
    **SIZES,
    "num_key_value_heads": 2,
    "attn_layer_period": 2,
    "attn_layer_offset": 1,
    "num_experts": 1,
    "num_experts_per_tok": 1,
    "mamba_d_state": 4,
    "mamba_dt_rank": 4,
    "use_mamba_kernels": False,
    "pad_token_id": 0,
}
"""Layers of two classes: with attention, and of a state space."""
MOSHI = {
    "model_type": "moshi",
    "audio_vocab_size": 64,
    **SIZES,
    "depth_decoder_config": {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "ffn_dim": 64,
    },
}
"""Its class changes the table in it."""
SLIDING = {
    "model_type": "gemma3_text",
    **SIZES,
    **GROUPED_QUERY,
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
EVERY_SHAPE = pytest.mark.parametrize("shape", CONFIGS)


@pytest.fixture
def workload_of(tmp_path):
    def workload(content, **settings):
        file = tmp_path / "config.json"
        file.write_text(json.dumps(content))
        return make_workload("cpu", {"model": str(file), "sequence_length": 32, **settings})

    return workload


@pytest.fixture
def make_parts(workload_of):
    """make_parts("llama") returns the parts of the model, always with the same weights."""

    def make(shape):
        torch.manual_seed(0)
        return build_model(workload_of(CONFIGS[shape] if isinstance(shape, str) else shape))

    return make


@pytest.fixture(scope="module")
def batch():
    torch.manual_seed(1)
    return tuple(torch.randint(0, 256, (2, 32)) for _ in range(2))


def loss_and_gradients(parts, batch):
    parameters = list(parts.model.parameters())
    loss = parts.model(*batch)
    return loss.item(), torch.autograd.grad(loss, parameters)


# -- the model -------------------------------------------------------------------------------------


@EVERY_SHAPE
def test_it_begins_close_to_the_loss_of_guessing(shape, make_parts, batch):
    loss = make_parts(shape).model(*batch)
    assert loss.dtype == torch.float32
    assert loss.item() / batch[0].numel() == pytest.approx(
        math.log(CONFIGS[shape]["vocab_size"]), rel=0.1
    )


@EVERY_SHAPE
def test_every_gradient_is_finite(shape, make_parts, batch):
    assert all(
        torch.isfinite(gradient).all()
        for gradient in loss_and_gradients(make_parts(shape), batch)[1]
    )


@EVERY_SHAPE
def test_its_parts_are_found(shape, make_parts):
    parts = make_parts(shape)
    assert len(parts.blocks) == LAYERS
    assert (parts.blocks_name, parts.attention_name) == PARTS[shape]


@EVERY_SHAPE
def test_loaded_it_computes_what_was_drawn(shape, workload_of, batch, tmp_path):
    workload = workload_of(CONFIGS[shape])
    count = draw_weights(workload, file=tmp_path / "weights.pt")
    loaded = load_model(workload, file=tmp_path / "weights.pt", placement=FLOAT32).model
    torch.manual_seed(workload.seed)
    assert loaded(*batch).item() == build_model(workload).model(*batch).item()
    assert count == sum(parameter.numel() for parameter in loaded.parameters())


@EVERY_SHAPE
def test_it_trains_wholly_in_bf16(shape, workload_of, batch, tmp_path):
    workload = workload_of(CONFIGS[shape])
    draw_weights(workload, file=tmp_path / "weights.pt")
    model = load_model(
        workload,
        file=tmp_path / "weights.pt",
        placement=BFLOAT16,
    ).model
    model(*batch).backward()
    assert {parameter.grad.dtype for parameter in model.parameters()} == {torch.bfloat16}


def test_tied_embeddings_stay_tied(workload_of, tmp_path):
    workload = workload_of(CONFIGS["qwen3"])
    count = draw_weights(workload, file=tmp_path / "weights.pt")
    network = load_model(
        workload,
        file=tmp_path / "weights.pt",
        placement=BFLOAT16,
    ).model.network
    assert network.lm_head.weight is network.model.embed_tokens.weight
    untied = {**CONFIGS["qwen3"], "tie_word_embeddings": False}
    assert draw_weights(workload_of(untied), file=tmp_path / "untied.pt") == count + 1000 * 32


def test_the_number_of_layers_can_be_set(workload_of):
    assert len(build_model(workload_of(SLIDING, layers=3)).blocks) == 3


@pytest.mark.parametrize("content", [CONFIGS["llama"], MOSHI], ids=["llama", "moshi"])
def test_the_stored_content_is_left_as_it_was(content, workload_of):
    workload = workload_of(content)
    before = copy.deepcopy(workload.model_config)
    with torch.device("meta"):
        build_model(workload)
    assert workload.model_config == before


@pytest.mark.parametrize("shape", ["llama", "gpt2", "qwen3"])
def test_a_causal_layer_gets_no_mask(shape, make_parts, batch, monkeypatch):
    masks = []
    kernel = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(
        torch.nn.functional,
        "scaled_dot_product_attention",
        lambda *args, attn_mask=None, **options: (
            masks.append(attn_mask) or kernel(*args, attn_mask=attn_mask, **options)
        ),
    )
    real = make_parts(shape).model
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = make_parts(shape).model
        masks.clear()  # those of its examination
        fake(*(mode.from_tensor(tensor) for tensor in batch))
    real(*batch)
    assert masks == [None] * 2 * LAYERS


def test_a_layer_with_a_window_gets_its_mask(make_parts, batch, monkeypatch):
    masks = []
    kernel = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(
        torch.nn.functional,
        "scaled_dot_product_attention",
        lambda *args, attn_mask=None, **options: (
            masks.append(attn_mask) or kernel(*args, attn_mask=attn_mask, **options)
        ),
    )
    model = make_parts(SLIDING).model
    masks.clear()  # those of its examination
    model(*batch)
    assert [mask is None for mask in masks] == [False, True] * 2
    assert masks[0][0, 0].sum(dim=1).tolist() == [min(row + 1, 8) for row in range(32)]


def test_experts_run_without_shapes_that_depend_on_data(make_parts):
    assert make_parts("mixtral").model.network.config._experts_implementation == "grouped_mm"


# -- techniques ------------------------------------------------------------------------------------


@EVERY_SHAPE
@pytest.mark.parametrize("granularity", ["attention", "selective", "every-2", "block", "sqrt"])
def test_checkpointing_leaves_loss_and_gradients_alone(granularity, shape, make_parts, batch):
    parts = make_parts(shape)
    checkpoint_in_blocks(parts, granularity)
    checkpoint_segments(parts, granularity)
    loss, gradients = loss_and_gradients(parts, batch)
    plain_loss, plain_gradients = loss_and_gradients(make_parts(shape), batch)
    assert loss == plain_loss
    assert all(torch.equal(*pair) for pair in zip(gradients, plain_gradients, strict=True))


def test_a_model_without_attention_trains_with_recomputed_blocks(make_parts, batch):
    parts = make_parts(MAMBA)
    assert (len(parts.blocks), parts.attention_name) == (LAYERS, None)
    checkpoint_in_blocks(parts, "block")
    loss, gradients = loss_and_gradients(parts, batch)
    plain_loss, plain_gradients = loss_and_gradients(make_parts(MAMBA), batch)
    assert loss == plain_loss
    assert all(torch.equal(*pair) for pair in zip(gradients, plain_gradients, strict=True))


def test_blocks_of_a_hybrid_model_are_found_though_their_classes_differ(make_parts, batch):
    parts = make_parts(HYBRID)
    assert len({type(block) for block in parts.blocks}) == 2
    assert (len(parts.blocks), parts.attention_name) == (LAYERS, None)
    with pytest.raises(IllegalConfiguration, match="sqrt"):
        check_parts(parts, TrainingConfig(checkpointing="sqrt"))
    checkpoint_in_blocks(parts, "block")
    assert parts.model(*batch).item() == make_parts(HYBRID).model(*batch).item()


def test_blocks_called_with_different_masks_are_never_run_as_one(make_parts, batch):
    parts = make_parts(SLIDING)
    with pytest.raises(IllegalConfiguration, match="sqrt"):
        check_parts(parts, TrainingConfig(checkpointing="sqrt"))
    checkpoint_in_blocks(parts, "block")
    assert parts.model(*batch).item() == make_parts(SLIDING).model(*batch).item()


@pytest.mark.parametrize(
    ("shape", "scope"),
    [
        pytest.param(
            shape, scope, marks=() if (shape, scope) == ("llama", "block") else pytest.mark.slow
        )
        for shape in CONFIGS
        for scope in ("block", "model")
    ],
)
@pytest.mark.parametrize("granularity", ["none", pytest.param("block", marks=pytest.mark.slow)])
def test_compiled_it_computes_the_same(granularity, shape, scope, compiler, make_parts, batch):
    parts = make_parts(shape)
    checkpoint_in_blocks(parts, granularity)
    compile_blocks(parts, scope)
    compile_model(parts, scope)
    loss, gradients = loss_and_gradients(parts, batch)
    plain_loss, plain_gradients = loss_and_gradients(make_parts(shape), batch)
    assert loss == pytest.approx(plain_loss, rel=1e-5)
    for gradient, plain in zip(gradients, plain_gradients, strict=True):
        assert torch.allclose(gradient, plain, rtol=1e-3, atol=1e-3)


# -- invalid models --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ({"model_type": "no_such_model", **SIZES}, "no_such_model"),
        ({"model_type": "vit", **SIZES}, "is of a vit model, which is no language model"),
        ({"model_type": "bert", **SIZES}, "encoder"),
        ({**CONFIGS["llama"], "num_key_value_heads": "two"}, "which is not a size"),
        ({**CONFIGS["llama"], "hidden_act": "no_such_function"}, "cannot build model llama-"),
        ({**CONFIGS["llama"], "num_key_value_heads": 3}, "fails in its first forward pass"),
    ],
)
def test_a_config_of_another_kind_of_model_is_rejected(content, named, workload_of, tmp_path):
    with pytest.raises(InvalidInput, match=named) as raised:
        draw_weights(workload_of(content), file=tmp_path / "weights.pt")
    assert raised.value.hint
    assert "\n" not in raised.value.message


def test_of_a_network_without_blocks_no_part_is_found():
    parts = find_parts(HuggingFaceModel(torch.nn.Linear(2, 2)))
    assert (parts.blocks_owner, parts.attention_name, parts.head) == (None, None, None)


def test_without_transformers_the_error_says_how_to_install_it(workload_of, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.delitem(sys.modules, "autotune.models.transformers_network", raising=False)
    monkeypatch.delattr("autotune.models.transformers_network", raising=False)
    with pytest.raises(InvalidInput, match="needs the transformers library") as raised:
        build_model(workload_of(CONFIGS["llama"]))
    assert "autotune[huggingface]" in raised.value.hint


@pytest.mark.parametrize("checkpointing", ["selective", "block"])
def test_a_script_whose_model_caches_keys_and_values_can_recompute_its_blocks(checkpointing):
    """Transformers' models fill a cache in each forward pass, unless their settings say not to."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    def gradients(**choices):
        torch.manual_seed(0)
        sizes = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 64}
        settings = LlamaConfig(**sizes, num_attention_heads=2, vocab_size=64)
        assert settings.use_cache
        model = AutoModelForCausalLM.from_config(settings)
        optimizer = torch.optim.AdamW(model.parameters())
        config = TrainingConfig(micro_batch_size=2, **choices)
        model, _ = apply_to_user_training(config, model, optimizer)
        tokens = torch.arange(2 * 16).view(2, 16)
        output = model(input_ids=tokens, labels=tokens)
        output.loss.backward()
        return output, [parameter.grad for parameter in model.parameters()]

    output, recomputed = gradients(checkpointing=checkpointing)
    assert output.past_key_values.get_seq_length() == 0
    _, plain = gradients()
    assert all(torch.equal(*pair) for pair in zip(recomputed, plain, strict=True))
