"""Find out how to call a user's module, and what it returns, by a forward pass.

If the module is on the meta device, the pass computes shapes only. It also shows which linear layer
is the head, that is, the one whose output is the logits, whether the blocks are called one after
the other with the same arguments, and whether a loss that the module returns is the cross entropy
of its logits. Where the pass cannot tell, `own_loss.py` compares the values of both.
"""

import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from autotune.shipped.blocks import BlockList, find_blocks
from autotune.shipped.labels import IGNORED_LABEL

_BATCH = 2
_LABEL_NAMES = ("labels", "targets", "target", "label", "lm_labels", "y")


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
class Call:
    """A way to call a module."""

    takes_labels: bool
    label_name: str | None = None
    """Keyword of the labels; None: they are the second positional argument."""

    def __call__(self, network: nn.Module, tokens: Tensor, labels: Tensor | None) -> Any:
        """Returns the output of the module for tokens and labels [batch, sequence]."""
        if not self.takes_labels:
            return network(tokens)
        if self.label_name is None:
            return network(tokens, labels)
        return network(tokens, **{self.label_name: labels})


LossForm = Literal["mean", "sum", "per token"]


@dataclass(frozen=True, kw_only=True)
class LossOfModule:
    """The loss that a module computes itself, where it is not the cross entropy of its logits."""

    call: Call
    entry: Any
    form: LossForm = "mean"
    """Over the labels; `per token`: a loss for each, [batch, sequence] or [batch * sequence]."""
    shifts_labels: bool = False
    """Whether label i is compared with the output at i - 1, as in transformers."""
    ignored_label: int = IGNORED_LABEL
    """The label that this loss ignores."""
    is_cross_entropy: bool = False
    """Whether it is known to be the plain cross entropy in evaluation."""

    def labels_for(self, labels: Tensor) -> Tensor:
        """Returns labels [batch, sequence] as the module takes them."""
        if self.shifts_labels:
            labels = F.pad(labels[:, :-1], (1, 0), value=IGNORED_LABEL)
        return labels.masked_fill(labels == IGNORED_LABEL, self.ignored_label)

    def sum_over(self, value: Tensor, labels: Tensor) -> Tensor:
        """Returns the module's loss as a sum over the labels that it learns, float32 scalar."""
        value = value.float()
        if self.form == "sum":
            return value
        learned = (labels[:, :-1] if self.shifts_labels else labels) != IGNORED_LABEL
        if self.form == "per token":
            return value.view_as(learned).masked_fill(~learned, 0.0).sum()
        count = learned.sum()
        return (value * count).masked_fill(count == 0, 0.0)  # the mean of no labels is NaN


@dataclass(frozen=True, kw_only=True)
class Usage:
    """How to call a module, and which entry of its output has the logits.

    `entry_of` gets an entry from the output.
    """

    logits_call: Call | None
    """None: no way to call it gives logits for every position."""
    logits_entry: Any
    own_loss: LossOfModule | None
    """What is trained; None: the loss is computed from the logits."""
    head_name: str | None
    """Path of the linear layer that is the head; None if the loss cannot be computed from it."""
    blocks: BlockList | None
    blocks_are_called_alike: bool
    sequence_length: int
    largest_token: int

    def logits(self, network: nn.Module, tokens: Tensor) -> Tensor:
        """Returns the logits, [batch, sequence, vocabulary]."""
        assert self.logits_call is not None
        # Zeros are valid labels for any vocabulary; the loss they give is not used.
        labels = torch.zeros_like(tokens) if self.logits_call.takes_labels else None
        logits: Tensor = entry_of(self.logits_call(network, tokens, labels), self.logits_entry)
        return logits


def entry_of(output: Any, entry: Any) -> Any:
    """Returns an entry of a module's output by index, key or attribute."""
    if isinstance(output, Tensor):
        return output
    if isinstance(output, tuple | list | Mapping):
        return output[entry]
    return getattr(output, entry)


CompareLosses = Callable[["Observation", "Observation | None"], "LossOfModule | None"]
"""Of the call that gives a loss and the one that gives logits without labels, if there is one:
returns the loss of the module; None if it is the cross entropy of the logits."""


def probe_signature(
    network: nn.Module, expected: Expectation, *, compare_losses: CompareLosses
) -> Usage:
    """Returns how to use the module.

    `compare_losses` decides which loss is trained where the module gives one. Raises UnusableModule
    if no call gives logits or a loss, or if every call fails.
    """
    errors: list[Exception] = []

    def observed(calls: Iterator[Call]) -> "Observation | None":
        for call in calls:
            try:
                found = observe(network, expected, call)
            except Exception as error:
                errors.append(error)
                continue
            if found.is_usable:
                return found
        return None

    plain = observed(call for call in _ways_to_call(network) if not call.takes_labels)
    with_labels = observed(
        call
        for call in _ways_to_call(network)
        # A second argument of another name may be anything, such as a mask.
        if call.takes_labels and (plain is None or call.label_name is not None)
    )
    if plain is None and with_labels is None:
        if errors:
            raise _not_callable(expected, errors[-1])
        raise UnusableModule(
            f"the forward pass of {expected.name} returns neither logits "
            "[batch, sequence, vocabulary] nor a loss",
            hint="let forward(tokens) return logits, or forward(tokens, labels) the mean loss",
        )
    own_loss = None if with_labels is None else compare_losses(with_labels, plain)
    gives_logits = [
        found for found in (plain, with_labels) if found is not None and found.logits is not None
    ]
    logits_of = gives_logits[0] if gives_logits else None
    trained = with_labels if own_loss is not None else logits_of
    assert trained is not None
    return Usage(
        logits_call=None if logits_of is None else logits_of.call,
        logits_entry=None if logits_of is None else logits_of.logits_entry,
        own_loss=own_loss,
        head_name=trained.head_name if own_loss is None else None,
        blocks=trained.blocks,
        blocks_are_called_alike=trained.blocks_are_called_alike,
        sequence_length=expected.sequence_length,
        largest_token=expected.vocab_size - 1,
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


def _ways_to_call(network: nn.Module) -> Iterator[Call]:
    """Yield the ways that fit the signature of `forward`, by name before by position."""
    signature = inspect.signature(network.forward)
    names = [name for name in _LABEL_NAMES if name in signature.parameters]
    ways: list[tuple[Call, tuple[int, ...], dict[str, int]]] = [
        (Call(takes_labels=False), (0,), {}),
        *((Call(takes_labels=True, label_name=name), (0,), {name: 0}) for name in names),
        (Call(takes_labels=True), (0, 0), {}),
    ]
    for call, arguments, keyword_arguments in ways:
        try:
            signature.bind(*arguments, **keyword_arguments)
        except TypeError:
            continue
        yield call


@dataclass(frozen=True, kw_only=True)
class Observation:
    """What one call of a module gave, on tokens and labels of zeros."""

    call: Call
    tokens: Tensor
    labels: Tensor
    logits_entry: Any
    logits: Tensor | None
    loss_entry: Any
    loss: Tensor | None
    """Of a call with labels: a scalar, or the losses of the tokens."""
    head_name: str | None
    blocks: BlockList | None
    blocks_are_called_alike: bool
    cross_entropies: "tuple[CrossEntropy, ...]"
    """The calls of F.cross_entropy."""

    @property
    def cross_entropy(self) -> "CrossEntropy | None":
        """The call whose output is the loss, to which nothing was added in place."""
        return next((call for call in self.cross_entropies if call.gives(self.loss)), None)

    @property
    def is_usable(self) -> bool:
        return (self.loss if self.call.takes_labels else self.logits) is not None


def observe(network: nn.Module, expected: Expectation, call: Call) -> Observation:
    """Call the module once. Raises UnusableModule for logits that are too narrow."""
    device = next((parameter.device for parameter in network.parameters()), torch.device("cpu"))
    tokens = torch.zeros(_BATCH, expected.sequence_length, dtype=torch.int64, device=device)
    labels = torch.zeros_like(tokens)
    blocks = find_blocks(network)
    with _Witness(network, blocks, labels).watching() as seen:
        entries = _entries(call(network, tokens, labels))
    logits_entry = _named_first(
        entries, "logits", lambda tensor: tensor.dim() == 3 and tensor.shape[:2] == tokens.shape
    )
    loss_entry = None
    if call.takes_labels:
        loss_entry = _named_first(entries, "loss", lambda tensor: tensor.dim() == 0)
        if loss_entry is None:
            per_token = (tokens.shape, (tokens.numel(),))
            loss_entry = _named_first(entries, "loss", lambda tensor: tensor.shape in per_token)
    logits = None if logits_entry is None else entries[logits_entry]
    if logits is not None and logits.shape[2] < expected.vocab_size:
        raise UnusableModule(
            f"the logits of {expected.name} are {logits.shape[2]} wide, "
            f"the vocabulary has {expected.vocab_size}",
            hint="let the function take vocab_size, or make its vocabulary that large",
        )
    loss = None if loss_entry is None else entries[loss_entry]
    return Observation(
        call=call,
        tokens=tokens,
        labels=labels,
        logits_entry=logits_entry,
        logits=logits,
        loss_entry=loss_entry,
        loss=loss,
        head_name=seen.head_name(logits),
        blocks=blocks if seen.blocks_were_called else None,
        blocks_are_called_alike=seen.blocks_were_called_alike,
        cross_entropies=tuple(seen.cross_entropies),
    )


def _entries(output: Any) -> dict[Any, Tensor]:
    """Returns the floating-point tensors in an output, by index, key or attribute."""
    if isinstance(output, Tensor):
        return {0: output}
    pairs: dict[Any, Any]
    if isinstance(output, tuple | list):
        pairs = dict(enumerate(output))
    elif isinstance(output, Mapping):
        pairs = dict(output)
    else:
        pairs = attributes_of(output)
    return {
        name: value
        for name, value in pairs.items()
        if isinstance(value, Tensor) and value.is_floating_point()
    }


def attributes_of(value: Any) -> dict[str, Any]:
    """Returns what an object has in `__dict__` and in the `__slots__` of its classes."""
    names = list(getattr(value, "__dict__", ()))
    for kind in type(value).__mro__:
        slots = vars(kind).get("__slots__", ())
        names += [slots] if isinstance(slots, str) else slots
    names = [name for name in names if name not in ("__dict__", "__weakref__")]
    return {name: getattr(value, name) for name in names if hasattr(value, name)}


def _named_first(entries: Mapping[Any, Tensor], name: str, is_wanted: Any) -> Any:
    """Returns the wanted entry of that name, else the first that is trained, else the first."""
    wanted = [entry for entry, tensor in entries.items() if is_wanted(tensor)]
    if name in wanted:
        return name
    trained = [entry for entry in wanted if entries[entry].requires_grad]
    return next(iter([*trained, *wanted]), None)


@dataclass(kw_only=True)
class _Call:
    first: Any
    others: tuple[Any, ...]
    output: Any = None


@dataclass(frozen=True, kw_only=True)
class CrossEntropy:
    """A call of F.cross_entropy in the forward pass."""

    logits: Tensor
    labels: Tensor
    loss: Tensor
    options: Mapping[str, Any]
    labels_are_shifted: bool | None
    """Whether the module has left out the first label of each sequence; None: the labels are not
    made of those that it was given."""

    @property
    def is_plain(self) -> bool:
        """Whether nothing but the cross entropy is in it: no weights of classes, no smoothing."""
        return (
            self.options["weight"] is None
            and self.options["label_smoothing"] == 0.0
            and self.options["size_average"] is None
            and self.options["reduce"] is None
        )

    @property
    def form(self) -> LossForm:
        forms: Mapping[str, LossForm] = {"sum": "sum", "none": "per token"}
        return forms.get(self.options["reduction"], "mean")

    @property
    def ignored_label(self) -> int:
        return int(self.options["ignore_index"])

    def gives(self, loss: Tensor | None) -> bool:
        """Whether `loss` is its output, to which nothing was added in place."""
        return self.loss is loss and self.loss._version == 0

    def is_plain_mean(self, loss: Tensor) -> bool:
        """Whether `loss` is its output, and is a plain mean."""
        return self.gives(loss) and self.is_plain and self.form == "mean"

    def is_of(self, logits: Tensor, labels: Tensor) -> bool:
        """Whether it is that of exactly these logits, which nothing changed, and labels."""
        return _is_all_of(self.logits, logits) and _is_all_of(self.labels, labels)

    def takes_all_of(self, labels: Tensor) -> bool:
        """Whether it has as many labels as there are, or as there are after a shift."""
        counts = [labels.numel()]
        if self.labels_are_shifted:
            counts.append(labels[:, 1:].numel())
        return self.labels.numel() in counts


@dataclass
class _Witness:
    """Records the calls of blocks, linear layers and cross entropy in a forward pass."""

    network: nn.Module
    block_list: BlockList | None
    labels: Tensor
    linear_outputs: dict[str, Tensor] = field(default_factory=dict)
    block_calls: list[tuple[nn.Module, _Call]] = field(default_factory=list)
    cross_entropies: "list[CrossEntropy]" = field(default_factory=list)

    @contextmanager
    def watching(self) -> Iterator["_Witness"]:
        with ExitStack() as stack:
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
            stack.enter_context(CrossEntropies(self.cross_entropies, labels=self.labels))
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
        """Returns the path of the linear layer that computed the logits, or None.

        None also where something has changed them in place.
        """
        for name, output in self.linear_outputs.items():
            if output is logits and output._version == 0:
                return name
        return None


def _is_all_of(view: Tensor, tensor: Tensor) -> bool:
    """Whether `view` is `tensor` or a view of all of it, and nothing has written to them."""
    if view.numel() != tensor.numel() or view._version or tensor._version:
        return False
    if view is tensor or view._base is tensor:
        return True
    return view._base is not None and view._base is tensor._base


class CrossEntropies(TorchFunctionMode):
    """Records the calls of F.cross_entropy, and what is made of the labels before."""

    def __init__(self, calls: "list[CrossEntropy]", *, labels: Tensor) -> None:
        super().__init__()
        self._calls = calls
        self._made_of_labels: list[tuple[Tensor, bool]] = [(labels, False)]
        """Each tensor, and whether it lacks the first label of each sequence."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if func is F.cross_entropy:
            bound = inspect.signature(F.cross_entropy).bind(*args, **(kwargs or {}))
            bound.apply_defaults()
            options = dict(bound.arguments)
            logits, labels = options.pop("input"), options.pop("target")
            self._calls.append(
                CrossEntropy(
                    logits=logits,
                    labels=labels,
                    loss=output,
                    options=options,
                    labels_are_shifted=self._is_shifted(labels),
                )
            )
        elif args and isinstance(output, Tensor) and not output.is_floating_point():
            shifted = self._is_shifted(args[0])
            if shifted is not None:
                leaves_out = func is Tensor.__getitem__ and _leaves_out_first(args[1])
                self._made_of_labels.append((output, shifted or leaves_out))
        return output

    def _is_shifted(self, tensor: Any) -> bool | None:
        """Whether a tensor made of the labels lacks the first ones; None if it is none."""
        for made, shifted in self._made_of_labels:
            if made is tensor:
                return shifted
        return None


def _leaves_out_first(index: Any) -> bool:
    """Whether the last part of an index is the slice from 1 on, as in `labels[:, 1:]`."""
    last = index[-1] if isinstance(index, tuple) else index
    return isinstance(last, slice) and last.start == 1 and last.stop is None
