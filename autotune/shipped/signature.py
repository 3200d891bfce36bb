"""Find out how to call a user's module, and what it returns, by one forward pass.

If the module is on the meta device, the pass computes shapes only. It also shows which linear layer
is the head, that is, the one whose output is the logits, and whether the blocks are called one
after the other with the same arguments.
"""

import inspect
import itertools
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from autotune.shipped.blocks import BlockList, find_blocks
from autotune.shipped.labels import IGNORED_LABEL

_BATCH = 2
_LABEL_NAMES = ("labels", "targets", "target")


class UnusableModule(Exception):
    """A module that cannot be called with tokens, or that returns neither logits nor a loss."""

    def __init__(self, message: str, *, hint: str) -> None:
        super().__init__(message)
        self.hint = hint


@dataclass(frozen=True, kw_only=True)
class Expectation:
    """The tokens that a module must take."""

    name: str
    """What messages call the module."""
    vocab_size: int
    sequence_length: int


@dataclass(frozen=True, kw_only=True)
class Usage:
    """How to call a module, and which entries of its output are logits and loss.

    `entry_of` gets an entry from the output.
    """

    takes_labels: bool
    label_name: str | None
    """Keyword of the labels; None: they are the second positional argument."""
    logits_entry: Any
    """None: the output has no logits for every position."""
    loss_entry: Any
    """None: the loss is computed from the logits."""
    ignored_label: int
    """The label that the loss of the module ignores."""
    head_name: str | None
    """Path of the linear layer that is the head; None if the loss cannot be computed from it."""
    blocks: BlockList | None
    blocks_are_called_alike: bool
    sequence_length: int
    largest_token: int

    def call(self, network: nn.Module, tokens: Tensor, labels: Tensor | None) -> Any:
        """Return the output of the module for tokens and labels [batch, sequence]."""
        if not self.takes_labels:
            return network(tokens)
        if self.label_name is None:
            return network(tokens, labels)
        return network(tokens, **{self.label_name: labels})


def entry_of(output: Any, entry: Any) -> Any:
    """Return an entry of a module's output by index, key or attribute."""
    if isinstance(output, Tensor):
        return output
    if isinstance(output, tuple | list | Mapping):
        return output[entry]
    return getattr(output, entry)


def probe_signature(network: nn.Module, expected: Expectation) -> Usage:
    """Return how to use the module, from the first way of calling it that gives logits or a loss.

    Raises UnusableModule if there is none, or if every call fails.
    """
    errors: list[Exception] = []
    for label_name in _ways_to_call(network):
        try:
            usage = _observe(
                network,
                expected,
                takes_labels=label_name is not False,
                label_name=label_name or None,
            )
        except Exception as error:
            errors.append(error)
            continue
        if usage is not None:
            return usage
    if errors:
        raise _not_callable(expected, errors[-1])
    raise UnusableModule(
        f"the forward pass of {expected.name} returns neither logits "
        "[batch, sequence, vocabulary] nor a scalar loss",
        hint="let forward(tokens) return logits, or forward(tokens, labels) the mean loss",
    )


def _not_callable(expected: Expectation, error: Exception) -> Exception:
    if isinstance(error, UnusableModule):
        return error
    lines = str(error).strip().splitlines()
    reason = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    shape = [_BATCH, expected.sequence_length]
    return UnusableModule(
        f"the forward pass of {expected.name} fails with tokens {shape}: {reason}",
        hint="forward takes tokens, or tokens and labels; --seq-len sets their length",
    )


def _ways_to_call(network: nn.Module) -> Iterator[Any]:
    """Yield the ways that fit the signature of `forward`.

    False: without labels; a name: labels as this keyword; "": labels as the second argument.
    """
    signature = inspect.signature(network.forward)
    keywords = [name for name in _LABEL_NAMES if name in signature.parameters]
    ways: list[tuple[Any, tuple[int, ...], dict[str, int]]] = [(False, (0,), {})]
    ways += [(name, (0,), {name: 0}) for name in keywords]
    ways.append(("", (0, 0), {}))
    for way, arguments, keyword_arguments in ways:
        try:
            signature.bind(*arguments, **keyword_arguments)
        except TypeError:
            continue
        yield way


def _observe(
    network: nn.Module, expected: Expectation, *, takes_labels: bool, label_name: str | None
) -> Usage | None:
    """Call the module once; None if its output has neither logits nor, with labels, a loss."""
    device = next((parameter.device for parameter in network.parameters()), torch.device("cpu"))
    tokens = torch.zeros(_BATCH, expected.sequence_length, dtype=torch.int64, device=device)
    labels = torch.zeros_like(tokens)
    blocks = find_blocks(network)
    with _Witness(network, blocks).watching() as seen:
        if not takes_labels:
            output = network(tokens)
        elif label_name:
            output = network(tokens, **{label_name: labels})
        else:
            output = network(tokens, labels)
    entries = _entries(output)
    loss_entry = None
    logits_entry = _named_first(
        entries, "logits", lambda tensor: tensor.dim() == 3 and tensor.shape[:2] == tokens.shape
    )
    if takes_labels:
        loss_entry = _named_first(entries, "loss", lambda tensor: tensor.dim() == 0)
        if loss_entry is None:
            return None
    elif logits_entry is None:
        return None
    logits = None if logits_entry is None else entries[logits_entry]
    if logits is not None and logits.shape[2] < expected.vocab_size:
        raise UnusableModule(
            f"the logits of {expected.name} are {logits.shape[2]} wide, "
            f"the vocabulary has {expected.vocab_size}",
            hint="let the function take vocab_size, or make its vocabulary that large",
        )
    loss = None if loss_entry is None else entries[loss_entry]
    plain = loss is None or seen.is_plain_cross_entropy(loss, logits, labels)
    return Usage(
        takes_labels=takes_labels,
        label_name=label_name,
        logits_entry=logits_entry,
        loss_entry=loss_entry,
        ignored_label=seen.ignored_label(loss),
        head_name=seen.head_name(logits) if plain else None,
        blocks=blocks if seen.blocks_were_called else None,
        blocks_are_called_alike=seen.blocks_were_called_alike,
        sequence_length=expected.sequence_length,
        largest_token=expected.vocab_size - 1,
    )


def _entries(output: Any) -> dict[Any, Tensor]:
    """Return the floating-point tensors in an output, by index, key or attribute."""
    if isinstance(output, Tensor):
        return {0: output}
    if isinstance(output, tuple | list):
        pairs = dict(enumerate(output))
    elif isinstance(output, Mapping):
        pairs = dict(output)
    else:
        pairs = dict(getattr(output, "__dict__", {}))
    return {
        name: value
        for name, value in pairs.items()
        if isinstance(value, Tensor) and value.is_floating_point()
    }


def _named_first(entries: Mapping[Any, Tensor], name: str, is_wanted: Any) -> Any:
    """Return the wanted entry of that name, else the first wanted entry, else None."""
    wanted = [entry for entry, tensor in entries.items() if is_wanted(tensor)]
    if name in wanted:
        return name
    return wanted[0] if wanted else None


@dataclass(kw_only=True)
class _Call:
    first: Any
    others: tuple[Any, ...]
    output: Any = None


@dataclass(frozen=True, kw_only=True)
class _CrossEntropy:
    logits: Tensor
    labels: Tensor
    loss: Tensor
    options: Mapping[str, Any]


@dataclass
class _Witness:
    """Records the calls of blocks, linear layers and cross entropy in a forward pass."""

    network: nn.Module
    block_list: BlockList | None
    linear_outputs: dict[str, Tensor] = field(default_factory=dict)
    block_calls: list[tuple[nn.Module, _Call]] = field(default_factory=list)
    cross_entropies: list[_CrossEntropy] = field(default_factory=list)

    @contextmanager
    def watching(self) -> Iterator["_Witness"]:
        with ExitStack() as stack, torch.no_grad():
            for name, module in self.network.named_modules():
                if type(module) is nn.Linear:
                    handle = module.register_forward_hook(
                        lambda _module, _inputs, output, name=name: self.linear_outputs.update(
                            {name: output}
                        )
                    )
                    stack.callback(handle.remove)
            for block in self.block_list.blocks if self.block_list else ():
                stack.callback(
                    block.register_forward_pre_hook(self._enter, with_kwargs=True).remove
                )
                stack.callback(block.register_forward_hook(self._leave).remove)
            stack.enter_context(_CrossEntropies(self.cross_entropies))
            yield self

    def _enter(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        others = (*args[1:], *kwargs, *kwargs.values())
        self.block_calls.append((block, _Call(first=args[0] if args else None, others=others)))

    def _leave(self, _block: nn.Module, _args: Any, output: Any) -> None:
        self.block_calls[-1][1].output = output[0] if isinstance(output, tuple) else output

    @property
    def blocks_were_called(self) -> bool:
        blocks = list(self.block_list.blocks) if self.block_list else []
        return bool(blocks) and [block for block, _ in self.block_calls] == blocks

    @property
    def blocks_were_called_alike(self) -> bool:
        """Whether each block got the output of the previous one and the same other arguments."""
        calls = [call for _, call in self.block_calls]
        for previous, call in itertools.pairwise(calls):
            if previous.output is not call.first or len(previous.others) != len(call.others):
                return False
            pairs = zip(previous.others, call.others, strict=True)
            if not all(before is after for before, after in pairs):
                return False
        return True

    def head_name(self, logits: Tensor | None) -> str | None:
        """Return the path of the linear layer that computed the logits, or None."""
        for name, output in self.linear_outputs.items():
            if output is logits:
                return name
        return None

    def _call_of(self, loss: Tensor | None) -> _CrossEntropy | None:
        for call in self.cross_entropies:
            if call.loss is loss:
                return call
        return None

    def ignored_label(self, loss: Tensor | None) -> int:
        """Return the `ignore_index` of the cross entropy that computed `loss`, or the default."""
        call = self._call_of(loss)
        return IGNORED_LABEL if call is None else int(call.options["ignore_index"])

    def is_plain_cross_entropy(self, loss: Tensor, logits: Tensor | None, labels: Tensor) -> bool:
        """Whether `loss` is the plain mean cross entropy of these logits and labels."""
        call = self._call_of(loss)
        if call is None or logits is None:
            return False
        if call.options["weight"] is not None or call.options["label_smoothing"] != 0.0:
            return False
        return _is_all_of(call.logits, logits) and _is_all_of(call.labels, labels)


def _is_all_of(view: Tensor, tensor: Tensor) -> bool:
    """Whether `view` is `tensor` or a view of all of it."""
    if view.numel() != tensor.numel():
        return False
    if view is tensor or view._base is tensor:
        return True
    return view._base is not None and view._base is tensor._base


class _CrossEntropies(TorchFunctionMode):
    """Records the calls of F.cross_entropy that return a mean."""

    def __init__(self, calls: list[_CrossEntropy]) -> None:
        super().__init__()
        self._calls = calls

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if func is F.cross_entropy:
            bound = inspect.signature(F.cross_entropy).bind(*args, **(kwargs or {}))
            bound.apply_defaults()
            options = dict(bound.arguments)
            if options["reduction"] == "mean":
                logits, labels = options.pop("input"), options.pop("target")
                self._calls.append(
                    _CrossEntropy(logits=logits, labels=labels, loss=output, options=options)
                )
        return output
