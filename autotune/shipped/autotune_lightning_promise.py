"""Says after twenty steps of Lightning's Trainer whether it keeps what the trial promises.

    trainer:
      callbacks:
        - class_path: autotune_lightning_promise.PromiseCallback
          init_args: {trial: {trial: "study tour, trial 12", tokens_per_second: 9000.0}}

Put it next to the script that starts training. It needs lightning, and no autotune. Nothing else
changes without it, or with AUTOTUNE_PROMISE=0.
"""

from typing import Any

from lightning.pytorch import Callback

from autotune.shipped.steps_of_lightning import StepsOfLightning


class PromiseCallback(StepsOfLightning, Callback):
    """Compares a training with the numbers and facts of its trial, once."""

    def __init__(self, trial: dict[str, Any]) -> None:
        super().__init__()
        self.trial = trial
