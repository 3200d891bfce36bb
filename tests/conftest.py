"""Fixtures shared by all tests: a small prepared workload, a trial server and a database server."""

import gc
import os
import time
import uuid
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from autotune.spec.config import TrainingConfig
from autotune.spec.workload import Workload, make_workload
from tests.building.results import ON_CUDA_IN_THIS_PROCESS

# Before torch is imported: tests predict in forks of a process in which others have trained, and
# OpenMP's threads of a process are not there in its forks, which then wait for them.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# The same examples in every run, so that a failure is caused by a change of the code.
hypothesis.settings.register_profile(
    "repeatable",
    derandomize=True,
    deadline=None,
    max_examples=int(os.environ.get("AUTOTUNE_EXAMPLES", "15")),
)
hypothesis.settings.load_profile("repeatable")

GLOBAL_BATCH = 4
MOST_SECONDS = 300
"""Of a test that is not slow and sets no limit of its own, on the slowest machine: one that waits
for ever fails, and is named, instead of keeping all others from being counted."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if not any(item.get_closest_marker(name) for name in ("slow", "timeout")):
            item.add_marker(pytest.mark.timeout(MOST_SECONDS))


def pytest_runtest_teardown(item: pytest.Item) -> None:
    """Lift the limit of a GPU's memory that a training in this process has set for good."""
    if item.get_closest_marker("gpu") is not None:
        import torch

        if torch.cuda.is_available():
            torch.cuda.set_per_process_memory_fraction(1.0)


@pytest.fixture(scope="module", autouse=True)
def _old_objects():
    """Spare the garbage collector what was there before a file: modules, tests and what they keep.

    Each training and prediction collects garbage, which took up to a second for a million objects.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _compiler_cache(tmp_path_factory):
    """Use one inductor cache for all processes of the session, separate from the user's."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:  # each worker has a folder in that of the session
        folder = folder.parent
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "inductor")


@pytest.fixture(scope="session", autouse=True)
def _user_cache(tmp_path_factory):
    """Use one cache of probes for all processes of the session, separate from the user's.

    Models and datasets of the internet stay where the user has them.
    """
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    user_cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    os.environ.setdefault("HF_HOME", str(Path(user_cache) / "huggingface"))
    os.environ["XDG_CACHE_HOME"] = str(folder / "cache")


@pytest.fixture(scope="session", autouse=True)
def _vector_instructions():
    """Spare the C++ programs by which every new cache tries the vector instructions of this CPU."""
    os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")


@pytest.fixture(scope="session", autouse=True)
def _separate_lock_folder(tmp_path_factory):
    """Use separate device locks, so that two test processes do not wait for each other."""
    os.environ["AUTOTUNE_LOCK_FOLDER"] = str(tmp_path_factory.mktemp("locks"))


@pytest.fixture(scope="session")
def workload() -> Workload:
    """A model of four small blocks: a step takes milliseconds, every technique has an effect."""
    return make_workload(
        "cpu",
        {
            "layers": 4,
            "width": 32,
            "heads": 2,
            "sequence_length": 32,
            "global_batch": GLOBAL_BATCH,
            "steps": 12,
            "warmup_steps": 3,
            "evaluation_sequences": 6,
        },
    )


@pytest.fixture(scope="session")
def prepared(workload, tmp_path_factory) -> Path:
    """The prepared folder of the workload, with its tokens and initial weights."""
    from autotune.execution.process.preparation import prepare
    from autotune.execution.tasks import Prepare

    folder = tmp_path_factory.mktemp("study") / "prepared"
    prepare(Prepare(workload=workload, folder=folder))
    return folder


@pytest.fixture(scope="session")
def make_trainer(workload, prepared):
    """make_trainer(precision="bf16-true", ...) returns a Trainer in this process."""
    from autotune.spec.training_request import TrainingRequest
    from autotune.training.trainer import Trainer

    def make(*, on_cuda: bool = False, **choices: object) -> Trainer:
        config = TrainingConfig(**{"micro_batch_size": GLOBAL_BATCH, **choices})
        where: dict[str, Any] = ON_CUDA_IN_THIS_PROCESS if on_cuda else {"device": "cpu"}
        return Trainer(
            TrainingRequest(
                workload=workload,
                config=config,
                folder=prepared,
                **where,
                cap_bytes=2**40,
                requested_at=time.monotonic(),
            )
        )

    return make


@pytest.fixture(scope="session")
def losses_of(make_trainer):
    """losses_of(steps=6, checkpointing="block") returns the loss of each of the first steps."""

    def losses(*, steps: int = 6, **choices: object) -> list[float]:
        trainer = make_trainer(**choices)
        batches = trainer.batches()
        return [trainer.step(step, next(batches)) for step in range(steps)]

    return losses


@pytest.fixture(params=["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def compiler(request):
    """The backend of `torch.compile`: inductor's C++ takes up to half a minute to compile.

    What torch has traced, split into forward and backward pass, and recomputes is the same.
    """
    import torch

    torch._dynamo.reset()
    with torch.compiler.set_stance("default", force_backend=request.param):
        yield request.param
    torch._dynamo.reset()


@pytest.fixture(scope="session")
def _trial_servers(tmp_path_factory):
    from tests.building.trial_servers import TrialServers

    servers = TrialServers(tmp_path_factory.mktemp("servers"))
    yield servers
    servers.close()


@pytest.fixture
def server(_trial_servers, tmp_path):
    """The trial server of the session; what the test has begun on it ends with the test."""
    borrowed = _trial_servers.lend(log_file=tmp_path / "server.log")
    yield borrowed
    borrowed.close()


@pytest.fixture(scope="module")
def one_trial_server(_trial_servers):
    """Searches and predictions of a file, in this process, share the trial server of the session.

    For tests whose property is neither that a server starts or ends nor that one runs in the
    current folder.
    """
    with _trial_servers.lent_to_executors():
        yield


@pytest.fixture(scope="session")
def postgres():
    """A PostgreSQL server of this test process; a test that stops it must restart it."""
    from tests.building.postgres import PostgresServer, unavailable

    pytest.importorskip("psycopg")
    if reason := unavailable():
        pytest.skip(reason)
    with PostgresServer() as started:
        yield started


@pytest.fixture
def postgres_url(postgres):
    """An empty database, dropped after the test."""
    name = f"test_{uuid.uuid4().hex}"
    yield postgres.create_database(name)
    postgres.drop_database(name)


@pytest.fixture(params=["sqlite", "postgresql"])
def store_url(request, tmp_path) -> str:
    """The URL of a new database, once per kind of database."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/studies/autotune.db"
    return request.getfixturevalue("postgres_url")
