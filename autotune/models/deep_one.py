"""The model of the `peak_memory` table: a deep post-norm decoder with trainable ALiBi slopes.

DeepNet: x = RMSNorm(2.828 * x + part(x)) for attention and feed-forward (arXiv:2203.00555). The
feed-forward is gated by ReLU (arXiv:2002.05202). Instead of position embeddings, a bias on the
attention scores falls with the distance (arXiv:2108.12409), with a trained slope per head and
layer. No biases, no dropout; embedding and head are not tied.

At its full size (32 layers, width 2048, 16 heads, vocabulary 8000) it has 1,631,455,744 parameters.
Source: https://github.com/jdinalt/forgather, examples/tiny_experiments/peak_memory
"""

from torch import nn

from autotune.models.parts import ModelParts
from autotune.shipped.deep_one import DeepOne, default_feed_forward_width
from autotune.spec.workload import Workload


def build(workload: Workload) -> DeepOne:
    layers, width, heads = workload.block_sizes
    return DeepOne(
        layers=layers,
        width=width,
        heads=heads,
        inner=workload.feed_forward_width or default_feed_forward_width(width),
        vocab_size=workload.vocab_size,
    )


def find_parts(model: nn.Module) -> ModelParts:
    assert isinstance(model, DeepOne)
    return ModelParts(
        model=model,
        blocks_owner=model,
        blocks_name="blocks",
        attention_name="attention",
        head=model.head,
    )
