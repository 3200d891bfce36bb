"""Plain values for tests: records of trials, legal spaces and study results.

Nothing here starts a process.
"""

from autotune.spec.config import LegalityContext, TrainingConfig
from autotune.spec.provenance import PerplexitySource, TrialReference
from autotune.spec.result import DeviceInfo, StudyResult, TrialRecord
from autotune.spec.search_space import LegalSpace, bind_space
from autotune.spec.space_file import load_space
from autotune.spec.workload import make_workload

MIB = 1024**2
GIB = 1024**3
ON_CUDA_IN_THIS_PROCESS = {
    "device": "cuda:0",
    "shares_device": True,
    "new_context_bytes": 512 * MIB,
}
"""Fields of a TrainingRequest for a process that may have used the GPU before, so that its context
is not measured."""


def record(
    number,
    *,
    memory=100 * MIB,
    speed=1000.0,
    perplexity=10.0,
    outcome="ok",
    config=None,
    **fields,
):
    """Returns the record of a trial; ok and feasible by default."""
    settings = {
        "peak_memory_bytes": memory,
        "device_bytes": memory,
        "tokens_per_second": speed,
        "perplexity": perplexity,
        "feasible": outcome == "ok",
        "config": config or TrainingConfig(),
        **fields,
    }
    return TrialRecord(number=number, outcome=outcome, **settings)


def trial(number, study=None):
    return TrialReference(number=number, study=study)


def shared_with(number, study=None):
    """Returns the source of a perplexity that trial `number` has measured."""
    return PerplexitySource.shared_with(trial(number, study))


OVER_RANDOM = PerplexitySource(kind="measured", over_random_weights=True)
"""The source of the perplexity of an adapter over random weights."""


def mean_of(seeds, *failed):
    """Returns the source of a perplexity that is the mean over `seeds`."""
    return PerplexitySource(kind="measured", seeds=seeds, failed_seeds=failed)


def out_of_memory(number, **fields):
    """Returns the record of a trial that ran out of memory before anything was measured."""
    unmeasured = {"memory": None, "speed": None, "perplexity": None, "message": "out of memory"}
    return record(number, outcome="out_of_memory", **{**unmeasured, **fields})


def bound(name, *, global_batch=8, devices=1, unavailable=None) -> LegalSpace:
    """Returns space `name` bound to devices that can do everything but `unavailable`."""
    return bind_space(
        load_space(str(name)),
        LegalityContext(global_batch=global_batch, devices=devices),
        unavailable=unavailable or {},
    )


def study_result(
    trials=(),
    *,
    study="study",
    front=(),
    pick=None,
    baseline=None,
    cap_bytes=256 * MIB,
    device="cpu",
    folder=None,
    **fields,
):
    return StudyResult(
        study=study,
        folder=folder,
        storage="sqlite:///studies/autotune.db",
        workload=make_workload("cpu"),
        device=DeviceInfo(
            device=device,
            name="a processor",
            total_memory_bytes=8 * 1024 * MIB,
            versions={"torch": "2.11"},
            matrix_flops_per_second={"fp32": 4e10, "bf16": 1e11},
            bandwidth_bytes_per_second=1e10,
        ),
        cap_bytes=cap_bytes,
        trials=tuple(trials),
        front=tuple(front),
        pick=pick,
        baseline=baseline,
        **fields,
    )
