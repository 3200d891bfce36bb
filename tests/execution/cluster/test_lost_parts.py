"""Parts of a Ray cluster that are killed or stopped, and what becomes of the search.

The cluster is simulated on this machine; trials take a moment and have no processes
(`tests/quick_study/quick_executor.py`).
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.building.ray_cluster import CHECKOUT, RayCluster, wait_until
from tests.quick_study.checks import violations

pytest.importorskip("ray")
pytestmark = pytest.mark.slow

WORKER = CHECKOUT / "tests" / "quick_study" / "worker.py"
RAY_KILLS = CHECKOUT / "studies" / "reliability" / "ray_kills.py"
SECONDS_TO_START = 120.0
SECONDS_TO_END = 20.0
"""Five on a quiet machine."""


@pytest.fixture(scope="module")
def shared_cluster():
    with RayCluster(nodes=2) as cluster:
        yield cluster


@pytest.fixture
def cluster(shared_cluster):
    """A cluster of two nodes, whatever the test before has killed."""
    while len(shared_cluster.nodes) < 2:
        shared_cluster.add_node()
    return shared_cluster


class Driver:
    """A search with `options`, in a process of its own."""

    def __init__(self, cluster, folder, *options, trials=100_000, seconds=0.3):
        self.storage = f"sqlite:///{folder}/studies.db"
        self.said_in = folder / "driver.txt"
        words = ("--storage", self.storage, "--trials", str(trials), "--quick", str(seconds))
        words += ("--events",)
        with self.said_in.open("a") as said:
            self.process = subprocess.Popen(
                (sys.executable, str(WORKER), "--ray", cluster.address, *words, *options),
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
                cwd=folder,
                env={**cluster.environment, "AUTOTUNE_LOCK_FOLDER": str(folder)},
            )

    @property
    def said(self):
        return self.said_in.read_text()

    def results(self):
        return self.said.count("TrialEnded")

    def wait_for(self, text, *, times=1):
        wait_until(
            lambda: len(re.findall(text, self.said)) >= times or self.process.poll() is not None,
            what=f"{times} x {text!r}",
            seconds=SECONDS_TO_START,
        )
        assert len(re.findall(text, self.said)) >= times, self.said[-3000:]

    def end(self):
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(SECONDS_TO_END) == 143

    def left_behind(self):
        """What is wrong with the study, of which trials were given back when it was stopped."""
        found = violations(self.storage, "quick")
        return [one for one in found if "has no result" not in one]


@pytest.fixture
def start(cluster, tmp_path):
    """Starts a driver, which ends with the test."""
    drivers = []

    def start_driver(*options, **settings):
        drivers.append(Driver(cluster, tmp_path, *options, **settings))
        return drivers[-1]

    yield start_driver
    for driver in drivers:
        driver.process.kill()
        driver.process.wait()


def wait_until_nothing_is_left(cluster):
    wait_until(lambda: not cluster.workers(), what="the workers to end", seconds=SECONDS_TO_END)


def test_a_killed_worker_is_replaced_and_its_trial_runs_again(cluster, start):
    driver = start("--devices", "2", seconds=1.0)
    driver.wait_for("TrialEnded", times=4)
    os.kill(cluster.workers()[0], signal.SIGKILL)
    driver.wait_for("PlaceLeft")
    driver.wait_for("PlaceJoined")
    driver.wait_for("TrialEnded", times=12)
    driver.end()
    assert driver.left_behind() == []
    wait_until_nothing_is_left(cluster)
    assert not list(cluster.folder.glob("node*/cache/autotune/nodes/*"))


def test_a_stopped_worker_is_given_up_and_its_place_comes_back(cluster, start):
    driver = start("--devices", "2")
    driver.wait_for("TrialEnded", times=4)
    victim = cluster.workers()[0]
    os.kill(victim, signal.SIGSTOP)
    driver.wait_for("PlaceLeft")
    driver.wait_for("PlaceJoined")
    driver.end()
    assert driver.left_behind() == []
    assert not Path(f"/proc/{victim}").exists()


def test_a_node_that_joins_takes_the_place_of_one_that_was_killed(cluster, start):
    driver = start("--devices", "2")
    driver.wait_for("TrialEnded", times=4)
    cluster.kill_node(cluster.nodes[0])
    driver.wait_for("PlaceLeft")
    cluster.add_node()
    driver.wait_for("PlaceJoined")
    driver.wait_for("TrialEnded", times=driver.results() + 4)
    driver.end()
    assert driver.left_behind() == []


def test_a_worker_that_is_killed_while_the_study_is_prepared_does_not_end_the_search(
    cluster, start
):
    driver = start("--devices", "1", trials=5)
    wait_until(lambda: bool(cluster.workers()), what="a worker", seconds=SECONDS_TO_START)
    os.kill(cluster.workers()[0], signal.SIGKILL)
    assert driver.process.wait(SECONDS_TO_START) == 0, driver.said[-3000:]
    assert driver.left_behind() == []


def test_a_search_ends_while_it_waits_for_a_device(cluster, start, tmp_path):
    first = start("--devices", "2")
    first.wait_for("PlaceIsFree", times=2)
    (tmp_path / "second").mkdir()
    second = Driver(cluster, tmp_path / "second", "--devices", "2")
    second.wait_for("all are taken")
    began = time.monotonic()
    second.end()
    assert time.monotonic() - began < SECONDS_TO_END
    first.end()


def test_a_lost_head_ends_the_search_with_what_to_do(tmp_path):
    with RayCluster(nodes=1) as cluster:
        driver = Driver(cluster, tmp_path, "--devices", "1")
        driver.wait_for("TrialEnded", times=4)
        cluster.kill_head()
        assert driver.process.wait(60) == 75, driver.said[-3000:]
    assert f"error: the head of the Ray cluster at {cluster.address} does not answer" in driver.said
    assert "hint: " in driver.said
    assert driver.left_behind() == []


def test_a_head_that_was_started_anew_ends_the_search_with_what_to_do(tmp_path):
    with RayCluster(nodes=1) as cluster:
        driver = Driver(cluster, tmp_path, "--devices", "1")
        driver.wait_for("TrialEnded", times=4)
        cluster.kill_head()
        cluster.start_head()
        assert driver.process.wait(60) == 75, driver.said[-3000:]
    assert "error: " in driver.said
    assert driver.left_behind() == []


def test_twenty_kills_lose_nothing(tmp_path):
    words = ["--kills", "20", "--nodes", "2", "--seconds-between", "2"]
    for kind in ("worker", "young worker", "node", "driver"):
        words += ["--only", kind]
    done = subprocess.run(
        [sys.executable, str(RAY_KILLS), *words],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(CHECKOUT)},
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-3000:] + done.stdout
    seen = json.loads(done.stdout)
    assert seen["kills"] == 20
    assert seen["violations"] == []
