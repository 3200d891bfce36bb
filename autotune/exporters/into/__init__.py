"""Writes a trial's configuration into the file that the user's trainer already reads.

The file keeps every character but those of the keys that change. `edited.py` changes keys in a
text, `dialects.py` says how each trainer's own files spell what its exporter writes, `changes.py`
finds the keys to change, and `written.py` writes the file, and says what changed and why.
"""
