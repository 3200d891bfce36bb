"""FLOPs of trials from the predictions of a study, which are made by hand here."""

from dataclasses import replace

from autotune.spec.config import TrainingConfig, check_legal
from autotune.spec.prediction import Forecast
from autotune.spec.workload import make_workload
from autotune.study.prediction.prediction_cache import PredictionCache
from tests.building.flows import AtOnce, as_flow
from tests.building.studies import definition, open_store
from tests.building.views import predicted

MODEL, CHECKPOINTED, CHUNKED = 100.0, 130.0, 104.0


def cache_in(tmp_path, store, *, asked=None, **changes):
    """Returns a cache; the configurations that are predicted are added to `asked`."""
    of_study = definition(**changes)
    store.create_study(of_study, trials_wanted=3)

    def predict(config):
        if asked is not None:
            asked.append(config)
        flops = MODEL
        if config.checkpointing != "none":
            flops = CHECKPOINTED
        elif config.loss == "chunked":
            flops = CHUNKED
        prediction = replace(predicted(), flops_per_token=flops)
        return Forecast(config=config, prediction=prediction)

    return PredictionCache(of_study, store=store, predict=as_flow(predict))


def flops_of(cache, **choices):
    return AtOnce(cache).flops_of(TrainingConfig(micro_batch_size=4, **choices))


def test_recomputed_flops_are_those_above_the_models(tmp_path):
    with open_store(f"sqlite:///{tmp_path}/studies.db") as store:
        cache = cache_in(tmp_path, store)
        assert flops_of(cache) == (100.0, 0.0)
        assert flops_of(cache, checkpointing="block") == (100.0, 30.0)
        assert flops_of(cache, loss="chunked") == (100.0, 4.0)


def test_configurations_with_the_same_flops_are_predicted_once(tmp_path):
    asked = []
    with open_store(f"sqlite:///{tmp_path}/studies.db") as store:
        cache = cache_in(tmp_path, store, asked=asked)
        for precision in ("fp32", "bf16-mixed", "bf16-true"):
            flops_of(cache, precision=precision, checkpointing="block", compile="block")
    assert [config.checkpointing for config in asked] == ["none", "block"]


def test_a_prediction_that_is_there_is_used(tmp_path):
    asked = []
    with open_store(f"sqlite:///{tmp_path}/studies.db") as store:
        cache = cache_in(tmp_path, store, asked=asked)
        cache.add(AtOnce(cache).predict(TrainingConfig(micro_batch_size=8)))
        assert flops_of(cache, precision="bf16-mixed") == (100.0, 0.0)
    assert len(asked) == 1


def test_what_a_memory_budget_recomputes_is_only_known_from_its_own_prediction(tmp_path):
    with open_store(f"sqlite:///{tmp_path}/studies.db") as store:
        cache = cache_in(tmp_path, store)
        budget = {"compile": "block", "memory_budget": 0.5, "checkpointing": "none"}
        assert flops_of(cache, **budget) == (100.0, None)
        cache.add(AtOnce(cache).predict(TrainingConfig(micro_batch_size=4, **budget)))
        assert flops_of(cache, **budget) == (100.0, 0.0)


def test_a_study_without_predictions_has_no_flops(tmp_path):
    with open_store(f"sqlite:///{tmp_path}/studies.db") as store:
        store.create_study(definition(), trials_wanted=3)
        cache = PredictionCache(definition(), store=store, predict=None)
        assert flops_of(cache) == (None, None)


def test_a_study_of_several_devices_asks_for_a_plain_training_that_is_legal(tmp_path):
    asked = []
    workload = make_workload("cpu", {"global_batch": 8, "devices_per_trial": 2})
    with open_store(f"sqlite:///{tmp_path}/studies.db") as store:
        cache = cache_in(tmp_path, store, asked=asked, workload=workload)
        assert flops_of(cache, sharding="zero3") == (100.0, 0.0)
        assert flops_of(cache, tensor_parallel=2) == (100.0, None)
    assert [config.sharding for config in asked] == ["ddp"]
    check_legal(asked[0], workload.legality_context)
