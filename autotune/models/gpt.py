"""The built-in model: a decoder-only GPT in the usual architecture of today.

It has RMSNorm (arXiv:1910.07467) before attention and feed-forward, rotary positions
(arXiv:2104.09864), SwiGLU (arXiv:2002.05202) and causal scaled_dot_product_attention. It has no
biases and no dropout; embedding and head are not tied.
"""

from torch import nn

from autotune.models.parts import ModelParts
from autotune.shipped.gpt import GPT, default_feed_forward_width
from autotune.spec.workload import Workload


def build(workload: Workload) -> GPT:
    layers, width, heads = workload.block_sizes
    return GPT(
        layers=layers,
        width=width,
        heads=heads,
        inner=workload.feed_forward_width or default_feed_forward_width(width),
        vocab_size=workload.vocab_size,
        sequence_length=workload.sequence_length,
    )


def find_parts(model: nn.Module) -> ModelParts:
    assert isinstance(model, GPT)
    return ModelParts(
        model=model,
        blocks_owner=model,
        blocks_name="blocks",
        attention_name="attention",
        head=model.head,
    )
