"""Compares predicted and measured peak memory of every rank of trainings on several processes.

    python studies/predictor_accuracy/devices.py [--models gpt ...] [--out FILE]
    python studies/predictor_accuracy/devices.py --read studies/predictor_accuracy/devices.json.xz

The processes are ranks of a CPU that communicate by gloo, with the same code as in a search: one
prediction for each distinct rank, and one short real training. Writes machine, versions, date and
every cell to `--out`, and resumes where such a file ends. Prints the tables of the README.
"""

import argparse
import sys
import tempfile
from collections.abc import Iterator
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from autotune.errors import AutotuneError
from autotune.execution.local import LocalExecutor
from autotune.execution.server.limits import time_limits
from autotune.execution.tasks import Prepare, Train
from autotune.spec.config import TrainingConfig
from autotune.spec.result import DeviceInfo
from autotune.spec.search_space import SearchSpace
from autotune.spec.study import StudyDefinition
from autotune.spec.workload import Workload, make_workload
from autotune.study.prediction.predictions import Forecaster
from studies.compressed import read_json, write_json

HERE = Path(__file__).parent
GOAL = 0.005

RUN = {
    "global_batch": 8,
    "sequence_length": 32,
    "steps": 6,
    "warmup_steps": 1,
    "evaluation_sequences": 8,
}
OWN_SIZES = {"layers": 3, "width": 60, "heads": 6, "vocab_size": 257}
MODELS: dict[str, dict[str, Any]] = {
    "gpt": OWN_SIZES,
    "deep-one": {"model": "deep-one", **OWN_SIZES},
    "llama": {"model": f"{HERE}/models/llama_uneven.json"},
    "qwen3": {"model": f"{HERE}/models/qwen3_uneven.json"},
    "gpt2": {"model": f"{HERE}/models/gpt2_uneven.json"},
}
"""Neither 2 nor 4 divides the vocabularies, 4 not the inner widths, and 4 not GPT-2's widths."""
SHARDINGS = ("ddp", "zero1", "zero2", "zero3")
CHOICES: dict[int, tuple[dict[str, Any], ...]] = {
    2: ({"tensor_parallel": 2}, *({"sharding": sharding} for sharding in SHARDINGS)),
    4: (
        {"sharding": "zero3", "tensor_parallel": 2},
        {"sharding": "ddp", "tensor_parallel": 2},
        {"sharding": "hsdp", "sharding_group": 2},
        *({"sharding": sharding} for sharding in reversed(SHARDINGS)),
    ),
}
"""By ranks."""


def config_of(choices: dict[str, Any], *, ranks: int) -> TrainingConfig:
    replicas = ranks // choices.get("tensor_parallel", 1)
    return TrainingConfig(micro_batch_size=RUN["global_batch"] // replicas, **choices)


def cells() -> Iterator[tuple[str, int, dict[str, Any]]]:
    for ranks, of_ranks in CHOICES.items():
        for choices in of_ranks:
            for model in MODELS:
                yield model, ranks, choices


# -- one cell --------------------------------------------------------------------------------------


def compare(
    config: TrainingConfig, workload: Workload, *, executor: LocalExecutor, device: DeviceInfo
) -> dict[str, Any]:
    """Returns what was predicted and measured of each rank, or why there is no number."""
    forecaster = Forecaster(executor=executor, workload=workload, device_type="cpu")
    try:
        prediction = forecaster.predict(config)
    except AutotuneError as error:
        return {"rejected": str(error)}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        executor.run(Prepare(workload=workload, folder=folder / "prepared"))
        definition = StudyDefinition(
            name="accuracy",
            workload=workload,
            space=SearchSpace(name="none", techniques={}),
            device=device,
            unavailable={},
            cap_bytes=device.total_memory_bytes,
            seed=0,
            sampler="random",
        )
        training = executor.training(definition, config, study_folder=folder, enforce_cap=False)
        finished = executor.run(Train(training=training), limits=time_limits(600.0))
    measurement = finished.measurement
    if measurement.outcome != "ok":
        return {"outcome": measurement.outcome, "message": measurement.message}
    return {
        "predicted_bytes_by_rank": prediction.peak_memory_bytes_by_rank,
        "measured_bytes_by_rank": measurement.peak_memory_bytes_by_rank,
        "distinct_ranks": prediction.distinct_ranks,
        "prediction_seconds": round(prediction.seconds, 1),
        "training_seconds": round(finished.seconds, 1),
    }


def measure(*, models: list[str], file: Path) -> dict[str, Any]:
    """Measure what `file` does not hold yet, and write it after every cell."""
    results: dict[str, Any] = {"models": about(), "runs": [], "cells": []}
    if file.exists():
        results = read_json(file)
    known = {(cell["model"], cell["ranks"], cell["configuration"]) for cell in results["cells"]}
    with tempfile.TemporaryDirectory() as temporary, LocalExecutor(Path(temporary)) as executor:
        device, _ = executor.probe("cpu", {})
        results["runs"].append(run_now(device))
        for model, ranks, choices in cells():
            config = config_of(choices, ranks=ranks)
            if model not in models or (model, ranks, config.describe()) in known:
                continue
            workload = make_workload("cpu", {**RUN, **MODELS[model], "devices_per_trial": ranks})
            cell = {
                "model": model,
                "ranks": ranks,
                "configuration": config.describe(),
                "choices": choices,
                **compare(config, workload, executor=executor, device=device),
                "run": len(results["runs"]),
            }
            results["cells"].append(cell)
            write_json(file, results)
            print(model, "|", ranks, "|", cell["configuration"], "|", told(cell), file=sys.stderr)
    return results


def about() -> dict[str, Any]:
    return {
        name: {**sizes, "model": Path(sizes.get("model", "gpt")).name}
        for name, sizes in MODELS.items()
    }


def run_now(device: DeviceInfo) -> dict[str, Any]:
    """One call of this script: cells name it by its number, from 1."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join(["python", "studies/predictor_accuracy/devices.py", *sys.argv[1:]]),
        "device": device.name,
        "versions": {**device.versions, "transformers": version("transformers")},
    }


# -- what it says ----------------------------------------------------------------------------------


def largest_error(cell: dict[str, Any]) -> float:
    """Returns the error of the rank that was predicted worst, positive where it needed more."""
    errors = [
        (measured - predicted) / measured
        for measured, predicted in zip(
            cell["measured_bytes_by_rank"], cell["predicted_bytes_by_rank"], strict=True
        )
    ]
    return max(errors, key=abs)


def told(cell: dict[str, Any]) -> str:
    if "rejected" in cell:
        return "rejected"
    if "outcome" in cell:
        return str(cell["outcome"])
    error = largest_error(cell)
    return "0" if error == 0 else f"{error:+.4%}"


def table(results: dict[str, Any]) -> Iterator[str]:
    """A row for each number of ranks and choice, a column for each model."""
    found = {(c["ranks"], str(c["choices"]), c["model"]): c for c in results["cells"]}
    yield f"| ranks | choices | {' | '.join(MODELS)} |"
    yield "|---|---|" + "---|" * len(MODELS)
    for ranks, of_ranks in CHOICES.items():
        for choices in of_ranks:
            row = [found.get((ranks, str(choices), model)) for model in MODELS]
            values = ["" if cell is None else told(cell) for cell in row]
            name = ", ".join(f"{key} {value}" for key, value in choices.items())
            yield f"| {ranks} | {name.replace('_', '-')} | {' | '.join(values)} |"


def summary(results: dict[str, Any]) -> Iterator[str]:
    compared = [cell for cell in results["cells"] if "measured_bytes_by_rank" in cell]
    yield f"{len(compared)} cells compared, of {sum(1 for _ in cells())}"
    over = [cell for cell in compared if abs(largest_error(cell)) > GOAL]
    yield f"{len(over)} over {GOAL:.1%}"
    for cell in over:
        yield f"  {cell['model']}, {cell['ranks']} ranks, {cell['configuration']}: {told(cell)}"
    for cell in results["cells"]:
        reason = cell.get("rejected") or cell.get("message")
        if reason:
            yield f"  {cell['model']}, {cell['ranks']} ranks, {cell['configuration']}: {reason}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--read", type=Path, help="results to summarize instead of measuring")
    parser.add_argument("--out", type=Path, default=HERE / "devices.json.xz")
    arguments = parser.parse_args()
    if arguments.read:
        results = read_json(arguments.read)
    else:
        results = measure(models=arguments.models, file=arguments.out)
    print(*table(results), "", *summary(results), sep="\n")


if __name__ == "__main__":
    main()
