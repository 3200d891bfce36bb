"""Layers computed together with their LoRA: the same numbers, from what they are said to keep."""

import copy
import dataclasses
import functools
import time

import pytest
import torch
from bitsandbytes.nn import Linear4bit, Linear8bitLt
from peft import AdaLoraConfig, LoraConfig, inject_adapter_in_model
from torch import nn
from transformers.models.falcon.modeling_falcon import FalconLinear
from transformers.models.llama.modeling_llama import LlamaConfig, LlamaMLP
from transformers.pytorch_utils import Conv1D

from autotune.execution.process.preparation import prepare
from autotune.execution.tasks import Prepare
from autotune.predictor.predict import predict
from autotune.shipped import fused_adapters
from autotune.shipped.fused_adapters import fuse_adapters
from autotune.spec.config import TrainingConfig
from autotune.spec.prediction import PredictionRequest
from autotune.spec.training_request import TrainingRequest
from autotune.training.trainer import Trainer
from tests.techniques.families import GLOBAL_BATCH, workload_of

ROWS, WIDTH, INNER = 24, 32, 48
LAYERS = ("gate_proj", "up_proj", "down_proj")


class Gated(LlamaMLP):
    """The feed-forward part of most models of transformers."""

    def __init__(self, activation="silu"):
        super().__init__(
            LlamaConfig(hidden_size=WIDTH, intermediate_size=INNER, hidden_act=activation)
        )


class Clamped(Gated):
    """Computes something else from layers of the same names."""

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)).clamp(max=0.1) * self.up_proj(x))


class Doubled(nn.Linear):
    """Computes something else than a linear layer."""

    def forward(self, input):
        return 2 * super().forward(input)


class Projections(nn.Module):
    """Three layers of one input, as queries, keys and values have."""

    def __init__(self, kind=nn.Linear):
        super().__init__()
        for name in LAYERS:
            setattr(self, name, kind(WIDTH, INNER))

    def forward(self, x):
        return self.gate_proj(x) + self.up_proj(x) + self.down_proj(x)


def adapted(model, **choices):
    torch.manual_seed(0)
    settings = LoraConfig(r=4, target_modules=list(LAYERS), init_lora_weights=False, **choices)
    model.requires_grad_(False)
    return inject_adapter_in_model(settings, model)


def fused(model):
    changed = copy.deepcopy(model)
    fuse_adapters(changed)
    return changed


def rows():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(2, ROWS // 2, WIDTH, generator=generator, requires_grad=True)


def trained(model, inputs):
    """The result, and the gradients of the inputs and of the adapters."""
    output = model(inputs)
    output.square().sum().backward()
    return [
        output.detach(),
        inputs.grad,
        *(one.grad for one in model.parameters() if one.grad is not None),
    ]


def kept_bytes(model, inputs):
    """Bytes of what the backward pass needs beside the weights and the input."""
    kept = {}

    def keep(tensor):
        held.append(tensor)
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    held = []
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = model(inputs)
    own = [inputs, output, *model.parameters()]
    return sum(kept.values()) - sum(kept.pop(one.untyped_storage().data_ptr(), 0) for one in own)


@pytest.mark.parametrize(
    "make",
    [Gated, functools.partial(Gated, "gelu_pytorch_tanh"), Clamped, Projections],
    ids=["silu", "gelu", "clamped", "one input"],
)
@pytest.mark.parametrize("precision", ["fp32", "bf16 autocast"])
def test_the_results_and_all_gradients_are_those_of_peft(make, precision):
    model = adapted(make())
    with torch.autocast("cpu", torch.bfloat16, enabled=precision != "fp32"):
        expected, found = (trained(one, rows()) for one in (model, fused(model)))
    assert len(expected) == len(found) == 2 + 2 * len(LAYERS)
    share = 1e-6 if precision == "fp32" else 2e-2
    for one, other in zip(expected, found, strict=True):
        assert (other - one).norm() <= share * one.norm()


def test_an_activation_is_the_same_a_few_rows_at_a_time(monkeypatch):
    model = fused(adapted(Gated()))
    whole = trained(copy.deepcopy(model), rows())
    monkeypatch.setattr(fused_adapters, "_NUMBERS_AT_ONCE", 5 * INNER)
    torch.testing.assert_close(trained(model, rows()), whole)


def test_layers_of_one_input_keep_nothing_else():
    assert kept_bytes(fused(adapted(Projections())), rows()) == 0


def test_a_feed_forward_part_keeps_the_two_inputs_of_its_activation_beside_its_own():
    assert kept_bytes(fused(adapted(Gated())), rows()) == 2 * ROWS * INNER * 4


def test_a_part_that_computes_something_else_keeps_what_its_own_code_does():
    assert kept_bytes(fused(adapted(Clamped())), rows()) > 2 * ROWS * INNER * 4


def test_layers_of_a_class_with_its_own_forward_stay_as_they_are():
    model = adapted(Projections(Doubled))
    assert [type(one) for one in fused(model).modules()] == [type(one) for one in model.modules()]


def four_bit_layer(*sizes):
    return Linear4bit(*sizes, compute_dtype=torch.float32, quant_type="nf4")


def eight_bit_layer(*sizes):
    return Linear8bitLt(*sizes, has_fp16_weights=False)


def of_four_bits(model):
    model.is_loaded_in_4bit = True
    return model.to("cpu")  # which quantizes


def of_eight_bits(model):
    model.is_loaded_in_8bit = True
    return model.to("cpu")


class Scaled(Doubled):
    """A layer of transformers that computes something else, as routers of experts do."""


Scaled.__module__ = "transformers.models.scaled.modeling_scaled"


def with_trained(name):
    def change(model):
        for path in LAYERS:
            getattr(model.get_submodule(path).base_layer, name).requires_grad_()
        return model

    return change


def with_another_adapter(model):
    inject_adapter_in_model(LoraConfig(r=2, target_modules=list(LAYERS)), model, "another")
    for layer in model.children():
        layer.set_adapter(["default", "another"])
    return model


def by_adalora(model):
    settings = AdaLoraConfig(target_modules=list(LAYERS), init_r=4, total_step=10)
    return inject_adapter_in_model(settings, model.requires_grad_(False))


def with_trained_activation(model):
    model.act_fn = nn.PReLU()
    return model


KINDS = {
    "Conv1D": lambda: adapted(Projections(lambda inputs, outputs: Conv1D(outputs, inputs))),
    "FalconLinear": lambda: adapted(Projections(FalconLinear)),
    "4 bits": lambda: adapted(of_four_bits(Projections(four_bit_layer))),
    "8 bits": lambda: adapted(of_eight_bits(Projections(eight_bit_layer))),
    "a class of its own": lambda: adapted(Projections(Doubled)),
    "a class of transformers": lambda: adapted(Projections(Scaled)),
    "DoRA": lambda: adapted(Projections(), use_dora=True),
    "DoRA, gated": lambda: adapted(Gated(), use_dora=True),
    "bias of LoRA": lambda: adapted(Projections(), lora_bias=True),
    "dropout": lambda: adapted(Projections(), lora_dropout=0.5),
    "dropout, gated": lambda: adapted(Gated(), lora_dropout=0.5),
    "dropout that is off": lambda: adapted(Gated(), lora_dropout=0.5).eval(),
    "trained weight": lambda: with_trained("weight")(adapted(Projections())),
    "trained weight, gated": lambda: with_trained("weight")(adapted(Gated())),
    "trained bias": lambda: with_trained("bias")(adapted(Projections())),
    "two adapters": lambda: with_another_adapter(adapted(Projections())),
    "AdaLoRA": lambda: by_adalora(Projections()),
    "trained activation": lambda: with_trained_activation(adapted(Gated())),
}


@pytest.mark.parametrize("kind", ["Conv1D", "FalconLinear", "4 bits"])
def test_a_layer_that_computes_a_product_keeps_nothing_but_its_input(kind):
    assert kept_bytes(fused(KINDS[kind]()), rows()) == 0


@pytest.mark.parametrize("shape", [(2, ROWS // 2, WIDTH), (ROWS, WIDTH), (WIDTH,)], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_any_kind_of_layer_computes_what_peft_does(kind, shape):
    model = KINDS[kind]()
    inputs = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    found = []
    for change in (lambda _: None, fuse_adapters):
        change(model)
        model.zero_grad()
        torch.manual_seed(2)  # of dropout
        own = inputs.clone().requires_grad_()
        output = model(own)
        output.square().sum().backward()
        gradients = {name: one.grad for name, one in model.named_parameters()}
        found.append({"output": output.detach(), "input": own.grad, **gradients})
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("make", [Gated, Projections])
def test_without_their_adapters_layers_are_the_models_own(make):
    plain = make()
    model = fused(adapted(copy.deepcopy(plain)))
    for layer in model.children():
        if hasattr(layer, "enable_adapters"):
            layer.enable_adapters(enabled=False)
    inputs = rows()
    torch.testing.assert_close(model(inputs), plain(inputs))


@pytest.fixture(scope="module")
def prepared_llama(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    workload = dataclasses.replace(workload_of("llama", folder), layers=2)
    prepare(Prepare(workload=workload, folder=folder / "prepared"))
    return workload, folder / "prepared"


@pytest.mark.parametrize(
    "choices",
    [
        {"precision": "bf16-mixed", "base_weights": "nf4"},
        *(
            pytest.param(choices, marks=pytest.mark.slow)
            for choices in (
                {},
                {"precision": "bf16-mixed", "base_weights": "bf16", "checkpointing": "block"},
                {"precision": "bf16-mixed", "base_weights": "int8"},
                {"precision": "bf16-true", "kernels": "liger"},
                {"compile": "block"},
            )
        ),
    ],
    ids=str,
)
def test_the_peak_is_predicted_to_the_byte(choices, prepared_llama):
    workload, folder = prepared_llama
    config = TrainingConfig(
        adapter="lora", adapter_kernels="fused", micro_batch_size=GLOBAL_BATCH, **choices
    )
    trainer = Trainer(
        TrainingRequest(
            workload=workload,
            config=config,
            folder=folder,
            device="cpu",
            cap_bytes=2**40,
            requested_at=time.monotonic(),
        )
    )
    batches = trainer.batches()
    for step in range(workload.warmup_steps):
        trainer.step(step, next(batches))
    with trainer._meter.measuring(trainer._resident_tensors):
        trainer.step(workload.warmup_steps, next(batches))
    predicted = predict(PredictionRequest(workload=workload, config=config, device="cpu"))
    assert predicted.peak_memory_bytes == trainer._meter.reading().peak_memory_bytes
