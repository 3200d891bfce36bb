"""Predicts the rows of the published table at full size, beside the published peaks.

    python studies/peak_memory/predicted.py [ROW ...]      # all eleven rows; no GPU needed

Every row is predicted as the torch release of the table trains it, and as torch 2.13. Rows that are
compiled as a whole are extrapolated from fewer layers. Prints a table of `README.md`.
"""

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from autotune.execution.local import LocalExecutor
from autotune.spec.search_space import bind_space
from autotune.spec.space_file import load_space
from autotune.spec.workload import make_workload
from autotune.study.prediction.predictions import Forecaster

GIB = 1024**3
LATER_TORCH = "2.13"


def predicted_gib(names: list[str], *, torch_version: str | None) -> dict[str, float]:
    """Returns the predicted peak of each row."""
    space = load_space("peak_memory")
    workload = make_workload("cuda", space.workload)
    named = bind_space(space, workload.legality_context, unavailable={}).named
    with TemporaryDirectory() as folder, LocalExecutor(Path(folder), only_predicts=True) as local:
        forecaster = Forecaster(
            executor=local, workload=workload, device_type="cuda", torch_version=torch_version
        )
        forecaster.forecast_all([named[name] for name in names])
        peaks = {}
        for name in names:
            forecast = forecaster.forecast(named[name])
            if forecast.prediction is None:
                sys.exit(f"{name}: {forecast.error}")
            peaks[name] = forecast.prediction.peak_memory_bytes / GIB
        return peaks


def table_line(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    reference = load_space("peak_memory").reference
    assert reference is not None
    names = sys.argv[1:] or list(reference.rows)
    if reference.control not in names:
        names.insert(0, reference.control)
    published = {name: (reference.rows[name].peak_memory_bytes or 0) / GIB for name in names}
    predicted = predicted_gib(names, torch_version=reference.torch)
    later = predicted_gib(names, torch_version=LATER_TORCH)
    heads = ["row", "published, GiB", f"predicted as torch {reference.torch}", "ratio"]
    heads += ["saved, published", "saved, predicted", f"as torch {LATER_TORCH}"]
    print(table_line(heads) + "\n" + table_line(["---"] * len(heads)))
    for name in names:
        saved = [1 - peaks[name] / peaks[reference.control] for peaks in (published, predicted)]
        cells = [name, f"{published[name]:.3f}", f"{predicted[name]:.3f}"]
        cells.append(f"{predicted[name] / published[name]:.3f}")
        cells += [f"{100 * share:.1f} %" for share in saved]
        print(table_line([*cells, f"{later[name]:.3f}"]))


if __name__ == "__main__":
    main()
