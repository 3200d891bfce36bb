"""What a few trials say of the configurations not tried."""

import math
import random
from dataclasses import replace

import numpy
import pytest

from autotune.spec.config import TrainingConfig
from autotune.study.sampler.features import features_of, with_expectation
from autotune.study.sampler.surrogate import Surrogate, posterior

_FACTORS = {
    ("checkpointing", "block"): 0.5,
    ("precision", "bf16-mixed"): 0.7,
    ("optimizer_fusion", "kernel"): 0.9,
}


def value(config):
    """Techniques that multiply, as they do where none gets in another's way."""
    return math.log(
        math.prod(f for (field, choice), f in _FACTORS.items() if getattr(config, field) == choice)
    )


def configs():
    return [
        TrainingConfig(checkpointing=checkpointing, precision=precision, optimizer_fusion=fusion)
        for checkpointing in ("none", "block")
        for precision in ("fp32", "bf16-mixed")
        for fusion in ("foreach", "kernel")
    ]


def test_factors_seen_apart_are_expected_together():
    unseen = TrainingConfig(
        checkpointing="block", precision="bf16-mixed", optimizer_fusion="kernel"
    )
    plain_checkpointing = TrainingConfig(checkpointing="block", optimizer_fusion="foreach")
    seen = [
        config
        for config in configs()
        if config.checkpointing == "none" or config == plain_checkpointing
    ]
    estimate = posterior(
        [unseen], x_train=seen, y_train=[value(config) for config in seen], noises=(0.01,)
    )
    assert estimate.mean[0] == pytest.approx(value(unseen), abs=0.1)


def test_what_was_seen_is_believed():
    seen = configs()
    estimate = posterior(
        seen, x_train=seen, y_train=[value(config) for config in seen], noises=(0.01,)
    )
    assert estimate.mean == pytest.approx([value(config) for config in seen], abs=0.02)


def test_what_shares_less_with_the_trials_is_less_sure():
    seen = [TrainingConfig(), TrainingConfig(checkpointing="block")]
    near, far = (
        TrainingConfig(optimizer_fusion="kernel"),
        TrainingConfig(
            optimizer_fusion="kernel", precision="bf16-true", compile="model", loss="chunked"
        ),
    )
    estimate = posterior([*seen, near, far], x_train=seen, y_train=[0.0, -0.5], noises=(0.01,))
    assert list(numpy.argsort(estimate.deviation)[2:]) == [2, 3]


def test_a_budget_between_two_that_were_seen_is_expected_between_them():
    seen = [TrainingConfig(compile="block", memory_budget=budget) for budget in (1.0, 0.0)]
    between = TrainingConfig(compile="block", memory_budget=0.5)
    estimate = posterior([between], x_train=seen, y_train=[0.0, -1.0], noises=(0.01,))
    assert -0.75 < estimate.mean[0] < -0.25


def test_trials_that_came_out_alike_do_not_show_that_techniques_have_no_effect():
    seen = [TrainingConfig(), TrainingConfig(micro_batch_size=2)]
    [deviation] = posterior(
        [TrainingConfig(checkpointing="block")], x_train=seen, y_train=[1.0, 1.0], noises=(0.01,)
    ).deviation
    assert deviation > 0.05


def test_scattered_values_are_believed_less_than_smooth_ones():
    draw = random.Random(0)
    seen = [replace(config, micro_batch_size=size) for config in configs() for size in (1, 2, 4, 8)]
    smooth = [value(config) for config in seen]
    scattered = [one + draw.gauss(0.0, 0.2) for one in smooth]
    noises = (0.01, 0.1)
    of_smooth, of_scattered = (
        posterior(seen, x_train=seen, y_train=v, noises=noises) for v in (smooth, scattered)
    )
    assert of_scattered.deviation.mean() > 2 * of_smooth.deviation.mean()


def test_a_technique_without_effect_is_told_from_those_that_have_one():
    seen = [
        TrainingConfig(checkpointing=checkpointing, precision=precision, micro_batch_size=size)
        for checkpointing in ("none", "block")
        for precision in ("fp32", "bf16-mixed")
        for size in (1, 8)
    ]
    unseen = replace(seen[0], optimizer_fusion="kernel")
    known = [*seen, replace(seen[-1], optimizer_fusion="kernel")]
    y_train = [3.0 * value(replace(config, optimizer_fusion="none")) for config in known]
    own, shared = (
        Surrogate(features_of(known), y_train, noises=(0.01,), has_own_scales=has_own_scales)
        .predict(features_of([unseen]))
        .deviation[0]
        for has_own_scales in (True, False)
    )
    assert own < shared / 2


def test_believing_one_by_one_is_as_sure_as_a_fit_with_what_is_believed():
    known = [replace(config, micro_batch_size=size) for config in configs() for size in (1, 8)]
    x_test = features_of([replace(config, micro_batch_size=4) for config in configs()])
    surrogate = Surrogate(features_of(known), [value(one) for one in known], noises=(0.05,))
    one_by_one = surrogate.one_by_one(x_test)
    for index in (2, 0):
        one_by_one.believe(index)
    believed = x_test[[2, 0]]
    expected = surrogate.believing(believed, surrogate.predict(believed).mean).predict(x_test)
    found = one_by_one.at(range(len(x_test)))
    assert found.deviation == pytest.approx(expected.deviation, rel=1e-6)
    assert found.mean == pytest.approx(expected.mean, rel=1e-6)


def test_believing_more_than_the_mean_one_by_one_is_a_fit_with_those_values():
    known = [replace(config, micro_batch_size=size) for config in configs() for size in (1, 8)]
    x_test = features_of([replace(config, micro_batch_size=4) for config in configs()])
    surrogate = Surrogate(features_of(known), [value(one) for one in known], noises=(0.05,))
    one_by_one = surrogate.one_by_one(x_test)
    believed = []
    for index, above_mean in ((2, 0.3), (0, 0.1)):
        believed.append(one_by_one.at([index]).mean[0] + above_mean)
        one_by_one.believe(index, above_mean=above_mean)
    expected = surrogate.believing(x_test[[2, 0]], numpy.array(believed)).predict(x_test)
    found = one_by_one.at(range(len(x_test)))
    assert found.mean == pytest.approx(expected.mean, rel=1e-6)
    assert found.deviation == pytest.approx(expected.deviation, rel=1e-6)


# -- what is expected beforehand -------------------------------------------------------------------


def expecting(unseen, seen, *, expected):
    """The posterior of `unseen`, where `expected` of each configuration is known beforehand."""

    def features(configs):
        return with_expectation(features_of(configs), numpy.array([*map(expected, configs)]))

    surrogate = Surrogate(features(seen), [value(one) for one in seen], noises=(0.02,))
    return surrogate.predict(features(unseen))


def test_a_technique_that_was_never_tried_is_as_it_is_expected_to_be():
    seen = [config for config in configs() if config.checkpointing == "none"]
    unseen = [config for config in configs() if config.checkpointing == "block"]
    found = expecting(unseen, seen, expected=lambda config: 1.5 + value(config))
    without = posterior(unseen, x_train=seen, y_train=[value(one) for one in seen], noises=(0.02,))
    wanted = numpy.array([value(config) for config in unseen])
    assert abs(found.mean - wanted).max() < 0.2
    assert abs(found.mean - wanted).max() < 0.5 * abs(without.mean - wanted).min()


def test_an_expectation_that_the_measurements_contradict_is_given_no_weight():
    seen = configs()
    found = expecting(seen, seen, expected=lambda config: -4 * value(config))
    assert found.mean == pytest.approx([value(config) for config in seen], abs=0.05)


def test_what_is_believed_keeps_the_expectation_of_the_others():
    seen, unseen = configs()[:4], configs()[4:]
    rows = with_expectation(features_of(configs()), numpy.array([*map(value, configs())]))
    surrogate = Surrogate(rows[:4], [value(one) for one in seen], noises=(0.02,))
    believed = surrogate.believing(rows[4:5], surrogate.predict(rows[4:5]).mean)
    before, after = surrogate.predict(rows[4:]), believed.predict(rows[4:])
    assert after.mean == pytest.approx(before.mean, abs=0.02)
    assert len(unseen) == 4
