"""A callback by which a script with Lightning's Trainer is searched.

    tuning = autotune.LightningCallback(global_batch=16)
    loader = DataLoader(rows, batch_size=tuning.micro_batch_size)
    trainer = Trainer(
        accumulate_grad_batches=tuning.accumulate_grad_batches, callbacks=[tuning], ...
    )

The configuration is applied when fitting starts: the model is on its device then, and optimizer and
schedulers exist, but nothing of a checkpoint has been loaded into them.

Without a configuration the callback does nothing. Imports the Lightning that the script has loaded.
"""

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from autotune.errors import InvalidInput
from autotune.shipped.batch_tokens import count_tokens
from autotune.shipped.steps_of_lightning import StepsOfLightning
from autotune.spec.config import LegalityContext, check_legal
from autotune.spec.terms import Counted
from autotune.training.script.counted import counted_in
from autotune.training.script.interface import (
    apply,
    config_of_run,
    current_run,
    has_configuration,
    learners,
    promised_trial,
    report,
)


def _loaded_package() -> Any:
    """Returns `lightning.pytorch`, or `pytorch_lightning` if only that is imported or installed.

    They are the same code twice, and the classes of one do not accept those of the other.
    """
    other = "pytorch_lightning"
    if sys.modules.get(other) and "lightning.pytorch" not in sys.modules:
        return import_module(other)
    if find_spec("lightning") is None and find_spec(other) is not None:
        return import_module(other)
    return import_module("lightning.pytorch")


_package = _loaded_package()
_Callback: Any = _package.Callback


class _PromiseCallback(StepsOfLightning, _Callback):
    """Compares a training with the trial that its configuration is from."""

    def __init__(self, trial: Mapping[str, Any]) -> None:
        super().__init__()
        self.trial = trial


_PRECISIONS = ("Precision", "MixedPrecision", "HalfPrecision", "DoublePrecision")
"""The precision plugins that decide in which format the model computes, and nothing else."""

_OWN_PRECISIONS = {"bf16-mixed": "bf16-mixed", "16-mixed": "fp16-mixed", "bf16-true": "bf16-true"}
"""{precision of a plugin: that of a configuration}; of others the weights of the model say it."""

_NEVER = 2**62
"""A number of batches after which no training validates."""


class LightningCallback(_Callback):
    """Lets `autotune search --script` run a script with Lightning's Trainer, as its trials.

    Applies the configuration of the trial, or of the file that AUTOTUNE_CONFIG names, and reports
    each optimizer step. Without either it does nothing.
    """

    def __init__(
        self,
        *,
        global_batch: int,
        micro_batch_size: int | None = None,
        monitor: str = "val_loss",
        network: str | None = None,
        count_tokens: Callable[[Any], int] | None = None,
    ) -> None:
        """Reads the configuration; see `micro_batch_size` and `accumulate_grad_batches`.

        Args:
            global_batch: Sequences in an optimizer step.
            micro_batch_size: Sequences in a forward pass without a configuration; by default all.
            monitor: The mean token loss on held-out text, as validation_step logs it.
            network: Attribute of the LightningModule with the model that training_step calls. By
                default it is the only submodule with parameters, or else the whole module.
            count_tokens: Returns the tokens of a batch. By default they are the ones of its
                `attention_mask`, the elements of its `input_ids` or of its first tensor.

        Raises InvalidInput for a configuration or a search with another global batch, and for a
        micro batch that does not divide it.
        """
        self._begin(monitor=monitor, network=network, count_tokens=count_tokens)
        self._global_batch = global_batch
        self.micro_batch_size = micro_batch_size or global_batch
        """Sequences in a forward pass: the batch size of the loader of training data."""
        if self._is_active:
            for learner in learners():
                learner.note_own_choices(micro_batch_size=self.micro_batch_size)
            self._config = config_of_run(global_batch, set_by="global_batch of LightningCallback")
            self.micro_batch_size = self._config.micro_batch_size
        if global_batch % self.micro_batch_size:
            raise InvalidInput(
                f"a micro batch of {self.micro_batch_size} does not divide the {global_batch} "
                "sequences in an optimizer step",
                hint="give LightningCallback a micro_batch_size that divides its global_batch",
            )
        self.accumulate_grad_batches = global_batch // self.micro_batch_size
        """Forward passes in an optimizer step, which must be passed to the Trainer."""

    def _begin(
        self,
        *,
        monitor: str = "val_loss",
        network: str | None = None,
        count_tokens: Callable[[Any], int] | None = None,
    ) -> None:
        """Sets what needs no configuration."""
        super().__init__()
        self._run = current_run()
        self._is_active = has_configuration()
        self._monitor = monitor
        self._network_name = network
        self._count_tokens = count_tokens or _default_count
        self._losses: list[Tensor] = []
        self._tokens = 0
        self._counted: Counted = "tokens"
        self._optimizer_steps = 0
        self._reports = 0
        self._is_called = True
        self._weight = 1.0
        """By how much the loss of this micro batch counts, of equal parts of a step."""

    # -- before training ---------------------------------------------------------------------------

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Leaves precision to the configuration, and checks that the Trainer goes with it."""
        if not self._is_active or stage != "fit":
            return
        self._check(trainer, pl_module)
        self._prepare_steps(trainer)
        precision = _OWN_PRECISIONS.get(str(trainer.precision_plugin.precision), "fp32")
        for learner in learners():
            learner.note_own_choices(precision=precision)
        trainer.strategy.precision_plugin = _package.plugins.Precision()
        trial = promised_trial()
        if self._run is not None:
            _set_for_trial(trainer)
        elif trial:
            trainer.callbacks.append(_PromiseCallback(trial))

    def _check(self, trainer: Any, pl_module: Any) -> None:
        if not isinstance(trainer, _package.Trainer):
            raise InvalidInput(
                "the Trainer is not of the package that autotune.LightningCallback uses, "
                f"{_package.__name__}",
                hint="import only one of lightning and pytorch_lightning, and that before "
                "autotune.LightningCallback is used",
            )
        if trainer.world_size > 1 or not pl_module.automatic_optimization:
            raise InvalidInput(
                "autotune.LightningCallback needs one device and automatic optimization",
                hint="write Trainer(devices=1), or call autotune.apply and report yourself",
            )
        plugin = type(trainer.precision_plugin).__name__
        if plugin not in _PRECISIONS:
            raise InvalidInput(
                f"autotune.LightningCallback cannot replace the precision plugin {plugin}, which "
                "changes the layers of the model",
                hint="leave plugins and precision of the Trainer out, and change the layers in the "
                "LightningModule",
            )

    def _prepare_steps(self, trainer: Any) -> None:
        """Checks that the steps of the Trainer have the sequences of the configuration."""
        if trainer.accumulate_grad_batches != self.accumulate_grad_batches:
            raise InvalidInput(
                f"the Trainer accumulates {trainer.accumulate_grad_batches} batches, and the "
                f"configuration {self.accumulate_grad_batches}",
                hint="write Trainer(accumulate_grad_batches=callback.accumulate_grad_batches)",
            )
        if self._run is None:  # a search has these rules, and sees whether gradients change
            clips = bool(trainer.gradient_clip_val)
            at = LegalityContext.of_script(
                self._config, global_batch=self._global_batch, clips_gradients=clips
            )
            check_legal(self._config, at)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Applies the configuration. Raises InvalidInput unless there is one optimizer."""
        if not self._is_active:
            return
        if len(trainer.optimizers) != 1:
            raise InvalidInput(
                f"autotune.LightningCallback needs one optimizer, not {len(trainer.optimizers)}",
                hint="return one optimizer from configure_optimizers",
            )
        network = self._network_of(pl_module)
        if self._run is not None:
            for config in trainer.lr_scheduler_configs:
                config.strict = False  # it may wait for a validation that a trial does not make
        apply(network, trainer.optimizers[0])
        if self._config.compile == "none":  # a hook would be compiled
            self._is_called = False
            self._hook = network.register_forward_pre_hook(self._note_call)

    def _network_of(self, pl_module: nn.Module) -> nn.Module:
        if self._network_name is not None:
            return pl_module.get_submodule(self._network_name)
        trained = [child for child in pl_module.children() if any(True for _ in child.parameters())]
        own = next(pl_module.parameters(recurse=False), None)
        return trained[0] if len(trained) == 1 and own is None else pl_module

    def _note_call(self, *_: Any) -> None:
        self._is_called = True
        self._hook.remove()  # it would be in every pickle and copy of the network

    # -- during training ---------------------------------------------------------------------------

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Remembers where a training that was resumed begins."""
        self._optimizer_steps = trainer.global_step

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Prevents validation before the last step of a trial."""
        if self._run is not None:
            trainer.check_val_every_n_epoch = None
            trainer.val_check_batch = _NEVER

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Reports the optimizer step if this batch ended one, unless validation follows."""
        if not self._is_called:
            raise InvalidInput(
                "training_step does not call the model as a whole, so that no configuration can "
                "be applied to it",
                hint="name the attribute with the model that it calls: "
                'LightningCallback(..., network="model")',
            )
        if self._run is None:
            return
        if outputs:  # none if training_step has returned None
            # It is divided by the accumulated batches.
            self._losses.append(outputs["loss"].detach() * self._weight)
            if self._count_tokens is _default_count:
                self._counted = counted_in(batch)
            self._tokens += self._count_tokens(batch)
        if trainer.global_step == self._optimizer_steps or not self._losses:
            return
        self._optimizer_steps = trainer.global_step
        if self._reports + 1 == self._run.workload.steps and trainer.enable_validation:
            trainer.val_check_batch = 1  # now
        else:
            self._report(None)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Reports the last step of a trial with its validation loss."""
        if self._run is not None and self._losses:
            self._report(trainer.callback_metrics.get(self._monitor))

    def _report(self, evaluation_loss: Any) -> None:
        loss = torch.stack(self._losses).sum()
        tokens = self._tokens
        self._losses, self._tokens = [], 0
        self._reports += 1
        report(**{self._counted: tokens}, loss=loss, evaluation_loss=evaluation_loss)


def _default_count(batch: Any) -> int:
    return int(count_tokens(batch))


def _set_for_trial(trainer: Any) -> None:
    """Leaves out of a trial what saves or logs, and what needs validations before its last step."""
    unwanted = (_package.callbacks.Checkpoint, _package.callbacks.EarlyStopping)
    trainer.callbacks = [one for one in trainer.callbacks if not isinstance(one, unwanted)]
    trainer.loggers = [_package.loggers.logger.DummyLogger() for _ in trainer.loggers]
    trainer.num_sanity_val_steps = 0
