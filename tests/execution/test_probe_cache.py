"""What a probe has seen to work on a device is remembered, and nothing else."""

import dataclasses
import os
import stat

import pytest

from autotune.execution import probe_cache
from autotune.execution.local import LocalExecutor
from autotune.spec.result import DeviceInfo

CPU = DeviceInfo(
    device="cpu", name="a processor", total_memory_bytes=2**30, versions={"torch": "2.13.0"}
)
pytestmark = pytest.mark.usefixtures("one_trial_server")
CHOICES = {"precision": ["fp32", "tf32"], "compile": ["none"]}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """The user's cache folder of each test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def files_in(cache):
    return [file for file in cache.rglob("*") if file.is_file()]


def test_a_probe_remembers_what_works_and_tries_the_rest_again(tmp_path, cache):
    with LocalExecutor(tmp_path / "work") as executor:
        device, unavailable = executor.probe("cpu", CHOICES)
        assert set(unavailable["precision"]) == {"tf32"}
        assert probe_cache.read_working(device) == {"precision": ["fp32"], "compile": ["none"]}
        assert executor.probe("cpu", CHOICES) == (device, unavailable)


def test_what_worked_before_is_not_tried_again_unless_anew(tmp_path):
    with LocalExecutor(tmp_path / "work") as executor:
        device = executor.identify("cpu")
        probe_cache.write_working(device, {"precision": ["tf32"]})
        assert executor.probe("cpu", {"precision": ["tf32"]})[1] == {}
        assert "tf32" in executor.probe("cpu", CHOICES, anew=True)[1]["precision"]
        assert "tf32" not in probe_cache.read_working(device)["precision"]


@pytest.mark.parametrize(
    "content", ["", "\0", "[]", "{}", '{"device": 1, "working": {}}'], ids=ascii
)
def test_a_damaged_file_is_as_none(content, cache):
    probe_cache.write_working(CPU, {"compile": ["block"]})
    (file,) = files_in(cache)
    file.write_text(content)
    assert probe_cache.read_working(CPU) == {}


@pytest.mark.parametrize(
    "change",
    [
        {"name": "another processor"},
        {"versions": {"torch": "2.14.0"}},
        {"versions": {"torch": "2.13.0", "driver": "580.1"}},
        {"compute_capability": "9.0"},
        {"uuid": "GPU-2"},
    ],
    ids=str,
)
def test_another_device_or_version_is_probed(change):
    probe_cache.write_working(CPU, {"compile": ["block"]})
    assert probe_cache.read_working(CPU) == {"compile": ["block"]}
    assert probe_cache.read_working(dataclasses.replace(CPU, **change)) == {}


def test_another_compiler_is_probed(tmp_path, monkeypatch):
    compiler = tmp_path / "g++"
    compiler.write_text("#!/bin/sh\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    probe_cache.write_working(CPU, {"compile": ["block"]})
    assert probe_cache.read_working(CPU) == {"compile": ["block"]}
    compiler.write_text("#!/bin/sh\nexit 1\n")
    assert probe_cache.read_working(CPU) == {}


def test_what_a_probe_that_compared_less_has_seen_is_tried_again(monkeypatch):
    with monkeypatch.context() as before:
        before.setattr("autotune.techniques.tried_layer.COMPARED", ("output", "gradient"))
        probe_cache.write_working(CPU, {"precision": ["int8-mixed"]})
    assert probe_cache.read_working(CPU) == {}


def test_a_cache_folder_that_others_can_write_to_is_not_used(cache):
    probe_cache.write_working(CPU, {"compile": ["block"]})
    (file,) = files_in(cache)
    folder = file.parent
    folder.chmod(stat.S_IMODE(os.stat(folder).st_mode) | stat.S_IWOTH)
    assert probe_cache.read_working(CPU) == {}
    probe_cache.write_working(CPU, {"compile": ["model"]})
    assert "model" not in file.read_text()
