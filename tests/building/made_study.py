"""Makes a synthetic study of thousands of trials: the default search space, computed measurements.

For measurements that depend on the number of trials only. Sizes and speeds have the shape of real
ones: each technique multiplies memory and speed, some pairs do more, and noise below a percent
comes from the fingerprint of the configuration, so that no two trials are equal and the trials are
the same each time.
"""

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass

from autotune.spec.config import TrainingConfig
from autotune.spec.prediction import Forecast, Holder, Prediction
from autotune.spec.provenance import MEASURED, PerplexitySource, TrialReference
from autotune.spec.result import DeviceInfo, Measurement, TrialRecord
from autotune.spec.space_file import load_space
from autotune.spec.study import StudyDefinition
from autotune.spec.workload import make_workload
from autotune.storage.store import StudyStore
from autotune.units import format_size

GIB = 1024**3
CAP_BYTES = 6 * GIB
CONTEXT_BYTES = GIB // 2

_IS_HALF = ("bf16-true", "bf16-stochastic")
_SPEED_OF_PRECISION = {
    "fp32": 1.0,
    "tf32": 1.7,
    "fp16-mixed": 2.3,
    "bf16-mixed": 2.4,
    "fp8": 2.7,
    "bf16-true": 2.6,
}
_SAVED_BY_CHECKPOINTING = {
    "attention": 0.8,
    "selective": 0.55,
    "every-4": 0.8,
    "every-2": 0.6,
    "block": 0.25,
}
_SLOWED_BY_CHECKPOINTING = {
    "attention": 0.95,
    "selective": 0.92,
    "every-4": 0.92,
    "every-2": 0.86,
    "block": 0.76,
}
_SPEED_OF_FUSION = {"none": 0.85, "foreach": 1.0, "kernel": 1.04, "backward": 0.9}
_PERPLEXITY_OF_PRECISION = {
    "fp32": 24.0,
    "tf32": 24.02,
    "bf16-true": 25.6,
    "bf16-stochastic": 24.4,
    "fp8": 24.9,
}


def definition(name: str, *, sampler: str = "ehvi") -> StudyDefinition:
    """Returns a study of the default search space: 21,648 legal configurations."""
    versions = {
        "python": "3.11",
        "torch": "2.13.0",
        "autotune": "0",
        "cuda": "13.0",
        "driver": "580",
    }
    return StudyDefinition(
        name=name,
        workload=make_workload("cuda", {"global_batch": 8, "text_sha256": "f" * 64}),
        space=load_space("default"),
        device=DeviceInfo(
            device="cuda:0",
            name="a device of no maker",
            total_memory_bytes=24 * GIB,
            versions=versions,
        ),
        unavailable={},
        cap_bytes=CAP_BYTES,
        seed=7,
        sampler=sampler,
    )


@dataclass(frozen=True, kw_only=True)
class Made:
    records: tuple[TrialRecord, ...]
    forecasts: tuple[Forecast, ...]
    """One for each record, as if no prediction had been spared."""


def make(study: StudyDefinition, *, trials: int) -> Made:
    """The baseline, then configurations drawn from the space; all different."""
    baseline = study.baseline_config()
    others = [config for config in study.legal_space().configurations() if config != baseline]
    random.Random(study.seed).shuffle(others)
    configs = [baseline, *others[: trials - 1]]
    if len(configs) < trials:
        raise SystemExit(f"the space has {len(configs):,} configurations, {trials:,} are too many")
    return Made(records=tuple(_records(configs)), forecasts=tuple(map(forecast, configs)))


def write(url: str, study: StudyDefinition, made: Made) -> None:
    """As a new study takes over what earlier ones know: all at once."""
    store = StudyStore(url, create=True)
    try:
        store.create_study(
            study, trials_wanted=len(made.records), records=made.records, forecasts=made.forecasts
        )
    finally:
        store.close()


def _records(configs: list[TrainingConfig]) -> Iterator[TrialRecord]:
    trained_for: dict[tuple[str, ...], int] = {}
    for number, config in enumerate(configs):
        made = record(config, number=number, trained_for=trained_for.get(config.numerics_class))
        if made.perplexity is not None:
            trained_for.setdefault(config.numerics_class, number)
        yield made


def record(config: TrainingConfig, *, number: int, trained_for: int | None) -> TrialRecord:
    measured = measure(config, trained_for=trained_for)
    predicted = forecast(config).prediction
    return TrialRecord(
        **vars(measured),
        number=number,
        config=config,
        name="baseline" if number == 0 else None,
        feasible=measured.outcome == "ok",
        predicted_peak_memory_bytes=None if predicted is None else predicted.peak_memory_bytes,
        seconds=20.0,
    )


# -- the formula -----------------------------------------------------------------------------------


def measure(config: TrainingConfig, *, trained_for: int | None = None) -> Measurement:
    """`trained_for`: the trial whose perplexity this one has; None: it is trained for its own."""
    peak, noise = peak_bytes(config), _noise(config)
    device_bytes = int(1.04 * peak) + CONTEXT_BYTES
    known = {
        "peak_memory_bytes": peak,
        "peak_reserved_bytes": int(1.04 * peak),
        "device_bytes": device_bytes,
        "context_bytes": CONTEXT_BYTES,
        "alloc_retries": 0,
        "peak_phase": "backward",
        "bytes_by_kind": {"parameters": peak // 8, "buffers": 32768, "optimizer_state": peak // 4},
        "parity": "same",
        "parity_message": f"at most, the gradient of rest is {10 * noise:.2f} % off at step 1 "
        "and 3 % allowed",
        "compile_seconds": None if config.compile == "none" else 20 + 100 * noise,
        "compile_cache": None if config.compile == "none" else "miss",
        "startup_seconds": 3.0 + noise,
        "seconds_by_part": {
            "startup": 3.0 + noise,
            "compilation": 4.0,
            "training": 9.0,
            "evaluation": 1.0,
        },
    }
    if noise < 0.01:
        return Measurement(
            outcome="crashed", message="RuntimeError: no kernel was found to execute the operation"
        )
    if device_bytes > 1.5 * CAP_BYTES:
        tried = f"tried to allocate {format_size(peak // 9)} of {format_size(CAP_BYTES)}"
        return Measurement(outcome="out_of_memory", message=tried, requested_bytes=peak // 9)
    if device_bytes > CAP_BYTES:
        over = f"needs {format_size(device_bytes)} of {format_size(CAP_BYTES)}"
        return Measurement(outcome="over_cap", message=over, **known)
    speed = tokens_per_second(config)
    known |= {"tokens_per_second": speed, "tokens_per_second_spread": 0.02 * speed}
    if noise > 0.85:
        return Measurement(outcome="dominated", **known)
    perplexity = _PERPLEXITY_OF_PRECISION.get(config.precision, 24.1)
    source = MEASURED
    if trained_for is not None:
        source = PerplexitySource.shared_with(TrialReference(number=trained_for))
    return Measurement(
        outcome="ok",
        perplexity=perplexity,
        perplexity_source=source,
        bits_per_byte=4.7,
        final_loss=math.log(perplexity),
        **known,
    )


def peak_bytes(config: TrainingConfig) -> int:
    half = config.precision in _IS_HALF
    weights = 0.5 * GIB * (0.5 if half else 1.0)
    gradients = weights * (0.1 if config.optimizer_fusion == "backward" else 1.0)
    temporaries = weights if config.optimizer_fusion == "foreach" else 0.1 * weights
    saved = _SAVED_BY_CHECKPOINTING.get(
        config.checkpointing, 1.0 if config.checkpointing == "none" else 0.3
    )
    saved *= 0.45 if config.precision not in ("fp32", "tf32") else 1.0
    saved *= {"none": 1.0, "block": 0.85}.get(config.compile, 0.8)
    saved *= 0.3 + 0.7 * config.memory_budget
    saved *= 0.5 if config.activation_offload == "cpu" else 1.0
    activations = 1.6 * GIB * config.micro_batch_size * saved
    logits = 0.15 * GIB * config.micro_batch_size * (0.2 if config.loss == "chunked" else 1.0)
    return int(
        (3 * weights + gradients + max(temporaries, activations + logits))
        * (1 + 0.002 * _noise(config))
    )


def tokens_per_second(config: TrainingConfig) -> float:
    speed = 9000.0 * _SPEED_OF_PRECISION.get(config.precision, 2.2)
    speed *= _SLOWED_BY_CHECKPOINTING.get(
        config.checkpointing, 1.0 if config.checkpointing == "none" else 0.78
    )
    speed *= {"none": 1.0, "block": 1.25, "model": 1.32}[config.compile] * (
        0.8 + 0.2 * config.memory_budget
    )
    speed *= _SPEED_OF_FUSION[config.optimizer_fusion] * config.micro_batch_size**0.12
    speed *= 0.7 if config.activation_offload == "cpu" else 1.0
    speed *= (0.98 if config.loss == "chunked" else 1.0) * (
        1.01 if config.allocator == "expandable" else 1.0
    )
    return speed * (1 + 0.03 * (_noise(config) - 0.5))


def forecast(config: TrainingConfig) -> Forecast:
    peak = int(peak_bytes(config) * (0.995 + 0.01 * _noise(config)))
    part = peak // 4
    prediction = Prediction(
        device="cuda",
        fake_device="cpu",
        peak_memory_bytes=peak,
        upper_bound_bytes=int(1.03 * peak),
        lower_bound_bytes=int(0.97 * peak),
        phase="backward",
        module="blocks.*",
        operator="aten.mm",
        bytes_by_category={
            "parameters": part,
            "optimizer_state": part,
            "activations": part,
            "temporaries": part,
        },
        parameters=124_000_000,
        holders=tuple(
            Holder(
                category="activations",
                module=f"blocks.*.{name}",
                operator="aten.mm",
                count=12,
                size_bytes=part,
            )
            for name in ("attention.in", "attention.out", "mlp.in", "mlp.out", "norm")
        ),
        plan=None if config.compile == "none" else config.fingerprint,
        seconds=2.0,
    )
    return Forecast(config=config, prediction=prediction)


def _noise(config: TrainingConfig) -> float:
    """From 0 to 1."""
    return int(config.fingerprint, 16) / 16**12
