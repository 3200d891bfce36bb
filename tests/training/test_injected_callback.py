"""Scripts with transformers' Trainer and no line of ours: the Trainer gets our callback."""

from importlib.util import find_spec

import pytest

import autotune
from autotune.errors import InvalidInput
from autotune.execution.local import LocalExecutor
from autotune.spec.workload import make_workload

pytestmark = pytest.mark.skipif(
    find_spec("transformers") is None or find_spec("accelerate") is None,
    reason="transformers or accelerate is missing",
)

BEFORE = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
model = LlamaForCausalLM(LlamaConfig(num_attention_heads=2, vocab_size=64, **sizes))
rows = [{"input_ids": torch.arange(16) + k, "labels": torch.arange(16) + k} for k in range(32)]
args = TrainingArguments(
    "out", max_steps=12, per_device_train_batch_size=4, gradient_accumulation_steps=3,
    use_cpu=True, report_to=[], bf16=True, disable_tqdm=True, save_strategy="no",
)
"""
MADE = "trainer = Trainer(model=model, args=args, train_dataset=rows)\n"
OF_A_CLASS_THAT_READS_ITS_ARGUMENTS = """
class Reader(Trainer):
    def __init__(self, model, args, **options):
        assert not args.bf16, "the configuration decides the precision"
        super().__init__(model=model, args=args, **options)

trainer = Reader(model, args, train_dataset=rows)
"""
OF_A_CLASS_THAT_COPIES_ITS_ARGUMENTS = """
import copy

class Copier(Trainer):
    def __init__(self, model, args, **options):
        super().__init__(model=model, args=copy.copy(args), **options)

trainer = Copier(model, args=args, train_dataset=rows)
"""
WITH_ITS_CALLBACK = """
import autotune

callbacks = [autotune.TrainerCallback(args)]
trainer = Trainer(model=model, args=args, train_dataset=rows, callbacks=callbacks)
"""
IMPORTED_LATE = "import transformers.trainer\n" + MADE
TRAINED = "trainer.train()\n"


@pytest.fixture
def notes():
    return []


@pytest.fixture
def executor(tmp_path, notes, one_trial_server):
    with LocalExecutor(tmp_path / "work", note=notes.append) as started:
        yield started


@pytest.fixture
def examined(tmp_path, executor):
    """examined(making, ...) is the workload of a script with that Trainer, once it was examined."""

    def examine(making, *, learns_global_batch=True, **settings):
        script = tmp_path / "train.py"
        script.write_text(BEFORE + making + TRAINED)
        workload = make_workload("cpu", {"script": str(script), "steps": 12, **settings})
        found, _ = executor.examine(
            workload, {}, device="cpu", learns_global_batch=learns_global_batch
        )
        return found

    return examine


@pytest.mark.slow
@pytest.mark.parametrize(
    ("making", "trainer"),
    [
        (MADE, "Trainer"),
        (IMPORTED_LATE, "Trainer"),
        (OF_A_CLASS_THAT_READS_ITS_ARGUMENTS, "Reader"),
        (OF_A_CLASS_THAT_COPIES_ITS_ARGUMENTS, "Copier"),
    ],
)
def test_a_script_without_a_line_of_ours_is_examined_and_its_global_batch_known(
    making, trainer, examined, notes
):
    assert examined(making).global_batch == 12
    [note] = notes
    assert f"its {trainer} gets autotune.TrainerCallback in every trial" in note
    assert "--no-callback" in note


@pytest.mark.slow
def test_a_trainer_that_has_the_callback_gets_no_second_one(examined, notes):
    assert examined(WITH_ITS_CALLBACK).global_batch == 12
    assert notes == []


def test_the_training_of_a_script_with_a_trainer_is_what_its_trainer_does(examined):
    workload = examined(WITH_ITS_CALLBACK)
    own = workload.legality_context.own
    assert (own.precision, own.micro_batch_size, own.checkpointing) == ("bf16-mixed", 4, "none")
    assert workload.own_name == workload.script


@pytest.mark.slow
def test_the_precision_of_weights_that_are_in_16_bits_counts_before_that_of_the_trainer(examined):
    assert examined("model.to(torch.bfloat16)\n" + MADE).own_config["precision"] == "bf16-true"


@pytest.mark.slow
def test_a_script_is_left_as_it_is_where_that_is_wanted(examined):
    with pytest.raises(InvalidInput, match=r"does not call autotune\.apply"):
        examined(MADE, callback=False)


@pytest.mark.slow
def test_a_global_batch_that_is_given_must_be_that_of_the_script(examined):
    with pytest.raises(InvalidInput, match=r"trains on 12 sequences .* and its search on 8"):
        examined(MADE, learns_global_batch=False, global_batch=8)


@pytest.mark.slow
def test_a_search_of_a_script_without_a_line_of_ours_varies_its_micro_batch(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(BEFORE + MADE + TRAINED)
    (tmp_path / "space.toml").write_text(
        '[techniques]\nprecision = ["fp32"]\nmicro_batch_size = [4, 12]\n'
    )
    result = autotune.search(
        script=str(tmp_path / "train.py"),
        space="space.toml",
        max_mem="1GiB",
        steps=12,
        trials=2,
        confirm=False,
    )
    assert {trial.config.micro_batch_size for trial in result.trials} == {4, 12}
    assert [trial.outcome for trial in result.trials] == ["ok", "ok"]
    assert result.workload.global_batch == 12
