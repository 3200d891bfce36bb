"""Peak memory over the activation memory budget, predicted at the full size of the table, without a GPU.

    python studies/peak_memory/budgets.py

Whole model and block by block, with and without the step in backward. Writes `budgets.json`, after every prediction,
and goes on from there; and draws `budgets.png` (`--draw`: only that). A whole-model compilation takes about a minute.
"""

import argparse
import json
import platform
import sys
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import plotly.graph_objects as go

from autotune.config import TrainingConfig
from autotune.executors.local import LocalExecutor
from autotune.space_file import load_space
from autotune.study.forecast import Forecaster
from autotune.workload import make_workload

GIB = 1024**3
FILE = Path(__file__).with_suffix(".json")
BUDGETS = (0.0, 0.02, *(step / 20 for step in range(1, 17)), 0.9, 1.0)
CURVES = {
    "whole model": {"compile": "model"},
    "by block": {"compile": "block"},
    "by block, step in backward": {"compile": "block", "optimizer_fusion": "backward"},
}
CHECKPOINTED = {"checkpoint": 12.529, "fused_checkpoint": 7.425}
"""Published peaks of plain checkpointing, GiB."""


def predict_all() -> dict[str, Any]:
    space = load_space("peak_memory")
    known = json.loads(FILE.read_text())["curves"] if FILE.exists() else {}
    curves: dict[str, dict[str, Any]] = {name: dict(known.get(name, {})) for name in CURVES}
    with TemporaryDirectory() as folder, LocalExecutor(Path(folder)) as executor:
        forecaster = Forecaster(
            executor=executor,
            workload=make_workload("cuda", space.workload),
            device_type="cuda",
            torch_version=space.reference.torch if space.reference else None,
        )
        for name, choices in CURVES.items():
            for budget in BUDGETS:
                if f"{budget:g}" not in curves[name]:
                    curves[name][f"{budget:g}"] = _predicted(forecaster, {**choices, "memory_budget": budget})
                    _write(curves)
    return curves


def _predicted(forecaster: Forecaster, choices: dict[str, Any]) -> dict[str, Any]:
    config = TrainingConfig(optimizer="adafactor-fixed-rate", micro_batch_size=4, **choices)
    prediction = forecaster.predict(config)
    peak = prediction.peak_memory_bytes / GIB
    print(f"{config.describe()}: {peak:.3f} GiB, {prediction.seconds:.0f} s", file=sys.stderr, flush=True)
    return {
        "peak_gib": peak,
        "phase": prediction.phase,
        "gib_by_category": {name: size / GIB for name, size in prediction.bytes_by_category.items()},
        "plan": prediction.plan,
        "seconds": prediction.seconds,
    }


def _write(curves: dict[str, dict[str, Any]]) -> None:
    written = {
        "command": "python studies/peak_memory/budgets.py",
        "date": datetime.now(UTC).date().isoformat(),
        "machine": f"{platform.machine()}, Python {platform.python_version()}, torch {version('torch')}",
        "curves": curves,
    }
    FILE.write_text(json.dumps(written, indent=1) + "\n")


def draw(curves: dict[str, dict[str, Any]]) -> None:
    figure = go.Figure()
    for (name, curve), dash in zip(curves.items(), ("solid", "dash", "dot"), strict=True):
        if not curve:
            continue
        points = sorted((float(budget), one["peak_gib"]) for budget, one in curve.items())
        x, y = zip(*points, strict=True)
        figure.add_trace(go.Scatter(x=x, y=y, name=name, mode="lines+markers", line={"dash": dash}))
    for name, peak in CHECKPOINTED.items():
        figure.add_hline(y=peak, line_dash="dashdot", line_color="grey", annotation_text=f"{name}, published")
    figure.update_layout(
        template="simple_white",
        title="Predicted peak of the 1.6 B model over the activation memory budget",
        xaxis_title="activation_memory_budget",
        yaxis_title="peak memory, GiB",
        yaxis_rangemode="tozero",
        legend={"x": 0.98, "y": 0.02, "xanchor": "right", "yanchor": "bottom"},
    )
    figure.write_image(FILE.with_suffix(".png"), width=900, height=520, scale=2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draw", action="store_true", help="draw what is known")
    draw(json.loads(FILE.read_text())["curves"] if parser.parse_args().draw else predict_all())


if __name__ == "__main__":
    main()
