"""An exported Trainer with steps in the backward pass resumes from a checkpoint exactly."""

import pytest
import torch

from autotune.exporters import transformers
from autotune.spec.config import TrainingConfig
from tests.exporters.readers.hugging_face import imported, tiny_llama
from tests.exporters.recipes import recipe

STEPS, SAVED_AT = 6, 3


def trained(folder, *, fusion, resume=False):
    """Returns the weights after `STEPS` steps with a falling learning rate.

    `resume`: start from the checkpoint in `folder`.
    """
    config = TrainingConfig(micro_batch_size=8, optimizer_fusion=fusion)
    export = transformers.TARGET.write(
        recipe(config, schedule="cosine", gradient_clipping=None), "5.23"
    )
    with imported(export.files["autotune_trainer.py"]) as module:
        settings = {
            "use_cpu": True,
            "report_to": "none",
            "save_steps": SAVED_AT,
            "save_strategy": "steps",
        }
        args = module.training_arguments(
            str(folder), max_steps=STEPS, disable_tqdm=True, **settings
        )
        data = module.sequences(
            [f"text number {n} of many " * 50 for n in range(99)],
            lambda text: [byte % 64 for byte in text.encode()],
        )
        torch.manual_seed(0)
        trainer = module.AutotuneTrainer(model=tiny_llama(), args=args, train_dataset=data)
        trainer.train(
            resume_from_checkpoint=str(folder / f"checkpoint-{SAVED_AT}") if resume else None
        )
    return torch.cat([parameter.detach().flatten() for parameter in trainer.model.parameters()])


def test_a_resumed_training_ends_with_the_weights_of_a_plain_one(tmp_path):
    plain = trained(tmp_path / "plain", fusion="none")
    assert torch.equal(trained(tmp_path / "backward", fusion="backward"), plain)
    assert torch.equal(trained(tmp_path / "backward", fusion="backward", resume=True), plain)
    assert torch.equal(trained(tmp_path / "plain", fusion="backward", resume=True), plain)


def test_clipping_that_would_find_no_gradients_is_rejected(tmp_path):
    config = TrainingConfig(micro_batch_size=8, optimizer_fusion="backward")
    export = transformers.TARGET.write(recipe(config), "5.23")
    with imported(export.files["autotune_trainer.py"]) as module:
        args = module.training_arguments(
            str(tmp_path), use_cpu=True, report_to="none", max_grad_norm=1.0
        )
        with pytest.raises(AssertionError, match="gradients cannot be clipped"):
            module.AutotuneTrainer(model=tiny_llama(), args=args).create_optimizer()
