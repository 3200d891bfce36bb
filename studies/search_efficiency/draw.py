"""Hypervolume over cost, median and quartiles of the seeds, a panel a cap: `efficiency.png`.

python studies/search_efficiency/draw.py
"""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from studies.search_efficiency.summary import at_cost

HERE = Path(__file__).parent
SHARES = numpy.geomspace(0.003, 1.0, 80)
STYLES = {
    "ehvi": ("#0072b2", "solid", 4),
    "random": ("#56b4e9", "dash", 2),
    "optuna TPE": ("#d55e00", "solid", 2),
    "optuna TPE multivariate group": ("#e69f00", "solid", 2),
    "optuna NSGA-II": ("#009e73", "solid", 2),
    "optuna GP": ("#cc79a7", "solid", 2),
    "optuna random": ("#888888", "solid", 2),
    "recipe": ("#000000", "dot", 2),
}
"""Strategies that are drawn: color, dash, width."""


def main() -> None:
    said = json.loads((HERE / "replay.json").read_text())
    groups: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for run in said["runs"]:
        groups[run["cap"], run["strategy"]].append(run)
    caps = list(said["caps_bytes"])
    titles = [f"{cap}: {said['caps_bytes'][cap] / 2**20:.1f} MiB" for cap in caps]
    figure = make_subplots(rows=1, cols=len(caps), subplot_titles=titles, shared_yaxes=True)
    for column, cap in enumerate(caps, start=1):
        for strategy, (color, dash, width) in STYLES.items():
            reached = [
                [100 * at_cost(run, share * said["exhaustive_seconds"]) for share in SHARES]
                for run in groups[cap, strategy]
            ]
            lower, middle, upper = numpy.quantile(reached, [0.25, 0.5, 0.75], axis=0)
            band = f"rgba({', '.join(str(int(color[i : i + 2], 16)) for i in (1, 3, 5))}, 0.15)"
            x = 100 * SHARES
            figure.add_trace(
                go.Scatter(
                    x=[*x, *x[::-1]],
                    y=[*upper, *lower[::-1]],
                    fill="toself",
                    fillcolor=band,
                    line={"width": 0},
                    showlegend=False,
                    legendgroup=strategy,
                ),
                row=1,
                col=column,
            )
            figure.add_trace(
                go.Scatter(
                    x=x,
                    y=middle,
                    name=strategy,
                    legendgroup=strategy,
                    showlegend=column == 1,
                    line={"color": color, "dash": dash, "width": width},
                ),
                row=1,
                col=column,
            )
        figure.add_vline(x=10, line={"color": "#bbbbbb", "dash": "dot"}, row=1, col=column)
        figure.update_xaxes(type="log", title="% of the exhaustive cost", row=1, col=column)
    figure.update_yaxes(range=[50, 100.5])
    figure.update_yaxes(title="% of the exhaustive hypervolume", row=1, col=1)
    figure.update_layout(template="plotly_white", legend={"orientation": "h", "y": -0.25})
    figure.write_image(HERE / "efficiency.png", width=1200, height=480, scale=2)


if __name__ == "__main__":
    main()
