"""Decides whether a module's own loss is the cross entropy of its logits, and what it is if not.

The cross entropy of the logits is computed by autotune, in chunks if that is wanted. Another loss,
with an auxiliary term, label smoothing or weights of classes, is trained as the module computes it.
The calls of a forward pass decide where the loss is the unchanged output of F.cross_entropy.
Otherwise values decide: of both losses and of their gradients, with the weights of the module and
with others, since an auxiliary term may be zero at the beginning.
"""

import math
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import _disable_current_modes

from autotune.shipped.labels import IGNORED_LABEL
from autotune.shipped.seeds import seed_generators
from autotune.shipped.signature import (
    Expectation,
    LossForm,
    LossOfModule,
    Observation,
    entry_of,
    observe,
)

_MOST_PARAMETERS = 50_000_000
"""Of a module whose losses are compared by values, which happens whenever it is built."""
_COMPARED_SEQUENCES, _COMPARED_TOKENS = 2, 16
_ROUNDING = 1e-5
"""Largest difference of two equal losses, relative to them."""
_ROUNDING_OF_GRADIENTS = 1e-3
_NOISE = 0.1
"""Added to the weights for the second comparison, relative to the deviation of a tensor."""


def compare_losses(
    network: nn.Module,
    expected: Expectation,
    make_real: Callable[[], nn.Module],
    with_labels: Observation,
    plain: Observation | None,
) -> LossOfModule | None:
    """Returns the loss of the module; None if it is the cross entropy of its logits.

    `with_labels` and `plain` are calls with labels and, where it gives logits, without them.
    `make_real` makes the module once more, with weights on the CPU.
    """
    loss, logits = with_labels.loss, with_labels.logits
    assert loss is not None
    for call in with_labels.cross_entropies:
        is_of_both = logits is not None and call.is_of(logits, with_labels.labels)
        if is_of_both and call.is_plain_mean(loss):
            return None
    if sum(parameter.numel() for parameter in network.parameters()) > _MOST_PARAMETERS:
        return _by_calls(network, expected, with_labels, plain)
    longest = expected.sequence_length
    # Not every module takes fewer tokens.
    for length in sorted({min(_COMPARED_TOKENS, longest), longest}):
        try:
            with _on_the_host():
                return _Values(make_real(), expected, with_labels, plain, length).loss()
        except Exception:  # the user's code may raise anything
            continue
    return _by_calls(network, expected, with_labels, plain)


def _by_calls(
    network: nn.Module,
    expected: Expectation,
    with_labels: Observation,
    plain: Observation | None,
) -> LossOfModule | None:
    """Decides by the calls of a forward pass alone."""
    call = with_labels.cross_entropy
    has_logits = with_labels.logits is not None or plain is not None
    if has_logits and call is not None and call.is_plain and call.takes_all_of(with_labels.labels):
        return None
    form: LossForm = "mean" if call is None else call.form
    shifts_labels = any(call.labels_are_shifted for call in with_labels.cross_entropies)
    return _own(network, expected, with_labels, form=form, shifts_labels=shifts_labels)


def _own(
    network: nn.Module,
    expected: Expectation,
    with_labels: Observation,
    *,
    form: LossForm,
    shifts_labels: bool,
) -> LossOfModule:
    assert with_labels.loss is not None
    ignored = {call.ignored_label for call in with_labels.cross_entropies}
    return LossOfModule(
        call=with_labels.call,
        entry=with_labels.loss_entry,
        form="per token" if with_labels.loss.dim() > 0 else form,
        shifts_labels=shifts_labels,
        ignored_label=ignored.pop() if len(ignored) == 1 else IGNORED_LABEL,
        is_cross_entropy=_evaluates_cross_entropy(network, expected, with_labels),
    )


def _evaluates_cross_entropy(
    network: nn.Module, expected: Expectation, with_labels: Observation
) -> bool:
    """Returns whether the loss in evaluation is known to be the plain cross entropy."""
    was_training = network.training
    network.eval()
    try:
        call = observe(network, expected, with_labels.call).cross_entropy
    except Exception:  # the user's code may raise anything
        return False
    finally:
        network.train(was_training)
    return call is not None and call.is_plain and call.takes_all_of(with_labels.labels)


@contextmanager
def _on_the_host() -> Iterator[None]:
    """Computes on the CPU inside, whatever a trial or a prediction has set, and leaves no trace."""
    with (
        _disable_current_modes(),
        torch.device("cpu"),
        torch.enable_grad(),
        # The configuration may have turned off the attention kernels of a CPU.
        sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]),
    ):
        states = random.getstate(), numpy.random.get_state(), torch.get_rng_state()
        try:
            yield
        finally:
            random.setstate(states[0])
            numpy.random.set_state(states[1])
            torch.set_rng_state(states[2])


@dataclass(frozen=True)
class _Values:
    """Compares losses of a module that has weights."""

    network: nn.Module
    expected: Expectation
    with_labels: Observation
    plain: Observation | None
    length: int

    def loss(self) -> LossOfModule | None:
        """Returns the loss of the module; None if it is the cross entropy of its logits."""
        if any(p.dtype in (torch.bfloat16, torch.float16) for p in self.network.parameters()):
            self.network.float()
        was_training = self.network.training
        self.network.eval()
        form, shifts_labels = self._form(), self._shifts_labels()
        self.network.train(was_training)
        own = _own(
            self.network, self.expected, self.with_labels, form=form, shifts_labels=shifts_labels
        )
        if self.with_labels.logits is None and self.plain is None:
            return own
        if not self._is_cross_entropy(own, seed=1):
            return own
        self._change_weights()
        return None if self._is_cross_entropy(own, seed=2) else own

    def _batch(self, seed: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        shape = (_COMPARED_SEQUENCES, self.length + 1)
        rows = torch.randint(self.expected.vocab_size, shape, generator=generator)
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()

    def _value(self, tokens: Tensor, labels: Tensor) -> float:
        seed_generators(0)
        output = self.with_labels.call(self.network, tokens, labels)
        value: Tensor = entry_of(output, self.with_labels.loss_entry)
        return value.detach().double().sum().item()

    def _form(self) -> LossForm:
        """Returns `sum` if the same sequences once more double the loss."""
        tokens, labels = self._batch(0)
        once = self._value(tokens, labels)
        twice = self._value(tokens.repeat(2, 1), labels.repeat(2, 1))
        return "sum" if twice > 1.5 * once else "mean"

    def _shifts_labels(self) -> bool:
        """Returns whether the first label of a sequence is not compared, but the last one is."""
        tokens, labels = self._batch(0)
        value = self._value(tokens, labels)
        changed = []
        for place in (0, -1):
            others = labels.clone()
            others[:, place] = (others[:, place] + 1) % self.expected.vocab_size
            changed.append(self._value(tokens, others) != value)
        return changed == [False, True]

    @torch.no_grad()
    def _change_weights(self) -> None:
        generator = torch.Generator().manual_seed(0)
        for parameter in self.network.parameters():
            if parameter.is_floating_point():
                deviation = parameter.std().item() if parameter.numel() > 1 else 0.0
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.add_((_NOISE * (deviation or 1.0) * noise).to(parameter.dtype))

    def _is_cross_entropy(self, own: LossOfModule, *, seed: int) -> bool:
        tokens, labels = self._batch(seed)
        seed_generators(seed)
        output = own.call(self.network, tokens, own.labels_for(labels))
        theirs = own.sum_over(entry_of(output, own.entry), labels)
        if self.with_labels.logits is not None:
            logits = entry_of(output, self.with_labels.logits_entry)
            if not _depends_only_on(theirs, logits):
                return False
        else:
            assert self.plain is not None
            seed_generators(seed)
            logits = entry_of(self.plain.call(self.network, tokens, None), self.plain.logits_entry)
        if own.shifts_labels:  # the last one is not among what the module was given
            labels = F.pad(labels[:, :-1], (0, 1), value=IGNORED_LABEL)
        ours = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="sum")
        if not math.isclose(theirs.item(), ours.item(), rel_tol=_ROUNDING):
            return False
        parameters = [p for p in self.network.parameters() if p.requires_grad]
        gradients: list[Any] = [
            torch.autograd.grad(loss, parameters, retain_graph=True, allow_unused=True)
            for loss in (theirs, ours)
        ]
        squares = torch.zeros(2, dtype=torch.float64)
        for their_gradient, our_gradient in zip(*gradients, strict=True):
            if their_gradient is None or our_gradient is None:
                if their_gradient is not our_gradient:  # a term that is zero for now
                    return False
                continue
            their_gradient, our_gradient = their_gradient.to_dense(), our_gradient.to_dense()
            for index, gradient in enumerate((their_gradient - our_gradient, our_gradient)):
                squares[index] += gradient.abs().double().square().sum()
        return bool(squares[0].sqrt() <= _ROUNDING_OF_GRADIENTS * squares[1].sqrt())


def _depends_only_on(loss: Tensor, logits: Tensor) -> bool:
    """Returns whether the loss depends on the weights by way of the logits alone."""
    unseen, seen = [loss.grad_fn], set()
    while unseen:
        node = unseen.pop()
        if node is None or node is logits.grad_fn or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):  # accumulates the gradient of a parameter
            return False
        unseen += [following for following, _ in node.next_functions]
    return True
