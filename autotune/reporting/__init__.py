"""Figures, the HTML report and plain tables of a study. Each figure is computed, then drawn."""
