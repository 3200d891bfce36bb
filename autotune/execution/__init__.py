"""Where trials run.

Each executor is shaped like `concurrent.futures`: submit, futures, shutdown.
"""
