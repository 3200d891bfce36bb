"""What only `autotune_trainer.py` contains: techniques for transformers' Trainer.

They change classes and methods of a model, not its modules, so that a saved checkpoint has the same
names as without them.
"""
