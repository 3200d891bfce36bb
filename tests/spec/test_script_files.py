"""A trial belongs to a study only if its script has read the study's files."""

from dataclasses import replace

import pytest

from autotune.errors import InvalidInput, StudyMismatch
from autotune.spec.script_files import (
    check_files_of_trial,
    check_files_unchanged,
    with_files_of_trial,
)
from autotune.spec.user_code import script_file, sha256_of
from autotune.spec.workload import Workload, make_workload


@pytest.fixture
def workload(tmp_path):
    """A workload whose script has read `inner.py` and `config.json`."""
    (tmp_path / "train.py").write_text("")
    workload = make_workload("cpu", {"script": str(tmp_path / "train.py")})
    return replace(workload, script_files={"inner.py": "a", "config.json": "b"})


def test_the_same_files_are_accepted(workload):
    check_files_of_trial(workload, {"config.json": "b", "inner.py": "a"})


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ({"inner.py": "c", "config.json": "b"}, "^inner.py has changed since"),
        ({"inner.py": "a"}, "no longer reads config.json"),
        ({"inner.py": "a", "config.json": "b", "new.py": "n"}, "now also reads new.py"),
    ],
)
def test_other_files_are_rejected_by_name(found, message, workload):
    with pytest.raises(StudyMismatch, match=message) as raised:
        check_files_of_trial(workload, found)
    assert "begin another study with another --name" in raised.value.hint


def test_a_script_that_failed_on_the_way_need_not_have_read_every_file(workload):
    check_files_of_trial(workload, {"inner.py": "a"}, has_read_all=False)
    with pytest.raises(StudyMismatch):
        check_files_of_trial(workload, {"inner.py": "c"}, has_read_all=False)


@pytest.mark.parametrize("found", [{"config.json": "c", "inner.py": "a"}, {"inner.py": "a"}])
def test_a_file_that_the_script_writes_may_change(found, workload):
    written = replace(workload, script_files_after_apply={"config.json": ""})
    check_files_of_trial(written, found)


def test_a_file_that_the_script_made_when_the_study_was_created_may_be_there_already(workload):
    made = replace(workload, script_files={"vocabulary.json": ""})
    check_files_of_trial(made, {"vocabulary.json": "a"})
    check_files_of_trial(made, {"vocabulary.json": ""})


def test_a_study_of_an_earlier_release_accepts_any_files(workload):
    check_files_of_trial(replace(workload, script_files=None), {"new.py": "n"})


def test_files_that_are_read_late_are_added_and_must_not_change():
    later = with_files_of_trial({"inner.py": "a"}, {}, {"late.py": "b", "inner.py": "a"})
    assert later == {"late.py": "b"}
    with pytest.raises(StudyMismatch, match=r"late\.py has changed"):
        with_files_of_trial({}, later, {"late.py": "c"})
    assert with_files_of_trial({}, later, {"late.py": ""}) == {"late.py": ""}


def test_files_of_a_resumed_study_must_be_there_unchanged(workload, tmp_path):
    for name in ("inner.py", "late.py"):
        (tmp_path / name).write_text(name)
    hashes = {name: sha256_of(tmp_path / name) for name in ("inner.py", "late.py")}
    resumed = replace(
        workload,
        script_files={"inner.py": hashes["inner.py"]},
        script_files_after_apply={"late.py": hashes["late.py"], "written.json": ""},
    )
    check_files_unchanged(resumed)
    (tmp_path / "late.py").write_text("edited")
    with pytest.raises(StudyMismatch, match=r"^late\.py has changed"):
        check_files_unchanged(resumed)
    (tmp_path / "inner.py").unlink()
    with pytest.raises(StudyMismatch, match=r"^inner\.py, which the study was created with"):
        check_files_unchanged(resumed)


# -- in the workload -------------------------------------------------------------------------------


def test_files_that_are_read_late_are_no_part_of_the_identity(workload):
    later = replace(workload, script_files_after_apply={"late.py": "b"})
    assert later.fingerprint == workload.fingerprint
    other = replace(workload, script_files={"inner.py": "c", "config.json": "b"})
    assert other.fingerprint != workload.fingerprint


def test_a_script_alone_has_the_identity_of_earlier_releases(workload):
    alone, unknown = (replace(workload, script_files=files) for files in ({}, None))
    assert alone.identity() == unknown.identity()
    assert not {"script_files", "script_arguments", "one_rank"} & alone.identity().keys()


def test_arguments_are_part_of_the_workload_and_of_its_texts(workload):
    given = make_workload(
        "cpu", {"script": workload.script, "script_arguments": ["config/tiny.py", "--note=a b"]}
    )
    assert given.fingerprint != replace(given, script_arguments=()).fingerprint
    assert given.describe_model().endswith("train.py config/tiny.py '--note=a b'")
    assert Workload(**{**given.to_dict(), "script_arguments": ["config/tiny.py", "--note=a b"]})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"script_arguments": ["x"]},
            "only a script takes arguments such as 'x'",
        ),
        ({"script": "train.py", "script_arguments": "x"}, "Invalid script_arguments: 'x'"),
        ({"script": "train.py", "script_arguments": ["\0"]}, "Invalid script_arguments: "),
    ],
)
def test_arguments_that_no_script_can_get_are_rejected(settings, message):
    with pytest.raises(InvalidInput, match=message):
        make_workload("cpu", settings)


# -- modules ---------------------------------------------------------------------------------------


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A folder with modules, which is the current one; importing one of them is an error."""
    for name in ("package/__init__.py", "package/train.py", "package/run/__init__.py"):
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        file.write_text("raise AssertionError")
    (tmp_path / "package" / "run" / "__main__.py").write_text("")
    (tmp_path / "plain" / "inner").mkdir(parents=True)
    (tmp_path / "plain" / "inner" / "train.py").write_text("")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("module", "file"),
    [
        ("package.train", "package/train.py"),
        ("package.run", "package/run/__main__.py"),
        ("plain.inner.train", "plain/inner/train.py"),
    ],
)
def test_a_module_is_found_without_importing_its_packages(module, file, package):
    assert script_file(module) == package / file
    workload = make_workload("cpu", {"script": module, "script_arguments": ["x"]})
    assert workload.script_command() == ["-m", module, "x"]


@pytest.mark.parametrize("module", ["package.gone", "package.train.deeper", "plain.inner", "a.sh"])
def test_a_module_that_is_not_there_is_rejected(module, package):
    with pytest.raises(InvalidInput, match="nor a module that Python finds from here"):
        make_workload("cpu", {"script": module})
