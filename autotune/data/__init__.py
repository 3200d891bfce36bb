"""Text, tokens and batches. Runs in a process of its own, for `datasets` may load torch.

Only `validation.py` runs before that.
"""
