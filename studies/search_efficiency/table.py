"""The recorded table, and an executor that replays its results at their recorded cost.

`Table` reads `table.jsonl.xz`. `ReplayExecutor` stands where the real executor does; each answer
moves its clock by what the same part took when it was recorded, and no time passes otherwise.
"""

import json
import math
import random
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from autotune.spec.attempt import FinishedTrial
from autotune.spec.config import TrainingConfig
from autotune.spec.early_stopping import SETTLED_STEPS, PruningBound, dominated_by
from autotune.spec.parity import ParityTrace
from autotune.spec.prediction import Forecast, Prediction
from autotune.spec.provenance_sentences import with_facts
from autotune.spec.reading import parse
from autotune.spec.result import DeviceInfo, Measurement
from autotune.spec.search_space import SearchSpace
from autotune.spec.space_file import load_space
from autotune.spec.study import StudyDefinition
from autotune.spec.training_request import TrainingRequest
from autotune.spec.workload import MEMORY_STEPS, SHORT_TIMED_STEPS, Workload
from autotune.storage.rows import measurement_from_values
from autotune.study.sampler.ehvi import Point, hypervolume
from autotune.units import format_size
from studies.compressed import read_rows
from studies.search_efficiency.stand_in import VirtualDevice

TABLES = ("gpt", "llama")
"""The table that constants of the sampler were chosen on, and the one that was held out."""

MANY_MEASUREMENTS = 5
"""Of so many measurements of a speed the median is taken, of fewer the least disturbed one."""
PARTS = ("startup", "compilation", "training", "evaluation", "other")


@dataclass(frozen=True)
class TableFiles:
    """The files of one recorded table."""

    table: str

    @property
    def folder(self) -> Path:
        return Path(__file__).parent / self.table

    @property
    def space(self) -> Path:
        return self.folder / "space.toml"

    @property
    def model(self) -> Path:
        """The configuration of the model, where it is not the built-in one."""
        return self.folder / "model.json"

    @property
    def environment(self) -> Path:
        return self.folder / "environment.json"

    @property
    def trainings(self) -> Path:
        return self.folder / "table.jsonl.xz"

    @property
    def speeds(self) -> Path:
        return self.folder / "speeds.jsonl.xz"

    @property
    def storage(self) -> str:
        """URL of the database beside whose work folder the table is recorded."""
        return f"sqlite:///record-{self.table}.db"


@dataclass(frozen=True, kw_only=True)
class Training:
    """One recorded training: what it measured and the seconds of its process."""

    measurement: Measurement
    seconds: float

    @property
    def compile_seconds(self) -> float:
        return (self.measurement.seconds_by_part or {}).get("compilation", 0.0)

    @property
    def evaluation_share_of_compilation(self) -> float:
        """Returns the share of the graph without gradients, which is compiled last.

        A trial that ends before the evaluation does not compile it.
        """
        for_training = self.measurement.compile_seconds
        if for_training is None or self.compile_seconds == 0.0:
            return 0.0
        return max(0.0, 1.0 - for_training / self.compile_seconds)


@dataclass(kw_only=True, eq=False)
class Table:
    """Everything recorded, by fingerprint, and what a search over it is judged by."""

    space: SearchSpace
    workload: Workload
    device: DeviceInfo
    unavailable: dict[str, dict[str, str]]
    configs: dict[str, TrainingConfig] = field(default_factory=dict)
    trainings: dict[str, Training] = field(default_factory=dict)
    repeats: dict[str, list[Training]] = field(default_factory=lambda: defaultdict(list))
    """Of the sample."""
    alone: dict[str, Training] = field(default_factory=dict)
    """The trainings with their speeds as recorded, where `ratios` gave them others."""
    ratios: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    """Speed relative to that of the baseline, both measured in turn, the least disturbed first."""
    predictions: dict[str, tuple[Prediction, float]] = field(default_factory=dict)
    traces: dict[str, tuple[ParityTrace, float]] = field(default_factory=dict)
    _volumes: dict[int, float] = field(default_factory=dict)
    """Hypervolume of all configurations under a cap, by the cap."""

    @classmethod
    def read(cls, name: str = "gpt", *, with_speeds: bool = True) -> "Table":
        """Reads one of TABLES.

        `with_speeds`: use speeds measured in turn with the baseline (`speeds.py`), not alone.
        """
        files = TableFiles(name)
        environment = json.loads(files.environment.read_text())
        table = cls(
            space=load_space(str(files.space)),
            workload=Workload(**environment["workload"]),
            device=parse(DeviceInfo, environment["device"]),
            unavailable=environment["unavailable"],
        )
        for row in read_rows(files.trainings):
            table._add(row)
        if with_speeds:
            table._take_speeds(read_rows(files.speeds))
        return table

    def _add(self, row: dict[str, Any]) -> None:
        config = TrainingConfig(**row["config"])
        name, seconds = config.fingerprint, row["seconds"]
        if row["part"] == "prediction":
            self.predictions[name] = parse(Prediction, row["result"]), seconds
        elif row["part"] == "trace":
            self.traces[name] = parse(ParityTrace, row["result"]), seconds
        else:
            # Recorded by an autotune that named the source of a perplexity in a sentence.
            measurement = measurement_from_values(with_facts(row["result"]))
            training = Training(measurement=measurement, seconds=seconds)
            if row["repeat"]:
                self.repeats[name].append(training)
            else:
                self.configs[name], self.trainings[name] = config, training

    def _take_speeds(self, rows: Sequence[dict[str, Any]]) -> None:
        plain_seconds = statistics.median(undisturbed(row["plain"]) for row in rows)
        for row in sorted(rows, key=disturbance):
            ratio = undisturbed(row["plain"]) / undisturbed(row["subject"])
            self.ratios[TrainingConfig(**row["config"]).fingerprint].append(ratio)
        for name, ratios in self.ratios.items():
            ratio = ratios[0]
            if len(ratios) >= MANY_MEASUREMENTS:
                ratio = statistics.median(ratios)
            speed = ratio * self.workload.tokens_per_step / plain_seconds
            self.alone[name] = self.trainings[name]
            self.trainings[name] = _at_speed(self.trainings[name], speed)

    def definition(
        self, *, cap_bytes: int, sampler: str = "random", seed: int = 0
    ) -> StudyDefinition:
        return StudyDefinition(
            name=f"replay-{sampler}-{seed}",
            workload=self.workload,
            space=self.space,
            device=self.device,
            unavailable=self.unavailable,
            cap_bytes=cap_bytes,
            seed=seed,
            sampler=sampler,
        )

    # -- what a search is judged by ----------------------------------------------------------------

    def point_of(self, config: TrainingConfig) -> Point | None:
        """Returns the recorded objectives of a configuration; None if it did not train."""
        measured = self.trainings[config.fingerprint].measurement
        if measured.outcome != "ok":
            return None
        return Point(
            memory=float(measured.device_bytes or 0),
            speed=measured.tokens_per_second or 0.0,
            perplexity=measured.perplexity or 0.0,
        )

    @cached_property
    def points(self) -> list[Point]:
        """The recorded objectives of all configurations that trained."""
        found = [self.point_of(config) for config in self.configs.values()]
        return [point for point in found if point is not None]

    def cap_bytes(self, share: float) -> int:
        """Returns the cap that this share of the configurations fits."""
        sizes = sorted(point.memory for point in self.points)
        return int(sizes[max(0, round(share * len(sizes)) - 1)]) + 1

    def reference_point(self, cap_bytes: int) -> Point:
        """Returns the cap, 0.9 of the slowest speed, and 1.01 of the worst perplexity."""
        return Point(
            memory=float(cap_bytes),
            speed=0.9 * min(point.speed for point in self.points),
            perplexity=1.01 * max(point.perplexity for point in self.points),
        )

    def hypervolume_of(self, points: Sequence[Point], *, cap_bytes: int) -> float:
        """Returns the hypervolume, relative to that of all configurations under the cap."""
        if cap_bytes not in self._volumes:
            within = [point for point in self.points if point.memory <= cap_bytes]
            reference = self.reference_point(cap_bytes)
            self._volumes[cap_bytes] = hypervolume(within, reference=reference)
        volume = hypervolume(points, reference=self.reference_point(cap_bytes))
        return volume / self._volumes[cap_bytes]

    # -- costs -------------------------------------------------------------------------------------

    def program(self, config: TrainingConfig) -> str | None:
        """Returns the same text for configurations that share an entry of torch.compile's cache."""
        if config.compile == "none":
            return None
        return self.predictions[config.fingerprint][0].plan or config.fingerprint

    @cached_property
    def program_seconds(self) -> dict[str, tuple[float, float]]:
        """The seconds that each program took to compile the first time, and from the cache."""
        seconds: dict[str, list[tuple[bool, float]]] = defaultdict(list)
        hits: dict[str, list[float]] = defaultdict(list)
        for name, training in self.trainings.items():
            program = self.program(self.configs[name])
            if program is not None:
                is_hit = training.measurement.compile_cache == "hit"
                seconds[program].append((is_hit, training.compile_seconds))
                if is_hit:
                    hits[self.configs[name].compile].append(training.compile_seconds)
        found = {}
        for config in self.configs.values():
            program = self.program(config)
            if program is not None:
                known = [took for is_hit, took in seconds[program] if is_hit]
                usual = statistics.median(known or hits[config.compile] or [0.0])
                found[program] = max(took for _, took in seconds[program]), usual
        return found

    def compilation(self, config: TrainingConfig, *, compiled: set[str]) -> tuple[float, bool]:
        """Returns seconds of compiling `config` and whether it was in `compiled`; adds it."""
        program = self.program(config)
        if program is None:
            return 0.0, False
        first, again = self.program_seconds[program]
        was_known = program in compiled
        compiled.add(program)
        return again if was_known else first, was_known

    def exhaustive_seconds(self) -> float:
        """Training every configuration to the end, one after the other, without predictions."""
        compiled: set[str] = set()
        return sum(
            training.seconds
            - training.compile_seconds
            + self.compilation(self.configs[name], compiled=compiled)[0]
            for name, training in self.trainings.items()
        )


def undisturbed(seconds: Sequence[float]) -> float:
    """Mean of the faster half: what disturbs a step only ever makes it slower."""
    return statistics.fmean(sorted(seconds)[: (len(seconds) + 1) // 2])


def disturbance(row: dict[str, Any]) -> float:
    """Interquartile range of the steps over their median; the larger of the two trainings'."""
    quartiles = (statistics.quantiles(row[name], n=4) for name in ("plain", "subject"))
    return max((upper - lower) / middle for lower, middle, upper in quartiles)


def _at_speed(training: Training, tokens_per_second: float) -> Training:
    """The same training as it would have been at that speed: the same steps, the same results."""
    old = training.measurement.tokens_per_second
    if old is None:
        return training
    parts = dict(training.measurement.seconds_by_part or {})
    saved = parts["training"] * (1 - old / tokens_per_second)
    parts["training"] -= saved
    spread = training.measurement.tokens_per_second_spread
    measured = replace(
        training.measurement,
        tokens_per_second=tokens_per_second,
        tokens_per_second_spread=None if spread is None else spread * tokens_per_second / old,
        seconds_by_part=parts,
    )
    return Training(measurement=measured, seconds=training.seconds - saved)


class ReplayExecutor(VirtualDevice):
    """Replaces the executor of a study on the table's workload."""

    def __init__(
        self, table: Table, *, seed: int = 0, ends_early: bool = True, noise: float = 0.0
    ) -> None:
        """`noise`: standard deviation of the logarithm of a speed from one training to another."""
        super().__init__()
        self._table = table
        self._noise = noise
        self._draw = random.Random(7 * seed + 1)
        self._ends_early = ends_early
        self.compiled: set[str] = set()
        self.seconds_by_part.update(dict.fromkeys(("prediction", "comparison", *PARTS), 0.0))
        self.trainings = 0
        self.over_cap = 0
        self.ended_early = 0
        """Trainings that ended with the outcome `dominated`."""
        self.ended_wrongly = 0
        """Those of them that by the table no rival dominates: their first steps were slow by
        chance."""
        self._seed = seed

    def forecast(self, config: TrainingConfig) -> Forecast:
        if config.fingerprint not in self._table.predictions:
            return Forecast(config=config, error="the table does not have it")
        prediction, seconds = self._table.predictions[config.fingerprint]
        self.spend("prediction", seconds)
        return Forecast(config=config, prediction=prediction)

    def trace(self, config: TrainingConfig) -> ParityTrace:
        # Plain trainings were recorded with gradients added up in the dtype of the weights.
        recorded = replace(config, gradient_accumulation_dtype="weights")
        trace, seconds = self._table.traces[recorded.fingerprint]
        self.spend("comparison", seconds)
        return trace

    def train(self, training: TrainingRequest) -> FinishedTrial:
        """Runs as far as the real trial would: to its memory, its first timed steps, or its end."""
        config, enforce_cap = training.config, training.enforce_cap
        recorded = self._table.trainings[config.fingerprint]
        full = self._with_noise(recorded.measurement)
        cap_bytes = training.cap_bytes if enforce_cap else None
        began = self.seconds
        self.trainings += enforce_cap  # the baseline's repeats are no trials
        parts = full.seconds_by_part or {}
        compile_seconds, was_known = self._table.compilation(config, compiled=self.compiled)
        evaluation_compile_seconds = compile_seconds * recorded.evaluation_share_of_compilation
        self.spend("compilation", compile_seconds - evaluation_compile_seconds)
        if config.compile != "none":
            full = replace(
                full,
                compile_cache="hit" if was_known else "miss",
                compile_seconds=compile_seconds - evaluation_compile_seconds,
                seconds_by_part={**parts, "compilation": compile_seconds},
            )
        self.spend("startup", parts["startup"])
        self.spend("other", recorded.seconds - sum(parts.values()))
        measurement = self._outcome(
            full, config, cap_bytes, training.shares_perplexity, training.pruning_bounds
        )
        return FinishedTrial(measurement=measurement, seconds=self.seconds - began)

    def _with_noise(self, full: Measurement) -> Measurement:
        if full.tokens_per_second is None or not self._noise:
            return full
        speed = full.tokens_per_second * math.exp(self._draw.gauss(0.0, self._noise))
        return replace(full, tokens_per_second=speed)

    def _outcome(
        self,
        full: Measurement,
        config: TrainingConfig,
        cap_bytes: int | None,
        shares_perplexity: bool,
        pruning_bounds: Sequence[PruningBound],
    ) -> Measurement:
        workload = self._table.workload
        parts = full.seconds_by_part or {}
        if (
            full.tokens_per_second is None
            or full.device_bytes is None
            or full.peak_memory_bytes is None
        ):
            self.spend("training", parts.get("training", 0.0))
            return full
        step_seconds = workload.tokens_per_step / full.tokens_per_second
        before_timing = parts["training"] - step_seconds * (
            workload.steps - workload.warmup_steps - MEMORY_STEPS
        )
        self.spend("training", max(0.0, before_timing))
        if cap_bytes is not None and full.device_bytes > cap_bytes:
            self.over_cap += 1
            return _without_speed(full, cap_bytes)
        speed_so_far = self._speed_of_a_few_steps(full, config)
        rival = dominated_by(
            pruning_bounds, peak_memory_bytes=full.peak_memory_bytes, tokens_per_second=speed_so_far
        )
        if rival is not None and self._ends_early:
            self.spend("training", SETTLED_STEPS * step_seconds)
            self.ended_early += 1
            if not self._is_dominated(config, pruning_bounds):
                self.ended_wrongly += 1
            return replace(
                full,
                outcome="dominated",
                message="",
                tokens_per_second=speed_so_far,
                perplexity=None,
                perplexity_source=None,
                final_loss=None,
            )
        if config.compile != "none":
            self.spend("compilation", parts["compilation"] - (full.compile_seconds or 0.0))
        evaluation = parts["evaluation"]
        left = workload.steps - workload.warmup_steps - MEMORY_STEPS
        if shares_perplexity:
            self.spend("training", min(left, SHORT_TIMED_STEPS) * step_seconds)
            self.spend(
                "evaluation", evaluation * config.micro_batch_size / workload.evaluation_sequences
            )
            return replace(full, perplexity=None, perplexity_source=None, final_loss=None)
        self.spend("training", left * step_seconds)
        self.spend("evaluation", evaluation)
        return full

    def _is_dominated(self, config: TrainingConfig, pruning_bounds: Sequence[PruningBound]) -> bool:
        """Returns whether by the table a rival is faster, by whatever little, in no more memory."""
        recorded = self._table.trainings[config.fingerprint].measurement
        assert recorded.peak_memory_bytes is not None
        assert recorded.tokens_per_second is not None
        for rival in pruning_bounds:
            is_faster = rival.tokens_per_second > recorded.tokens_per_second
            if is_faster and rival.peak_memory_bytes <= recorded.peak_memory_bytes:
                return True
        return False

    def _speed_of_a_few_steps(self, full: Measurement, config: TrainingConfig) -> float:
        """Returns the tokens per second that the trainer would see when it looks for a rival.

        This is the median of SETTLED_STEPS draws from a normal distribution around the training's
        speed. The recorded spread is half the interquartile range of its steps, which is 0.674
        standard deviations. The draws belong to the seed and the configuration, so that a search
        that is continued sees what an uninterrupted one sees.
        """
        assert full.tokens_per_second is not None
        deviation = (full.tokens_per_second_spread or 0.0) / statistics.NormalDist().inv_cdf(0.75)
        noise = random.Random(f"{self._seed} {config.fingerprint}")
        draws = [noise.gauss(full.tokens_per_second, deviation) for _ in range(SETTLED_STEPS)]
        return max(1.0, statistics.median(draws))


def _without_speed(full: Measurement, cap_bytes: int) -> Measurement:
    return replace(
        full,
        outcome="over_cap",
        message=f"needs {format_size(full.device_bytes or 0)} of {format_size(cap_bytes)}",
        tokens_per_second=None,
        tokens_per_second_spread=None,
        perplexity=None,
        perplexity_source=None,
        final_loss=None,
    )
