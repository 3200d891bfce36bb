"""How long a trial would take, by how long those so far took: mostly whether it compiles anew."""

import statistics
from collections.abc import Iterable, Mapping
from typing import Any

from autotune.spec.config import TrainingConfig
from autotune.spec.result import TrialRecord

USUAL_OTHER_SECONDS = 5.0
USUAL_COMPILE_SECONDS: Mapping[str, float] = {"none": 0.0, "block": 12.0, "model": 36.0}
"""Before any of the kind is measured: as on a data centre's GPU (`studies/gpu`)."""
SHARE_OF_CACHED = 0.2
"""What compiling takes whose code is in the study's cache already."""


class TrialSeconds:
    """Expected seconds of trials."""

    def __init__(self, records: Iterable[TrialRecord], *, device_type: str) -> None:
        """`device_type`: on a CPU nothing is known of compiling before it is measured."""
        others: list[float] = []
        compiling: dict[str, list[float]] = {}
        self._compiled: set[tuple[Any, ...] | None] = set()
        for record in records:
            if not record.was_trained or record.seconds is None:
                continue
            compile_seconds = record.compile_seconds or 0.0
            others.append(max(0.0, record.seconds - compile_seconds))
            if record.compile_seconds and record.config.compiled_class not in self._compiled:
                compiling.setdefault(record.config.compile, []).append(record.compile_seconds)
            self._compiled.add(record.config.compiled_class)
        self.without_compiling = statistics.median(others) if others else USUAL_OTHER_SECONDS
        measured = {kind: statistics.median(values) for kind, values in compiling.items()}
        ratios = [
            seconds / USUAL_COMPILE_SECONDS[kind]
            for kind, seconds in measured.items()
            if USUAL_COMPILE_SECONDS.get(kind)
        ]
        slower = statistics.median(ratios) if ratios else 1.0
        self._compiling = {
            kind: measured.get(kind, slower * seconds if device_type == "cuda" else 0.0)
            for kind, seconds in USUAL_COMPILE_SECONDS.items()
        }

    def of(self, config: TrainingConfig) -> float:
        """Returns the expected seconds of a trial of the configuration."""
        seconds = self._compiling.get(config.compile, 0.0)
        if config.compiled_class in self._compiled:
            seconds *= SHARE_OF_CACHED
        return self.without_compiling + seconds
