"""In which order a study tries its baseline and the configurations that its space names.

On a CUDA device first what promises most for its time: expected speed over expected seconds of the
trial, which is the order of least weighted completion time (Smith, "Various optimizers for
single-stage production", 1956). After a minute there is something to pick that a person would have
tried. Each is tried at the largest micro batch that is likely to fit, and of kinds of training that
are compared with each other, full training, LoRA and QLoRA, each once before any of them twice.
A baseline that nobody would pick waits until it takes little of the time.

On a CPU, whose kinds of training differ little, the baseline is first and the others are in the
order of the file; so it is where nothing is expected of speeds.

For the cap a named configuration is like any other: it is predicted first, and one that probably
does not fit gets its turn only where the sampler finds it worth the risk.
"""

import math
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace

from autotune.analysis.expected_step import ExpectedStep
from autotune.spec.config import QUANTIZED_WEIGHTS, TrainingConfig
from autotune.spec.result import TrialRecord
from autotune.spec.study import StudyDefinition
from autotune.study.sampler.features import Candidates
from autotune.study.sampler.memory_model import MemoryModel
from autotune.study.sampler.trial_seconds import TrialSeconds

LIKELY = 0.5
"""Below this probability of fitting a smaller micro batch is tried."""
WORTH_A_PICK = 0.5
"""Expected to have less than this share of the best speed, the baseline will not be picked."""
SHARE_FOR_BASELINE = 0.1
"""Of the seconds of trials so far: what such a baseline may take."""

Named = tuple[str, TrainingConfig]


class NamedOrder:
    """The baseline and the named configurations of a study."""

    def __init__(self, definition: StudyDefinition) -> None:
        self._definition = definition
        self._all = definition.first_configurations()
        self._baseline = definition.baseline_config()
        self._legal = definition.legal_space()
        self._sizes = sorted(self._legal.values.get("micro_batch_size", ()), reverse=True)
        self._has_own_size = {
            values["name"]
            for values in definition.space.configurations
            if "micro_batch_size" in values
        }

    def left(
        self, tried: Collection[TrainingConfig], *, names: Collection[str | None]
    ) -> list[Named]:
        """Returns those without a trial, in the order of the file; `names` are those of trials."""
        return [
            (name, config)
            for name, config in self._all
            if config not in tried and name not in names
        ]

    def next(
        self,
        left: Sequence[Named],
        records: Sequence[TrialRecord],
        *,
        expected: ExpectedStep | None,
        memory: MemoryModel,
    ) -> list[Named]:
        """Returns those of `left` that may be tried now, in the order in which they are tried.

        What probably does not fit by its own prediction is left to the sampler.
        """
        if expected is None or expected.device.type == "cpu":
            return [
                one for one in left if one[1] == self._baseline or not is_unlikely(one[1], memory)
            ]
        seconds = TrialSeconds(records, device_type=expected.device.type)
        kinds = Counter(_kind(record.config) for record in records)
        named = [(name, self._at_largest_size(name, config, memory)) for name, config in left]
        if not self._is_time_for_baseline(records, expected):
            named = [one for one in named if one[1] != self._baseline]
        named = [
            one for one in named if one[1] == self._baseline or not is_unlikely(one[1], memory)
        ]
        return sorted(
            named,
            key=lambda one: (
                kinds[_kind(one[1])] > 0,
                math.log(seconds.of(one[1])) - expected.logarithm_of_speed(one[1]),
            ),
        )

    def _is_time_for_baseline(self, records: Sequence[TrialRecord], expected: ExpectedStep) -> bool:
        """Returns whether the baseline may be picked, or takes little of the time so far."""
        speeds = [expected.logarithm_of_speed(config) for _, config in self._all]
        own = expected.logarithm_of_speed(self._baseline)
        if own >= max(speeds) + math.log(WORTH_A_PICK):
            return True
        seconds = self._definition.workload.steps * expected.tokens_of_a_step / math.exp(own)
        return seconds <= SHARE_FOR_BASELINE * sum(record.seconds or 0.0 for record in records)

    def _at_largest_size(
        self, name: str, config: TrainingConfig, memory: MemoryModel
    ) -> TrainingConfig:
        """Returns the configuration with the largest micro batch that is likely to fit."""
        if config == self._baseline or name in self._has_own_size:
            return config
        configs = [replace(config, micro_batch_size=size) for size in self._sizes]
        configs = [one for one in configs if one in self._legal]
        if not configs:
            return config
        candidates = Candidates.of(configs, expected=memory.expected)
        fits = memory.estimate(candidates).probability_of_feasibility
        likely = [one for one, share in zip(configs, fits, strict=True) if share >= LIKELY]
        return likely[0] if likely else config


def is_unlikely(config: TrainingConfig, memory: MemoryModel) -> bool:
    """Returns whether a configuration was predicted, and probably does not fit.

    Not of one that surely does not: it is tried, which records it without training.
    """
    prediction = memory.predictions.get(config.fingerprint)
    if prediction is None or prediction.lower_bound_bytes > memory.room_bytes:
        return False
    candidates = Candidates.of([config], expected=memory.expected)
    return bool(memory.estimate(candidates).probability_of_feasibility[0] < LIKELY)


def _kind(config: TrainingConfig) -> tuple[bool, bool]:
    """Returns whether an adapter is trained, and whether its base weights are quantized."""
    return config.adapter != "none", QUANTIZED_WEIGHTS.get(config.base_weights) in ("nf4", "int8")
