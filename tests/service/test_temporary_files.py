"""What a server writes for a moment is gone after the next start, also where it was killed."""

import ast
from pathlib import Path

import autotune.service
from tests.building.service import serving

PACKAGE = Path(autotune.service.__file__).parent
HAS_A_FOLDER_OF_ITS_OWN = "quick_process.py"
"""Its server names that folder in TMPDIR."""


def test_the_next_server_removes_what_a_killed_one_was_checking(tmp_path):
    left = tmp_path / "work" / "a" / ".waiting-0123"
    left.mkdir(parents=True)
    (left / "submitted.toml").touch()
    left.with_name(f"{left.name}.lock").touch()
    with serving(f"sqlite:///{tmp_path}/a.db"):
        assert not [*left.parent.glob(".waiting-*")]


def test_no_module_of_the_service_writes_where_nobody_sweeps():
    importing = set()
    for file in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names = [
                each.name for each in getattr(node, "names", ()) if isinstance(node, ast.Import)
            ]
            if isinstance(node, ast.ImportFrom):
                names.append(node.module)
            if "tempfile" in names:
                importing.add(file.name)
    assert importing == {HAS_A_FOLDER_OF_ITS_OWN}
