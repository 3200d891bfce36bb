"""Blocks are what a training calls and keeps activations of, whatever else a model has in lists."""

import pytest
import torch
from torch import nn

from autotune.shipped.blocks import find_blocks, find_stacks
from autotune.spec.config import TrainingConfig
from autotune.techniques.user_training import apply_to_user_training
from tests.techniques.model_forms import LAYERS, VOCABULARY, WIDTH, Block, Model


class WithHeads(Model):
    """Has more heads than blocks; its training calls none of them."""

    def __init__(self):
        super().__init__()
        self.heads = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY))
            for _ in range(2 * LAYERS)
        )


class WithTeacher(Model):
    """Has a deeper frozen model in it, for a distillation."""

    def __init__(self):
        super().__init__()
        self.teacher = nn.ModuleList(Block() for _ in range(2 * LAYERS)).requires_grad_(False)


class WithPlaces(Model):
    """Has a list with places for norms, of which some are empty, as in x-transformers."""

    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), None, None])  # type: ignore[list-item]


FORMS = (WithHeads, WithTeacher, WithPlaces)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("frozen", [False, True])
def test_blocks_are_the_list_that_does_most_in_training(form, frozen):
    model = form()
    if frozen:
        model.blocks[1:].requires_grad_(False)
    assert find_blocks(model).blocks is model.blocks


@pytest.mark.parametrize("form", FORMS)
def test_checkpointing_recomputes_the_blocks_that_the_model_calls(form):
    model = form()
    optimizer = torch.optim.SGD(model.parameters())
    apply_to_user_training(TrainingConfig(checkpointing="block"), model, optimizer)
    calls = []
    model.blocks[1].attention.register_forward_hook(lambda *_: calls.append(1))
    model(torch.zeros(1, 2, dtype=torch.int64)).sum().backward()
    assert len(calls) == 2


def test_a_list_of_lists_with_empty_places_has_no_blocks():
    model = nn.Module()
    model.layers = nn.ModuleList(
        nn.ModuleList([nn.ModuleList([nn.LayerNorm(WIDTH), None]), nn.Linear(WIDTH, WIDTH)])  # type: ignore[list-item]
        for _ in range(LAYERS)
    )
    assert find_blocks(model) is None


def test_the_stacks_of_an_encoder_and_a_decoder_are_both_found_in_order():
    model = nn.Transformer(16, 2, 3, 2, 32)
    model.heads = nn.ModuleList(nn.Linear(16, 16) for _ in range(8))
    found = [(stack.owner, stack.name) for stack in find_stacks(model)]
    assert found == [(model.encoder, "layers"), (model.decoder, "layers")]


def test_a_frozen_stack_is_none_that_is_trained():
    model = nn.Transformer(16, 2, 3, 2, 32)
    model.encoder.requires_grad_(False)
    assert [stack.owner for stack in find_stacks(model)] == [model.decoder]


def test_a_model_without_lists_has_no_stacks():
    assert find_stacks(nn.Linear(2, 2)) == []
