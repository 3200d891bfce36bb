"""Views of hand-made studies for reports: plain, hostile, empty and large."""

from itertools import product

from autotune.reporting.report import contents
from autotune.reporting.study_view import StudyView
from autotune.spec.config import CHOICES, TrainingConfig
from autotune.spec.result import Pick
from autotune.spec.workload import make_workload
from tests.building.results import MIB, out_of_memory, record, shared_with, study_result
from tests.building.studies import definition

HOSTILE = (
    "</script><!--<script>document.title='owned'</script>"
    "<img src=x onerror=\"document.title='owned'\">{{7*7}}<a href='https://example.org'>"
)
TARGETS = {"pytorch": "plain PyTorch", "trl": "TRL <SFT>"}

BASELINE = record(
    0,
    memory=300 * MIB,
    speed=900.0,
    outcome="over_cap",
    message="needs 300 MiB",
    name="baseline",
    seconds=4.0,
    bytes_by_kind={"parameters": 20 * MIB, "optimizer_state": 40 * MIB},
)
SMALL = record(
    1,
    memory=100 * MIB,
    speed=1000.0,
    tokens_per_second_spread=12.0,
    config=TrainingConfig(checkpointing="block", micro_batch_size=4),
)
FAST = record(
    2,
    memory=200 * MIB,
    speed=2000.0,
    name="bf16 & more",
    config=TrainingConfig(precision="bf16-mixed", micro_batch_size=8),
    perplexity_source=shared_with(1),
    seconds=90.0,
)
FAILED = out_of_memory(
    3, config=TrainingConfig(compile="model", memory_budget=0.5, micro_batch_size=8)
)
TRIALS = (BASELINE, SMALL, FAST, FAILED)
FOUND = {
    "front": (1, 2),
    "pick": Pick(number=2, criterion="the fastest on the front"),
    "baseline": 0,
}


def view_of(
    trials=TRIALS,
    *,
    study="a-study",
    forecasts=None,
    device="cpu",
    workload=None,
    definition_of=None,
    **found,
):
    result = study_result(trials, study=study, device=device, **found)
    changes = {
        "cap_bytes": result.cap_bytes,
        "device": result.device,
        "workload": make_workload("cpu"),
    }
    defined = definition(
        study,
        **{**changes, **({"workload": workload} if workload else {}), **(definition_of or {})},
    )
    return StudyView(definition=defined, result=result, forecasts=forecasts or {})


def plain_view(**changes):
    return view_of(**{**FOUND, **changes})


def hostile_view(words=HOSTILE):
    """Returns a study in which every text of a user or an error is `words`."""
    trials = (
        record(
            0,
            name=words,
            message=words,
            parity="not compared",
            parity_message=words,
            bytes_by_kind={"buffers": MIB},
        ),
        record(
            1, name=words, outcome="over_cap", message=words, config=TrainingConfig(compile="block")
        ),
        out_of_memory(2, name=words, message=words, config=TrainingConfig(compile="model")),
    )
    workload = make_workload("cpu", {"dataset": words})
    pick = Pick(number=0, criterion=words)
    return view_of(trials, study=words, front=(0,), pick=pick, baseline=0, workload=workload)


def nothing_view():
    over = record(
        0, outcome="over_cap", memory=300 * MIB, speed=None, perplexity=None, message="too large"
    )
    return view_of((over, out_of_memory(1, config=TrainingConfig(compile="model"))))


def large_view(count=10_000):
    """Returns a study of `count` configurations, about half of them over the cap."""
    fields = ("precision", "checkpointing", "compile", "optimizer_fusion")
    choices = product(
        *(CHOICES[field] for field in fields), (8, 4, 2, 1), (1.0, 0.8, 0.6, 0.4, 0.2)
    )
    trials = [
        record(
            number,
            memory=(50 + number % 400) * MIB,
            speed=500.0 + number % 977,
            perplexity=20 + (number % 13) / 10,
            tokens_per_second_spread=7.0,
            config=TrainingConfig(
                **dict(zip(fields, chosen, strict=True)),
                micro_batch_size=micro_batch,
                memory_budget=budget,
            ),
            outcome="over_cap" if number % 400 > 206 else "ok",
            message="needs more than there is" if number % 400 > 206 else "",
            name=f"trial {number} & co",
            seconds=3.0,
        )
        for number, (*chosen, micro_batch, budget) in zip(range(count), choices, strict=False)
    ]
    return view_of(
        trials, front=(0, 976), pick=Pick(number=976, criterion="the fastest"), baseline=400
    )


def report_of(view, **changes):
    return contents.compute(view, **{"version": "1.2.3", "targets": TARGETS, **changes})
