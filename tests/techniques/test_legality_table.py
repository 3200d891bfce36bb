"""The committed table of what is legal where is what the code says today."""

import importlib.util
from pathlib import Path

STUDY = Path(__file__).parents[2] / "studies" / "legality"


def test_the_table_is_current():
    spec = importlib.util.spec_from_file_location("legality_table", STUDY / "table.py")
    table = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(table)
    assert (STUDY / "README.md").read_text() == table.page()
