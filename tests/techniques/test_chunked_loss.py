"""The loss in chunks: the same loss and gradients, and never the logits of the whole batch."""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from autotune.shipped.chunked_loss import chunked_token_loss, tokens_in_a_chunk
from autotune.shipped.labels import IGNORED_LABEL
from autotune.shipped.token_loss import full_token_loss

WIDTH, VOCABULARY = 16, 96


class LargestTensor(TorchDispatchMode):
    numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        made = [leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        self.numbers = max(self.numbers, *made, 0) if made else self.numbers
        return result


def gradients(token_loss, *, bias=False, tied=False, tokens=37):
    """Loss and gradients of hidden states and head; `tied`: hidden states are rows of the head."""
    torch.manual_seed(0)
    head = nn.Linear(WIDTH, VOCABULARY, bias=bias)
    labels = torch.randint(VOCABULARY, (2, tokens))
    labels[0, :5] = IGNORED_LABEL
    hidden = torch.randn(2, tokens, WIDTH, requires_grad=True)
    states = hidden + head.weight[labels.clamp(min=0)] if tied else hidden
    loss = token_loss(states, head, labels)
    loss.backward()
    return [loss.detach(), hidden.grad, *(parameter.grad for parameter in head.parameters())]


@pytest.mark.parametrize("case", [{}, {"bias": True}, {"tied": True}, {"tokens": 1}], ids=str)
def test_loss_and_gradients_are_those_of_the_whole_batch(case):
    for chunked, full in zip(
        gradients(chunked_token_loss, **case), gradients(full_token_loss, **case), strict=True
    ):
        torch.testing.assert_close(chunked, full)


def test_the_loss_is_float32_under_autocast():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert gradients(chunked_token_loss)[0].dtype == torch.float32


def test_the_logits_of_the_whole_batch_never_exist():
    tokens = 512
    with LargestTensor() as seen:
        gradients(chunked_token_loss, tokens=tokens)
    assert seen.numbers < 2 * tokens * VOCABULARY / 4


@pytest.mark.parametrize(
    ("tokens", "width", "vocab_size"), [(1, 64, 256), (7, 64, 256), (1024, 64, 32000)]
)
def test_a_chunk_is_an_eighth_at_most_and_never_empty(tokens, width, vocab_size):
    assert 1 <= tokens_in_a_chunk(tokens, width=width, vocab_size=vocab_size) <= -(-tokens // 8)


def test_a_chunks_logits_are_about_as_large_as_all_hidden_states():
    chunk = tokens_in_a_chunk(16384, width=256, vocab_size=32000)
    assert chunk * 32000 == pytest.approx(16384 * 256, rel=0.05)


def test_a_large_vocabulary_does_not_make_chunks_of_a_few_tokens():
    assert tokens_in_a_chunk(2048, width=128, vocab_size=256000) == 64


def test_no_random_state_is_stored_for_a_recomputation():
    before = torch.get_rng_state()
    head, hidden = nn.Linear(WIDTH, VOCABULARY), torch.zeros(2, 9, WIDTH, requires_grad=True)
    before = torch.get_rng_state()
    chunked_token_loss(hidden, head, torch.zeros(2, 9, dtype=torch.long)).backward()
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.slow
@pytest.mark.parametrize("model", ["gpt", "deep-one"])
def test_the_prediction_of_a_large_vocabulary_shrinks_by_its_logits(model):
    from autotune.predictor.predict import predict
    from autotune.spec.config import TrainingConfig
    from autotune.spec.prediction import PredictionRequest
    from autotune.spec.workload import make_workload

    sizes = {
        "layers": 1,
        "width": 128,
        "heads": 2,
        "sequence_length": 512,
        "global_batch": 4,
        "vocab_size": 2048,
    }
    workload = make_workload("cpu", {"model": model, **sizes})

    def peak(loss):
        config = TrainingConfig(micro_batch_size=4, loss=loss)
        return predict(
            PredictionRequest(workload=workload, config=config, device="cpu")
        ).peak_memory_bytes

    logits_bytes = 4 * 512 * 2048 * 4
    assert peak("full") - peak("chunked") > logits_bytes
