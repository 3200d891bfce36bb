"""Searches whose trials have ranks on two nodes of a Ray cluster, simulated on this machine."""

import json
import subprocess
import sys

import pytest

pytest.importorskip("ray", reason="Ray is not installed: autotune[ray]")

from studies.reliability.node_kills import OTHER_KINDS, carry_out, storm
from tests.building.ray_cluster import RayCluster

pytestmark = pytest.mark.slow

SPACE = """
description = "What devices share out."
[techniques]
sharding = ["none", "ddp", "zero1", "zero2", "zero3"]
tensor_parallel = [1, 2]
micro_batch_size = [2]
"""
SIZES = (
    *("--layers", "2", "--width", "32", "--heads", "2", "--seq-len", "32", "--global-batch", "8"),
    *("--steps", "10", "--warmup-steps", "2", "--eval-sequences", "4"),
)
FEW_BYTES = 64
"""Threads of gloo may hold on to a sum of losses for a moment longer."""


@pytest.fixture(scope="module")
def cluster():
    with RayCluster(nodes=2, cpus=2) as made:
        yield made


def searched(cluster, folder, *words):
    """Returns {configuration: trial} of a search that trains every configuration to the end."""
    (folder / "space.toml").write_text(SPACE)
    command = [sys.executable, "-m", "autotune", "search", "--json", *words, *SIZES]
    command += ["--space", "space.toml", "--max-mem", "64MiB", "--device", "cpu", "--trials", "100"]
    command += ["--sampler", "grid", "--full-trainings", "--no-predict", "--fresh", "--no-confirm"]
    done = subprocess.run(
        command, cwd=folder, env=cluster.environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return {str(trial["config"]): trial for trial in json.loads(done.stdout)["trials"]}


@pytest.mark.parametrize("ranks", ["2", "4"])
def test_a_training_over_two_nodes_computes_what_it_does_on_one(ranks, cluster, tmp_path):
    words = ("--devices-per-trial", ranks)
    nodes = ("--nodes-per-trial", "2", "--ray", cluster.address)
    on_one, on_two = (
        searched(cluster, tmp_path, *words),
        searched(cluster, tmp_path, *words, *nodes),
    )
    assert on_one.keys() == on_two.keys()
    assert {"ok"} == {trial["outcome"] for trial in on_two.values()}
    for name, here in on_one.items():
        there = on_two[name]
        assert there["perplexity"] == pytest.approx(here["perplexity"], rel=1e-6)
        peaks = "peak_memory_bytes_by_rank"
        assert there[peaks] == pytest.approx(here[peaks], abs=FEW_BYTES), name


def test_a_killed_node_or_rank_loses_one_attempt_and_leaves_nothing_behind(tmp_path):
    with RayCluster(nodes=3, cpus=2) as three:
        found = carry_out(storm(tmp_path, three, seed=1), node_kills=2, others=len(OTHER_KINDS))
    assert found["violations"] == []
