"""Shrinks the default config of a causal model type of transformers: it then trains in seconds.

The rules go by the names of settings. Where the class rejects the result, other sizes are tried,
and `EXCEPTIONS` has what the rules cannot know.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

VOCABULARY, LAYERS, WIDTH, HEADS, HEAD_SIZE, POSITIONS = 320, 2, 64, 4, 16, 128

RULES: tuple[tuple[str, int], ...] = (
    (r"vocab_size", VOCABULARY),
    (r"vocab_size_per_layer_input", VOCABULARY),
    (r"(num_hidden_layers|n_layers?|num_layers|(num_)?(en|de)coder_layers|depth)", LAYERS),
    (r"num_hidden_groups|num_blocks", LAYERS),
    (r".*(key_value|kv)_?heads|num_kv_heads|num_attention_groups", 2),
    (r".*heads|n_head|num_attention_heads", HEADS),
    (r".*head_(dim|size)|d_kv|attention_head_dim", HEAD_SIZE),
    (r"qk_(nope|rope)_head_dim|v_head_dim", HEAD_SIZE),
    (r".*lora_rank|.*_lora_dim|.*lora_rank_.*", 16),
    (r"topk_group|rotary_dim|num_kv_shared_layers", 1),
    (r"num_experts_per_tok.*|.*top_?k.*|moe_k|num_experts_per_token|experts_per_token", 2),
    (r"n_shared_experts|num_shared_experts|.*_groups?", 1),
    (r".*experts?|num_local_experts|n_routed_experts", 4),
    (r".*(intermediate|ffn|inner|feed_?forward|mlp|expert).*(size|dim|width)|n_inner", 128),
    (r"(hidden|embed\w*|emb|word_embed_proj|lru|input_embedding|proj\w*)_?(size|dim|width)", WIDTH),
    (r"n_embd|d_model|model_dim|dim", WIDTH),
    (r"(max_(position_embeddings|target_positions|source_positions)|n_positions)", POSITIONS),
    (r"(max_seq_len|max_sequence_length|context_length|seq_length|n_ctx)", POSITIONS),
    (r"sliding_window.*|.*attention_window.*|attention_chunk_size|window_size", 16),
    (r"(mamba_|ssm_)?(d_state|state_size|state_dim)", 8),
    (r"image_size", 32),
    (r"chunk_size|mamba_chunk_size", 16),
    (r"num_mel_bins", 16),
)
"""(pattern of a name, largest value): the first pattern that matches the whole name counts."""

_DECODER = {"is_decoder": True}
_ROTARY_TABLE = {"head_dim": HEAD_SIZE}
_MIXED = ["sliding_attention", "full_attention"]
_QWEN4 = {
    "indexer_n_heads": 4,
    "indexer_kv_heads": 1,
    "indexer_head_dim": HEAD_SIZE,
    "indexer_budget": 16,
    "indexer_compress_ratio": 4,
    "ngram_vocab_size_base": 500,
    "split_ngram_parts": 1,
    "hc_lowrank": 16,
}
EXCEPTIONS: Mapping[str, Mapping[str, Any]] = {
    **dict.fromkeys(
        (
            *("bert", "bert-generation", "big_bird", "camembert", "data2vec-text", "electra"),
            *("ernie", "megatron-bert", "rembert", "roberta", "roberta-prelayernorm", "roc_bert"),
            *("roformer", "xlm-roberta", "xlm-roberta-xl"),
        ),
        _DECODER,
    ),
    **dict.fromkeys(("hunyuan_v1_dense", "hunyuan_v1_moe", "ministral"), _ROTARY_TABLE),
    "blt": {
        "encoder_hash_byte_group_vocab": 64,
        "encoder_config": {"hidden_size_global": WIDTH},
        "decoder_config": {"hidden_size_global": WIDTH},
    },
    "codegen": {"rotary_dim": 8},
    "gptj": {"rotary_dim": 8},
    "cohere_compass_text": {
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 10000.0} for kind in _MIXED
        },
        "layer_types": _MIXED,
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"hidden_size": WIDTH, "ffn_hidden_size": 128},
    },
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "gemma3n_text": {
        "intermediate_size": [128] * 4,
        "activation_sparsity_pattern": [0.95, 0.0, 0.0, 0.0],
        "num_hidden_layers": 4,
        "layer_types": _MIXED * 2,
        "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 16,
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "num_layers": 2},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "longcat_flash": {"head_dim": HEAD_SIZE, "qk_head_dim": 2 * HEAD_SIZE},
    "mamba2": {"num_heads": 8, "head_dim": HEAD_SIZE},
    "nemotron": {"num_key_value_heads": 2},
    "qwen4_exp": {"text_config": _QWEN4},
    "qwen4_exp_text": _QWEN4,
    "reformer": {
        "is_decoder": True,
        "attn_layers": ["local", "lsh"],
        "axial_pos_embds": False,
        "local_attn_chunk_length": 16,
        "lsh_attn_chunk_length": 16,
    },
    "xlm": {"causal": True},
    "xmod": {"is_decoder": True, "default_language": "en_XX"},
}
"""Settings by model type, over what the rules give."""

_FALLBACKS: tuple[Mapping[str, int], ...] = (
    {},
    {"kv": HEADS},
    {"layers": 4},
    {"layers": 4, "kv": HEADS},
    {"layers": 8},
)


def candidates(model_type: str, defaults: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields contents of a config.json, the smallest first."""
    for fallback in _FALLBACKS:
        content = {"model_type": model_type, **_shrunk(defaults, fallback)}
        yield _merged(content, EXCEPTIONS.get(model_type, {}))


def _shrunk(defaults: Mapping[str, Any], fallback: Mapping[str, int]) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    for name, value in defaults.items():
        if isinstance(value, Mapping) and "model_type" in value:
            settings[name] = {"model_type": value["model_type"], **_shrunk(value, fallback)}
        elif name.endswith(("_token_id", "_token_index")):
            if isinstance(value, int) and value >= VOCABULARY:
                settings[name] = _TOKENS.get(name, VOCABULARY - 1)
            elif isinstance(value, list):
                settings[name] = 2
        elif isinstance(value, list) and _is_per_layer(name, value):
            settings[name] = _one_of_each(value, fallback.get("layers", LAYERS))
        elif type(value) is int:
            smaller = _smaller(name, value, fallback)
            if smaller != value:
                settings[name] = smaller
    kinds = [len(value) for name, value in settings.items() if name in _LAYER_LISTS]
    if kinds:
        for name in settings:
            if name in ("num_hidden_layers", "n_layer", "num_layers"):
                settings[name] = max(kinds)
    return settings


_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
_LAYER_LISTS = ("layer_types", "layers_block_type", "mlp_layer_types", "block_types")


def _is_per_layer(name: str, value: list[Any]) -> bool:
    return name in _LAYER_LISTS and bool(value)


def _one_of_each(kinds: list[Any], layers: int) -> list[Any]:
    """Returns every kind of layer once, repeated up to `layers`."""
    each = list(dict.fromkeys(kinds))
    return [each[index % len(each)] for index in range(max(layers, len(each)))]


def _smaller(name: str, value: int, fallback: Mapping[str, int]) -> int:
    for pattern, largest in RULES:
        if re.fullmatch(pattern, name):
            if largest == LAYERS and "layers" in fallback and "layer" in name:
                return min(value, fallback["layers"])
            if largest == 2 and "kv" in fallback and ("kv" in name or "key_value" in name):
                return min(value, fallback["kv"])
            return min(value, largest)
    return value


def _merged(content: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(content)
    for name, value in over.items():
        if value is None:
            merged.pop(name, None)
        elif isinstance(value, Mapping) and isinstance(merged.get(name), Mapping):
            merged[name] = _merged(merged[name], value)
        else:
            merged[name] = value
    return merged
