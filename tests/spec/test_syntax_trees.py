"""No two threads make a syntax tree at the same time, whatever they make it for."""

import ast
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest
from pydantic import TypeAdapter

from autotune.exporters.bundle import code
from autotune.spec import checked, reading
from autotune.spec.queued_search import QueuedSearch
from autotune.spec.user_code import read_python


@dataclass
class Settings:
    """Settings of which one is described by docstrings."""

    search: QueuedSearch


def schema_of_what_is_read(folder):
    reading._adapter.__wrapped__(QueuedSearch)


def schema_of_a_setting(folder):
    checked._adapter.__wrapped__(Settings, "search")


def schema_of_an_answer(folder):
    TypeAdapter(QueuedSearch)  # as FastAPI makes it for each route


def code_of_an_export(folder):
    code("import math\n\nmath.pi")


def script_of_a_user(folder):
    file = folder / f"{threading.get_ident()}.py"
    file.write_text("x = 1\n", encoding="utf-8")
    read_python(file)


@pytest.mark.parametrize(
    "make",
    [
        schema_of_what_is_read,
        schema_of_a_setting,
        schema_of_an_answer,
        code_of_an_export,
        script_of_a_user,
    ],
    ids=lambda make: make.__name__,
)
def test_one_thread_at_a_time_makes_a_syntax_tree(tmp_path, monkeypatch, make):
    parse, inside, together = ast.parse, [], []

    def watched(*args, **kwargs):
        inside.append(None)
        together.append(len(inside))
        time.sleep(0.01)
        try:
            return parse(*args, **kwargs)
        finally:
            inside.pop()

    monkeypatch.setattr(ast, "parse", watched)
    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(make, tmp_path) for _ in range(4)]:
            done.result()
    assert len(together) >= 4
    assert max(together) == 1
