"""Which configuration to try next: our expected hypervolume improvement, or one of Optuna's samplers."""
