"""Trains one configuration in this process and measures its memory, speed and perplexity.

`step.py` is one optimizer step, `trainer.py` runs and measures a trial, `speed.py` times steps,
`parity.py` compares the first steps with a reference, `turns.py` lets trainings step in turn, and
`script/` runs a user's training script.

This module stays free of torch, because `import autotune` needs `training.script.interface`.
"""
