"""Initial weights: the same for every trial, in the dtype that is trained."""

import pytest
import torch

from autotune.models.weights import Placement, draw_weights, load_model

CPU = torch.device("cpu")
FLOAT32 = Placement(dtype=torch.float32, device=CPU)
BFLOAT16 = Placement(dtype=torch.bfloat16, device=CPU)


@pytest.fixture
def file(workload, tmp_path):
    draw_weights(workload, file=tmp_path / "weights.pt")
    return tmp_path / "weights.pt"


def test_the_same_seed_draws_the_same_weights(workload, file, tmp_path):
    draw_weights(workload, file=tmp_path / "again.pt")
    first, second = torch.load(file), torch.load(tmp_path / "again.pt")
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_every_parameter_and_buffer_is_loaded(workload, file):
    model = load_model(workload, file=file, placement=FLOAT32).model
    drawn = torch.load(file)
    loaded = dict([*model.named_parameters(), *model.named_buffers()])
    assert loaded.keys() == drawn.keys()
    assert all(torch.equal(loaded[name], drawn[name]) for name in drawn)


def test_weights_are_cast_and_buffers_stay(workload, file):
    model = load_model(workload, file=file, placement=BFLOAT16).model
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert {b.dtype for b in model.buffers()} == {torch.float32}


def test_training_does_not_write_to_the_file(workload, file):
    before = file.read_bytes()
    model = load_model(workload, file=file, placement=FLOAT32).model
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    assert file.read_bytes() == before


def test_the_number_of_parameters_is_returned(workload, file, tmp_path):
    count = draw_weights(workload, file=tmp_path / "again.pt")
    model = load_model(workload, file=file, placement=FLOAT32).model
    assert count == sum(p.numel() for p in model.parameters())
