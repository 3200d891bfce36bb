"""Views of hand-made studies for figures: results of `results.py` with a definition."""

from autotune.reporting.study_view import StudyView
from autotune.spec.config import TrainingConfig
from autotune.spec.prediction import CATEGORIES, Forecast, Prediction
from autotune.spec.result import Pick
from tests.building.results import MIB, record, study_result
from tests.building.studies import definition

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"
GLOBAL_BATCH = 8


def predicted(*, peak=100 * MIB, within=0.1, **sizes):
    """Returns a prediction whose bytes are all activations by default."""
    held = {"activations": peak - sum(sizes.values()), **sizes}
    return Prediction(
        device="cpu",
        fake_device="cpu",
        parameters=1000,
        peak_memory_bytes=peak,
        upper_bound_bytes=round(peak * (1 + within)),
        lower_bound_bytes=round(peak * (1 - within)),
        phase="backward",
        module="blocks.0",
        operator="aten.mm",
        bytes_by_category={category: held.get(category, 0) for category in CATEGORIES},
        holders=(),
        flops_per_token=1.5e6,
        bytes_accessed_per_token=1e5,
    )


def study_view(result, predictions=(), **changes):
    """A view; `predictions` are pairs with configurations; `changes` are of the definition."""
    forecasts = [
        Forecast(config=config, prediction=prediction) for config, prediction in predictions
    ]
    settings = {
        "workload": result.workload,
        "device": result.device,
        "cap_bytes": result.cap_bytes,
        **changes,
    }
    return StudyView(
        definition=definition("by-hand", **settings),
        result=result,
        forecasts={forecast.config.fingerprint: forecast for forecast in forecasts},
    )


def config(**choices):
    return TrainingConfig(**{"micro_batch_size": GLOBAL_BATCH, **choices})


BASELINE = config()
BLOCK = config(checkpointing="block")
BF16 = config(precision="bf16-mixed")
BOTH = config(checkpointing="block", precision="bf16-mixed")


def four_trials():
    """Returns the baseline, which is over the cap, checkpointing, bf16, and both as the pick."""
    return [
        record(
            0,
            memory=400 * MIB,
            speed=1000.0,
            perplexity=20.0,
            outcome="over_cap",
            config=BASELINE,
            seconds=10.0,
        ),
        record(1, memory=200 * MIB, speed=800.0, perplexity=20.0, config=BLOCK, seconds=20.0),
        record(2, memory=250 * MIB, speed=1500.0, perplexity=21.0, config=BF16, seconds=30.0),
        record(3, memory=100 * MIB, speed=1200.0, perplexity=21.0, config=BOTH, seconds=40.0),
    ]


def ladder_view(trials=None, **changes):
    """Returns a study of `four_trials`, each predicted exactly."""
    trials = four_trials() if trials is None else trials
    settings = {
        "front": (3, 1, 2),
        "pick": Pick(number=3, criterion="the smallest"),
        "baseline": 0,
        **changes,
    }
    known = [
        (trial.config, predicted(peak=trial.peak_memory_bytes))
        for trial in trials
        if trial.peak_memory_bytes
    ]
    return study_view(study_result(trials, **settings), known)


def many_trials(number=32):
    """Checkpointing halves the memory, precision decides perplexity, the micro batch the speed."""
    trials = []
    for place in range(number):
        chosen = config(
            checkpointing=("none", "block")[place % 2],
            precision=("fp32", "bf16-mixed")[place // 2 % 2],
            micro_batch_size=(8, 4, 2, 1)[place // 4 % 4],
            loss=("full", "chunked")[place // 16 % 2],
        )
        trials.append(
            record(
                place,
                memory=(100 if chosen.checkpointing == "block" else 200) * MIB + place,
                speed=1000.0 * chosen.micro_batch_size + place,
                perplexity=20.0 if chosen.precision == "fp32" else 21.0,
                config=chosen,
                seconds=1.0,
                model_flops_per_token=1e6,
                recomputed_flops_per_token=5e5 if chosen.checkpointing == "block" else 0.0,
                model_flops_utilization=0.25,
            )
        )
    return trials


def failures_only():
    """Returns a study in which only one peak, over the cap, was measured."""
    trials = [
        record(
            0,
            outcome="over_cap",
            memory=900 * MIB,
            speed=None,
            perplexity=None,
            config=BASELINE,
            message="over",
        ),
        record(
            1,
            outcome="out_of_memory",
            memory=None,
            speed=None,
            perplexity=None,
            config=BLOCK,
            message="no",
        ),
    ]
    return study_view(study_result(trials, study="all failed", baseline=0))
