"""A callback by which a script with transformers' Trainer is searched.

    trainer = Trainer(model=model, args=args, callbacks=[autotune.TrainerCallback(args)], ...)

The callback exists before the Trainer and changes its arguments: what the configuration decides
must not be decided a second time. The model and the optimizer are replaced where the Trainer has
made the optimizer, and no wrapper of accelerate. The events of a callback
come too late for that, and they tell neither the loss of a step nor its batches. So the callback
also wraps `create_optimizer` and `training_step` of the Trainer that it is passed to.

Without a configuration nothing is changed. Imports transformers.
"""

import dis
import functools
import inspect
import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from transformers import Trainer
from transformers import TrainerCallback as TransformersCallback

from autotune.errors import InvalidInput
from autotune.shipped.autotune_promise import watch
from autotune.shipped.batch_tokens import count_tokens
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

_HOW_TO_PASS = "write Trainer(..., args=args, callbacks=[autotune.TrainerCallback(args)])"


class TrainerCallback(TransformersCallback):
    """Lets `autotune search --script` run a script with transformers' Trainer, as its trials.

    Applies the configuration of the trial, or of the file that AUTOTUNE_CONFIG names, and reports
    each optimizer step. Without either it does nothing.
    """

    def __init__(self, args: Any) -> None:
        """Changes `args`, the TrainingArguments, which must then be passed to the Trainer.

        The configuration decides the micro batch, precision, checkpointing and compilation; what
        `args` say about these is ignored. The sequences in an optimizer step stay the same. In a
        trial nothing is saved or sent, and the model is evaluated once, after the last step.

        Raises InvalidInput for what cannot be searched, and IllegalConfiguration for a
        configuration that cannot be used with `args`.
        """
        self._args = args
        self._run = current_run()
        self._is_active = has_configuration()
        self._is_in_trainer = False
        self.has_applied = False
        self._sum_of_means = 1
        """Of how many means the Trainer makes its loss, where a `compute_loss` has it add them."""
        self._losses: list[Tensor] = []
        self._tokens = 0
        self._counted: Counted = "tokens"
        self._reports = 0
        if not self._is_active:
            return
        _reject_several_parts(args)
        if self._run is not None:
            _set_for_trial(args)
        global_batch = args.per_device_train_batch_size * args.gradient_accumulation_steps
        self._global_batch = global_batch
        # Another callback may have changed the same arguments, or those that they are a copy of.
        self._passes = vars(args).setdefault(_OWN_PASSES, args.gradient_accumulation_steps)
        set_by = (
            f"per_device_train_batch_size {args.per_device_train_batch_size}, "
            f"gradient_accumulation_steps {args.gradient_accumulation_steps}"
        )
        self._own_choices = _own_choices(args)
        config = config_of_run(global_batch, set_by=set_by)
        if self._run is None:  # a search has these rules, and sees whether gradients change
            clips = bool(args.max_grad_norm and args.max_grad_norm > 0)
            at = LegalityContext.of_script(config, global_batch=global_batch, clips_gradients=clips)
            check_legal(config, at)
        args.per_device_train_batch_size = config.micro_batch_size
        args.gradient_accumulation_steps = global_batch // config.micro_batch_size
        args.per_device_eval_batch_size = min(
            args.per_device_eval_batch_size, config.micro_batch_size
        )
        _leave_to_configuration(args)
        _follow_trainers()

    def changes(self, args: Any) -> bool:
        """Returns whether it was made from these TrainingArguments."""
        return args is self._args

    # -- events ------------------------------------------------------------------------------------

    def on_init_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        """Checks that the Trainer was made with the arguments that this callback has changed."""
        if self._is_active and args is not self._args:
            raise InvalidInput(
                "autotune.TrainerCallback was made from other arguments than its Trainer has",
                hint=_HOW_TO_PASS,
            )
        self._is_in_trainer = True
        return control

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        """Reports the step, or lets the Trainer evaluate if it is the trial's last one."""
        if self._run is None:
            return control
        is_last = self._reports + 1 == self._run.workload.steps
        control.should_save = False
        control.should_evaluate = is_last and args.eval_strategy != "no"
        if not control.should_evaluate:
            self._report(None)
        return control

    def on_evaluate(self, args: Any, state: Any, control: Any, **others: Any) -> Any:
        """Reports the last step with its evaluation loss: of several datasets, the first one's."""
        if self._run is not None and self._losses:
            self._report(_evaluation_loss(others["metrics"]))
        return control

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        """Prevents what a Trainer does at the end of an epoch, which is no part of a trial."""
        if self._run is not None:
            control.should_save = control.should_evaluate = False
        return control

    def _report(self, evaluation_loss: float | None) -> None:
        loss = torch.stack(self._losses).sum()
        tokens = self._tokens
        self._losses, self._tokens = [], 0
        self._reports += 1
        report(**{self._counted: tokens}, loss=loss, evaluation_loss=evaluation_loss)

    # -- inside the Trainer ------------------------------------------------------------------------

    def follow(self, trainer: Trainer) -> None:
        """Applies the configuration once `trainer` has its optimizer, and notes its losses.

        Raises InvalidInput if the Trainer was made before this callback.
        """
        if not self._is_in_trainer:
            raise InvalidInput(
                "autotune.TrainerCallback was added to a Trainer that was made without it",
                hint=_HOW_TO_PASS,
            )
        if self.has_applied:  # a second call of trainer.train()
            return
        for learner in learners():  # of several Trainers, this is the one that is searched
            learner.learn_global_batch(self._global_batch)
            learner.note_own_choices(**self._own_choices)
        if _adds_up_means(trainer):
            self._sum_of_means = self._passes
            trainer.compute_loss = self._scaling(trainer, trainer.compute_loss)
        trainer.create_optimizer = self._applying(trainer, trainer.create_optimizer)
        trial = promised_trial()
        if self._run is not None:
            trainer.training_step = self._noting(trainer.training_step)
        elif trial:
            watch(trainer, trial)

    def _applying(
        self, trainer: Trainer, create_optimizer: Callable[..., Optimizer]
    ) -> Callable[..., Optimizer]:
        @functools.wraps(create_optimizer)
        def create(*args: Any, **kwargs: Any) -> Optimizer:
            create_optimizer(*args, **kwargs)
            if not self.has_applied:
                self.has_applied = True
                apply(trainer.model, trainer.optimizer)
            optimizer: Optimizer = trainer.optimizer
            return optimizer

        return create

    def _scaling(self, trainer: Trainer, compute_loss: Callable[..., Any]) -> Callable[..., Any]:
        """Returns `compute_loss` such that the losses of a step add up to what they did before."""

        @functools.wraps(compute_loss)
        def compute(*args: Any, **kwargs: Any) -> Any:
            loss = compute_loss(*args, **kwargs)
            if not torch.is_grad_enabled():
                return loss
            scale = self._passes / trainer.args.gradient_accumulation_steps
            return (loss[0] * scale, *loss[1:]) if isinstance(loss, tuple) else loss * scale

        return compute

    def _noting(self, training_step: Callable[..., Tensor]) -> Callable[..., Tensor]:
        @functools.wraps(training_step)
        def step(model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Tensor:
            self._counted = counted_in(inputs)
            tokens = count_tokens(inputs)  # before the loss takes something out of the inputs
            # The Trainer divides each loss, so that their sum is the mean over the step.
            loss = training_step(model, inputs, *args, **kwargs)
            self._losses.append(loss.detach() / self._sum_of_means)
            self._tokens += int(tokens)  # Trainer waits for the device here, too
            return loss

        return step


def _reject_several_parts(args: Any) -> None:
    """Raises InvalidInput if the model is split, so that its parts belong to another library."""
    for name in ("deepspeed", "fsdp"):
        if getattr(args, name, None):
            raise InvalidInput(
                f"autotune.TrainerCallback cannot be combined with {name}, which splits the model",
                hint=f"train without {name}, on one device or with one copy of the model on each",
            )


def _set_for_trial(args: Any) -> None:
    """Leaves out of a trial what saves, sends or evaluates, and every device but one."""
    args._n_gpu = 1
    args.report_to = []
    args.push_to_hub = False
    args.eval_on_start = False


_CHECKPOINTING = ("gradient_checkpointing", "activation_checkpointing")
"""The arguments of transformers by which blocks are recomputed, by version."""


def _own_choices(args: Any) -> dict[str, Any]:
    """Returns what the configuration decides, as TrainingArguments say it."""
    checkpoints = any(getattr(args, name, False) for name in _CHECKPOINTING)
    formats = {"bf16-mixed": args.bf16, "fp16-mixed": args.fp16, "tf32": args.tf32}
    return {
        "precision": next((precision for precision, is_on in formats.items() if is_on), "fp32"),
        "checkpointing": "block" if checkpoints else "none",
        "compile": "model" if args.torch_compile else "none",
        "micro_batch_size": args.per_device_train_batch_size,
    }


def _leave_to_configuration(args: Any) -> None:
    """Turns off what the techniques of a configuration do instead."""
    args.auto_find_batch_size = False
    args.bf16 = args.fp16 = False
    args.mixed_precision = "no"
    args.tf32 = None
    for name in _CHECKPOINTING:
        if hasattr(args, name):
            setattr(args, name, False)
    args.torch_compile = False
    args.torch_compile_backend = args.torch_compile_mode = None
    # accelerate reads these where its arguments say nothing.
    os.environ["ACCELERATE_MIXED_PRECISION"] = "no"
    os.environ["ACCELERATE_DYNAMO_BACKEND"] = "no"


_OWN_PASSES = "_autotune_passes"
"""Attribute of TrainingArguments with the accumulation that the script has set."""


def _adds_up_means(trainer: Trainer) -> bool:
    """Returns whether the Trainer adds up a mean for each pass of a step, and does not divide.

    It leaves that to `compute_loss` where that gets the number of items of the whole step
    (`training_step` of transformers 5.23), and one of the user's may ignore it. Then the loss
    depends on the number of passes.
    """
    is_scaled = getattr(trainer, "loss_is_scaled_for_ga", None)
    function = trainer.compute_loss_func
    if is_scaled is None:
        is_scaled = trainer.model_accepts_loss_kwargs or function is not None
    if function is None and type(trainer).compute_loss is not Trainer.compute_loss:
        function = type(trainer).compute_loss
    if not is_scaled or function is None:
        return False
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is None:  # of a partial or an object: nothing is known of it
        return False
    names = {"num_items_in_batch"}
    names.update(
        name
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
    )
    for instruction in dis.get_instructions(code):
        if instruction.opname.startswith("LOAD"):
            loaded = instruction.argval  # two names at once in some versions of Python
            if not names.isdisjoint(loaded if isinstance(loaded, tuple) else (loaded,)):
                return False
    return True


def _evaluation_loss(metrics: Mapping[str, float]) -> float | None:
    for name, value in metrics.items():
        if name.endswith("_loss"):
            return value
    return None


@functools.cache
def _follow_trainers() -> None:
    """From now on, tells each such callback when training begins, and in which Trainer.

    Does so once in a process.
    """
    train = Trainer.train

    @functools.wraps(train)
    def followed(self: Trainer, *args: Any, **kwargs: Any) -> Any:
        for callback in self.callback_handler.callbacks:
            if isinstance(callback, TrainerCallback):
                callback.follow(self)
        return train(self, *args, **kwargs)

    Trainer.train = followed
