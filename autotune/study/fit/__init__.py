"""Finds how large a model can be trained under a cap, by predictions and one real trial."""
