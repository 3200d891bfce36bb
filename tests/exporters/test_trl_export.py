"""`sft.yaml` in use: effects on real steps of a real SFTTrainer with four layers."""

import copy
import subprocess
import sys

import pytest
import torch
import transformers.modeling_utils
import yaml
from datasets import Dataset
from transformers import AutoTokenizer
from trl import SFTTrainer

from autotune.exporters.trl import write
from autotune.spec.config import TrainingConfig
from autotune.spec.model_file import model_name
from tests.building import chat
from tests.exporters.readers.hugging_face import LAYERS, counted_checkpoints, tiny_llama
from tests.exporters.readers.trl import parse, tokenizer
from tests.exporters.recipes import recipe
from tests.exporters.test_chat_exports import chat_workload
from tests.exporters.test_transformers_export import PLAINEST, check_by_hand, of_large_vocabulary

STEPS = 2


def exported(**settings):
    workload = settings.pop("workload", {})
    config = TrainingConfig(micro_batch_size=2, **settings)
    return write(recipe(config, global_batch=4, sequence_length=16, steps=20, **workload), "1.16")


@pytest.fixture
def sft_trainer(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HUB_DISABLE_TELEMETRY", "1")

    def make(**settings):
        changes = {
            "output_dir": str(tmp_path),
            "max_steps": STEPS,
            "save_strategy": "no",
            "disable_tqdm": True,
        }
        _, args, _, _ = parse(exported(**settings).files["sft.yaml"], **changes)
        model = tiny_llama(dtype=getattr(torch, args.model_init_kwargs["dtype"]))
        args.model_init_kwargs = None
        data = Dataset.from_dict({"text": ["a b c d e f g h"] * 40})
        return SFTTrainer(model, args, train_dataset=data, processing_class=tokenizer())

    return make


CALLS = {"none": 0, "every-4": 1, "every-2": 2, "block": LAYERS}


@pytest.mark.slow
@pytest.mark.parametrize(("value", "calls"), CALLS.items(), ids=CALLS)
def test_a_real_step_checkpoints_so_many_layers(value, calls, sft_trainer):
    with counted_checkpoints(transformers.modeling_utils) as made:
        sft_trainer(checkpointing=value).train()
    assert len(made) == STEPS * 2 * calls  # two micro batches a step


@pytest.mark.parametrize(
    ("precision", "numbers"),
    [
        ("fp32", (torch.float32, torch.float32)),
        ("bf16-mixed", (torch.float32, torch.bfloat16)),
        ("bf16-true", (torch.bfloat16, torch.bfloat16)),
    ],
)
def test_a_real_step_has_weights_and_products_in_these_numbers(precision, numbers, sft_trainer):
    trainer, products = sft_trainer(precision=precision), set()
    projection = trainer.model.model.layers[0].mlp.up_proj
    projection.register_forward_hook(lambda _module, _inputs, output: products.add(output.dtype))
    trainer.train()
    assert (projection.weight.dtype, products) == (numbers[0], {numbers[1]})


@pytest.mark.slow
@pytest.mark.parametrize("micro_batches", [1, 4])
@pytest.mark.parametrize("data", ["packed", "padded", "conversations"])
def test_the_loss_of_a_step_is_the_mean_over_its_labels(data, micro_batches, tmp_path, monkeypatch):
    """Whatever the number of micro batches, and whichever of them have more labels."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    sizes = {"global_batch": 4, "steps": 20, "learning_rate_warmup_steps": 2}
    if data == "conversations":
        workload = chat_workload(tmp_path, template=chat.WITH_MARKS, packing="padded").to_dict()
        rows, words = chat.conversations(), AutoTokenizer.from_pretrained(workload["tokenizer"])
    else:
        workload = {"packing": data, "sequence_length": 16}
        lengths = (15, 3, 9, 5) * 20
        rows, words = [{"text": "a b c d e f g h"[:length]} for length in lengths], tokenizer()
    config = TrainingConfig(micro_batch_size=4 // micro_batches)
    text = write(recipe(config, **{**workload, **sizes}), "1.16").files["sft.yaml"]
    changes = {"output_dir": str(tmp_path / "out"), "max_steps": STEPS, "save_strategy": "no"}
    changes |= PLAINEST
    _, args, _, _ = parse(text, **changes)
    args.model_init_kwargs = None
    model = of_large_vocabulary()
    plain = copy.deepcopy(model)  # trl replaces the forward of its own
    trainer = SFTTrainer(
        model,
        args,
        train_dataset=Dataset.from_list(rows),
        processing_class=words,
    )
    check_by_hand(plain, trainer, micro_batches=micro_batches)


def test_all_logits_never_exist_at_once(sft_trainer):
    trainer, calls = sft_trainer(), []
    trainer.model.lm_head.register_forward_hook(lambda *_: calls.append(1))
    trainer.train()
    assert calls == []


def test_sequences_are_cut_from_one_stream(sft_trainer):
    trainer = sft_trainer()
    # Nine tokens a text, with its end: sequences of 16 hold parts of several.
    assert {len(row["input_ids"]) for row in trainer.train_dataset} <= {16, 40 * 9 % 16}


def test_the_optimizer_is_torchs_own_with_the_workloads_settings(sft_trainer):
    trainer = sft_trainer(optimizer_fusion="kernel")
    optimizer = trainer.create_optimizer()
    assert type(optimizer) is torch.optim.AdamW
    assert (optimizer.defaults["fused"], optimizer.param_groups[0]["weight_decay"]) == (True, 0.01)


@pytest.mark.parametrize("attention", ["flash", "cudnn"])
def test_a_kernel_that_takes_no_mask_is_not_expressed_where_compiled_code_makes_one(attention):
    export = exported(precision="bf16-mixed", compile="model", attention=attention)
    assert [(r.instead) for r in export.unsupported if r.setting == "attention"] == ["auto"]
    assert "torch.backends" not in export.files["autotune_launch.py"]


def test_pretrained_weights_and_text_of_the_workload_are_filled_in():
    config = tiny_llama().config.to_dict() | {"model_type": "llama", "vocab_size": 256}
    named = {
        "model": model_name(config),
        "model_config": config,
        "pretrained": True,
        "model_source": "somebody/model",
    }
    keys = yaml.safe_load(
        exported(workload={**named, "dataset": "my.jsonl", "text_column": "body"}).files["sft.yaml"]
    )
    assert keys["model_name_or_path"] == "somebody/model"
    assert keys["datasets"] == [{"path": "json", "data_files": "my.jsonl", "split": "train"}]
    assert keys["dataset_text_field"] == "body"


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"checkpointing": "every-2"},
        {"attention": "math"},
        {"precision": "bf16-mixed", "adapter": "lora", "base_weights": "int8"},
        {
            "precision": "bf16-mixed",
            "adapter": "dora",
            "base_weights": "nf4",
            "adapter_targets": "attention",
            "optimizer": "paged-adamw-8bit",
        },
    ],
    ids=["plain", "launched", "int8", "nf4"],
)
def test_the_printed_command_trains(settings, tmp_path):
    tiny_llama().save_pretrained(tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "text.txt").write_text("a b c d e f g h\n" * 200)
    export = exported(**settings, workload={"dataset": "text.txt"})
    for name, text in export.files.items():
        (tmp_path / name).write_text(text.replace("<MODEL>", "model"))
    with (tmp_path / "sft.yaml").open("a") as file:
        file.write("use_cpu: true\nreport_to: none\n")
    command = export.command.replace("trl sft", "python -m trl.cli.main sft").replace(
        "python", sys.executable
    )
    done = subprocess.run(command.split(), cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    file = "adapter_model.safetensors" if "adapter" in settings else "model.safetensors"
    assert (tmp_path / "trainer_output" / file).exists()
