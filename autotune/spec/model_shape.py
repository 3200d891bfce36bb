"""The large matrices of a language model, from its settings or its config.json, without torch.

Norms and biases are left out, and what a config.json leaves to the defaults of its class counts as
if it were not there: the numbers are never more than the model has, and for the models of
`model_shapes.toml` hardly fewer.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from autotune.spec.model_file import known_sizes
from autotune.spec.workload import Workload

_GATED = frozenset(
    (
        "llama",
        "mistral",
        "qwen2",
        "qwen3",
        "phi3",
        "gemma",
        "gemma2",
        "gemma3_text",
        "olmo2",
        "olmo3",
        "seed_oss",
        "smollm3",
        "stablelm",
    )
)
"""Kinds of models whose feed-forward layers are three matrices, one of which is a gate."""
_PLAIN = frozenset(("gpt2", "gpt_neox", "phi"))
"""Kinds with two."""
_OF_EXPERTS = {
    "mixtral": ("num_local_experts", "intermediate_size"),
    "gpt_oss": ("num_local_experts", "intermediate_size"),
    "qwen3_moe": ("num_experts", "moe_intermediate_size"),
    "olmoe": ("num_experts", "intermediate_size"),
}
"""{kind whose feed-forward parts are experts with gates: the keys of their number and width}."""
KINDS = _GATED | _PLAIN | _OF_EXPERTS.keys()
"""The `model_type` of models whose shape is known here, all with attention in every block."""
_OWN_HEAD_DIM = frozenset(
    ("qwen3", "gemma", "gemma2", "gemma3_text", "seed_oss", "gpt_oss", "qwen3_moe")
)
"""Kinds whose heads are as wide as their class says, where the config.json does not."""


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Sizes of a decoder: rows and columns of the matrices of a block, and of those beside them."""

    layers: int
    width: int
    vocab_size: int
    is_tied: bool
    """Whether the head is the embedding."""
    attention: tuple[tuple[int, int], ...]
    """Inputs and outputs of each matrix of a block; those that read the same stand together."""
    feed_forward: tuple[tuple[int, int], ...]
    experts: tuple[tuple[int, int, int], ...] = ()
    """How many experts, inputs and outputs of each weight of experts in a block."""

    @property
    def in_experts(self) -> int:
        """How many weights the experts have."""
        return self.layers * sum(number * n * m for number, n, m in self.experts)

    @property
    def in_blocks(self) -> int:
        """How many weights the blocks have beside their experts."""
        return self.layers * sum(n * m for n, m in (*self.attention, *self.feed_forward))

    @property
    def beside_blocks(self) -> int:
        """How many weights embedding and head have."""
        return self.width * self.vocab_size * (1 if self.is_tied else 2)


def shape_of(workload: Workload) -> ModelShape | None:
    """Returns the shape of the workload's model; None of a kind that is not known here."""
    if workload.model == "gpt":
        layers, width, heads = workload.block_sizes
        # By default it is 8/3 of the width, up to a multiple of 32 (`shipped/gpt.py`).
        inner = workload.feed_forward_width or width * 8 // 3
        config: Mapping[str, Any] = {
            "model_type": "llama",
            "intermediate_size": inner,
            "num_key_value_heads": heads,
            "tie_word_embeddings": False,
        }
    elif workload.model_config is not None:
        config = workload.model_config
        sizes = known_sizes(config)
        if sizes["width"] is None or sizes["heads"] is None or workload.layers is None:
            return None
        layers, width, heads = workload.layers, sizes["width"], sizes["heads"]
    else:
        return None
    kind = config.get("model_type")
    if kind not in KINDS:
        return None
    if config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1:
        return None
    if kind == "gpt2":  # whose class knows no other keys of these sizes
        inner, key_heads, head_dim = config.get("n_inner") or 4 * width, heads, width // heads
    else:
        _, width_key = _OF_EXPERTS.get(str(kind), ("", "intermediate_size"))
        inner = config.get(width_key) or (4 * width if kind in _PLAIN else 0)
        key_heads = config.get("num_key_value_heads") or (heads if kind in _PLAIN else 0)
        head_dim = config.get("head_dim") or (0 if kind in _OWN_HEAD_DIM else width // heads)
    experts = config.get(_OF_EXPERTS[kind][0]) or 0 if kind in _OF_EXPERTS else 0
    numbers = (inner, key_heads, head_dim, experts)
    if not all(type(number) is int and number >= 0 for number in numbers):
        return None
    queries, keys = heads * head_dim, key_heads * head_dim
    matrices = ((width, inner * (1 if kind in _PLAIN else 2)), (inner, width))
    return ModelShape(
        layers=layers,
        width=width,
        vocab_size=workload.vocab_size,
        is_tied=config.get("tie_word_embeddings") is not False,
        attention=((width, queries + 2 * keys), (queries, width)),
        feed_forward=() if kind in _OF_EXPERTS else matrices,
        experts=tuple((experts, n, m) for n, m in matrices) if experts else (),
    )
