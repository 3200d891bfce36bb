"""Build causal language models from a config.json with Hugging Face transformers.

Attention runs through scaled_dot_product_attention, without a cache. Families for which
transformers does not offer it (Gemma 2 with its soft caps) use their eager attention. For a layer
that is simply causal no mask is made, in eager, compiled and fake execution alike; transformers
alone would make one whenever it cannot read values. Mixtures of experts run with the default of
transformers, `grouped_mm`, which sorts the tokens by expert and has no data-dependent shapes.
(`batched_mm` would copy the weights of an expert for each token. On fake tensors torch's grouped
matrix product takes bf16 only.)

The parts of a model are found by structure (`structure.py`). transformers is an optional dependency
and is imported only when a model is built: https://huggingface.co/docs/transformers
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from autotune.errors import InvalidInput
from autotune.models.parts import ModelParts, TokenLoss, next_token_loss
from autotune.models.structure import find_blocks
from autotune.spec.model_file import with_layers
from autotune.spec.workload import Workload

_PROBED_TOKENS = 4
_NOISE = 1e-4
"""Largest difference that counts as rounding, relative to the standard deviation of the logits. It
occurs with mixtures of experts, whose matrix products depend on the other tokens."""


class HuggingFaceModel(nn.Module):
    """forward(tokens, labels), both [batch, sequence] -> sum of token losses, float32 scalar."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network: Any = network
        self.token_loss: TokenLoss | None = None
        """If set, computes the loss from the last hidden states and the head; otherwise the loss is
        computed from the logits."""

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        if self.token_loss is None:
            return next_token_loss(self.logits(tokens), labels)
        return self.token_loss(self.hidden(tokens), self.network.get_output_embeddings(), labels)

    def logits(self, tokens: Tensor) -> Tensor:
        """Return the logits, [batch, sequence, vocabulary]."""
        logits: Tensor = self._run(self.network, tokens).logits
        return logits

    def hidden(self, tokens: Tensor) -> Tensor:
        """Return the last hidden states, [batch, sequence, width]."""
        hidden: Tensor = self._run(self.network.base_model, tokens)[0]
        return hidden

    def _run(self, network: Any, tokens: Tensor) -> Any:
        # A mask of ones says that nothing is padding; without it transformers would look for
        # several sequences packed into one.
        return network(input_ids=tokens, attention_mask=torch.ones_like(tokens), use_cache=False)


def build(workload: Workload, *, weights_folder: Path | None = None) -> HuggingFaceModel:
    """Return the model in float32, with random weights or those from `weights_folder`.

    Raises InvalidInput if transformers is not installed or cannot build the model.
    """
    try:
        from transformers import MODEL_FOR_CAUSAL_LM_MAPPING
        from transformers.masking_utils import AttentionMaskInterface
    except ImportError as error:
        raise InvalidInput(
            f"model {workload.model} needs the transformers library: {error}",
            hint='pip install "autotune[huggingface]"',
        ) from None
    config = _config(workload)
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise InvalidInput(
            f"transformers has no causal language model of type {config.model_type!r}",
            hint="use the config.json of a decoder that predicts the next token",
        )
    AttentionMaskInterface.register("sdpa", _causal_mask)
    try:
        network = _network(workload, weights_folder, attention="sdpa")
    except ValueError as error:
        if "scaled_dot_product_attention" not in str(error):
            raise _build_error(workload, error) from error
        # A family whose attention no kernel computes.
        network = _network(workload, weights_folder, attention="eager")
    return HuggingFaceModel(network)


def _network(workload: Workload, weights_folder: Path | None, *, attention: str) -> Any:
    """Return the transformers model; raises ValueError if its family has no such attention."""
    from transformers import AutoModelForCausalLM

    config = _config(workload)
    options: dict[str, Any] = {
        "dtype": torch.float32,
        "attn_implementation": attention,
        "trust_remote_code": False,
    }
    try:
        if weights_folder is None:
            return AutoModelForCausalLM.from_config(config, **options)
        network, report = AutoModelForCausalLM.from_pretrained(
            str(weights_folder),
            config=config,
            local_files_only=True,
            output_loading_info=True,
            **options,
        )
        _check_loaded(workload, report)
        return network
    except (
        OSError,
        RuntimeError,
        TypeError,
        LookupError,
        AttributeError,
        ArithmeticError,
        AssertionError,
        ImportError,
    ) as error:
        raise _build_error(workload, error) from error


def _check_loaded(workload: Workload, report: Mapping[str, Any]) -> None:
    """Raise InvalidInput if weights are missing or left over."""
    for problem, names in (
        ("lack", report["missing_keys"]),
        ("hold also", report["unexpected_keys"]),
    ):
        if not names:
            continue
        first = min(map(str, names))
        others = f" and {len(names) - 1} more" if len(names) > 1 else ""
        raise InvalidInput(
            f"the weights in {workload.model_source} {problem} {first}{others}",
            hint="name the folder that has this config.json together with its weights",
        )


def _config(workload: Workload) -> Any:
    """Return a new config object each time, because building a model changes it."""
    from transformers import CONFIG_MAPPING

    assert workload.model_config is not None
    settings = with_layers(workload.model_config, workload.layers)
    model_type = settings.pop("model_type")
    settings.pop("auto_map", None)  # refers to code outside transformers, which is not run
    if model_type not in CONFIG_MAPPING:
        raise InvalidInput(
            f"this release of transformers has no model type {model_type!r}",
            hint="install a newer transformers, or use another model",
        )
    try:
        return CONFIG_MAPPING[model_type].from_dict(settings)
    except Exception as error:  # each config class checks its settings in its own way
        raise _build_error(workload, error) from error


def _build_error(workload: Workload, error: Exception) -> InvalidInput:
    """Return the error with the first sentence of what transformers reports."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    reason = lines[0].partition(". ")[0] if lines else type(error).__name__
    return InvalidInput(
        f"transformers cannot build model {workload.model}: {reason}",
        hint="change its config.json, or use another model",
    )


def _causal_mask(
    *,
    q_length: int,
    kv_length: int,
    local_size: int | None = None,
    attention_mask: Tensor | None = None,
    allow_is_causal_skip: bool = True,
    **options: Any,
) -> Tensor | None:
    """Return transformers' mask for sdpa, or None if the causal flag of the kernel is enough.

    `attention_mask` is always ones here. `local_size` is the window of local attention.
    """
    from transformers.masking_utils import sdpa_mask

    if (
        allow_is_causal_skip
        and q_length == kv_length
        and (local_size is None or kv_length < local_size)
    ):
        return None
    mask: Tensor | None = sdpa_mask(
        q_length=q_length,
        kv_length=kv_length,
        local_size=local_size,
        allow_is_causal_skip=False,
        **options,
    )
    return mask


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
        lines = str(error).splitlines()
        raise InvalidInput(
            f"the model fails in its first forward pass: {lines[0] if lines else ''}",
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
    if found is None:
        return ModelParts(model=model, head=head)
    layer_types = getattr(model.network.config, "layer_types", None) or ()
    return ModelParts(
        model=model,
        blocks_owner=found.owner,
        blocks_name=found.name,
        attention_name=found.attention_name,
        blocks_are_called_alike=len(set(layer_types)) <= 1,
        head=head,
    )
