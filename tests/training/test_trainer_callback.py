"""The callback for transformers' Trainer: its arguments, its optimizer, its reports."""

import dataclasses
import json
import textwrap
from importlib.util import find_spec

import pytest
import torch

import autotune
from autotune.errors import IllegalConfiguration, InvalidInput
from autotune.execution.tasks import Train
from autotune.spec.config import TrainingConfig
from autotune.spec.training_request import TrainingRequest
from autotune.spec.workload import make_workload
from autotune.techniques.user_training import apply_to_user_model
from autotune.training.script import interface
from autotune.training.script.run import ScriptEnd
from autotune.training.script.trainer import _Examination

transformers = pytest.importorskip("transformers")  # imports nothing until it is used
pytestmark = pytest.mark.skipif(
    find_spec("accelerate") is None, reason="accelerate is missing, which Trainer needs"
)

VOCABULARY, LENGTH = 64, 16


@pytest.fixture
def arguments(tmp_path):
    """arguments(max_steps=4) are TrainingArguments of 8 sequences a step."""

    def make(**others):
        settings = {"use_cpu": True, "max_steps": 4, "disable_tqdm": True, "save_strategy": "no"}
        settings |= {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
        settings |= {"learning_rate": 1e-2, "warmup_steps": 2, "dataloader_pin_memory": False}
        return transformers.TrainingArguments(str(tmp_path / "out"), **(settings | others))

    return make


@pytest.fixture
def configured(tmp_path, monkeypatch):
    """configured(micro_batch_size=2) names a file with that configuration in AUTOTUNE_CONFIG."""

    def name(**fields):
        file = tmp_path / "config.json"
        measured = {"trial": "study tour, trial 12", "tokens_per_second": 1.0}
        file.write_text(json.dumps({"config": fields, "measured": measured}))
        monkeypatch.setenv("AUTOTUNE_CONFIG", str(file))

    return name


def make_model():
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(num_attention_heads=2, vocab_size=VOCABULARY, **sizes)
    return transformers.LlamaForCausalLM(config)


def make_rows():
    rows = torch.randint(VOCABULARY, (64, LENGTH), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row, "labels": row} for row in rows]


def trained(args, *, callbacks=(), make_optimizers=lambda model: (None, None), **train):
    """Returns the Trainer after its training."""
    model = make_model()
    trainer = transformers.Trainer(
        model=model,
        args=args,
        train_dataset=make_rows(),
        callbacks=list(callbacks),
        optimizers=make_optimizers(model),
    )
    trainer.train(**train)
    return trainer


def weights_of(trainer):
    return torch.cat([parameter.detach().flatten() for parameter in trainer.model.parameters()])


def with_optimizer(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2), None


def with_scheduler(model):
    optimizer, _ = with_optimizer(model)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)


# -- outside a trial -------------------------------------------------------------------------------


def test_without_a_configuration_neither_arguments_nor_training_change(arguments):
    args = arguments(activation_checkpointing=True, bf16=True)
    before = args.to_dict()
    with_callback = trained(args, callbacks=[autotune.TrainerCallback(args)])
    assert args.to_dict() == before
    without = trained(arguments(activation_checkpointing=True, bf16=True))
    assert torch.equal(weights_of(with_callback), weights_of(without))


@pytest.mark.parametrize(
    "make_optimizers",
    [lambda model: (None, None), with_optimizer, with_scheduler],
    ids=["Trainer's optimizer", "an optimizer", "an optimizer with its scheduler"],
)
def test_a_configuration_trains_the_same_at_the_same_learning_rates(
    make_optimizers, arguments, configured, recwarn
):
    plain = trained(arguments(), make_optimizers=make_optimizers)
    configured(micro_batch_size=2, optimizer_fusion="foreach", checkpointing="block")
    args = arguments()
    trainer = trained(
        args, callbacks=[autotune.TrainerCallback(args)], make_optimizers=make_optimizers
    )
    assert trainer.optimizer.param_groups[0]["foreach"] is True
    assert trainer.lr_scheduler.get_last_lr() == plain.lr_scheduler.get_last_lr()
    torch.testing.assert_close(weights_of(trainer), weights_of(plain), rtol=1e-4, atol=1e-5)
    assert not [warning for warning in recwarn if "lr_scheduler" in str(warning.message)]


@pytest.mark.slow
def test_the_configuration_decides_what_arguments_say_about_techniques(arguments, configured):
    configured(micro_batch_size=2)
    args = arguments(bf16=True, activation_checkpointing=True, torch_compile=True)
    callback = autotune.TrainerCallback(args)
    batches = (args.per_device_train_batch_size, args.gradient_accumulation_steps)
    assert batches == (2, 4)
    assert args.per_device_eval_batch_size == 2
    trainer = trained(args, callbacks=[callback])
    assert trainer.accelerator.mixed_precision == "no"
    assert not any(getattr(m, "gradient_checkpointing", False) for m in trainer.model.modules())
    assert str(trainer.accelerator.state.dynamo_plugin.backend).endswith("NO")


@pytest.mark.slow
def test_a_resumed_training_with_a_step_in_backward_ends_like_an_unbroken_one(
    arguments, configured
):
    configured(micro_batch_size=8, optimizer_fusion="backward")
    settings = {"max_grad_norm": 0, "save_strategy": "steps", "save_steps": 2}
    args = arguments(**settings)
    unbroken = trained(args, callbacks=[autotune.TrainerCallback(args)])
    args = arguments(**settings)
    checkpoint = f"{args.output_dir}/checkpoint-2"
    resumed = trained(
        args, callbacks=[autotune.TrainerCallback(args)], resume_from_checkpoint=checkpoint
    )
    torch.testing.assert_close(weights_of(resumed), weights_of(unbroken))


CONFIGURATIONS = {
    "plain": None,
    "recomputed blocks": {"checkpointing": "block"},
    "recomputed attention": {"checkpointing": "attention", "optimizer_fusion": "kernel"},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("saved_by", "resumed_by"),
    [
        ("plain", "recomputed blocks"),
        ("recomputed blocks", "plain"),
        pytest.param("recomputed blocks", "recomputed attention", marks=pytest.mark.slow),
        pytest.param("recomputed attention", "recomputed blocks", marks=pytest.mark.slow),
    ],
)
def test_a_checkpoint_is_resumed_by_any_configuration(
    saved_by, resumed_by, arguments, configured, monkeypatch
):
    def train(name, **settings):
        monkeypatch.delenv("AUTOTUNE_CONFIG", raising=False)
        if CONFIGURATIONS[name] is not None:
            configured(micro_batch_size=4, **CONFIGURATIONS[name])
        args = arguments(save_strategy="steps", save_steps=2)
        return trained(args, callbacks=[autotune.TrainerCallback(args)], **settings)

    unbroken = weights_of(train("plain"))
    half_way = f"{train(saved_by).args.output_dir}/checkpoint-2"
    resumed = train(resumed_by, resume_from_checkpoint=half_way)
    torch.testing.assert_close(weights_of(resumed), unbroken)


@pytest.mark.slow
def test_a_saved_model_is_the_trained_one(arguments, configured, tmp_path, capsys):
    configured(micro_batch_size=4, checkpointing="block", precision="bf16-mixed")
    args = arguments()
    trainer = trained(args, callbacks=[autotune.TrainerCallback(args)])
    assert f"{trainer.state.global_step} steps beside study tour" in capsys.readouterr().err
    trainer.save_model(tmp_path / "model")
    loaded, report = transformers.LlamaForCausalLM.from_pretrained(
        tmp_path / "model", output_loading_info=True
    )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert torch.equal(weights_of(trainer), torch.cat([p.flatten() for p in loaded.parameters()]))
    prompt = make_rows()[0]["input_ids"][None, :4]
    trainer.model.eval()
    written = [
        model.generate(prompt, max_new_tokens=4, do_sample=False)
        for model in (trainer.model, loaded)
    ]
    assert torch.equal(*written)


@pytest.mark.skipif(find_spec("peft") is None, reason="peft is missing")
@pytest.mark.parametrize("granularity", ["block", "attention"])
def test_adapters_are_merged_into_the_model_that_was_trained(granularity):
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(make_model(), LoraConfig(r=2, target_modules=["q_proj"]))
    apply_to_user_model(TrainingConfig(checkpointing=granularity, precision="bf16-mixed"), model)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    tokens = make_rows()[0]["input_ids"][None]
    model.eval()
    with torch.no_grad():
        expected = model.base_model.model(tokens).logits
        merged = model.merge_and_unload()
        torch.testing.assert_close(merged(tokens).logits, expected)
    assert list(merged.state_dict()) == list(make_model().state_dict())


@pytest.mark.parametrize(
    ("settings", "fields", "named"),
    [
        ({}, {"micro_batch_size": 3}, "a micro batch of 3, which does not divide the 8 sequences"),
        ({}, {"optimizer_fusion": "backward"}, "optimizer_fusion backward updates each parameter"),
        (
            {"max_grad_norm": 0},
            {"micro_batch_size": 2, "optimizer_fusion": "backward"},
            "optimizer_fusion backward",
        ),
    ],
    ids=["micro batch", "clipping", "accumulation"],
)
def test_a_configuration_that_the_arguments_exclude_is_rejected(
    settings, fields, named, arguments, configured
):
    configured(**fields)
    with pytest.raises((InvalidInput, IllegalConfiguration), match=named):
        autotune.TrainerCallback(arguments(**settings))


def test_arguments_that_split_the_model_are_rejected(arguments, configured):
    configured(micro_batch_size=2)
    args = arguments()
    args.deepspeed = "zero3.json"
    with pytest.raises(InvalidInput, match="cannot be combined with deepspeed"):
        autotune.TrainerCallback(args)


def test_arguments_of_another_trainer_are_rejected(arguments, configured):
    configured(micro_batch_size=2)
    with pytest.raises(InvalidInput, match="other arguments than its Trainer has"):
        trained(arguments(), callbacks=[autotune.TrainerCallback(arguments())])


def test_a_callback_that_comes_after_the_trainer_is_rejected(arguments, configured):
    configured(micro_batch_size=2)
    args = arguments()
    trainer = transformers.Trainer(model=make_model(), args=args, train_dataset=make_rows())
    trainer.add_callback(autotune.TrainerCallback(args))
    with pytest.raises(InvalidInput, match="added to a Trainer that was made without it"):
        trainer.train()


# -- as a trial ------------------------------------------------------------------------------------


@pytest.fixture
def examined(tmp_path):
    """The run that examines a script of 8 sequences a step; it ends at `autotune.apply`."""
    script = tmp_path / "train.py"
    script.touch()
    workload = make_workload("cpu", {"script": str(script), "global_batch": 8})
    run = _Examination(workload, {"optimizer_fusion": ["none", "kernel"]})
    interface.begin(run)
    yield run
    interface._running.clear()
    if run.missing is not None:
        run.result()  # it watches the script until then


def test_a_script_with_another_global_batch_than_its_search_is_rejected(arguments, examined):
    with pytest.raises(InvalidInput, match="trains on 16 sequences") as found:
        autotune.TrainerCallback(arguments(gradient_accumulation_steps=4))
    assert found.value.hint == "search with --global-batch 16"


def test_a_trial_saves_and_sends_nothing(arguments, examined):
    args = arguments(push_to_hub=True, report_to="all", eval_on_start=False)
    autotune.TrainerCallback(args)
    assert (args.push_to_hub, args.report_to) == (False, [])


@pytest.mark.slow
def test_the_optimizer_that_trainer_makes_is_examined(arguments, examined):
    args = arguments(optim="adafactor")  # transformers' own, which has no fused kernel
    with pytest.raises(ScriptEnd):
        trained(args, callbacks=[autotune.TrainerCallback(args)])
    assert examined.missing["optimizer_fusion"] == {"kernel": "Adafactor has no fused"}


class Recorder:
    """A run that notes what is reported and ends with the workload's last step."""

    def __init__(self, workload, config):
        self.workload, self.config = workload, config
        self.reports = []

    def apply(self, model, optimizer):
        return model, optimizer

    def report(self, **values):
        self.reports.append(values)
        if len(self.reports) == self.workload.steps:
            raise ScriptEnd


@pytest.mark.slow
def test_a_trial_reports_steps_without_padding_and_evaluates_after_the_last(
    arguments, examined, tmp_path
):
    workload = dataclasses.replace(examined.workload, steps=8, warmup_steps=1)
    recorder = Recorder(workload, TrainingConfig(micro_batch_size=2))
    interface.begin(recorder)
    rows = make_rows()
    for row in rows:
        row["attention_mask"] = torch.ones(LENGTH, dtype=torch.long)
        row["attention_mask"][-3:] = 0
        row["labels"] = row["labels"].masked_fill(row["attention_mask"] == 0, -100)
    args = arguments(max_steps=20, eval_strategy="steps", eval_steps=1, save_strategy="steps")
    model = make_model()
    trainer = transformers.Trainer(
        model=model,
        args=args,
        train_dataset=rows,
        eval_dataset=rows[:8],
        callbacks=[autotune.TrainerCallback(args)],
    )
    with pytest.raises(ScriptEnd):
        trainer.train()
    assert [report["tokens"] for report in recorder.reports] == [8 * (LENGTH - 3)] * 8
    # The logged loss of Trainer is the mean over the steps since the last log: the first eight.
    total = sum(report["loss"].item() for report in recorder.reports)
    assert total == pytest.approx(trainer._tr_loss.item(), rel=1e-5)
    *earlier, last = [report["evaluation_loss"] for report in recorder.reports]
    assert earlier == [None] * 7
    assert last == pytest.approx(trainer.evaluate()["eval_loss"], rel=1e-5)
    assert not list(tmp_path.glob("**/checkpoint-*"))


SCRIPT = textwrap.dedent("""
    import pathlib, runpy, sys
    import torch, transformers, autotune

    settings = runpy.run_path(sys.argv[1])
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(num_attention_heads=2, vocab_size=64, **sizes)
    model = transformers.LlamaForCausalLM(config)
    rows = torch.randint(64, (64, 16), generator=torch.Generator().manual_seed(1))
    data = [{"input_ids": row, "labels": row} for row in rows]
    args = transformers.TrainingArguments(
        str(pathlib.Path(__file__).parent / "out"),
        use_cpu=True,
        disable_tqdm=True,
        **settings["args"],
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings["learning_rate"])
    trainer = transformers.Trainer(
        model=model,
        args=args,
        train_dataset=data,
        eval_dataset=data[:8],
        optimizers=(optimizer, None),
        callbacks=[autotune.TrainerCallback(args)],
    )
    trainer.train()
    raise SystemExit("a trial must end with its last report")
""")
SETTINGS = """
learning_rate = 1e-2
args = dict(
    max_steps=100, per_device_train_batch_size=4, gradient_accumulation_steps=2,
    eval_strategy="steps", eval_steps=1000, save_steps=1,
)
"""


@pytest.mark.slow
def test_a_script_with_an_executed_configuration_and_its_own_optimizer_is_measured(
    server, tmp_path
):
    script, settings = tmp_path / "train.py", tmp_path / "settings.py"
    script.write_text(SCRIPT)
    settings.write_text(SETTINGS)
    workload = make_workload(
        "cpu",
        {
            "script": str(script),
            "script_arguments": [str(settings)],
            "global_batch": 8,
            "steps": 10,
        },
    )
    training = TrainingRequest(
        workload=workload,
        config=TrainingConfig(micro_batch_size=2, checkpointing="block"),
        folder=tmp_path,
        device="cpu",
        cap_bytes=2**40,
    )
    future = server.submit(Train(training=training), log_file=tmp_path / "trial.log")
    measured = future.result(timeout=120).measurement
    assert (measured.outcome, measured.message) == ("ok", "")
    assert str(measured.perplexity_source) == "evaluation loss after step 10"
    assert measured.perplexity < VOCABULARY
    assert measured.tokens_per_second > 0
    assert not list(tmp_path.glob("**/checkpoint-*"))
