from dataclasses import replace

import pytest

from autotune.analysis.pick import Preferences
from autotune.reporting.report.answer import answer_of
from autotune.reporting.report.excluded import LINES_SHOWN, excluded
from autotune.reporting.trial_text import NO_BETTER, SHARED_MARK_NOTE
from autotune.spec.config import TrainingConfig
from autotune.spec.prediction import Forecast, Prediction
from autotune.spec.result import Pick
from autotune.spec.workload import make_workload
from tests.building.reports import (
    BASELINE,
    FAILED,
    FAST,
    SMALL,
    nothing_view,
    plain_view,
    report_of,
    view_of,
)
from tests.building.results import MIB, out_of_memory, record
from tests.building.studies import SPACE


def group(view, title):
    return next((one for one in excluded(view) if one.title == title), None)


def prediction(*, plan=None, peak=400 * MIB):
    return Prediction(
        device="cpu",
        fake_device="cpu",
        peak_memory_bytes=peak,
        upper_bound_bytes=peak,
        lower_bound_bytes=peak,
        phase="forward",
        module="",
        operator="",
        bytes_by_category={},
        parameters=1,
        holders=(),
        plan=plan,
    )


# -- the answer ------------------------------------------------------------------------------------


def test_the_answer_describes_the_pick():
    assert (
        answer_of(plain_view()).headline == "Train with #2, bf16 & more: bf16-mixed, micro-batch 8."
    )


def test_one_sentence_says_what_the_pick_saves_and_costs():
    assert answer_of(plain_view()).sentence == (
        "Against the baseline: 33 % less memory (200.0 MiB for 300.0 MiB), 2.22x the speed, "
        "the same perplexity."
    )


def test_the_reason_does_not_say_the_savings_again():
    against = (
        "against the baseline: 33 % less memory (200.0 MiB for 300.0 MiB), 2.22x the speed, "
        "the same perplexity"
    )
    pick = Pick(number=2, criterion="the fastest", comparison=against, warning="its speed varied")
    assert answer_of(plain_view(pick=pick)).reason == "It is the fastest; its speed varied."


def test_the_headline_of_a_pick_that_is_not_to_be_trusted_says_so_first():
    pick = Pick(number=2, criterion="the fastest", doubt="its speed varied by ±40 %")
    answer = answer_of(plain_view(pick=pick))
    assert answer.headline.startswith("Not to be trusted: train with #2")
    assert answer.sentence.startswith("Its speed varied by ±40 %. Against the baseline")
    assert answer.reason == "It is the fastest."


@pytest.mark.parametrize(
    ("label", "value", "change"),
    [
        ("peak memory", "200.0 MiB", "for 300.0 MiB, -33 %"),
        ("tokens per second", "2,000 ±0%", "for 900, +122 %"),
        ("perplexity", "10.00", "for 10.00, the same; shared with trial 1"),
        ("of the cap", "78 % of 256.0 MiB", "200.0 MiB on the device"),
    ],
)
def test_a_tile_has_the_number_and_what_it_was(label, value, change):
    tile = next(tile for tile in answer_of(plain_view()).tiles if tile.label == label)
    assert (tile.value, tile.change) == (value, change)


def test_a_pick_that_is_the_baseline_says_so_and_is_compared_with_nothing():
    answer = answer_of(plain_view(pick=Pick(number=1, criterion="the fastest"), baseline=1))
    assert answer.sentence == "It is the baseline itself: nothing that was tried does better."
    assert [tile.change for tile in answer.tiles if tile.label != "of the cap"] == ["", "", ""]


def test_without_a_baseline_the_answer_says_so():
    assert "no baseline" in answer_of(plain_view(baseline=None)).sentence


def test_a_predicted_baseline_is_one():
    known = replace(
        BASELINE,
        peak_memory_bytes=None,
        tokens_per_second=None,
        predicted_peak_memory_bytes=400 * MIB,
    )
    answer = answer_of(plain_view(trials=(known, SMALL, FAST)))
    assert "50 % less memory (200.0 MiB for 400.0 MiB predicted)" in answer.sentence
    assert answer.tiles[0].change == "for 400.0 MiB predicted, -50 %"


def test_where_nothing_fits_the_answer_is_what_came_closest():
    answer = answer_of(nothing_view())
    assert not answer.found
    assert answer.headline == "Nothing that was tried trains under 256.0 MiB."
    assert (
        answer.sentence == "The closest miss needs 300.0 MiB, over the cap: #0 fp32, micro-batch 1."
    )
    assert "larger --max-mem" in answer.reason


def answer_where_all_trials_crashed(**changes):
    crashed = record(
        0, outcome="crashed", memory=None, speed=None, perplexity=None, message="KeyError: 'x'"
    )
    return answer_of(plain_view(trials=(crashed,), front=(), pick=None, baseline=None, **changes))


def test_where_all_trials_failed_the_advice_names_the_first_error_and_no_larger_cap():
    answer = answer_where_all_trials_crashed()
    assert answer.headline == "Nothing could be trained to its end: 1 trial: 1 crashed."
    assert answer.sentence == "#0 fp32, micro-batch 1: crashed (KeyError: 'x')."
    assert "--max-mem" not in answer.reason


def test_the_log_of_a_failed_trial_is_named_only_where_it_is(tmp_path):
    assert "output" not in answer_where_all_trials_crashed(folder=tmp_path).reason
    log = tmp_path / "logs" / "trial-0-attempt-2.log"
    log.parent.mkdir()
    log.touch()
    assert f"output is in {log}." in answer_where_all_trials_crashed(folder=tmp_path).reason


@pytest.mark.parametrize(
    "trials", [(), (record(0, outcome="interrupted"),)], ids=["no trial", "one that runs"]
)
def test_before_a_trial_has_finished_there_is_no_answer(trials):
    assert answer_of(view_of(trials)).headline == "No trial has finished yet."


# -- the front -------------------------------------------------------------------------------------


def front_of(**changes):
    return report_of(plain_view(**changes)).front


def test_the_short_table_has_the_front_and_the_baseline():
    assert [row.record.number for row in front_of().rows] == [1, 2, 0]


@pytest.mark.parametrize(
    ("number", "marks"),
    [(1, ("front",)), (2, ("pick", "front")), (0, ("baseline", "over the cap"))],
)
def test_a_row_says_what_it_is(number, marks):
    assert next(row for row in front_of().rows if row.record.number == number).marks == marks


def test_a_perplexity_of_another_trial_is_marked():
    assert [row.texts["perplexity"] for row in front_of().rows] == ["10.00", "=10.00", "10.00"]
    assert front_of().notes == (SHARED_MARK_NOTE,)
    assert front_of(trials=(BASELINE, SMALL), front=(1,), pick=None).notes == ()


def test_the_perplexity_before_training_is_the_first_row_of_the_short_table():
    view = plain_view()
    known = replace(view, result=replace(view.result, initial_perplexity=9.5))
    first, *others = report_of(known).front.rows
    assert first.record is None
    assert first.texts["perplexity"] == "9.50"
    assert all(NO_BETTER in row.remarks[-1] for row in others)
    assert all(row.record is not None for row in report_of(view).front.rows)


def test_a_predicted_peak_is_said_to_be_one():
    known = replace(BASELINE, peak_memory_bytes=None, predicted_peak_memory_bytes=400 * MIB)
    last = front_of(trials=(known, SMALL, FAST)).rows[-1]
    assert last.texts["peak_memory_bytes"] == "400.0 MiB predicted"


# -- what a trial shows when it is opened ----------------------------------------------------------


def values(column):
    return [column["values"][place] for place in column["of"]]


def test_an_opened_trial_says_what_is_known_of_it():
    facts = report_of(plain_view()).details["facts"]
    assert values(facts["message"]) == [one.message for one in (BASELINE, SMALL, FAST, FAILED)]
    assert values(facts["took"]) == ["4.0 s", "", "1 m 30 s", ""]


@pytest.mark.parametrize("field", TrainingConfig().to_dict())
def test_an_opened_trial_says_what_it_chose(field):
    chosen = [one.config.to_dict()[field] for one in (BASELINE, SMALL, FAST, FAILED)]
    assert values(report_of(plain_view()).details["config"][field]) == chosen


# -- what was left out -----------------------------------------------------------------------------


def test_what_the_device_cannot_do_is_named_with_the_reason():
    space = replace(SPACE, techniques={**SPACE.techniques, "precision": ("fp32", "tf32")})
    found = group(plain_view(definition_of={"space": space}), "Does not work here")
    assert found.lines == ("precision tf32: this hardware has no TF32",)


def test_illegal_combinations_are_counted_and_explained():
    found = group(plain_view(), "Cannot be combined")
    assert "32 of 64 combinations" in found.why
    assert any(line.startswith("memory_budget 0.5 needs torch.compile") for line in found.lines)


def test_a_condition_of_the_space_is_a_sentence():
    sentence = "the search space says: where compile is block, checkpointing is none"
    assert sentence in group(plain_view(), "Cannot be combined").lines


@pytest.mark.parametrize(
    ("outcome", "title", "expected"),
    [
        ("over_cap", "Over the cap", "300.0 MiB"),
        ("out_of_memory", "Out of memory", "the message"),
        ("predicted_over_cap", "Predicted over the cap", "predicted 400.0 MiB"),
        ("parity_failed", "Parity failed", "the gradient is off"),
        ("diverged", "Diverged", "the message"),
        ("timeout", "Timeout", "the message"),
        ("crashed", "Crashed", "the message"),
        ("interrupted", "Interrupted", "the message"),
    ],
)
def test_every_failure_is_counted_with_what_happened(outcome, title, expected):
    failed = record(
        0,
        outcome=outcome,
        memory=300 * MIB,
        message="the message",
        predicted_peak_memory_bytes=400 * MIB,
        parity_message="the gradient is off",
    )
    found = group(view_of((failed,)), title)
    assert (found.count, found.lines) == (1, (f"#0 fp32, micro-batch 1: {expected}",))


def test_what_was_ok_is_not_left_out():
    titles = {one.title for one in excluded(view_of((SMALL, FAST)))}
    assert titles == {"Cannot be combined"}


def test_a_trial_without_a_comparison_is_named():
    unchecked = replace(SMALL, parity="not compared", parity_message="no plain training fits")
    found = group(view_of((unchecked,)), "Counted without a comparison of the whole model")
    assert found.lines[0].endswith(": no plain training fits")


def test_a_configuration_that_is_the_program_of_a_trial_is_named_with_it():
    tried, same, other = (
        TrainingConfig(compile="block", memory_budget=budget) for budget in (1.0, 0.5, 0.1)
    )
    forecasts = {
        config.fingerprint: Forecast(config=config, prediction=prediction(plan=plan))
        for config, plan in ((tried, "a"), (same, "a"), (other, "b"))
    }
    found = group(
        view_of((record(3, config=tried),), forecasts=forecasts), "Same program as a trial"
    )
    assert found.lines == (f"{same.describe()}: program of #3",)


def test_a_long_list_is_cut_and_says_by_how_much():
    trials = [
        out_of_memory(n, config=TrainingConfig(micro_batch_size=n + 1))
        for n in range(LINES_SHOWN + 7)
    ]
    found = group(view_of(trials), "Out of memory")
    assert (found.count, len(found.lines), found.hidden) == (LINES_SHOWN + 7, LINES_SHOWN, 7)


# -- what it was -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("cap", "256.0 MiB"),
        ("versions", "torch 2.11"),
        ("sampler", "nsga2, seed 7"),
        ("pick", "smallest, perplexity at most 5 % above the best"),
        ("begun", "2026-11-21 10:00, last result 2026-11-21 11:30 (UTC)"),
        ("its size", "64 combinations, 32 of them legal"),
    ],
)
def test_the_settings_of_a_study_are_listed(name, expected):
    view = replace(plain_view(), begun_at="2026-11-21 10:00", last_result_at="2026-11-21 11:30")
    preferences = Preferences(prefer="smallest", max_perplexity_increase=0.05)
    assert expected in dict(report_of(view, preferences=preferences).settings)[name]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("model", "gpt of 6 layers"),
        ("text", "documentation of Python"),
        ("a step", "8 x 128 = 1,024 tokens"),
        ("seed", "0"),
    ],
)
def test_the_workload_is_listed(name, expected):
    assert expected in dict(report_of(plain_view()).workload)[name]


def test_of_a_script_only_what_it_does_not_decide_is_listed():
    script = {"model": "script", "script": "t.py", "model_sha256": "a" * 64}
    workload = type(make_workload("cpu"))(**{**make_workload("cpu").to_dict(), **script})
    view = plain_view()
    view = replace(view, result=replace(view.result, workload=workload))
    assert list(dict(report_of(view).workload)) == [
        "script",
        "hash of the script",
        "its own precision",
        "its own optimizer fusion",
        "a step",
        "steps",
        "seed",
    ]
