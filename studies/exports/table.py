"""Writes a table of what each trainer can express: every technique value for every target.

    python studies/exports/table.py

Writes table.md here. A test asserts that it is current.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from autotune.exporters import TARGETS
from autotune.exporters.export import Unsupported
from autotune.exporters.recipe import Recipe
from autotune.spec.config import CHOICES, TrainingConfig
from autotune.spec.workload import make_workload

WORKLOAD = make_workload("cuda", {})
VALUES: Mapping[str, tuple[Any, ...]] = {
    **CHOICES,
    "memory_budget": (1.0, 0.5, 0.0),
    "micro_batch_size": (WORKLOAD.global_batch, 1),
}
NEEDED: Mapping[str, Mapping[str, Any]] = {
    "memory_budget": {"compile": "block"},
    "attention": {"precision": "bf16-mixed"},
    "adapter_rank": {"adapter": "lora"},
    "adapter_targets": {"adapter": "lora"},
    "base_weights": {"adapter": "lora", "precision": "bf16-mixed"},
}
"""{technique: other settings that it needs in a legal configuration}."""
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
    return "\n".join([*_opening(), *_techniques(), "", *_settings(), ""])


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
        for value in values:
            config = _config(technique, value)
            cells = [
                _cell(technique, unsupported(config, name, version)) for name, version in columns()
            ]
            yield f"| {technique} {value} | {' | '.join(cells)} |"


def _settings() -> Iterator[str]:
    yield from _heading("setting of the workload")
    plain = TrainingConfig(micro_batch_size=WORKLOAD.global_batch)
    for setting in SETTINGS:
        cells = [_cell(setting, unsupported(plain, name, version)) for name, version in columns()]
        yield f"| {setting} | {' | '.join(cells)} |"


def _config(technique: str, value: Any) -> TrainingConfig:
    plain = {"micro_batch_size": WORKLOAD.global_batch}
    needed = {} if technique == "memory_budget" and value == 1.0 else NEEDED.get(technique, {})
    return TrainingConfig(**{**plain, **needed, technique: value})


def unsupported(config: TrainingConfig, name: str, version: str) -> Mapping[str, Unsupported]:
    recipe = Recipe(config=config, workload=WORKLOAD, device_type="cuda", origin="the table")
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
