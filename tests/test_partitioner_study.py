"""The study of the partitioner in several releases of torch."""

import json
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from studies.compressed import read_json

SAVED = Path(__file__).parents[1] / "studies" / "partitioner" / "saved.py"
SETTINGS = (
    "precision",
    "layers",
    "attention",
    "checkpointed",
    "budget",
    "solver",
    "estimator",
)
RESULTS = read_json(SAVED.with_name("results.json.xz"))


def test_every_release_saves_the_same_tensors():
    by_settings = defaultdict(set)
    for line in RESULTS["saved"]:
        saved = [line[key] for key in ("saved_bytes", "gib_by_operator", "recomputed")]
        settings = [line[key] for key in SETTINGS]
        by_settings[json.dumps(settings)].add(json.dumps(saved, sort_keys=True))
    assert [settings for settings, found in by_settings.items() if len(found) > 1] == []


@pytest.mark.slow
def test_a_smaller_budget_saves_less_for_backward():
    command = [sys.executable, str(SAVED), "--layers", "1", "--budgets", "0.0", "0.5", "1.0"]
    ran = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    sizes = [json.loads(line)["saved_bytes"] for line in ran.stdout.splitlines()]
    assert sizes[0] == 0 < sizes[1] < sizes[2]
