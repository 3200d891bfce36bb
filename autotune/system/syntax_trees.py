"""Syntax trees of Python code, which one thread at a time makes.

CPython 3.11 counts the recursion of all threads together while it makes a tree. Where the garbage
collector runs Python code meanwhile, another thread may go on, and `ast.parse` ends with
`SystemError: AST constructor recursion depth mismatch`
(https://github.com/python/cpython/issues/106905).
"""

import ast
import threading

ONE_THREAD_AT_A_TIME = threading.RLock()
"""Held by whoever makes a tree, as pydantic does of docstrings (`spec/schema.py`)."""


def syntax_tree(text: str | bytes, *, file: str = "<unknown>") -> ast.Module:
    """Returns the tree of a module. Raises what `ast.parse` does."""
    with ONE_THREAD_AT_A_TIME:
        return ast.parse(text, filename=file)
