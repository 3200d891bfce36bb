"""Many devices at once, with stand-in trials: what a suggestion knows, and what a trial costs."""

from collections import Counter

import pytest

from autotune.spec.attempt import FinishedTrial
from autotune.study.running.loop import SECONDS_OF_A_ROUND
from autotune.study.sampler.ehvi_sampler import Choice, EhviSampler
from autotune.study.workers.coordinator import Coordinator
from studies.many_devices import scale
from studies.search_efficiency import replay
from tests.building import made_study

SECONDS_TO_FIT, SECONDS_TO_CLAIM = 0.3, 0.05
"""What a search computes in `SlowClock`'s time: less than half a second a fit, but devices wait."""


class SlowClock(scale.Clock):
    """Stands still, but for what the test adds and what the search waits."""

    now = 0.0

    @property
    def computed(self):
        return self.now


@pytest.fixture(scope="module")
def slow():
    """A search on 16 devices that takes long to choose. Returns what happened, and when.

    For each suggestion its time and the results it was chosen by; the time at which each trial that
    was run ended.
    """
    clock = SlowClock()
    suggested, ends = [], {}
    claim, perform = Coordinator.claim, scale.StandIn.perform
    suggestions = EhviSampler.suggestions

    def slow_suggestions(self, records, forecasts, **options):
        clock.now += SECONDS_TO_FIT
        for choice in suggestions(self, records, forecasts, **options):
            suggested.append((clock(), records))
            yield choice

    def slow_claim(*arguments, **options):
        clock.now += SECONDS_TO_CLAIM
        return claim(*arguments, **options)

    def noted_perform(self, task, *, log_name, **options):
        began = clock()
        found = yield from perform(self, task, log_name=log_name, **options)
        if isinstance(found, FinishedTrial) and "repeat" not in log_name:
            ends[log_name] = began + found.seconds
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scale, "Clock", lambda: clock)
        patch.setattr(EhviSampler, "suggestions", slow_suggestions)
        patch.setattr(Coordinator, "claim", slow_claim)
        patch.setattr(scale.StandIn, "perform", noted_perform)
        scale.run(devices=16, trials=24, filled=0, storage="sqlite", seed=0)
    return suggested, list(ends.values())


@pytest.mark.slow
def test_a_suggestion_takes_in_every_result_older_than_a_second(slow):
    suggested, ends = slow
    for seconds, records in suggested:
        old = sum(ended <= seconds - SECONDS_OF_A_ROUND - SECONDS_TO_CLAIM for ended in ends)
        assert old <= sum(record.outcome != "predicted_over_cap" for record in records)


def test_places_that_wait_at_the_same_time_are_served_by_one_fit(slow):
    suggested, _ = slow
    fits = Counter(len(records) for _, records in suggested)
    assert max(fits.values()) > 3


def test_with_one_device_every_suggestion_is_the_first_of_its_fit(monkeypatch):
    taken = []
    suggestions = EhviSampler.suggestions

    def counted(*arguments, **options):
        for number, choice in enumerate(suggestions(*arguments, **options)):
            taken.append(number)
            yield choice

    monkeypatch.setattr(EhviSampler, "suggestions", counted)
    replay.run_ours(replay.cap_of("middle"), sampler="ehvi", seed=0, most=14)
    assert len(taken) > 6
    assert set(taken) == {0}


@pytest.mark.slow
def test_statements_for_each_trial_do_not_grow_with_the_trials(monkeypatch):
    untried = iter(made_study.definition("scale").legal_space().configurations())

    def any_untried(*_, excluded, **__):
        tried = {*excluded}
        for config in untried:
            if config not in tried:
                yield Choice(config=config, relative_improvement=1.0, surely_fits=True)

    monkeypatch.setattr(EhviSampler, "suggestions", any_untried)
    few, many = (
        scale.run(devices=4, trials=filled + 20, filled=filled, storage="sqlite", seed=0)["rows"][
            -1
        ]
        for filled in (60, 240)
    )
    assert many["statements_a_trial"] < few["statements_a_trial"] + 1
