"""Pretrained weights: read exactly, or rejected with what does not fit."""

import json

import pytest
import torch

from autotune.errors import InvalidInput
from autotune.execution.process.preparation import model_sha256
from autotune.execution.tasks import ModelSha256
from autotune.models.pretrained import read_pretrained
from autotune.models.weights import Placement, draw_weights, load_model
from autotune.spec.model_file import is_hub_name
from autotune.spec.workload import make_workload

CPU = torch.device("cpu")
FLOAT32 = Placement(dtype=torch.float32, device=CPU)
CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "vocab_size": 256,
    "tie_word_embeddings": True,
}


@pytest.fixture
def folder(tmp_path):
    """The files that transformers' save_pretrained writes."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(5)
    AutoModelForCausalLM.from_config(LlamaConfig(**CONFIG)).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def workload_of(folder):
    return lambda **settings: make_workload(
        "cpu", {"model": str(folder), "pretrained": True, **settings}
    )


def test_training_goes_on_from_the_weights_in_the_folder(folder, workload_of, tmp_path):
    from transformers import AutoModelForCausalLM

    draw_weights(workload_of(), file=tmp_path / "weights.pt")
    loaded = load_model(
        workload_of(),
        file=tmp_path / "weights.pt",
        placement=FLOAT32,
    ).model
    tokens = torch.randint(0, 256, (2, 16))
    expected = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(
        input_ids=tokens
    ).logits
    assert torch.allclose(loaded.logits(tokens), expected, atol=1e-5)


@pytest.mark.parametrize("pretrained", [True, False])
def test_only_a_model_without_pretrained_weights_has_random_ones(workload_of, pretrained):
    assert workload_of(pretrained=pretrained).has_random_weights == (not pretrained)


def test_other_weights_are_another_study(folder, workload_of):
    before = model_sha256(ModelSha256(workload=workload_of()))
    file = folder / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert model_sha256(ModelSha256(workload=workload_of())) != before


def test_another_number_of_layers_than_the_weights_have_is_rejected(workload_of):
    with pytest.raises(InvalidInput, match="layers = 1 contradicts the pretrained weights"):
        workload_of(layers=1)


@pytest.mark.parametrize("model", [None, "gpt"])
def test_a_built_in_model_has_no_trained_weights(model):
    with pytest.raises(InvalidInput, match="no pretrained weights of model 'gpt'"):
        make_workload("cpu", {"model": model, "pretrained": True})


def test_a_folder_without_weights_is_rejected_at_once(folder, workload_of):
    (folder / "model.safetensors").unlink()
    with pytest.raises(InvalidInput, match="there are no weights in"):
        workload_of()


def test_a_folder_whose_weights_were_removed_is_rejected(folder, workload_of, tmp_path):
    workload = workload_of()
    (folder / "model.safetensors").unlink()
    with pytest.raises(InvalidInput, match="there are no weights in"):
        draw_weights(workload, file=tmp_path / "weights.pt")


def index_of(path):
    return json.dumps({"metadata": {}, "weight_map": {"model.embed_tokens.weight": path}})


OTHER_WEIGHTS = {
    "an index of a folder above": ("model.safetensors.index.json", index_of("../a.safetensors")),
    "an index of an absolute path": ("model.safetensors.index.json", index_of("/a.safetensors")),
    "an index of a folder below": ("model.safetensors.index.json", index_of("b/a.safetensors")),
    "an index of pickles above": ("pytorch_model.bin.index.json", index_of("../a.bin")),
    "an index of an absolute pickle": ("pytorch_model.bin.index.json", index_of("/a.bin")),
    "an adapter of a path": ("adapter_config.json", '{"base_model_name_or_path": "/a"}'),
    "an adapter of the hub": ("adapter_config.json", '{"base_model_name_or_path": "a/b"}'),
}
"""Name and content of a file that leads to weights which are not in the folder."""


@pytest.mark.parametrize("kind", OTHER_WEIGHTS)
def test_nothing_in_a_folder_leads_to_weights_elsewhere(folder, workload_of, kind):
    name, text = OTHER_WEIGHTS[kind]
    workload = workload_of()
    (folder / name).write_text(text)
    with pytest.raises(InvalidInput, match=name):
        read_pretrained(workload)


def test_a_config_does_not_choose_the_file_of_the_weights(folder, workload_of):
    config = json.loads((folder / "config.json").read_text())
    config["transformers_weights"] = "../other.safetensors"
    (folder / "config.json").write_text(json.dumps(config))
    assert read_pretrained(workload_of()).network.config.vocab_size == config["vocab_size"]


def test_weights_of_another_model_are_rejected(folder, workload_of, tmp_path):
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**content, "attention_bias": True}))
    with pytest.raises(
        InvalidInput, match=r"the weights in .* lack model\.layers\.0\.self_attn\.\w+\.bias and"
    ):
        draw_weights(workload_of(), file=tmp_path / "weights.pt")


def test_weights_of_another_shape_are_rejected_by_name(folder, workload_of, tmp_path):
    content = json.loads((folder / "config.json").read_text())
    other = {**content, "intermediate_size": content["intermediate_size"] + 8}
    (folder / "config.json").write_text(json.dumps(other))
    with pytest.raises(InvalidInput, match=r"layers\.0\.mlp\.down_proj\.weight is \d+ x \d+, not"):
        draw_weights(workload_of(), file=tmp_path / "weights.pt")


@pytest.mark.parametrize(
    ("model", "is_one"),
    [
        ("openai-community/gpt2", True),
        ("Qwen/Qwen3-0.6B", True),
        ("./model", False),
        ("a/b/c", False),
        ("~me/model", False),
        ("folder/config.json", False),
        ("gpt2", False),
    ],
)
def test_a_hub_name_is_told_from_a_path(model, is_one):
    assert is_hub_name(model) is is_one


def test_without_a_network_a_hub_name_is_rejected_with_what_to_use_instead(monkeypatch):
    import huggingface_hub

    def no_network(*_args, **_options):
        raise OSError("Name or service not known")

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", no_network)
    with pytest.raises(
        InvalidInput, match="cannot be loaded from the Hugging Face hub: Name or service"
    ) as raised:
        make_workload("cpu", {"model": "nobody/no-such-model"})
    assert "local config.json" in raised.value.hint
