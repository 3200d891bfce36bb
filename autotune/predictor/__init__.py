"""Peak memory without running the model: the trial's own training step on fake tensors, every storage watched.

`predict.py` makes predictions; the other files model what fake tensors do not show. This module
stays free of torch.
"""
