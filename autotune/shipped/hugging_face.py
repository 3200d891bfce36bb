"""A causal language model of transformers, called with tokens and labels."""

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from autotune.shipped.signature import Call, CrossEntropies, CrossEntropy, LossOfModule
from autotune.shipped.token_loss import TokenLoss, next_token_loss

_EXAMINED_SHAPE = 2, 4
"""Of the forward pass that examines a network."""


class HuggingFaceModel(nn.Module):
    """forward(tokens, labels), both [batch, sequence] -> summed loss, float32 scalar.

    In training that is the network's own loss where it has more than the cross entropy, such as the
    balance of experts: its mean times the number of labels. Trainer adds such a term once for each
    micro batch; here it counts by the micro batch's share of the labels, so that it does not grow
    with their number. In evaluation it is the plain cross entropy.
    """

    def __init__(self, network: nn.Module, own_loss: LossOfModule | None = None) -> None:
        super().__init__()
        self.network: Any = network
        self.own_loss = own_loss
        self.token_loss: TokenLoss | None = None
        """If set, computes the loss from the last hidden states and the head; otherwise the loss is
        computed from the logits, or by the network."""

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        if self.token_loss is not None:
            head = self.network.get_output_embeddings()
            return self.token_loss(self.hidden(tokens), head, labels)
        if self.own_loss is None or not self.training:
            return next_token_loss(self.logits(tokens), labels)
        own = self.own_loss
        given = {"labels": own.labels_for(labels)}
        if not own.shifts_labels:
            given["shift_labels"] = labels  # they are the next tokens already
        return own.sum_over(_run(self.network, tokens, **given).loss, labels)

    @property
    def ignores_last_label(self) -> bool:
        """Whether the loss has no term for the last token of a sequence."""
        own = self.own_loss if self.training else None
        return own is not None and own.shifts_labels

    def logits(self, tokens: Tensor) -> Tensor:
        """Returns the logits, [batch, sequence, vocabulary]."""
        logits: Tensor = _run(self.network, tokens).logits
        return logits

    def hidden(self, tokens: Tensor) -> Tensor:
        """Returns the last hidden states, [batch, sequence, width]."""
        hidden: Tensor = _run(self.network.base_model, tokens)[0]
        return hidden


def _run(network: Any, tokens: Tensor, **labels: Tensor) -> Any:
    # A mask of ones says that nothing is padding; without it transformers would look for several
    # sequences packed into one.
    mask = torch.ones_like(tokens)
    return network(input_ids=tokens, attention_mask=mask, use_cache=False, **labels)


@torch.no_grad()
def hugging_face_model(network: nn.Module) -> HuggingFaceModel:
    """Returns the wrapped network, which trains its own loss if that is not the cross entropy."""
    return HuggingFaceModel(network, _own_loss_of(network))


def _own_loss_of(network: Any) -> LossOfModule | None:
    """Returns the loss of a network; None if it is the cross entropy of its logits.

    Seen by its calls in a forward pass, of shapes only for a network on the meta device.
    """
    parameters = inspect.signature(network.forward).parameters.values()
    takes_more = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    weights = dict(network.named_parameters())
    device = next(iter(weights.values())).device
    tokens = torch.zeros(_EXAMINED_SHAPE, dtype=torch.int64, device=device)
    shifted = torch.zeros_like(tokens)
    labels = {"labels": tokens.clone(), **({"shift_labels": shifted} if takes_more else {})}
    calls: list[CrossEntropy] = []

    def called(**arguments: Any) -> Any:
        if device.type != "meta":
            return network(**arguments)
        # The only dtype that torch's grouped product of experts supports there.
        bfloat16 = {name: weight.to(torch.bfloat16) for name, weight in weights.items()}
        return functional_call(network, bfloat16, kwargs=arguments)

    try:
        with CrossEntropies(calls, labels=shifted):
            output = _run(called, tokens, **labels)
    except Exception:  # a network that cannot be called with labels, or that needs values
        balances_experts = getattr(network.config, "output_router_logits", False)
        return _own_loss(shifts_labels=not takes_more) if balances_experts else None
    size = output.logits.numel()
    if any(call.is_plain_mean(output.loss) and call.logits.numel() == size for call in calls):
        return None
    takes_shifted = any(call.labels_are_shifted is not None for call in calls)
    return _own_loss(shifts_labels=not takes_shifted)


def _own_loss(*, shifts_labels: bool) -> LossOfModule:
    call = Call(takes_labels=True, label_name="labels")
    return LossOfModule(call=call, entry="loss", shifts_labels=shifts_labels)
