"""The choice of the next configuration, from records and predictions made by hand."""

import itertools
import math
import random
from dataclasses import replace
from itertools import islice

import pytest

from autotune.spec import search_space
from autotune.spec.config import TrainingConfig
from autotune.spec.prediction import Forecast
from autotune.study.sampler import ehvi_sampler
from autotune.study.sampler.ehvi_sampler import EhviSampler, Knowledge
from autotune.study.sampler.features import Candidates
from autotune.study.sampler.training_subset import TrainingSubset
from tests.building.ranking import CAP_BYTES, MIB, forecast, record
from tests.building.studies import SPACE, definition

DEFINITION = definition()
LEGAL = DEFINITION.legal_space()
ALL = list(LEGAL.configurations())
BASELINE = TrainingConfig(micro_batch_size=8, optimizer_fusion="foreach")


def choose(records, forecasts=(), *, cap_bytes=CAP_BYTES, excluded=()):
    tried = {one.config for one in records}
    return EhviSampler(LEGAL, cap_bytes=cap_bytes).choose(
        records, forecasts, excluded={*tried, *excluded}, seed=1
    )


def test_what_was_tried_is_not_chosen_again():
    left = ALL[5]
    choice = choose([record(BASELINE)], excluded={*ALL} - {left})
    assert choice.config == left


def test_nothing_is_chosen_where_nothing_is_left():
    assert choose([record(BASELINE)], excluded={*ALL}) is None


def test_nothing_is_chosen_where_all_that_is_left_is_predicted_far_over_the_cap():
    large = {"peak_memory_bytes": 2 * CAP_BYTES}
    forecasts = [forecast(config, **large, uncertainty=0.05) for config in ALL]
    assert (
        choose(
            [record(BASELINE, outcome="over_cap", device_bytes=2 * CAP_BYTES, **large)], forecasts
        )
        is None
    )


def test_of_two_alike_the_one_predicted_to_need_less_is_chosen():
    small, large = [c for c in ALL if c.micro_batch_size == 8 and c.compile == "block"][:2]
    forecasts = [
        forecast(small, peak_memory_bytes=10 * MIB),
        forecast(large, peak_memory_bytes=60 * MIB),
    ]
    choice = choose([record(BASELINE)], forecasts, excluded={*ALL} - {small, large})
    assert choice.config == small


def test_before_anything_was_timed_what_surely_fits_is_chosen():
    fits, hardly = ALL[3:5]
    forecasts = [
        forecast(fits, peak_memory_bytes=10 * MIB),
        forecast(hardly, peak_memory_bytes=63 * MIB),
    ]
    failed = record(
        BASELINE,
        outcome="out_of_memory",
        peak_memory_bytes=None,
        device_bytes=None,
        tokens_per_second=None,
        perplexity=None,
    )
    choice = choose([failed], forecasts, excluded={*ALL} - {fits, hardly})
    assert choice.config == fits


def test_on_a_front_that_nothing_improves_the_expected_improvement_is_small():
    memory, speed = {"none": 40 * MIB, "block": 20 * MIB}, {"none": 1000.0, "block": 500.0}
    records = [
        record(
            c, peak_memory_bytes=memory[c.checkpointing], tokens_per_second=speed[c.checkpointing]
        )
        for c in ALL
        if c.micro_batch_size != 4
    ]
    forecasts = [forecast(config, peak_memory_bytes=memory[config.checkpointing]) for config in ALL]
    assert (
        choose(records, forecasts).relative_improvement
        < 0.05
        < choose(records[:1]).relative_improvement
    )


def test_a_technique_that_crashes_every_trial_is_avoided():
    crashing = [config for config in ALL if config.compile == "block"]
    works = [config for config in ALL if config.compile == "none"]
    records = [record(config, number=number) for number, config in enumerate(works[:6])]
    records += [
        record(
            config,
            number=10 + number,
            outcome="crashed",
            peak_memory_bytes=None,
            device_bytes=None,
            tokens_per_second=None,
            perplexity=None,
        )
        for number, config in enumerate(crashing[:6])
    ]
    assert choose(records).config.compile == "none"


@pytest.mark.parametrize("seed", [0, 1])
def test_the_same_knowledge_and_seed_choose_the_same(seed):
    records = [record(BASELINE)]
    chosen = {
        EhviSampler(LEGAL, cap_bytes=CAP_BYTES)
        .choose(records, (), excluded=set(), seed=seed)
        .config
        for _ in range(3)
    }
    assert len(chosen) == 1


def test_the_relative_improvement_is_infinite_while_nothing_fits():
    over = record(
        BASELINE, outcome="over_cap", peak_memory_bytes=2 * CAP_BYTES, device_bytes=2 * CAP_BYTES
    )
    assert math.isinf(choose([over]).relative_improvement)


# -- what is worth a prediction --------------------------------------------------------------------

FAST = {"checkpointing": "none", "compile": "none", "memory_budget": 1.0}
SLOW = {**FAST, "checkpointing": "block"}


def config(precision, *, micro_batch_size, **techniques):
    return TrainingConfig(
        precision=precision,
        micro_batch_size=micro_batch_size,
        optimizer_fusion="foreach",
        **techniques,
    )


UNLIKELY_TO_FIT = config("fp32", micro_batch_size=8, **{**FAST, "compile": "block"})
"""Compiled, which nothing seen is: by the others a little over the cap, but maybe fast."""
LITTLE_BETTER = config("bf16-mixed", micro_batch_size=4, **SLOW)


def seen():
    """Trials in fp32, from which memory and speed can be estimated, though not with certainty."""
    found = []
    for size, part in {8: 1.0, 4: 0.6, 2: 0.4}.items():
        for techniques, memory, speed in ((FAST, 80.0, 2000.0), (SLOW, 40.0, 1500.0)):
            peak = int(memory * part * MIB)
            found.append(
                record(
                    config("fp32", micro_batch_size=size, **techniques),
                    number=len(found),
                    outcome="ok" if peak <= CAP_BYTES else "over_cap",
                    peak_memory_bytes=peak,
                    device_bytes=peak,
                    tokens_per_second=speed * part**0.5,
                )
            )
    return found


def chosen_of_two(*, predicts=True, forecasts=()):
    known = forecast(LITTLE_BETTER, peak_memory_bytes=28 * MIB)
    choice = EhviSampler(LEGAL, cap_bytes=CAP_BYTES).choose(
        seen(),
        [known, *forecasts],
        excluded={*ALL} - {UNLIKELY_TO_FIT, LITTLE_BETTER},
        seed=1,
        predicts=predicts,
    )
    return choice.config


def test_what_would_bring_much_is_looked_at_even_where_it_is_unlikely_to_fit():
    assert chosen_of_two() == UNLIKELY_TO_FIT


def test_what_is_unlikely_to_fit_is_not_trained_without_a_look():
    assert chosen_of_two(predicts=False) == LITTLE_BETTER


def test_what_could_not_be_predicted_is_not_looked_at_again():
    failed = Forecast(config=UNLIKELY_TO_FIT, prediction=None)
    assert chosen_of_two(forecasts=[failed]) == LITTLE_BETTER


def test_what_is_predicted_a_little_over_the_cap_is_not_trained():
    slightly_over = forecast(
        UNLIKELY_TO_FIT, peak_memory_bytes=int(1.005 * CAP_BYTES), uncertainty=0.1
    )
    assert choose(seen(), [slightly_over], excluded={*ALL} - {UNLIKELY_TO_FIT}) is None


# -- while trials run ------------------------------------------------------------------------------


def measured_four():
    """Trials that let the surrogate tell what the micro batch and compiling do."""
    four = [
        TrainingConfig(micro_batch_size=size, optimizer_fusion="foreach", compile=compiled)
        for size in (2, 8)
        for compiled in ("none", "block")
    ]
    speeds = (500.0, 800.0, 1000.0, 1600.0)
    return [
        record(config, tokens_per_second=speed, peak_memory_bytes=(30 + number) * MIB)
        for number, (config, speed) in enumerate(zip(four, speeds, strict=True))
    ]


def improvement(*, of, in_flight=(), others_peak_bytes=20 * MIB):
    tried = measured_four()
    others = {*ALL} - {of}
    choice = EhviSampler(LEGAL, cap_bytes=CAP_BYTES).choose(
        tried,
        [
            forecast(config, peak_memory_bytes=20 * MIB if config == of else others_peak_bytes)
            for config in ALL
        ],
        excluded={*(one.config for one in tried), *others},
        seed=1,
        in_flight=in_flight,
    )
    return 0.0 if choice is None else choice.relative_improvement


def two_alike():
    """Two configurations that nothing measured tells apart."""
    tried = {one.config for one in measured_four()}
    return [
        config
        for config in ALL
        if config.micro_batch_size == 8 and config.compile == "block" and config not in tried
    ][:2]


def test_what_is_like_a_trial_in_flight_is_expected_to_add_less():
    one, other = two_alike()
    assert improvement(of=one, in_flight=[other]) < 0.8 * improvement(of=one)


def test_what_is_unlike_a_trial_in_flight_adds_nearly_as_much_as_before():
    one, _ = two_alike()
    slow = next(c for c in ALL if c.micro_batch_size == 1 and c.compile == "none")
    large = {"of": one, "others_peak_bytes": 60 * MIB}
    assert improvement(**large, in_flight=[slow]) > 0.8 * improvement(**large)


TWO_UPDATES = definition(
    space=replace(SPACE, techniques={**SPACE.techniques, "optimizer_fusion": ("none", "foreach")})
).legal_space()
COMPILING = TrainingConfig(micro_batch_size=8, optimizer_fusion="foreach", compile="block")


def improvement_of_compiled(subject, *, in_flight):
    """How much a compiled configuration is expected to add where nothing compiled was measured."""
    speeds = {(8, "none"): 1000.0, (8, "block"): 750.0, (2, "none"): 600.0, (2, "block"): 450.0}
    tried = [
        record(
            TrainingConfig(
                micro_batch_size=size, checkpointing=checkpointing, optimizer_fusion="foreach"
            ),
            tokens_per_second=speed,
            peak_memory_bytes=int(speed / 20) * MIB,
        )
        for (size, checkpointing), speed in speeds.items()
    ]
    choice = EhviSampler(TWO_UPDATES, cap_bytes=CAP_BYTES).choose(
        tried,
        [
            forecast(subject, peak_memory_bytes=25 * MIB),
            forecast(COMPILING, peak_memory_bytes=60 * MIB),
        ],
        excluded={*TWO_UPDATES.configurations()} - {subject},
        seed=1,
        in_flight=in_flight,
    )
    return choice.relative_improvement


def test_while_a_technique_is_tried_first_others_with_it_stay_as_promising():
    other = replace(COMPILING, micro_batch_size=4)
    before = improvement_of_compiled(other, in_flight=[])
    assert improvement_of_compiled(other, in_flight=[COMPILING]) > 0.9 * before


def test_what_would_compile_the_code_that_is_being_compiled_waits():
    same_code = replace(COMPILING, optimizer_fusion="none")
    own_code = replace(COMPILING, memory_budget=0.5)
    assert improvement_of_compiled(
        same_code, in_flight=[COMPILING]
    ) < 0.5 * improvement_of_compiled(own_code, in_flight=[COMPILING])


def test_before_anything_was_timed_trials_in_flight_change_nothing():
    sampler = EhviSampler(LEGAL, cap_bytes=CAP_BYTES)
    choices = [
        sampler.choose([], [], excluded=set(), seed=1, in_flight=in_flight)
        for in_flight in ((), ALL[:3])
    ]
    assert choices[0] == choices[1]


# -- several suggestions of one fit ----------------------------------------------------------------


def suggestions(records, *, forecasts=(), in_flight=(), **options):
    sampler = EhviSampler(LEGAL, cap_bytes=CAP_BYTES)
    excluded = [*(one.config for one in records), *in_flight]
    return sampler.suggestions(
        records, forecasts, excluded=excluded, seed=1, in_flight=in_flight, **options
    )


def test_every_configuration_is_suggested_once_at_most_and_none_that_was_tried():
    records = measured_four()
    suggested = [choice.config for choice in suggestions(records)]
    assert len(suggested) == len({*suggested}) > 10
    assert not {*suggested} & {one.config for one in records}


def test_none_is_suggested_twice_where_the_space_is_looked_at_in_batches(monkeypatch):
    monkeypatch.setattr(ehvi_sampler, "MOST_CANDIDATES", 4)
    monkeypatch.setattr(ehvi_sampler, "CONVERGED_IMPROVEMENT", math.inf)  # so that it looks at all
    forecasts = [forecast(config, peak_memory_bytes=20 * MIB) for config in ALL]
    suggested = [choice.config for choice in suggestions(measured_four(), forecasts=forecasts)]
    assert len(suggested) == len({*suggested}) > 10


def test_the_second_suggestion_is_the_best_while_the_first_is_in_flight():
    """The memory of all is predicted, and no two are alike, so that one choice is the best.

    Every technique differs among the trials, so that all fits are over the same techniques.
    """
    peaks = {config: (10 + 3 * number) * MIB for number, config in enumerate(ALL)}
    forecasts = [forecast(config, peak_memory_bytes=peak) for config, peak in peaks.items()]
    tried = [
        record(config, tokens_per_second=500.0 + 40 * number, peak_memory_bytes=peaks[config])
        for number, config in enumerate(ALL[::5])
    ]
    options = {"forecasts": forecasts, "predicts": False}
    first, second = islice(suggestions(tried, **options), 2)
    alone = next(suggestions(tried, in_flight=[first.config], **options))
    assert second.config == alone.config


def assessed(records, configs):
    knowledge = Knowledge(
        records,
        (),
        cap_bytes=CAP_BYTES,
        points=(),
        training_subset=TrainingSubset(),
        predicts=True,
    )
    return knowledge.assess(Candidates.of(configs))


def test_what_has_always_crashed_keeps_a_hundredth_of_a_chance():
    crashed = [
        record(config, number=number, outcome="crashed") for number, config in enumerate(ALL[:8])
    ]
    assert assessed(crashed, ALL[:8]).no_failure == pytest.approx(0.01, abs=0.005)


def test_an_unknown_perplexity_is_the_best_of_the_same_precision_and_optimizer():
    fp32, mixed = config("fp32", micro_batch_size=8), config("bf16-mixed", micro_batch_size=8)
    compiled = replace(mixed, compile="block")
    assert compiled.numerics_class not in (fp32.numerics_class, mixed.numerics_class)
    records = [record(fp32, perplexity=10.0), record(mixed, number=1, perplexity=12.0)]
    assert assessed(records, [compiled, mixed, fp32]).perplexity.tolist() == [12.0, 12.0, 10.0]


def test_a_small_space_is_scored_at_once_and_a_large_one_in_batches(monkeypatch):
    space = EhviSampler(LEGAL, cap_bytes=CAP_BYTES)._all
    everything = list(range(len(ALL)))

    def batches_of_all():
        return [*ehvi_sampler._batches(space, [*everything], [], [], rng=random.Random(0))]

    assert batches_of_all() == [everything]
    monkeypatch.setattr(ehvi_sampler, "MOST_CANDIDATES", 4)
    batches = batches_of_all()
    assert [len(batch) for batch in batches[:-1]] == [4] * (len(batches) - 1)
    assert sorted(itertools.chain(*batches)) == everything


def test_of_a_space_too_large_to_be_listed_legal_untried_ones_are_suggested(monkeypatch):
    monkeypatch.setattr(search_space, "MOST_LISTED", 8)
    monkeypatch.setattr(ehvi_sampler, "MOST_LOOKED_AT", 8)
    tried = [record(ALL[0], number=0), record(ALL[1], number=1)]
    sampler = EhviSampler(LEGAL, cap_bytes=CAP_BYTES)
    suggestions = sampler.suggestions(tried, (), excluded=ALL[:2], seed=1)
    suggested = [choice.config for choice in itertools.islice(suggestions, 6)]
    assert len(set(suggested)) == 6
    assert set(suggested) <= {*ALL[2:]}


def test_the_neighbours_of_the_front_are_looked_at_in_a_space_too_large_to_be_listed(monkeypatch):
    monkeypatch.setattr(search_space, "MOST_LISTED", 8)
    monkeypatch.setattr(ehvi_sampler, "MOST_LOOKED_AT", 1)
    sampler = EhviSampler(LEGAL, cap_bytes=CAP_BYTES)
    near = sampler._one_change_away(ALL[0])
    space = sampler._space(near, (), rng=random.Random(0))
    assert {*near} <= {*space.configs}
    assert len(space.configs) <= len(near) + 1
