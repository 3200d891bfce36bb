"""A stored study's script or Python model runs only where somebody named it on this machine."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from autotune.errors import InvalidInput, StorageUnavailable
from autotune.spec.study import DEFAULT_STORAGE
from autotune.spec.user_code import sha256_of
from autotune.spec.workload import make_workload
from autotune.study.opening.trusted_code import TRUSTED, check_trusted, names_code, trust
from tests.building.commands import run_here
from tests.building.studies import definition, measured, write_study

MODEL = """
from pathlib import Path
Path(__file__).with_name("ran").touch()

def make():
    return None
"""


@pytest.fixture
def project(tmp_path, monkeypatch):
    """The current folder, with code that leaves a file `ran` when it is run."""
    monkeypatch.chdir(tmp_path)
    Path("theirs.py").write_text(MODEL)
    return tmp_path


def of_script(*arguments, script="theirs.py"):
    return make_workload(
        "cpu",
        {
            "script": script,
            "script_arguments": arguments,
            "model_sha256": sha256_of(Path(script)),
            "global_batch": 8,
        },
    )


def of_model():
    return make_workload(
        "cpu",
        {
            "model": f"{Path('theirs.py').absolute()}:make",
            "model_sha256": sha256_of(Path("theirs.py")),
            "text_sha256": "f" * 64,
            "steps": 24,
        },
    )


def write(workload, name="theirs"):
    """Write a study of this workload to the default database, as somebody else could have."""
    write_study("sqlite:///studies/autotune.db", [measured()], name=name, workload=workload)


def is_trusted(workload, folder):
    try:
        check_trusted(workload, study="theirs", storage=DEFAULT_STORAGE, folder=folder)
    except InvalidInput:
        return False
    return True


COMMANDS = {
    "a search that continues it": ["search", "--name", "theirs", "--trials", "2"],
    "a confirmation": ["confirm", "theirs"],
    "a prediction": ["predict", "--study", "theirs", "--trial", "0"],
    "an explanation": ["explain", "theirs", "0"],
    "the largest model": ["fit", "theirs"],
    "a figure that predicts again": ["plot", "theirs", "timeline"],
}


@pytest.mark.parametrize("command", COMMANDS)
def test_no_command_runs_the_model_of_a_study_that_came_from_elsewhere(
    command, project, one_trial_server
):
    write(of_model())
    ended = run_here(*COMMANDS[command], folder=project)
    assert ended.returncode == 2
    assert "theirs.py:make', which nobody has named on this machine" in ended.stderr
    assert "autotune studies trust theirs\n" in ended.stderr
    assert not (project / "ran").exists()


def test_a_script_that_came_from_elsewhere_is_not_run(project, one_trial_server):
    write(of_script("--out", "x"))
    ended = run_here("search", "--name", "theirs", "--trials", "2", folder=project)
    assert ended.returncode == 2
    assert "runs the code 'theirs.py --out x'" in ended.stderr
    assert not (project / "ran").exists()


def test_after_trust_the_code_is_run(project, one_trial_server):
    write(of_model())
    ended = run_here("studies", "trust", "theirs", folder=project)
    assert ended.returncode == 0
    assert ended.stdout.splitlines() == [
        f"study theirs may run {project}/theirs.py:make here",
        f"its file has the SHA-256 {sha256_of(Path('theirs.py'))}",
    ]
    ended = run_here("predict", "--study", "theirs", "--trial", "0", folder=project)
    assert "which nobody has named" not in ended.stderr
    assert (project / "ran").exists(), ended.stderr


def test_a_study_without_code_needs_no_trust(project):
    write(definition().workload)
    ended = run_here("studies", "trust", "theirs", folder=project)
    assert (ended.returncode, ended.stdout) == (0, "study theirs runs no code of a file\n")
    assert is_trusted(definition().workload, None)


@pytest.mark.parametrize(
    "changes",
    [
        {"script": "other.py"},
        {"script_arguments": ("--out", "y")},
        {"script_arguments": ()},
        {"model_sha256": "0" * 64},
    ],
    ids=["another script", "another argument", "no argument", "another content"],
)
def test_what_the_study_says_by_now_is_not_what_was_trusted(changes, project):
    workload = of_script("--out", "x")
    trust(workload, folder=project)
    assert is_trusted(workload, project)
    assert not is_trusted(replace(workload, **changes), project)


def test_arguments_are_not_other_ways_to_write_the_same(project):
    trust(of_script("a b"), folder=project)
    assert not is_trusted(of_script("a", "b"), project)


@pytest.mark.parametrize("arguments", [[], ["--out"], ["--out", "y"]])
def test_a_script_is_named_with_its_arguments_or_not_at_all(arguments, project):
    workload = of_script("--out", "x")
    specified = {"script": "theirs.py", "script_arguments": ["--out", "x"]}
    assert names_code(specified, workload)
    assert not names_code({**specified, "script_arguments": arguments}, workload)
    assert not names_code({}, workload)


def test_a_note_that_is_a_link_is_not_believed(project):
    workload = of_model()
    trust(workload, folder=project / "elsewhere")
    (project / "here").mkdir()
    os.symlink(project / "elsewhere" / TRUSTED, project / "here" / TRUSTED)
    assert is_trusted(workload, project / "elsewhere")
    assert not is_trusted(workload, project / "here")


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file away")
def test_a_note_of_another_user_is_not_believed(project):
    workload = of_model()
    trust(workload, folder=project)
    os.chown(project / TRUSTED, 65534, 65534)
    assert not is_trusted(workload, project)


def test_an_import_brings_no_trust_along(project):
    workload = of_script()
    write(workload, name="mine")
    trust(workload, folder=project / "studies" / "work" / "mine")
    run_here("studies", "export", "mine", "--out", "mine.db", folder=project)
    storage = "sqlite:///elsewhere/autotune.db"
    assert run_here("studies", "import", "mine.db", "--storage", storage, folder=project)
    ended = run_here("search", "--name", "mine", "--storage", storage, folder=project)
    assert ended.returncode == 2
    assert "which nobody has named on this machine" in ended.stderr
    assert f"autotune studies trust mine --storage {storage}\n" in ended.stderr


def test_a_note_that_cannot_be_written_is_one_sentence(project):
    Path("work").touch()  # where its folder would be
    with pytest.raises(StorageUnavailable, match="trusted-code cannot be written"):
        trust(of_script(), folder=Path("work"))


def test_a_script_that_ends_its_process_at_once_is_one_sentence(project, one_trial_server):
    Path("theirs.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n")
    script = str(project / "theirs.py")
    ended = run_here("search", "--script", script, "--trials", "1", folder=project)
    assert ended.returncode == 2
    assert "theirs.py ended its process before its first step" in ended.stderr
