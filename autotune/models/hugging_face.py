"""Causal language models of Hugging Face transformers, from a config.json.

`transformers_network.py` builds the network. The parts of a model are found by structure
(`autotune/shipped/blocks.py`). transformers is an optional dependency and is imported only when a
model is built: https://huggingface.co/docs/transformers
"""

from pathlib import Path

import torch
from torch import nn

from autotune.errors import InvalidInput, first_line_of
from autotune.models.parts import OWN_LOSS, ModelParts
from autotune.shipped.blocks import find_blocks
from autotune.shipped.hugging_face import HuggingFaceModel, hugging_face_model
from autotune.spec.workload import Workload

_PROBED_TOKENS = 4
_NOISE = 1e-4
"""Largest difference that counts as rounding, relative to the standard deviation of the logits. It
occurs with mixtures of experts, whose matrix products depend on the other tokens."""


def build(workload: Workload, *, weights_folder: Path | None = None) -> HuggingFaceModel:
    """Returns the model in float32, with random weights or those from `weights_folder`.

    Raises InvalidInput if transformers is not installed or cannot build the model.
    """
    try:
        # An extra, and seconds to import, which only the trials of these models take.
        from autotune.models import transformers_network  # noqa: PLC0415
    except ImportError as error:
        raise InvalidInput(
            f"model {workload.model} needs the transformers library: {error}",
            hint='pip install "autotune[huggingface]"',
        ) from None
    return hugging_face_model(transformers_network.build(workload, weights_folder=weights_folder))


@torch.no_grad()
def initialize(model: nn.Module) -> None:
    """Raise InvalidInput if a token sees a later one; the weights were drawn during `build`."""
    assert isinstance(model, HuggingFaceModel)
    model.eval()
    tokens = torch.zeros(1, _PROBED_TOKENS, dtype=torch.int64)
    changed = tokens.clone()
    changed[:, _PROBED_TOKENS // 2 :] = 1
    try:
        before = model.logits(tokens)[:, : _PROBED_TOKENS // 2]
        after = model.logits(changed)[:, : _PROBED_TOKENS // 2]
    except (RuntimeError, ValueError, TypeError, LookupError) as error:
        raise InvalidInput(
            f"the model fails in its first forward pass: {first_line_of(error)}",
            hint="look for sizes in its config.json that do not fit together",
        ) from error
    model.train()
    if (before - after).abs().max() > _NOISE * before.std():
        raise InvalidInput(
            "the model lets a token see later ones: it is an encoder, not a causal language model",
            hint="use the config.json of a decoder; some become one by is_decoder = true",
        )


def find_parts(model: nn.Module) -> ModelParts:
    """Find the parts by structure; a part that is not found is None."""
    assert isinstance(model, HuggingFaceModel)
    found = find_blocks(model)
    head = None
    if hasattr(model.network, "get_output_embeddings"):
        embeddings = model.network.get_output_embeddings()
        head = embeddings if isinstance(embeddings, nn.Linear) else None
    own_loss = "" if model.own_loss is None else OWN_LOSS
    if found is None:
        return ModelParts(model=model, head=head, own_loss=own_loss)
    kinds = set(getattr(model.network.config, "layer_types", None) or ())
    classes = {type(block) for block in found.blocks}
    return ModelParts(
        model=model,
        blocks_owner=found.owner,
        blocks_name=found.name,
        attention_name=found.attention_name,
        blocks_are_called_alike=len(kinds) <= 1 and len(classes) == 1,
        own_loss=own_loss,
        head=head,
    )
