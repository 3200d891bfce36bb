"""Text, tokens and batches. Run in a process of its own: `datasets` may load torch."""
