"""The default model computes what its docstring says."""

import pytest
import torch

from autotune.models import build_model
from autotune.shipped.gpt import rotary_table, rotate
from autotune.spec.workload import make_workload


def test_rotation_keeps_lengths():
    table = rotary_table(sequence_length=16, head_size=8)
    x = torch.randn(1, 2, 16, 8)
    assert torch.allclose(rotate(x, table).norm(dim=-1), x.norm(dim=-1), atol=1e-5)


def test_rotated_products_depend_on_the_distance_only():
    table = rotary_table(sequence_length=16, head_size=8)
    query, key = torch.randn(8).expand(1, 1, 16, 8), torch.randn(8).expand(1, 1, 16, 8)
    products = rotate(query, table) @ rotate(key, table).transpose(-1, -2)
    assert torch.allclose(products[0, 0].diagonal(3), products[0, 0, 0, 3].expand(13), atol=1e-5)


def test_the_default_cpu_model_has_about_a_million_parameters():
    with torch.device("meta"):
        model = build_model(make_workload("cpu")).model
    assert sum(p.numel() for p in model.parameters()) == 1_271_424


def test_the_default_cuda_model_has_about_120_million_parameters():
    with torch.device("meta"):
        model = build_model(make_workload("cuda")).model
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(120e6, rel=0.06)
