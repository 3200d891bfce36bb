"""The attention backend: the selected kernel runs, also in a recomputation."""

import pytest
import torch

from autotune.techniques import attention
from autotune.techniques.attention import AttentionCall, CallsOfAttention
from tests.techniques.operators import operators_in_a_step

LAYERS = 4
FLASH_ON_CPU = "_scaled_dot_product_flash_attention_for_cpu"
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _every_kernel_again():
    yield
    attention.set_attention_backend("auto")


@pytest.mark.parametrize("checkpointing", ["none", "attention", "block"])
def test_math_runs_no_fused_kernel_in_forward_or_recomputation(checkpointing, make_trainer):
    count = operators_in_a_step(make_trainer(attention="math", checkpointing=checkpointing))
    passes = 1 if checkpointing == "none" else 2
    assert (count[FLASH_ON_CPU], count["_softmax"] + count["_safe_softmax"]) == (0, passes * LAYERS)


def test_flash_runs_the_fused_kernel(make_trainer):
    assert (
        operators_in_a_step(make_trainer(attention="flash", precision="bf16-mixed"))[FLASH_ON_CPU]
        == LAYERS
    )


def test_selective_checkpointing_stores_the_products_of_plain_attention(make_trainer):
    plain = operators_in_a_step(make_trainer(attention="math"))
    selective = operators_in_a_step(make_trainer(attention="math", checkpointing="selective"))
    assert selective["bmm"] == plain["bmm"]


def test_every_kernel_is_enabled_for_the_next_training(make_trainer):
    make_trainer(attention="math")
    assert operators_in_a_step(make_trainer())[FLASH_ON_CPU] == LAYERS


@pytest.mark.parametrize("value", ["auto", "flash", "math"])
def test_a_backend_that_works_is_available(value):
    assert attention.unavailable(value, device=CPU) is None


@pytest.mark.parametrize("value", ["efficient", "cudnn"])
def test_a_backend_of_cuda_is_unavailable_on_a_cpu(value):
    assert attention.unavailable(value, device=CPU)


def test_every_kernel_is_enabled_after_a_backend_was_tried():
    attention.unavailable("math", device=CPU)
    assert torch.backends.cuda.flash_sdp_enabled()


def call(**features):
    return AttentionCall(query=(1, 4, 8, 16), key=(1, 4, 8, 16), value=(1, 4, 8, 16), **features)


@pytest.mark.parametrize(
    ("features", "words"),
    [
        ({"dropout": 0.1}, "dropout 0.1"),
        ({"mask": (4, 8, 8), "mask_is_trained": True}, "trained mask"),
    ],
)
def test_calls_that_flash_does_not_support_are_named(features, words):
    assert words in attention.unavailable("flash", device=CPU, call=call(**features))


def test_math_supports_every_call():
    features = {"mask": (4, 8, 8), "mask_is_trained": True, "dropout": 0.1}
    assert attention.unavailable("math", device=CPU, call=call(**features)) is None


def test_calls_are_collected_with_their_properties():
    query, key = torch.zeros(2, 4, 8, 16), torch.zeros(2, 2, 8, 16)
    with CallsOfAttention() as seen:
        torch.nn.functional.scaled_dot_product_attention(
            query, key, key, is_causal=True, enable_gqa=True
        )
    assert list(seen.calls) == [
        AttentionCall(
            query=(2, 4, 8, 16),
            key=(2, 2, 8, 16),
            value=(2, 2, 8, 16),
            is_causal=True,
            enable_gqa=True,
        )
    ]
