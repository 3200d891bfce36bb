"""How somebody's module is to be used, seen in one forward pass: what it takes, what of its output counts.

The pass is one of shapes where the module is on the meta device. Seen in it are also the head, the
linear layer whose output the logits are, and whether blocks are called one after the other with the
same arguments.
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

from autotune.errors import InvalidInput
from autotune.models.parts import IGNORED_LABEL
from autotune.models.structure import BlockList, find_blocks
from autotune.spec.workload import Workload

_BATCH = 2
_LABEL_NAMES = ("labels", "targets", "target")


@dataclass(frozen=True, kw_only=True)
class Usage:
    """How a module is called, and which entry of what it returns is what; an entry is found by `entry_of`."""

    takes_labels: bool
    label_name: str | None
    """The keyword for the labels; None: they are the second argument."""
    logits_entry: Any
    """None: no logits for every position."""
    loss_entry: Any
    """None: the loss is made of the logits."""
    ignored_label: int
    """What the module's own loss takes as a label to leave out."""
    head_name: str | None
    """Path of the linear layer to which the loss could also be applied by parts."""
    blocks: BlockList | None
    blocks_are_called_alike: bool
    sequence_length: int
    largest_token: int

    def call(self, network: nn.Module, tokens: Tensor, labels: Tensor | None) -> Any:
        if not self.takes_labels:
            return network(tokens)
        return (
            network(tokens, labels)
            if self.label_name is None
            else network(tokens, **{self.label_name: labels})
        )


def entry_of(output: Any, entry: Any) -> Any:
    """One of the `_entries` of `output`."""
    if isinstance(output, Tensor):
        return output
    return output[entry] if isinstance(output, tuple | list | Mapping) else getattr(output, entry)


def probe_signature(network: nn.Module, workload: Workload) -> Usage:
    """Raises InvalidInput for a module that gives neither logits nor a loss, and what its forward pass raises."""
    refusals: list[Exception] = []
    for label_name in _ways_to_call(network):
        try:
            usage = _observe(
                network,
                workload,
                takes_labels=label_name is not False,
                label_name=label_name or None,
            )
        except Exception as error:
            refusals.append(error)
            continue
        if usage is not None:
            return usage
    if refusals:
        raise _not_callable(workload, refusals[-1])
    raise InvalidInput(
        f"the forward pass of {workload.model} returns no logits [batch, sequence, vocabulary] and no scalar loss",
        hint="let forward(tokens) return logits, or forward(tokens, labels) the mean loss",
    )


def _not_callable(workload: Workload, error: Exception) -> Exception:
    if isinstance(error, InvalidInput):
        return error
    lines = str(error).strip().splitlines()
    return InvalidInput(
        f"the forward pass of {workload.model} fails with tokens [{_BATCH}, {workload.sequence_length}]: "
        f"{type(error).__name__}{': ' + lines[0] if lines else ''}",
        hint="forward takes token numbers, or token numbers and labels; --seq-len sets their length",
    )


def _ways_to_call(network: nn.Module) -> Iterator[Any]:
    """False: without labels; "": labels second; else the labels' keyword.

    Only ways that `forward` can take.
    """
    signature = inspect.signature(network.forward)
    for way, arguments, keywords in (
        (False, (0,), {}),
        *((name, (0,), {name: 0}) for name in _LABEL_NAMES if name in signature.parameters),
        ("", (0, 0), {}),
    ):
        try:
            signature.bind(*arguments, **keywords)
        except TypeError:
            continue
        yield way


def _observe(
    network: nn.Module, workload: Workload, *, takes_labels: bool, label_name: str | None
) -> Usage | None:
    device = next((parameter.device for parameter in network.parameters()), torch.device("cpu"))
    tokens, labels = (
        torch.zeros(_BATCH, workload.sequence_length, dtype=torch.int64, device=device)
        for _ in range(2)
    )
    blocks = find_blocks(network)
    with _Witness(network, blocks).watching() as seen:
        if not takes_labels:
            output = network(tokens)
        else:
            output = (
                network(tokens, **{label_name: labels}) if label_name else network(tokens, labels)
            )
    entries = _entries(output)
    logits_entry = _named_first(
        entries, "logits", lambda t: t.dim() == 3 and t.shape[:2] == tokens.shape
    )
    loss_entry = _named_first(entries, "loss", lambda t: t.dim() == 0) if takes_labels else None
    if (logits_entry is None and not takes_labels) or (loss_entry is None and takes_labels):
        return None
    logits = None if logits_entry is None else entries[logits_entry]
    if logits is not None and logits.shape[2] < workload.vocab_size:
        raise InvalidInput(
            f"the logits of {workload.model} are {logits.shape[2]} wide, the vocabulary has {workload.vocab_size}",
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
        sequence_length=workload.sequence_length,
        largest_token=workload.vocab_size - 1,
    )


def _entries(output: Any) -> dict[Any, Tensor]:
    """The tensors of what a module returned, by index, key or attribute."""
    if isinstance(output, Tensor):
        return {0: output}
    if isinstance(output, tuple | list):
        pairs = dict(enumerate(output))
    else:
        pairs = (
            dict(output) if isinstance(output, Mapping) else dict(getattr(output, "__dict__", {}))
        )
    return {
        name: value
        for name, value in pairs.items()
        if isinstance(value, Tensor) and value.is_floating_point()
    }


def _named_first(entries: Mapping[Any, Tensor], name: str, is_wanted: Any) -> Any:
    wanted = [entry for entry, tensor in entries.items() if is_wanted(tensor)]
    return name if name in wanted else next(iter(wanted), None)


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
    """Notes what happens in a forward pass of `network`."""

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
        """One after the other, each with the output of the one before and otherwise the same arguments."""
        calls = [call for _, call in self.block_calls]
        return all(
            one.output is other.first
            and len(one.others) == len(other.others)
            and all(a is b for a, b in zip(one.others, other.others, strict=True))
            for one, other in itertools.pairwise(calls)
        )

    def head_name(self, logits: Tensor | None) -> str | None:
        return next(
            (name for name, output in self.linear_outputs.items() if output is logits), None
        )

    def ignored_label(self, loss: Tensor | None) -> int:
        made = next((each for each in self.cross_entropies if each.loss is loss), None)
        return IGNORED_LABEL if made is None else int(made.options["ignore_index"])

    def is_plain_cross_entropy(self, loss: Tensor, logits: Tensor | None, labels: Tensor) -> bool:
        """Whether the loss is that of these logits and labels, and nothing else."""
        made = next((each for each in self.cross_entropies if each.loss is loss), None)
        if made is None or logits is None:
            return False
        is_changed = made.options["weight"] is not None or made.options["label_smoothing"] != 0.0
        return (
            _is_all_of(made.logits, logits) and _is_all_of(made.labels, labels) and not is_changed
        )


def _is_all_of(view: Tensor, tensor: Tensor) -> bool:
    same = (
        view is tensor
        or view._base is tensor
        or (view._base is not None and view._base is tensor._base)
    )
    return same and view.numel() == tensor.numel()


class _CrossEntropies(TorchFunctionMode):
    def __init__(self, made: list[_CrossEntropy]) -> None:
        super().__init__()
        self._made = made

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if func is F.cross_entropy:
            bound = inspect.signature(F.cross_entropy).bind(*args, **(kwargs or {}))
            bound.apply_defaults()
            options = dict(bound.arguments)
            if options["reduction"] == "mean":
                logits, labels = options.pop("input"), options.pop("target")
                self._made.append(
                    _CrossEntropy(logits=logits, labels=labels, loss=output, options=options)
                )
        return output
