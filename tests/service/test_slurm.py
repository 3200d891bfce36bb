"""Jobs of a real Slurm with the scripts of docs/slurm.md, whose trials end at once."""

import re
import sys
from contextlib import closing
from pathlib import Path

import pytest

from autotune.storage.searches import NewSearch, Searches
from autotune.storage.store import StudyStore
from autotune.storage.tables import ATTEMPTS
from tests.building.slurm import SlurmCluster, unavailable
from tests.quick_study.worker import SPACE

ROOT = Path(__file__).parents[2]
MISSING = unavailable()
pytestmark = [pytest.mark.slow, pytest.mark.skipif(MISSING is not None, reason=str(MISSING))]

WORKER, SEARCH = (
    script.replace("#SBATCH --gres=gpu:1\n", "").replace("--cpus-per-task=8", "--cpus-per-task=1")
    for script in re.findall(r"```bash\n(.*?)```", (ROOT / "docs/slurm.md").read_text(), re.S)
)
SHIM = f"""#!/bin/bash
cd "$WORK_FOLDER"
module=tests.building.queue_process
[ "$1" = search ] && module=tests.building.quick_search
exec {sys.executable} -m $module "$@"
"""
"""`autotune` in PATH, whose trials are stand-ins."""


@pytest.fixture
def storage(tmp_path):
    return f"sqlite:///{tmp_path}/autotune.db"


@pytest.fixture
def store(storage):
    with closing(StudyStore(storage, create=True)) as store:
        yield store


@pytest.fixture
def cluster(tmp_path, storage, monkeypatch):
    programs = tmp_path / "programs"
    programs.mkdir()
    (programs / "autotune").write_text(SHIM)
    (programs / "autotune").chmod(0o755)
    variables = {
        "AUTOTUNE_STORAGE": storage,
        "AUTOTUNE_LOCK_FOLDER": str(tmp_path / "locks"),
        "PYTHONPATH": str(ROOT),
        "SEARCH_MODULE": "tests.building.quick_search_process",
        "STAND_IN_SECONDS": "0.5",
        "WORK_FOLDER": str(tmp_path),
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PATH", str(programs), prepend=":")
    with SlurmCluster(tmp_path / "slurm") as cluster:
        yield cluster


def submit(store, trials):
    space = {"space": "quick", "space_content": SPACE.read_text()}
    settings = {**space, "name": "my-study", "max_mem": "80MiB", "trials": trials}
    new = NewSearch(request=settings, submitted_by="ada", study="my-study")
    return Searches(store.database).submit(new)[0].id


def trials_with_result(store):
    if not store.has_study("my-study"):
        return 0
    return sum(record.is_finished for record in store.trials("my-study"))


def attempts(store):
    """Returns how each attempt of a trial has ended."""
    with store.database.reading() as connection:
        return list(connection.scalars(ATTEMPTS.select().with_only_columns(ATTEMPTS.c.state)))


def test_a_cancelled_worker_gives_its_trial_back_and_the_next_job_goes_on(cluster, store):
    queue, number = Searches(store.database), submit(store, trials=40)
    first = cluster.submit(WORKER)
    cluster.wait_until(lambda: trials_with_result(store) > 1)
    cluster.cancel(first)
    cluster.wait_for(first, "CANCELLED")
    cluster.wait_until(lambda: queue.get(number).state == "queued")
    before = trials_with_result(store)
    assert before < 40
    assert set(attempts(store)) <= {"finished", "given_back"}
    cluster.submit(WORKER)
    cluster.wait_until(lambda: queue.get(number).has_ended)
    search = queue.get(number)
    assert (search.state, search.run, search.losses) == ("finished", 2, 0)
    assert trials_with_result(store) == 40


def test_a_worker_whose_time_is_over_is_queued_again_and_goes_on(cluster, store):
    queue, number = Searches(store.database), submit(store, trials=1000)
    job = cluster.submit(WORKER, "--time=3", "--signal=B:USR1@30")
    cluster.wait_until(lambda: trials_with_result(store))
    cluster.wait_until(lambda: cluster.field(job, "Restarts") != "0")
    assert "The worker has stopped" in cluster.output_of(job)
    assert queue.get(number).losses == 0
    assert set(attempts(store)) <= {"finished", "given_back"}
    before = trials_with_result(store)
    cluster.wait_until(lambda: trials_with_result(store) > before)
    search = queue.get(number)
    assert (search.run > 1, search.losses) == (True, 0)


def test_a_search_that_is_cancelled_gives_its_trial_back_and_goes_on(cluster, store):
    script = SEARCH.replace("8GiB", f"80MiB --space {SPACE}").replace("60", "40")
    job = cluster.submit(script)
    cluster.wait_until(lambda: trials_with_result(store) > 1)
    cluster.requeue(job)
    cluster.wait_until(lambda: cluster.field(job, "Restarts") == "1")
    assert set(attempts(store)) <= {"finished", "given_back", "running"}
    cluster.wait_for(job, "COMPLETED")
    assert trials_with_result(store) == 40
    assert "Stopped; every finished trial is stored" in cluster.output_of(job)
