"""Searches one space twice: with shared perplexities and with full trainings.

    python studies/sharing/compare.py

Prints both fronts and the time of each search, and writes all trials to `results.json.xz` next to
this file, or to `--out`. Takes about eight minutes on two idle CPU cores.
"""

import argparse
import dataclasses
import datetime
import tempfile
import time
from pathlib import Path

import autotune
from autotune.spec.config import TrainingConfig
from autotune.spec.result import StudyResult, TrialRecord
from autotune.units import format_size
from studies.compressed import write_json

HERE = Path(__file__).parent
MAX_MEM = "64MiB"
TRIALS = 16


def search(name: str, *, folder: Path, full_trainings: bool) -> tuple[StudyResult, float]:
    began = time.monotonic()
    result = autotune.search(
        name=name,
        storage=f"sqlite:///{folder}/autotune.db",
        space=str(HERE / "space.toml"),
        max_mem=MAX_MEM,
        trials=TRIALS,
        sampler="grid",
        full_trainings=full_trainings,
        fresh=True,
        confirm=False,
        listener=lambda event: (
            print(event, flush=True) if type(event).__name__ == "TrialEnded" else None
        ),
    )
    return result, time.monotonic() - began


def line(record: TrialRecord, other: TrialRecord) -> str:
    """Returns a line that compares a trial with the same configuration in the other search."""
    assert record.peak_memory_bytes
    assert record.tokens_per_second
    assert other.tokens_per_second
    return (
        f"  {record.config.describe():75s} {format_size(record.peak_memory_bytes):>10s} "
        f"{record.tokens_per_second:7,.0f} tokens/s {record.perplexity:6.2f}   other: "
        f"{other.tokens_per_second / record.tokens_per_second:.2f}x the speed, "
        f"{other.perplexity:6.2f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=HERE / "results.json.xz")
    out = parser.parse_args().out
    searches: dict[str, tuple[StudyResult, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in ("shared", "full"):
            searches[name] = search(name, folder=Path(folder), full_trainings=name == "full")
    (shared, shared_seconds), (full, full_seconds) = searches["shared"], searches["full"]
    trials: dict[str, dict[TrainingConfig, TrialRecord]] = {
        name: {trial.config: trial for trial in result.trials}
        for name, (result, _) in searches.items()
    }
    for name, (result, seconds) in searches.items():
        other = trials["full" if name == "shared" else "shared"]
        print(f"\n{name}: {len(result.trials)} trials in {seconds:.0f} s, the front:")
        for number in result.front:
            print(line(result.trial(number), other[result.trial(number).config]))
    fronts = {
        name: {result.trial(n).config for n in result.front}
        for name, (result, _) in searches.items()
    }
    print(
        f"\non both fronts: {len(fronts['shared'] & fronts['full'])}, "
        f"on one: {len(fronts['shared'] ^ fronts['full'])}"
    )
    print(f"time: {shared_seconds / full_seconds:.2f} of the full search's")
    content = {
        "date": str(datetime.date.today()),
        "device": dataclasses.asdict(shared.device),
        "seconds": {"shared": shared_seconds, "full": full_seconds},
        "shared": shared.to_dict(),
        "full": full.to_dict(),
    }
    write_json(out, content)


if __name__ == "__main__":
    main()
