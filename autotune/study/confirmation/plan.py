"""What to measure next after a search: a pure function of the trials and what was measured since.

A racing rule in the manner of Kim and Nelson (2006) and of optimal computing budget allocation
(Chen and Lee, 2010): measurements go to the leader and to those that may still be faster, and end
where the difference is certain or too small to matter. In this order:

0. more seeds, as in step 3, while a trial that is much faster than the pick is kept from it by a
   perplexity of one seed: the speed of the wrong pick need not be known;
1. every member of the front once, and with each run of them the pick, until it has
   PICK_CONFIRMATIONS: the time may end before step 2. With the first run also a baseline over the
   cap, which is no partner: a confirmed pick is compared with a confirmed baseline only;
2. the pick, until it has PICK_CONFIRMATIONS, and likewise the trial that is announced, which is
   another one while a smaller trial is as fast within the noise;
3. more seeds for classes in 16 bit with a trial that, within the noise, only its perplexity may
   keep from being the pick;
4. whoever may still be the pick, together with it;
5. trials whose one measurement may have kept them off the front by bad luck;
6. the pick, until its error is below half the tolerance;
7. a pick that no other trial can be compared with, alone.

After each measurement all is decided anew: a trial that was lucky leaves the front, and the one
that takes its place is measured.
"""

import math
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from autotune.analysis.confirmed_perplexity import classes_to_repeat, with_seed_perplexities
from autotune.analysis.confirmed_speed import (
    on_one_scale,
    speed_noise,
    with_confirmed_speeds,
)
from autotune.analysis.counting_perplexity import best_perplexity, has_good_perplexity
from autotune.analysis.front import pareto_front
from autotune.analysis.pick import (
    Preferences,
    allowed_perplexity_increase,
    choose,
    contenders,
)
from autotune.spec.config import TrainingConfig
from autotune.spec.confirmation import (
    Confirmation,
    PairedSpeed,
    RepeatedSpeed,
    SeedPerplexity,
)
from autotune.spec.result import TrialRecord

PICK_CONFIRMATIONS = 3
"""A pick is confirmed by at least so many measurements in turn, time permitting."""
SUBJECTS_AT_ONCE = 3
"""How many configurations share one run with the partner: its start costs as much as theirs."""
MOST_FAILURES = 2
"""A configuration that failed so often in turn is not tried again."""
MOST_CONFIRMATIONS = 12
"""More measurements of one configuration than this gain less than they cost."""
_FAR_LONGER = 2.0
"""Times as long as the others a reference may take, and still be trained with each seed first."""
_MUCH_FASTER = 1.2
_FAR_SLOWER = 5.0
"""Times as long as the fastest a partner may take, where another trial can be it."""
CERTAIN_DEVIATIONS = 2.0
"""A difference of so many standard deviations is certain."""


@dataclass(frozen=True, kw_only=True)
class TimeInTurn:
    """Measure the speeds of `subjects` relative to the partner, in one run."""

    partner: TrialRecord
    subjects: tuple[TrialRecord, ...]
    reason: str


@dataclass(frozen=True, kw_only=True)
class TrainSeed:
    """Train a representative of a numerics class to the end with another seed."""

    record: TrialRecord
    seed: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class RepeatAlone:
    """Measure the speed of the only feasible trial again, alone as in a trial."""

    record: TrialRecord
    reason: str


Step: TypeAlias = TimeInTurn | TrainSeed | RepeatAlone


def next_step(
    records: Sequence[TrialRecord],
    confirmations: Sequence[Confirmation],
    *,
    baseline: TrainingConfig,
    preferences: Preferences,
    seeds: Sequence[int] = (),
) -> Step | None:
    """Returns what to measure next; None where nothing is uncertain, or nothing can be measured.

    `records` are as the trials measured them. `seeds` are the further seeds with which a class in
    16 bit is trained where it competes for the pick.
    """
    state = _State(records, confirmations, baseline=baseline, preferences=preferences)
    if state.partner is None or state.pick is None:
        return None
    seed = _next_seed(state, confirmations, seeds)
    if seed is not None and _is_much_faster_kept_back(state):
        return seed
    members = [state.pick, *state.front]
    unconfirmed = [record for record in members if record.confirmations == 0]
    if unconfirmed and state.pick.confirmations < PICK_CONFIRMATIONS:
        unconfirmed.insert(0, state.pick)
    unconfirmed[1:1] = state.baseline_over_cap()
    if step := state.in_turn(unconfirmed, "measured once so far"):
        return step
    for picked in (state.pick, state.announced):
        if picked is None or not state.can_be_measured(picked):
            continue
        if picked.confirmations < PICK_CONFIRMATIONS:
            others = [*state.challengers(), *state.company_of(picked)]
            if step := state.in_turn([picked, *others], "the pick"):
                return step
    if seed is not None:
        return seed
    challengers = state.challengers()
    if challengers and (
        step := state.in_turn([state.pick, *challengers], "may be as fast as the pick")
    ):
        return step
    if step := state.in_turn(state.hopeful(), "may belong to the front"):
        return step
    if not state.is_precise(state.pick) and (step := state.in_turn([state.pick], "the pick")):
        return step
    if state.pick.confirmations == 0:
        return _repeat_alone(state.pick, confirmations)
    return None


def next_step_of(
    number: int,
    records: Sequence[TrialRecord],
    confirmations: Sequence[Confirmation],
    *,
    baseline: TrainingConfig,
    preferences: Preferences,
    until: int = PICK_CONFIRMATIONS,
) -> TimeInTurn | None:
    """Returns the next measurement of one trial; None once it has `until` confirmations.

    Also None for a trial that fails in turn, and for the only feasible trial.
    """
    state = _State(records, confirmations, baseline=baseline, preferences=preferences)
    record = next(record for record in state.records if record.number == number)
    if record.confirmations >= until or not state.can_be_measured(record):
        return None
    return state.in_turn([record, *state.company_of(record)], "asked for")


def next_variants(
    records: Sequence[TrialRecord],
    confirmations: Sequence[Confirmation],
    *,
    variants: Collection[TrainingConfig],
    baseline: TrainingConfig,
    preferences: Preferences,
) -> TimeInTurn | None:
    """Returns a run of the variants that trained within the cap and were not measured in turn."""
    state = _State(records, confirmations, baseline=baseline, preferences=preferences)
    if state.partner is None:
        return None
    wanted = [
        record
        for record in state.records
        if record.config in variants
        and record.outcome == "ok"
        and record.confirmations == 0
        and state.can_be_measured(record)
    ]
    return state.in_turn(wanted, "for the ablation")


def pick_of(
    records: Sequence[TrialRecord],
    confirmations: Sequence[Confirmation],
    *,
    baseline: TrainingConfig,
    preferences: Preferences,
) -> TrialRecord | None:
    """Returns the trial that is announced as the pick, by all that was measured so far."""
    state = _State(records, confirmations, baseline=baseline, preferences=preferences)
    return state.announced


def _repeat_alone(record: TrialRecord, confirmations: Sequence[Confirmation]) -> RepeatAlone | None:
    """Returns a repetition of a trial without another to compare it with."""
    done = [
        one
        for one in confirmations
        if isinstance(one, RepeatedSpeed) and one.config == record.config
    ]
    if len(done) >= PICK_CONFIRMATIONS:
        return None
    return RepeatAlone(record=record, reason="the only feasible trial")


def _next_seed(
    state: "_State", confirmations: Sequence[Confirmation], seeds: Sequence[int]
) -> TrainSeed | None:
    if state.pick is None or state.preferences.prefer == "smallest":
        return None
    wanted = classes_to_repeat(
        state.records,
        contenders=contenders(state.pick, state.front, preferences=state.preferences),
    )
    done = {(one.config, one.seed) for one in confirmations if isinstance(one, SeedPerplexity)}
    for record, seed in _in_order(wanted, seeds):
        if (record.config, seed) not in done:
            return TrainSeed(
                record=record,
                seed=seed,
                reason=record.terms.worded("rounding may decide its perplexity"),
            )
    return None


def _is_much_faster_kept_back(state: "_State") -> bool:
    """Returns whether only its perplexity keeps a much faster trial from being the pick."""
    assert state.pick is not None
    numbers = contenders(state.pick, state.front, preferences=state.preferences)
    fastest = max(
        (one.tokens_per_second or 0.0 for one in state.front if one.number in numbers), default=0.0
    )
    return fastest > _MUCH_FASTER * (state.pick.tokens_per_second or 0.0)


def _in_order(
    wanted: Sequence[TrialRecord], seeds: Sequence[int]
) -> Iterator[tuple[TrialRecord, int]]:
    """Yield which training with which seed: each seed with all classes, the reference first.

    A reference that takes far longer, as fp32 does on a GPU, comes after all others: their own
    spread says something, too.
    """
    if not wanted:
        return
    reference, *others = wanted
    is_slow = all(
        _training_seconds(reference) > _FAR_LONGER * _training_seconds(other) for other in others
    )
    for group in (others, [reference]) if is_slow else (wanted,):
        for seed in seeds:
            for record in group:
                yield record, seed


def _training_seconds(record: TrialRecord) -> float:
    return (record.seconds or 0.0) - (record.compile_seconds or 0.0)


class _State:
    """The trials with all that is known of them, the front, the pick and the partner."""

    def __init__(
        self,
        records: Sequence[TrialRecord],
        confirmations: Sequence[Confirmation],
        *,
        baseline: TrainingConfig,
        preferences: Preferences,
    ) -> None:
        self.preferences = preferences
        self._baseline = baseline
        self.noise = speed_noise(records, confirmations)
        self.records = with_seed_perplexities(
            with_confirmed_speeds(records, confirmations), confirmations
        )
        self._failures: Counter[TrainingConfig] = Counter(
            one.config for one in confirmations if isinstance(one, PairedSpeed) and one.failure
        )
        self._failures_with: Counter[TrainingConfig] = Counter(
            one.partner for one in confirmations if isinstance(one, PairedSpeed) and one.failure
        )
        exact = [_exact(record) for record in self.records]
        self._whole_front = self._front_of(exact)
        self.partner = self._choose_partner(confirmations, baseline=baseline)
        self.front = [record for record in self._whole_front if self.can_be_measured(record)]
        self.pick = self._choose(self.front)
        self.announced = self._choose(self._front_of(self.records))

    def _front_of(self, records: Sequence[TrialRecord]) -> list[TrialRecord]:
        """Returns the records on the front of `records`; without speed errors, noise hides none."""
        by_number = {record.number: record for record in self.records}
        numbers = pareto_front(records, tolerance=self.preferences.tolerance)
        return [by_number[number] for number in numbers]

    def _choose(self, front: Sequence[TrialRecord]) -> TrialRecord | None:
        picked = choose(
            self.records,
            [record.number for record in front],
            baseline=None,
            preferences=self.preferences,
        )
        if picked is None:
            return None
        return next(record for record in front if record.number == picked.number)

    def _choose_partner(
        self, confirmations: Sequence[Confirmation], *, baseline: TrainingConfig
    ) -> TrialRecord | None:
        """Returns the baseline where it is feasible, otherwise the smallest trial of the front.

        One that is far slower than the fastest comes last: each round takes a step of the partner,
        too, and on a GPU one in fp32 would take most of the time.

        A partner that was used before is kept, so that all ratios are to one speed. One with which
        every measurement failed is not used again.
        """
        used = Counter(
            one.partner for one in confirmations if isinstance(one, PairedSpeed) and not one.failure
        )
        for config, _ in used.most_common():
            for record in self.records:
                if record.config == config and record.feasible:
                    return record
        baselines = [record for record in self.records if record.config == baseline]
        fastest = max((one.tokens_per_second or 0.0 for one in self._whole_front), default=0.0)

        def is_far_slower(record: TrialRecord) -> bool:
            return _FAR_SLOWER * (record.tokens_per_second or 0.0) < fastest

        for record in sorted([*baselines, *self._whole_front], key=is_far_slower):
            if record.feasible and self._failures_with[record.config] < MOST_FAILURES:
                return record
        return None

    def baseline_over_cap(self) -> list[TrialRecord]:
        """Returns the baseline where it trained over the cap and was not measured in turn yet."""
        return [
            record
            for record in self.records
            if record.config == self._baseline
            and not record.feasible
            and record.tokens_per_second is not None
            and record.confirmations == 0
            and self.can_be_measured(record)
        ]

    def can_be_measured(self, record: TrialRecord) -> bool:
        return self._failures[record.config] < MOST_FAILURES

    def in_turn(self, wanted: Sequence[TrialRecord], reason: str) -> TimeInTurn | None:
        """Returns a run of the first of `wanted`, without the partner and without repetitions.

        None where nothing is left of them.
        """
        if self.partner is None:
            return None
        subjects: list[TrialRecord] = []
        for record in wanted:
            is_other = record.config != self.partner.config and record not in subjects
            if is_other and self.can_be_measured(record):
                subjects.append(record)
        if not subjects:
            return None
        return TimeInTurn(
            partner=self.partner, subjects=tuple(subjects[:SUBJECTS_AT_ONCE]), reason=reason
        )

    def company_of(self, record: TrialRecord) -> list[TrialRecord]:
        """Returns with whom to measure the partner itself, one trial; none for another record.

        It is a trial of the front where there is one, otherwise the fastest that is feasible.
        """
        if self.partner is None or record.config != self.partner.config:
            return []
        feasible = [other for other in self.records if other.feasible]
        candidates = [*self.front, *sorted(feasible, key=lambda other: -_speed(other))]
        for other in candidates:
            if other.config != record.config and self.can_be_measured(other):
                return [other]
        return []

    def challengers(self) -> list[TrialRecord]:
        """Returns whoever may still be picked instead of the pick, the most likely first.

        Their perplexity is good, and within CERTAIN_DEVIATIONS they may be better than the pick by
        more than the tolerance.
        """
        assert self.pick is not None
        if self.preferences.prefer == "smallest":
            return []
        best = best_perplexity(self.front)
        allowed = allowed_perplexity_increase(self.records, self.preferences)
        found = []
        for record in self.front:
            is_other = record.number != self.pick.number
            if not is_other or record.confirmations >= MOST_CONFIRMATIONS:
                continue
            if not has_good_perplexity(record, best=best, allowed=allowed):
                continue
            pick, other = on_one_scale(self.pick, record)
            error = math.hypot(self._error(other), self._error(pick))
            lead = self._lead(pick, other)
            may_matter = CERTAIN_DEVIATIONS * error - lead > self.preferences.tolerance.speed
            if may_matter and lead < CERTAIN_DEVIATIONS * error:
                found.append((lead / error, record))
        return [record for _, record in sorted(found, key=lambda item: item[0])]

    def _lead(self, pick: TrialRecord, other: TrialRecord) -> float:
        """Returns the difference in log speed, or in log balance, by which the pick is better."""
        lead = math.log(_speed(pick) / _speed(other))
        if self.preferences.prefer == "balanced":
            lead += math.log(_memory(other) / _memory(pick))
        return lead

    def hopeful(self) -> list[TrialRecord]:
        """Returns trials measured once that would be on the front if they had bad luck.

        That is, with a speed higher by one standard deviation of a single measurement, where a
        confirmed trial had no more luck than it turned out to have.
        """
        on_front = {record.number for record in self._whole_front}
        exact_front = [_without_luck(_exact(record)) for record in self._whole_front]
        found = []
        for record in self.records:
            is_unsure = record.feasible and record.confirmations == 0
            if not is_unsure or record.number in on_front or not self.can_be_measured(record):
                continue
            luckier = replace(
                record,
                tokens_per_second=_speed(record) * math.exp(self.noise.alone),
                speed_error=None,
            )
            # Whether a trial is on the front depends on the other members only.
            front = pareto_front([*exact_front, luckier], tolerance=self.preferences.tolerance)
            if record.number in front:
                found.append(record)
        return sorted(found, key=lambda record: -_speed(record))

    def is_precise(self, record: TrialRecord) -> bool:
        """Returns whether two standard errors of the speed are within its tolerance."""
        error = CERTAIN_DEVIATIONS * self._error(record)
        return error <= self.preferences.tolerance.speed or (
            record.confirmations >= MOST_CONFIRMATIONS
        )

    def _error(self, record: TrialRecord) -> float:
        return self.noise.alone if record.speed_error is None else record.speed_error


def _exact(record: TrialRecord) -> TrialRecord:
    """Returns the record without errors of its speeds."""
    alone = None if record.alone is None else replace(record.alone, error=0.0)
    return replace(record, speed_error=None, alone=alone)


def _without_luck(record: TrialRecord) -> TrialRecord:
    """Returns the record of a confirmed trial that was no faster alone than it is in turn."""
    if record.alone is None:
        return record
    speed = min(record.alone.tokens_per_second, _speed(record))
    return replace(record, alone=replace(record.alone, tokens_per_second=speed))


def _speed(record: TrialRecord) -> float:
    assert record.tokens_per_second is not None
    return record.tokens_per_second


def _memory(record: TrialRecord) -> int:
    assert record.peak_memory_bytes is not None
    return record.peak_memory_bytes
