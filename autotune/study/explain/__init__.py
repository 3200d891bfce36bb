"""Explains why a configuration needs its memory, by predictions of it and of changes to it."""
