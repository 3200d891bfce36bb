"""The options of a script, and the loop over its steps."""

import argparse
import functools
import time
from collections.abc import Callable
from contextlib import nullcontext

from autotune.shipped.peak_memory import PeakMemory
from autotune.shipped.promise import Promise
from autotune.shipped.script.learning_rate import learning_rate
from autotune.shipped.script.written import (
    DEVICE,
    EVALUATION_SEQUENCES,
    GLOBAL_BATCH,
    MICRO_BATCH,
    PROMISE,
    SEED,
    STEPS,
    TEXT,
    Sequences,
    Training,
    resident_tensors,
    train_step,
)
from autotune.shipped.training_order import training_order


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--text", default=TEXT, help="file, folder or name on the hub")
    parser.add_argument(
        "--tokens", metavar="FOLDER", help="train.npy and held_out.npy of a study, not a text"
    )
    parser.add_argument("--steps", type=int, default=STEPS, help="number of optimizer steps")
    parser.add_argument("--save", metavar="FILE", help="file for the trained weights")
    return parser.parse_args()


def check_lengths(text: Sequences, held_out: Sequences) -> None:
    for part, sequences, needed in (
        ("training", text, GLOBAL_BATCH),
        ("held-out", held_out, EVALUATION_SEQUENCES),
    ):
        if len(sequences) < needed:
            raise SystemExit(
                f"the {part} text has {len(sequences)} sequences and {needed} are needed: "
                "use more text"
            )


def train(
    training: Training,
    text: Sequences,
    *,
    steps: int,
    say: Callable[[str], None],
    ranks: int = 1,
    is_first: bool = True,
) -> PeakMemory:
    """Makes `steps` optimizer steps; says their losses and the speed, and returns their peak.

    Compares the first steps with the trial's, on the rank that is the first of `ranks`.
    """
    batches = training_order(sequences=len(text), global_batch=GLOBAL_BATCH, seed=SEED)
    timed_from = min(5, steps - 1)
    peak_memory = PeakMemory(DEVICE)
    promise = Promise(
        PROMISE, device_type=DEVICE, devices=ranks, is_first=is_first, peak=peak_memory
    )
    tokens_per_step = GLOBAL_BATCH * text.tokens_per_sequence()
    resident = functools.partial(resident_tensors, training)
    started = time.perf_counter()
    for step in range(steps):
        if step == timed_from:
            started = time.perf_counter()
        batch = text.batch(next(batches))
        rate = learning_rate(step, steps=steps)
        promise.step_begins(training.model, training.updater.optimizer)
        promise.saw(
            tokens_per_step / ranks,
            rows=MICRO_BATCH,
            length=batch[0].shape[1],
            micro_batches=GLOBAL_BATCH // (MICRO_BATCH * ranks),
        )
        is_measured = step == timed_from - 1
        with peak_memory.of_step(resident) if is_measured else nullcontext():
            loss = train_step(training, batch, rate=rate)
        promise.step_ended()
        if step % 10 == 9 or step == steps - 1:
            say(f"step {step + 1}: loss {loss:.4f}")
    promise.ends()
    seconds = (time.perf_counter() - started) / max(1, steps - timed_from)
    say(f"{tokens_per_step / seconds:,.0f} tokens/s after the first {timed_from} steps")
    return peak_memory
