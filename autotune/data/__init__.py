"""Text, tokens and batches. Run in a process of its own, for `datasets` may load torch; only `early.py` runs before."""
