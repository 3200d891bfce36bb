"""Runs one real, short trial of a configuration, to compare with its prediction."""

from dataclasses import replace
from pathlib import Path

from autotune.execution.local import LocalExecutor
from autotune.execution.prepared_folder import PREPARED
from autotune.execution.tasks import Prepare, Train
from autotune.spec.config import TrainingConfig
from autotune.spec.learning_rates import rate_name
from autotune.spec.prediction import Prediction
from autotune.spec.result import DeviceInfo, Measurement
from autotune.spec.search_space import SearchSpace
from autotune.spec.study import StudyDefinition
from autotune.spec.workload import MEMORY_STEPS, MINIMUM_TIMED_STEPS, Workload
from autotune.study.request import SearchRequest
from autotune.units import format_size

_WARMUP_STEPS = 1
_NO_LEARNING = 1e-9
"""Learning rate of the trial: memory does not depend on it, and at such a small one a model of any
depth stays finite for the few steps."""
_FP32_BYTES = 4


def why_not(
    prediction: Prediction, *, needed_bytes: int, device: DeviceInfo, host: DeviceInfo
) -> str:
    """Returns why this machine cannot train what was predicted; empty if it can."""
    if needed_bytes > device.total_memory_bytes:
        return (
            f"{device.device} has {format_size(device.total_memory_bytes)} in all, less than the "
            f"{format_size(needed_bytes)} that it would need at most"
        )
    weights_bytes = _FP32_BYTES * prediction.parameters
    if weights_bytes > host.total_memory_bytes:
        return (
            f"its initial weights, {format_size(weights_bytes)}, are drawn on the host, which has "
            f"{format_size(host.total_memory_bytes)}"
        )
    return ""


def confirm(
    workload: Workload,
    config: TrainingConfig,
    *,
    executor: LocalExecutor,
    device: DeviceInfo,
    cap_bytes: int,
    folder: Path,
) -> Measurement:
    """Train the fewest steps that show the peak, with the cap enforced; files go to `folder`.

    Raises InvalidInput.
    """
    executor.use_devices_from(
        device, count=workload.devices_per_trial, nodes=workload.nodes_per_trial
    )
    short = replace(
        workload,
        warmup_steps=_WARMUP_STEPS,
        steps=_WARMUP_STEPS + MEMORY_STEPS + MINIMUM_TIMED_STEPS,
        evaluation_sequences=1,
        learning_rates={
            **workload.learning_rates,
            rate_name(config.optimizer, config.adapter): _NO_LEARNING,
        },
    )
    executor.run(Prepare(workload=short, folder=(folder / PREPARED).absolute()))
    device, _ = executor.probe(device.device, {})  # with the size of its context
    definition = StudyDefinition(
        name="fit",
        workload=short,
        space=SearchSpace(name="fit", techniques={}),
        device=device,
        unavailable={},
        cap_bytes=cap_bytes,
        seed=short.seed,
        sampler="grid",
    )
    with executor.slot_on(device):
        training = executor.training(definition, config, study_folder=folder, enforce_cap=True)
        limits = SearchRequest().trial_options.time_limits()
        future = executor.call(Train(training=training), log_name="confirm", limits=limits)
        return future.result().measurement
