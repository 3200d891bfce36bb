"""People's own models: `file.py:function` or `package.module:function`, a function that returns a `torch.nn.Module`.

The function is called with those of layers, width, heads, vocab_size and sequence_length that it
takes, and with feed_forward_width where it is said. What it returns is used in one of two ways, the
first that works (`signature.py` finds it out in one forward pass):

    forward(tokens)          -> logits [batch, sequence, vocabulary]
    forward(tokens, labels)  -> mean loss, a scalar; labels[i] is the token after tokens[i]

each alone or within a tuple, a mapping or an object. Only a trial's own process runs any of it.
"""

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from autotune.errors import InvalidInput
from autotune.models.parts import IGNORED_LABEL, ModelParts, TokenLoss, next_token_loss
from autotune.models.signature import Usage, entry_of, probe_signature
from autotune.spec.user_code import (
    FunctionReference,
    changed_since,
    read_python,
    read_reference,
    sha256_of,
)
from autotune.spec.workload import Workload

_SIZES = ("layers", "width", "heads", "feed_forward_width", "vocab_size", "sequence_length")


class UserModel(nn.Module):
    """forward(tokens [batch, sequence], labels [batch, sequence]) -> sum of token losses, float32 scalar."""

    def __init__(self, network: nn.Module, usage: Usage) -> None:
        super().__init__()
        self.network = network
        self.usage = usage
        self.token_loss: TokenLoss | None = None
        """Where it is set, the loss is made of what goes into the head; else as the network makes
        it."""
        if usage.head_name is not None:
            self.head.__class__ = PassableLinear

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        if self.token_loss is not None:
            return self.token_loss(self.hidden(tokens), self.head, labels)
        if self.usage.loss_entry is None:
            return next_token_loss(self._run(tokens, None, self.usage.logits_entry), labels)
        return self._summed_loss(tokens, labels)

    @property
    def head(self) -> Any:
        assert self.usage.head_name is not None
        return self.network.get_submodule(self.usage.head_name)

    def hidden(self, tokens: Tensor) -> Tensor:
        """What goes into the head, [batch, sequence, width]."""
        # Zeros are labels whatever the width; what the network makes of them is dropped.
        labels = torch.zeros_like(tokens) if self.usage.takes_labels else None
        self.head.is_passed = True
        try:
            return self._run(tokens, labels, self.usage.logits_entry)
        finally:
            self.head.is_passed = False

    def _summed_loss(self, tokens: Tensor, labels: Tensor) -> Tensor:
        is_valid = labels != IGNORED_LABEL
        given = torch.where(is_valid, labels, self.usage.ignored_label)
        mean = self._run(tokens, given, self.usage.loss_entry).float()
        count = is_valid.sum()
        return torch.where(count > 0, mean * count, 0.0)  # a mean of nothing is no number

    def _run(self, tokens: Tensor, labels: Tensor | None, entry: Any) -> Tensor:
        found: Tensor = entry_of(self.usage.call(self.network, tokens, labels), entry)
        return found


class PassableLinear(nn.Linear):
    """A head that hands its input on while `is_passed`."""

    is_passed = False

    def forward(self, input: Tensor) -> Tensor:
        return input if self.is_passed else super().forward(input)


def build(workload: Workload) -> UserModel:
    """The module as its function makes it, on torch's default device.

    Raises InvalidInput where it is no model.

    On the meta device a module that needs values, in its `__init__` or in a forward pass, is made
    on the CPU instead.
    """
    reference = read_reference(workload.model)
    function = _load(reference, expected_sha256=workload.model_sha256)
    sizes = {name: size for name in _SIZES if (size := getattr(workload, name)) is not None}
    if torch.get_default_device().type == "meta":
        try:
            network = _make(function, reference, sizes)
            if not any(tensor.is_meta for tensor in _loose_tensors(network)):
                return _user_model(network, workload)
        except Exception:  # whatever cannot be done with shapes alone
            pass
    with torch.device("cpu"):
        network = _make(function, reference, sizes)
        return _user_model(network, workload)


@torch.no_grad()
def _user_model(network: nn.Module, workload: Workload) -> UserModel:
    """Without a head where the network cannot go on with what goes into it, as one that knows its logits' width."""
    usage = probe_signature(network, workload)
    model = UserModel(network, usage)
    if usage.head_name is not None:
        device = model.head.weight.device
        try:
            model.hidden(torch.zeros(1, workload.sequence_length, dtype=torch.int64, device=device))
        except Exception:
            model.usage = replace(usage, head_name=None)
    return model


def _loose_tensors(network: nn.Module) -> Iterator[Tensor]:
    """Tensors that are neither parameters nor buffers: no file of weights brings their values."""
    for module in network.modules():
        yield from (value for value in vars(module).values() if isinstance(value, Tensor))


def _make(
    function: Callable[..., Any], reference: FunctionReference, sizes: Mapping[str, int]
) -> nn.Module:
    name = f"{reference.place}:{reference.function}"
    taken = inspect.signature(function).parameters.values()
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in taken)
    names = {parameter.name for parameter in taken}
    try:
        made = function(
            **{size: value for size, value in sizes.items() if takes_all or size in names}
        )
    except InvalidInput:
        raise
    except Exception as error:
        raise InvalidInput(
            f"{name} cannot make its model: {_first_line(error)}", hint="mend the function"
        ) from error
    if not isinstance(made, nn.Module):
        raise InvalidInput(
            f"{name} returns {type(made).__name__}, not a torch.nn.Module",
            hint="let it return the model",
        )
    return made


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


# -- the code --------------------------------------------------------------------------------------


def code_sha256(workload: Workload) -> str:
    """SHA-256 of the Python file that holds the workload's function. Raises InvalidInput."""
    return sha256_of(_file_of(_module_of(read_reference(workload.model))))


def _load(reference: FunctionReference, *, expected_sha256: str) -> Callable[..., Any]:
    module = _module_of(reference)
    if expected_sha256 and sha256_of(_file_of(module)) != expected_sha256:
        raise changed_since(str(_file_of(module)))
    function: Callable[..., Any] | None = getattr(module, reference.function, None)
    if not callable(function):
        raise InvalidInput(
            f"{reference.place} has no function {reference.function!r}",
            hint="name a function that returns the model",
        )
    return function


def _file_of(module: ModuleType) -> Path:
    assert module.__file__ is not None
    return Path(module.__file__)


def _module_of(reference: FunctionReference) -> ModuleType:
    """Run once a process; what it imports is looked for beside it, and in the folder the search was started in."""
    try:
        if reference.file is None:
            _look_in(Path.cwd())
            module = importlib.import_module(reference.place)
        else:
            module = _run_file(reference.file.absolute())
    except InvalidInput:
        raise
    except Exception as error:
        raise InvalidInput(
            f"{reference.place} cannot be imported: {_first_line(error)}",
            hint="run from the folder it belongs to",
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
    read_python(file)  # its refusals are clearer
    _look_in(file.parent)
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up while it runs
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _look_in(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


# -- its parts -------------------------------------------------------------------------------------


@torch.no_grad()
def initialize(model: nn.Module) -> None:
    """The weights are as the function made them; this refuses a model that cannot take the workload's tokens."""
    assert isinstance(model, UserModel)
    usage = model.usage
    tokens = torch.zeros(1, usage.sequence_length, dtype=torch.int64)
    tokens[0, 0] = usage.largest_token
    labels = tokens.clone()
    labels[0, -1] = IGNORED_LABEL
    was_training = model.training
    model.eval()
    try:
        loss = model(tokens, labels)
    except Exception as error:
        raise InvalidInput(
            f"the model cannot take tokens up to {usage.largest_token} with {IGNORED_LABEL} as the label to ignore: "
            f"{_first_line(error)}",
            hint="give it a vocabulary of that size; let it return logits, or use F.cross_entropy's ignore_index",
        ) from error
    _check_order(model, tokens)
    model.train(was_training)
    if not torch.isfinite(loss):
        raise InvalidInput(
            f"the model's loss is {loss.item()} before any training",
            hint="look at its initial weights",
        )


def _check_order(model: UserModel, tokens: Tensor) -> None:
    """Raises InvalidInput where a token sees a later one; of a model that gives no logits it cannot be seen."""
    usage, half = model.usage, tokens.shape[1] // 2
    if usage.logits_entry is None or half == 0:
        return
    changed = tokens.clone()
    changed[:, half:] = usage.largest_token
    labels = torch.zeros_like(tokens) if usage.takes_labels else None
    before, after = (
        entry_of(usage.call(model.network, each, labels), usage.logits_entry)[:, :half]
        for each in (tokens, changed)
    )
    if (before - after).abs().max() > 1e-3 * before.std():
        raise InvalidInput(
            "the model lets a token see later ones, so it does not learn to predict them",
            hint="make its attention causal: is_causal=True, or a triangular mask",
        )


def find_parts(model: nn.Module) -> ModelParts:
    """By structure and by what was called in the forward pass: parts that are not there are None."""
    assert isinstance(model, UserModel)
    usage = model.usage
    head = None if usage.head_name is None else model.head
    if usage.blocks is None:
        return ModelParts(model=model, head=head)
    return ModelParts(
        model=model,
        blocks_owner=usage.blocks.owner,
        blocks_name=usage.blocks.name,
        attention_name=usage.blocks.attention_name,
        blocks_are_called_alike=usage.blocks_are_called_alike,
        head=head,
    )
