"""Models of users, each with an operator or a habit that the predictor was not made for.

Each `make_` function is given to `--model`. All have the same frame: an embedding, residual blocks
of one kind, a norm and a head; `forward(tokens)` returns logits.
"""

import logging
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

HEADS = 4
EXPERTS = 4
CHOSEN = 2
_log = logging.getLogger(__name__)


class Frame(nn.Module):
    """Embeds tokens, runs residual blocks, and returns logits."""

    def __init__(
        self, make_block: Callable[[], nn.Module], *, layers: int, width: int, vocab_size: int
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab_size, width)
        self.blocks = nn.ModuleList(Residual(make_block(), width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab_size, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


class Residual(nn.Module):
    def __init__(self, inner: nn.Module, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        added: Tensor = self.inner(self.norm(x))
        return x + added


# -- recurrent networks ----------------------------------------------------------------------------


class Recurrent(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.layer(x)[0]
        return outputs


class Scan(nn.Module):
    """A gated linear recurrence, one step a token."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gates = nn.Linear(width, 2 * width)

    def forward(self, x: Tensor) -> Tensor:
        decay, value = self.gates(x).chunk(2, dim=-1)
        decay = torch.sigmoid(decay)
        state = torch.zeros_like(x[:, 0])
        states = []
        for token in range(x.shape[1]):
            state = decay[:, token] * state + (1 - decay[:, token]) * value[:, token]
            states.append(state)
        return torch.stack(states, dim=1)


# -- convolutions ----------------------------------------------------------------------------------


class Convolution(nn.Module):
    """A causal convolution over the sequence; depthwise where every channel is a group."""

    def __init__(self, width: int, *, groups: int, kernel_size: int = 4) -> None:
        super().__init__()
        self.padding = kernel_size - 1
        self.convolution = nn.Conv1d(width, width, kernel_size, groups=groups)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        padded = F.pad(x.transpose(1, 2), (self.padding, 0))
        mixed: Tensor = self.out(F.silu(self.convolution(padded)).transpose(1, 2))
        return mixed


# -- norms and functions ---------------------------------------------------------------------------


class UpcastNorm(nn.Module):
    """RMSNorm, computed in fp32, as in Llama."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * wide.to(x.dtype)


class FeedForward(nn.Module):
    def __init__(self, width: int, activation: Callable[[Tensor], Tensor] = F.gelu) -> None:
        super().__init__()
        self.norm = UpcastNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(self.activation(self.up(self.norm(x))))
        return out


class SquaredRelu(torch.autograd.Function):
    """A function of a user's, whose backward pass computes in fp32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return F.relu(x).square()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return (gradient.float() * 2 * F.relu(x.float())).to(gradient.dtype)


class CausalAttention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = UpcastNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.norm(x)).view(batch, length, 3, HEADS, -1)
        attended = F.scaled_dot_product_attention(
            *qkv.permute(2, 0, 3, 1, 4).unbind(), is_causal=True
        )
        out: Tensor = self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return out


class OwnCheckpointing(nn.Module):
    """Recomputes its inner module by the model's own call of torch's checkpoint."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(self.inner, x, use_reentrant=False)
        return out


# -- experts ---------------------------------------------------------------------------------------


class EinsumExperts(nn.Module):
    """Every expert sees every token; gates weight them in einsums of three operands."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, EXPERTS)
        self.up = nn.Parameter(torch.randn(EXPERTS, width, 2 * width) * 0.02)
        self.down = nn.Parameter(torch.randn(EXPERTS, 2 * width, width) * 0.02)

    def forward(self, x: Tensor) -> Tensor:
        gates = self.gate(x).softmax(-1)
        hidden = F.gelu(torch.einsum("btd,edf->btef", x, self.up))
        return torch.einsum("bte,btef,efd->btd", gates, hidden, self.down)


class RoutedExperts(nn.Module):
    """Each token goes to the experts with its largest gates."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, EXPERTS)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
            for _ in range(EXPERTS)
        )

    def choose(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        return torch.topk(self.gate(rows).softmax(-1), CHOSEN)


class ExpertsByNonzero(RoutedExperts):
    """Finds the rows of an expert by `nonzero`."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        gates, chosen = self.choose(rows)
        out = torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            row, rank = torch.nonzero(chosen == number, as_tuple=True)
            out = out.index_add(0, row, (expert(rows[row]) * gates[row, rank, None]).to(out.dtype))
        return out.view_as(x)


class ExpertsByMask(RoutedExperts):
    """Finds the rows of an expert by boolean masks."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        gates, chosen = self.choose(rows)
        out = torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            is_chosen = (chosen == number).any(-1)
            weight = (gates * (chosen == number)).sum(-1, keepdim=True)
            out[is_chosen] += (expert(rows[is_chosen]) * weight[is_chosen]).to(out.dtype)
        return out.view_as(x)


# -- values that a model reads ---------------------------------------------------------------------


class Logged(FeedForward):
    """Logs the norm of its output."""

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        _log.debug("norm of the output: %.3f", out.detach().float().norm().item())
        return out


class Branching(FeedForward):
    """Runs its layers twice where the output is small."""

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        if out.detach().abs().mean().item() < 1:
            out = super().forward(out)
        return out


# -- what `--model` names --------------------------------------------------------------------------


def make_lstm(layers: int, width: int, vocab_size: int) -> nn.Module:
    return Frame(
        lambda: Recurrent(nn.LSTM(width, width, batch_first=True)),
        layers=layers,
        width=width,
        vocab_size=vocab_size,
    )


def make_gru(layers: int, width: int, vocab_size: int) -> nn.Module:
    return Frame(
        lambda: Recurrent(nn.GRU(width, width, batch_first=True)),
        layers=layers,
        width=width,
        vocab_size=vocab_size,
    )


def make_scan(layers: int, width: int, vocab_size: int) -> nn.Module:
    return Frame(lambda: Scan(width), layers=layers, width=width, vocab_size=vocab_size)


def make_convolution(layers: int, width: int, vocab_size: int) -> nn.Module:
    return Frame(
        lambda: Convolution(width, groups=1), layers=layers, width=width, vocab_size=vocab_size
    )


def make_depthwise(layers: int, width: int, vocab_size: int) -> nn.Module:
    return Frame(
        lambda: Convolution(width, groups=width), layers=layers, width=width, vocab_size=vocab_size
    )


def make_upcast_norm(layers: int, width: int, vocab_size: int) -> nn.Module:
    return Frame(lambda: FeedForward(width), layers=layers, width=width, vocab_size=vocab_size)


def make_own_function(layers: int, width: int, vocab_size: int) -> nn.Module:
    return Frame(
        lambda: FeedForward(width, SquaredRelu.apply),
        layers=layers,
        width=width,
        vocab_size=vocab_size,
    )


def make_attention(layers: int, width: int, vocab_size: int) -> nn.Module:
    return Frame(lambda: CausalAttention(width), layers=layers, width=width, vocab_size=vocab_size)


def make_own_checkpointing(layers: int, width: int, vocab_size: int) -> nn.Module:
    return Frame(
        lambda: OwnCheckpointing(CausalAttention(width)),
        layers=layers,
        width=width,
        vocab_size=vocab_size,
    )


def make_einsum_experts(layers: int, width: int, vocab_size: int) -> nn.Module:
    return Frame(lambda: EinsumExperts(width), layers=layers, width=width, vocab_size=vocab_size)


def make_experts_by_nonzero(layers: int, width: int, vocab_size: int) -> nn.Module:
    return Frame(lambda: ExpertsByNonzero(width), layers=layers, width=width, vocab_size=vocab_size)


def make_experts_by_mask(layers: int, width: int, vocab_size: int) -> nn.Module:
    return Frame(lambda: ExpertsByMask(width), layers=layers, width=width, vocab_size=vocab_size)


def make_logged(layers: int, width: int, vocab_size: int) -> nn.Module:
    return Frame(lambda: Logged(width), layers=layers, width=width, vocab_size=vocab_size)


def make_branching(layers: int, width: int, vocab_size: int) -> nn.Module:
    return Frame(lambda: Branching(width), layers=layers, width=width, vocab_size=vocab_size)
