"""The Pareto front and the pick: pure functions over records."""
