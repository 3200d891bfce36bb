"""Tokens of the batches that trainers pass to a model."""

import pytest
import torch

from autotune.training.script.batch_tokens import count_tokens

TOKENS = torch.arange(12).view(3, 4)
MASK = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0], [1, 1, 1, 1]])
PIXELS = torch.rand(3, 2, 5, 5)


@pytest.mark.parametrize(
    ("batch", "tokens"),
    [
        ({"input_ids": TOKENS, "labels": TOKENS}, 12),
        ({"labels": TOKENS, "input_ids": TOKENS, "attention_mask": MASK}, 9),
        (TOKENS, 12),
        ((TOKENS, TOKENS), 12),
        ({"pixel_values": PIXELS, "labels": torch.zeros(3)}, 3),
        ([["text"], {"x": PIXELS}], 3),
        ("text", 0),
    ],
    ids=["ids", "mask", "tensor", "pair", "images", "nested", "no tensor"],
)
def test_tokens_are_counted_without_padding(batch, tokens):
    assert int(count_tokens(batch)) == tokens
