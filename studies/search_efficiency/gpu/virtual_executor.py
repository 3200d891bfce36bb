"""Stands where the executor of a study does, and replays a table in virtual time."""

import math
import random
from typing import Any

from autotune.spec.attempt import FinishedTrial
from autotune.spec.config import TrainingConfig
from autotune.spec.early_stopping import SETTLED_STEPS, dominated_by
from autotune.spec.parity import ParityTrace
from autotune.spec.prediction import Forecast
from autotune.spec.provenance import MEASURED
from autotune.spec.result import Measurement
from autotune.spec.training_request import TrainingRequest
from autotune.spec.workload import MEMORY_STEPS, SHORT_TIMED_STEPS
from studies.search_efficiency.gpu.device_table import MODEL_FLOPS, TOKENS, DeviceTable
from studies.search_efficiency.stand_in import VirtualDevice

STARTUP_SECONDS, PARITY_SECONDS, PROCESS_SECONDS, FIRST_STEP_SECONDS = 0.45, 0.33, 0.15, 0.3
PLAIN_TRAINING_SECONDS = 1.5
"""Of the training that parity is compared with, without its three steps."""
PREDICTION_SECONDS = {"none": 1.2, "block": 2.5, "model": 10.0}
PREDICTION_SECONDS_OF_BUDGETS = {"block": 3.2, "model": 28.0}
FIRST_PREDICTION_SECONDS = 5.0
"""More, for the first of a search."""
EVALUATION_STEPS = 1.2
SPREAD_WITHIN_A_RUN = 3e-4


class VirtualExecutor(VirtualDevice):
    """Answers for one search with what the table has."""

    def __init__(self, table: DeviceTable, *, seed: int = 0) -> None:
        super().__init__()
        self._table = table
        self._draw = random.Random(7 * seed + 1)
        self.compiled: set[Any] = set()
        self.traced_at: dict[str, float] = {}
        self.over_cap = 0
        self.ended_early = 0
        self.predictions = 0

    def seconds_of_cache(self, program: Any) -> float:
        """Returns what a program spares that is compiled already."""
        kind = "model" if "model" in str(program) else "block"
        assumed = self._table.assumptions
        return assumed.compile_seconds[kind] - assumed.cached_compile_seconds[kind]

    def forecast(self, config: TrainingConfig) -> Forecast:
        """Predict a configuration."""
        seconds = PREDICTION_SECONDS[config.compile]
        if config.memory_budget < 1:
            seconds = PREDICTION_SECONDS_OF_BUDGETS[config.compile]
        first = 0.0 if self.predictions else FIRST_PREDICTION_SECONDS
        self.spend("prediction", seconds + first)
        self.predictions += 1
        return Forecast(config=config, prediction=self._table.prediction(config))

    def trace(self, config: TrainingConfig) -> ParityTrace:
        """Returns the first steps of the plain training that a trial is compared with."""
        table = self._table
        row = table.row.get(config, table.row[table.baseline])
        steps = 3 * float(table.step_seconds[row])
        self.spend("comparison", PLAIN_TRAINING_SECONDS + steps)
        self.traced_at[config.fingerprint] = self.seconds
        return ParityTrace(
            losses=(1.0, 1.0, 1.0),
            gradient_norms={},
            gradient_projections={},
            draws_random_numbers=False,
        )

    def train(self, training: TrainingRequest) -> FinishedTrial:
        """Run as far as the real trial would: to its memory, its first timed steps, or its end."""
        config, shares_perplexity = training.config, training.shares_perplexity
        table = self._table
        assumed, row = table.assumptions, table.row[config]
        began, before = self.seconds, dict(self.seconds_by_part)
        speed = float(table.speed[row]) * math.exp(self._draw.gauss(0.0, assumed.noise))
        step_seconds = TOKENS / speed
        compile_seconds = self._compile_seconds(config)
        of_evaluation = assumed.evaluation_share[config.compile] * compile_seconds
        self.spend("startup", STARTUP_SECONDS)
        self.spend("parity", PARITY_SECONDS)
        self.spend("process", PROCESS_SECONDS)
        self.spend("compilation", compile_seconds - of_evaluation)
        steps_before = training.workload.warmup_steps + MEMORY_STEPS
        self.spend("training", FIRST_STEP_SECONDS + steps_before * step_seconds)

        peak, device_bytes = int(table.peak_bytes[row]), int(table.device_bytes[row])
        measured: dict[str, Any] = {
            "tokens_per_second": speed,
            "tokens_per_second_spread": SPREAD_WITHIN_A_RUN * speed,
        }
        if training.enforce_cap and device_bytes > training.cap_bytes:
            self.over_cap += 1
            outcome, measured = "over_cap", {}
        elif dominated_by(training.pruning_bounds, peak_memory_bytes=peak, tokens_per_second=speed):
            self.ended_early += 1
            outcome = "dominated"
            self.spend("training", SETTLED_STEPS * step_seconds)
        else:
            outcome = "ok"
            steps = training.workload.steps - steps_before
            steps = SHORT_TIMED_STEPS if shares_perplexity else steps
            self.spend("training", steps * step_seconds)
            self.spend("compilation", of_evaluation)
            evaluation = 0.1 if shares_perplexity else 0.05 + EVALUATION_STEPS * step_seconds
            self.spend("evaluation", evaluation)
            if not shares_perplexity:
                measured["perplexity"] = float(table.perplexity[row])
                measured["perplexity_source"] = MEASURED
                measured["final_loss"] = 3.0
        parts = ("startup", "compilation", "training", "evaluation")
        measurement = Measurement(
            outcome=outcome,
            peak_memory_bytes=peak,
            peak_reserved_bytes=peak,
            device_bytes=device_bytes,
            context_bytes=table.card.context_bytes,
            peak_phase="backward",
            parity="same",
            compile_seconds=compile_seconds or None,
            startup_seconds=STARTUP_SECONDS,
            seconds_by_part={
                part: self.seconds_by_part[part] - before.get(part, 0.0) for part in parts
            },
            model_flops_per_token=MODEL_FLOPS,
            recomputed_flops_per_token=float(table.flops[row]) - MODEL_FLOPS,
            **measured,
        )
        return FinishedTrial(measurement=measurement, seconds=self.seconds - began)

    def _compile_seconds(self, config: TrainingConfig) -> float:
        program = self._table.program(config)
        if program is None:
            return 0.0
        assumed = self._table.assumptions
        seconds = assumed.compile_seconds[config.compile]
        seconds *= assumed.compile_fp8 if config.precision == "fp8" else 1.0
        if program in self.compiled:
            seconds = assumed.cached_compile_seconds[config.compile]
        self.compiled.add(program)
        return seconds
