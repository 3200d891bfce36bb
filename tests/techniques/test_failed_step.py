"""A step that an exception ends leaves nothing behind: the next ones are those without it."""

import gc

import pytest
import torch

from autotune.shipped import activation_offload
from autotune.shipped.quantized import tensors_behind
from autotune.spec.config import SEARCHED
from autotune.spec.prediction import KeptOfBlock
from autotune.techniques.checkpointing import keep_in_blocks

ADAPTED = {"adapter": "lora", "precision": "bf16-mixed", "base_weights": "bf16"}
CHANGING = {
    **{f"checkpointing {value}": {"checkpointing": value} for value in SEARCHED["checkpointing"]},
    "feed_forward": {"feed_forward": "tiled", "checkpointing": "block"},
    "activation_offload": {"activation_offload": "cpu"},
    "adapter_kernels": {**ADAPTED, "adapter_kernels": "fused"},
    "base_weights": {**ADAPTED, "base_weights": "int8"},
    "int8-mixed": {"precision": "int8-mixed"},
    "frozen": {**ADAPTED, "offload": "frozen"},
    "frozen, blocks": {**ADAPTED, "offload": "frozen", "checkpointing": "block"},
    "frozen, segments": {**ADAPTED, "offload": "frozen", "checkpointing": "sqrt"},
    "loss": {"loss": "chunked", "micro_batch_size": 2},
}
"""Techniques that do something in the forward and backward pass of blocks or of the loss."""
PLANNED = (
    KeptOfBlock(operators=("aten.addmm 0",)),
    KeptOfBlock(recomputed_parts=("feed_forward",)),
    KeptOfBlock(operators=()),
    KeptOfBlock(),
)


class Broken(Exception):
    pass


class _Breaks(torch.autograd.Function):
    @staticmethod
    def forward(_context, hidden):
        return hidden.view_as(hidden)

    @staticmethod
    def backward(_context, _gradient):
        raise Broken


def break_once(block, phase):
    """Makes the next pass through a block fail, in the middle of it."""

    def fail(_part, _inputs, output):
        handle.remove()
        if phase == "forward":
            raise Broken
        return _Breaks.apply(output)

    handle = block.feed_forward.register_forward_hook(fail)


def bytes_on_device(trainer):
    weights = trainer.training.parts.model.parameters()
    parts = [part for weight in weights for part in tensors_behind(weight)]
    return sum(part.untyped_storage().nbytes() for part in parts)


def alive():
    """Counts the tensors that something holds."""
    gc.collect()
    return sum(isinstance(one, torch.Tensor) for one in gc.get_objects())


def check(trainer, undisturbed):
    batches = [batch for _, batch in zip(range(3), trainer.batches(), strict=False)]
    expected = [undisturbed.step(step, batch) for step, batch in enumerate(batches)]
    losses = [trainer.step(0, batches[0])]
    weights, tensors = bytes_on_device(trainer), alive()
    for phase in ("forward", "backward"):
        break_once(trainer.training.parts.blocks[1], phase)
        with pytest.raises(Broken):
            trainer.step(1, batches[1])
    trainer.training.updater.optimizer.zero_grad()
    assert alive() <= tensors
    losses += [trainer.step(step, batches[step]) for step in (1, 2)]
    assert losses == expected
    assert bytes_on_device(trainer) == weights


@pytest.mark.parametrize("choices", CHANGING.values(), ids=CHANGING)
def test_the_steps_after_one_that_failed_are_those_without_it(choices, make_trainer, monkeypatch):
    monkeypatch.setattr(activation_offload, "SMALLEST_BYTES", 1024)
    check(make_trainer(**choices), make_trainer(**choices))


def test_so_are_those_of_blocks_that_keep_what_is_planned(make_trainer):
    trainers = [make_trainer() for _ in range(2)]
    for trainer in trainers:
        keep_in_blocks(list(trainer.training.parts.blocks), PLANNED)
    check(*trainers)
