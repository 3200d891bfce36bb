"""The model of a script, from a configuration of transformers."""

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.masking_utils import AttentionMaskInterface

from autotune.shipped.hugging_face import hugging_face_model
from autotune.shipped.hugging_face_mask import causal_mask
from autotune.shipped.script.written import MODEL_CONFIG_FILE, PRETRAINED


def make_model() -> nn.Module:
    """Makes the model that MODEL_CONFIG_FILE, next to this file, describes."""
    AttentionMaskInterface.register("sdpa", causal_mask)
    try:
        return hugging_face_model(_network("sdpa"))
    except ValueError as error:  # the attention of this model has no kernel
        if "scaled_dot_product_attention" not in str(error):
            raise
        return hugging_face_model(_network("eager"))


def _network(attention: str) -> Any:
    file = Path(__file__).with_name(MODEL_CONFIG_FILE)
    settings = json.loads(file.read_text(encoding="utf-8"))
    config = CONFIG_MAPPING[settings.pop("model_type")].from_dict(settings)
    options: Any = {"dtype": torch.float32, "attn_implementation": attention}
    if PRETRAINED is None:
        return AutoModelForCausalLM.from_config(config, **options)
    return AutoModelForCausalLM.from_pretrained(PRETRAINED, config=config, **options)
