"""Runs a training script, and prints its peak of live tensor bytes: as a trial of a search would.

    AUTOTUNE_CONFIG=autotune_config.json python studies/your_script/peak_of_a_run.py train.py ...

Measures the two optimizer steps after the fifth, from the end of one step of the optimizer to that
of another, and ends the script. Prints one JSON line. Only on a CPU.
"""

import gc
import json
import os
import runpy
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from autotune.memory.cpu import CpuMeter

STEPS_BEFORE, STEPS_MEASURED = 5, 2


def living_tensors() -> Iterator[Tensor]:
    """Yields every tensor: also what the script holds besides weights and optimizer state.

    Those that torch.compile traced with are of other classes, and have no memory.
    """
    for one in gc.get_objects():
        if type(one) in (Tensor, nn.Parameter) and one.device.type == "cpu":
            yield one


def main() -> None:
    meter = CpuMeter()
    measured = ExitStack()
    steps = 0

    def count(*_: Any) -> None:
        nonlocal steps
        steps += 1
        if steps == STEPS_BEFORE:
            measured.enter_context(meter.measuring(living_tensors))
        if steps == STEPS_BEFORE + STEPS_MEASURED:
            measured.close()
            print(json.dumps({"peak_memory_bytes": meter.reading().peak_memory_bytes}), flush=True)
            os._exit(0)  # the script may catch any exception

    register_optimizer_step_post_hook(count)
    del sys.argv[0]
    sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
    runpy.run_path(sys.argv[0], run_name="__main__")
    raise SystemExit(f"{sys.argv[0]} ended after {steps} steps")


if __name__ == "__main__":
    main()
