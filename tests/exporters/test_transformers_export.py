"""`autotune_trainer.py` in use: effects on real steps of a real Trainer with four layers."""

import contextlib
import copy
import subprocess
import sys

import pytest
import torch
import transformers
import transformers.modeling_utils
from transformers import AutoTokenizer

from autotune.exporters.transformers import write
from autotune.exporters.transformers.training_script import FILE as SCRIPT
from autotune.models.config_class import make_config
from autotune.shipped.hugging_face import hugging_face_model
from autotune.spec.config import TrainingConfig
from autotune.spec.model_file import model_name
from autotune.training.step import TrainingStep
from tests.building import chat
from tests.exporters.readers.hugging_face import (
    LAYERS,
    counted_checkpoints,
    imported,
    tiny_llama,
)
from tests.exporters.recipes import recipe
from tests.exporters.test_chat_exports import chat_workload
from tests.exporters.test_exporter_contract import WORKLOADS

STEPS = 2
PLAINEST = {"optim": "sgd", "learning_rate": 0.1, "weight_decay": 0.0}
"""Arguments that replace the optimizer of an export."""


def exported(version="5", micro_batch_size=4, workload=(), **settings):
    config = TrainingConfig(micro_batch_size=micro_batch_size, **settings)
    sizes = {"global_batch": 4, "sequence_length": 16, "steps": 20, "learning_rate_warmup_steps": 2}
    return write(recipe(config, **{**sizes, **dict(workload)}), version)


@contextlib.contextmanager
def trainer_of(export, folder, **changes):
    with imported(export.files["autotune_trainer.py"]) as module:
        options = {
            "report_to": "none",
            "save_strategy": "no",
            "disable_tqdm": True,
            "logging_steps": 1,
            **changes,
        }
        options = {"max_steps": STEPS, **options}
        args = module.training_arguments(str(folder), use_cpu=True, **options)
        data = module.sequences(
            ["a quick fox jumps "] * 40, lambda text: [ord(letter) % 64 for letter in text]
        )
        yield module, module.AutotuneTrainer(tiny_llama(), args, train_dataset=data)


def trained(export, folder, **changes):
    """Losses of all steps, and weights."""
    with trainer_of(export, folder, **changes) as (_, trainer):
        trainer.train()
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        return losses, {name: weight.detach() for name, weight in trainer.model.named_parameters()}


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return trained(exported(), tmp_path_factory.mktemp("plain"))


# -- the same training -----------------------------------------------------------------------------

SAME = {
    **{
        value: {"checkpointing": value}
        for value in ("attention", "selective", "every-4", "every-2", "block", "sqrt")
    },
    "accumulated": {"micro_batch_size": 2},
    "kernel": {"optimizer_fusion": "kernel"},
    "foreach": {"optimizer_fusion": "foreach"},
    "backward": {"optimizer_fusion": "backward"},
    "chunked": {"loss": "chunked"},
    "chunked and accumulated": {"loss": "chunked", "micro_batch_size": 2},
    "every-2 before transformers 5.16": {"checkpointing": "every-2", "version": "4.57"},
    "offload": {"activation_offload": "cpu"},
}


@pytest.mark.slow
@pytest.mark.parametrize("settings", SAME.values(), ids=SAME)
def test_a_technique_that_changes_no_numbers_trains_as_without_it(settings, plain, tmp_path):
    losses, weights = trained(exported(**settings), tmp_path)
    assert losses == pytest.approx(plain[0], rel=1e-5)
    for name, weight in weights.items():
        torch.testing.assert_close(weight, plain[1][name], rtol=1e-4, atol=1e-5)


def test_a_step_is_that_of_a_loop_by_hand(plain, tmp_path):
    """All parameters decay, the loss is a mean over the batch, the first rate is not zero."""
    model = tiny_llama()
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.01, foreach=False)
    with trainer_of(exported(), tmp_path) as (_, trainer):
        batches = list(trainer.get_train_dataloader())[:STEPS]
    for batch, share in zip(batches, (0.5, 1.0), strict=True):
        optimizer.param_groups[0]["lr"] = 2e-3 * share
        logits = model(input_ids=batch["input_ids"]).logits[:, :-1]
        torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), batch["labels"][:, 1:].flatten()
        ).backward()
        optimizer.step()
        optimizer.zero_grad()
    for name, weight in model.named_parameters():
        torch.testing.assert_close(weight.detach(), plain[1][name], rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("micro_batches", [1, 4])
@pytest.mark.parametrize("data", ["packed", "padded", "conversations"])
def test_the_loss_of_a_step_is_the_mean_over_its_labels(data, micro_batches, tmp_path):
    """Whatever the number of micro batches, and whichever of them have more labels."""
    if data == "conversations":
        workload = chat_workload(tmp_path, packing="padded").to_dict()
        workload |= {"global_batch": 4, "steps": 20, "learning_rate_warmup_steps": 2}
    else:
        workload = {"packing": data}
    export = exported(micro_batch_size=4 // micro_batches, workload=workload)
    with imported(export.files["autotune_trainer.py"]) as module:
        if data == "conversations":
            tokenizer = AutoTokenizer.from_pretrained(workload["tokenizer"])
            samples = module.sequences(chat.conversations(), tokenizer)
        else:
            texts = ["a quick fox jumps over"[:length] for length in (20, 4, 9, 16)] * 20
            samples = module.sequences(texts, lambda text: [ord(letter) % 64 for letter in text])
        args = module.training_arguments(
            str(tmp_path / "out"),
            use_cpu=True,
            max_steps=STEPS,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
            **PLAINEST,
        )
        model = of_large_vocabulary()
        plain = copy.deepcopy(model)
        trainer = module.AutotuneTrainer(model, args, train_dataset=samples)
        check_by_hand(plain, trainer, micro_batches=micro_batches)


def of_large_vocabulary():
    model = tiny_llama()
    model.resize_token_embeddings(chat.VOCABULARY)
    return model


def check_by_hand(model, trainer, *, micro_batches):
    """Train, and `model` by hand on the same: a step's summed loss is divided by its labels once.

    By the plainest optimizer: others scale gradients, and so hide how large they are.
    """
    batches, rates = [], []
    training_step = trainer.training_step

    def recorded(module, inputs, *args, **options):
        batches.append({name: inputs[name].clone() for name in ("input_ids", "labels")})
        rates.append(trainer.optimizer.param_groups[0]["lr"])
        return training_step(module, inputs, *args, **options)

    trainer.training_step = recorded
    trainer.train()
    optimizer = torch.optim.SGD(model.parameters())
    assert len(batches) == STEPS * micro_batches
    for first in range(0, len(batches), micro_batches):
        parts = batches[first : first + micro_batches]
        optimizer.param_groups[0]["lr"] = rates[first]
        labels_of_step = sum((part["labels"][:, 1:] != -100).sum() for part in parts)
        for part in parts:
            logits = model(input_ids=part["input_ids"]).logits[:, :-1].flatten(0, 1)
            labels = part["labels"][:, 1:].flatten()
            summed = torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
            (summed / labels_of_step).backward()
        optimizer.step()
        optimizer.zero_grad()
    by_hand = dict(model.named_parameters())
    for name, weight in trainer.model.named_parameters():
        torch.testing.assert_close(weight.detach(), by_hand[name].detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "workload", [WORKLOADS["cosine"], WORKLOADS["plain"]], ids=["cosine", "constant"]
)
def test_the_rate_of_every_step_is_that_of_the_trial(workload, tmp_path):
    asked = recipe(**workload)
    step = TrainingStep(
        None, workload=asked.workload, config=asked.config, device=None, marker=None
    )
    with imported(write(asked, "5").files["autotune_trainer.py"]) as module:
        for index in range(asked.workload.steps):
            rate = module.scheduled_rate(
                index,
                rate=2e-3,
                steps=asked.workload.steps,
                warmup_steps=asked.workload.learning_rate_warmup_steps,
                schedule=module.SCHEDULE,
            )
            assert rate == pytest.approx(step.learning_rate(index))


# -- effects ---------------------------------------------------------------------------------------

CALLS = {
    "none": 0,
    "attention": LAYERS,
    "selective": LAYERS,
    "every-4": 1,
    "every-2": 2,
    "block": LAYERS,
    "sqrt": 2,
}


@pytest.mark.parametrize(("value", "calls"), CALLS.items(), ids=CALLS)
def test_a_real_step_checkpoints_so_many_parts(value, calls, tmp_path):
    with (
        trainer_of(exported(checkpointing=value), tmp_path) as (module, trainer),
        counted_checkpoints(
            *(m for m in (module, transformers.modeling_utils) if hasattr(m, "checkpoint"))
        ) as made,
    ):
        trainer.train()
    assert len(made) == STEPS * calls


DTYPES = {
    "fp32": (torch.float32, torch.float32),
    "bf16-mixed": (torch.float32, torch.bfloat16),
    "bf16-true": (torch.bfloat16, torch.bfloat16),
    "bf16-stochastic": (torch.bfloat16, torch.bfloat16),
}


@pytest.mark.parametrize("precision", DTYPES)
def test_a_real_step_has_weights_and_products_in_these_numbers(precision, tmp_path):
    products = set()
    with trainer_of(exported(precision=precision), tmp_path) as (_, trainer):
        projection = trainer.model.model.layers[0].mlp.up_proj
        projection.register_forward_hook(
            lambda _module, _inputs, output: products.add(output.dtype)
        )
        trainer.train()
        [product] = products
        assert (projection.weight.dtype, product) == DTYPES[precision]


def test_gradients_of_weights_in_bf16_are_added_up_in_fp32(tmp_path):
    settings = {"precision": "bf16-true", "gradient_accumulation_dtype": "fp32"}
    with trainer_of(exported(micro_batch_size=1, **settings), tmp_path) as (_, trainer):
        seen = []
        trainer.add_callback(
            Spy(lambda: seen.append({(p.dtype, p.grad.dtype) for p in trainer.model.parameters()}))
        )
        trainer.train()
        assert seen == [{(torch.bfloat16, torch.float32)}] * STEPS


def test_with_a_step_in_backward_no_gradient_outlives_it(tmp_path):
    with trainer_of(exported(optimizer_fusion="backward"), tmp_path) as (_, trainer):
        seen = []
        trainer.add_callback(
            Spy(lambda: seen.append([p.grad is None for p in trainer.model.parameters()]))
        )
        trainer.train()
        assert len(seen) == STEPS
        assert all(map(all, seen))


class Spy(transformers.TrainerCallback):
    def __init__(self, look):
        self.look = look

    def on_pre_optimizer_step(self, *_args, **_kwargs):
        self.look()


def test_with_a_step_in_backward_a_training_goes_on_from_its_checkpoint(tmp_path):
    with trainer_of(
        exported(optimizer_fusion="backward"), tmp_path, save_strategy="steps", save_steps=1
    ) as (_, first):
        first.train()
        unbroken = {
            name: weight.detach().clone() for name, weight in first.model.named_parameters()
        }
    with trainer_of(exported(optimizer_fusion="backward"), tmp_path) as (_, second):
        second.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
        for name, weight in second.model.named_parameters():
            torch.testing.assert_close(weight.detach(), unbroken[name])


@pytest.mark.parametrize(
    "settings",
    [
        {"checkpointing": "selective"},
        {"checkpointing": "sqrt"},
        {"precision": "fp8"},
        {"precision": "int8-mixed"},
    ],
)
def test_what_is_saved_has_the_usual_names(settings, tmp_path):
    with trainer_of(exported(**settings), tmp_path) as (_, trainer):
        assert list(trainer.model.state_dict()) == list(tiny_llama().state_dict())


def test_changes_of_the_user_have_an_effect(tmp_path):
    with trainer_of(
        exported(), tmp_path, optim="sgd", lr_scheduler_type="linear", learning_rate=0.5
    ) as (_, trainer):
        assert isinstance(trainer.create_optimizer(), torch.optim.SGD)
        assert trainer.create_scheduler(10).base_lrs == [
            0.5,
            0.5,
        ]  # transformers' groups: with and without decay


@pytest.mark.slow
def test_compiled_blocks_are_one_graph_and_plainly_causal(tmp_path):
    """A mask in its place would leave flash attention no kernel."""
    masks = set()
    settings = {
        "compile": "block",
        "memory_budget": 0.5,
        "attention": "flash",
        "precision": "bf16-mixed",
    }
    torch._dynamo.reset()
    with trainer_of(exported(**settings), tmp_path, max_grad_norm=0.0) as (_, trainer):
        trainer.model.model.layers[0].register_forward_pre_hook(
            lambda _module, _args, kwargs: masks.add(kwargs.get("attention_mask")), with_kwargs=True
        )
        torch._dynamo.utils.counters.clear()
        trainer.train()
        assert masks == {None}
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
        assert torch._functorch.config.activation_memory_budget == 0.5


# -- as a user -------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("packing", ["packed", "padded"])
def test_the_exported_script_trains_in_its_folder(packing, tmp_path):
    settings = {"checkpointing": "selective", "loss": "chunked"}
    run_script(tmp_path, packing=packing, settings=settings)
    assert (tmp_path / "trainer_output" / "model.safetensors").exists()


@pytest.mark.slow
@pytest.mark.parametrize("base_weights", ["bf16", "int8", "nf4"])
def test_the_exported_script_saves_adapters_apart(base_weights, tmp_path):
    settings = {"precision": "bf16-mixed", "adapter": "lora", "base_weights": base_weights}
    run_script(tmp_path, packing="packed", settings=settings)
    assert (tmp_path / "trainer_output" / "adapter_model.safetensors").exists()


def run_script(tmp_path, *, packing, settings):
    config = tiny_llama().config.to_dict() | {"model_type": "llama", "vocab_size": 256}
    (tmp_path / "text.txt").write_text("a line of text for a model to learn\n" * 400)
    named = {
        "model": model_name(config),
        "model_config": config,
        "dataset": str(tmp_path / "text.txt"),
        "packing": packing,
    }
    export = exported(**settings, workload={**named, "steps": 9, "device_type": "cpu"})
    for name, text in export.files.items():
        (tmp_path / name).write_text(text)
    done = subprocess.run([sys.executable, SCRIPT], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# -- a model's own loss ----------------------------------------------------------------------------

MIXTRAL = {
    "model_type": "mixtral",
    "output_router_logits": True,
    "router_aux_loss_coef": 0.5,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 4,
    "vocab_size": 256,
}


def test_linear_layers_and_experts_get_adapters_and_learn(tmp_path):
    workload = {"model": model_name(MIXTRAL), "model_config": MIXTRAL}
    choices = {"adapter": "lora", "adapter_targets": "experts", "adapter_rank": 2}
    model = transformers.AutoModelForCausalLM.from_config(make_config(dict(MIXTRAL)))
    # Each matrix [rows, columns] gets two of rank 2; of a weight of experts, each of its matrices.
    matrices = [
        weight.shape if weight.dim() == 3 else (1, *weight.shape)
        for name, weight in model.model.layers.named_parameters()
        if weight.dim() == 3 or name.endswith("_proj.weight")
    ]
    expected = sum(2 * count * (rows + columns) for count, rows, columns in matrices)
    with imported(exported(workload=workload, **choices).files["autotune_trainer.py"]) as module:
        args = module.training_arguments(
            str(tmp_path), use_cpu=True, max_steps=2, report_to="none", save_strategy="no"
        )
        data = module.sequences(["a quick fox jumps "] * 40, lambda text: [3] * len(text))
        trainer = module.AutotuneTrainer(model, args, train_dataset=data)
        trainer.train()
    trained = {name: one for name, one in model.named_parameters() if one.requires_grad}
    assert sum(one.numel() for one in trained.values()) == expected
    assert all(one.any() for name, one in trained.items() if "lora_B" in name), "all have learned"


@pytest.mark.parametrize("micro_batch_size", [1, 2, 4])
def test_the_balance_of_experts_weighs_as_in_the_trial(micro_batch_size, tmp_path):
    workload = {"model": model_name(MIXTRAL), "model_config": MIXTRAL, "packing": "padded"}
    export = exported(micro_batch_size=micro_batch_size, workload=workload)
    with imported(export.files["autotune_trainer.py"]) as module:
        args = module.training_arguments(
            str(tmp_path),
            use_cpu=True,
            max_steps=1,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
            logging_steps=1,
        )
        data = module.sequences(
            [chr(97 + n % 20) * (4 + 3 * n) + "xyz" for n in range(4)],
            lambda text: [ord(letter) % 64 for letter in text],
        )
        config = make_config(dict(MIXTRAL))
        transformers.set_seed(0)
        network = transformers.AutoModelForCausalLM.from_config(config)
        trial = hugging_face_model(copy.deepcopy(network))
        trainer = module.AutotuneTrainer(network, args, train_dataset=data)
        rows = [
            row
            for batch in trainer.get_train_dataloader()
            for row in zip(batch["input_ids"], batch["labels"], strict=True)
        ]
        trainer.train()
    [loss] = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    tokens, labels = (torch.stack(part) for part in zip(*rows, strict=True))
    following = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
    total = sum(
        trial(*part)
        for part in zip(
            tokens.split(micro_batch_size), following.split(micro_batch_size), strict=True
        )
    )
    assert loss == pytest.approx((total / (following >= 0).sum()).item(), rel=1e-5)
