"""Measures the finalists of a search again, so that the pick is not the luckiest of many trials.

`plan.py` says what to measure next, as a pure function of all that was measured; `session.py` does
it, within its share of the search's time.
"""
