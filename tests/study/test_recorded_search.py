"""Searches over the recorded table of `studies/search_efficiency/`: real code, no training."""

import argparse
import collections
import statistics

import pytest

from autotune.spec.config import TrainingConfig
from autotune.spec.early_stopping import PruningBound
from autotune.spec.result import Measurement
from studies.search_efficiency import record, replay, summary
from studies.search_efficiency.table import Training


@pytest.fixture(scope="module")
def searches():
    """Searches under the middle cap, until each has found nearly all there is."""
    cap_bytes = replay.cap_of("middle")
    return [replay.run_ours(cap_bytes, sampler="ehvi", seed=seed, enough=0.95) for seed in range(5)]


@pytest.fixture(scope="module")
def converged():
    return replay.run_ours(
        replay.cap_of("tight"), sampler="ehvi", seed=0, enough=2.0, until_converged=True
    )


@pytest.mark.slow
def test_most_find_nearly_all_of_the_exhaustive_front_at_a_tenth_of_its_cost(searches):
    a_tenth = 0.1 * replay.the_table().exhaustive_seconds()
    ends = [search["steps"][-1] for search in searches]
    assert [reached >= 0.95 for _, _, reached in ends] == [True] * 5
    assert statistics.median(seconds for seconds, _, _ in ends) <= a_tenth


def test_hardly_a_training_is_over_the_cap(searches):
    over_cap, trainings = (
        sum(search[count] for search in searches) for count in ("over_cap", "trainings")
    )
    assert over_cap <= 0.05 * trainings


def test_it_ends_once_nothing_is_likely_to_get_better(converged):
    _, trials, reached = converged["converged_at"] or (
        0,
        converged["trials"],
        converged["steps"][-1][2],
    )
    assert (reached > 0.95, trials < 60) == (True, True)


def test_the_same_seed_searches_in_the_same_way(converged):
    again = replay.run_ours(
        replay.cap_of("tight"), sampler="ehvi", seed=0, enough=2.0, until_converged=True
    )
    assert again["steps"] == converged["steps"]


def test_another_seed_searches_in_another_way():
    one, other = (
        replay.run_ours(replay.cap_of("tight"), sampler="random", seed=seed, most=20, enough=2.0)
        for seed in (0, 1)
    )
    assert one["ended_at"] != other["ended_at"]


def test_a_time_budget_is_kept_to_within_one_trial():
    found = replay.run_ours(
        replay.cap_of("loose"), sampler="ehvi", seed=0, enough=2.0, deadline=60.0
    )
    *_, before_the_last, _ = found["ended_at"]
    assert before_the_last < 60.0


@pytest.mark.slow
@pytest.mark.parametrize(
    "sampler", ["tpe", pytest.param("gp", marks=pytest.mark.slow), "nsga2", "random"]
)
def test_every_sampler_of_optunas_searches_it(sampler):
    found = replay.run_ours(replay.cap_of("loose"), sampler=sampler, seed=0, most=14)
    assert found["trials"] == 14


# -- a hand-made table of one training, and better trials ------------------------------------------


@pytest.fixture
def one_training():
    """Makes a table of one training: a second each for the start, 20 steps and the evaluation."""
    recorded = replay.the_table()
    baseline = recorded.definition(cap_bytes=1).baseline_config()

    def make(*, config=baseline, spread=0.0, compilation=0.0, compile_seconds=None):
        tokens_per_second = float(recorded.workload.tokens_per_step)
        parts = {"startup": 1.0, "compilation": compilation, "training": 20.0, "evaluation": 1.0}
        measurement = Measurement(
            outcome="ok",
            peak_memory_bytes=1000,
            device_bytes=1000,
            tokens_per_second=tokens_per_second,
            tokens_per_second_spread=spread * tokens_per_second,
            perplexity=20.0,
            compile_seconds=compile_seconds,
            seconds_by_part=parts,
        )
        training = Training(measurement=measurement, seconds=sum(parts.values()))
        return replay.Table(
            space=recorded.space,
            workload=recorded.workload,
            device=recorded.device,
            unavailable={},
            configs={config.fingerprint: config},
            trainings={config.fingerprint: training},
            predictions=recorded.predictions,
        )

    return make


def train(table, *, faster=None, peak_memory_bytes=1000, seed=0, cap_bytes=2000):
    """Runs the table's training, with another trial that is `faster` by this factor.

    Returns the executor and the measurement.
    """
    [config] = table.configs.values()
    pruning_bounds = ()
    if faster is not None:
        speed = faster * table.workload.tokens_per_step
        pruning_bounds = (
            PruningBound(number=0, peak_memory_bytes=peak_memory_bytes, tokens_per_second=speed),
        )
    executor = replay.ReplayExecutor(table, seed=seed)
    definition = replay.the_table().definition(cap_bytes=cap_bytes)
    finished = executor.train(
        replay.training_of(
            definition, config, shares_perplexity=True, pruning_bounds=pruning_bounds
        )
    )
    return executor, finished.measurement


def counters(table, *, seeds=40, **pruning):
    """(ended early, ended wrongly), summed over the seeds of the noise."""
    executors = [train(table, seed=seed, **pruning)[0] for seed in range(seeds)]
    return sum(one.ended_early for one in executors), sum(one.ended_wrongly for one in executors)


def test_a_dominated_training_is_ended_and_counted(one_training):
    executor, measured = train(one_training(), faster=2.0)
    assert (measured.outcome, executor.ended_early, executor.ended_wrongly) == ("dominated", 1, 0)


def test_a_training_that_is_ended_costs_what_was_spent_until_then(one_training):
    executor, _ = train(one_training(), faster=2.0)
    # The start, four steps of warm-up, two for memory and three that are timed.
    assert executor.seconds == pytest.approx(1 + 4 + 2 + 3)


def test_noise_ends_a_training_wrongly_and_is_counted(one_training):
    early, wrongly = counters(one_training(spread=0.3), faster=0.99)
    assert early == wrongly > 0


def test_noise_that_ends_a_dominated_training_is_not_wrong(one_training):
    early, wrongly = counters(one_training(spread=0.3), faster=1.05)
    assert (early > 0, wrongly) == (True, 0)


@pytest.mark.parametrize(
    "pruning",
    [
        {},
        {"faster": 1.05},  # less than the margin
        {"faster": 0.99},
        {"faster": 2.0, "peak_memory_bytes": 1001},
    ],
)
def test_counters_of_a_training_that_no_other_trial_ends_stay_at_zero(one_training, pruning):
    assert counters(one_training(), **pruning) == (0, 0)


@pytest.mark.parametrize(
    ("ended_by", "compilation"),
    [({"faster": 2.0}, 30.0), ({"cap_bytes": 999}, 30.0), ({}, 40.0)],
)
def test_only_a_training_that_is_evaluated_compiles_its_evaluation(
    one_training, ended_by, compilation
):
    config = TrainingConfig(compile="block", optimizer_fusion="kernel", micro_batch_size=8)
    table = one_training(config=config, compilation=40.0, compile_seconds=30.0)
    executor, _ = train(table, **ended_by)
    assert executor.seconds_by_part["compilation"] == pytest.approx(compilation)


def test_a_training_over_the_cap_is_not_counted_as_dominated(one_training):
    executor, _ = train(one_training(), faster=2.0, cap_bytes=999)
    assert (executor.over_cap, executor.ended_early) == (1, 0)


def test_the_speed_seen_early_does_not_depend_on_what_was_trained_before():
    table = replay.the_table()
    first, second = list(table.configs.values())[:2]
    fast = (PruningBound(number=0, peak_memory_bytes=0, tokens_per_second=1e9),)
    definition = table.definition(cap_bytes=2**40)

    def speed_seen(*before):
        executor = replay.ReplayExecutor(table, seed=3)
        for config in (*before, second):
            finished = executor.train(
                replay.training_of(definition, config, shares_perplexity=True, pruning_bounds=fast)
            )
        return finished.measurement.tokens_per_second

    assert speed_seen(first) == speed_seen()


def test_a_search_over_the_recorded_table_ends_dominated_trainings():
    found = replay.run_ours(replay.cap_of("loose"), sampler="random", seed=0, most=40)
    assert found["trainings"] > found["ended_early"] > 0


@pytest.mark.slow
def test_a_search_without_early_ends_ends_none():
    found = replay.run_ours(
        replay.cap_of("loose"), sampler="random", seed=0, most=40, without="early ends"
    )
    assert found["ended_early"] == 0


# -- how often a training is over the cap ----------------------------------------------------------


@pytest.mark.parametrize("cap", ["loose", "75 %", "middle", "35 %", "25 %", "12 %", "tight"])
def test_a_cap_fits_its_share_of_the_configurations(cap):
    share = {**replay.CAPS, **replay.MORE_CAPS}[cap]
    trainings = replay.the_table().trainings.values()
    fitting = [one for one in trainings if one.measurement.device_bytes <= replay.cap_of(cap)]
    assert len(fitting) / len(trainings) == pytest.approx(share, abs=0.01)


@pytest.mark.parametrize(
    ("strategy", "count"), [("ehvi", 7), ("until converged", 7), ("random", 3), ("optuna TPE", 3)]
)
def test_the_default_sampler_is_replayed_at_more_caps(strategy, count):
    assert len({cap for _, cap, _ in replay.jobs([strategy], seeds=1)}) == count


def replayed(*, cap, over_cap, trainings=100):
    return {"cap": cap, "strategy": "ehvi", "over_cap": over_cap, "trainings": trainings}


def test_the_summary_names_the_cap_at_which_most_trainings_are_over(capsys):
    said = {
        "caps_bytes": {"loose": 400, "tight": 100},
        "more_caps_bytes": {"12 %": 200},
        "share_of_configurations": {"loose": 1.0, "tight": 0.05, "12 %": 0.12},
    }
    groups = collections.defaultdict(list)
    for run in (
        replayed(cap="loose", over_cap=0),
        replayed(cap="12 %", over_cap=9),
        replayed(cap="12 %", over_cap=0, trainings=200),
        replayed(cap="tight", over_cap=1),
    ):
        groups[run["cap"], run["strategy"]].append(run)
    summary.more_caps(said, groups)
    assert "at most 3.0 % of the trainings: ehvi at the cap that 12 %" in capsys.readouterr().out


# -- measuring a part of the table again -----------------------------------------------------------


def row(part, precision, *, repeat=None):
    config = TrainingConfig(precision=precision, micro_batch_size=8).to_dict()
    return {"part": part, "config": config} | ({} if repeat is None else {"repeat": repeat})


BEFORE = [
    row("prediction", "bf16-true"),
    row("training", "bf16-true", repeat=0),
    row("trace", "fp32"),
    row("prediction", "fp32"),
    row("training", "fp32", repeat=0),
    row("training", "bf16-true", repeat=1),
]


def test_only_the_chosen_predictions_and_trainings_are_measured_again():
    left = record.without(BEFORE, record.Only.read("precision=bf16-true"))
    assert left == [
        row("trace", "fp32"),
        row("prediction", "fp32"),
        row("training", "fp32", repeat=0),
    ]


def test_first_steps_are_not_measured_again():
    assert record.without(BEFORE, record.Only.read("precision=fp32"))[2] == row("trace", "fp32")


def test_what_was_measured_again_takes_its_old_lines():
    left = record.without(BEFORE, record.Only.read("precision=bf16-true"))
    again = [BEFORE[5], BEFORE[0], BEFORE[1]]
    assert record.in_order_of(BEFORE, left + again) == BEFORE


@pytest.mark.parametrize("text", ["bf16-true", "precision=", "=bf16-true", "precisions=bf16-true"])
def test_text_without_a_field_and_a_value_is_rejected(text):
    with pytest.raises(argparse.ArgumentTypeError, match="Give FIELD=VALUE"):
        record.Only.read(text)
