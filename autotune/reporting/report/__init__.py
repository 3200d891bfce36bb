"""The report: one HTML page about a study that a person can send to a colleague.

Everything is computed, then drawn.
"""
