"""Every causal model type of the installed transformers, small: builds, predicts, trains, parity.

    python studies/causal_models/measure.py

Writes a line of JSON for each type to `results.jsonl` beside itself. Types that the file has are
not measured again, so it can be stopped and started. `--compile` adds what blocks compiled one by
one do; `--summary` prints what the file says.
"""

import argparse
import json
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING

from autotune.errors import AutotuneError, InvalidInput
from autotune.execution.server import tasks
from autotune.execution.server.forked import ForkFailed, run_in_fork
from autotune.execution.server.prepared import prepare
from autotune.models.config_class import complete
from autotune.models.weights import draw_weights
from autotune.spec.config import TrainingConfig
from autotune.spec.model_file import known_sizes, model_name
from autotune.spec.parity import ParityTrace, largest_difference
from autotune.spec.workload import Workload, make_workload
from studies.causal_models.small_config import candidates

IMPORTED_ONCE = (
    "torch._inductor.compile_fx",
    "transformers.models.llama.modeling_llama",
    "autotune.execution.server.failures",
    "autotune.predictor.predict",
    "autotune.training.trainer",
)
"""Imported before a process is forked, so that its forks need not."""
RESULTS = Path(__file__).with_name("results.jsonl")
TRAINING = {
    "sequence_length": 32,
    "global_batch": 4,
    "steps": 7,
    "warmup_steps": 2,
    "evaluation_sequences": 4,
}
PLAIN = TrainingConfig(micro_batch_size=4)
CHECKPOINTED = TrainingConfig(micro_batch_size=4, checkpointing="block")
COMPILED = TrainingConfig(micro_batch_size=4, compile="block")
EXAMINED = {
    "checkpointing": ["attention", "selective", "block", "sqrt"],
    "compile": ["block"],
    "loss": ["chunked"],
}
SECONDS_A_TYPE = 240
EXACT = 0.005
"""Largest relative error of a prediction that counts as exact."""


def causal_types() -> list[str]:
    """Returns the model types that transformers has a causal language model for."""
    return [name for name, kind in CONFIG_MAPPING.items() if kind in MODEL_FOR_CAUSAL_LM_MAPPING]


# -- one type --------------------------------------------------------------------------------------


class TypeMeasurement:
    """Measures one model type; the files of its study are in `folder`."""

    def __init__(self, model_type: str, *, text: Path, folder: Path) -> None:
        self._model_type = model_type
        self._folder = folder
        for file in text.iterdir():
            if file.name != "weights.pt":
                (folder / file.name).symlink_to(file)
        self.row: dict[str, Any] = {"type": model_type}

    def measure(self) -> None:
        workload = self._smallest_workload()
        if workload is None:
            return
        sizes = ("layers", "width", "heads", "vocab_size")
        self.row |= {name: getattr(workload, name) for name in sizes}
        self.row["excluded"] = self._examined(workload)
        self.row["predicted_bytes"] = self._of_task(lambda: _predict(workload))
        self.row |= self._trained(workload, PLAIN)
        self.row["parity"] = self._parity(workload)

    def compile(self) -> None:
        """Adds `compiled`: yes, or why not."""
        workload = self._smallest_workload()
        assert workload is not None
        trained = self._trained(workload, COMPILED)
        self.row["compiled"] = "yes" if trained["trains"] == "ok" else trained["trains"]

    def _smallest_workload(self) -> Workload | None:
        """Returns the workload of the first config that works; None, with why, if none does."""
        try:
            defaults = CONFIG_MAPPING[self._model_type]().to_dict()
        except Exception as error:
            self.row["builds"] = f"its default config: {_said(error)}"
            return None
        reason = ""
        for content in candidates(self._model_type, defaults):
            try:
                if None in (known_sizes(content)["layers"], known_sizes(content)["vocab_size"]):
                    content = complete(content)
                workload = make_workload(
                    "cpu", {"model": model_name(content), "model_config": content, **TRAINING}
                )
                parameters = draw_weights(workload, file=self._folder / "weights.pt")
            except Exception as error:
                reason = reason or _said(error)
                continue
            self.row |= {"builds": "yes", "parameters": parameters}
            return workload
        self.row["builds"] = reason
        return None

    def _examined(self, workload: Workload) -> Any:
        return self._of_task(
            lambda: tasks.examine(workload=workload.to_dict(), choices=EXAMINED, device="cpu")
        )

    def _trained(self, workload: Workload, config: TrainingConfig) -> dict[str, Any]:
        measured = self._of_task(lambda: tasks.train(**self._request(workload, config)))
        if isinstance(measured, str):
            return {"trains": measured}
        if measured["outcome"] != "ok":
            return {"trains": f"{measured['outcome']}: {measured['message']}"}
        return {"trains": "ok", "measured_bytes": measured["peak_memory_bytes"]}

    def _parity(self, workload: Workload) -> str:
        """Returns "yes" if checkpointed blocks train as plain ones do, or the difference."""
        traces = []
        for config in (PLAIN, CHECKPOINTED):
            request = self._request(workload, config)
            answer = self._of_task(lambda: tasks.trace(dropout=False, **request))  # noqa: B023
            if isinstance(answer, str):
                return answer
            if answer["trace"] is None:
                return str(answer["failure"])
            traces.append(ParityTrace.from_dict(answer["trace"]))
        difference = largest_difference(traces[1], traces[0], precision="fp32")
        return difference.message if difference.is_outside else "yes"

    def _request(self, workload: Workload, config: TrainingConfig) -> dict[str, Any]:
        return {
            "workload": workload.to_dict(),
            "config": config.to_dict(),
            "folder": str(self._folder),
            "device": "cpu",
            "cap_bytes": 2**40,
            "enforce_cap": False,
            "requested_at": time.monotonic(),
        }

    @staticmethod
    def _of_task(task: Callable[[], Any]) -> Any:
        """Returns what a task returns in a process of its own, or its error as a sentence."""
        try:
            return run_in_fork(task)
        except (AutotuneError, ForkFailed) as error:
            return str(error).splitlines()[0]


def _predict(workload: Workload) -> int:
    prediction = tasks.predict(workload=workload.to_dict(), config=PLAIN.to_dict(), device="cpu")
    return int(prediction["peak_memory_bytes"])


def _said(error: Exception) -> str:
    if isinstance(error, InvalidInput):
        return error.message
    lines = " ".join(str(error).split())
    return f"{type(error).__name__}: {lines[:200]}"


# -- all types -------------------------------------------------------------------------------------


def measured_row(model_type: str, known: Mapping[str, Any] | None, *, text: Path) -> dict[str, Any]:
    """Returns the row of a type, measured in a fork that ends after SECONDS_A_TYPE."""

    def measure() -> dict[str, Any]:
        signal.alarm(SECONDS_A_TYPE)
        os.setpgid(0, 0)
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            measurement = TypeMeasurement(model_type, text=text, folder=Path(folder))
            if known is None:
                measurement.measure()
                measurement.row["seconds"] = round(time.monotonic() - began, 1)
                return measurement.row
            measurement.compile()
            return {**known, "compiled": measurement.row["compiled"]}

    try:
        row: dict[str, Any] = run_in_fork(measure)
    except ForkFailed as error:
        traceback.print_exc()
        return {"type": model_type, **(known or {}), "failed": str(error)}
    return row


def measure_all(file: Path, *, only: list[str], compiles: bool) -> None:
    rows = read(file)
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder) / "text"
        _predict(make_workload("cpu", TRAINING))  # its first one in a process takes longest
        run_in_fork(
            lambda: prepare(workload=make_workload("cpu", TRAINING).to_dict(), folder=str(text))
        )
        for model_type in causal_types():
            known = rows.get(model_type)
            if only and model_type not in only:
                continue
            if compiles and (known is None or known.get("trains") != "ok" or "compiled" in known):
                continue
            if not compiles and known is not None:
                continue
            rows[model_type] = measured_row(model_type, known, text=text)
            lines = [json.dumps(rows[name]) for name in causal_types() if name in rows]
            file.write_text("\n".join(lines) + "\n")
            print(json.dumps(rows[model_type]), flush=True)


def read(file: Path) -> dict[str, dict[str, Any]]:
    if not file.exists():
        return {}
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    return {row["type"]: row for row in rows}


# -- what it says ----------------------------------------------------------------------------------


def error_of(row: Mapping[str, Any]) -> float | None:
    """Returns predicted over measured peak, less one; None without both."""
    predicted, measured = row.get("predicted_bytes"), row.get("measured_bytes")
    if not isinstance(predicted, int) or not isinstance(measured, int):
        return None
    return predicted / measured - 1


def summary(rows: Mapping[str, Mapping[str, Any]]) -> list[str]:
    built = [row for row in rows.values() if row.get("builds") == "yes"]
    errors = {str(row["type"]): error_of(row) for row in built}
    exact = [error for error in errors.values() if error is not None and abs(error) <= EXACT]
    counts = {
        "model types": len(rows),
        "build": len(built),
        "predict": sum(isinstance(row.get("predicted_bytes"), int) for row in built),
        "train": sum(row.get("trains") == "ok" for row in built),
        f"predicted within {EXACT:.1%}": len(exact),
        "parity of checkpointed blocks": sum(row.get("parity") == "yes" for row in built),
        "compiled by block": sum(row.get("compiled") == "yes" for row in built),
    }
    lines = ["| | |", "|---|---|", *(f"| {name} | {count} |" for name, count in counts.items())]
    lines += ["", "| type | what does not work |", "|---|---|"]
    for name, row in sorted(rows.items()):
        lines += [f"| `{name}` | {reason} |" for reason in _reasons(row, errors.get(name))]
    return lines


def _reasons(row: Mapping[str, Any], error: float | None) -> list[str]:
    reasons = []
    if "failed" in row:
        reasons.append(f"failed: {row['failed']}")
    for step, done in (("builds", "yes"), ("trains", "ok"), ("parity", "yes"), ("compiled", "yes")):
        if row.get(step, done) != done:
            reasons.append(f"{step}: {row[step]}")
    if isinstance(row.get("predicted_bytes"), str):
        reasons.append(f"predicts: {row['predicted_bytes']}")
    if error is not None and abs(error) > EXACT:
        reasons.append(f"prediction {error:+.2%}")
    return reasons


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--only", nargs="+", default=[], metavar="TYPE")
    parser.add_argument("--compile", action="store_true", help="train blocks compiled one by one")
    parser.add_argument("--summary", action="store_true", help="print what the file says")
    arguments = parser.parse_args()
    if not arguments.summary:
        transformers.logging.set_verbosity_error()
        torch.set_num_threads(1)
        for module in IMPORTED_ONCE:
            import_module(module)
        print(f"torch {torch.__version__}, transformers {version('transformers')}", flush=True)
        measure_all(arguments.out, only=arguments.only, compiles=arguments.compile)
    print(*summary(read(arguments.out)), sep="\n")


if __name__ == "__main__":
    main()
