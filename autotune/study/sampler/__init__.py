"""Samplers, which pick the next configuration: expected hypervolume improvement, or Optuna's."""
