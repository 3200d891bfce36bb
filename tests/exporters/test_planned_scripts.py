"""Exported scripts with the plan of an activation budget train within that budget."""

import dataclasses

import pytest
import transformers

from autotune.exporters import TARGETS
from autotune.memory.cpu import CpuMeter
from autotune.shipped.quantized import tensors_behind
from tests.exporters.readers.hugging_face import imported
from tests.exporters.readers.pytorch_script import loaded
from tests.exporters.recipes import recipe
from tests.exporters.test_pytorch_script import trained_by_script
from tests.techniques.test_planned_activations import STEPS, Within

pytestmark = pytest.mark.slow


def exported(target, within):
    """The export of a trial that had the predicted peak, with its plan."""
    asked = dataclasses.replace(
        recipe(within.config, device_type="cpu"),
        workload=within.workload,
        kept=within.prediction.kept,
        peak_memory_bytes=within.prediction.peak_memory_bytes,
    )
    export = TARGETS[target].write(asked, TARGETS[target].versions[0])
    assert "activation_budget" not in {one.setting for one in export.unsupported}
    return export


def test_the_script_of_pytorch_has_the_losses_and_the_peak_of_the_trial(tmp_path):
    within = Within("gpt", tmp_path)
    trainer = within.trainer(within.plain)
    losses = [
        trainer.step(step, batch) for step, batch in zip(range(4), trainer.batches(), strict=False)
    ]
    with loaded(exported("pytorch", within)) as script:
        trained, peak = trained_by_script(
            script, within.folder, global_batch=within.workload.global_batch
        )
    assert trained == losses
    assert peak == within.prediction.peak_memory_bytes <= within.budget_bytes


class _PeakOfLastStep(transformers.TrainerCallback):
    """Measures the last step of a training."""

    def __init__(self):
        self.meter = CpuMeter()

    def on_step_begin(self, args, state, control, *, model, optimizer, **_):
        if state.global_step == args.max_steps - 1:
            states = [one for of in optimizer.state.values() for one in of.values()]
            weights = [part for weight in model.parameters() for part in tensors_behind(weight)]
            resident = [*weights, *model.buffers(), *states]
            self._measuring = self.meter.measuring(lambda: resident)
            self._measuring.__enter__()

    def on_step_end(self, args, state, control, **_):
        if state.global_step == args.max_steps:
            self._measuring.__exit__(None, None, None)


def test_the_trainer_of_transformers_stays_within_the_budget(tmp_path):
    within = Within("llama", tmp_path)
    watch = _PeakOfLastStep()
    with imported(exported("transformers", within).files["autotune_trainer.py"]) as module:
        arguments = module.training_arguments(
            str(tmp_path), use_cpu=True, max_steps=STEPS, report_to="none", save_strategy="no"
        )
        data = module.sequences(["a quick fox jumps "] * 400, lambda text: [3] * len(text))
        model = transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.for_model(**within.workload.model_config)
        )
        module.AutotuneTrainer(model, arguments, train_dataset=data, callbacks=[watch]).train()
    assert watch.meter.reading().peak_memory_bytes <= within.budget_bytes
