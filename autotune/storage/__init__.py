"""The studies database: study definitions, attempts of workers at trials, and every result.

Callers get dataclasses of `autotune.spec`; no SQL row leaves this package.
"""
