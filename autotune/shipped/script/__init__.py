"""What only `train.py`, the export for PyTorch, contains: its data, its loop and its program.

Constants and functions that differ with the configuration are written by the exporter, and declared
in `written.py`. Where two modules define the same names, a script has one of them.
"""
