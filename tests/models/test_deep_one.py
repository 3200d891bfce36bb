"""Deep One is the model of the table: its size, attention bias and initial weights."""

import dataclasses

import pytest
import torch

from autotune.models import build_model, deep_one
from autotune.shipped import deep_one as layers
from autotune.spec.workload import make_workload

FULL_SIZE = {
    "model": "deep-one",
    "layers": 32,
    "width": 2048,
    "heads": 16,
    "vocab_size": 8000,
    "sequence_length": 768,
}


@pytest.fixture
def model(workload):
    torch.manual_seed(0)
    model = deep_one.build(dataclasses.replace(workload, model="deep-one"))
    layers.initialize(model)
    return model


def test_the_full_size_has_the_parameters_of_the_table():
    with torch.device("meta"):
        model = build_model(make_workload("cpu", FULL_SIZE)).model
    assert sum(parameter.numel() for parameter in model.parameters()) == 1_631_455_744


@pytest.mark.parametrize(("width", "inner"), [(2048, 5400), (1024, 2704), (128, 336), (2, 8)])
def test_the_inner_size_is_in_proportion_to_the_table(width, inner):
    assert layers.default_feed_forward_width(width) == inner


def test_slopes_start_between_a_half_and_a_256th_and_are_zero_in_the_upper_half():
    slopes = layers.initial_slopes(16)
    assert slopes[0] == 0.5
    assert slopes[7].item() == pytest.approx(2 ** -(1 + 7 * 7 / 15))
    assert slopes[8:].tolist() == [0.0] * 8


def test_the_bias_given_to_the_kernel_falls_with_the_distance(model, monkeypatch):
    given = []
    kernel = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(
        torch.nn.functional,
        "scaled_dot_product_attention",
        lambda *args, attn_mask: given.append(attn_mask) or kernel(*args, attn_mask=attn_mask),
    )
    tokens = torch.zeros(1, 5, dtype=torch.int64)
    model(tokens, tokens)
    slope = model.blocks[0].attention.slopes[0].item()
    assert [bias.shape for bias in given] == [(2, 5, 5)] * 4
    assert given[0][0, 3].tolist() == pytest.approx(
        [-3 * slope, -2 * slope, -slope, 0.0, float("-inf")]
    )
    assert given[0][1, 3].tolist() == [0.0, 0.0, 0.0, 0.0, float("-inf")]


def test_the_bias_has_the_dtype_of_the_query(model, monkeypatch):
    dtypes = []
    kernel = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(
        torch.nn.functional,
        "scaled_dot_product_attention",
        lambda query, *args, attn_mask: (
            dtypes.append((query.dtype, attn_mask.dtype))
            or kernel(query, *args, attn_mask=attn_mask)
        ),
    )
    tokens = torch.zeros(1, 5, dtype=torch.int64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(tokens, tokens)
    model.to(torch.bfloat16)(tokens, tokens)
    assert set(dtypes) == {(torch.bfloat16, torch.bfloat16)}


def test_every_slope_is_trained(model):
    tokens = torch.randint(0, 256, (2, 16))
    model(tokens, tokens).backward()
    assert all((block.attention.slopes.grad != 0).all() for block in model.blocks)


def test_initial_matrices_have_the_bounds_of_xavier(model):
    width, inner = 32, model.blocks[0].feed_forward.up.out_features
    block, bound = model.blocks[0], (6 / (2 * width)) ** 0.5
    for matrix in (block.attention.query, block.attention.key):
        assert bound / 2 < matrix.weight.abs().max() <= bound
    for matrix in (block.attention.value, block.attention.output):
        assert bound / 8 < matrix.weight.abs().max() <= bound / 4
    bound = (6 / (width + inner)) ** 0.5
    for matrix in (block.feed_forward.up, block.feed_forward.gate, block.feed_forward.down):
        assert bound / 8 < matrix.weight.abs().max() <= bound / 4


def test_the_embedding_starts_at_one_over_the_root_of_the_width_and_padding_at_zero(model):
    weight = model.embedding.weight
    assert weight.std().item() == pytest.approx(32**-0.5, rel=0.05)
    assert (weight == 0).all(dim=1).nonzero().flatten().tolist() == [layers.PADDING_TOKEN]


def test_a_block_ends_in_a_norm(model):
    offsets, causal = layers.relative_positions(5, device=torch.device("cpu"))
    out = model.blocks[0](100 * torch.randn(1, 5, 32), offsets, causal)
    assert out.square().mean(dim=-1).flatten().tolist() == pytest.approx([1.0] * 5, rel=1e-3)
