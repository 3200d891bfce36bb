"""Which trial has the same compiled program as a configuration; predictions made by hand."""

from dataclasses import replace

from autotune.spec.config import TrainingConfig
from autotune.spec.prediction import CATEGORIES, Forecast, KeptOfBlock, Prediction
from autotune.spec.result import TrialRecord
from autotune.study.prediction.prediction_cache import PredictionCache
from tests.building.studies import definition, measured, open_store

MIB = 1024**2


def prediction(*, plan, peak_bytes=40 * MIB):
    return Prediction(
        device="cpu",
        fake_device="cpu",
        parameters=1000,
        peak_memory_bytes=peak_bytes,
        upper_bound_bytes=peak_bytes + MIB,
        lower_bound_bytes=peak_bytes - MIB,
        phase="backward",
        module="",
        operator="",
        bytes_by_category=dict.fromkeys(CATEGORIES, 0) | {"activations": peak_bytes},
        holders=(),
        plan=plan,
    )


def compiled(budget, **choices):
    return TrainingConfig(compile="block", memory_budget=budget, micro_batch_size=8, **choices)


def record(config, *, outcome="ok"):
    measurement = replace(measured(), outcome=outcome)
    return TrialRecord(**vars(measurement), number=3, config=config)


PLANS = {0.9: "one", 0.8: "one", 0.5: "two"}


def foresight_in(tmp_path, *configs):
    """Returns the predictions of a study, with those of `configs`, and its store."""
    store_context = open_store(f"sqlite:///{tmp_path}/studies.db")
    store = store_context.__enter__()
    store.create_study(definition(), trials_wanted=3)

    prediction_cache = PredictionCache(definition(), store=store, predict=None)
    for config in configs:
        prediction_cache.add(forecast(config))
    return prediction_cache, store


def forecast(config):
    return Forecast(config=config, prediction=prediction(plan=PLANS.get(config.memory_budget)))


def same(tmp_path, config, *, known, outcome="ok"):
    prediction_cache, store = foresight_in(tmp_path, config, known)
    try:
        return prediction_cache.same_program(config, [record(known, outcome=outcome)])
    finally:
        store.close()


def test_a_budget_with_the_plan_of_a_measured_one_is_answered_by_it(tmp_path):
    assert same(tmp_path, compiled(0.8), known=compiled(0.9)).number == 3


def test_a_budget_with_another_plan_is_not(tmp_path):
    assert same(tmp_path, compiled(0.5), known=compiled(0.9)) is None


def test_the_same_plan_with_another_optimizer_is_another_program(tmp_path):
    assert same(tmp_path, compiled(0.8, optimizer="sgd"), known=compiled(0.9)) is None


def test_a_trial_without_a_result_is_not_the_same_program(tmp_path):
    assert same(tmp_path, compiled(0.8), known=compiled(0.9), outcome="interrupted") is None


def test_a_budget_in_which_everything_fits_is_answered_by_a_trial_without_prediction(tmp_path):
    plain = TrainingConfig(micro_batch_size=8)
    everything = replace(prediction(plan=None), kept=(KeptOfBlock(),) * 2)
    some = replace(everything, kept=(KeptOfBlock(), KeptOfBlock(operators=())))
    budgets = {"1TiB": everything, "1GiB": some, "1100MiB": some}
    configs = {size: replace(plain, activation_budget=size) for size in budgets}
    prediction_cache, store = foresight_in(tmp_path)
    try:
        for size, found in budgets.items():
            prediction_cache.add(Forecast(config=configs[size], prediction=found))
        answers = [
            prediction_cache.same_program(configs[size], [record(other)])
            for size, other in (
                ("1TiB", plain),
                ("1GiB", plain),
                ("1GiB", configs["1100MiB"]),
            )
        ]
    finally:
        store.close()
    assert [answer is not None for answer in answers] == [True, False, True]


def test_an_eager_configuration_with_another_fusion_is_another_program(tmp_path):
    eager = TrainingConfig(micro_batch_size=8)
    assert same(tmp_path, replace(eager, optimizer_fusion="kernel"), known=eager) is None


def test_predictions_are_read_again_by_the_next_search(tmp_path):
    _, store = foresight_in(tmp_path, compiled(0.9))
    try:
        again = PredictionCache(definition(), store=store, predict=None)
        [known] = again.known.values()
        assert known.prediction == prediction(plan="one")
    finally:
        store.close()


def test_only_a_lower_bound_over_the_limit_skips_a_training(tmp_path):
    prediction_cache, store = foresight_in(tmp_path, compiled(0.9))
    try:
        limits = (38 * MIB, 39 * MIB, 40 * MIB)
        is_skipped = [
            prediction_cache.measurement_if_over(compiled(0.9), limit_bytes=limit) is not None
            for limit in limits
        ]
    finally:
        store.close()
    assert is_skipped == [True, False, False]
