"""Which optimizer a class is of."""

from autotune.spec.optimizers import OPTIMIZERS

BY_CLASS = {facts.class_name: name for name, facts in OPTIMIZERS.items()}
