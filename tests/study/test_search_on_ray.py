"""A search on a Ray cluster: one that it starts itself, with stand-in trials."""

import pytest

pytest.importorskip("ray", reason="Ray is not installed: autotune[ray]")

from autotune.execution.cluster.executor import ClusterExecutor
from autotune.execution.private_folder import cache_bases
from autotune.storage.identity import find_work_folder
from autotune.study.events import StudyOpened, TrialBegan
from autotune.study.request import SearchRequest
from autotune.study.search import search
from tests.quick_study.quick_executor import QuickExecutor
from tests.quick_study.stand_in import measurement_of
from tests.quick_study.worker import SPACE

SAME_ON_EVERY_NODE = (
    "config",
    "outcome",
    "peak_memory_bytes",
    "device_bytes",
    "predicted_peak_memory_bytes",
    "perplexity",
    "final_loss",
    "parity",
    "peak_phase",
)


@pytest.fixture(scope="module")
def searched(tmp_path_factory):
    """The result and the events of a search of ten trials at two places."""
    patch = pytest.MonkeyPatch()
    folder = tmp_path_factory.mktemp("ray")
    patch.setenv("HOME", str(folder))  # Ray writes its token there
    patch.chdir(folder)
    events = []
    request = SearchRequest(
        name="on-ray",
        storage=f"sqlite:///{folder}/studies.db",
        space=str(SPACE),
        max_mem=80 * 2**20,
        device="cpu",
        sampler="random",
        trials=10,
        ray="local",
        devices="2",
        predict=False,
        fresh=True,
        confirm=False,
    )
    result = search(request, listener=events.append, make_executor=QuickExecutor)
    yield result, events
    patch.undo()


@pytest.mark.slow
def test_each_trial_has_the_result_that_its_worker_measured(searched):
    result, _ = searched
    assert len(result.trials) == 10
    for record in result.trials:
        expected = measurement_of(record.config)
        assert record.outcome == expected.outcome
        assert record.peak_memory_bytes == expected.peak_memory_bytes


def test_the_study_names_its_places(searched):
    _, events = searched
    [opened] = [event for event in events if isinstance(event, StudyOpened)]
    assert len(opened.places) == 2
    began = {event.device for event in events if isinstance(event, TrialBegan)}
    assert began <= set(opened.places)
    assert began


def test_nothing_of_the_search_is_left_on_the_node(searched):
    left = cache_bases()[0] / "autotune" / "nodes"
    assert list(left.iterdir()) == []


@pytest.mark.slow
def test_a_trial_gives_the_same_record_on_ray_as_without_it(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    found = {}
    for where in (None, "local"):
        request = SearchRequest(
            name="a-study",
            storage=f"sqlite:///{tmp_path}/{where}.db",
            space="quick",
            max_mem=48 * 2**20,
            device="cpu",
            sampler="random",
            seed=3,
            trials=5,
            ray=where,
            fresh=True,
            confirm=False,
            workload={"steps": 10},
        )
        found[where] = search(request)
    for here, on_ray in zip(found[None].trials, found["local"].trials, strict=True):
        for name in SAME_ON_EVERY_NODE:
            assert getattr(here, name) == getattr(on_ray, name), (here.number, name)
        logs = find_work_folder(request.storage) / "a-study" / "logs"
        assert list(logs.glob(f"trial-{on_ray.number}*.log")), "logs come back to the driver"
    assert found[None].device == found["local"].device


MODEL = """
from torch import nn

from helper import WIDTH


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(256, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + block(x).tanh()
        return self.head(x)


def build():
    return Model()
"""


@pytest.mark.slow
def test_a_model_of_the_user_reaches_a_node_that_does_not_see_its_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(ClusterExecutor, "_is_seen_by_node", lambda *_: False)
    project = tmp_path / "project"
    project.mkdir()
    monkeypatch.chdir(project)
    (project / "my_model.py").write_text(MODEL)
    (project / "helper.py").write_text("WIDTH = 16\n")
    request = SearchRequest(
        storage=f"sqlite:///{project}/studies.db",
        space="quick",
        max_mem=48 * 2**20,
        device="cpu",
        sampler="random",
        trials=2,
        ray="local",
        fresh=True,
        confirm=False,
        workload={"model": "my_model.py:build", "steps": 10},
    )
    result = search(request)
    assert result.trials[0].outcome == "ok"
    assert all(record.was_trained for record in result.trials)
