"""Trains with the exported scripts of a study's front and compares them with the trials.

    python studies/exports/measure.py STUDY [--storage URL]

Prints a table of peak memory, perplexity and speed. Each script runs in a separate process, in
which `TRAIN` below calls its functions: as many steps as the trial took, of which two are measured
as in a trial (`autotune/memory/`) and the later ones timed.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import autotune
from autotune.exporters import TARGETS
from autotune.exporters.recipe import recipe_of
from autotune.spec.result import StudyResult, TrialRecord

TRAIN = """
import json, math, statistics, sys, time
from pathlib import Path
sys.path.insert(0, str(Path.cwd()))
import torch, train
from autotune.memory.device_meter import make_meter

text, held_out = train.read_text(None, train.TEXT)
training = train.Training()
order = train.training_order(sequences=len(text), global_batch=train.GLOBAL_BATCH, seed=train.SEED)
meter = make_meter(torch.device(train.DEVICE), uuid=None, cap_bytes=None)

def step(number):
    started = time.perf_counter()
    rate = train.learning_rate(number, steps=train.STEPS)
    loss = train.train_step(training, text.batch(next(order)), rate=rate)
    return loss, time.perf_counter() - started

def resident():
    values = [*training.model.parameters(), *training.model.buffers()]
    for state in training.updater.optimizer.state.values():
        values += state.values()
    return [value for value in values if torch.is_tensor(value)]

WARMUP, MEASURED = 4, 2
for number in range(WARMUP):
    step(number)
with meter.measuring(resident):
    for number in range(WARMUP, WARMUP + MEASURED):
        step(number)
timed = [step(number) for number in range(WARMUP + MEASURED, train.STEPS)]
tokens = train.GLOBAL_BATCH * train.SEQUENCE_LENGTH
print(json.dumps({
    "peak_memory_bytes": meter.reading().peak_memory_bytes,
    "tokens_per_second": statistics.median(tokens / seconds for _, seconds in timed),
    "final_loss": timed[-1][0],
    "perplexity": math.exp(train.evaluate(training.model, held_out)),
}))
"""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("study")
    parser.add_argument("--storage", default="sqlite:///studies/autotune.db")
    arguments = parser.parse_args()
    result = autotune.show(arguments.study, storage=arguments.storage)
    print(
        "| trial | configuration | peak, trial | peak, script | perplexity, trial "
        "| perplexity, script | speed ratio |"
    )
    print("|---|---|---|---|---|---|---|")
    for number in result.front:
        record = result.trial(number)
        measured = train_with_export(result, record)
        source = record.perplexity_source
        remark = "" if source is None or source.is_plain else f" ({source})"
        speed_ratio = measured["tokens_per_second"] / record.tokens_per_second
        print(
            f"| {number} | {record.config.describe()} | {record.peak_memory_bytes:,} B "
            f"| {measured['peak_memory_bytes']:,} B | {record.perplexity:.4f}"
            f"{remark} | {measured['perplexity']:.4f} | {speed_ratio:.2f} |",
            flush=True,
        )


def train_with_export(result: StudyResult, record: TrialRecord) -> dict[str, float]:
    """Returns the measurements that `TRAIN` prints for the script of one trial."""
    export = TARGETS["pytorch"].write(recipe_of(result, record), "2")
    with tempfile.TemporaryDirectory() as folder:
        for name, text in export.files.items():
            (Path(folder) / name).write_text(text)
        command = [sys.executable, "-c", TRAIN]
        ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        if ended.returncode:
            sys.exit(ended.stderr)
    return json.loads(ended.stdout.splitlines()[-1])


if __name__ == "__main__":
    main()
