"""`autotune search --script package.train -- ARGUMENTS`: a module with arguments, as a whole."""

import subprocess
import sys
from pathlib import Path

import pytest

from autotune.spec.user_code import sha256_of
from autotune.storage.store import StudyStore
from tests.study.test_study_of_a_script import INNER, SPACE, STEPS


@pytest.mark.slow
def test_a_module_runs_with_its_arguments_as_python_m_would_run_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("package").mkdir()
    Path("package/__init__.py").write_text("")
    Path("package/inner.py").write_text(INNER)
    Path("package/train.py").write_text("from . import inner")
    Path("tiny.py").write_text("width = 4")
    Path("space.toml").write_text(SPACE)
    settings = ["--name", "mine", "--space", "space.toml", "--trials", "1", "--device", "cpu"]
    settings.append("--no-confirm")
    script = ["--script", "package.train", "--global-batch", "2", "--steps", str(STEPS)]
    command = [sys.executable, "-m", "autotune", "search", *settings, *script, "--", "tiny.py"]
    subprocess.run(command, check=True)
    store = StudyStore()
    try:
        workload = store.definition("mine")[0].workload
        [trial] = store.trials("mine")
    finally:
        store.close()
    assert trial.bytes_by_kind["parameters"] == (4 * 4 + 4) * 4
    assert set(workload.script_files) == {"package/__init__.py", "package/inner.py", "tiny.py"}
    assert workload.script_files["tiny.py"] == sha256_of(Path("tiny.py"))
    Path("tiny.py").write_text("width = 8")
    again = subprocess.run(command, capture_output=True, text=True, check=False)
    assert again.returncode == 2
    assert "error: tiny.py has changed since the study was created" in again.stderr
