"""Decoder families of Hugging Face: parts found by structure, equal loss with checkpointing."""

import pytest
import torch

from autotune.models import build_model
from autotune.models.hugging_face import initialize
from autotune.spec.model_file import model_name
from autotune.spec.workload import make_workload
from autotune.techniques.checkpointing import checkpoint_in_blocks, checkpoint_segments
from autotune.techniques.requirements import missing_parts

LAYERS = 2
SIZES = {
    "num_hidden_layers": LAYERS,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "vocab_size": 257,  # an odd one
    "max_position_embeddings": 64,
}
GROUPED_QUERY = {"num_key_value_heads": 2}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
FAMILIES = {
    "llama": GROUPED_QUERY,
    "qwen2": GROUPED_QUERY,
    "qwen3": {**GROUPED_QUERY, "head_dim": 8, "tie_word_embeddings": True},
    "mistral": {**GROUPED_QUERY, "sliding_window": 8},
    "gemma": {**GROUPED_QUERY, "head_dim": 8},
    "gemma2": {**GROUPED_QUERY, "head_dim": 8, "sliding_window": 8},
    "gemma3_text": {**GROUPED_QUERY, "head_dim": 8, "sliding_window": 8},
    "gpt2": {"n_layer": LAYERS, "n_embd": 32, "n_head": 4, "n_positions": 64},  # with dropout
    "gpt_neox": {},
    "phi": {},
    "opt": {"ffn_dim": 64, "word_embed_proj_dim": 32},
    "mixtral": {**GROUPED_QUERY, "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {**GROUPED_QUERY, **EXPERTS, "shared_expert_intermediate_size": 32},
    "qwen3_moe": {**GROUPED_QUERY, **EXPERTS, "head_dim": 8},
}
LOGITS_ARE_CHANGED = ("gemma2",)


@pytest.fixture(params=FAMILIES)
def family(request):
    return request.param


@pytest.fixture
def make_parts(family):
    content = {"model_type": family, **SIZES, **FAMILIES[family]}
    sizes = {"layers": LAYERS, "width": 32, "heads": 4, "vocab_size": 257, "sequence_length": 32}
    workload = make_workload(
        "cpu", {"model": model_name(content), "model_config": content, **sizes}
    )

    def make():
        torch.manual_seed(0)
        return build_model(workload)

    return make


def loss_and_gradients(parts):
    torch.manual_seed(1)
    tokens, labels = torch.randint(0, 257, (2, 2, 32))
    loss = parts.model(tokens, labels)
    return loss.item(), torch.autograd.grad(loss, list(parts.model.parameters()))


@pytest.mark.slow
def test_its_blocks_attention_and_head_are_found(make_parts, family):
    with torch.device("meta"):
        parts = make_parts()
    assert len(parts.blocks) == LAYERS
    missing = missing_parts(parts, {"checkpointing": ["attention"], "loss": ["chunked"]})
    assert set(missing) == ({"loss"} if family in LOGITS_ARE_CHANGED else set())


def test_no_token_sees_a_later_one(make_parts):
    initialize(make_parts().model)


@pytest.mark.parametrize("granularity", ["attention", "block", "sqrt"])
def test_checkpointing_leaves_loss_and_gradients_alone(granularity, make_parts):
    parts = make_parts()
    if granularity == "sqrt" and not parts.blocks_are_called_alike:
        pytest.skip("its blocks take different masks")
    checkpoint_in_blocks(parts, granularity)
    checkpoint_segments(parts, granularity)
    loss, gradients = loss_and_gradients(parts)
    plain_loss, plain_gradients = loss_and_gradients(make_parts())
    assert loss == plain_loss
    assert all(torch.equal(*pair) for pair in zip(gradients, plain_gradients, strict=True))
