"""Writes a table of what each trainer can express: every technique value for every target.

    python studies/exports/table.py

Writes table.md here. A test asserts that it is current.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from autotune.exporters import TARGETS
from autotune.exporters.export import Unsupported
from autotune.exporters.recipe import Recipe
from autotune.spec.config import SEARCHED, TrainingConfig
from autotune.spec.prediction import KeptOfBlock
from autotune.spec.setting import NO_LIMIT
from autotune.spec.workload import make_workload

WORKLOAD = make_workload("cuda", {})
VALUES: Mapping[str, tuple[Any, ...]] = {
    **SEARCHED,  # the others are those of scripts, which only pytorch takes
    "memory_budget": (1.0, 0.5, 0.0),
    "activation_budget": ("none", "1GiB"),
    "micro_batch_size": (WORKLOAD.global_batch, 1),
    "offload": ("frozen",),  # the others are shown on several devices
}
NEEDED: Mapping[str, Mapping[str, Any]] = {
    "memory_budget": {"compile": "block"},
    "compile_mode": {"compile": "model"},
    "offload frozen": {"adapter": "lora"},
    "gradient_accumulation_dtype": {"precision": "bf16-true", "micro_batch_size": 1},
    "attention": {"precision": "bf16-mixed"},
    "adapter_rank": {"adapter": "lora"},
    "adapter_targets": {"adapter": "lora"},
    "adapter_kernels": {"adapter": "lora"},
    "base_weights": {"adapter": "lora", "precision": "bf16-mixed"},
    "base_weights fp16": {"adapter": "lora", "precision": "fp16-mixed"},
}
"""{technique, or with its value: other settings that it needs in a legal configuration}."""
DEVICES = 4
ON_DEVICES: Mapping[str, Mapping[str, Any]] = {
    "ddp": {"sharding": "ddp"},
    "zero1": {"sharding": "zero1"},
    "zero2": {"sharding": "zero2"},
    "zero3": {"sharding": "zero3"},
    "hsdp": {"sharding": "hsdp", "sharding_group": 2},
    "tensor_parallel": {"sharding": "zero3", "tensor_parallel": 2},
    "offload all": {"sharding": "zero3", "offload": "all"},
    "offload optimizer": {"sharding": "zero3", "offload": "optimizer"},
    "gradient_reduction bf16": {"sharding": "ddp", "gradient_reduction": "bf16"},
    "engine deepspeed": {"sharding": "zero3", "engine": "deepspeed"},
}
"""{way to share out a training among four devices: its settings}, the technique's own last but for
`hsdp`."""
SETTINGS = (
    "learning_rate",
    "weight_decay",
    "schedule",
    "learning_rate_warmup_steps",
    "steps",
    "sequence_length",
    "seed",
)


def page() -> str:
    return "\n".join([*_opening(), *_techniques(), "", *_on_devices(), "", *_settings(), ""])


def _opening() -> Iterator[str]:
    yield "# What each trainer can express"
    yield ""
    yield "Written by `python studies/exports/table.py`; a test checks that it is current. Each"
    yield "value is exported alone, with the built-in model, for CUDA. **yes**: in the exported"
    yield "files. **yours**: in a line of your script, which the export prints. Any other entry is"
    yield "what the files do instead; the export gives the reason. A column is a target, with a"
    yield "`--target-version` if it has several."
    yield ""


def columns() -> list[tuple[str, str]]:
    return [(name, version) for name, target in TARGETS.items() for version in target.versions]


def _heading(first: str) -> Iterator[str]:
    titles = [
        name if len(TARGETS[name].versions) == 1 else f"{name} {version}"
        for name, version in columns()
    ]
    yield f"| {first} | {' | '.join(titles)} |"
    yield "|" + "---|" * (len(titles) + 1)


def _techniques() -> Iterator[str]:
    yield from _heading("technique")
    for technique, values in VALUES.items():
        if technique in ("sharding", "gradient_reduction", "engine"):
            continue
        for value in values:
            config = _config(technique, value)
            cells = [
                _cell(technique, unsupported(config, name, version)) for name, version in columns()
            ]
            yield f"| {technique} {value} | {' | '.join(cells)} |"


def _on_devices() -> Iterator[str]:
    yield from _heading(f"on {DEVICES} devices")
    for title, settings in ON_DEVICES.items():
        technique = "sharding" if "sharding_group" in settings else list(settings)[-1]
        config = TrainingConfig(micro_batch_size=1, **settings)
        cells = [
            _cell(technique, unsupported(config, name, version, devices=DEVICES))
            for name, version in columns()
        ]
        yield f"| {title} | {' | '.join(cells)} |"


def _settings() -> Iterator[str]:
    yield from _heading("setting of the workload")
    plain = TrainingConfig(micro_batch_size=WORKLOAD.global_batch)
    for setting in SETTINGS:
        cells = [_cell(setting, unsupported(plain, name, version)) for name, version in columns()]
        yield f"| {setting} | {' | '.join(cells)} |"


def _config(technique: str, value: Any) -> TrainingConfig:
    plain = {"micro_batch_size": WORKLOAD.global_batch}
    needed = NEEDED.get(f"{technique} {value}", NEEDED.get(technique, {}))
    if technique == "memory_budget" and value == 1.0:
        needed = {}
    return TrainingConfig(**{**plain, **needed, technique: value})


def unsupported(
    config: TrainingConfig, name: str, version: str, *, devices: int = 1
) -> Mapping[str, Unsupported]:
    workload = dataclasses.replace(WORKLOAD, devices_per_trial=devices)
    recipe = Recipe(
        config=config,
        workload=workload,
        device_type="cuda",
        origin="the table",
        kept=() if config.activation_budget == NO_LIMIT else (KeptOfBlock(operators=()),),
    )
    return {
        refusal.setting: refusal for refusal in TARGETS[name].write(recipe, version).unsupported
    }


def _cell(setting: str, refused: Mapping[str, Unsupported]) -> str:
    if setting not in refused:
        return "yes"
    instead = refused[setting].instead
    return "yours" if instead is None else f"{instead}"


if __name__ == "__main__":
    (Path(__file__).parent / "table.md").write_text(page(), encoding="utf-8")
