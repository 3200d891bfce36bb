"""Compares predicted speeds with speeds that were measured, on any machine.

    python studies/predicted_speed/compare.py                        # GPUs, in a minute
    python studies/predicted_speed/compare.py STUDY sqlite:///FILE   # a study of yours

The speeds of the GPUs are those in `studies/gpu`. The H200 was probed when they were measured. The
H100 was not: its rates are those of its data sheet, as for a card that nobody has.
"""

import statistics
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # the repository need not be installed
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from autotune import api
from autotune.execution.local import LocalExecutor
from autotune.spec.config import TrainingConfig
from autotune.spec.data_sheets import sheet_of
from autotune.spec.prediction import Prediction
from autotune.spec.result import DeviceInfo
from autotune.spec.workload import Workload
from autotune.study.prediction.predictions import Forecaster
from studies.compressed import read_json

GPUS = Path(__file__).parents[1] / "gpu"
MEASURED_ALONE = ("h200/first-search", "h100/speeds")

Row = tuple[str, float, Prediction]
"""What was measured: the configuration, its tokens per second, and its prediction."""


def main() -> None:
    if len(sys.argv) > 1:
        _, study, storage = sys.argv
        print_rows(study, rows_of_study(study, storage))
        return
    for name in MEASURED_ALONE:
        search = read_json(GPUS / f"{name}.json.xz")
        print_rows(search["device"]["name"], rows_on_gpu(search))


def rows_on_gpu(search: dict[str, Any]) -> Iterator[Row]:
    """Yields the rows of a search as `autotune show --json` has printed it."""
    device = DeviceInfo(**_known(DeviceInfo, search["device"]))
    if device.matrix_flops_per_second is None:
        sheet = sheet_of(device.name)
        assert sheet is not None, device.name
        device = sheet.device()
    yield from _predicted(
        Workload(**_known(Workload, search["workload"])),
        device,
        [
            (TrainingConfig(**trial["config"]), trial["tokens_per_second"])
            for trial in search["trials"]
            if trial["tokens_per_second"]
        ],
    )


def rows_of_study(study: str, storage: str) -> Iterator[Row]:
    result = api.show(study, storage=storage)
    trials = [
        (record.config, record.tokens_per_second)
        for record in result.trials
        if record.tokens_per_second
    ]
    yield from _predicted(result.workload, result.device, trials)


def print_rows(title: str, rows: Iterator[Row]) -> None:
    print(f"\n{title}: tokens/s measured | predicted | measured over predicted | most of the time")
    ratios, inside = [], 0
    for words, speed, found in rows:
        bounds = found.predicted_tokens_per_second_bounds
        if found.predicted_tokens_per_second is None or bounds is None:
            continue
        ratios.append(speed / found.predicted_tokens_per_second)
        inside += bounds[0] <= speed <= bounds[1]
        predicted = f"{found.predicted_tokens_per_second:,.0f} | {ratios[-1]:.2f}"
        print(f"{words} | {speed:,.0f} | {predicted} | {found.bound_by}")
    print(
        f"{len(ratios)} speeds: median {statistics.median(ratios):.2f}, {min(ratios):.2f} to "
        f"{max(ratios):.2f}; {inside} within the bounds"
    )


def _predicted(
    workload: Workload, device: DeviceInfo, trials: list[tuple[TrainingConfig, float]]
) -> Iterator[Row]:
    with (
        tempfile.TemporaryDirectory() as folder,
        LocalExecutor(Path(folder), only_predicts=True) as executor,
    ):
        forecaster = Forecaster.of_device(device, executor=executor, workload=workload)
        for config, speed in trials:
            found = forecaster.forecast(config).prediction
            if found is not None:
                yield config.describe(), speed, found


def _known(kind: type, stored: dict[str, Any]) -> dict[str, Any]:
    """Returns the values of fields that this release has."""
    names = {field.name for field in fields(kind)}
    return {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in stored.items()
        if name in names
    }


if __name__ == "__main__":
    main()
