"""Build a user's model from `file.py:function` or `package.module:function`.

The function returns a `torch.nn.Module`. It is called with those of layers, width, heads,
vocab_size and sequence_length that it takes, and with feed_forward_width if that is set. The module
may be called in two ways. `autotune/shipped/signature.py` finds out which of them work:

    forward(tokens)          -> logits [batch, sequence, vocabulary]
    forward(tokens, labels)  -> mean loss, a scalar; labels[i] is the token after tokens[i]

A loss that is not the cross entropy of the logits is trained (`autotune/shipped/own_loss.py`).
Results may also be entries of a tuple, a mapping or an object. The user's code runs only in the
process of a trial.
"""

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from autotune.errors import InvalidInput, class_and_first_line_of
from autotune.models.parts import ONLY_LOSS, OWN_LOSS, ModelParts
from autotune.shipped.labels import IGNORED_LABEL
from autotune.shipped.seeds import seed_generators
from autotune.shipped.signature import Expectation, UnusableModule
from autotune.shipped.user_model import UserModel, user_model
from autotune.spec.file_watch import FileWatch, watch_files
from autotune.spec.script_files import check_files_of_trial
from autotune.spec.user_code import (
    FunctionReference,
    changed_since,
    read_python,
    read_reference,
    sha256_of,
)
from autotune.spec.workload import Workload

_SIZES = ("layers", "width", "heads", "feed_forward_width", "vocab_size", "sequence_length")


def build(workload: Workload) -> UserModel:
    """Returns the module that the function makes, on torch's default device.

    If that is the meta device, a module whose `__init__` or forward pass needs values is made on
    the CPU instead. Raises InvalidInput if the function fails or its module cannot be used, and
    StudyMismatch if it reads other files than those of the workload.
    """
    watch = watch_files(workload)
    try:
        with watch.opened_files():
            model = _built(workload, watch)
    except InvalidInput:  # it may fail because of an edit
        check_files_of_trial(workload, watch.found(), has_read_all=False)
        raise
    check_files_of_trial(workload, watch.found_until_apply())
    return model


def _built(workload: Workload, watch: FileWatch) -> UserModel:
    reference = read_reference(workload.model)
    function = _load(reference, watch, expected_sha256=workload.model_sha256)
    sizes = {name: getattr(workload, name) for name in _SIZES}
    sizes = {name: size for name, size in sizes.items() if size is not None}
    if torch.get_default_device().type == "meta":
        try:
            network = _make(function, reference, sizes)
            if not any(tensor.is_meta for tensor in _plain_tensors(network)):
                return _wrapped(
                    network, workload, make_real=partial(_make, function, reference, sizes)
                )
        except Exception:  # user code that needs values may raise anything
            pass
    with torch.device("cpu"):
        network = _make(function, reference, sizes)
        return _wrapped(network, workload)


def _wrapped(
    network: nn.Module, workload: Workload, *, make_real: Callable[[], nn.Module] | None = None
) -> UserModel:
    expected = Expectation(
        name=workload.model,
        vocab_size=workload.vocab_size,
        sequence_length=workload.sequence_length,
    )
    try:
        return user_model(network, expected, make_real=make_real)
    except UnusableModule as error:
        raise InvalidInput(str(error), hint=error.hint) from error.__cause__


def _plain_tensors(network: nn.Module) -> Iterator[Tensor]:
    """Yield the tensors in plain attributes, whose values are not in a file of weights."""
    for module in network.modules():
        yield from (value for value in vars(module).values() if isinstance(value, Tensor))


def _make(
    function: Callable[..., Any], reference: FunctionReference, sizes: Mapping[str, int]
) -> nn.Module:
    name = f"{reference.place}:{reference.function}"
    parameters = inspect.signature(function).parameters
    arguments = dict(sizes)
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        arguments = {size: value for size, value in sizes.items() if size in parameters}
    try:
        network = function(**arguments)
    except InvalidInput:
        raise
    except Exception as error:
        raise InvalidInput(
            f"{name} failed to make its model: {class_and_first_line_of(error)}",
            hint="correct the function",
        ) from error
    if not isinstance(network, nn.Module):
        raise InvalidInput(
            f"{name} returns {type(network).__name__}, not a torch.nn.Module",
            hint="let it return the model",
        )
    return network


# -- loading the code ------------------------------------------------------------------------------


def code_sha256(workload: Workload) -> str:
    """Returns the SHA-256 of the Python file of the workload's function. Raises InvalidInput."""
    with watch_files(workload).opened_files():  # what is imported is not read again to build it
        return sha256_of(_file_of(_module_of(read_reference(workload.model))))


def _load(
    reference: FunctionReference, watch: FileWatch, *, expected_sha256: str
) -> Callable[..., Any]:
    # Before the file is run, as its error may come from the edit.
    if reference.file is not None and reference.file.is_file():
        _check_unchanged(reference.file, expected_sha256)
    module = _module_of(reference)
    watch.leave_out(str(_file_of(module)))
    _check_unchanged(_file_of(module), expected_sha256)
    function: Callable[..., Any] | None = getattr(module, reference.function, None)
    if not callable(function):
        raise InvalidInput(
            f"{reference.place} has no function {reference.function!r}",
            hint="name a function that returns the model",
        )
    return function


def _check_unchanged(file: Path, expected_sha256: str) -> None:
    if expected_sha256 and sha256_of(file) != expected_sha256:
        raise changed_since(str(file))


def _file_of(module: ModuleType) -> Path:
    assert module.__file__ is not None
    return Path(module.__file__)


def _module_of(reference: FunctionReference) -> ModuleType:
    """Import the module of the function, once per process.

    Its imports are searched next to its file, or for a module in the current folder.
    """
    try:
        if reference.file is None:
            _add_to_path(Path.cwd())
            module = importlib.import_module(reference.place)
        else:
            module = _run_file(reference.file.absolute())
    except InvalidInput:
        raise
    except Exception as error:
        raise InvalidInput(
            f"{reference.place} cannot be imported: {class_and_first_line_of(error)}",
            hint="run from the folder that contains it",
        ) from error
    if getattr(module, "__file__", None) is None:
        raise InvalidInput(
            f"{reference.place} is a folder, not a module", hint="name the module with the function"
        )
    return module


def _run_file(file: Path) -> ModuleType:
    name = f"autotune_own_{file.stem}"
    if name in sys.modules:
        return sys.modules[name]
    read_python(file)  # gives clearer errors than an import
    _add_to_path(file.parent)
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look up their module during its import
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _add_to_path(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


# -- checks and parts ------------------------------------------------------------------------------


@torch.no_grad()
def initialize(model: nn.Module) -> None:
    """Raise InvalidInput for a model that cannot take the workload's tokens or is not causal.

    The weights stay as the function made them.
    """
    assert isinstance(model, UserModel)
    usage = model.usage
    tokens = torch.zeros(1, usage.sequence_length, dtype=torch.int64)
    tokens[0, 0] = usage.largest_token
    labels = tokens.clone()
    labels[0, -1] = IGNORED_LABEL
    was_training = model.training
    model.eval()
    model.training = True  # computes the loss of training, without dropout
    try:
        loss = model(tokens, labels)
    except Exception as error:
        raise InvalidInput(
            f"the model cannot take tokens up to {usage.largest_token} with {IGNORED_LABEL} as the "
            f"label to ignore: {class_and_first_line_of(error)}",
            hint="give it a vocabulary of that size; let it return logits, or use the ignore_index "
            "of F.cross_entropy",
        ) from error
    _check_order(model, tokens)
    model.train(was_training)
    if not torch.isfinite(loss):
        raise InvalidInput(
            f"the model's loss is {loss.item()} before any training",
            hint="look at its initial weights",
        )


def _check_order(model: UserModel, tokens: Tensor) -> None:
    """Raise InvalidInput if a token sees a later one; not checked for a model without logits."""
    usage = model.usage
    half = tokens.shape[1] // 2
    if usage.logits_call is None or half == 0:
        return
    changed = tokens.clone()
    changed[:, half:] = usage.largest_token
    compared = []
    for read in (tokens, changed):
        seed_generators(0)  # a model may draw random numbers in evaluation, too
        compared.append(usage.logits(model.network, read)[:, :half])
    before, after = compared
    if (before - after).abs().max() > 1e-3 * before.std():
        raise InvalidInput(
            "the model lets a token see later ones, so it does not learn to predict them",
            hint="make its attention causal: is_causal=True, or a triangular mask",
        )


def find_parts(model: nn.Module) -> ModelParts:
    """Find the parts by structure and by the calls in the forward pass; missing parts are None."""
    assert isinstance(model, UserModel)
    usage = model.usage
    head = None if usage.head_name is None else model.head
    loss: dict[str, Any] = {}
    if usage.own_loss is not None:
        only_loss = usage.logits_call is None
        loss["own_loss"] = ONLY_LOSS if only_loss else OWN_LOSS
        loss["evaluates_cross_entropy"] = not only_loss or usage.own_loss.is_cross_entropy
    if usage.blocks is None:
        return ModelParts(model=model, head=head, **loss)
    return ModelParts(
        model=model,
        **loss,
        blocks_owner=usage.blocks.owner,
        blocks_name=usage.blocks.name,
        attention_name=usage.blocks.attention_name,
        blocks_are_called_alike=usage.blocks_are_called_alike,
        head=head,
    )
