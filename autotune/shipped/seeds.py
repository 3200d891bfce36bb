"""Seeds the random number generators that a model may draw from."""

import random

import numpy
import torch


def seed_generators(seed: int) -> None:
    """Seeds the global generators of Python, numpy and torch."""
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)
