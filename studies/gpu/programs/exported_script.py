"""Trains with the exported `train.py` of the current folder: `exported_script.py [TOKENS]`.

As many steps as its trial took; the peak is read over two of them as a trial's is, those after are
timed. TOKENS: the folder with the study's tokens. Prints one JSON object.
"""

import json
import math
import statistics
import sys
import time
from pathlib import Path

WARMUP_STEPS, MEMORY_STEPS = 4, 2


def main() -> None:
    sys.path.insert(0, str(Path.cwd()))
    import torch
    import train  # type: ignore[import-not-found]  # the exported script

    tokens = sys.argv[1] if len(sys.argv) > 1 else None
    text, held_out = train.read_text(tokens, train.TEXT)
    training = train.Training()
    order = train.training_order(
        sequences=len(text), global_batch=train.GLOBAL_BATCH, seed=train.SEED
    )

    def step(number: int) -> tuple[float, float]:
        batch = text.batch(next(order))
        torch.cuda.synchronize()
        began = time.perf_counter()
        loss = train.train_step(
            training, batch, rate=train.learning_rate(number, steps=train.STEPS)
        )
        torch.cuda.synchronize()
        return loss, time.perf_counter() - began

    first = [step(number) for number in range(WARMUP_STEPS)]
    torch.cuda.reset_peak_memory_stats()
    for number in range(WARMUP_STEPS, WARMUP_STEPS + MEMORY_STEPS):
        first.append(step(number))
    peak = torch.cuda.max_memory_allocated()
    timed = [step(number) for number in range(WARMUP_STEPS + MEMORY_STEPS, train.STEPS)]
    tokens_per_step = train.GLOBAL_BATCH * train.SEQUENCE_LENGTH
    print(
        json.dumps(
            {
                "peak_memory_bytes": peak,
                "tokens_per_second": statistics.median(
                    tokens_per_step / seconds for _, seconds in timed
                ),
                "step_seconds": [seconds for _, seconds in timed],
                "losses": [loss for loss, _ in [*first, *timed]],
                "perplexity": math.exp(train.evaluate(training.model, held_out)),
                "torch": torch.__version__,
            }
        )
    )


if __name__ == "__main__":
    main()
