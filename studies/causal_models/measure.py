"""Every causal model type of the installed transformers, small: builds, predicts, trains, parity.

    python studies/causal_models/measure.py

Writes a line of JSON for each type to `results.jsonl.xz` beside itself: what can be done with it,
and for each of four configurations the predicted and the measured peak. What the file has is not
measured again, so it can be stopped and started. The pairs are taken in a shuffled order, one
configuration after the other, so that an unfinished file is a fair sample. `--configurations` takes
only some, `--summary` prints what the file says.
"""

import argparse
import json
import os
import random
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
from autotune.spec.reading import parse
from autotune.spec.workload import Workload, make_workload
from studies.causal_models.small_config import candidates
from studies.compressed import read_rows, write_rows

IMPORTED_ONCE = (
    "torch._inductor.compile_fx",
    "transformers.models.llama.modeling_llama",
    "autotune.execution.server.failures",
    "autotune.predictor.predict",
    "autotune.training.trainer",
)
"""Imported before a process is forked, so that its forks need not."""
RESULTS = Path(__file__).with_name("results.jsonl.xz")
TRAINING = {
    "sequence_length": 32,
    "global_batch": 4,
    "steps": 7,
    "warmup_steps": 2,
    "evaluation_sequences": 4,
}
PLAIN = TrainingConfig(micro_batch_size=4)
CHECKPOINTED = TrainingConfig(micro_batch_size=4, checkpointing="block")
CONFIGURATIONS: Mapping[str, TrainingConfig] = {
    "fp32": PLAIN,
    "bf16-mixed": TrainingConfig(micro_batch_size=4, precision="bf16-mixed"),
    "checkpointed": CHECKPOINTED,
    "compiled": TrainingConfig(micro_batch_size=4, compile="block"),
}
"""What is predicted and trained once for each type."""
EXAMINED = {
    "checkpointing": ["attention", "selective", "block", "sqrt"],
    "compile": ["block"],
    "loss": ["chunked"],
}
SECONDS_A_TYPE = 240
GOAL = 0.005
"""Largest relative error that a prediction should have."""
SEED = 28


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
        self.row["parity"] = self._parity(workload)

    def compare(self, config: TrainingConfig) -> dict[str, Any]:
        """Returns the predicted peak with its bounds, and the measured one, or why there is none.

        The sizes are in bytes.
        """
        workload = self._smallest_workload()
        assert workload is not None
        predicted = self._of_task(lambda: _predict(workload, config))
        if isinstance(predicted, str):
            predicted = {"not_predicted": predicted}
        return {**predicted, **self._trained(workload, config)}

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
            return {"not_trained": measured}
        if measured["outcome"] != "ok":
            return {"not_trained": f"{measured['outcome']}: {measured['message']}"}
        return {"measured": measured["peak_memory_bytes"]}

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
            traces.append(parse(ParityTrace, answer["trace"]))
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


def _predict(workload: Workload, config: TrainingConfig) -> dict[str, int]:
    prediction = tasks.predict(workload=workload.to_dict(), config=config.to_dict(), device="cpu")
    return {
        "predicted": prediction["peak_memory_bytes"],
        "lower": prediction["lower_bound_bytes"],
        "upper": prediction["upper_bound_bytes"],
    }


def _said(error: Exception) -> str:
    if isinstance(error, InvalidInput):
        return error.message
    lines = " ".join(str(error).split())
    return f"{type(error).__name__}: {lines[:200]}"


# -- all types -------------------------------------------------------------------------------------


def in_fork(
    model_type: str, measure: Callable[[TypeMeasurement], dict[str, Any]], *, text: Path
) -> dict[str, Any]:
    """Returns what `measure` says of a type, in a process that ends after SECONDS_A_TYPE."""

    def run() -> dict[str, Any]:
        signal.alarm(SECONDS_A_TYPE)
        os.setpgid(0, 0)
        with tempfile.TemporaryDirectory() as folder:
            return measure(TypeMeasurement(model_type, text=text, folder=Path(folder)))

    try:
        found: dict[str, Any] = run_in_fork(run)
    except ForkFailed as error:
        traceback.print_exc()
        return {"failed": str(error)}
    return found


def measured_row(measurement: TypeMeasurement) -> dict[str, Any]:
    """Returns the row of a type without its configurations."""
    measurement.measure()
    return measurement.row


def measure_all(file: Path, *, only: list[str], configurations: list[str]) -> None:
    rows = read(file)
    types = [name for name in causal_types() if not only or name in only]
    random.Random(SEED).shuffle(types)
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder) / "text"
        plain = make_workload("cpu", TRAINING)
        _predict(plain, PLAIN)  # its first one in a process takes longest
        run_in_fork(lambda: prepare(workload=plain.to_dict(), folder=str(text)))
        for model_type in types:
            if model_type not in rows:
                row = in_fork(model_type, measured_row, text=text)
                rows[model_type] = {"type": model_type, **row}
                write(file, rows)
        for name in configurations:
            for model_type in types:
                row = rows[model_type]
                peaks = row.setdefault("peaks", {})
                if row.get("builds") != "yes" or name in peaks:
                    continue
                config = CONFIGURATIONS[name]
                peaks[name] = in_fork(
                    model_type,
                    lambda measurement: measurement.compare(config),  # noqa: B023
                    text=text,
                )
                write(file, rows)
                print(model_type, name, json.dumps(peaks[name]), flush=True)


def write(file: Path, rows: Mapping[str, Mapping[str, Any]]) -> None:
    write_rows(file, [dict(rows[name]) for name in causal_types() if name in rows])


def read(file: Path) -> dict[str, dict[str, Any]]:
    return {row["type"]: row for row in read_rows(file)}


# -- what it says ----------------------------------------------------------------------------------


def error_of(peaks: Mapping[str, Any]) -> float | None:
    """Returns predicted over measured peak, less one; None without both."""
    if "predicted" not in peaks or "measured" not in peaks:
        return None
    return float(peaks["predicted"] / peaks["measured"] - 1)


def is_outside(peaks: Mapping[str, Any]) -> bool:
    """Returns whether a measured peak is outside of the bounds of its prediction."""
    return not peaks["lower"] <= peaks["measured"] <= peaks["upper"]


def summary(rows: Mapping[str, Mapping[str, Any]]) -> list[str]:
    built = [row for row in rows.values() if row.get("builds") == "yes"]
    parity = sum(row.get("parity") == "yes" for row in built)
    lines = [
        f"{len(rows)} model types, of which {len(built)} build; with checkpointed blocks {parity} "
        "train as without.",
        "",
        "| configuration | measured | predicted, too | to the byte | within "
        f"{GOAL:.1%} | outside the bounds | worst |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in CONFIGURATIONS:
        peaks = [row["peaks"][name] for row in built if name in row.get("peaks", {})]
        pairs = [one for one in peaks if error_of(one) is not None]
        errors = [error_of(one) or 0.0 for one in pairs]
        worst = max(errors, key=abs, default=0.0)
        lines.append(
            f"| {name} | {sum('measured' in one for one in peaks)} of {len(peaks)} | {len(pairs)} "
            f"| {sum(error == 0 for error in errors)} "
            f"| {sum(abs(error) <= GOAL for error in errors)} "
            f"| {sum(map(is_outside, pairs))} | {worst:+.2%} |"
        )
    lines += ["", "| type | what does not work, or is predicted worse than the goal |", "|---|---|"]
    for model_type, row in sorted(rows.items()):
        lines += [f"| `{model_type}` | {reason} |" for reason in _reasons(row)]
    return lines


def _reasons(row: Mapping[str, Any]) -> list[str]:
    reasons = []
    if "failed" in row:
        reasons.append(f"failed: {row['failed']}")
    for step in ("builds", "parity"):
        if row.get(step, "yes") != "yes":
            reasons.append(f"{step}: {row[step]}")
    for name, peaks in row.get("peaks", {}).items():
        for problem in ("failed", "not_predicted", "not_trained"):
            if problem in peaks:
                reasons.append(f"{name}, {problem.replace('_', ' ')}: {peaks[problem]}")
        error = error_of(peaks)
        if error is not None and is_outside(peaks):
            reasons.append(f"{name}: {error:+.2%}, outside the bounds")
        elif error is not None and abs(error) > GOAL:
            reasons.append(f"{name}: {error:+.2%}")
    return reasons


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--only", nargs="+", default=[], metavar="TYPE")
    parser.add_argument(
        "--configurations",
        nargs="+",
        default=list(CONFIGURATIONS),
        choices=list(CONFIGURATIONS),
        help="which to predict and train; all by default",
    )
    parser.add_argument("--summary", action="store_true", help="print what the file says")
    arguments = parser.parse_args()
    if not arguments.summary:
        transformers.logging.set_verbosity_error()
        torch.set_num_threads(1)
        for module in IMPORTED_ONCE:
            import_module(module)
        print(f"torch {torch.__version__}, transformers {version('transformers')}", flush=True)
        measure_all(arguments.out, only=arguments.only, configurations=arguments.configurations)
    print(*summary(read(arguments.out)), sep="\n")


if __name__ == "__main__":
    main()
