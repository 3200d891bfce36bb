"""Scripts without a line of ours: each form of trainer trains as it does by itself."""

from importlib.util import find_spec

import pytest

from tests.training.injected import trained

NAMES = ("transformers", "accelerate", "lightning", "trl")
pytestmark = pytest.mark.skipif(
    any(find_spec(name) is None for name in NAMES), reason=f"one of {', '.join(NAMES)} is missing"
)

# -- forms of transformers' Trainer ----------------------------------------------------------------

TRAINER = """
import torch
from dataclasses import dataclass
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

def make():
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    return LlamaForCausalLM(LlamaConfig(num_attention_heads=2, vocab_size=64, **sizes))

torch.manual_seed(0)
model = make()
rows = [{"input_ids": row, "labels": row} for row in torch.randint(0, 64, (50, 12))]
settings = dict(
    per_device_train_batch_size=4, gradient_accumulation_steps=3, num_train_epochs=4, use_cpu=True,
    report_to=[], disable_tqdm=True, save_strategy="no", learning_rate=1e-2,
)
args = TrainingArguments("out", **settings)
"""
LOSS = """
        logits = model(input_ids=inputs["input_ids"]).logits[:, :-1].flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(logits, inputs["labels"][:, 1:].flatten())
        return (loss, logits) if return_outputs else loss
"""
MAKING = {
    "by keyword": "trainer = Trainer(model=model, args=args, train_dataset=rows)",
    "by position": "trainer = Trainer(model, args, None, rows)",
    "from an initializer": "trainer = Trainer(model_init=make, args=args, train_dataset=rows)",
    "of a class with *args": """
class Own(Trainer):
    def __init__(self, *args, tag=None, **options):
        super().__init__(*args, **options)

trainer = Own(model, args, train_dataset=rows, tag=1)
""",
    "with a subclass of TrainingArguments": """
@dataclass
class Arguments(TrainingArguments):
    extra: int = 3

trainer = Trainer(model=model, args=Arguments("out", **settings), train_dataset=rows)
""",
    "with its own optimizer": """
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
trainer = Trainer(
    model=model, args=args, train_dataset=rows, optimizers=(optimizer, schedule)
)
""",
    "with evaluation and callbacks": """
from transformers import TrainerCallback

args = TrainingArguments("out", eval_strategy="steps", eval_steps=2, **settings)
trainer = Trainer(
    model=model, args=args, train_dataset=rows, eval_dataset=rows[:8],
    callbacks=[TrainerCallback()],
)
""",
    "with a loss that gets the items of a step": f"""
class Own(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        if num_items_in_batch is not None:
            self.loss_is_scaled_for_ga = False
{LOSS}
trainer = Own(model=model, args=args, train_dataset=rows)
""",
    "with a loss that ignores the items of a step": f"""
class Own(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
{LOSS}
trainer = Own(model=model, args=args, train_dataset=rows)
""",
    "after another one, which does not train": """
other = Trainer(model=make(), args=TrainingArguments("other", **settings), train_dataset=rows)
trainer = Trainer(model=model, args=args, train_dataset=rows)
""",
    "before another one with another batch": """
trainer = Trainer(model=model, args=args, train_dataset=rows)
settings["per_device_train_batch_size"] = 2
other = Trainer(model=make(), args=TrainingArguments("other", **settings), train_dataset=rows)
""",
    "by a function of another module": """
from pathlib import Path

Path("making.py").write_text(
    "from transformers import Trainer\\n"
    "def build(model, args, rows):\\n"
    "    return Trainer(model=model, args=args, train_dataset=rows)\\n"
)
from making import build

trainer = build(model, args, rows)
""",
}


QUICK = ("of a class with *args", "with a loss that ignores the items of a step")


@pytest.fixture(scope="session", autouse=True)
def imported():
    """Imports once what each process of a script would import in seconds."""
    import transformers.models.llama.modeling_llama
    import transformers.trainer  # noqa: F401


def some_slow(forms, quick):
    return [one if one in quick else pytest.param(one, marks=pytest.mark.slow) for one in forms]


def check_same_training(tmp_path, script, *, micro_batches, global_batch, injected):
    """Trains with each micro batch as the script does by itself; the first one is the script's."""
    alone = trained(tmp_path, script, micro_batch=0)
    assert len(alone.weights) == 8, alone.error
    for micro_batch in micro_batches:
        ours = trained(tmp_path, script, micro_batch=micro_batch)
        assert not ours.error, ours.error
        assert injected in ours.injected
        assert ours.global_batch == global_batch
        exactness = 1e-7 if micro_batch == micro_batches[0] else 2e-5
        assert ours.weights == pytest.approx(alone.weights, rel=exactness)
        assert ours.losses[0] == pytest.approx(4.2, abs=0.3)  # ln(64): a mean over tokens


@pytest.mark.parametrize("form", some_slow(MAKING, QUICK))
def test_a_trainer_trains_as_by_itself(form, tmp_path):
    script = f"{TRAINER}{MAKING[form]}\ntrainer.train()\n"
    injected = "autotune.TrainerCallback"
    check_same_training(tmp_path, script, micro_batches=(4, 12), global_batch=12, injected=injected)


# -- forms of a loop with accelerate ---------------------------------------------------------------

ACCELERATE = """
import torch
from accelerate import Accelerator
from torch import nn
from torch.optim.lr_scheduler import LinearLR
from torch.utils.data import DataLoader, IterableDataset

def loss_of(model, batch):
    logits = model(batch[:, :-1]).flatten(0, 1)
    return nn.functional.cross_entropy(logits, batch[:, 1:].flatten())

torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(64, 16), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 64))
rows = list(torch.randint(0, 64, (34, 12)))  # an epoch ends within a batch
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
schedule = LinearLR(optimizer, 1.0, 0.1, 20)
loader = DataLoader(rows, batch_size=8, shuffle=True)
"""
PREPARED = """
accelerator = Accelerator(cpu=True)
evaluated = DataLoader(rows, batch_size=16)
model, optimizer, loader, evaluated, schedule = accelerator.prepare(
    model, optimizer, loader, evaluated, schedule
)
for epoch in range(9):
    for batch in loader:
"""
LOOPS = {
    "in order": f"""{PREPARED}
        accelerator.backward(loss_of(model, batch))
        accelerator.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
""",
    "gradients freed first, and evaluation": f"""{PREPARED}
        optimizer.zero_grad()
        accelerator.backward(loss_of(model, batch))
        accelerator.clip_grad_value_(model.parameters(), 1e-3)
        optimizer.step()
        schedule.step()
    model.eval()
    for batch in evaluated:
        with torch.no_grad():
            loss_of(model, batch)
    model.train()
""",
    "the model's zero_grad and a schedule of its own": """
accelerator = Accelerator(cpu=True)
loader = accelerator.prepare(loader)
model = accelerator.prepare(model)
optimizer = accelerator.prepare(optimizer)
for epoch in range(9):
    for batch in loader:
        model.zero_grad()
        accelerator.backward(loss_of(model, batch))
        optimizer.step()
        schedule.step()
""",
    "with accumulate, for nothing": """
accelerator = Accelerator(cpu=True)
model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
for epoch in range(9):
    for batch in loader:
        with accelerator.accumulate(model), accelerator.autocast():
            accelerator.backward(loss_of(model, batch))
            optimizer.step()
            optimizer.zero_grad()
""",
}
ACCUMULATING = """
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
for epoch in range(9):
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model, batch))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
"""
INJECTED = "accelerator.prepare"


@pytest.mark.slow
@pytest.mark.parametrize("form", LOOPS)
def test_a_loop_with_accelerate_trains_as_by_itself(form, tmp_path):
    check_same_training(
        tmp_path,
        ACCELERATE + LOOPS[form],
        micro_batches=(8, 2),
        global_batch=8,
        injected=INJECTED,
    )


@pytest.mark.slow
def test_a_loop_that_accumulates_trains_as_by_itself(tmp_path):
    check_same_training(
        tmp_path,
        ACCELERATE + ACCUMULATING,
        micro_batches=(8, 2, 4),
        global_batch=16,
        injected=INJECTED,
    )


REFUSED = {
    "adds up the gradients of several batches itself": f"""{PREPARED}
        accelerator.backward(loss_of(model, batch) / 2)
        count = count + 1 if "count" in globals() else 1
        if count % 2 == 0:
            optimizer.step()
            optimizer.zero_grad()
""",
    "does not call accelerator.accumulate": PREPARED.replace(
        "cpu=True", "cpu=True, gradient_accumulation_steps=2"
    )
    + """
        accelerator.backward(loss_of(model, batch))
        optimizer.step()
""",
    "do not come from a loader that was prepared": """
accelerator = Accelerator(cpu=True)
model, optimizer = accelerator.prepare(model, optimizer)
for batch in loader:
    accelerator.backward(loss_of(model, batch))
""",
    "on another loader than the first one": PREPARED.replace("in loader", "in evaluated")
    + """
        accelerator.backward(loss_of(model, batch))
""",
    "2 models are trained together": """
accelerator = Accelerator(cpu=True)
other = nn.Linear(2, 2)
both = torch.optim.AdamW([*model.parameters(), *other.parameters()])
model, other, both, loader = accelerator.prepare(model, other, both, loader)
""",
}


@pytest.mark.parametrize("sentence", REFUSED)
def test_a_loop_that_cannot_be_followed_ends_with_a_sentence(sentence, tmp_path):
    error = trained(tmp_path, ACCELERATE + REFUSED[sentence], micro_batch=8).error
    assert sentence in error
    assert "Traceback" not in error


WHOLE = {
    "an IterableDataset": """
class Rows(IterableDataset):
    def __iter__(self):
        return iter(rows[:32])

loader = DataLoader(Rows(), batch_size=8)
""",
}


@pytest.mark.parametrize("reason", WHOLE)
def test_a_loader_that_cannot_be_rebuilt_keeps_its_batch_with_the_reason(reason, tmp_path):
    script = ACCELERATE + WHOLE[reason] + LOOPS["in order"]
    alone = trained(tmp_path, script, micro_batch=0)
    ours = trained(tmp_path, script, micro_batch=8)
    assert reason in ours.whole_batches
    assert ours.weights == alone.weights
    assert "cannot be had" in trained(tmp_path, script, micro_batch=4).error


def test_a_loop_that_clips_by_itself_keeps_its_batch_with_the_reason(tmp_path):
    loop = LOOPS["in order"].replace("accelerator.clip", "nn.utils.clip")
    alone = trained(tmp_path, ACCELERATE + loop, micro_batch=0)
    assert trained(tmp_path, ACCELERATE + loop, micro_batch=8).weights == alone.weights
    smaller = trained(tmp_path, ACCELERATE + loop, micro_batch=2)
    assert "train.py, line" in smaller.whole_batches
    assert "accelerator.clip_grad_norm_" in smaller.error


# -- forms of Lightning's Trainer ------------------------------------------------------------------

LIGHTNING = """
import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader

torch.manual_seed(0)
rows = list(torch.randint(0, 64, (34, 12)))  # an epoch ends within a batch

class Module(LightningModule):
    def __init__(self):
        super().__init__()
        self.model = nn.Sequential(
            nn.Embedding(64, 16), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 64)
        )

    def training_step(self, batch, index):
        logits = self.model(batch[:, :-1]).flatten(0, 1)
        return nn.functional.cross_entropy(logits, batch[:, 1:].flatten())

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, steps)
        return [optimizer], [{"scheduler": schedule, "interval": "step", "frequency": 2}]

settings = dict(
    max_epochs=9, accelerator="cpu", devices=1, logger=False, enable_progress_bar=False,
    enable_checkpointing=False, enable_model_summary=False,
)
loader = DataLoader(rows, batch_size=8, shuffle=True)
"""
FITTING = {
    "with a loader": """
Trainer(gradient_clip_val=0.1, **settings).fit(Module(), loader)
""",
    "with a limit of batches and a data module": """
class Data(LightningDataModule):
    def setup(self, stage):
        self.rows = rows

    def train_dataloader(self):
        return DataLoader(self.rows, batch_size=8, shuffle=True)

Trainer(limit_train_batches=3, **settings).fit(Module(), datamodule=Data())
""",
    "of a class, with the module's own loader": """
class Own(Trainer):
    pass

class Loading(Module):
    def train_dataloader(self):
        return loader

Own(**settings).fit(model=Loading())
""",
}


@pytest.mark.slow
@pytest.mark.parametrize("form", FITTING)
def test_lightning_trains_as_by_itself(form, tmp_path):
    check_same_training(
        tmp_path,
        LIGHTNING + FITTING[form],
        micro_batches=(8, 2),
        global_batch=8,
        injected="autotune.LightningCallback",
    )


def test_lightning_that_accumulates_trains_as_by_itself(tmp_path):
    check_same_training(
        tmp_path,
        LIGHTNING + "Trainer(accumulate_grad_batches=2, **settings).fit(Module(), loader)",
        micro_batches=(8, 4),
        global_batch=16,
        injected="autotune.LightningCallback",
    )


OWN_CHOICES = {
    "transformers": (
        TRAINER
        + """
settings.update(bf16=True, gradient_checkpointing=True)
Trainer(model, TrainingArguments("out", **settings), train_dataset=rows).train()
""",
        {"precision": "bf16-mixed", "checkpointing": "block", "compile": "none"},
        4,
    ),
    "accelerate": (
        ACCELERATE
        # Another test of this process may have set its precision for good.
        + "from accelerate.state import AcceleratorState\nAcceleratorState._reset_state(True)\n"
        + ACCUMULATING.replace("cpu=True", "cpu=True, mixed_precision='bf16'"),
        {"precision": "bf16-mixed", "compile": "none"},
        8,
    ),
    "lightning": (
        LIGHTNING + "Trainer(precision='bf16-true', **settings).fit(Module(), loader)",
        {"precision": "bf16-true"},
        8,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("trainer", OWN_CHOICES)
def test_what_a_trainer_does_by_itself_is_known_where_ours_turns_it_off(trainer, tmp_path):
    script, choices, micro_batch = OWN_CHOICES[trainer]
    ours = trained(tmp_path, script, micro_batch=2, steps=1)
    assert ours.own_choices == {**choices, "micro_batch_size": micro_batch}, ours.error


NOT_FITTED = {
    "changes how many batches": """
from lightning.pytorch.callbacks import GradientAccumulationScheduler

callbacks = [GradientAccumulationScheduler({0: 2, 2: 4})]
Trainer(callbacks=callbacks, **settings).fit(Module(), loader)
""",
    "overfit_batches": "Trainer(overfit_batches=2, **settings).fit(Module(), loader)",
    "DDPStrategy": "Trainer(strategy='ddp', **settings).fit(Module(), loader)",
    "not from torch's DataLoader": "Trainer(**settings).fit(Module(), [loader, loader])",
}


@pytest.mark.parametrize("sentence", NOT_FITTED)
def test_what_lightning_cannot_have_is_said(sentence, tmp_path):
    error = trained(tmp_path, LIGHTNING + NOT_FITTED[sentence], micro_batch=8).error
    assert sentence in error
    assert "Traceback" not in error


# -- trainers of TRL -------------------------------------------------------------------------------

TRL = """
import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, PreTrainedTokenizerFast
)
from trl import {trainer}Config, {trainer}Trainer

words = ["<pad>", "<eos>", "<unk>", *"abcdefghijklmnopqrstuvwxyz", " "]
tokenizer = Tokenizer(models.WordLevel({{w: i for i, w in enumerate(words)}}, unk_token="<unk>"))
tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
)
sizes = {{"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}}
config = LlamaConfig(
    num_attention_heads=2, vocab_size=len(words), pad_token_id=0, eos_token_id=1, num_labels=1,
    **sizes,
)
torch.manual_seed(0)
{model}(config).save_pretrained("model")  # DPO loads its reference from there
model = {model}.from_pretrained("model")
texts = ["hello number " + "abcdefghij"[k % 10] * (3 + k % 5) for k in range(48)]
preferences = {{"prompt": texts, "chosen": [" yes"] * 48, "rejected": [" perhaps not"] * 48}}
rows = Dataset.from_dict({rows})
args = {trainer}Config(
    "out", per_device_train_batch_size=4, gradient_accumulation_steps=2, num_train_epochs=3,
    use_cpu=True, bf16=False, gradient_checkpointing=False, report_to=[], disable_tqdm=True,
    save_strategy="no", learning_rate=1e-2,
)
trainer = {trainer}Trainer(
    model=model, args=args, train_dataset=rows, processing_class=tokenizer
)
trainer.train()
"""
TRL_TRAINERS = {
    "SFT": ("LlamaForCausalLM", '{"text": texts}'),
    "DPO": ("LlamaForCausalLM", "preferences"),
    "Reward": ("LlamaForSequenceClassification", "preferences"),
}


@pytest.mark.slow
@pytest.mark.parametrize("trainer", TRL_TRAINERS)
def test_a_trainer_of_trl_trains_as_by_itself(trainer, tmp_path):
    model, rows = TRL_TRAINERS[trainer]
    script = TRL.format(trainer=trainer, model=model, rows=rows)
    alone = trained(tmp_path, script, micro_batch=0)
    assert len(alone.weights) == 8, alone.error
    ours = trained(tmp_path, script, micro_batch=4)
    assert f"{trainer}Trainer gets" in ours.injected
    assert ours.global_batch == 8
    assert ours.weights == pytest.approx(alone.weights, rel=1e-6)
