"""Predicts peak memory by activation memory budget, at the table's full size, without a GPU.

    python studies/peak_memory/budgets.py

Whole model and block by block, with and without the step in backward, and a part of it in bf16.
Writes `budgets.json.xz` after every prediction and resumes from there; then draws `budgets.png`
(`--draw`: only that). A whole-model compilation takes about a minute.
"""

import argparse
import platform
import sys
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import plotly.graph_objects as go

from autotune.execution.local import LocalExecutor
from autotune.spec.config import TrainingConfig
from autotune.spec.prediction import Forecast
from autotune.spec.space_file import load_space
from autotune.spec.workload import make_workload
from autotune.study.predictions import Forecaster
from studies.compressed import read_json, write_json

Curves = dict[str, dict[str, Any]]
"""{curve: {budget: what is predicted}}"""
GIB = 1024**3
FILE = Path(__file__).with_suffix(".json.xz")
BUDGETS = (0.0, 0.02, *(step / 20 for step in range(1, 17)), 0.9, 1.0)
CURVES: dict[str, tuple[dict[str, Any], tuple[float, ...]]] = {
    "whole model": ({"compile": "model"}, BUDGETS),
    "by block": ({"compile": "block"}, BUDGETS),
    "by block, step in backward": ({"compile": "block", "optimizer_fusion": "backward"}, BUDGETS),
    "whole model, bf16": (
        {"compile": "model", "precision": "bf16-true"},
        (0.05, 0.2, 0.3, 0.4, 0.45, 0.5, 0.55, 0.6, 0.65, 1.0),
    ),
}
CHECKPOINTED = {"checkpoint": 12.529, "fused_checkpoint": 7.425}
"""Published peaks of plain checkpointing, GiB."""


def predict_all() -> Curves:
    space = load_space("peak_memory")
    known = read_json(FILE)["curves"] if FILE.exists() else {}
    curves: Curves = {name: dict(known.get(name, {})) for name in CURVES}
    with TemporaryDirectory() as folder, LocalExecutor(Path(folder)) as executor:
        forecaster = Forecaster(
            executor=executor,
            workload=make_workload("cuda", space.workload),
            device_type="cuda",
            torch_version=space.reference.torch if space.reference else None,
            extrapolates="nothing",
        )
        for name, (choices, budgets) in CURVES.items():
            missing = [budget for budget in budgets if f"{budget:g}" not in curves[name]]
            configs = [_config(choices, budget) for budget in missing]
            forecaster.forecast_all(configs, on_each=partial(_keep, curves, name))
    return curves


def _config(choices: dict[str, Any], budget: float) -> TrainingConfig:
    return TrainingConfig(
        optimizer="adafactor-fixed-rate", micro_batch_size=4, memory_budget=budget, **choices
    )


def _keep(curves: Curves, name: str, forecast: Forecast) -> None:
    prediction = forecast.prediction
    if prediction is None:
        sys.exit(f"{forecast.config.describe()}: {forecast.error}")
    peak = prediction.peak_memory_bytes / GIB
    print(
        f"{forecast.config.describe()}: {peak:.3f} GiB, {prediction.seconds:.0f} s",
        file=sys.stderr,
        flush=True,
    )
    curves[name][f"{forecast.config.memory_budget:g}"] = {
        "peak_gib": peak,
        "phase": prediction.phase,
        "gib_by_category": {
            category: size / GIB for category, size in prediction.bytes_by_category.items()
        },
        "plan": prediction.plan,
        "seconds": prediction.seconds,
    }
    _write(curves)


def _write(curves: Curves) -> None:
    written = {
        "command": "python studies/peak_memory/budgets.py",
        "date": datetime.now(UTC).date().isoformat(),
        "machine": f"{platform.machine()}, Python {platform.python_version()}, "
        f"torch {version('torch')}",
        "curves": curves,
    }
    write_json(FILE, written)


def draw(curves: Curves) -> None:
    figure = go.Figure()
    for (name, curve), dash in zip(
        curves.items(), ("solid", "dash", "dot", "longdash"), strict=True
    ):
        if not curve:
            continue
        points = sorted((float(budget), one["peak_gib"]) for budget, one in curve.items())
        x, y = zip(*points, strict=True)
        figure.add_trace(go.Scatter(x=x, y=y, name=name, mode="lines+markers", line={"dash": dash}))
    for name, peak in CHECKPOINTED.items():
        figure.add_hline(
            y=peak,
            line={"dash": "dashdot", "color": "grey", "width": 1.5},
            opacity=1,
            annotation_text=f"{name}, published",
        )
    figure.update_layout(
        template="simple_white",
        title="Predicted peak of the 1.6 B model over the activation memory budget",
        xaxis_title="activation_memory_budget",
        yaxis_title="peak memory, GiB",
        yaxis_rangemode="tozero",
        legend={"x": 0.98, "y": 0.02, "xanchor": "right", "yanchor": "bottom"},
    )
    figure.write_image(FILE.with_name("budgets.png"), width=900, height=520, scale=2)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--draw", action="store_true", help="draw what is known")
    draw(read_json(FILE)["curves"] if parser.parse_args().draw else predict_all())


if __name__ == "__main__":
    main()
