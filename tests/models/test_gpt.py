"""The built-in model computes what its description says."""

import math

import pytest
import torch

from autotune.models import MODELS, build_model
from autotune.models.gpt import rotary_table, rotate


@pytest.fixture
def model(workload):
    torch.manual_seed(0)
    model = build_model(workload).model
    MODELS["gpt"].initialize(model)
    return model


def tokens_like(workload, *, batch=2):
    return torch.randint(0, workload.vocab_size, (batch, workload.sequence_length))


def test_the_loss_is_a_sum_over_tokens_in_float32(model, workload):
    tokens, labels = tokens_like(workload), tokens_like(workload)
    halves = [model(tokens[i : i + 1], labels[i : i + 1]) for i in range(2)]
    whole = model(tokens, labels)
    assert whole.dtype == torch.float32
    assert whole.item() == pytest.approx(sum(half.item() for half in halves), rel=1e-5)


def test_ignored_labels_do_not_count(model, workload):
    tokens, labels = tokens_like(workload, batch=1), tokens_like(workload, batch=1)
    masked = labels.clone()
    masked[:, 10:] = -100
    assert model(tokens, masked).item() == pytest.approx(10 * math.log(workload.vocab_size), rel=0.1)


def test_no_position_sees_a_later_one(model, workload):
    tokens, labels = tokens_like(workload, batch=1), torch.full((1, workload.sequence_length), -100)
    labels[:, 5] = 7
    changed = tokens.clone()
    changed[:, 6:] = (changed[:, 6:] + 1) % workload.vocab_size
    assert model(tokens, labels).item() == model(changed, labels).item()


def test_rotation_keeps_lengths():
    table = rotary_table(sequence_length=16, head_size=8)
    x = torch.randn(1, 2, 16, 8)
    assert torch.allclose(rotate(x, table).norm(dim=-1), x.norm(dim=-1), atol=1e-5)


def test_rotated_products_depend_on_the_distance_only():
    table = rotary_table(sequence_length=16, head_size=8)
    query, key = torch.randn(8).expand(1, 1, 16, 8), torch.randn(8).expand(1, 1, 16, 8)
    products = rotate(query, table) @ rotate(key, table).transpose(-1, -2)
    assert torch.allclose(products[0, 0].diagonal(3), products[0, 0, 0, 3].expand(13), atol=1e-5)


def test_the_names_that_can_be_asked_for_are_those_of_the_registry():
    from autotune.workload import MODEL_NAMES

    assert tuple(MODELS) == MODEL_NAMES


@pytest.mark.parametrize("name", MODELS)
def test_every_model_finds_its_parts(name, workload):
    import dataclasses

    parts = build_model(dataclasses.replace(workload, model=name))
    assert len(parts.blocks) == workload.layers
    assert all(isinstance(getattr(block, parts.attention_name), torch.nn.Module) for block in parts.blocks)


def test_the_default_cpu_model_has_about_a_million_parameters():
    from autotune.workload import make_workload

    with torch.device("meta"):
        model = build_model(make_workload("cpu")).model
    assert sum(p.numel() for p in model.parameters()) == 1_271_424


def test_the_default_cuda_model_has_about_120_million_parameters():
    from autotune.workload import make_workload

    with torch.device("meta"):
        model = build_model(make_workload("cuda")).model
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(120e6, rel=0.06)
