"""What the config classes of transformers say: which are language models, and their sizes."""

import io
import json
import re
import sys

import pytest
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from autotune.errors import InvalidInput
from autotune.models.config_class import complete, main, make_config
from autotune.spec.model_file import ignored_quantization, sizes_of
from autotune.spec.workload import make_workload

LLAMA = {"model_type": "llama", "vocab_size": 256, "num_hidden_layers": 2}


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ({"model_type": "vit"}, "config.json is of a vit model, which is no language model"),
        ({"model_type": "distilbert"}, "a distilbert model, an encoder, which is no causal"),
        ({"model_type": "t5"}, "a t5 model, an encoder-decoder, which is no causal language model"),
        (
            {"model_type": "llava", "text_config": LLAMA},
            "a llava model, which is no language model, but has one of type llama as its text part",
        ),
        ({"model_type": "no_such_model"}, r"transformers \d.* has no model type 'no_such_model'"),
    ],
)
def test_a_model_of_another_kind_is_rejected_by_its_kind(content, named):
    with pytest.raises(InvalidInput, match=named) as raised:
        make_config(content)
    assert raised.value.hint


@pytest.mark.parametrize(
    ("content", "sizes"),
    [
        (
            {"model_type": "llama", "num_hidden_layers": 2},
            {"layers": 2, "width": 4096, "heads": 32, "vocab_size": 32_000},
        ),
        (
            {"model_type": "mamba", "hidden_size": 64},
            {"layers": 32, "width": 64, "heads": None, "vocab_size": 50_280},
        ),
        (
            {"model_type": "gemma3", "text_config": {"hidden_size": 64}},
            {"layers": 26, "width": 64, "heads": 8, "vocab_size": 262_208},
        ),
    ],
)
def test_sizes_that_a_config_leaves_out_are_those_of_its_class(content, sizes):
    assert sizes_of(complete(content)) == sizes


@pytest.mark.slow
def test_an_encoder_decoder_is_rejected_and_a_file_of_its_decoder_is_not():
    families = [
        model_type
        for model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        if CONFIG_MAPPING[model_type].is_encoder_decoder
    ]
    assert len(families) > 10  # bart, whisper, pegasus, ...
    for model_type in families:
        decoder = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]
        whole = {"model_type": model_type, "architectures": [decoder.replace("CausalLM", "Other")]}
        for content in (
            {"model_type": model_type},
            whole,
            {**whole, "is_encoder_decoder": True},
            {**whole, "is_encoder_decoder": False},
        ):
            with pytest.raises(InvalidInput, match=f"a {model_type} model, an encoder-decoder"):
                make_config(content)
        of_decoder = {"model_type": model_type, "architectures": [decoder]}
        assert make_config(of_decoder).model_type == model_type
        without_encoder = {"model_type": model_type, "is_encoder_decoder": False}
        assert make_config(without_encoder).model_type == model_type


def test_a_quantization_of_the_file_is_not_used_and_that_is_said():
    content = {**LLAMA, "quantization_config": {"quant_method": "mxfp4"}}
    assert "mxfp4" not in str(make_config(content).to_dict())
    assert ignored_quantization(content) == (
        "the quantization_config of the model's config.json (mxfp4) is not used: weights are "
        "stored as precision and base_weights say"
    )
    assert ignored_quantization(LLAMA) == ignored_quantization(None) == ""


@pytest.mark.parametrize(
    ("content", "answer"),
    [
        (LLAMA, "content"),
        ({"model_type": "vit"}, "no language model"),
        ({**LLAMA, "num_attention_heads": "four"}, "transformers rejects the config.json: .*four"),
        ({"model_type": "gemma4_assistant"}, "hidden_size_per_layer_input must be 0"),
    ],
)
def test_the_program_answers_with_the_content_or_the_reason(content, answer, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps(content)))
    main()
    answered = json.loads(capsys.readouterr().out)
    if answer == "content":
        assert answered == {"content": complete(content)}
    else:
        assert answered["hint"]
        assert re.search(answer, answered["message"])


@pytest.mark.slow
def test_a_search_asks_the_class_for_what_a_file_leaves_out(tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"model_type": "mamba", "hidden_size": 64}))
    assert make_workload("cpu", {"model": str(file)}).vocab_size == 50_280
    file.write_text(json.dumps({"model_type": "vit", "hidden_size": 64}))
    with pytest.raises(InvalidInput, match="vit model, which is no language model"):
        make_workload("cpu", {"model": str(file)})
