"""Compares predicted and measured peak memory of the same workloads and configurations.

    python studies/predictor_accuracy/measure.py [--quick] [--device cpu|cuda:0] [--out FILE]
    python studies/predictor_accuracy/measure.py --adapters [--out FILE]
    python studies/predictor_accuracy/measure.py --read studies/predictor_accuracy/results.json.xz

Trainings on several devices are compared by `devices.py`.
With `--adapters`: LoRA and DoRA beside frozen weights in every format, on five shapes of models.
A pair is one prediction on fake tensors and one short real training, each in a separate process and
by the same code as in a search. Writes machine, versions, date and every pair to `--out`, and
resumes where such a file ends. Prints a summary and the proposed bounds for
`autotune/predictor/accuracy.py`; with `--read`, from existing results.
"""

import argparse
import hashlib
import itertools
import random
import statistics
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, get_args

from autotune.errors import AutotuneError
from autotune.execution.local import LocalExecutor
from autotune.execution.server.limits import time_limits
from autotune.execution.tasks import Prepare, Train
from autotune.predictor.accuracy import Group, PredictionError
from autotune.predictor.accuracy import group_of as group_of_bound
from autotune.spec.config import QUANTIZED_WEIGHTS, SEARCHED, LegalityContext, TrainingConfig
from autotune.spec.result import DeviceInfo
from autotune.spec.search_space import DIVISORS, LegalSpace, SearchSpace, bind_space
from autotune.spec.study import StudyDefinition
from autotune.spec.workload import make_workload
from autotune.study.prediction.predictions import Forecaster
from studies.compressed import read_json, write_json

HERE = Path(__file__).parent
MIB = 1024**2

SHORTEST = {"global_batch": 4, "steps": 7, "warmup_steps": 2, "evaluation_sequences": 4}
MODELS: dict[str, dict[str, Any]] = {
    "gpt": {"layers": 3, "width": 128, "heads": 4, "sequence_length": 128},
    "gpt wide vocabulary": {
        "layers": 2,
        "width": 64,
        "heads": 2,
        "vocab_size": 8192,
        "sequence_length": 128,
    },
    "gpt deep": {"layers": 16, "width": 64, "heads": 4, "sequence_length": 64},
    "gpt long": {"layers": 2, "width": 96, "heads": 3, "sequence_length": 768},
    "llama": {"model": f"{HERE}/models/llama.json", "sequence_length": 128},
    "gpt2": {"model": f"{HERE}/models/gpt2.json", "sequence_length": 128},
    "gpt2 dropout": {"model": f"{HERE}/models/gpt2_dropout.json", "sequence_length": 128},
    "mixtral": {"model": f"{HERE}/models/mixtral.json", "sequence_length": 128},
}
ADAPTED_MODELS: dict[str, dict[str, Any]] = {
    "llama, grouped": {"model": f"{HERE}/models/llama_grouped.json", "sequence_length": 128},
    "qwen3": {"model": f"{HERE}/models/qwen3.json", "sequence_length": 128},
    "gpt2, wide": {"model": f"{HERE}/models/gpt2_wide.json", "sequence_length": 128},
    "gpt-neox": {"model": f"{HERE}/models/gpt_neox.json", "sequence_length": 128},
    "gemma3": {"model": f"{HERE}/models/gemma3.json", "sequence_length": 128},
}
"""Shapes of Hugging Face models, 4 to 6 layers of width 256 to 384, for `--adapters`."""
ADAPTED: tuple[dict[str, Any], ...] = (
    {"adapter": "lora", "precision": "fp32", "micro_batch_size": 4},
    {"adapter": "dora", "precision": "fp32", "checkpointing": "block", "micro_batch_size": 2},
    {"adapter": "lora", "precision": "bf16-true", "micro_batch_size": 2},
    {"adapter": "dora", "precision": "bf16-true", "micro_batch_size": 2},
    {"adapter": "lora", "precision": "bf16-true", "checkpointing": "block", "micro_batch_size": 1},
    {"adapter": "dora", "precision": "bf16-true", "checkpointing": "block", "micro_batch_size": 1},
    {"adapter": "lora", "precision": "bf16-mixed", "base_weights": "bf16", "micro_batch_size": 4},
    {
        "adapter": "dora",
        "precision": "bf16-mixed",
        "base_weights": "bf16",
        "checkpointing": "block",
        "micro_batch_size": 1,
    },
    {
        "adapter": "lora",
        "precision": "bf16-mixed",
        "base_weights": "int8",
        "checkpointing": "block",
        "micro_batch_size": 2,
    },
    {
        "adapter": "dora",
        "precision": "bf16-true",
        "base_weights": "int8",
        "checkpointing": "block",
        "micro_batch_size": 1,
    },
    {"adapter": "lora", "precision": "bf16-true", "base_weights": "fp8", "micro_batch_size": 2},
    {
        "adapter": "dora",
        "precision": "bf16-mixed",
        "base_weights": "fp8",
        "checkpointing": "block",
        "micro_batch_size": 1,
    },
    {
        "adapter": "lora",
        "precision": "bf16-true",
        "base_weights": "nf4",
        "checkpointing": "block",
        "optimizer": "paged-adamw-8bit",
        "micro_batch_size": 1,
    },
    {
        "adapter": "dora",
        "precision": "bf16-true",
        "base_weights": "nf4",
        "checkpointing": "block",
        "micro_batch_size": 2,
    },
    {
        "adapter": "lora",
        "adapter_rank": 32,
        "precision": "bf16-true",
        "checkpointing": "sqrt",
        "micro_batch_size": 2,
    },
    {
        "adapter": "dora",
        "adapter_targets": "attention",
        "precision": "bf16-mixed",
        "micro_batch_size": 2,
    },
    {"adapter": "lora", "precision": "bf16-mixed", "loss": "chunked", "micro_batch_size": 4},
)
"""What `--adapters` compares on each model; GPT-2's own linear layers cannot be quantized."""
QUICK_MODELS = ("gpt", "gpt wide vocabulary", "llama")
LARGE_MODELS: dict[str, dict[str, Any]] = {
    "gpt 100 M": {
        "layers": 16,
        "width": 768,
        "heads": 12,
        "sequence_length": 1024,
        "global_batch": 16,
    },
    "gpt 1.6 B": {
        "layers": 32,
        "width": 2048,
        "heads": 16,
        "vocab_size": 8000,
        "sequence_length": 768,
        "global_batch": 4,
    },
}
"""Too large for a training here: only the prediction's own time is taken."""
LARGE_CHOICES: tuple[dict[str, Any], ...] = (
    {},
    {"checkpointing": "block"},
    {"compile": "block"},
    {"compile": "model"},
)
REPEATS = 3
TIMES = "prediction times"
"""Named among the groups."""

SPACE = SearchSpace(
    name="every technique",
    techniques={
        "precision": SEARCHED["precision"],
        "optimizer": SEARCHED["optimizer"],
        "micro_batch_size": DIVISORS,
        "checkpointing": SEARCHED["checkpointing"],
        "compile": SEARCHED["compile"],
        "memory_budget": (1.0, 0.4, 0.1),
        "optimizer_fusion": SEARCHED["optimizer_fusion"],
    },
)
SAMPLED = {
    "eager fp32": 4,
    "eager 16-bit": 4,
    "compiled by block": 1,
    "compiled whole": 2,
    "memory budget": 1,
}
"""Combinations drawn of each group, for each model."""
GROUPS = [*SAMPLED, "adapters", TIMES]


def group_of(config: TrainingConfig) -> str:
    if config.adapter != "none":
        return "adapters"
    if config.memory_budget != 1.0:
        return "memory budget"
    if config.compile != "none":
        return "compiled by block" if config.compile == "block" else "compiled whole"
    return "eager fp32" if config.precision in ("fp32", "tf32") else "eager 16-bit"


def half_of(model: str, config: TrainingConfig) -> str:
    digest = hashlib.sha256(f"{model} {config.describe()}".encode()).digest()
    return "calibration" if digest[0] % 2 else "held out"


# -- which configurations --------------------------------------------------------------------------


def configurations(model: str, legal: LegalSpace, *, quick: bool) -> list[TrainingConfig]:
    """Returns every value alone, then a sample of each group, drawn by the model's name."""
    alone = list(one_technique_each(legal))
    if quick:
        return alone[:: len(alone) // 8]
    draw = random.Random(model)
    sampled = []
    for group, count in SAMPLED.items():
        candidates = [
            config
            for config in legal.configurations()
            if group_of(config) == group and config not in alone
        ]
        sampled += draw.sample(candidates, count)
    return alone + sampled


def adapted_configurations(model: str) -> list[TrainingConfig]:
    """Returns those of `ADAPTED` that a model can have."""
    configs = [TrainingConfig(**choices) for choices in ADAPTED]
    if model.startswith("gpt2"):
        return [config for config in configs if config.base_weights not in QUANTIZED_WEIGHTS]
    if model == "gemma3":  # its blocks take different arguments
        return [config for config in configs if config.checkpointing != "sqrt"]
    return configs


def one_technique_each(legal: LegalSpace) -> Iterator[TrainingConfig]:
    plain = TrainingConfig(micro_batch_size=legal.at.global_batch)
    yield plain
    for technique, values in legal.values.items():
        for value in values:
            needed = (
                {"compile": "model" if value == 0.1 else "block"}
                if technique == "memory_budget"
                else {}
            )
            config = TrainingConfig(
                **{**plain.to_dict(), technique: value, **(needed if value != 1.0 else {})}
            )
            if config != plain and config in legal:
                yield config


# -- a pair ----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Bench:
    """Runs predictions and trainings of one model on one device."""

    model: str
    executor: LocalExecutor
    definition: StudyDefinition
    folder: Path

    def pair(self, config: TrainingConfig) -> dict[str, Any]:
        return {
            "model": self.model,
            "configuration": config.describe(),
            "config": chosen_in(config),
            "group": group_of(config),
            "half": half_of(self.model, config),
            **self.predicted(config),
            **self.measured(config),
        }

    def predicted(self, config: TrainingConfig) -> dict[str, Any]:
        try:
            prediction = Forecaster(
                executor=self.executor,
                workload=self.definition.workload,
                device_type=self.definition.device.type,
            ).predict(config)
        except AutotuneError as error:
            return {"predicted_bytes": None, "refused": str(error)}
        return {
            "predicted_bytes": prediction.peak_memory_bytes,
            "predicted_phase": prediction.phase,
            "prediction_seconds": round(prediction.seconds, 2),
        }

    def measured(self, config: TrainingConfig) -> dict[str, Any]:
        training = self.executor.training(
            self.definition, config, study_folder=self.folder, enforce_cap=False
        )
        finished = self.executor.run(Train(training=training), limits=time_limits(600.0))
        measurement = finished.measurement
        if measurement.outcome != "ok":
            return {
                "measured_bytes": None,
                "outcome": measurement.outcome,
                "message": measurement.message,
            }
        return {
            "measured_bytes": measurement.peak_memory_bytes,
            "measured_phase": measurement.peak_phase,
            "training_seconds": round(finished.seconds, 1),
        }


def chosen_in(config: TrainingConfig) -> dict[str, Any]:
    """What of `config` is not the default."""
    plain = TrainingConfig().to_dict()
    return {name: value for name, value in config.to_dict().items() if value != plain[name]}


def ratio_of(row: dict[str, Any]) -> float:
    return float(row["predicted_bytes"] / row["measured_bytes"])


def compared(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [row for row in rows if row["predicted_bytes"] and row["measured_bytes"]]


# -- all of it -------------------------------------------------------------------------------------


def measure(
    *, device: str, models: list[str], groups: list[str], quick: bool, file: Path
) -> dict[str, Any]:
    """Measures what `file` does not hold yet, and writes it after every row."""
    with tempfile.TemporaryDirectory() as temporary, LocalExecutor(Path(temporary)) as executor:
        choices = SPACE.choices()
        if not any(group.startswith(("compiled", "memory")) for group in groups):
            del choices["compile"]  # the only probe that takes long
        info, unavailable = executor.probe(device, choices)
        empty: dict[str, Any] = {**about(), "runs": [], "pairs": [], "predictions": []}
        results = read_json(file) if file.exists() else empty
        results["runs"].append(run_now(info))
        benches: dict[str, Bench] = {}
        legal = bind_space(
            SPACE, LegalityContext(global_batch=SHORTEST["global_batch"]), unavailable=unavailable
        )
        jobs = []
        for model in models:
            if model in ADAPTED_MODELS:
                configs = adapted_configurations(model)
            else:
                configs = configurations(model, legal, quick=quick)
            jobs += [(model, config) for config in configs]
        results["pairs"] = [row for row in results["pairs"] if row["predicted_bytes"]]
        known = {(row["model"], row["configuration"]) for row in results["pairs"]}
        random.Random(0).shuffle(
            jobs
        )  # where it is stopped early, what is there is a fair part of all
        for model, config in jobs:
            if (model, config.describe()) not in known and group_of(config) in groups:
                if model not in benches:
                    benches[model] = prepare(model, executor, info, Path(temporary))
                row = {**benches[model].pair(config), "run": len(results["runs"])}
                results["pairs"].append(row)
                write_json(file, results)
                told = f"{row.get('predicted_bytes')} / {row.get('measured_bytes')}"
                print(model, "|", row["configuration"], "|", told, file=sys.stderr, flush=True)
        if TIMES in groups and not quick:
            timed = {(row["model"], row["configuration"]) for row in results["predictions"]}
            for row in own_seconds(executor, device_type=info.type, known=timed):
                results["predictions"].append({**row, "run": len(results["runs"])})
                write_json(file, results)
        return results


def about() -> dict[str, Any]:
    return {
        "models": {
            name: {**sizes, "model": Path(sizes.get("model", "gpt")).name}
            for name, sizes in {**MODELS, **ADAPTED_MODELS}.items()
        },
        "large_models": LARGE_MODELS,
    }


def run_now(info: DeviceInfo) -> dict[str, Any]:
    """One call of this script: rows name it by its number, from 1."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join(["python", "studies/predictor_accuracy/measure.py", *sys.argv[1:]]),
        "device": info.name,
        "versions": {
            **info.versions,
            "autotune": version("autotune"),
            "transformers": version("transformers"),
        },
    }


def prepare(model: str, executor: LocalExecutor, info: DeviceInfo, folder: Path) -> Bench:
    workload = make_workload("cpu", SHORTEST, {**MODELS, **ADAPTED_MODELS}[model])
    own_folder = folder / model.replace(
        " ", "_"
    )  # inductor's C++ compiler takes no space in its cache's path
    executor.run(Prepare(workload=workload, folder=own_folder / "prepared"))
    definition = StudyDefinition(
        name="accuracy",
        workload=workload,
        space=SPACE,
        device=info,
        unavailable={},
        cap_bytes=info.total_memory_bytes,
        seed=0,
        sampler="random",
    )
    return Bench(model=model, executor=executor, definition=definition, folder=own_folder)


def own_seconds(
    executor: LocalExecutor, *, device_type: str, known: set[tuple[str, str]]
) -> Iterator[dict[str, Any]]:
    """What a prediction takes inside its process, for models that no training here could hold."""
    for choices, model in itertools.product(LARGE_CHOICES, LARGE_MODELS):
        workload = make_workload("cpu", LARGE_MODELS[model])
        config = TrainingConfig(micro_batch_size=workload.global_batch, **choices)
        if (model, config.describe()) in known:
            continue
        forecaster = Forecaster(executor=executor, workload=workload, device_type=device_type)
        runs = [forecaster.predict(config) for _ in range(REPEATS)]
        seconds = [round(run.seconds, 2) for run in runs]
        print(model, "|", config.describe(), "|", seconds, file=sys.stderr, flush=True)
        yield {
            "model": model,
            "configuration": config.describe(),
            "predicted_bytes": runs[0].peak_memory_bytes,
            "seconds": seconds,
        }


# -- what it says ----------------------------------------------------------------------------------


def summary(rows: list[dict[str, Any]]) -> Iterator[str]:
    yield (
        "| group | pairs | ratio: least | median | greatest | worst difference, MiB "
        "| predicted too little |"
    )
    yield "|---|---|---|---|---|---|---|"
    for group in [*SAMPLED, "adapters", "all"]:
        of_group = [row for row in compared(rows) if group in (row["group"], "all")]
        if of_group:
            ratios = [ratio_of(row) for row in of_group]
            cells = [
                f"{value:.5f}" for value in (min(ratios), statistics.median(ratios), max(ratios))
            ]
            worst = max(abs(difference(row)) for row in of_group) / MIB
            too_little = sum(difference(row) > 0 for row in of_group)
            values = " | ".join(cells)
            yield f"| {group} | {len(of_group)} | {values} | {worst:.4f} | {too_little} |"


def difference(row: dict[str, Any]) -> int:
    """Returns measured minus predicted bytes."""
    return int(row["measured_bytes"] - row["predicted_bytes"])


def proposed_bounds(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Twice the worst difference of the calibration half, relative and in bytes, rounded up.

    Both are added: bytes for small models, where a kernel's scratch is a large part; the share for
    large ones, whose scratch was not seen. Also how many of the held-out half would lie outside.
    """
    yield "| bound for | calibrated on | share | bytes | held out | outside |"
    yield "|---|---|---|---|---|---|"
    for group in get_args(Group):
        of_group = [
            row
            for row in compared(rows)
            if group_of_bound(TrainingConfig(**row["config"])) == group
        ]
        calibration = [row for row in of_group if row["half"] == "calibration"]
        held_out = [row for row in of_group if row["half"] == "held out"]
        error = PredictionError(
            share=rounded_up(
                2 * max((abs(ratio_of(row) - 1) for row in calibration), default=0), least=0.0001
            ),
            size_bytes=round(
                rounded_up(
                    2 * max((abs(difference(row)) for row in calibration), default=0), least=1024
                )
            ),
        )
        outside = [row for row in held_out if not is_within(row, error)]
        cells = (
            group,
            len(calibration),
            f"{error.share:.2%}",
            error.size_bytes,
            len(held_out),
            len(outside),
        )
        yield f"| {' | '.join(map(str, cells))} |"


def rounded_up(value: float, *, least: float) -> float:
    """`least` doubled until it holds `value`."""
    while least < value:
        least *= 2
    return least


def is_within(row: dict[str, Any], error: PredictionError) -> bool:
    predicted = row["predicted_bytes"]
    return error.lower_bound(predicted) <= row["measured_bytes"] <= error.upper_bound(predicted)


def worst(rows: list[dict[str, Any]], *, count: int = 10) -> Iterator[str]:
    for row in sorted(compared(rows), key=lambda row: -abs(ratio_of(row) - 1))[:count]:
        yield (
            f"| {row['model']} | {row['configuration']} | {row['predicted_bytes'] / MIB:.3f} | "
            f"{row['measured_bytes'] / MIB:.3f} | {difference(row):+,} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--quick", action="store_true", help="three models, eight configurations each"
    )
    parser.add_argument("--adapters", action="store_true", help="the models with adapters")
    parser.add_argument(
        "--models", nargs="+", choices=[*MODELS, *ADAPTED_MODELS], help="only these"
    )
    parser.add_argument("--groups", nargs="+", choices=GROUPS, default=GROUPS, help="only these")
    parser.add_argument("--read", type=Path, help="results to summarize instead of measuring")
    parser.add_argument("--out", type=Path, default=Path("results.json.xz"))
    arguments = parser.parse_args()
    if arguments.read:
        results = read_json(arguments.read)
    else:
        models = arguments.models or list(QUICK_MODELS if arguments.quick else MODELS)
        groups = arguments.groups
        if arguments.adapters:
            models = arguments.models or list(ADAPTED_MODELS)
            groups = ["adapters"]
        results = measure(
            device=arguments.device,
            models=models,
            groups=groups,
            quick=arguments.quick,
            file=arguments.out,
        )
    pairs = results["pairs"]
    print(*summary(pairs), "", *worst(pairs), "", *proposed_bounds(pairs), sep="\n")


if __name__ == "__main__":
    main()
