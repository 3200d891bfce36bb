"""What a device is tried with: a product that is wrong is named before any trial has it."""

import pytest
import torch
from torch import nn

from autotune.shipped import int8
from autotune.shipped.fp8 import convert
from autotune.spec.config import QUANTIZED_WEIGHTS
from autotune.techniques import base_weights, find_unavailable
from autotune.techniques.tried_layer import why_wrong

CPU = torch.device("cpu")


@pytest.mark.parametrize("value", QUANTIZED_WEIGHTS)
def test_a_wrong_kernel_of_base_weights_is_named(value, monkeypatch):
    assert base_weights.unavailable(value, device=CPU) is None
    right = base_weights.quantize

    def shifted(weight, value, *, dequantized):
        return right(nn.Parameter(weight.roll(1, 0)), value, dequantized=dequantized)

    monkeypatch.setattr(base_weights, "quantize", shifted)
    found = base_weights.unavailable(value, device=CPU)
    assert found.endswith("off that of a product in 32 bits")


@pytest.mark.parametrize("wrong", [lambda one: one * 1.5, lambda one: one.roll(1, 0)])
def test_a_wrong_product_of_integers_is_named(wrong, monkeypatch):
    right = int8._product
    monkeypatch.setattr(int8, "_product", lambda *args, dtype: wrong(right(*args, dtype=dtype)))
    found = find_unavailable({"precision": ["int8-mixed"]}, device=CPU)
    assert "output of a layer is" in found["precision"]["int8-mixed"]


def test_a_wrong_gradient_of_weights_is_named(monkeypatch):
    right = int8._Int8Product.backward

    def backward(ctx, gradient):
        of_inputs, of_weight = right(ctx, gradient)
        return of_inputs, of_weight * 0

    monkeypatch.setattr(int8._Int8Product, "backward", staticmethod(backward))
    found = find_unavailable({"precision": ["int8-mixed"]}, device=CPU)
    assert "weight gradient of a layer is 100% off" in found["precision"]["int8-mixed"]


def test_a_gradient_that_is_wrong_is_named_where_the_output_is_right():
    class Halved(nn.Linear):
        def forward(self, rows):
            return super().forward((rows + rows.detach()) / 2)

    layer = Halved(64, 64, bias=False)
    assert why_wrong(layer, layer.weight.detach()) == (
        "the gradient of a layer is 50% off that of a product in 32 bits"
    )


def test_products_in_fp8_are_within_what_is_allowed():
    pytest.importorskip("torchao")
    plain = nn.Linear(64, 64, bias=False)
    layer = convert(nn.Sequential(plain), emulate=True)
    assert why_wrong(layer, plain.weight.detach()) is None
