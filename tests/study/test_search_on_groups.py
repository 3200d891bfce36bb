"""Searches whose trials are two processes each, two at a time: on this machine and on Ray."""

import pytest

from autotune.study.events import StudyOpened, TrialBegan
from autotune.study.request import SearchRequest
from autotune.study.search import search

SPACE = """
description = "two kinds of sharding"
[techniques]
sharding = ["ddp", "zero3"]
micro_batch_size = [1, 2]
"""


@pytest.mark.slow
@pytest.mark.parametrize("where", [None, "local"])
def test_two_trials_of_two_processes_at_a_time_give_a_front(where, tmp_path, monkeypatch):
    if where is not None:
        pytest.importorskip("ray")
    monkeypatch.setenv("HOME", str(tmp_path))  # Ray writes its token there
    monkeypatch.chdir(tmp_path)
    (tmp_path / "space.toml").write_text(SPACE)
    request = SearchRequest(
        name="on-groups",
        storage=f"sqlite:///{tmp_path}/studies.db",
        space="space.toml",
        max_mem=64 * 2**20,
        device="cpu",
        devices="4",
        ray=where,
        trials=5,
        fresh=True,
        confirm_share=0.2,
        workload={
            "devices_per_trial": 2,
            "layers": 2,
            "width": 32,
            "heads": 2,
            "sequence_length": 32,
            "global_batch": 8,
            "steps": 12,
            "warmup_steps": 2,
            "evaluation_sequences": 4,
        },
    )
    events = []
    result = search(request, listener=events.append)
    [opened] = [event for event in events if isinstance(event, StudyOpened)]
    assert len(opened.places) == 2
    began = {event.device for event in events if isinstance(event, TrialBegan)}
    assert began == set(opened.places)
    assert {record.outcome for record in result.trials} <= {"ok", "dominated"}
    for record in result.trials:
        assert record.devices == 2
        assert len(record.peak_memory_bytes_by_rank) == 2
    zero3 = [record for record in result.trials if record.config.sharding == "zero3"]
    assert {record.number for record in zero3} & set(result.front)
