"""The exported script trains as the trial did: same losses, same peak memory, same tokens."""

import dataclasses
import importlib
import time

import pytest
import torch

from autotune.execution.process.preparation import prepare
from autotune.execution.tasks import Prepare
from autotune.exporters import TARGETS
from autotune.memory.cpu import CpuMeter
from autotune.shipped.quantized import tensors_behind
from autotune.spec.config import TrainingConfig
from autotune.spec.model_file import model_name
from autotune.spec.workload import make_workload
from tests.exporters.readers.pytorch_script import loaded
from tests.exporters.recipes import recipe
from tests.exporters.texts import settings_of_text
from tests.techniques.test_experts import OWN as MIXTURE

STEPS = 4
GLOBAL_BATCH = 4
SUMS_IN_FP32 = {
    "precision": "bf16-true",
    "gradient_accumulation_dtype": "fp32",
    "micro_batch_size": 1,
}
EAGER = {
    "plain": {},
    "bf16-mixed": {"precision": "bf16-mixed"},
    "bf16-true": {"precision": "bf16-true"},
    "bf16-stochastic in backward": {"precision": "bf16-stochastic", "optimizer_fusion": "backward"},
    **{
        f"checkpointing {value}": {"checkpointing": value}
        for value in ("attention", "selective", "every-2", "sqrt")
    },
    **{
        f"optimizer {value}": {"optimizer": value}
        for value in ("adafactor", "sgd", "adafactor-fixed-rate", "adamw-bf16", "muon")
    },
    "fusion foreach": {"optimizer_fusion": "foreach"},
    "micro batches of 2, math": {"micro_batch_size": 2, "attention": "math"},
    "gradients added up in fp32": SUMS_IN_FP32,
    "several": {
        "precision": "bf16-mixed",
        "checkpointing": "block",
        "loss": "chunked",
        "optimizer_fusion": "kernel",
    },
}
ALONE = {
    "bf16-stochastic": {"precision": "bf16-stochastic"},
    "bf16-stochastic, by sums in fp32": {**SUMS_IN_FP32, "precision": "bf16-stochastic"},
    "apollo, bf16-stochastic": {"precision": "bf16-stochastic", "optimizer": "apollo"},
    "apollo-mini in backward": {"optimizer": "apollo-mini", "optimizer_fusion": "backward"},
    **{f"checkpointing {value}": {"checkpointing": value} for value in ("every-4", "block")},
    **{f"fusion {value}": {"optimizer_fusion": value} for value in ("kernel", "backward")},
    "micro batches of 1": {"micro_batch_size": 1},
    "loss in chunks": {"loss": "chunked"},
}
"""What `EAGER` has in combinations."""

MIXED_LORA = {"precision": "bf16-mixed", "adapter": "lora", "adapter_rank": 4}
QLORA = {**MIXED_LORA, "base_weights": "nf4"}
ADAPTERS = {
    "LoRA": {"adapter": "lora", "adapter_targets": "attention", "optimizer_fusion": "kernel"},
    "LoRA, bf16 base, several": {
        **MIXED_LORA,
        "adapter_kernels": "fused",
        "base_weights": "bf16",
        "checkpointing": "block",
        "loss": "chunked",
    },
    "QLoRA, checkpoints, paged 8-bit AdamW": {
        **QLORA,
        "checkpointing": "block",
        "optimizer": "paged-adamw-8bit",
    },
    "int8 in backward": {**MIXED_LORA, "base_weights": "int8", "optimizer_fusion": "backward"},
    "from the host": {**QLORA, "offload": "frozen", "checkpointing": "save-attention"},
    "matrices by Muon": {**MIXED_LORA, "optimizer": "muon"},
}
MORE_ADAPTERS = {
    "LoRA in bf16": {"precision": "bf16-true", "adapter": "lora"},
    "fp8": {**MIXED_LORA, "base_weights": "fp8"},
    "DoRA": {"adapter": "dora"},
    "DoRA, nf4": {**QLORA, "adapter": "dora"},
    "DoRA, int8": {**MIXED_LORA, "adapter": "dora", "base_weights": "int8"},
    "QLoRA in bf16": {**QLORA, "precision": "bf16-true"},
    "DoRA, from the host": {**MIXED_LORA, "adapter": "dora", "offload": "frozen"},
    "int8 from the host": {**MIXED_LORA, "base_weights": "int8", "offload": "frozen"},
    "QLoRA in fp16": {**QLORA, "precision": "fp16-mixed"},
    "stochastic": {"precision": "bf16-stochastic", "adapter": "lora", "base_weights": "int8"},
}

COMPILED = {
    "by block, budget 0.3": {"compile": "block", "memory_budget": 0.3},
    "by block, segments": {"compile": "block", "checkpointing": "sqrt"},
    "the model": {"compile": "model", "precision": "bf16-mixed"},
    "the model, budget 0": {
        "compile": "model",
        "memory_budget": 0.0,
        "optimizer_fusion": "backward",
    },
}


def exported(workload, **choices):
    config = TrainingConfig(**{"micro_batch_size": workload.global_batch, **choices})
    return TARGETS["pytorch"].write(dataclasses.replace(recipe(config), workload=workload), "2")


def trained_by_trial(make_trainer, **choices):
    """Losses of the first steps, and the peak of the last one."""
    with pytest.MonkeyPatch.context() as patch:
        if choices.get("adapter") == "dora":  # a trial replaces this function in its own process
            dora = importlib.import_module("peft.tuners.lora.dora")
            patch.setattr(dora, "dequantize_module_weight", dora.dequantize_module_weight)
        return _trained(make_trainer(**choices))


def _trained(trainer):
    meter = CpuMeter()
    batches = trainer.batches()
    losses = [trainer.take_step(step, next(batches)) for step in range(STEPS - 1)]
    with meter.measuring(trainer._resident_tensors):
        losses.append(trainer.take_step(STEPS - 1, next(batches)))
    return losses, meter.reading().peak_memory_bytes


def trained_by_script(script, folder, *, global_batch=GLOBAL_BATCH):
    train, _ = script.read_text(str(folder), script.TEXT)
    training, meter = script.Training(), CpuMeter()
    order = script.training_order(sequences=len(train), global_batch=global_batch, seed=script.SEED)

    def step(number):
        rate = script.learning_rate(number, steps=script.STEPS)
        return script.train_step(training, train.batch(next(order)), rate=rate)

    losses = [step(number) for number in range(STEPS - 1)]
    with meter.measuring(lambda: resident(training)):
        losses.append(step(STEPS - 1))
    return losses, meter.reading().peak_memory_bytes


def resident(training):
    states = [
        value for state in training.updater.optimizer.state.values() for value in state.values()
    ]
    weights = [part for weight in training.model.parameters() for part in tensors_behind(weight)]
    kept = [*weights, *training.model.buffers(), *states]
    return [tensor for tensor in kept if isinstance(tensor, torch.Tensor)]


def assert_same(make_trainer, workload, prepared, choices):
    losses, peak = trained_by_trial(make_trainer, **choices)
    torch._dynamo.reset()
    with loaded(exported(workload, **choices)) as script:
        assert trained_by_script(script, prepared) == (losses, peak)
    torch._dynamo.reset()


@pytest.mark.parametrize("choices", EAGER.values(), ids=EAGER)
def test_losses_and_peak_memory_are_those_of_the_trial(make_trainer, workload, prepared, choices):
    assert_same(make_trainer, workload, prepared, choices)


@pytest.mark.slow
@pytest.mark.parametrize("choices", ALONE.values(), ids=ALONE)
def test_a_technique_alone_has_the_losses_and_the_peak_memory_of_the_trial(
    make_trainer, workload, prepared, choices
):
    assert_same(make_trainer, workload, prepared, choices)


@pytest.mark.slow
@pytest.mark.parametrize("choices", ADAPTERS.values(), ids=ADAPTERS)
def test_adapters_train_with_the_losses_and_the_peak_memory_of_the_trial(
    make_trainer, workload, prepared, choices
):
    assert_same(make_trainer, workload, prepared, choices)


@pytest.mark.slow
@pytest.mark.parametrize("choices", MORE_ADAPTERS.values(), ids=MORE_ADAPTERS)
def test_any_adapter_trains_with_the_losses_and_the_peak_memory_of_the_trial(
    make_trainer, workload, prepared, choices
):
    assert_same(make_trainer, workload, prepared, choices)


@pytest.mark.slow
@pytest.mark.parametrize("choices", COMPILED.values(), ids=COMPILED)
def test_losses_and_peak_memory_are_those_of_the_compiled_trial(
    make_trainer, workload, prepared, choices
):
    assert_same(make_trainer, workload, prepared, choices)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bf16-stochastic in backward", "several"])
def test_the_script_prints_its_peak_as_trials_count_it_and_the_promised_one(
    name, make_trainer, workload, prepared, monkeypatch, capsys
):
    choices = EAGER[name]
    _, peak = trained_by_trial(make_trainer, **choices)
    monkeypatch.setattr("sys.argv", ["train.py", "--tokens", str(prepared), "--steps", "6"])
    with loaded(exported(workload, **choices)) as script:
        script.main()
    *_, own, promised = capsys.readouterr().out.splitlines()
    assert own == f"peak memory {peak / 2**20:,.2f} MiB"
    assert promised == "promised    40.00 MiB, measured in study tour, trial 12, on cuda"


def test_a_script_of_one_step_prints_no_peak_of_its_own(workload, prepared, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["train.py", "--tokens", str(prepared), "--steps", "1"])
    with loaded(exported(workload)) as script:
        script.main()
    assert "peak memory" not in capsys.readouterr().out


def peak_on_gpu(step):
    """Returns losses and the peak bytes of the last two steps, without memory from before."""
    torch.cuda.synchronize()
    losses = [step(number) for number in range(STEPS - 2)]
    torch.cuda.reset_peak_memory_stats()
    losses += [step(number) for number in (STEPS - 2, STEPS - 1)]
    return losses, torch.cuda.max_memory_allocated()


def trial_on_gpu(make_trainer, choices):
    trainer = make_trainer(on_cuda=True, **choices)
    batches = trainer.batches()
    return peak_on_gpu(lambda number: trainer.take_step(number, next(batches)))


@pytest.mark.gpu
@pytest.mark.parametrize(
    "choices", [{}, {"precision": "bf16-mixed", "checkpointing": "block"}], ids=str
)
def test_on_a_gpu_losses_and_peak_memory_are_those_of_the_trial(
    make_trainer, workload, prepared, choices
):
    losses, peak = trial_on_gpu(make_trainer, choices)
    torch.cuda.empty_cache()
    with loaded(exported(workload, **choices)) as script:
        train, _ = script.read_text(str(prepared), script.TEXT)
        training = script.Training()
        order = script.training_order(
            sequences=len(train), global_batch=GLOBAL_BATCH, seed=script.SEED
        )
        rates = [script.learning_rate(number, steps=script.STEPS) for number in range(STEPS)]
        repeated, peak_of_script = peak_on_gpu(
            lambda number: script.train_step(training, train.batch(next(order)), rate=rates[number])
        )
    assert repeated == pytest.approx(losses, rel=1e-4)
    assert peak_of_script == peak


def test_gradients_are_clipped_as_in_the_trial(make_trainer_of, workload):
    clipped = make_workload(
        "cpu", {**workload.to_dict(), "gradient_clipping": 0.05, "schedule": "cosine"}
    )
    make_trainer, folder = make_trainer_of(clipped)
    assert_same(make_trainer, clipped, folder, {"optimizer_fusion": "kernel"})


@pytest.fixture
def make_trainer_of(tmp_path):
    """make_trainer_of(workload) returns a function that makes trainers, and the prepared folder."""
    from autotune.spec.training_request import TrainingRequest
    from autotune.training.trainer import Trainer

    def of(workload):
        folder = tmp_path / "prepared"
        prepare(Prepare(workload=workload, folder=folder))

        def make(**choices):
            config = TrainingConfig(**{"micro_batch_size": workload.global_batch, **choices})
            request = TrainingRequest(
                workload=workload,
                config=config,
                folder=folder,
                device="cpu",
                cap_bytes=2**40,
                requested_at=time.monotonic(),
            )
            return Trainer(request)

        return make, folder

    return of


# -- other models ----------------------------------------------------------------------------------

LLAMA = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 256,
    "max_position_embeddings": 64,
}
MAMBA = {
    "model_type": "mamba",
    "hidden_size": 32,
    "state_size": 4,
    "num_hidden_layers": 4,
    "vocab_size": 256,
}
OWN = """
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x):
        return x + self.dropout(self.down(self.up(x).relu()))


class Model(nn.Module):
    def __init__(self, width, layers):
        super().__init__()
        self.embedding, self.head = nn.Embedding(256, width), nn.Linear(width, 256)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return {"logits": self.head(x), "other": None}


def make(layers, width):
    return Model(width, layers)
"""


def sizes_of_own(workload):
    return {name: value for name, value in workload.to_dict().items() if name != "heads"}


def pretrained_llama(folder):
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(1)
    settings = {name: value for name, value in LLAMA.items() if name != "model_type"}
    AutoModelForCausalLM.from_config(LlamaConfig(**settings)).save_pretrained(folder)
    return str(folder)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["deep-one", "llama", "mamba", "pretrained", "own"])
def test_another_model_trains_as_in_the_trial(make_trainer_of, workload, model, tmp_path):
    (tmp_path / "own_model.py").write_text(OWN)
    settings = {
        "deep-one": {**workload.to_dict(), "model": "deep-one"},
        "llama": {**workload.to_dict(), "model": model_name(LLAMA), "model_config": LLAMA},
        "mamba": {
            **sizes_of_own(workload),
            "layers": 1,
            "model": model_name(MAMBA),
            "model_config": MAMBA,
        },
        "pretrained": {
            **workload.to_dict(),
            "model": pretrained_llama(tmp_path / "llama"),
            "pretrained": True,
        },
        "own": {**sizes_of_own(workload), "model": f"{tmp_path / 'own_model.py'}:make"},
    }[model]
    asked = make_workload("cpu", settings)
    make_trainer, folder = make_trainer_of(asked)
    assert_same(make_trainer, asked, folder, {"checkpointing": "block"})


@pytest.mark.slow
@pytest.mark.parametrize("targets", ["attention", "all-linear"])
def test_adapters_of_a_pretrained_model_train_as_in_the_trial(
    make_trainer_of, workload, targets, tmp_path
):
    named = {"model": pretrained_llama(tmp_path / "llama"), "pretrained": True}
    asked = make_workload("cpu", {**workload.to_dict(), **named})
    make_trainer, folder = make_trainer_of(asked)
    assert_same(make_trainer, asked, folder, {**QLORA, "adapter_targets": targets})


BESIDE = {
    "whole modules": {"modules_to_save": ("embed_tokens", "lm_head")},
    "whole modules of the base": {
        "modules_to_save": ("lm_head",),
        "modules_to_save_dtype": "base",
    },
    "PiSSA, patterns": {
        "adapter_init": "pissa",
        "adapter_scaling": "rslora",
        "adapter_rank_pattern": {"q_proj": 2},
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("beside", BESIDE.values(), ids=BESIDE)
def test_what_is_beside_adapters_trains_as_in_the_trial(
    make_trainer_of, workload, beside, tmp_path
):
    named = {"model": pretrained_llama(tmp_path / "llama"), "pretrained": True}
    asked = make_workload("cpu", {**workload.to_dict(), **named, **beside})
    make_trainer, folder = make_trainer_of(asked)
    choices = {**MIXED_LORA, "base_weights": "bf16", "offload": "frozen"}
    assert_same(make_trainer, asked, folder, choices)


@pytest.mark.slow
@pytest.mark.parametrize("targets", ["all-linear", "experts"])
@pytest.mark.parametrize("base_weights", ["int8-experts", "nf4-experts"])
def test_experts_train_as_in_the_trial(make_trainer_of, workload, base_weights, targets, tmp_path):
    (tmp_path / "mixture.py").write_text(MIXTURE)
    settings = {**sizes_of_own(workload), "model": f"{tmp_path / 'mixture.py'}:make"}
    del settings["layers"], settings["width"]
    asked = make_workload("cpu", settings)
    make_trainer, folder = make_trainer_of(asked)
    choices = {**QLORA, "base_weights": base_weights, "adapter_targets": targets}
    assert_same(make_trainer, asked, folder, choices)


OF_THE_KIND_OF_NANOGPT = OWN.replace(
    """    def forward(self, tokens):
""",
    """    def forward(self, tokens, targets=None):
""",
).replace(
    """        return {"logits": self.head(x), "other": None}
""",
    """        if targets is None:
            return self.head(x[:, -1:]), None
        logits = self.head(x)
        flat = logits.view(-1, logits.size(-1))
        return logits, torch.nn.functional.cross_entropy(flat, targets.view(-1), ignore_index=-1)
""",
)


@pytest.mark.parametrize(
    ("source", "loss", "packing"),
    [
        (OWN, "chunked", "packed"),
        (OF_THE_KIND_OF_NANOGPT, "full", "padded"),
        pytest.param(OWN, "chunked", "padded", marks=pytest.mark.slow),
        pytest.param(OF_THE_KIND_OF_NANOGPT, "full", "packed", marks=pytest.mark.slow),
    ],
    ids=[
        *("logits, packed", "labels as an option, padded"),
        *("logits, padded", "labels as an option, packed"),
    ],
)
def test_a_users_model_is_called_as_in_the_trial(
    make_trainer_of, workload, source, loss, packing, tmp_path
):
    # A name that another module has as well.
    (tmp_path / "types.py").write_text(source)
    text = settings_of_text(tmp_path, "rows") | {"packing": packing}
    named = {"model": f"{tmp_path / 'types.py'}:make", "text_sha256": ""}
    asked = make_workload("cpu", {**sizes_of_own(workload), **text, **named})
    make_trainer, folder = make_trainer_of(asked)
    assert_same(make_trainer, asked, folder, {"loss": loss})


SMOOTHED = OWN.replace("forward(self, tokens)", "forward(self, tokens, labels)").replace(
    """        return {"logits": self.head(x), "other": None}
""",
    """        logits = self.head(x)
        flat = logits.flatten(0, 1), labels.flatten()
        return nn.functional.cross_entropy(*flat, label_smoothing=0.2), logits
""",
)
SHIFTS = SMOOTHED.replace(
    "logits.flatten(0, 1), labels.flatten()",
    "logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()",
).replace("label_smoothing=0.2), logits", "label_smoothing=0.2)")
MIXTRAL = {
    **LLAMA,
    "model_type": "mixtral",
    "num_local_experts": 4,
    "output_router_logits": True,
    "router_aux_loss_coef": 0.5,
}


@pytest.mark.slow
@pytest.mark.parametrize("model", ["smoothed", "shifts", "mixtral"])
def test_a_model_with_its_own_loss_trains_and_evaluates_as_in_the_trial(
    make_trainer_of, workload, model, tmp_path
):
    # A process imports a file of one name only once.
    file = tmp_path / f"{model}_own_loss.py"
    file.write_text(SHIFTS if model == "shifts" else SMOOTHED)
    settings = {**sizes_of_own(workload), "model": f"{file}:make"}
    if model == "mixtral":
        named = {"model": model_name(MIXTRAL), "model_config": MIXTRAL}
        settings = {**workload.to_dict(), **named}
    text = settings_of_text(tmp_path, "rows") | {"packing": "padded", "text_sha256": ""}
    asked = make_workload("cpu", {**settings, **text})
    make_trainer, folder = make_trainer_of(asked)
    choices = {"micro_batch_size": 2, "checkpointing": "block"}
    assert_same(make_trainer, asked, folder, choices)
    trainer = make_trainer(**choices)
    assert trainer.training.parts.own_loss
    with loaded(exported(asked, **choices)) as script:
        _, held_out = script.read_text(str(folder), script.TEXT)
        assert script.evaluate(script.Training().model, held_out) == trainer._evaluate()
