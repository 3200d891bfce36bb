"""Compares predicted and measured peak memory of models that the predictor was not made for.

    python studies/new_models/measure.py
    python studies/new_models/measure.py --read studies/new_models/results.json.xz

A pair is one prediction on fake tensors and one short real training, each in a process of its own,
as in `studies/predictor_accuracy/measure.py`. The models are those of users in `models.py` beside
this file, and some model types of transformers, shrunk as in `studies/causal_models/`. Writes every
pair to `results.json.xz` and continues where that file ends. `--read` prints the table of a file.
"""

import argparse
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import transformers

from autotune.errors import AutotuneError, InvalidInput
from autotune.execution.local import LocalExecutor
from autotune.execution.tasks import Prepare
from autotune.models.config_class import complete
from autotune.models.weights import draw_weights
from autotune.predictor.accuracy import group_of
from autotune.spec.config import TrainingConfig
from autotune.spec.model_file import known_sizes, model_name
from autotune.spec.result import DeviceInfo
from autotune.spec.study import StudyDefinition
from autotune.spec.workload import Workload, make_workload
from autotune.study.prediction.predictions import Forecaster
from studies.causal_models.small_config import candidates
from studies.compressed import read_json, write_json
from studies.predictor_accuracy.measure import (
    SHORTEST,
    SPACE,
    Bench,
    chosen_in,
    ratio_of,
    run_now,
)

HERE = Path(__file__).parent
RESULTS = HERE / "results.json.xz"
SIZES = {"layers": 2, "width": 128, "sequence_length": 64}
SMALL = {"layers": 1, "width": 32, "sequence_length": 32}

FP32: dict[str, Any] = {}
MIXED: dict[str, Any] = {"precision": "bf16-mixed"}
BF16: dict[str, Any] = {"precision": "bf16-true"}
BY_BLOCK: dict[str, Any] = {"compile": "block"}
WHOLE: dict[str, Any] = {"compile": "model"}
CHECKPOINTED: dict[str, Any] = {"checkpointing": "block"}
SQRT: dict[str, Any] = {"checkpointing": "sqrt"}
EAGER = (FP32, MIXED, BF16)

USERS: dict[str, tuple[dict[str, Any], ...]] = {
    "lstm": (*EAGER, CHECKPOINTED, BF16 | CHECKPOINTED),
    "gru": (*EAGER, CHECKPOINTED),
    "scan": (*EAGER, CHECKPOINTED),
    "einsum_experts": (*EAGER, CHECKPOINTED, BY_BLOCK),
    "convolution": (*EAGER, CHECKPOINTED, BY_BLOCK),
    "depthwise": (*EAGER, BY_BLOCK, BY_BLOCK | BF16),
    "upcast_norm": (*EAGER, BY_BLOCK | BF16, WHOLE | BF16),
    "own_function": (*EAGER, MIXED | CHECKPOINTED),
    "attention": (*EAGER, BF16 | SQRT, MIXED | SQRT),
    "own_checkpointing": (*EAGER,),
    "experts_by_nonzero": (*EAGER, CHECKPOINTED),
    "experts_by_mask": (*EAGER, CHECKPOINTED),
    "logged": (*EAGER, CHECKPOINTED),
    "branching": (FP32,),
}
"""Functions of `models.py` without their `make_`, with what is compared of each."""
SMALLER: dict[str, tuple[dict[str, Any], ...]] = {
    "lstm": EAGER,
    "upcast_norm": (*EAGER, WHOLE | BF16),
    "einsum_experts": EAGER,
    "convolution": EAGER,
}
"""The same at a width of 32."""
TYPES: dict[str, tuple[dict[str, Any], ...]] = {
    **dict.fromkeys(
        (
            *("mamba", "falcon_mamba", "jamba", "zamba", "inkling_text", "inkling2_text"),
            *("dbrx", "longcat_flash", "qwen4_exp", "qwen4_exp_text", "xmod"),
            *("blt", "jetmoe", "reformer", "xlm"),
        ),
        (FP32, MIXED),
    )
}
"""Model types of transformers."""


# -- one pair --------------------------------------------------------------------------------------


class PairBench(Bench):
    """As in the study of accuracy; stores the bounds and notes of a prediction, too."""

    def predicted(self, config: TrainingConfig) -> dict[str, Any]:
        try:
            prediction = Forecaster(
                executor=self.executor, workload=self.definition.workload, device_type="cpu"
            ).predict(config)
        except AutotuneError as error:
            return {"predicted_bytes": None, "rejected": str(error)}
        return {
            "predicted_bytes": prediction.peak_memory_bytes,
            "bounds_bytes": [prediction.lower_bound_bytes, prediction.upper_bound_bytes],
            "predicted_phase": prediction.phase,
            "notes": list(prediction.notes),
            "prediction_seconds": round(prediction.seconds, 2),
        }

    def pair(self, config: TrainingConfig) -> dict[str, Any]:
        return {
            "model": self.model,
            "configuration": config.describe(),
            "config": chosen_in(config),
            "group": group_of(config),
            **self.predicted(config),
            **self.measured(config),
        }


def jobs() -> Iterator[tuple[str, TrainingConfig]]:
    """Yields every model with every configuration that is compared."""
    named = {
        **USERS,
        **{f"{name}, small": choices for name, choices in SMALLER.items()},
        **TYPES,
    }
    for model, compared in named.items():
        for choices in compared:
            size = 2 if choices.get("checkpointing") == "sqrt" else SHORTEST["global_batch"]
            yield model, TrainingConfig(**{"micro_batch_size": size, **choices})


def workload_of(model: str) -> Workload:
    if model in TYPES:
        return _smallest(model)
    name, _, size = model.partition(", ")
    settings = {"model": f"{HERE}/models.py:make_{name}", **(SMALL if size else SIZES)}
    return make_workload("cpu", SHORTEST, settings)


def _smallest(model_type: str) -> Workload:
    """Returns the workload of the first small config that transformers builds."""
    defaults = transformers.CONFIG_MAPPING[model_type]().to_dict()
    for content in candidates(model_type, defaults):
        try:
            if None in (known_sizes(content)["layers"], known_sizes(content)["vocab_size"]):
                content = complete(content)
            settings = {"model": model_name(content), "model_config": content}
            workload = make_workload("cpu", {**SHORTEST, "sequence_length": 32}, settings)
            with tempfile.TemporaryDirectory() as folder:
                draw_weights(workload, file=Path(folder) / "weights.pt")
        except Exception:  # whatever a class raises for sizes that it rejects
            continue
        return workload
    raise InvalidInput(f"no small config of model type {model_type!r} was found")


# -- all of it -------------------------------------------------------------------------------------


def measure(file: Path, *, only: list[str]) -> dict[str, Any]:
    """Measures what `file` does not hold yet, and writes it after every row."""
    results: dict[str, Any] = {"runs": [], "pairs": []}
    if file.exists():
        results = read_json(file)
    with tempfile.TemporaryDirectory() as temporary, LocalExecutor(Path(temporary)) as executor:
        info, _ = executor.probe("cpu", {})
        run = run_now(info) | {"command": " ".join(["python", *sys.argv])}
        results["runs"].append(run)
        benches: dict[str, Bench] = {}
        known = {(row["model"], row["configuration"]) for row in results["pairs"]}
        for model, config in jobs():
            if (model, config.describe()) in known or (only and model not in only):
                continue
            if model not in benches:
                benches[model] = _prepared(model, executor, info, Path(temporary))
            row = {**benches[model].pair(config), "run": len(results["runs"])}
            results["pairs"].append(row)
            write_json(file, results)
            print(*table([row], heading=False), sep="\n", flush=True)
    return results


def _prepared(model: str, executor: LocalExecutor, info: DeviceInfo, folder: Path) -> Bench:
    workload = workload_of(model)
    own_folder = folder / model.replace(", ", "_")
    executor.run(Prepare(workload=workload, folder=own_folder / "prepared"))
    definition = StudyDefinition(
        name="new models",
        workload=workload,
        space=SPACE,
        device=info,
        unavailable={},
        cap_bytes=info.total_memory_bytes,
        seed=0,
        sampler="random",
    )
    return PairBench(model=model, executor=executor, definition=definition, folder=own_folder)


# -- what it says ----------------------------------------------------------------------------------


def is_within(row: Mapping[str, Any]) -> bool:
    """Returns whether a measured peak is within the bounds of its prediction."""
    lowest, highest = row["bounds_bytes"]
    return bool(lowest <= row["measured_bytes"] <= highest)


def table(rows: list[dict[str, Any]], *, heading: bool = True) -> Iterator[str]:
    if heading:
        yield "| model | configuration | predicted / measured | within its bounds | bounds |"
        yield "|---|---|---|---|---|"
    for row in rows:
        cells = [row["model"], row["configuration"]]
        if not row["measured_bytes"]:
            cells += [f"{row['outcome']}: {row['message']}", "", ""]
        elif not row["predicted_bytes"]:
            cells += [f"rejected: {row['rejected']}", "", ""]
        else:
            bounds = [limit / row["predicted_bytes"] - 1 for limit in row["bounds_bytes"]]
            cells += [
                f"{ratio_of(row):.4f}",
                "yes" if is_within(row) else "**no**",
                " to ".join(f"{bound:+.1%}" for bound in bounds),
            ]
        yield f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", default=[], metavar="MODEL", help="only these")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--read", type=Path, help="results to print instead of measuring")
    arguments = parser.parse_args()
    if arguments.read:
        results = read_json(arguments.read)
    else:
        transformers.logging.set_verbosity_error()
        results = measure(arguments.out, only=arguments.only)
    print(*table(results["pairs"]), sep="\n")


if __name__ == "__main__":
    main()
