"""Makes a model of transformers compute its loss in chunks."""

import functools
from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_outputs import CausalLMOutputWithPast

from autotune.shipped.labels import IGNORED_LABEL


def use_chunked_loss(model: Any, token_loss: Callable[[Tensor, nn.Linear, Tensor], Tensor]) -> None:
    """Makes `model(..., labels=...)` compute its loss by `token_loss` and return no logits.

    Without labels the model behaves as before. `token_loss` returns the summed loss of the tokens.
    """
    inner = model.forward

    @functools.wraps(inner)
    def forward(
        *args: Any, labels: Tensor | None = None, num_items_in_batch: Any = None, **kwargs: Any
    ) -> CausalLMOutputWithPast:
        if labels is None:
            return inner(*args, **kwargs)
        following = kwargs.pop("shift_labels", None)
        if following is None:
            following = F.pad(labels[:, 1:], (0, 1), value=IGNORED_LABEL)
        hidden = model.base_model(*args, **kwargs)[0]
        total = token_loss(hidden, model.get_output_embeddings(), following)
        tokens = (
            (following != IGNORED_LABEL).sum() if num_items_in_batch is None else num_items_in_batch
        )
        return CausalLMOutputWithPast(loss=total / tokens)

    model.forward = forward
