"""Pure functions over records and predictions: front, pick, ablation, published comparison."""
