"""The tools that torch.compile needs, found in the same way as Triton and inductor do."""

import pytest
import torch

from autotune.system import build_tools
from autotune.techniques import compilation, optimizer_fusion


@pytest.fixture
def bare(tmp_path, monkeypatch):
    """A host without any compiler; bare("gcc") installs one."""
    monkeypatch.setenv("PATH", str(tmp_path))
    for variable in ("CC", "CXX"):
        monkeypatch.delenv(variable, raising=False)

    def install(name):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)

    return install


def test_a_gpu_needs_a_c_compiler_and_a_cpu_one_for_cpp(bare):
    assert build_tools.why_no_compilation("cuda").startswith(
        "torch.compile needs the C compiler; install gcc"
    )
    assert build_tools.why_no_compilation("cpu").startswith(
        "torch.compile needs the C++ compiler; install g++"
    )
    bare("clang")
    bare("g++")
    assert build_tools.why_no_compilation("cuda") is None
    assert build_tools.why_no_compilation("cpu") is None


def test_a_variable_that_names_a_missing_compiler_is_in_the_reason(bare, monkeypatch):
    bare("gcc")
    monkeypatch.setenv("CC", "gcc-99")
    monkeypatch.setenv("CXX", "g++-99")
    assert "CC is 'gcc-99', which was not found" in build_tools.why_no_compilation("cuda")
    assert "install g++-99" in build_tools.why_no_compilation("cpu")


def test_the_headers_of_python_are_needed_as_well(tmp_path, monkeypatch):
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"include": str(tmp_path)})
    reason = build_tools.why_no_compilation("cpu")
    assert reason.startswith("torch.compile needs the Python headers")
    assert f"{tmp_path}/Python.h is missing" in reason
    (tmp_path / "Python.h").touch()
    assert build_tools.why_no_compilation("cpu") is None


@pytest.mark.parametrize("scope", ["block", "model"])
def test_without_them_compiled_configurations_are_unavailable_with_that_reason(scope, bare):
    device = torch.device("cpu")
    assert compilation.unavailable("none", device=device) is None
    assert compilation.unavailable(scope, device=device) == build_tools.why_no_compilation("cpu")


def test_an_optimizer_that_compiles_its_update_is_unavailable_as_well(bare):
    pytest.importorskip("torchao")
    found = optimizer_fusion.unavailable("none", "adamw-8bit", device=torch.device("cpu"))
    assert found == build_tools.why_no_compilation("cpu")


def test_the_first_error_of_a_compiler_follows_torchs_message():
    text = (
        "CppCompileError: C++ compile error\n\nCommand:\ng++ one.cpp -Werror\n\n"
        "Output:\none.cpp:1: warning: unused\none.cpp:2:3: error: 'x' was not declared\n"
    )
    assert build_tools.first_compile_error(text) == ": one.cpp:2:3: error: 'x' was not declared"
    assert build_tools.first_compile_error("ValueError: error in the model") == ""
