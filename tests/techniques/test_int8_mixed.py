"""Products in 8-bit integers: within their precision, the same layers, and the published scheme."""

import copy

import pytest
import torch
from torch import nn

from autotune.models.weights import draw_weights
from autotune.predictor.predict import predict
from autotune.shipped import int8
from autotune.shipped.int8 import Int8Linear, can_be_int8, quantized_rows, use_int8
from autotune.spec.config import TrainingConfig
from autotune.spec.parity import largest_difference
from autotune.spec.prediction import PredictionRequest
from autotune.spec.workload import make_workload
from autotune.techniques import find_unavailable
from tests.building.gloo_ranks import on_ranks
from tests.techniques.test_sharding import train
from tests.training.test_parity_watch import trace_of

CPU = torch.device("cpu")


def step_of(layer, rows, *, autocast):
    """Returns output, gradient of the input and gradients of the parameters."""
    rows = rows.clone().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        output = layer(rows)
    output.float().square().sum().backward()
    return [output.detach(), rows.grad, *(one.grad for one in layer.parameters())]


def relative(found, expected):
    found, expected = found.detach().float(), expected.detach().float()
    return float((found - expected).norm() / expected.norm())


@pytest.fixture
def layers():
    """A layer, and a copy that uses int8."""
    torch.manual_seed(0)
    layer = nn.Linear(64, 48)
    converted = copy.deepcopy(layer)
    use_int8(converted)
    return layer, converted


@pytest.mark.parametrize("autocast", [False, True])
def test_output_and_gradients_are_within_8_bits_by_row(layers, autocast):
    rows = torch.randn(2, 24, 64)
    exact, found = (step_of(layer, rows, autocast=autocast) for layer in layers)
    for one, expected in zip(found, exact, strict=True):
        assert one.shape == expected.shape
        assert one.dtype == expected.dtype
        # A row of normal numbers is rounded by a share of its largest: 1 / (127 sqrt(12)) of 2.5
        # standard deviations, in both factors.
        assert relative(one, expected) < 0.02
    assert relative(found[0], exact[0]) > 0.002


def test_a_row_is_as_exact_whatever_the_size_of_the_others(layers):
    layer, converted = layers
    rows = torch.randn(32, 64)
    rows[::2] *= 1e4
    found, exact = converted(rows), layer(rows)
    assert relative(found[1::2], exact[1::2]) < 0.02


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_is_its_integers_times_its_scale(dtype):
    torch.manual_seed(0)
    matrix = torch.randn(8, 32).to(dtype)
    matrix[3] = 0
    integers, scales = quantized_rows(matrix.t())
    assert integers.dtype == torch.int8
    assert integers.is_contiguous()
    largest = matrix.t().float().abs().amax(dim=1)
    assert integers.abs().amax(dim=1).tolist() == [127] * 32
    assert scales[:, 0].tolist() == pytest.approx((largest / 127).tolist())
    assert torch.all((integers * scales - matrix.t()).abs() <= scales / 2 * 1.0001)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_number_that_is_not_finite_stays_so(layers, value):
    rows = torch.randn(4, 64)
    rows[1, 5] = value
    output = layers[1](rows)
    assert not output[1].isfinite().any()
    assert output[[0, 2, 3]].isfinite().all()


def test_products_are_those_of_torchao():
    scheme = pytest.importorskip("torchao.prototype.quantized_training.int8_mixed_precision")
    torch.manual_seed(0)
    layer = nn.Linear(64, 48, bias=False)
    theirs = copy.deepcopy(layer)
    config = scheme.Int8MixedPrecisionTrainingConfig(module_swap=True)
    theirs = scheme._int8_mixed_precision_training_transform(theirs, config)
    use_int8(layer)
    rows = torch.randn(32, 64)
    ours = step_of(layer, rows, autocast=False)
    for one, expected in zip(ours, step_of(theirs, rows, autocast=False), strict=True):
        # It multiplies by the inverse of a scale: a few numbers are rounded to the other side.
        assert relative(one, expected) < 1e-3


@pytest.mark.parametrize(
    ("layer", "fits"),
    [
        (nn.Linear(32, 48), True),
        (nn.Linear(32, 40), False),
        (nn.Linear(40, 32), False),
        (nn.modules.linear.NonDynamicallyQuantizableLinear(32, 32), False),
        (nn.Embedding(32, 32), False),
    ],
    ids=str,
)
def test_only_plain_layers_of_multiples_of_16_use_int8(layer, fits):
    assert can_be_int8(layer) == fits


def test_parameters_and_names_stay_and_the_head_is_not_changed(make_trainer):
    plain = make_trainer(precision="bf16-mixed").training.parts.model
    parts = make_trainer(precision="int8-mixed").training.parts
    names = {name: weight.dtype for name, weight in parts.model.named_parameters()}
    assert names == {name: weight.dtype for name, weight in plain.named_parameters()}
    assert list(parts.model.state_dict()) == list(plain.state_dict())
    assert type(parts.head) is nn.Linear
    assert all(
        type(layer) is Int8Linear
        for block in parts.blocks
        for layer in block.modules()
        if isinstance(layer, nn.Linear)
    )


def test_a_cpu_has_it_and_a_device_without_the_product_says_why(monkeypatch):
    assert find_unavailable({"precision": ["int8-mixed"]}, device=CPU) == {}

    def not_here(*_):
        raise RuntimeError("_int_mm is not available")

    monkeypatch.setattr(torch, "_int_mm", not_here)
    found = find_unavailable({"precision": ["int8-mixed"]}, device=CPU)
    assert found == {"precision": {"int8-mixed": "_int_mm is not available"}}


@pytest.fixture
def difference_of(make_trainer):
    """How far int8-mixed is from bf16-mixed, for parity."""

    def difference():
        reference = trace_of(make_trainer(precision="bf16-mixed"))
        found = trace_of(make_trainer(precision="int8-mixed"))
        return largest_difference(found, reference, precision="int8-mixed")

    return difference


def test_it_trains_as_bf16_mixed_does(difference_of):
    assert difference_of().multiple < 0.5


@pytest.mark.parametrize(
    "wrong",
    [
        lambda first, second, product: product * 1.5,
        lambda first, second, product: product.roll(1, 0),
        lambda first, second, product: product / second.abs().amax(dim=1),
    ],
    ids=["a scale is too large", "rows are of others", "a scale is missing"],
)
def test_a_wrong_product_is_another_training(difference_of, monkeypatch, wrong):
    right = int8._product

    def product(first, second, *, dtype):
        return wrong(first, second, right(first, second, dtype=dtype)).to(dtype)

    monkeypatch.setattr(int8, "_product", product)
    assert difference_of().is_outside


@pytest.mark.parametrize("compute_capability", ["8.6", "9.0"])
def test_on_a_gpu_its_products_count_as_those_of_16_bits_do(compute_capability):
    workload = make_workload("cuda", {"layers": 2, "width": 64, "heads": 2, "global_batch": 4})

    def flops_of(precision):
        config = TrainingConfig(precision=precision, micro_batch_size=4)
        return predict(
            PredictionRequest(
                workload=workload,
                config=config,
                device="cuda",
                compute_capability=compute_capability,
            )
        ).flops_per_token

    assert flops_of("int8-mixed") == flops_of("bf16-mixed")


def workload_of(devices):
    sizes = {"layers": 2, "width": 64, "heads": 2, "vocab_size": 257, "sequence_length": 32}
    settings = {**sizes, "global_batch": 8, "devices_per_trial": devices}
    return make_workload("cpu", settings)


def losses_of_rank(rank, folder, sharding):
    config = TrainingConfig(precision="int8-mixed", sharding=sharding, micro_batch_size=4)
    losses, _, _ = train(config, workload_of(2), folder)
    torch.distributed.destroy_process_group()
    return losses


@pytest.mark.slow
@pytest.mark.parametrize("sharding", ["ddp", "zero3"])
def test_two_processes_train_as_one_does(sharding, tmp_path):
    draw_weights(workload_of(1), file=tmp_path / "weights.pt")
    config = TrainingConfig(precision="int8-mixed", micro_batch_size=8)
    alone, _, _ = train(config, workload_of(1), tmp_path)
    # Gradients of weights have scales of the tokens of a process.
    for losses in on_ranks(2, losses_of_rank, tmp_path, sharding):
        assert losses == pytest.approx(alone, rel=5e-3)
