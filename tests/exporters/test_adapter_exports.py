"""Adapters in exports: real trainers take the promised memory, and find the trial's layers."""

import dataclasses
import re
import time

import peft
import pytest
import torch
from datasets import Dataset
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, TrainerCallback
from trl import SFTTrainer, get_peft_config

from autotune.execution.process.preparation import prepare
from autotune.execution.tasks import Prepare
from autotune.exporters import TARGETS, adapters
from autotune.memory.cpu import CpuMeter
from autotune.models.hugging_face import find_parts
from autotune.shipped.adapters import add_adapters, linear_layers
from autotune.shipped.hugging_face import HuggingFaceModel
from autotune.shipped.quantized import tensors_behind
from autotune.shipped.tensors import held_tensors
from autotune.spec.config import TrainingConfig
from autotune.spec.model_file import model_name
from autotune.spec.training_request import TrainingRequest
from autotune.spec.workload import make_workload
from autotune.techniques import adapter
from autotune.training.trainer import Trainer
from tests.exporters.readers.hugging_face import imported
from tests.exporters.readers.trl import parse, tokenizer
from tests.exporters.recipes import recipe

LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 256,
    "max_position_embeddings": 64,
}
LORA = {
    "precision": "bf16-mixed",
    "checkpointing": "block",
    "adapter": "lora",
    "adapter_rank": 16,
    "base_weights": "bf16",
    "optimizer_fusion": "kernel",
}
QLORA = {**LORA, "base_weights": "nf4"}
BATCH, LENGTH, STEPS = 4, 64, 4


def llama(folder):
    torch.manual_seed(1)
    settings = {name: value for name, value in LLAMA.items() if name != "model_type"}
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING["llama"](**settings))
    model.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def workload(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "llama"
    named = {
        "model": model_name(LLAMA),
        "model_config": LLAMA,
        "pretrained": True,
        "model_source": llama(folder),
        "model_sha256": "",
    }
    sizes = {"global_batch": BATCH, "sequence_length": LENGTH, "steps": 12, "warmup_steps": 3}
    sizes |= {"layers": 4, "width": 64, "heads": 2, "evaluation_sequences": 4, "vocab_size": 256}
    return make_workload("cpu", {**named, **sizes})


@pytest.fixture(scope="module")
def prepared(workload, tmp_path_factory):
    folder = tmp_path_factory.mktemp("study") / "prepared"
    prepare(Prepare(workload=workload, folder=folder))
    return folder


def peak_of_trial(workload, prepared, config):
    request = TrainingRequest(
        workload=workload,
        config=config,
        folder=prepared,
        device="cpu",
        cap_bytes=2**40,
        requested_at=time.monotonic(),
    )
    trainer, meter = Trainer(request), CpuMeter()
    batches = trainer.batches()
    for step in range(STEPS - 1):
        trainer.take_step(step, next(batches))
    with meter.measuring(trainer._resident_tensors):
        trainer.take_step(STEPS - 1, next(batches))
    return meter.reading().peak_memory_bytes


class PeakOfLastStep(TrainerCallback):
    """Measures as a trial does what is alive in the last step of transformers' Trainer."""

    def __init__(self):
        self.meter = CpuMeter()

    def on_step_begin(self, args, state, control, *, model, optimizer, **_):
        if state.global_step == STEPS - 1:
            states = getattr(optimizer, "optimizer", optimizer).state.values()
            tensors = [value for state in states for value in state.values()]
            weights = [part for one in model.parameters() for part in tensors_behind(one)]
            held = [tensor for part in model.modules() for _, tensor in held_tensors(part)]
            kept = [*weights, *held, *(one for one in tensors if isinstance(one, torch.Tensor))]
            self.recording = self.meter.measuring(lambda: kept)
            self.recording.__enter__()

    def on_step_end(self, args, state, control, **_):
        if state.global_step == STEPS:
            self.recording.__exit__(None, None, None)

    def peak(self):
        return self.meter.reading().peak_memory_bytes


def exported(target, workload, settings):
    config = TrainingConfig(micro_batch_size=workload.global_batch, **settings)
    asked = dataclasses.replace(recipe(config, device_type="cpu"), workload=workload)
    return config, TARGETS[target].write(asked, TARGETS[target].versions[0])


CHANGES = {
    "max_steps": STEPS,
    "save_strategy": "no",
    "disable_tqdm": True,
    "report_to": "none",
    "logging_strategy": "no",
}


def peak_of_transformers(export, workload, folder):
    callback = PeakOfLastStep()
    tokens = torch.arange(LENGTH) % 256
    with imported(export.files["autotune_trainer.py"]) as module:
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_pretrained(workload.model_source, **module.model_kwargs())
        trainer = module.AutotuneTrainer(
            model=model,
            args=module.training_arguments(str(folder), **CHANGES),
            train_dataset=[{"input_ids": tokens, "labels": tokens}] * (BATCH * STEPS),
            callbacks=[callback],
        )
        trainer.train()
        trainer.save_model()
    assert (folder / "adapter_model.safetensors").exists()
    return callback.peak()


def peak_of_trl(export, workload, folder):
    _, args, model_args, _ = parse(
        export.files["sft.yaml"], **{**CHANGES, "output_dir": str(folder)}
    )
    callback = PeakOfLastStep()
    data = Dataset.from_dict({"input_ids": [list(range(LENGTH))] * (BATCH * STEPS)})
    trainer = SFTTrainer(
        workload.model_source,
        args,
        train_dataset=data,
        processing_class=tokenizer(),
        peft_config=get_peft_config(model_args),
        callbacks=[callback],
    )
    trainer.train()
    return callback.peak()


QUICK = {"LoRA": LORA, "int8": {**LORA, "base_weights": "int8", "loss": "chunked"}}
SLOW = {
    "QLoRA": QLORA,
    "DoRA, nf4": {**QLORA, "adapter": "dora"},
    "fp8": {**LORA, "base_weights": "fp8"},
    "float32": {"adapter": "lora", "adapter_targets": "attention", "checkpointing": "every-2"},
    "bfloat16": {**LORA, "precision": "bf16-true", "base_weights": "trained"},
    "in backward": {**QLORA, "optimizer_fusion": "backward"},
    "from the host": {**QLORA, "offload": "frozen"},
    "in 16 bits, from the host": {**LORA, "offload": "frozen"},
}


@pytest.mark.slow
@pytest.mark.parametrize("settings", QUICK.values(), ids=QUICK)
def test_a_trainer_of_transformers_takes_the_memory_of_the_trial(
    settings, workload, prepared, tmp_path
):
    config, export = exported("transformers", workload, settings)
    peak = peak_of_transformers(export, workload, tmp_path / "out")
    assert peak == peak_of_trial(workload, prepared, config)


@pytest.mark.slow
@pytest.mark.parametrize("settings", SLOW.values(), ids=SLOW)
def test_with_any_adapter_a_trainer_of_transformers_takes_the_memory_of_the_trial(
    settings, workload, prepared, tmp_path
):
    config, export = exported("transformers", workload, settings)
    peak = peak_of_transformers(export, workload, tmp_path / "out")
    assert peak == peak_of_trial(workload, prepared, config)


def beside(workload, saved_dtype):
    """The workload with dropout of adapters, and embedding and head trained whole."""
    return dataclasses.replace(
        workload,
        adapter_dropout=0.05,
        modules_to_save=("embed_tokens", "lm_head"),
        modules_to_save_dtype=saved_dtype,
    )


@pytest.mark.slow
@pytest.mark.parametrize("saved_dtype", ["adapter", "base"])
def test_with_dropout_and_whole_modules_a_trainer_of_transformers_takes_the_memory_of_the_trial(
    saved_dtype, workload, prepared, tmp_path
):
    whole = beside(workload, saved_dtype)
    config, export = exported("transformers", whole, LORA)
    peak = peak_of_transformers(export, whole, tmp_path / "out")
    # A trained embedding keeps its tokens: Trainer has them anyway, a trial copies a micro batch.
    tokens_bytes = BATCH * LENGTH * torch.int64.itemsize
    assert peak + tokens_bytes == peak_of_trial(whole, prepared, config)
    loaded = peft.PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(workload.model_source), tmp_path / "out"
    )
    for module in (loaded.get_input_embeddings(), loaded.get_output_embeddings()):
        copied = module.modules_to_save["default"].weight
        assert not torch.equal(copied, module.original_module.weight)


@pytest.mark.slow
@pytest.mark.parametrize("settings", [LORA, QLORA], ids=["LoRA", "QLoRA"])
def test_trl_takes_the_memory_of_the_trial_and_the_buffer_that_the_export_names(
    settings, workload, prepared, tmp_path
):
    config, export = exported("trl", workload, {**settings, "loss": "chunked"})
    [note] = (note for note in export.notes if "32,768 numbers" in note)
    buffer_bytes = BATCH * LENGTH * 32_768 * 2
    assert f"{buffer_bytes // 2**20}.00 MiB" in note
    peak = peak_of_trl(export, workload, tmp_path / "out") - buffer_bytes
    assert peak == pytest.approx(peak_of_trial(workload, prepared, config), rel=0.1)


FAMILIES = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "mistral": {},
    "gemma": {"head_dim": 16},
    "phi3": {"pad_token_id": 0},
    "phi": {},
    "olmo2": {},
    "gpt2": {"n_embd": 32, "n_head": 2, "n_layer": 2},
    "gpt_neox": {},
    "opt": {"ffn_dim": 64, "word_embed_proj_dim": 32},
    "falcon": {},
    "bloom": {"n_head": 2, "n_layer": 2},
    "gptj": {"n_embd": 32, "n_head": 2, "n_layer": 2, "rotary_dim": 8},
}


@pytest.mark.parametrize(("family", "settings"), FAMILIES.items(), ids=FAMILIES)
def test_the_pattern_of_attention_layers_finds_those_of_trials(family, settings):
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 64}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 2}
    if "n_embd" in settings or family == "bloom":
        sizes = {"vocab_size": 64}
    config = CONFIG_MAPPING[family](**{**sizes, **settings})
    with torch.device("meta"):
        model = HuggingFaceModel(AutoModelForCausalLM.from_config(config))
    wanted = {path for path, _ in adapter.target_layers(find_parts(model), "attention")}
    found = {
        path
        for path, part in model.named_modules()
        if re.fullmatch(adapters.ATTENTION_LAYERS, path)
    }
    assert found == wanted
    assert wanted


# -- what peft makes of the names of layers --------------------------------------------------------

MIXTURE_SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "vocab_size": 64,
    "num_experts_per_tok": 2,
}
MIXTURES = {
    "mixtral": {"num_local_experts": 4},
    "gpt_oss": {"num_local_experts": 4},
    "qwen3_moe": {"num_experts": 4},
    "qwen3_moe with a dense block": {"num_experts": 4, "mlp_only_layers": [0]},
    "glm4_moe": {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
}


TAKEN_FOR_EXPERTS = ("qwen3_moe with a dense block", "glm4_moe")
"""Their dense layers and shared experts have the names of what their experts were."""


def mixture(name):
    """A mixture of transformers, and the paths of the linear layers of its blocks."""
    config = CONFIG_MAPPING[name.partition(" ")[0]](**MIXTURE_SIZES, **MIXTURES[name])
    model = AutoModelForCausalLM.from_config(config)
    return model, linear_layers(model, model.model.layers)


@pytest.mark.parametrize("name", sorted(MIXTURES.keys() - TAKEN_FOR_EXPERTS))
def test_a_script_adapts_the_linear_layers_of_a_mixture(name):
    model, layers = mixture(name)
    add_adapters(model, layers, {"r": 2}, dtype=torch.float32)
    trained = (path for path, weight in model.named_parameters() if weight.requires_grad)
    assert {path.partition(".lora_")[0] for path in trained} == set(layers)


@pytest.mark.parametrize("name", TAKEN_FOR_EXPERTS)
def test_a_script_ends_where_peft_takes_layers_for_experts(name):
    model, layers = mixture(name)
    with pytest.raises(ValueError, match=r"no adapter beside .*choose adapter_targets attention"):
        add_adapters(model, layers, {"r": 2}, dtype=torch.float32)
