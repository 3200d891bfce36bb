"""Makes an ImportedTraining of what an importer found, after the rules on configurations."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from autotune.errors import InvalidInput
from autotune.importers.imported import ImportedTraining, NotTaken
from autotune.importers.keys_of_file import KeysOfFile
from autotune.spec.config import (
    FULL_PRECISIONS,
    LegalityContext,
    TrainingConfig,
    rule_violations,
)


def finished(
    keys: KeysOfFile, *, workload: Mapping[str, Any], config: Mapping[str, Any]
) -> ImportedTraining:
    """Returns the training. Raises InvalidInput for techniques that exclude one another here."""
    chosen = TrainingConfig(**config)
    if chosen.precision in FULL_PRECISIONS and chosen.attention == "flash":
        chosen = replace(chosen, attention="auto")  # the kernel is for 16-bit numbers
    at = LegalityContext(
        global_batch=workload["global_batch"],
        clips_gradients=workload.get("gradient_clipping") is not None,
        sequence_length=workload.get("sequence_length"),
        devices=workload.get("devices_per_trial", 1),
        own=chosen,
    )
    if broken := rule_violations(chosen.to_dict(), at):
        raise InvalidInput(
            f"{keys.file} describes a training that autotune cannot do: {broken[0]}",
            hint="describe it by options instead: see autotune search --help",
        )
    return ImportedTraining(
        trainer=keys.table.title,
        file=keys.file.name,
        workload=workload,
        config=chosen.to_dict(),
        taken=keys.taken(),
        without_effect=keys.without_effect(),
        not_taken=tuple(
            NotTaken(key=key, value=value, why=why)
            for key, (value, why) in keys.not_taken().items()
        ),
        defaults=keys.defaults(),
    )
