"""Causal language models that Hugging Face transformers builds from a config.json, with random weights.

Attention runs through scaled_dot_product_attention, without a cache; families that transformers
gives no such attention (Gemma 2 with its soft caps) run their own. Where a layer is plainly causal
no mask is made, in eager, compiled and fake execution alike; transformers alone would make one
wherever it cannot look at values. Mixtures of experts run as transformers chooses where nothing is
said: `grouped_mm`, which sorts the tokens by expert and has no shape that depends on data.
(`batched_mm` would copy an expert's weights for each token. On fake tensors torch's grouped product
takes bf16 only.)

The parts are found by structure (`structure.py`). Imports transformers, an extra, only when a model
is built: https://huggingface.co/docs/transformers
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
"""Largest difference, relative to the spread of the logits, that rounding makes of experts given
other tokens."""


class HuggingFaceModel(nn.Module):
    """forward(tokens [batch, sequence], labels [batch, sequence]) -> sum of token losses, float32 scalar."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network: Any = network
        self.token_loss: TokenLoss | None = None
        """Where it is set, the loss is made of the last hidden states and the head; else of the
        network's logits."""

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        if self.token_loss is None:
            return next_token_loss(self.logits(tokens), labels)
        return self.token_loss(self.hidden(tokens), self.network.get_output_embeddings(), labels)

    def logits(self, tokens: Tensor) -> Tensor:
        """[batch, sequence, vocabulary]"""
        logits: Tensor = self._run(self.network, tokens).logits
        return logits

    def hidden(self, tokens: Tensor) -> Tensor:
        """Last hidden states, [batch, sequence, width]."""
        hidden: Tensor = self._run(self.network.base_model, tokens)[0]
        return hidden

    def _run(self, network: Any, tokens: Tensor) -> Any:
        # All ones: says that nothing is padding, where transformers would otherwise look for
        # several sequences in one.
        return network(input_ids=tokens, attention_mask=torch.ones_like(tokens), use_cache=False)


def build(workload: Workload, *, weights_folder: Path | None = None) -> HuggingFaceModel:
    """The model in float32, its weights drawn by transformers or read from the files in `weights_folder`.

    Raises InvalidInput where transformers cannot.
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
            raise _refusal(workload, error) from error
        network = _network(
            workload, weights_folder, attention="eager"
        )  # a family whose attention no kernel computes
    return HuggingFaceModel(network)


def _network(workload: Workload, weights_folder: Path | None, *, attention: str) -> Any:
    """Raises ValueError where transformers has no such attention for the family."""
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
        raise _refusal(workload, error) from error


def _check_loaded(workload: Workload, report: Mapping[str, Any]) -> None:
    """Raises InvalidInput for weights that are not exactly those of the model."""
    for what, names in (("lack", report["missing_keys"]), ("hold also", report["unexpected_keys"])):
        if names:
            first, more = min(map(str, names)), len(names) - 1
            raise InvalidInput(
                f"the weights in {workload.model_source} {what} {first}"
                + (f" and {more} more" if more else ""),
                hint="name the folder that holds this config.json with its own weights",
            )


def _config(workload: Workload) -> Any:
    """A config object of its own: building a model writes to it."""
    from transformers import CONFIG_MAPPING

    assert workload.model_config is not None
    settings = with_layers(workload.model_config, workload.layers)
    model_type = settings.pop("model_type")
    settings.pop("auto_map", None)  # names code outside transformers, which is not run
    if model_type not in CONFIG_MAPPING:
        raise InvalidInput(
            f"this transformers knows no model type {model_type!r}",
            hint="install a newer transformers, or use another model",
        )
    try:
        return CONFIG_MAPPING[model_type].from_dict(settings)
    except Exception as error:  # each config class checks its settings in its own way
        raise _refusal(workload, error) from error


def _refusal(workload: Workload, error: Exception) -> InvalidInput:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    reason = lines[0].partition(". ")[0] if lines else type(error).__name__
    return InvalidInput(
        f"transformers cannot build model {workload.model}: {reason}",
        hint="change its config.json, or use another",
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
    """transformers' mask for sdpa, or None where the kernel's own causal flag says it all.

    `attention_mask` is always ones here. `local_size` is the window of a layer that sees only so
    many tokens.
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
    """The weights were drawn as the model was built; this refuses a model in which a token sees a later one."""
    assert isinstance(model, HuggingFaceModel)
    model.eval()
    tokens = torch.zeros(1, _PROBED_TOKENS, dtype=torch.int64)
    changed = tokens.clone()
    changed[:, _PROBED_TOKENS // 2 :] = 1
    try:
        before, after = (model.logits(each)[:, : _PROBED_TOKENS // 2] for each in (tokens, changed))
    except (RuntimeError, ValueError, TypeError, LookupError) as error:
        raise InvalidInput(
            f"the model fails in its first forward pass: {(str(error).splitlines() or [''])[0]}",
            hint="look for sizes in its config.json that do not fit together",
        ) from error
    model.train()
    if (before - after).abs().max() > _NOISE * before.std():
        raise InvalidInput(
            "the model lets a token see later ones: it is an encoder, not a causal language model",
            hint="use the config.json of a decoder; some become one by is_decoder = true",
        )


def find_parts(model: nn.Module) -> ModelParts:
    """By structure: parts that are not there are None."""
    assert isinstance(model, HuggingFaceModel)
    found = find_blocks(model)
    head = (
        model.network.get_output_embeddings()
        if hasattr(model.network, "get_output_embeddings")
        else None
    )
    head = head if isinstance(head, nn.Linear) else None
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
