"""The Python interface, where it is more than the command line's own code."""

import json
import subprocess
import sys

import autotune

SIZES = {"layers": 2, "width": 32, "heads": 2, "sequence_length": 32, "global_batch": 4}


def test_a_prediction_from_python_is_that_of_the_command_line():
    prediction = autotune.predict(configuration={"checkpointing": "block"}, device="cpu", **SIZES)
    flags = "--layers 2 --width 32 --heads 2 --seq-len 32 --global-batch 4 --device cpu --checkpointing block --json"
    ended = subprocess.run(
        [sys.executable, "-m", "autotune", "predict", *flags.split()], capture_output=True, text=True, check=True
    )
    assert json.loads(ended.stdout)["peak_memory_bytes"] == prediction.peak_memory_bytes
