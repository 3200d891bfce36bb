"""What Liger's kernels replace, what is kept then, and that the same is computed.

Without a GPU plain torch stands for the package (`techniques/liger_in_torch.py`).
"""

import copy
import dataclasses
import time

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from autotune.execution.process.preparation import prepare
from autotune.execution.tasks import Prepare
from autotune.models import build_model
from autotune.predictor.predict import predict
from autotune.spec.config import TrainingConfig
from autotune.spec.prediction import PredictionRequest
from autotune.spec.training_request import TrainingRequest
from autotune.techniques.kernels import _FAMILIES, set_kernels, why_not
from autotune.techniques.liger_in_torch import replace_in_torch, replaced_modules
from autotune.training.trainer import Trainer
from tests.techniques.families import GLOBAL_BATCH, workload_of

ROWS, WIDTH, INNER, LAYERS = 24, 32, 48, 2


def model_of(kind, *, dtype=torch.float32):
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        kind,
        num_hidden_layers=LAYERS,
        hidden_size=WIDTH,
        intermediate_size=INNER,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        vocab_size=64,
        **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 0),
    )
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager").to(dtype).train()


def kept_bytes(model, tokens):
    """Returns the loss, and the bytes of what its backward pass needs beside the weights."""
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        held.append(tensor)
        return tensor

    held = []
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    return loss, sum(size for storage, size in kept.items() if storage not in own)


@pytest.mark.parametrize("kind", _FAMILIES)
def test_replaced_parts_of_a_family_give_the_same_loss_and_gradients(kind):
    plain = model_of(kind)
    replaced = copy.deepcopy(plain)
    assert {len(list(module.parameters())) > 1 for module, _ in replaced_modules(plain)} == {
        False,  # norms
        True,  # feed-forward layers
    }
    replace_in_torch(replaced)
    tokens = torch.arange(1, 2 * 12 + 1).view(2, 12)
    losses = [
        model(input_ids=tokens, labels=tokens, use_cache=False).loss for model in (plain, replaced)
    ]
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(losses[1], losses[0])
    for expected, found in zip(plain.parameters(), replaced.parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad)


def test_a_norm_keeps_its_input_alone_and_a_gate_its_two_inputs():
    """What the model's own keep more, in bytes a row of a bfloat16 model.

    Of a norm: a float32 copy of its input and the result before its weight, for the input itself;
    and one float32 number. Of a gate: what the activation makes of it.
    """
    tokens = torch.ones(1, ROWS, dtype=torch.int64)
    plain = model_of("llama", dtype=torch.bfloat16)
    replaced = copy.deepcopy(plain)
    replace_in_torch(replaced)
    norms = 2 * LAYERS + 1
    of_a_norm = (4 + 2 - 2) * WIDTH + 4
    saved = kept_bytes(plain, tokens)[1] - kept_bytes(replaced, tokens)[1]
    assert saved == ROWS * (norms * of_a_norm + LAYERS * 2 * INNER)


@pytest.fixture(scope="module")
def prepared_llama(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    workload = dataclasses.replace(workload_of("llama", folder), layers=2)
    prepare(Prepare(workload=workload, folder=folder / "prepared"))
    return workload, folder / "prepared"


@pytest.mark.parametrize(
    "choices",
    [
        {"precision": "bf16-true"},
        *(
            pytest.param(choices, marks=pytest.mark.slow)
            for choices in (
                {},
                {"precision": "bf16-mixed"},
                {"precision": "bf16-true", "checkpointing": "block"},
                {"checkpointing": "selective"},
                {"precision": "bf16-mixed", "adapter": "lora", "base_weights": "bf16"},
            )
        ),
    ],
    ids=str,
)
def test_the_peak_is_predicted_to_the_byte(choices, prepared_llama):
    workload, folder = prepared_llama
    config = TrainingConfig(kernels="liger", micro_batch_size=GLOBAL_BATCH, **choices)
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


@pytest.mark.parametrize("family", ["gpt", "gpt2", "mixtral"])
def test_a_model_of_which_liger_replaces_other_parts_or_none_is_refused(family, tmp_path):
    with torch.device("meta"):
        parts = build_model(workload_of(family, tmp_path))
    assert "of other models than" in why_not(parts)
    set_kernels(parts, "liger", device=torch.device("cpu"))  # and is left as it is
    assert all("_before" not in vars(type(module)) for module in parts.model.modules())


def test_a_training_without_gradients_is_possible():
    model = model_of("llama").requires_grad_(False)
    replace_in_torch(model)
    tokens = torch.ones(1, 4, dtype=torch.int64)
    assert model(input_ids=tokens, labels=tokens).loss.isfinite()
