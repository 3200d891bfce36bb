"""Selects the definitions that `autotune_trainer.py` needs.

They come from the code of the trials and from `inside_trainer.py`.
"""

from autotune.exporters.adapters import is_quantized
from autotune.exporters.recipe import Recipe
from autotune.exporters.source import STEP_IN_BACKWARD, STOCHASTIC_ROUNDING, excerpt
from autotune.spec.config import TrainingConfig

HERE = "exporters.shipped.inside_trainer"
_CHECKPOINTING = "techniques.checkpointing"


def needs_blocks(config: TrainingConfig, *, by_keys: bool) -> bool:
    """Return whether the code must find the blocks of the model.

    `by_keys`: the keys of TrainingArguments do the checkpointing.
    """
    checkpoints_in_code = config.checkpointing != "none" and not by_keys
    return checkpoints_in_code or config.compile == "block" or config.precision == "fp8"


def needs_causal_flag(config: TrainingConfig, version: str) -> bool:
    """Return whether `keep_causal_flag` is needed; 4.57 makes masks by another interface."""
    return config.compile != "none" and version != "4.57"


_ADAPTERS = ("linear_layers", "is_transposed", "add_adapters")


def definitions(recipe: Recipe, *, by_keys: bool, version: str) -> list[str]:
    """Return the source of the definitions, in the order in which they go into the file."""
    config = recipe.config
    found = [] if is_quantized(config) else [excerpt(HERE, "set_weights_dtype")]
    if needs_blocks(config, by_keys=by_keys) or config.adapter != "none":
        searches = ("find_blocks", "_block_lists", "_are_alike", "_is_of_torch", "_is_of_blocks")
        names = ("BlockList", *searches)
        found += [excerpt("models.parts", "Blocks"), excerpt("models.structure", *names)]
    if config.adapter != "none":
        found.append(excerpt("exporters.shipped.adapters", *_ADAPTERS))
    if config.precision == "fp8":
        found += [
            excerpt("spec.config", "FP8_MULTIPLE"),
            excerpt("techniques.fp8", "convert", "can_be_fp8"),
        ]
    found += _loss_definitions(recipe)
    found += _checkpointing_definitions(config, by_keys=by_keys)
    if needs_causal_flag(config, version):
        found.append(excerpt(HERE, "keep_causal_flag"))
    if config.activation_offload == "cpu":
        functions = ("SMALLEST_BYTES", "OnHost", "offloaded", "_unpack", "to_host", "to_device")
        found += [
            excerpt("spec.config", "ActivationOffload"),
            excerpt("techniques.activation_offload", *functions),
        ]
    return [*found, *_optimizer_definitions(config), excerpt(HERE, "learning_rate_factor")]


def _loss_definitions(recipe: Recipe) -> list[str]:
    if recipe.config.loss == "chunked":
        functions = ("_chunked", "chunked_token_loss", "tokens_in_a_chunk")
        return [
            excerpt(
                "models.parts", "IGNORED_LABEL", "TokenLoss", "next_token_loss", "full_token_loss"
            ),
            excerpt("techniques.loss", "LEAST_CHUNKS", "LEAST_TOKENS", *functions),
            excerpt(HERE, "use_chunked_loss"),
        ]
    return [excerpt(HERE, "IGNORED_LABEL")]


def _checkpointing_definitions(config: TrainingConfig, *, by_keys: bool) -> list[str]:
    if by_keys or config.checkpointing == "none":
        return []
    if config.checkpointing == "sqrt":
        segments = excerpt(HERE, "checkpoint_segments", "_segment_classes")
        return [excerpt("spec.config", "segment_bounds"), segments]
    policy = ("_aten", "_KEPT_OPERATORS", "_selective_contexts", "_keep_matrix_products")
    policies = [excerpt(_CHECKPOINTING, *policy)] if config.checkpointing == "selective" else []
    return [excerpt(HERE, "checkpointed_class"), *policies]


def _optimizer_definitions(config: TrainingConfig) -> list[str]:
    found = []
    if config.optimizer == "adafactor-fixed-rate":
        settings = ("WEIGHT_DECAY", "DECAY_RATE", "LARGEST_BETA2", "CLIP_THRESHOLD", "SQUARE_EPS")
        names = (
            *settings,
            "AdafactorFixedRate",
            "_update",
            "_initial_state",
            "_inverse_root",
            "_blend",
        )
        found.append(excerpt("techniques.adafactor_fixed_rate", *names))
    if config.precision == "bf16-stochastic":
        found.append(excerpt("techniques.stochastic_rounding", *STOCHASTIC_ROUNDING))
    if config.optimizer_fusion == "backward":
        found.append(excerpt("techniques.step_in_backward", *STEP_IN_BACKWARD))
    return found
