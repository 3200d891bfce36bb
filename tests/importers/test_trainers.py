"""What each trainer's file means: its own choices that decide memory."""

import json
from typing import Any

import pytest

from autotune.errors import InvalidInput
from autotune.importers import with_trainer_file
from autotune.importers.registry import import_file
from autotune.importers.torchtitan import _models
from autotune.spec.model_file import sizes_of
from autotune.study.prediction.predicted_training import PredictedTraining
from tests.importers.examples import MODEL, OPTIONS, SMALLEST, written


def _import(trainer, folder, options=None, /, **keys):
    file = written(trainer, {**SMALLEST[trainer], **keys}, folder)
    return import_file(file, {**OPTIONS.get(trainer, {}), **(options or {})})


ALL_KERNELS = dict.fromkeys(("lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel"), True)


@pytest.mark.parametrize(
    ("keys", "kernels", "is_named"),
    [
        ({}, "fused", False),
        (ALL_KERNELS, "fused", False),
        ({"lora_mlp_kernel": True}, "fused", True),
        ({"lora_mlp_kernel": False}, "none", False),
        ({"adapter": None}, "none", False),
        ({"load_in_8bit": True}, "none", False),
        ({"trust_remote_code": True}, "none", False),
        ({"peft_use_dora": True}, "none", True),
        ({"lora_dropout": 0.05}, "none", True),
    ],
)
def test_axolotl_turns_kernels_of_adapters_on_where_a_file_says_nothing_of_them(
    keys, kernels, is_named, tmp_path
):
    found = _import("axolotl", tmp_path, **{"adapter": "lora", "lora_r": 8, **keys})
    assert found.config["adapter_kernels"] == kernels
    assert ("lora_mlp_kernel" in {one.key for one in found.not_taken}) == is_named
    assert not any("{}" in line for line in found.lines())


# -- LLaMA-Factory ---------------------------------------------------------------------------------


def test_llamafactory_recomputes_blocks_and_trains_lora_of_rank_8_unasked(tmp_path):
    found = _import("llamafactory", tmp_path, finetuning_type=None, bf16=True)
    assert found.config["checkpointing"] == "block"
    assert (found.config["adapter"], found.config["adapter_rank"]) == ("lora", 8)
    assert found.config["adapter_targets"] == "all-linear"
    assert found.config["base_weights"] == "bf16"
    assert found.defaults["cutoff_len"] == found.workload["sequence_length"] == 2048


@pytest.mark.parametrize(
    ("keys", "precision"),
    [
        ({"bf16": True}, "bf16-mixed"),
        ({"pure_bf16": True}, "bf16-true"),
        ({"fp16": True}, "fp16-mixed"),
        ({}, "fp32"),
    ],
)
def test_llamafactory_holds_what_it_trains_in_float32_unless_pure_bf16(keys, precision, tmp_path):
    assert _import("llamafactory", tmp_path, **keys).config["precision"] == precision


@pytest.mark.parametrize(("bits", "base_weights"), [(4, "nf4"), (8, "int8")])
def test_llamafactory_quantizes_the_base_to_so_many_bits(bits, base_weights, tmp_path):
    found = _import("llamafactory", tmp_path, finetuning_type="lora", quantization_bit=bits)
    assert found.config["base_weights"] == base_weights
    assert found.config["precision"] == "bf16-mixed"


@pytest.mark.parametrize(
    ("trainer", "keys"),
    [
        ("llamafactory", {"finetuning_type": "lora", "fp16": True}),
        ("trl", {"use_peft": True, "dtype": "float16", "fp16": True}),
        ("axolotl", {"adapter": "lora", "lora_r": 8, "fp16": True, "bf16": False}),
        ("axolotl", {"adapter": "lora", "lora_r": 8, "float16": True, "bf16": False}),
        ("transformers", {"train_mode": "lora", "template_name": "llama3", "fp16": True}),
    ],
)
def test_frozen_weights_beside_adapters_in_fp16_are_in_fp16(trainer, keys, tmp_path):
    config = _import(trainer, tmp_path, **keys).config
    assert (config["precision"], config["base_weights"]) == ("fp16-mixed", "fp16")


def test_muon_of_llamafactory_is_that_of_trials(tmp_path):
    found = _import("llamafactory", tmp_path, use_muon=True, optim="adamw_torch")
    assert found.config["optimizer"] == "muon"
    assert found.config["optimizer_fusion"] == "none"
    assert not {"use_muon", "optim"} & {one.key for one in found.not_taken}


def test_optimizers_that_differ_in_a_number_are_taken_over_with_what_differs(tmp_path):
    for name, taken in {"muon": "muon", "apollo_adamw": "apollo"}.items():
        found = _import("axolotl", tmp_path, optimizer=name)
        assert found.config["optimizer"] == taken
        assert "optimizer" in {one.key for one in found.not_taken}


@pytest.mark.parametrize("key", ["use_galore", "use_badam", "use_apollo", "use_adam_mini"])
def test_a_method_of_llamafactory_whose_state_decides_the_memory_is_one_sentence(key, tmp_path):
    with pytest.raises(InvalidInput, match="its state decides the memory"):
        _import("llamafactory", tmp_path, **{key: True})
    found = _import("llamafactory", tmp_path, finetuning_type="lora", **{key: True})
    assert key in {one.key for one in found.not_taken}


@pytest.mark.parametrize(
    ("trainer", "key"),
    [("transformers", "use_liger_kernel"), ("llamafactory", "enable_liger_kernel")],
)
def test_kernels_of_liger_make_the_loss_in_chunks(trainer, key, tmp_path):
    for value, expected in ((False, ("full", "none")), (True, ("chunked", "liger"))):
        config = _import(trainer, tmp_path, **{key: value}).config
        assert (config["loss"], config["kernels"]) == expected


ALL_OF_LIGER = {"liger_rms_norm": True, "liger_glu_activation": True, "liger_rope": True}


@pytest.mark.parametrize(
    ("trainer", "keys", "kernels", "named"),
    [
        ("axolotl", ALL_OF_LIGER, "liger", set()),
        ("axolotl", {"liger_rms_norm": True, "liger_swiglu": True}, "liger", set()),
        ("axolotl", {"liger_rms_norm": True}, "liger", {"liger_rms_norm"}),
        ("axolotl", {"liger_rope": True, "liger_layer_norm": True}, "none", set()),
        ("axolotl", {**ALL_OF_LIGER, "torch_compile": True}, "none", {"liger_rms_norm"}),
        ("trl", {"use_liger_kernel": True}, "liger", set()),
        (
            "transformers",
            {"use_liger_kernel": True, "liger_kernel_config": {"rms_norm": False, "swiglu": False}},
            "none",
            set(),
        ),
        (
            "transformers",
            {"use_liger_kernel": True, "liger_kernel_config": {"rms_norm": False}},
            "liger",
            {"liger_kernel_config"},
        ),
    ],
)
def test_kernels_that_keep_fewer_tensors_are_taken_over(trainer, keys, kernels, named, tmp_path):
    found = _import(trainer, tmp_path, **keys)
    assert found.config["kernels"] == kernels
    assert {one.key for one in found.not_taken} & {*keys} == named


@pytest.mark.parametrize(
    ("info", "settings"),
    [
        ({"hf_hub_url": "a/b", "subset": "en", "split": "half"}, {"dataset": "a/b"}),
        (
            {"file_name": "chats.json", "formatting": "sharegpt", "columns": {"messages": "turns"}},
            {"text_column": "turns"},
        ),
        ({"script_url": "mine"}, {}),
    ],
)
def test_a_name_of_llamafactory_is_what_the_file_beside_says(info, settings, tmp_path):
    (tmp_path / "dataset_info.json").write_text(json.dumps({"mine": info}))
    found = _import("llamafactory", tmp_path, dataset="mine,other", dataset_dir=".")
    assert settings.items() <= found.workload.items()
    assert ("dataset" in found.workload) == bool(settings)
    assert found.workload.get("dataset", "a/b").endswith(("a/b", "chats.json"))
    assert "first of several" in {one.key: one.why for one in found.not_taken}["dataset"]


def test_a_method_that_llamafactory_alone_has_is_one_sentence(tmp_path):
    with pytest.raises(InvalidInput, match="freeze"):
        _import("llamafactory", tmp_path, finetuning_type="freeze")


# -- torchtitan ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "flavor", "layers", "width"),
    [("llama3", "70B", 80, 8192), ("qwen3", "1.7B", 28, 2048), ("deepseek_v3", "16B", 27, 2048)],
)
def test_a_flavor_of_torchtitan_is_a_model_of_its_sizes(name, flavor, layers, width, tmp_path):
    found = _import("torchtitan", tmp_path, model={"name": name, "flavor": flavor})
    sizes = sizes_of(found.workload["model_config"])
    assert (sizes["layers"], sizes["width"]) == (layers, width)


def test_a_flavor_of_torchtitan_reaches_a_prediction(tmp_path):
    file = written("torchtitan", SMALLEST["torchtitan"], tmp_path)
    settings = with_trainer_file({"from_file": str(file)}, PredictedTraining)
    assert settings["model_config"]["hidden_size"] == 4096


def test_a_flavor_that_there_is_not_is_one_sentence_with_the_near_one(tmp_path):
    with pytest.raises(InvalidInput, match="9B") as error:
        _import("torchtitan", tmp_path, model={"name": "llama3", "flavor": "9B"})
    assert "8B" in str(error.value.hint)


def test_a_model_given_beside_the_file_takes_the_place_of_the_flavor(tmp_path):
    found = _import("torchtitan", tmp_path, {"model": MODEL}, model={"name": "mine"})
    assert not {"model", "model_config"} & set(found.workload)


@pytest.mark.parametrize(
    ("keys", "techniques"),
    [
        ({"mode": "none"}, {"checkpointing": "none"}),
        ({"mode": "full"}, {"checkpointing": "block"}),
        ({"mode": "selective", "selective_ac_option": "2"}, {"checkpointing": "every-2"}),
        ({"mode": "selective", "selective_ac_option": "op"}, {"checkpointing": "selective-2"}),
        ({}, {"checkpointing": "every-2"}),
    ],
)
def test_activation_checkpointing_of_torchtitan(keys, techniques, tmp_path):
    found = _import("torchtitan", tmp_path, activation_checkpoint=keys)
    assert {name: found.config[name] for name in techniques} == techniques


@pytest.mark.parametrize(
    ("trainer", "keys", "kept"),
    [
        ("trl", {"gradient_checkpointing_kwargs": {"selective": True}}, "save-attention"),
        ("axolotl", {"selective_checkpointing": True}, "save-attention"),
        ("axolotl", {"selective_checkpointing": {"save": ["attention"]}}, "save-attention"),
        ("axolotl", {"selective_checkpointing": {"save": ["attention", "mm"]}}, "selective"),
    ],
)
def test_operators_that_a_file_saves(trainer, keys, kept, tmp_path):
    found = _import(trainer, tmp_path, gradient_checkpointing=True, **keys)
    assert found.config["checkpointing"] == kept


def test_keys_of_earlier_versions_of_torchtitan_mean_the_same(tmp_path):
    now = _import(
        "torchtitan",
        tmp_path,
        training={"local_batch_size": 3, "seq_len": 512},
        compile={"enable": True},
        debug={"seed": 5},
        quantize={"linear": {"float8": {"filter_fqns": ["output"]}}},
    )
    before = _import(
        "torchtitan",
        tmp_path,
        training={"batch_size": 3, "seq_len": 512, "compile": True, "seed": 5},
        float8={"filter_fqns": ["output"]},
    )
    assert (before.workload, before.config) == (now.workload, now.config)


def test_an_optimizer_in_backward_of_torchtitan_clips_nothing(tmp_path):
    found = _import("torchtitan", tmp_path, optimizer={"early_step_in_backward": True})
    assert found.config["optimizer_fusion"] == "backward"
    assert "gradient_clipping" not in found.workload


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "flavor", "billions"),
    [
        ("llama3", "8B", 8.03),
        ("llama3", "70B", 70.55),
        ("llama3", "405B", 405.85),
        ("qwen3", "0.6B", 0.596),
        ("qwen3", "8B", 8.19),
        ("qwen3", "30B-A3B", 30.53),
        ("deepseek_v3", "16B", 15.71),
        ("deepseek_v3", "671B", 671.03),
        ("gpt_oss", "20b", 20.91),
    ],
)
def test_a_flavor_has_as_many_parameters_as_its_name_says(family, flavor, billions):
    # Published: Llama 3.1 (arXiv:2407.21783), the model cards of Qwen3, DeepSeek V2 Lite and V3 and
    # of gpt-oss.
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    content = {**_models()[family]["common"], **_models()[family][flavor]}
    if family == "deepseek_v3":
        content.setdefault("q_lora_rank", None)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**content))
    count = sum(parameter.numel() for parameter in model.parameters())
    assert count / 1e9 == pytest.approx(billions, rel=0.002)


# -- transformers, TRL, axolotl --------------------------------------------------------------------


@pytest.mark.parametrize("trainer", ["transformers", "lightning"])
@pytest.mark.parametrize(
    ("missing", "option"), [("model", "--model"), ("sequence length", "--seq-len")]
)
def test_what_a_file_leaves_out_is_asked_for_by_its_option(trainer, missing, option, tmp_path):
    keys, options = dict(SMALLEST[trainer]), {"model": MODEL}
    if missing == "model":
        keys.pop("model_name_or_path", None)
        options = {}
    elif trainer == "transformers":
        del keys["block_size"]
    else:
        keys["data"] = {"class_path": "my.Data", "init_args": {"batch_size": 2}}
    with pytest.raises(InvalidInput, match=missing) as error:
        import_file(written(trainer, keys, tmp_path), options)
    assert option in str(error.value.hint)


def test_files_of_firefly_train_adapters_over_4_bits_unless_they_say_otherwise(tmp_path):
    found = _import("transformers", tmp_path, template_name="llama3", bf16=True)
    assert (found.config["adapter"], found.config["base_weights"]) == ("lora", "nf4")
    assert found.config["adapter_rank"] == 64
    full = _import("transformers", tmp_path, template_name="qwen", train_mode="full")
    assert full.config["adapter"] == "none"


def test_the_batch_of_lightning_is_the_option_s_where_data_has_none(tmp_path):
    trainer = {"accumulate_grad_batches": 4}
    keys = {"data": {"class_path": "my.Data"}, "trainer": trainer}
    options = {"model": MODEL, "sequence_length": 256}
    with pytest.raises(InvalidInput, match="batch_size") as error:
        _import("lightning", tmp_path, options, **keys)
    assert "--global-batch" in str(error.value.hint)
    found = _import("lightning", tmp_path, {**options, "global_batch": 8}, **keys)
    assert found.config["micro_batch_size"] == 2


@pytest.mark.parametrize(
    ("keys", "dataset"),
    [
        ({"dataset_mixture": {"datasets": [{"id": "a/b", "config": "c", "split": "d"}]}}, "a/b"),
        ({"dataset_mixer": {"a/b": 0.5}}, "a/b"),
        ({"datasets": [{"path": "a/b"}]}, "a/b"),
        ({"dataset_id_or_path": "a/b"}, "a/b"),
    ],
)
def test_a_mixture_of_scripts_around_trl_is_its_first_dataset(keys, dataset, tmp_path):
    found = _import("trl", tmp_path, dataset_name=None, **keys)
    assert found.workload["dataset"] == dataset


def test_cut_cross_entropy_is_on_where_its_plugin_is(tmp_path):
    plugin = "axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin"
    assert _import("axolotl", tmp_path, plugins=[plugin]).config["loss"] == "chunked"
    off = _import("axolotl", tmp_path, plugins=[plugin], cut_cross_entropy=False)
    assert off.config["loss"] == "full"


def test_an_optimizer_that_autotune_lacks_is_another_one_beside_adapters_alone(tmp_path):
    lora = {"adapter": "lora", "lora_target_linear": True}
    found = _import("axolotl", tmp_path, optimizer="galore_adamw_8bit", **lora)
    assert found.config["optimizer"] == "adamw-8bit"
    assert "optimizer" in {one.key for one in found.not_taken}
    with pytest.raises(InvalidInput, match="its state decides the memory"):
        _import("axolotl", tmp_path, optimizer="galore_adamw_8bit")
    with pytest.raises(InvalidInput, match="adamw_trch") as error:
        _import("axolotl", tmp_path, optimizer="adamw_trch", **lora)
    assert "adamw_torch" in str(error.value.hint)


def test_an_unknown_key_of_a_dataset_is_one_sentence_with_the_near_one(tmp_path):
    with pytest.raises(InvalidInput, match=r"datasets\.field_message'") as error:
        _import("axolotl", tmp_path, datasets=[{"path": "a/b", "field_message": "x"}])
    assert "field_messages" in str(error.value.hint)


@pytest.mark.parametrize(
    ("targets", "layers"),
    [
        (["q_proj", "k_proj", "v_proj", "o_proj"], "attention"),
        (["q_proj", "down_proj"], "all-linear"),
        ("all-linear", "all-linear"),
        (r".*\.self_attn\.(q|k|v|o)_proj", "attention"),
        (r".*\.mlp\..*_proj", "all-linear"),
        (r"layers.[\d]+.(mlp|self_attn).(up|down|gate|q|k|v|o)_proj", "all-linear"),
    ],
)
def test_names_and_patterns_of_layers_say_where_adapters_are(targets, layers, tmp_path):
    found = _import("trl", tmp_path, use_peft=True, lora_target_modules=targets)
    assert found.config["adapter_targets"] == layers


@pytest.mark.parametrize(
    ("keys", "base_weights"),
    [
        ({"adapter": "qlora", "load_in_4bit": True}, "nf4-experts"),
        ({"adapter": "lora", "load_in_8bit": True}, "int8-experts"),
        ({"adapter": "lora", "bf16": True}, "bf16"),
    ],
)
def test_axolotl_quantizes_experts_with_the_layers(keys, base_weights, tmp_path):
    found = _import("axolotl", tmp_path, **keys, quantize_moe_experts=True)
    assert found.config["base_weights"] == base_weights


@pytest.mark.parametrize(
    ("names", "targets"),
    [
        (["mlp.experts.gate_up_proj", "mlp.experts.down_proj"], "experts"),
        (["mlp.gate.weight"], "all-linear"),
        ([], "all-linear"),
    ],
)
@pytest.mark.parametrize("trainer", ["axolotl", "trl"])
def test_names_of_weights_of_experts_say_that_these_have_adapters(
    trainer, names, targets, tmp_path
):
    said = {"lora_dropout": 0.0, "lora_target_parameters": names}
    found = _import(trainer, tmp_path, **ADAPTERS[trainer], **said)
    assert found.config["adapter_targets"] == targets
    noted = any(one.key == "lora_target_parameters" for one in found.not_taken)
    assert noted == (names == ["mlp.gate.weight"])


@pytest.mark.parametrize("trainer", ["axolotl", "trl"])
@pytest.mark.parametrize(
    ("layers", "names"),
    [("all-linear", ["experts.down_proj"]), (["q_proj", "v_proj"], ["experts.gate_up_proj"])],
    ids=["one weight", "some layers"],
)
def test_adapters_on_a_part_of_the_experts_or_layers_are_noted(trainer, layers, names, tmp_path):
    said = dict(ADAPTERS[trainer], lora_dropout=0.0, lora_target_parameters=names)
    if layers != "all-linear":
        said |= {"lora_target_linear": False} if trainer == "axolotl" else {}
        said["lora_target_modules"] = layers
    found = _import(trainer, tmp_path, **said)
    assert found.config["adapter_targets"] == "experts"
    assert any(one.key == "lora_target_parameters" for one in found.not_taken)


# -- beside adapters -------------------------------------------------------------------------------

ADAPTERS = {
    "axolotl": {"adapter": "lora", "lora_target_linear": True, "bf16": True},
    "trl": {"use_peft": True, "lora_target_modules": "all-linear"},
    "llamafactory": {"finetuning_type": "lora"},
    "transformers": {"train_mode": "qlora", "template_name": "llama3"},
}
DROPOUT_UNASKED = {"axolotl": 0.0, "trl": 0.05, "llamafactory": 0.0, "transformers": 0.05}


@pytest.mark.parametrize("trainer", ADAPTERS)
def test_dropout_of_adapters_is_the_trainers_own_unless_the_file_says_it(trainer, tmp_path):
    unasked = _import(trainer, tmp_path, **ADAPTERS[trainer])
    asked = _import(trainer, tmp_path, **ADAPTERS[trainer], lora_dropout=0.1)
    assert unasked.workload["adapter_dropout"] == DROPOUT_UNASKED[trainer]
    assert asked.workload["adapter_dropout"] == 0.1
    assert not any(one.key == "lora_dropout" for one in asked.not_taken)


ALPHA_UNASKED = {"axolotl": None, "trl": 32, "llamafactory": 16, "transformers": 16}


@pytest.mark.parametrize("trainer", ADAPTERS)
def test_alpha_is_the_trainers_own_unless_the_file_says_it(trainer, tmp_path):
    unasked = _import(trainer, tmp_path, **ADAPTERS[trainer])
    asked = _import(trainer, tmp_path, **ADAPTERS[trainer], lora_alpha=64)
    assert unasked.workload.get("adapter_alpha") == ALPHA_UNASKED[trainer]
    assert asked.workload["adapter_alpha"] == 64


SCALED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "axolotl": (
        {
            "peft_use_rslora": True,
            "peft_init_lora_weights": "pissa_niter_16",
            "lora_rank_pattern": {"q_proj": 4},
            "lora_alpha_pattern": {"q_proj": 8},
        },
        {
            "adapter_scaling": "rslora",
            "adapter_init": "pissa",
            "adapter_rank_pattern": {"q_proj": 4},
            "adapter_alpha_pattern": {"q_proj": 8},
        },
    ),
    "trl": ({"use_rslora": True}, {"adapter_scaling": "rslora"}),
    "llamafactory": (
        {"use_rslora": True, "pissa_init": True},
        {"adapter_scaling": "rslora", "adapter_init": "pissa"},
    ),
}


@pytest.mark.parametrize("trainer", SCALED)
def test_how_adapters_are_scaled_and_begin_is_taken_over(trainer, tmp_path):
    keys, settings = SCALED[trainer]
    found = _import(trainer, tmp_path, **ADAPTERS[trainer], **keys)
    assert {name: found.workload[name] for name in settings} == settings
    assert not set(keys) & {one.key for one in found.not_taken}


@pytest.mark.parametrize(
    ("trainer", "keys", "named"),
    [
        ("axolotl", {"peft_init_lora_weights": "olora"}, "peft_init_lora_weights"),
        ("axolotl", {"peft_init_lora_weights": "pissa"}, "peft_init_lora_weights"),
        ("llamafactory", {"pissa_init": True, "pissa_iter": -1}, "pissa_iter"),
    ],
)
def test_another_start_of_adapters_is_named_as_not_taken_over(trainer, keys, named, tmp_path):
    found = _import(trainer, tmp_path, **ADAPTERS[trainer], **keys)
    assert named in {one.key for one in found.not_taken}


@pytest.mark.parametrize(
    ("trainer", "key", "value", "dtype"),
    [
        ("axolotl", "lora_modules_to_save", ["embed_tokens", "lm_head"], "base"),
        ("trl", "lora_modules_to_save", ["embed_tokens", "lm_head"], "base"),
        ("llamafactory", "additional_target", "embed_tokens, lm_head", "adapter"),
        ("llamafactory", "additional_target", ["embed_tokens", "lm_head"], "adapter"),
    ],
)
def test_modules_trained_whole_are_taken_over_in_the_format_that_the_trainer_has_them_in(
    trainer, key, value, dtype, tmp_path
):
    found = _import(trainer, tmp_path, **ADAPTERS[trainer], **{key: value})
    assert found.workload["modules_to_save"] == ["embed_tokens", "lm_head"]
    assert found.workload["modules_to_save_dtype"] == dtype
    assert not any(one.key == key for one in found.not_taken)


@pytest.mark.parametrize("share", [1, 1.5, -0.1, "much"])
def test_a_dropout_that_is_no_share_is_one_sentence(share, tmp_path):
    with pytest.raises(InvalidInput, match="lora_dropout"):
        _import("trl", tmp_path, **ADAPTERS["trl"], lora_dropout=share)


def test_a_full_training_has_no_dropout_of_adapters(tmp_path):
    found = _import("axolotl", tmp_path, lora_dropout=0.05, lora_modules_to_save=["lm_head"])
    assert not {"adapter_dropout", "modules_to_save"} & set(found.workload)


@pytest.mark.parametrize("trainer", ["axolotl", "trl", "llamafactory", "transformers"])
@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune"])
def test_the_mode_of_torch_compile_is_taken_over(trainer, mode, tmp_path):
    found = _import(
        trainer,
        tmp_path,
        torch_compile=True,
        torch_compile_mode=mode,
        gradient_accumulation_steps=1,
    )
    assert (found.config["compile"], found.config["compile_mode"]) == ("model", mode)
    assert "torch_compile_mode" not in {one.key for one in found.not_taken}


@pytest.mark.parametrize("trainer", ["axolotl", "trl", "llamafactory", "transformers"])
@pytest.mark.parametrize("key", ["torch_compile_mode", "torch_compile_backend"])
def test_a_mode_or_a_backend_alone_compiles_where_the_trainer_does(trainer, key, tmp_path):
    """TrainingArguments turns compilation on by itself; axolotl passes both on where it is on."""
    said = {"torch_compile_mode": "max-autotune", "torch_compile_backend": "inductor"}
    found = _import(trainer, tmp_path, gradient_accumulation_steps=1, **{key: said[key]})
    assert found.config["compile"] == ("none" if trainer == "axolotl" else "model")


def test_cuda_graphs_of_an_accumulating_training_are_left_out_with_the_reason(tmp_path):
    keys = {"torch_compile": True, "torch_compile_mode": "reduce-overhead"}
    found = _import("trl", tmp_path, **keys, gradient_accumulation_steps=4)
    [why] = [one.why for one in found.not_taken if one.key == "torch_compile_mode"]
    assert "overwrite the gradients" in why
    assert found.config["compile_mode"] == "default"


def test_a_mode_that_torch_compile_does_not_have_is_rejected(tmp_path):
    with pytest.raises(InvalidInput, match="torch_compile_mode: 'fast'"):
        _import("trl", tmp_path, torch_compile=True, torch_compile_mode="fast")


def test_axolotls_layer_offloading_brings_frozen_layers_from_the_host(tmp_path):
    found = _import("axolotl", tmp_path, adapter="lora", layer_offloading=True)
    assert found.config["offload"] == "frozen"


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        ({"adapter": None}, "without adapters none are"),
        ({"adapter": "lora", "torch_compile": True}, "frozen layers of trials stay on the device"),
    ],
)
def test_layer_offloading_that_a_trial_cannot_do_is_named(keys, why, tmp_path):
    found = _import("axolotl", tmp_path, **keys, layer_offloading=True)
    assert why in {one.key: one.why for one in found.not_taken}["layer_offloading"]
    assert found.config["offload"] == "none"
