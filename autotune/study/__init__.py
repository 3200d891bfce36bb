"""The search: open or resume a study, choose a configuration, run the trial, store the result.

`search.py` is the entry, `loop.py` the main loop, `trial_runner.py` one trial.
"""
