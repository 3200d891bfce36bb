"""Checks the sequences of an optimizer step in a trainer against the configuration of this run."""

from autotune.errors import InvalidInput
from autotune.spec.config import TrainingConfig
from autotune.training.script.interface import current_config, current_run


def config_for(global_batch: int, *, set_by: str) -> TrainingConfig:
    """Returns the configuration of this run for a script with `global_batch` sequences a step.

    Raises InvalidInput if its search has another number, or if micro batches do not add up to it.
    `set_by` says which settings of the script decide the number.
    """
    run = current_run()
    if run is not None and run.workload.global_batch != global_batch:
        raise InvalidInput(
            f"the script trains on {global_batch} sequences in an optimizer step ({set_by}), "
            f"and its search on {run.workload.global_batch}",
            hint=f"search with --global-batch {global_batch}",
        )
    config = current_config(global_batch=global_batch)
    if global_batch % config.micro_batch_size:
        raise InvalidInput(
            f"the configuration has a micro batch of {config.micro_batch_size}, which does not "
            f"divide the {global_batch} sequences of an optimizer step ({set_by})",
            hint="train on as many sequences in a step as in the study",
        )
    return config
