"""A study of a script: its arguments, its files, and what it needs from torchrun."""

import textwrap
from dataclasses import replace
from pathlib import Path

import pytest

import autotune
from autotune.cli.search_run import continue_command
from autotune.errors import StudyMismatch
from autotune.execution.local import LocalExecutor
from autotune.execution.server.limits import time_limits
from autotune.execution.tasks import Train
from autotune.exporters import TARGETS
from autotune.reporting.report.commands import rerun_command, search_command
from autotune.spec.config import TrainingConfig
from autotune.spec.user_code import sha256_of
from autotune.spec.workload import make_workload
from autotune.storage.store import StudyStore
from autotune.study.request import SearchRequest
from tests.building.commands import run_here
from tests.building.studies import definition, open_store
from tests.exporters.recipes import recipe

INNER = textwrap.dedent("""
    import sys
    import torch, autotune
    from torch import nn

    width = 16
    for argument in sys.argv[1:]:
        exec(open(argument).read())
    model = nn.Linear(width, width)
    model, optimizer = autotune.apply(model, torch.optim.AdamW(model.parameters()))
    for step in range(100):
        loss = model(torch.ones(2, width)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        autotune.report(tokens=2, loss=loss)
""")
WRAPPERS = {
    "runpy": "import runpy, pathlib\n"
    "runpy.run_path(str(pathlib.Path(__file__).with_name('inner.py')))",
    "import": "import inner",
    "exec": "import pathlib\nexec(pathlib.Path(__file__).with_name('inner.py').read_text())",
}
SPACE = "[techniques]\nmicro_batch_size = [2]\n"
STEPS = 9


@pytest.fixture
def project(tmp_path, monkeypatch, one_trial_server):
    """The current folder, with `inner.py`, which trains, and the wrapper `train.py`."""
    monkeypatch.chdir(tmp_path)
    Path("inner.py").write_text(INNER)
    Path("train.py").write_text(WRAPPERS["runpy"])
    Path("space.toml").write_text(SPACE)
    return tmp_path


def search(project, *, name="mine", script="train.py", **settings):
    return autotune.search(
        name=name,
        space="space.toml",
        max_mem="1GiB",
        script=str(project / script),
        global_batch=2,
        steps=STEPS,
        **{"trials": 1, "confirm": False, **settings},
    )


def stored(name="mine"):
    store = StudyStore()
    try:
        return store.definition(name)[0].workload
    finally:
        store.close()


@pytest.fixture
def executor(project):
    with LocalExecutor(project / "work") as started:
        yield started


def submitted(executor, workload, project):
    """Run a trial of the workload, and return what it finished with."""
    training = executor.training(
        definition(workload=workload),
        TrainingConfig(micro_batch_size=2),
        study_folder=project / "work",
        enforce_cap=False,
    )
    task = Train(training=training)
    return executor.run(task, log_name="trial", limits=time_limits(120.0))


def workload_of(project, script="train.py", **settings):
    script = str(project / script)
    return make_workload("cpu", {"script": script, "global_batch": 2, "steps": STEPS, **settings})


# -- files -----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_no_trial_of_an_edited_inner_script_enters_the_study(wrapper, project, executor):
    (project / "train.py").write_text(WRAPPERS[wrapper])
    workload, _ = executor.examine(workload_of(project), {}, device="cpu")
    assert workload.script_files == {"inner.py": sha256_of(project / "inner.py")}
    assert submitted(executor, workload, project).measurement.outcome == "ok"
    (project / "inner.py").write_text(INNER.replace("width = 16", "width = 8"))
    with pytest.raises(StudyMismatch, match=r"inner\.py has changed since the study"):
        submitted(executor, workload, project)


def test_an_edit_that_breaks_the_script_is_no_crashed_trial(project, executor):
    workload, _ = executor.examine(workload_of(project), {}, device="cpu")
    (project / "inner.py").write_text("raise LookupError")
    with pytest.raises(StudyMismatch, match=r"inner\.py has changed since the study"):
        submitted(executor, workload, project)


@pytest.mark.slow
def test_a_study_whose_inner_script_was_edited_is_not_resumed(project):
    search(project)
    (project / "inner.py").write_text(INNER.replace("width = 16", "width = 8"))
    with pytest.raises(StudyMismatch, match=r"inner\.py has changed since the study"):
        search(project)
    (project / "inner.py").write_text(INNER)
    assert len(search(project).trials) == 1


@pytest.mark.slow
def test_files_that_trials_read_late_are_stored_with_the_study(project):
    report = "    autotune.report(tokens=2, loss=loss)"
    (project / "late.py").write_text("")
    (project / "inner.py").write_text(INNER.replace(report, f"    import late\n{report}"))
    search(project)
    workload = stored()
    assert set(workload.script_files) == {"inner.py"}
    assert workload.script_files_after_apply == {"late.py": sha256_of(project / "late.py")}
    (project / "late.py").write_text("edited = True")
    with pytest.raises(StudyMismatch, match=r"late\.py has changed since the study"):
        search(project)


def test_a_file_that_another_worker_has_read_otherwise_is_not_added(tmp_path):
    (tmp_path / "train.py").write_text("")
    workload = replace(workload_of(tmp_path), script_files={"inner.py": "a"})
    with open_store(f"sqlite:///{tmp_path}/studies.db") as store:
        store.create_study(definition("mine", workload=workload), trials_wanted=1)
        store.add_script_files("mine", {"late.py": "b"})
        for found in ({"late.py": "c", "new.py": "n"}, {"inner.py": "c"}):
            with pytest.raises(StudyMismatch, match=r"(late|inner)\.py has changed since"):
                store.add_script_files("mine", found)
        assert store.add_script_files("mine", {}) == {"late.py": "b"}
        assert store.definition("mine")[0].workload.script_files == {"inner.py": "a"}


def test_a_study_of_an_earlier_release_knows_no_files_and_goes_on(project, executor):
    workload, _ = executor.examine(workload_of(project), {}, device="cpu")
    (project / "inner.py").write_text(INNER.replace("width = 16", "width = 8"))
    earlier = replace(workload, script_files=None)
    assert submitted(executor, earlier, project).measurement.outcome == "ok"


# -- arguments -------------------------------------------------------------------------------------


def test_arguments_reach_the_script_and_are_part_of_the_study(project):
    (project / "tiny.py").write_text("width = 4")
    argument = str(project / "tiny.py")
    result = search(project, script_arguments=[argument])
    assert result.trials[0].bytes_by_kind["parameters"] == (4 * 4 + 4) * 4
    assert stored().script_arguments == (argument,)
    assert set(stored().script_files) == {"inner.py", "tiny.py"}
    with pytest.raises(StudyMismatch, match=r"was begun with script arguments .*, not none"):
        search(project)


def test_arguments_follow_two_dashes_on_the_command_line(project, monkeypatch):
    requests = []
    monkeypatch.setattr(
        "autotune.cli.search_run.run_with_display", lambda r, **_: requests.append(r)
    )
    typed = ["--script", "train.py", "--", "config/tiny.py", "--device=cpu"]
    assert run_here("search", "--device", "cpu", *typed, folder=project).returncode == 0
    [request] = requests
    assert request.workload["script_arguments"] == ("config/tiny.py", "--device=cpu")
    alone = run_here("search", "--", "config/tiny.py", folder=project)
    assert (alone.returncode, alone.stdout) == (2, "")
    assert "error: only a script takes arguments such as 'config/tiny.py'" in alone.stderr


def test_commands_that_repeat_the_study_end_with_its_arguments(project):
    workload = workload_of(project, script_arguments=["config/tiny.py", "--note=a b"])
    for command in (
        search_command(definition(workload=workload), trials=1),
        rerun_command(definition(workload=workload), number=0, config=TrainingConfig()),
    ):
        assert command.endswith("-- config/tiny.py '--note=a b'")


@pytest.mark.parametrize(
    ("changes", "python"),
    [
        ({}, "python train.py"),
        ({"one_rank": True}, "torchrun --standalone train.py"),
        ({"script": "package.train"}, "python -m package.train"),
    ],
)
def test_an_export_starts_the_script_with_its_arguments(changes, python, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("package").mkdir()
    for file in ("train.py", "package/train.py"):
        Path(file).write_text("")
    settings = {"script": "train.py", "script_arguments": ("x.py", "--note=a b"), **changes}
    export = TARGETS["pytorch"].write(recipe(**settings), "2")
    assert export.command.endswith(f" {python} x.py '--note=a b'")


def test_the_continue_command_needs_no_arguments(project):
    request = SearchRequest(
        workload={"script": str(project / "train.py"), "script_arguments": ["x"]}
    )
    assert continue_command("mine", request) == "autotune search --name mine"


# -- torchrun --------------------------------------------------------------------------------------

DEMANDS = "import os\nassert os.environ['WORLD_SIZE'] == '1', os.environ['RANK']\nimport inner\n"
LOOKS = "import os\nassert int(os.environ.get('RANK', -1)) == -1\nimport inner\n"


def test_a_script_that_demands_the_variables_of_torchrun_runs_as_the_only_rank(project):
    (project / "train.py").write_text(DEMANDS)
    notes = []
    with LocalExecutor(project / "work", note=notes.append) as executor:
        workload, _ = executor.examine(workload_of(project), {}, device="cpu")
        assert workload.one_rank
        assert submitted(executor, workload, project).measurement.outcome == "ok"
    assert "needs WORLD_SIZE, which torchrun sets: every trial runs it as the only" in notes[0]


def test_a_script_that_only_looks_for_its_rank_runs_without_one(project, executor):
    (project / "train.py").write_text(LOOKS)
    workload, _ = executor.examine(workload_of(project), {}, device="cpu")
    assert not workload.one_rank


@pytest.mark.slow
def test_a_script_that_opens_a_process_group_runs_as_the_only_rank(project, executor):
    group = "import torch.distributed as dist\ndist.init_process_group('gloo')\n"
    (project / "train.py").write_text(group + "assert dist.get_world_size() == 1\nimport inner\n")
    workload, _ = executor.examine(workload_of(project), {}, device="cpu")
    assert workload.one_rank
    assert submitted(executor, workload, project).measurement.outcome == "ok"
