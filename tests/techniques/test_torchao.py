"""Techniques of torchao: AdamW with its state in 8 or 4 bits or in fp8, and products in fp8."""

import importlib.util

import pytest
import torch
from torch import nn

from autotune.shipped.fp8 import can_be_fp8, convert
from autotune.techniques import extras, find_unavailable, fp8
from autotune.techniques.optimizer_fusion import UpdateRule, make_updater

CPU = torch.device("cpu")
OPTIMIZERS = ["adamw-8bit", "adamw-fp8", "adamw-4bit"]


@pytest.fixture
def eager_updates():
    """Disables the compilation of torchao's update, which is slow; the arithmetic is the same."""
    torch.compiler.set_stance("force_eager")
    yield
    torch.compiler.set_stance("default")


@pytest.fixture
def without_torchao(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(extras, "find_spec", lambda name: None if name == "torchao" else find(name))


def rule(**choices):
    return UpdateRule(
        **{"optimizer": "adamw-8bit", "fusion": "none", "learning_rate": 1e-3, **choices}
    )


@pytest.mark.usefixtures("eager_updates")
@pytest.mark.parametrize(
    ("optimizer", "bits", "numbers_of_a_scale", "table"),
    [
        ("adamw-8bit", 8, 256, 256 * 4),
        ("adamw-fp8", 8, 256, 0),
        ("adamw-4bit", 4, 128, 16 * 4),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_state_takes_its_bits_and_a_scale_for_many_numbers(
    optimizer, bits, numbers_of_a_scale, table, dtype
):
    weight = nn.Parameter(torch.ones(128, 128, dtype=dtype))
    updater = make_updater([weight], rule(optimizer=optimizer))
    weight.square().sum().backward()
    updater.step()
    size_bytes = sum(tensor.untyped_storage().nbytes() for tensor in updater.state())
    numbers, step = 128 * 128, 4
    codes, scales = numbers * bits // 8, 4 * numbers // numbers_of_a_scale
    assert size_bytes == 2 * (codes + scales + table) + step


@pytest.mark.slow
@pytest.mark.usefixtures("eager_updates")
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("fusion", ["none", "backward"])
def test_adamw_in_8_bits_stays_close_to_adamw(fusion, optimizer, losses_of):
    eight_bits = losses_of(steps=12, optimizer=optimizer, optimizer_fusion=fusion)
    tolerance = 1e-2 if optimizer == "adamw-4bit" else 2e-3
    assert eight_bits == pytest.approx(losses_of(steps=12), rel=tolerance)
    assert eight_bits != losses_of(steps=12)


@pytest.mark.slow
@pytest.mark.usefixtures("eager_updates")
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_adapters_are_trained(optimizer, losses_of):
    losses = losses_of(steps=12, optimizer=optimizer, adapter="lora", precision="bf16-true")
    assert losses[-1] < losses[0]


@pytest.mark.usefixtures("eager_updates")
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_learning_rate_can_change_every_step(optimizer):
    weight = nn.Parameter(torch.ones(64, 64))
    updater = make_updater([weight], rule(optimizer=optimizer, learning_rate=1.0))
    updater.set_learning_rate(0.0)
    weight.square().sum().backward()
    updater.step()
    assert (weight == 1.0).all()


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_compiled_update_learns(optimizer, losses_of):
    losses = losses_of(steps=24, optimizer=optimizer)
    assert losses[-1] < losses[0] - 0.1


@pytest.mark.usefixtures("without_torchao")
def test_without_torchao_all_are_excluded_with_what_to_install():
    found = find_unavailable({"precision": ["fp8"], "optimizer": OPTIMIZERS}, device=CPU)
    assert list(found["optimizer"]) == OPTIMIZERS
    reasons = [*found["optimizer"].values(), *found["precision"].values()]
    assert all('pip install "autotune[torchao]"' in reason for reason in reasons)


@pytest.mark.parametrize(
    ("layer", "fits"),
    [
        (nn.Linear(32, 48), True),
        (nn.Linear(32, 40), False),
        (nn.Linear(40, 32), False),
        (nn.Embedding(32, 32), False),
    ],
    ids=str,
)
def test_only_matrices_of_multiples_of_16_are_multiplied_in_fp8(layer, fits):
    assert can_be_fp8(layer) == fits


def test_a_product_in_fp8_is_within_its_precision():
    torch.manual_seed(0)
    layer, x = nn.Sequential(nn.Linear(64, 64, bias=False)), torch.randn(32, 64)
    exact = layer(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        product = convert(layer, emulate=True)(x).float()
    error = (product - exact).norm() / exact.norm()
    assert 0.005 < error < 0.06  # a mantissa of 3 bits rounds each factor by up to 6 %


def test_conversion_preserves_the_parameters_and_does_not_change_the_head(make_trainer):
    parts = make_trainer().training.parts
    before = {name: id(parameter) for name, parameter in parts.model.named_parameters()}
    fp8.convert_blocks(parts, "fp8", emulate=True)
    assert {name: id(parameter) for name, parameter in parts.model.named_parameters()} == before
    assert type(parts.head) is nn.Linear
    assert type(parts.blocks[0].feed_forward.gate).__name__ == "Float8Linear"


def test_fp8_trains_like_bf16_mixed_within_its_precision(losses_of):
    if reason := fp8.unavailable(device=CPU):
        pytest.skip(reason)
    fp8_losses, mixed = (
        losses_of(steps=6, precision="fp8"),
        losses_of(steps=6, precision="bf16-mixed"),
    )
    assert fp8_losses == pytest.approx(mixed, rel=2e-2)
    assert fp8_losses != mixed
