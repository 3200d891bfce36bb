"""The committed table of what each trainer can express is what the code says today."""

import importlib.util
from pathlib import Path

STUDY = Path(__file__).parents[2] / "studies" / "exports"


def test_the_table_is_current():
    spec = importlib.util.spec_from_file_location("export_table", STUDY / "table.py")
    table = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(table)
    assert (STUDY / "table.md").read_text() == table.page()
