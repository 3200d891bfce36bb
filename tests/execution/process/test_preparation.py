"""The prepared files of a study: created atomically, recognised, and created once."""

import dataclasses
import json
import os

from autotune.execution.prepared_folder import is_made_of
from autotune.execution.process.preparation import prepare, prepare_seed
from autotune.execution.tasks import Prepare, PrepareSeed
from autotune.spec.workload import make_workload


def prepared_of(folder, **settings):
    workload = make_workload(
        "cpu", {"layers": 1, "width": 16, "heads": 1, "sequence_length": 16, **settings}
    )
    made = prepare(Prepare(workload=workload, folder=folder))
    return dataclasses.replace(
        workload, text_sha256=made.text_sha256, model_sha256=made.model_sha256
    )


def test_prepared_files_of_another_text_are_recognised(tmp_path):
    lines = (json.dumps({"text": f"text number {number} of many"}) for number in range(2000))
    (tmp_path / "other.jsonl").write_text("\n".join(lines))
    workload = prepared_of(tmp_path / "one")
    other = prepared_of(tmp_path / "other", dataset=str(tmp_path / "other.jsonl"))
    folders = ("one", "other", "none")
    assert [is_made_of(tmp_path / folder, workload) for folder in folders] == [True, False, False]
    assert [is_made_of(tmp_path / folder, other) for folder in folders] == [False, True, False]


def test_two_workers_may_draw_the_weights_of_a_seed_at_once(tmp_path):
    workload = dataclasses.replace(prepared_of(tmp_path / "prepared"), seed=1)
    seeds = tmp_path / "prepared-seed-1"
    for _ in range(2):  # the second as one that looked before the first was there
        task = PrepareSeed(workload=workload, prepared=tmp_path / "prepared", folder=seeds)
        prepare_seed(task)
    assert (seeds / "weights.pt").is_file()
    assert sorted(os.listdir(tmp_path)) == ["prepared", "prepared-seed-1"]
