"""Pure functions over records and predictions: the front, the pick, ablation, comparison with a published table."""
