"""What a model lacks for a technique is found from its structure, before any training."""

import json

import pytest
import torch

from autotune.errors import IllegalConfiguration
from autotune.models import build_model
from autotune.models.parts import ModelParts
from autotune.spec.config import EIGHT_BIT_PRECISIONS, KEEPS_PRODUCTS, SELECTIVE, TrainingConfig
from autotune.spec.model_choice import MODEL_NAMES
from autotune.spec.workload import make_workload
from autotune.techniques.checkpointing import CHANGES_WHAT_IS_KEPT
from autotune.techniques.requirements import check_parts, missing_parts

CHOICES = {
    "checkpointing": ["none", "attention", "block", "sqrt"],
    "compile": ["none", "block", "model"],
}
LOSSES = {"loss": ["full", "chunked"]}
SIZES = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 64,
    "vocab_size": 256,
}


@pytest.fixture
def shapes_of(tmp_path):
    """shapes_of(model_type="llama") are the parts of such a model on the meta device."""

    def make(**settings):
        file = tmp_path / "config.json"
        file.write_text(json.dumps({**SIZES, **settings}))
        with torch.device("meta"):
            return build_model(make_workload("cpu", {"model": str(file)}))

    return make


@pytest.mark.parametrize("model", MODEL_NAMES)
def test_a_built_in_model_lacks_nothing(model):
    with torch.device("meta"):
        parts = build_model(make_workload("cpu", {"model": model}))
    assert missing_parts(parts, CHOICES | LOSSES) == {}


def test_a_model_without_blocks_supports_what_needs_none():
    missing = missing_parts(ModelParts(model=torch.nn.Linear(2, 2)), CHOICES)
    assert set(missing["checkpointing"]) == {"attention", "block", "sqrt"}
    assert set(missing["compile"]) == {"block"}


def test_a_chunked_loss_is_supported_where_the_head_makes_the_logits(shapes_of):
    assert missing_parts(shapes_of(model_type="llama"), LOSSES) == {}


@pytest.mark.parametrize(
    "settings",
    [
        {"model_type": "gemma3_text", "final_logit_softcapping": 30.0},
        {"model_type": "cohere", "logit_scale": 0.0625},
        {"model_type": "granite", "logits_scaling": 8.0},
    ],
    ids=lambda settings: settings["model_type"],
)
def test_a_chunked_loss_is_not_supported_where_logits_change_after_the_head(shapes_of, settings):
    assert "changes the logits" in missing_parts(shapes_of(**settings), LOSSES)["loss"]["chunked"]


def test_a_technique_is_rejected_with_the_part_that_the_model_lacks():
    with pytest.raises(IllegalConfiguration, match="no list of alike blocks"):
        check_parts(ModelParts(model=torch.nn.Linear(2, 2)), TrainingConfig(checkpointing="block"))


ATTENTION = {"attention": ["auto", "flash", "math"]}


def missing_attention(parts):
    return missing_parts(parts, ATTENTION, sequence_length=32).get("attention", {})


def test_a_model_with_a_trained_bias_on_its_scores_has_no_flash_attention():
    with torch.device("meta"):
        parts = build_model(make_workload("cpu", {"model": "deep-one", "sequence_length": 32}))
    assert "trained mask" in missing_attention(parts)["flash"]


@pytest.mark.parametrize(
    "settings", [{"model_type": "llama"}, {"model_type": "mixtral", "num_local_experts": 2}]
)
def test_a_causal_model_with_grouped_queries_supports_every_available_kernel(shapes_of, settings):
    assert missing_attention(shapes_of(**settings)) == {}


def test_a_model_with_other_attention_functions_supports_no_backend():
    class Mean(torch.nn.Module):
        def forward(self, tokens, labels):
            return tokens.float().mean()

    model = Mean()
    model.weight = torch.nn.Parameter(torch.zeros(1, device="meta"))
    assert set(missing_attention(ModelParts(model=model))) == {"flash", "math"}


@pytest.mark.parametrize("precision", EIGHT_BIT_PRECISIONS)
def test_blocks_without_a_suitable_matrix_do_not_support_8_bits(shapes_of, precision):
    odd = {
        "hidden_size": 40,
        "intermediate_size": 60,
        "num_attention_heads": 5,
        "num_key_value_heads": 5,
    }
    missing = missing_parts(shapes_of(model_type="llama", **odd), {"precision": [precision]})
    assert "multiples of 16" in missing["precision"][precision]


def test_a_requested_chunked_loss_is_rejected_where_logits_change_after_the_head(shapes_of):
    parts = shapes_of(model_type="granite", logits_scaling=8.0)
    with pytest.raises(IllegalConfiguration, match="changes the logits"):
        check_parts(parts, TrainingConfig(loss="chunked"))


GPT_OSS = {"model_type": "gpt_oss", "num_local_experts": 4, "num_experts_per_tok": 2}
BY_OPERATOR = {"checkpointing": [*SELECTIVE, "block"]}


def test_a_model_that_changes_matrix_products_in_place_cannot_keep_them(shapes_of):
    """It adds the biases of experts to their grouped product."""
    missing = missing_parts(shapes_of(**GPT_OSS), BY_OPERATOR, sequence_length=32)
    assert missing == {"checkpointing": dict.fromkeys(KEEPS_PRODUCTS, CHANGES_WHAT_IS_KEPT)}


@pytest.mark.parametrize("model_type", ["llama", "mixtral", "gemma3_text"])
def test_other_models_can(model_type, shapes_of):
    parts = shapes_of(model_type=model_type)
    assert missing_parts(parts, BY_OPERATOR, sequence_length=32) == {}
