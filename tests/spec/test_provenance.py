"""Where a result comes from: what each kind of source says, and what it answers."""

import json
from dataclasses import asdict

import pytest

from autotune.spec.provenance import MEASURED, FailedSeed, PerplexitySource
from autotune.spec.reading import parse
from autotune.spec.result import Measurement
from tests.building.results import mean_of, record, shared_with, trial

EVALUATION = PerplexitySource(kind="evaluation", step=20)
UNCHECKED = PerplexitySource(kind="unchecked_evaluation", step=20)
TRAINING_LOSS = PerplexitySource(kind="training_loss", last_steps=5)
UNSEEN = PerplexitySource(kind="training_loss", last_steps=5, unused_evaluation="unseen")
NOT_LAST = PerplexitySource(kind="training_loss", last_steps=5, unused_evaluation="not_last")
FAILED = (FailedSeed(seed=5, reason="timeout"), FailedSeed(seed=6, reason="it ended"))
SENTENCES = {
    MEASURED: "measured",
    mean_of(3): "measured, mean of 3 seeds",
    mean_of(1, *FAILED): "measured, mean of 1 seeds, without seed 5: timeout; seed 6: it ended",
    shared_with(3): "shared with trial 3",
    shared_with(3, "x"): "shared with trial 3 of study 'x'",
    EVALUATION: "evaluation loss after step 20",
    UNCHECKED: "evaluation loss of step 20",
    TRAINING_LOSS: "training loss of the last 5 steps",
    UNSEEN: "training loss of the last 5 steps, as no evaluation was seen after the last step",
    NOT_LAST: "training loss of the last 5 steps, as its evaluation does not follow the last step",
}


@pytest.mark.parametrize(("source", "sentence"), SENTENCES.items(), ids=str)
def test_each_source_has_its_sentence(source, sentence):
    assert str(source) == sentence


@pytest.mark.parametrize("source", SENTENCES, ids=str)
def test_a_measurement_comes_back_from_json_with_its_source(source):
    measurement = Measurement(
        outcome="ok", perplexity_source=source, reused_from=trial(4, "earlier")
    )
    assert parse(Measurement, json.loads(json.dumps(asdict(measurement)))) == measurement


def test_a_trial_in_json_has_the_sentences():
    shown = record(0, perplexity_source=shared_with(3), reused_from=trial(4, "x")).to_dict()
    assert (shown["perplexity_source"], shown["reused_from"]) == (
        "shared with trial 3",
        "trial 4 of study 'x'",
    )


def test_only_what_a_trial_obtained_after_its_last_step_stands_for_others():
    after_all = [source for source in SENTENCES if source.is_after_all_steps(20)]
    assert after_all == [
        MEASURED,
        mean_of(3),
        mean_of(1, *FAILED),
        EVALUATION,
        TRAINING_LOSS,
        UNSEEN,
        NOT_LAST,
    ]
    assert not EVALUATION.is_after_all_steps(21)


def test_only_a_plain_measurement_needs_no_sentence():
    assert [source for source in SENTENCES if source.is_plain] == [MEASURED]


@pytest.mark.parametrize("kind", ["shared", "evaluation", "unchecked_evaluation", "training_loss"])
def test_a_source_without_the_fact_of_its_kind_is_none(kind):
    with pytest.raises(ValueError, match=kind):
        PerplexitySource(kind=kind)
