"""One small workload per model family: two built-in ones and four of transformers."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autotune.spec.workload import Workload, make_workload

GLOBAL_BATCH, LAYERS = 4, 4
RUN = {
    "sequence_length": 32,
    "global_batch": GLOBAL_BATCH,
    "steps": 12,
    "warmup_steps": 3,
    "evaluation_sequences": 6,
    # Ten times the rate of its authors, that of adapters, overshoots with these weights: then a
    # rounding decides where the loss goes.
    "learning_rates": {"lora/apollo-mini": 3e-3},
}
_SIZES = {
    "num_hidden_layers": LAYERS,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 128,
    "vocab_size": 256,
    "max_position_embeddings": 64,
}
_GPT2_SIZES = {"n_layer": LAYERS, "n_embd": 64, "n_head": 4, "vocab_size": 256, "n_positions": 64}
_NO_DROPOUT = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "llama": {"model_type": "llama", **_SIZES},
    "gpt2": {"model_type": "gpt2", **_GPT2_SIZES, **_NO_DROPOUT},
    "qwen3": {"model_type": "qwen3", **_SIZES, "tie_word_embeddings": True},
    "mixtral": {
        "model_type": "mixtral",
        **_SIZES,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
}
FAMILIES = ("gpt", "deep-one", *CONFIGS)


def workload_of(family: str, folder: Path) -> Workload:
    """Returns the workload; writes the config.json of a transformers model to `folder`."""
    if family not in CONFIGS:
        return make_workload(
            "cpu", {"model": family, "layers": LAYERS, "width": 64, "heads": 4, **RUN}
        )
    file = folder / f"{family}.json"
    file.write_text(json.dumps(CONFIGS[family]))
    return make_workload("cpu", {"model": str(file), **RUN})
