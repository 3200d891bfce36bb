"""Tokens of the batches that trainers pass to a model."""

import pytest
import torch

from autotune.shipped.batch_tokens import count_tokens
from autotune.training.script.counted import counted_in

TOKENS = torch.arange(12).view(3, 4)
MASK = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0], [1, 1, 1, 1]])
PIXELS = torch.rand(3, 2, 5, 5)


@pytest.mark.parametrize(
    ("batch", "count", "counted"),
    [
        ({"input_ids": TOKENS, "labels": TOKENS}, 12, "tokens"),
        ({"labels": TOKENS, "input_ids": TOKENS, "attention_mask": MASK}, 9, "tokens"),
        (TOKENS, 12, "tokens"),
        ((TOKENS, TOKENS), 12, "tokens"),
        ({"labels": torch.tensor([1, 0, 2]), "pixel_values": PIXELS}, 3, "rows"),
        ([["text"], {"x": PIXELS}], 3, "rows"),
        ("text", 0, "tokens"),
    ],
    ids=["ids", "mask", "tensor", "pair", "images", "nested", "no tensor"],
)
def test_tokens_are_counted_without_padding_and_rows_where_there_are_none(batch, count, counted):
    assert (int(count_tokens(batch)), counted_in(batch)) == (count, counted)
