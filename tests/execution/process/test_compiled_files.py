"""A compiler that is interrupted leaves nothing that later trials would take for compiled code."""

import ctypes
import shutil
import stat

import pytest
from torch._inductor import cpp_builder

from autotune.errors import TrialLost
from autotune.execution.local import LocalExecutor
from autotune.execution.process.compiled_files import keep_incomplete_files_out

INTERRUPTED = """\
#!/bin/sh
case "$*" in *.main.cpp*) is_kernel=yes ;; esac
if [ -e {marker} ] || [ -z "$is_kernel" ]; then exec {compiler} "$@"; fi
touch {marker}
while [ "$1" != -o ]; do shift; done
echo half >"$2"
{end}
"""
"""A compiler that ends as `end` says when it has half written its first kernel, and works then."""


def interrupted_compiler(folder, end):
    """Returns the path of an `INTERRUPTED` one."""
    file = folder / "c++"
    file.write_text(
        INTERRUPTED.format(marker=folder / "interrupted", compiler=shutil.which("g++"), end=end)
    )
    file.chmod(file.stat().st_mode | stat.S_IXUSR)
    return file


@pytest.fixture
def build(tmp_path, monkeypatch):
    """Builds a library of one function; returns its path."""
    monkeypatch.setattr(cpp_builder.CppBuilder, "build", cpp_builder.CppBuilder.build)
    keep_incomplete_files_out()
    compiler = str(interrupted_compiler(tmp_path, "exit 1"))
    source = tmp_path / "one.main.cpp"
    source.write_text('extern "C" int answer() { return 42; }')

    def build():
        options = cpp_builder.CppOptions(compiler=compiler)
        builder = cpp_builder.CppBuilder("one.main", [str(source)], options, str(tmp_path))
        builder.build()
        return builder.get_target_file_path()

    return build


def test_a_compiler_that_fails_leaves_no_library(build, tmp_path):
    with pytest.raises(Exception, match="compil"):
        build()
    assert (tmp_path / "interrupted").exists()
    assert not (tmp_path / "one.main.so").exists()


def test_a_library_has_its_name_once_it_is_complete(build):
    with pytest.raises(Exception, match="compil"):
        build()
    assert ctypes.CDLL(build()).answer() == 42


@pytest.mark.slow
def test_after_a_kill_while_compiling_the_next_trial_compiles(tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", str(interrupted_compiler(tmp_path, "kill -9 $PPID")))
    with LocalExecutor(tmp_path / "work") as executor:
        with pytest.raises(TrialLost, match="killed from outside"):
            executor.probe("cpu", {"compile": ["block"]})
        _, unavailable = executor.probe("cpu", {"compile": ["block"]})
    assert unavailable == {}
