"""Predicts peak memory without a GPU, by running the training step of a trial on fake tensors.

`predict.py` makes predictions; the other files model what fake tensors do not show. This module
stays free of torch.
"""
