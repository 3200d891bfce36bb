"""In which order the baseline and the named configurations of a space are tried."""

from contextlib import ExitStack
from dataclasses import replace

import pytest

from autotune.analysis.expected_step import ExpectedStep
from autotune.execution.flow import result_of
from autotune.execution.local import LocalExecutor
from autotune.execution.trial_options import TrialOptions
from autotune.spec.prediction import Forecast
from autotune.spec.space_file import load_space
from autotune.study.prediction.prediction_cache import PredictionCache
from autotune.study.running.loop import Predict, StudySession
from autotune.study.running.named_order import NamedOrder, is_unlikely
from autotune.study.running.running_study import RunningStudy
from autotune.study.sampler.memory_model import MemoryModel
from autotune.study.workers.coordinator import Coordinator
from tests.analysis.test_expected_step import H200, PREDICTED, STUDY
from tests.building.flows import as_flow
from tests.building.ranking import record
from tests.building.studies import open_store
from tests.quick_study.quick_executor import CPU

GIB = 2**30
DEFAULT = replace(STUDY, space=load_space("default"), unavailable={}, cap_bytes=16 * GIB)
BASELINE = DEFAULT.baseline_config()


def following(study, records=()):
    order = NamedOrder(study)
    expected = ExpectedStep.of(study, PREDICTED)
    predicted = [Forecast(config=study.baseline_config(), prediction=PREDICTED)]
    memory = MemoryModel(list(records), predicted, cap_bytes=study.cap_bytes, expected=expected)
    tried = {one.config for one in records}
    left = order.left(tried, names=set())
    return order.next(left, list(records), expected=expected, memory=memory)


def took(config, *, seconds, **changes):
    return replace(record(config, **changes), seconds=seconds)


def test_on_a_cpu_the_baseline_is_first_and_the_others_are_in_the_order_of_the_file():
    rates = {"matrix_flops_per_second": {"fp32": 1e11}, "bandwidth_bytes_per_second": 1e10}
    on_cpu = replace(DEFAULT, device=replace(CPU, **rates))
    assert following(on_cpu) == on_cpu.first_configurations()


def test_on_a_gpu_what_is_not_compiled_is_tried_first_and_16_bit_before_fp32():
    configs = [config for _, config in following(DEFAULT)]
    assert BASELINE not in configs
    assert [config.compile for config in configs[:2]] == ["none", "none"]
    assert {config.precision for config in configs} == {
        "bf16-mixed",
        "bf16-true",
        "bf16-stochastic",
    }


def test_a_named_configuration_is_tried_at_the_largest_micro_batch_that_is_likely_to_fit():
    of_cap = {cap: dict(following(replace(DEFAULT, cap_bytes=cap * GIB))) for cap in (4, 8, 16)}
    name = "bf16 autocast, compiled"
    sizes = [of_cap[cap][name].micro_batch_size for cap in (4, 8, 16)]
    assert sizes[0] < sizes[1] <= sizes[2] == BASELINE.micro_batch_size


def test_a_baseline_that_nobody_would_pick_waits_until_it_takes_a_tenth_of_the_time():
    first, *_ = following(DEFAULT)
    soon = [took(first[1], seconds=30.0)]
    later = [took(first[1], seconds=600.0)]
    assert BASELINE not in dict(following(DEFAULT, soon)).values()
    assert BASELINE in dict(following(DEFAULT, later)).values()


def test_a_baseline_that_may_be_picked_is_tried_with_the_others():
    slow_16_bit = replace(H200, matrix_flops_per_second={"fp32": 50.5e12, "bf16": 30e12})
    found = following(replace(DEFAULT, device=slow_16_bit))
    assert BASELINE in dict(found).values()


def forecast_of(config, *, peak, bound):
    found = replace(
        PREDICTED,
        peak_memory_bytes=round(peak),
        lower_bound_bytes=round(peak * (1 - bound)),
        upper_bound_bytes=round(peak * (1 + bound)),
    )
    return Forecast(config=config, prediction=found)


@pytest.mark.parametrize(
    ("share_of_cap", "is_left_to_the_sampler"),
    [
        pytest.param(0.97, False, id="probably fits"),
        pytest.param(1.023, True, id="probably does not"),
        pytest.param(1.2, False, id="surely does not, which is recorded without training"),
    ],
)
def test_for_the_cap_a_named_configuration_is_like_any_other(share_of_cap, is_left_to_the_sampler):
    config = dict(DEFAULT.first_configurations())["bf16 weights, compiled"]
    forecast = forecast_of(config, peak=share_of_cap * DEFAULT.cap_bytes, bound=0.08)
    memory = MemoryModel([], [forecast], cap_bytes=DEFAULT.cap_bytes)
    assert is_unlikely(config, memory) is is_left_to_the_sampler
    left = [("baseline", BASELINE), ("one", config)]
    following = NamedOrder(DEFAULT).next(left, [], expected=None, memory=memory)
    assert (("one", config) not in following) is is_left_to_the_sampler


def test_a_baseline_that_probably_does_not_fit_is_tried_all_the_same():
    forecast = forecast_of(BASELINE, peak=1.02 * DEFAULT.cap_bytes, bound=0.08)
    memory = MemoryModel([], [forecast], cap_bytes=DEFAULT.cap_bytes)
    left = [("baseline", BASELINE)]
    assert NamedOrder(DEFAULT).next(left, [], expected=None, memory=memory) == left


def kind_of(config):
    return config.adapter != "none", config.base_weights in ("int8", "nf4")


@pytest.mark.parametrize("tried", [(False, False), (True, False), (True, True)])
def test_full_training_lora_and_qlora_are_tried_once_before_any_is_tried_twice(tried):
    study = replace(DEFAULT, space=load_space("finetune"))
    named = [config for _, config in study.first_configurations()[1:]]
    of_kind = next(config for config in named if kind_of(config) == tried)
    kinds = [kind_of(config) for _, config in following(study, [took(of_kind, seconds=5.0)])]
    first = kinds.index(tried)
    assert len({*kinds[:first]}) == 2
    assert {*kinds[first:]} == {tried}


def test_while_one_place_predicts_the_baseline_no_other_begins_a_trial(tmp_path):
    asked = []

    def predict(config):
        asked.append(config)
        return Forecast(config=config, prediction=PREDICTED)

    with ExitStack() as stack:
        store = stack.enter_context(open_store(f"sqlite:///{tmp_path}/autotune.db"))
        store.create_study(DEFAULT, trials_wanted=30)
        shared = Coordinator(DEFAULT, store=store, folder=tmp_path, listener=lambda event: None)
        session = StudySession(
            RunningStudy(
                definition=DEFAULT,
                shared=stack.enter_context(shared),
                prediction_cache=PredictionCache(DEFAULT, store=store, predict=as_flow(predict)),
                folder=tmp_path,
                listener=lambda event: None,
                trial_options=TrialOptions(trial_time_limit_seconds=60.0),
            ),
            executor=stack.enter_context(LocalExecutor(tmp_path)),
            should_stop=lambda: False,
        )
        session._trials_wanted = 30
        place = session._places.first
        step = session._new()
        assert step == Predict(config=BASELINE)
        with session._doing(place, step):
            assert session._new() is None
            result_of(session._predict(place, BASELINE))
        assert asked == [BASELINE]
        assert [one for _, one in session._named_next(session._named_left())] == [
            one for _, one in following(DEFAULT)
        ]
        assert not shared.records
