"""Writes which values can be combined and which each model family supports, from rules and models.

    python studies/legality/table.py

Writes README.md here. A test asserts that it is current.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from autotune.models import build_model
from autotune.models.parts import ModelParts
from autotune.spec.config import CHOICES, RULES, LegalityContext, Rule, TrainingConfig
from autotune.spec.model_choice import MODEL_NAMES
from autotune.spec.workload import make_workload
from autotune.techniques import find_unavailable
from autotune.techniques.requirements import missing_parts

SIZES = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 128,
    "vocab_size": 256,
}
CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "llama": {"model_type": "llama", **SIZES},
    "gpt2": {"model_type": "gpt2", "n_layer": 2, "n_embd": 64, "n_head": 4, "vocab_size": 256},
    "qwen3": {"model_type": "qwen3", **SIZES, "tie_word_embeddings": True},
    "mixtral": {"model_type": "mixtral", **SIZES, "num_local_experts": 4, "num_experts_per_tok": 2},
    "gemma3": {"model_type": "gemma3_text", **SIZES, "final_logit_softcapping": 30.0},
}
CPU = torch.device("cpu")
TOKENS = 128
OF_A_MODEL = (
    "precision",
    "checkpointing",
    "compile",
    "attention",
    "loss",
    "feed_forward",
    "adapter",
    "adapter_targets",
    "base_weights",
)
CIRCUMSTANCES: tuple[tuple[LegalityContext, Mapping[str, str]], ...] = (
    (LegalityContext(global_batch=8), {}),
    (LegalityContext(global_batch=8, clips_gradients=True), {"gradient_clipping": "set"}),
    (LegalityContext(global_batch=8, drops_inputs_of_adapters=True), {"adapter_dropout": "set"}),
    (LegalityContext(global_batch=8, adapters_begin_as_weights=True), {"adapter_init": "pissa"}),
    (LegalityContext(global_batch=8, sequence_length=30), {"sequence_length": "30"}),
    (LegalityContext(global_batch=8, devices=4), {"devices": "4"}),
)
"""Those that the rules are shown in, the first that breaks a rule, and what of them is worth a
word."""
NOT_ALONE = {"memory_budget": 0.5, "compile": "block"}
"""What the rules that need a value of a technique without a list are shown by."""


def page() -> str:
    return "\n".join([*_opening(), *_rules(), "", *_families(), "", *_device(), ""])


def _opening() -> Iterator[str]:
    yield "# What is legal where"
    yield ""
    yield "Written by `python studies/legality/table.py`; a test checks that it is current. Three"
    yield "things decide: rules that always hold (`autotune/spec/config.py`), the parts and the"
    yield "attention of a model (`autotune/techniques/requirements.py`), and what the device can do"
    yield "when it is tried (`find_unavailable` in `autotune/techniques/`)."
    yield ""


def _rules() -> Iterator[str]:
    yield "## Rules that hold everywhere"
    yield ""
    yield "Global batch 8, micro batch 4 with accumulation. The reasons are autotune's messages."
    yield ""
    yield "| combination | why not, and what to change |"
    yield "|---|---|"
    for rule in RULES:
        sentence, words = _broken_by(rule)
        yield f"| {words} | {sentence} |"


def _broken_by(rule: Rule) -> tuple[str, str]:
    """Returns the rule's sentence for the first choices that break it, and a list of all."""
    plain = {**TrainingConfig(micro_batch_size=8).to_dict()}
    values: dict[str, Any] = {
        **CHOICES,
        "micro_batch_size": (8, 4, 3),
        "memory_budget": (1.0, 0.5),
        "activation_budget": ("none", "1GiB"),
        "adapter_rank": (8, 16),
        "sharding_group": (1, 2, 3),
        "tensor_parallel": (1, 2, 3, 4),
    }
    found: list[dict[str, Any]] = []
    for at, described in CIRCUMSTANCES:
        for chosen in _products({field: values[field] for field in rule.fields}):
            if rule.broken({**plain, **chosen}, at):
                found.append({**chosen, **described})
        if found:
            break
    each = {field: list(dict.fromkeys(str(one[field]) for one in found)) for field in found[0]}
    words = " and ".join(f"{field} {', '.join(names)}" for field, names in each.items())
    return rule.sentence({**plain, **found[0]}, at), words


def _products(values: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    if not values:
        yield {}
        return
    field, *others = values
    for value in values[field]:
        for rest in _products({other: values[other] for other in others}):
            yield {field: value, **rest}


def _families() -> Iterator[str]:
    families = {name: _missing(parts) for name, parts in _models()}
    yield "## Models"
    yield ""
    yield "On a CPU. Every model supports the values that are not listed. A `-` means supported, a"
    yield "letter gives the reason why not."
    yield ""
    yield f"| value | {' | '.join(families)} |"
    yield f"|---|{'---|' * len(families)}"
    reasons: dict[str, str] = {}
    for field in OF_A_MODEL:
        for value in CHOICES[field]:
            found = [missing.get(field, {}).get(value) for missing in families.values()]
            if any(found):
                letters = [
                    reasons.setdefault(one, chr(ord("a") + len(reasons))) if one else "-"
                    for one in found
                ]
                yield f"| {field} {value} | {' | '.join(letters)} |"
    yield ""
    yield from (f"- {letter}: {reason}" for reason, letter in reasons.items())


def _missing(parts: ModelParts) -> dict[str, dict[str, str]]:
    return missing_parts(
        parts, {field: CHOICES[field] for field in OF_A_MODEL}, device=CPU, sequence_length=TOKENS
    )


def _models() -> Iterator[tuple[str, ModelParts]]:
    with TemporaryDirectory() as folder:
        for name in (*MODEL_NAMES, *CONFIGS):
            settings: dict[str, Any] = {"model": name}
            if name in CONFIGS:
                file = Path(folder) / f"{name}.json"
                file.write_text(json.dumps(CONFIGS[name]))
                settings = {"model": str(file)}
            with torch.device("meta"):
                yield (
                    name,
                    build_model(make_workload("cpu", {**settings, "sequence_length": TOKENS})),
                )


def _device() -> Iterator[str]:
    """Tries nothing that compiles: whether torch.compile works depends on the machine."""
    tried = {
        f: v for f, v in CHOICES.items() if f not in ("compile", "optimizer", "optimizer_fusion")
    }
    yield "## Not on a CPU"
    yield ""
    yield "As tried with torch 2.13 and torchao 0.18; `autotune doctor` tries it on yours."
    yield ""
    yield "| value | reason |"
    yield "|---|---|"
    for field, found in find_unavailable(tried, device=CPU).items():
        for value, reason in found.items():
            yield f"| {field} {value} | {reason} |"


if __name__ == "__main__":
    Path(__file__).with_name("README.md").write_text(page())
