"""Predicts the peak of a step of any training of a user: modules, optimizers and a function.

The double of the training (`double.py`) makes its steps on the fake device (`one_device.py`), until
every optimizer has made one and has its state. Then as many calls are recorded once more: that is
the steady step. Which part of it runs is seen from outside: the backward pass by autograd's
function, the update by the hooks of optimizers, and all else is the forward pass.
"""

import gc
import inspect
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any, cast
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    UnsupportedOperatorException,
)
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils._pytree import tree_leaves

from autotune.errors import (
    AutotuneError,
    InvalidInput,
    PredictionImpossible,
    causes_of,
    class_and_first_line_of,
)
from autotune.memory.recording import Recording
from autotune.predictor import cuda
from autotune.predictor.accuracy import error_of
from autotune.predictor.caching_allocator import count_pieces
from autotune.predictor.double import Double
from autotune.predictor.fake_mode import StorageWatch, is_of_program, line_in_words
from autotune.predictor.fake_step import ChangeOfRun, FakeRun, FakeStep, modules_of
from autotune.predictor.gpu import Gpu
from autotune.predictor.known_values import taken_for_real
from autotune.predictor.one_device import as_if_on, without_a_trace
from autotune.shipped.blocks import find_stacks
from autotune.shipped.checkpointing import recompute
from autotune.shipped.matrices import matrices_apart
from autotune.shipped.quantized import tensors_behind
from autotune.shipped.tensors import held_tensors
from autotune.spec.config import TrainingConfig
from autotune.spec.optimizers import OPTIMIZERS, Optimizer
from autotune.spec.prediction import Category, Prediction
from autotune.techniques.optimizer import Parameters, make_optimizer

_MOST_CALLS = 16
"""Until every optimizer has made a step: one may step once in several calls."""
_LEARNING_RATE = 1e-3
_OF_STEP = ("model", "batch", "optimizer")
_OF_LIGHTNING = {"batch_idx": 0}
"""What `training_step` of a LightningModule takes besides the batch."""


@dataclass(frozen=True, kw_only=True)
class UserTraining:
    """What a user trains, as it is."""

    model: Any
    """A module, or a sequence or mapping of several."""
    batch: Any
    optimizer: Any
    """An optimizer, or a sequence or mapping of several; a name of `OPTIMIZERS` or a class stands
    for one that does not exist yet; None for none."""
    step: Callable[..., Any] | None = None

    def __post_init__(self) -> None:
        models = named_models(self.model)
        if not models or not all(isinstance(one, nn.Module) for one in models.values()):
            raise InvalidInput(
                f"model is a {type(self.model).__name__}, not a torch.nn.Module",
                hint="give a module, or a list or dictionary of modules",
            )
        if isinstance(self.optimizer, str) and self.optimizer not in OPTIMIZERS:
            raise InvalidInput(
                f"Invalid optimizer: {self.optimizer!r}",
                hint=f"use an optimizer of torch, or one of {', '.join(OPTIMIZERS)}",
            )
        if self.step is not None and not callable(self.step):
            raise InvalidInput(
                f"step is a {type(self.step).__name__}, not a function",
                hint="give a function that makes one training step: step(model, batch, optimizer)",
            )
        if self.step is None and not isinstance(self.model, nn.Module):
            raise InvalidInput(
                f"how {len(models)} models are trained together is not known",
                hint="give step=..., the function that makes one training step with them",
            )
        if self.step is None and self.optimizer is None:
            raise InvalidInput(
                "a training has an optimizer, and none was given",
                hint='give it, or its name, such as "adamw"',
            )
        self._check_ties(models.values())
        for one in [*models.values(), *optimizers_in(self.optimizer)]:
            if name := _of_several_devices(one):
                raise InvalidInput(
                    f"{name} trains with several devices, and a training that is given as modules "
                    "is predicted for one",
                    hint="give the model and its optimizer before they are divided or wrapped, for "
                    "what one device needs alone; what each of several needs of a model that is "
                    "named: autotune predict --devices-per-trial N",
                )

    def _check_ties(self, models: Iterable[nn.Module]) -> None:
        """Raises InvalidInput where no optimizer updates a parameter of any model."""
        own = {parameter for model in models for parameter in model.parameters()}
        given = [one for one in optimizers_in(self.optimizer) if hasattr(one, "param_groups")]
        updated = [p for one in given for group in one.param_groups for p in group["params"]]
        if updated and own.isdisjoint(updated):
            raise InvalidInput(
                "the optimizer updates other parameters than those of the model",
                hint="make the optimizer from model.parameters() of this very model",
            )

    @property
    def models(self) -> dict[str, Any]:
        """The models by name; one alone has none."""
        return named_models(self.model)


@dataclass(frozen=True, kw_only=True)
class Change:
    """What is tried instead of the training as it is."""

    rows: int | None = None
    """The first dimension of all tensors of the batch."""
    recomputed: int = 0
    """How many blocks, the first ones, are recomputed."""
    optimizer: Optimizer | None = None


def _of_several_devices(given: Any) -> str:
    """Returns what in a model or optimizer belongs to a training of several devices, or nothing."""
    if isinstance(given, ZeroRedundancyOptimizer):
        return type(given).__name__
    if not isinstance(given, nn.Module):
        return ""
    for module in given.modules():
        if isinstance(module, DistributedDataParallel | FullyShardedDataParallel | FSDPModule):
            return type(module).__name__
    return next((type(one).__name__ for one in given.parameters() if isinstance(one, DTensor)), "")


def named_models(given: Any) -> dict[str, Any]:
    """Returns the models by name; one alone has none."""
    if isinstance(given, Mapping):
        return {str(name): model for name, model in given.items()}
    if isinstance(given, Sequence):
        return {f"model {number}": model for number, model in enumerate(given)}
    return {"": given}


def optimizers_in(given: Any) -> list[Any]:
    """Returns the optimizers, or what stands for them."""
    if given is None:
        return []
    if isinstance(given, Mapping):
        return list(given.values())
    if isinstance(given, Sequence) and not isinstance(given, str):
        return list(given)
    return [given]


def blocks_of(models: Iterable[nn.Module]) -> list[nn.Module]:
    """Returns the blocks of trained models in the order in which they run, each once.

    The first ones are best to recompute: when the backward pass comes to them, all that was stored
    for the others is freed.
    """
    stacks = [stack for model in models for stack in find_stacks(model)]
    return list(dict.fromkeys(block for stack in stacks for block in stack.blocks))


def blocks_to_recompute(models: Iterable[nn.Module]) -> list[nn.Module]:
    """Returns those blocks of which nothing is recomputed yet."""
    return [block for block in blocks_of(models) if not any(map(is_recomputed, block.modules()))]


def is_recomputed(module: nn.Module) -> bool:
    """Returns whether a module recomputes its activations by `recompute`."""
    found = [vars(kind).get("_before") for kind in type(module).__mro__]
    return any(getattr(one.change, "recomputes", False) for one in found if one is not None)


class FakeUserTraining(FakeRun):
    """The steps of a user's training on fake tensors, of which the steady one is the prediction."""

    subject = "the step"
    way_out = "give a step that does what most steps do, without deciding it by that value"

    def __init__(
        self,
        training: UserTraining,
        change: Change,
        *,
        gpu: Gpu | None,
        change_blocks: ChangeOfRun | None = None,
        answer: float = 1,
    ) -> None:
        """`answer` is what values that are not known are taken for."""
        super().__init__(gpu)
        self.watch.is_of_user = True
        self.watch.answer = answer
        self._training = training
        self._change = change
        self._change_blocks = change_blocks
        self._double = Double(self.watch)
        self._models: dict[str, nn.Module] = {}
        self._optimizers: list[Any] = []
        self._call: Callable[[], Any] = lambda: None
        self._calls = 0
        """Calls of the user's function until every optimizer has made a step."""
        self._stepped: set[int] = set()
        self._result: Any = None
        """What the function has returned: a loop keeps it until the next call returns."""
        self._batch: list[Tensor] = []
        self._notes: list[str] = []
        self._is_recorded = False
        self.recording = Recording()
        """The steady step, once it is predicted."""

    @property
    def rows(self) -> int | None:
        """The first dimension of all tensors of the batch, None where they do not share one."""
        sizes = {tensor.shape[0] for tensor in self._batch if tensor.dim()}
        return sizes.pop() if len(sizes) == 1 else None

    def predict(self) -> Prediction:
        """Returns the prediction of the steady step.

        Raises InvalidInput for what cannot be trained so, and PredictionImpossible for what cannot
        run on fake tensors.
        """
        try:
            with (
                without_a_trace(),
                torch.enable_grad(),
                _others_ignored_by_gc(),
                _gradients_kept(self._training.models.values()),
            ):
                return self._predict()
        except AutotuneError:
            if self.watch.reads and self.watch.answer == 1 and not self._is_recorded:
                # Such as a step that ends where its loss is too large.
                other = FakeUserTraining(
                    self._training,
                    self._change,
                    gpu=self.gpu,
                    change_blocks=self._change_blocks,
                    answer=0,
                )
                with suppress(AutotuneError):
                    prediction = other.predict()
                    self._batch, self.recording = other._batch, other.recording
                    return prediction
            raise
        except (Exception, SystemExit) as error:
            raise _in_words(error) from error
        finally:
            if self.programs.plan is not None:
                torch.compiler.reset()  # what was compiled has no kernels

    def _predict(self) -> Prediction:
        with ExitStack() as stack:
            self._make_double()
            double = self._double
            stack.enter_context(double.standing_in())
            stack.enter_context(self.watch.mode)
            if self.gpu is not None:
                stack.enter_context(cuda.gpu_kernels(self.gpu))
                stack.enter_context(_updates_as_on_a_gpu())
            stack.enter_context(self.programs.active())
            stack.enter_context(taken_for_real())
            device = stack.enter_context(as_if_on(self.watch, has_host=self.is_cuda))
            stack.enter_context(self.watch_models(self._models))
            if self.gpu is None:
                stack.enter_context(self.count_random_states())
            stack.enter_context(self._phases_marked())
            with self.reasons_named():
                first = self._recorded()
                recording = self._recorded()
            self.recording = recording
            self._is_recorded = True
            workspace_bytes = 0
            if self.gpu is not None:
                workspace_bytes = count_pieces(
                    first, recording, warmup_steps=1, empties_cache=False
                )
            self.run_alternatives(recording, again=self._recorded, state=self._state)
            config = TrainingConfig(
                precision="bf16-mixed" if double.has_16_bit or device.uses_16_bit else "fp32",
                compile="none" if self.programs.plan is None else "block",
            )
            error = error_of(
                config,
                device="cpu" if self.gpu is None else "cuda",
                estimated_bytes=self.estimated_bytes,
            )
            notes = self.notes(
                error,
                is_measured=False,
                compiled=config.compile != "none",
                autocast=device.uses_autocast,
                torch_version=None,
            )
            step = FakeStep(
                device="cpu" if self.gpu is None else "cuda",
                recording=recording,
                error=error,
                workspace_bytes=workspace_bytes,
                parameters=sum(p.numel() for p in self._trained()),
                plan=self.programs.plan,
                notes=(*self._notes, *notes),
                unequal_bytes=tuple(self.unequal_bytes),
            )
            return step.prediction(config)

    # -- the double --------------------------------------------------------------------------------

    def _make_double(self) -> None:
        training, change, double = self._training, self._change, self._double
        model = double.copy(training.model)
        self._models = named_models(model)
        blocks = blocks_to_recompute(self._models.values())
        optimizer = self._copied_optimizer()
        self._optimizers = optimizers_in(optimizer)
        batch = double.copy(training.batch, rows=change.rows)
        self._batch = double.made
        step = double.copy(training.step)
        double.copy_named(self._models.values())
        self._models |= double.models
        # Last, so that nothing of it is copied.
        for block in blocks[: change.recomputed]:
            recompute(block)
        if self._change_blocks is not None:
            self._change_blocks(self, blocks)
        if step is not None:
            self._call = _bound(step, model=model, batch=batch, optimizer=optimizer)
            self._note_modes()
        else:
            if not model.training:
                model.train()
                self._notes.append(
                    "the model is in evaluation mode, and predicted as in training, after train()"
                )
            self._call = lambda: _plain_step(model, batch, optimizer)

    def _note_modes(self) -> None:
        updated = {p for one in self._optimizers for g in one.param_groups for p in g["params"]}
        for name, model in self._models.items():
            if not model.training and any(p in updated for p in model.parameters()):
                self._notes.append(
                    f"{name or 'the model'} is in evaluation mode, and predicted so: call train() "
                    "before, where the training does"
                )

    def _copied_optimizer(self) -> Any:
        training, change, double = self._training, self._change, self._double
        given = training.optimizer
        if change.optimizer is not None:
            made = self._new_optimizer(change.optimizer)
            if not isinstance(given, str | type):
                double.replace(given, made)
            return made
        if isinstance(given, str):
            return self._new_optimizer(cast("Optimizer", given))
        if isinstance(given, type):
            return given(self._trained())
        return double.copy(given)

    def _new_optimizer(self, name: Optimizer) -> torch.optim.Optimizer:
        """Returns an optimizer of that name, which updates as torch does by default."""
        is_batched = self.is_cuda and OPTIMIZERS[name].has_fusion("foreach")
        return make_optimizer(
            self._parameters_for(name),
            name,
            fusion="foreach" if is_batched else "none",
            learning_rate=_LEARNING_RATE,
        )

    def _parameters_for(self, name: Optimizer) -> Parameters:
        of_matrices = OPTIMIZERS[name].of_matrices
        if not of_matrices:
            return self._trained()
        models = self._models.values()
        return [group for model in models for group in matrices_apart(model, of_matrices)]

    def _trained(self) -> list[nn.Parameter]:
        models = self._models.values()
        parameters = [p for model in models for p in model.parameters() if p.requires_grad]
        return list(dict.fromkeys(parameters))

    # -- its steps ---------------------------------------------------------------------------------

    def _recorded(self) -> Recording:
        """Makes the calls of a step and returns what they allocate."""
        gc.collect()
        with self.watch.recording(lambda: self._resident(), continues=True) as recording:
            if self._calls:
                for _ in range(self._calls):
                    self._make_call()
            else:
                self._make_first_calls()
        return recording

    def _make_first_calls(self) -> None:
        while self._calls < _MOST_CALLS:
            self._calls += 1
            self._make_call()
            if self._stepped >= {id(one) for one in self._optimizers}:
                return
        self._calls = 1
        self._notes.append(
            f"an optimizer made no step in {_MOST_CALLS} calls, and is predicted without its state"
        )

    def _make_call(self) -> None:
        self._phases.begin("forward")
        result = self._call()
        if _is_loss(result) and not self._phases.had_backward:
            # A function that returns the loss and leaves the rest to its caller.
            result.backward()
            for optimizer in self._optimizers:
                optimizer.step()
                optimizer.zero_grad()
            result = result.detach()
        self._phases.end()
        self._result = result

    @contextmanager
    def _phases_marked(self) -> Iterator[None]:
        phases = self._phases = _Phases(self.watch)
        backward = torch.autograd.backward

        def marked_backward(*args: Any, **kwargs: Any) -> None:
            before = phases.name
            phases.begin("backward")
            backward(*args, **kwargs)
            phases.begin(before)

        def begin_step(optimizer: Any, *_: Any) -> None:
            if not any(
                isinstance(p, FakeTensor) for g in optimizer.param_groups for p in g["params"]
            ):
                raise _not_the_copy(type(optimizer).__name__)
            self._stepped.add(id(optimizer))
            if phases.name == "forward":  # one that steps in the backward pass stays there
                phases.begin("step")

        def end_step(*_: Any) -> None:
            if phases.name == "step":
                phases.begin("forward")

        with (
            patch.object(torch.autograd, "backward", marked_backward),
            register_optimizer_step_pre_hook(begin_step),
            register_optimizer_step_post_hook(end_step),
        ):
            yield

    # -- what is there between two steps -----------------------------------------------------------

    def _resident(self) -> Iterator[tuple[Category, str, Tensor]]:
        """Yields category, name and tensor of everything that is on the device between two steps.

        An optimizer's count of its steps is a scalar that a GPU has only for a fused update.
        """
        for name, model in self._models.items():
            for path, module, _ in modules_of(model, name):
                for own, parameter in module.named_parameters(recurse=False):
                    for part in tensors_behind(parameter):
                        yield "parameters", f"{path}.{own}", part
                    if parameter.grad is not None:
                        yield "gradients", f"{path}.{own}", parameter.grad
                for own, tensor in held_tensors(module):
                    yield "buffers", f"{path}.{own}", tensor
        for tensor in self._state():
            if not (self.is_cuda and tensor.dim() == 0):
                yield "optimizer_state", "optimizer state", tensor
        for tensor in self._batch:
            yield "inputs", "batch", tensor

    def _state(self) -> Iterator[Tensor]:
        for optimizer in self._optimizers:
            for leaf in tree_leaves(list(optimizer.state.values())):
                if isinstance(leaf, Tensor):
                    yield from tensors_behind(leaf)


class _Phases:
    """Tells the watch which part of a step runs."""

    def __init__(self, watch: StorageWatch) -> None:
        self._watch = watch
        self._open: AbstractContextManager[None] | None = None
        self.name = ""
        self.had_backward = False
        """Whether the backward pass has run in this call."""

    def begin(self, name: str) -> None:
        if self.name == "":
            self.had_backward = False
        self._close()
        self.name = name
        self.had_backward |= name == "backward"
        self._open = self._watch.phase(name)
        self._open.__enter__()

    def end(self) -> None:
        self._close()
        self.name = ""

    def _close(self) -> None:
        if self._open is not None:
            self._open.__exit__(None, None, None)
            self._open = None


@contextmanager
def _gradients_kept(models: Iterable[nn.Module]) -> Iterator[None]:
    """Puts gradients back and raises PredictionImpossible where not the copies have run."""
    before = [(parameter, parameter.grad) for model in models for parameter in model.parameters()]
    changed = []
    try:
        yield
    finally:
        for parameter, gradient in before:
            if parameter.grad is not gradient:
                parameter.grad = gradient
                changed.append(parameter)
    if changed:
        raise _not_the_copy("model")


def _not_the_copy(what: str) -> PredictionImpossible:
    return PredictionImpossible(
        f"the step reaches the {what} by a way on which no copy of it can stand in",
        hint="let step take model, batch and optimizer as its parameters, and use only these",
    )


@contextmanager
def _others_ignored_by_gc() -> Iterator[None]:
    """Makes a garbage collection look only at what is made inside, which takes a tenth as long."""
    is_first = gc.get_freeze_count() == 0
    if is_first:
        gc.freeze()
    try:
        yield
    finally:
        if is_first:
            gc.unfreeze()


@contextmanager
def _updates_as_on_a_gpu() -> Iterator[None]:
    """Makes torch's optimizers update all parameters in batches, where nothing else was said.

    That is their default on a GPU. Source: _default_to_fused_or_foreach in torch/optim/optimizer.py
    """

    def default(
        _parameters: Any, differentiable: bool, use_fused: bool = False
    ) -> tuple[bool, bool]:
        return (False, False) if differentiable else (use_fused, not use_fused)

    name = "_default_to_fused_or_foreach"
    with ExitStack() as stack:
        for path, module in list(sys.modules.items()):
            if path.startswith("torch.optim.") and hasattr(module, name):
                stack.enter_context(patch.object(module, name, default))
        yield


# -- the user's function ---------------------------------------------------------------------------


def _bound(step: Callable[..., Any], **values: Any) -> Callable[[], Any]:
    """Returns a call of a user's function with what it takes: by name, else by position."""
    try:
        parameters = list(inspect.signature(step).parameters.values())
    except ValueError:  # of a function in C
        return lambda: step(*values.values())
    by_name = {
        parameter.name: values[name]
        for parameter in parameters
        for name in _OF_STEP
        if parameter.name in (name, f"{name}s")
    }
    by_name |= {
        one.name: _OF_LIGHTNING[one.name] for one in parameters if one.name in _OF_LIGHTNING
    }
    needed = [
        one for one in parameters if one.default is one.empty and one.kind is not one.VAR_KEYWORD
    ]
    if any(one.kind is one.VAR_POSITIONAL for one in needed):
        return lambda: step(*values.values())
    if all(one.name in by_name for one in needed):
        return lambda: step(**by_name)
    by_position = [values["batch"]] if len(needed) == 1 else list(values.values())[: len(needed)]
    if len(needed) > len(_OF_STEP):
        raise InvalidInput(
            f"step takes {len(needed)} parameters: {', '.join(one.name for one in needed)}",
            hint="it gets model, batch and optimizer; use functools.partial or a lambda for others",
        )
    return lambda: step(*by_position)


def _plain_step(model: nn.Module, batch: Any, optimizer: Any) -> None:
    optimizer.zero_grad()
    loss = _loss_of(model, batch)  # the other outputs are not kept
    loss.backward()
    optimizer.step()


def _loss_of(model: nn.Module, batch: Any) -> Tensor:
    """Returns the loss that the model gives. Raises InvalidInput where it gives none."""
    if isinstance(batch, Mapping):
        output = model(**batch)
    elif isinstance(batch, list | tuple):
        output = model(*batch)
    else:
        output = model(batch)
    candidates = [output, getattr(output, "loss", None)]
    if isinstance(output, Mapping):
        candidates.append(output.get("loss"))
    if isinstance(output, list | tuple):
        scalars = [one for one in output if _is_loss(one)]
        candidates += scalars if len(scalars) == 1 else []
    for candidate in candidates:
        if _is_loss(candidate):
            return cast("Tensor", candidate)
    raise InvalidInput(
        f"{type(model).__name__} gives {_described(output)} and no loss",
        hint="give step=..., a function of model, batch and optimizer that makes one training "
        "step, or returns the loss; models of transformers compute it from labels in the batch",
    )


def _is_loss(value: Any) -> bool:
    return isinstance(value, Tensor) and value.numel() == 1 and value.requires_grad


def _described(output: Any) -> str:
    if isinstance(output, Tensor):
        return f"a tensor of shape {list(output.shape)}"
    return f"a {type(output).__name__}"


# -- errors ----------------------------------------------------------------------------------------


def _in_words(error: Exception | SystemExit) -> AutotuneError:
    """Translates an error of the step into a sentence with the line of the user's program."""
    line = _line_of(error)
    for cause in causes_of(error):
        if isinstance(cause, DataDependentOutputException | DynamicOutputShapeException):
            return PredictionImpossible(
                f"the step cannot be predicted: what follows {cause.func}{line} depends on values, "
                "not only on shapes",
                hint="compute it with shapes that do not depend on values, or leave it out of step",
            )
        if isinstance(cause, UnsupportedOperatorException):
            return PredictionImpossible(
                f"the step cannot be predicted: fake tensors do not support {cause.func}{line}",
                hint="leave it out of step, if the peak is elsewhere",
            )
    return PredictionImpossible(
        f"the step fails{line}: {class_and_first_line_of(error)}",
        hint="run one step of the training; if that works, leave out of step what does not work on "
        "tensors without values",
    )


def _line_of(error: BaseException) -> str:
    """Returns `, at line 12 of train.py`: the innermost line of the user's, or of a library."""
    frames = [
        one for one in traceback.extract_tb(error.__traceback__) if is_of_program(one.filename)
    ]
    own = [one for one in frames if "site-packages" not in one.filename]
    for frame in reversed(own or frames):
        return f", at {line_in_words(frame.filename, frame.lineno or 0)}"
    return ""
