"""Reads a dataset, tokenizes it and makes batches of it.

Runs in a separate process, because `datasets` may import torch. Only `validation.py` runs in the
process of the search.
"""
