"""Hand-made studies: definitions, measurements and databases, without training or torch."""

from contextlib import contextmanager

from autotune.spec.attempt import new_attempt_id
from autotune.spec.config import TrainingConfig
from autotune.spec.provenance import MEASURED
from autotune.spec.result import DeviceInfo, Measurement
from autotune.spec.search_space import Condition, SearchSpace
from autotune.spec.study import StudyDefinition
from autotune.spec.workload import make_workload
from autotune.storage.store import StudyStore

MIB = 1024**2
CAP_BYTES = 64 * MIB
GLOBAL_BATCH = 8

SPACE = SearchSpace(
    name="by-hand",
    description="a space with one of everything",
    techniques={
        "precision": ("fp32", "bf16-mixed"),
        "checkpointing": ("none", "block"),
        "compile": ("none", "block"),
        "memory_budget": (1.0, 0.5),
        "micro_batch_size": "divisors",
    },
    conditions=(Condition(when={"compile": ("block",)}, then={"checkpointing": ("none",)}),),
    defaults={"optimizer_fusion": "foreach"},
    configurations=({"name": "checkpoint every block", "checkpointing": "block"},),
    workload={"steps": 24},
)


def definition(name="by-hand", **changes):
    settings = {
        "workload": make_workload("cpu", {"steps": 24, "text_sha256": "f" * 64}),
        "space": SPACE,
        "device": DeviceInfo(
            device="cpu",
            name="a CPU",
            total_memory_bytes=2**36,
            versions={"python": "3.11", "torch": "2.13.0"},
        ),
        "unavailable": {"precision": {"tf32": "this hardware has no TF32"}},
        "cap_bytes": CAP_BYTES,
        "seed": 7,
        "sampler": "nsga2",
        **changes,
    }
    return StudyDefinition(name=name, **settings)


def config(number):
    """Returns a different configuration for each of 0 to 7; number 0 is the baseline."""
    return TrainingConfig(micro_batch_size=GLOBAL_BATCH - number)


def measured(**changes):
    """Returns an ok measurement well below the cap, with a perplexity that it measured itself."""
    settings = {
        "outcome": "ok",
        "peak_memory_bytes": 40 * MIB,
        "device_bytes": 40 * MIB,
        "tokens_per_second": 1000.0,
        "tokens_per_second_spread": 10.0,
        "perplexity": 20.0,
        **changes,
    }
    if settings["perplexity"] is not None:
        settings.setdefault("perplexity_source", MEASURED)
    return Measurement(**settings)


@contextmanager
def open_store(url, *, create=True):
    store = StudyStore(url, create=create)
    try:
        yield store
    finally:
        store.close()


def write_study(url, measurements, *, name="by-hand", **changes):
    """Write a study with these measurements as trials 0, 1, 2, ...; None is a stopped one."""
    with open_store(url) as store:
        store.create_study(definition(name, **changes), trials_wanted=len(measurements))
        for number, measurement in enumerate(measurements):
            attempt = keep(
                store, config(number), measurement, study=name, name=f"trial {number}", seconds=1.5
            )
            if measurement is None:
                store.attempts.release(attempt.id, cause="stopped")


def keep(store, config, measurement=None, *, study="by-hand", name=None, seconds=1.0):
    """Claim a trial for this configuration, store its result, and return the attempt.

    Without a measurement the trial stays running.
    """
    attempt = store.attempts.claim(
        study, config, worker="by hand", attempt_id=new_attempt_id(), most_trials=10**6, name=name
    )
    if measurement is not None:
        store.attempts.finish(attempt.id, measurement, seconds=seconds)
    return attempt
