"""A search space lists the values of each technique, and the conditions on their combinations.

`space_file.py` reads a SearchSpace from a TOML file. `bind_space` restricts it to what is legal for
a workload and a device, a LegalSpace. Combinations that are illegal everywhere
(`autotune/spec/config.py`) need no condition.
"""

import dataclasses
import itertools
import math
import random
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from autotune.errors import InvalidInput, InvalidSpace, suggestion
from autotune.spec.config import (
    AS_IS,
    CHOICES,
    DEPENDENT_FIELDS,
    FIELD_ORDER,
    RULES,
    LegalityContext,
    TrainingConfig,
    baseline_of,
    check_value,
    rule_violations,
)
from autotune.spec.optimizers import OPTIMIZERS
from autotune.spec.published_table import Reference
from autotune.spec.schema import Schema
from autotune.spec.workload import overridden

DIVISORS = "divisors"

MOST_LISTED = 50_000
"""A space of more legal configurations is not listed: some are drawn from it."""


@dataclass(frozen=True, kw_only=True)
class Condition(Schema):
    """If every field of `when` has one of its values there, so must every field of `then`."""

    when: Mapping[str, tuple[Any, ...]]
    then: Mapping[str, tuple[Any, ...]]

    def allows(self, chosen: Mapping[str, Any]) -> bool:
        """Returns False if `chosen`, which may be incomplete, already violates the condition."""
        for field, values in self.when.items():
            if field not in chosen or chosen[field] not in values:
                return True
        for field, values in self.then.items():
            if field in chosen and chosen[field] not in values:
                return False
        return True


@dataclass(frozen=True, kw_only=True)
class SearchSpace(Schema):
    """The checked content of a search-space file, not yet bound to a workload or a device.

    Two spaces are equal if they lead to the same trials; description and reference do not count.
    """

    name: str
    description: str = dataclasses.field(default="", compare=False)
    techniques: Mapping[str, tuple[Any, ...] | str]
    """Values by field; for `micro_batch_size` also the string `divisors`."""
    conditions: tuple[Condition, ...] = ()
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    configurations: tuple[Mapping[str, Any], ...] = ()
    """Named configurations, each with `name` and its fields."""
    workload: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    scales: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    """Workload settings by name, which make the same study smaller or larger."""
    scale: str | None = None
    """The scale whose settings are part of `workload`; None: no scale was requested."""
    reference: Reference | None = dataclasses.field(default=None, compare=False)
    """Published results for the named configurations."""

    def at_scale(self, scale: str | None) -> "SearchSpace":
        """Returns this space with the workload of one of its scales; the space itself for None.

        Raises InvalidInput for a scale that the space does not have.
        """
        if scale is None:
            return self
        if scale not in self.scales:
            if self.scales:
                hint = suggestion(
                    scale, self.scales, otherwise=f"use one of {', '.join(self.scales)}"
                )
            else:
                hint = "it has none: leave --scale out"
            raise InvalidInput(f"search space {self.name!r} has no scale {scale!r}", hint=hint)
        workload = overridden(self.workload, self.scales[scale])
        return dataclasses.replace(self, workload=workload, scale=scale)

    def is_a_scale_of(self, other: "SearchSpace") -> bool:
        """Whether this space is `other` at one of its scales, or `other` itself."""
        return self.scale in (None, *other.scales) and other.at_scale(self.scale) == self

    def choices(self) -> dict[str, list[Any]]:
        """Return, by technique, every value that a configuration of the space can have."""
        choices: dict[str, list[Any]] = {}
        for field in FIELD_ORDER:
            listed = self.techniques.get(field, ())
            values = [] if listed == DIVISORS else list(listed)
            for chosen in (self.defaults, *self.configurations):
                if field in chosen:
                    values.append(chosen[field])
            if field != "micro_batch_size":
                values.append(getattr(TrainingConfig(), field))
            choices[field] = list(dict.fromkeys(values))
        return choices

    def smaller_micro_batches(self, global_batch: int) -> list[int]:
        """Returns the micro batches of the space that divide a global batch, the smallest first."""
        listed = self.techniques.get("micro_batch_size", ())
        sizes = _divisors(global_batch) if listed == DIVISORS else listed
        others = self.choices()["micro_batch_size"]
        smaller = {int(size) for size in (*sizes, *others) if int(size) < global_batch}
        return sorted(size for size in smaller if global_batch % size == 0)

    def baseline_config(self, at: LegalityContext) -> TrainingConfig:
        """Returns what savings are relative to, with the first optimizer of the space."""
        default = self.defaults.get("optimizer", CHOICES["optimizer"][0])
        optimizers = self.techniques.get("optimizer", (default,))
        return baseline_of(optimizer=optimizers[0], at=at)  # type: ignore[arg-type]

    def to_dict(self) -> dict[str, Any]:
        """Returns a dictionary ready for JSON, without later fields that are at their defaults.

        The identities of studies from before these fields stay valid.
        """
        defaults_added_later: dict[str, Any] = {"scales": {}, "scale": None, "reference": None}
        values = dataclasses.asdict(self)
        for name, default in defaults_added_later.items():
            if values[name] == default:
                del values[name]
        return values


class _Beginning(NamedTuple):
    """What is still to be known of the values of the first fields of a configuration.

    Beginnings that all later rules and conditions treat alike are equal, so that there are few of
    them, however many configurations a space has.
    """

    fields: int
    """Number of fields that have a value."""
    kinds: tuple[Any, ...]
    """The kinds of those values that a later rule or condition reads."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Next:
    """A value of the next field."""

    beginning: _Beginning
    """That which the value leads to."""
    completions: int
    """The number of legal configurations with that beginning."""


_Broken = tuple[tuple[str, ...], Collection[tuple[Any, ...]]]
"""The fields of a rule, and all values of them that break it."""


@dataclass(frozen=True, kw_only=True)
class LegalSpace:
    """A search space bound to a workload and a device: only legal configurations are left.

    A configuration is built field by field in `FIELD_ORDER`. It is known of each value how many
    legal configurations it leads to, so that a space is counted, and configurations are drawn from
    it, without listing it: a diagram of decisions (Bryant, "Graph-based algorithms for Boolean
    function manipulation", 1986) whose paths are the legal configurations.
    """

    values: Mapping[str, tuple[Any, ...]]
    conditions: tuple[Condition, ...]
    at: LegalityContext
    named: Mapping[str, TrainingConfig]
    """The named configurations of the file that are legal here, in the order of the file."""
    excluded: tuple[str, ...]
    """A line for every value and configuration of the file that cannot be used, with the reason."""

    def legal_values(self, field: str, chosen: Mapping[str, Any]) -> tuple[Any, ...]:
        """Returns the values of `field` with which `chosen` can be completed legally.

        `chosen` holds every field before `field`, in `FIELD_ORDER`.
        """
        beginning = self._beginning_of(chosen)
        return () if beginning is None else tuple(self._next(beginning))

    def configurations(self) -> Iterator[TrainingConfig]:
        """Yield every legal configuration in a fixed order; none if the space only names some."""
        return map(self.configuration, range(self.count()))

    def shuffled(self, seed: int) -> Iterator[TrainingConfig]:
        """Yield every legal configuration in random order, of which each is as likely."""
        rng = random.Random(seed)
        drawn: set[int] = set()
        while len(drawn) < self.count():
            number = rng.randrange(self.count())
            if number not in drawn:
                drawn.add(number)
                yield self.configuration(number)

    @property
    def is_listed(self) -> bool:
        """Whether there are few enough configurations for a list of all of them."""
        return self.count() <= MOST_LISTED

    def sample(self, seed: int = 0) -> list[TrainingConfig]:
        """Returns every legal configuration in order, or `MOST_LISTED` of them drawn evenly."""
        if self.is_listed:
            return list(self.configurations())
        return list(itertools.islice(self.shuffled(seed), MOST_LISTED))

    def listed(self) -> list[TrainingConfig]:
        """Returns every legal configuration; raises InvalidSpace if there are too many to list."""
        if not self.is_listed:
            longest = max(FIELD_ORDER, key=lambda field: len(self.values[field]))
            raise InvalidSpace(
                f"the search space has {self.count():,} legal configurations, and at most "
                f"{MOST_LISTED:,} are predicted one by one",
                hint=f"name some as [[configurations]] and leave --all out, or shorten techniques: "
                f"{longest} has {len(self.values[longest])} values",
            )
        return list(self.configurations())

    @property
    def named_outside(self) -> dict[str, TrainingConfig]:
        """Returns the named configurations that its values do not combine to, by fingerprint."""
        return {one.fingerprint: one for one in self.named.values() if one not in self}

    def count(self) -> int:
        """Returns the number of `configurations`, without making them."""
        return self._completions(_NO_FIELDS) if self.values else 0

    def configuration(self, number: int) -> TrainingConfig:
        """Returns the configuration of a number from 0, in the order of `configurations`."""
        chosen: dict[str, Any] = {}
        beginning = _NO_FIELDS
        for field in FIELD_ORDER:
            for value, following in self._next(beginning).items():
                if number < following.completions:
                    chosen[field] = value
                    beginning = following.beginning
                    break
                number -= following.completions
        return TrainingConfig(**chosen)

    def __contains__(self, config: TrainingConfig) -> bool:
        chosen = config.to_dict()
        in_order = {field: chosen[field] for field in FIELD_ORDER}
        return bool(self.values) and self._beginning_of(in_order) is not None

    def _beginning_of(self, chosen: Mapping[str, Any]) -> _Beginning | None:
        """Returns what the values of the first fields lead to; None if to nothing legal."""
        beginning = _NO_FIELDS
        for value in chosen.values():
            following = self._next(beginning).get(value)
            if following is None:
                return None
            beginning = following.beginning
        return beginning

    def _completions(self, beginning: _Beginning) -> int:
        if beginning.fields == len(FIELD_ORDER):
            return 1
        return sum(following.completions for following in self._next(beginning).values())

    def _next(self, beginning: _Beginning) -> Mapping[Any, _Next]:
        """Returns the values of the next field that have a legal completion, in their order."""
        if beginning not in self._known:
            number = beginning.fields
            field = FIELD_ORDER[number]
            chosen = dict(zip(self._kinds_after[number], beginning.kinds, strict=True))
            kinds_after = self._kinds_after[number + 1]
            found = {}
            for value in self.values[field]:
                chosen[field] = value
                if self._constraints[field].allow(chosen):
                    kinds = tuple(kinds[chosen[name]] for name, kinds in kinds_after.items())
                    following = _Beginning(number + 1, kinds)
                    if completions := self._completions(following):
                        found[value] = _Next(beginning=following, completions=completions)
            self._known[beginning] = found
        return self._known[beginning]

    @cached_property
    def _known(self) -> dict[_Beginning, Mapping[Any, _Next]]:
        return {}

    @cached_property
    def _kinds_after(self) -> Sequence[Mapping[str, Mapping[Any, Any]]]:
        """After each number of fields, the kinds of values of those that are read later.

        The kind of a value is the first value that no later rule and no later condition tells
        apart from it.
        """
        effects = {
            field: {value: self._effects(field, value) for value in self.values[field]}
            for field in FIELD_ORDER
        }
        kinds_after: list[dict[str, dict[Any, Any]]] = []
        for number in range(len(FIELD_ORDER) + 1):
            kinds: dict[str, dict[Any, Any]] = {}
            for field in FIELD_ORDER[:number]:
                first: dict[tuple[Any, ...], Any] = {}
                for value, by_last in effects[field].items():
                    later = tuple(read for last, read in by_last if last >= number)
                    if later:
                        kinds.setdefault(field, {})[value] = first.setdefault(later, value)
            kinds_after.append(kinds)
        return kinds_after

    def _effects(self, field: str, value: Any) -> list[tuple[int, Any]]:
        """Returns all that rules and conditions read in a value, each with its last field."""
        effects: list[tuple[int, Any]] = []
        for fields, broken in self._broken:
            if field in fields:
                at = fields.index(field)
                with_it = (values for values in broken if values[at] == value)
                others = frozenset((*values[:at], *values[at + 1 :]) for values in with_it)
                effects.append((max(map(FIELD_ORDER.index, fields)), others))
        for condition in self.conditions:
            last = max(map(FIELD_ORDER.index, (*condition.when, *condition.then)))
            for part in (condition.when, condition.then):
                if field in part:
                    effects.append((last, value in part[field]))
        return effects

    @cached_property
    def _broken(self) -> Sequence[_Broken]:
        """The fields of each rule that some of their values break, and which values do."""
        found = []
        for rule in RULES:
            together = itertools.product(*(self.values[name] for name in rule.fields))
            broken = {
                values
                for values in together
                if rule.broken(dict(zip(rule.fields, values, strict=True)), self.at)
            }
            if broken:
                found.append((rule.fields, broken))
        return found

    @cached_property
    def _constraints(self) -> "dict[str, _Constraints]":
        """For each field, what to check when its value has been chosen.

        A rule is checked at the last of its fields, a condition at each of them.
        """
        constraints = {field: _Constraints() for field in FIELD_ORDER}
        for fields, broken in self._broken:
            constraints[max(fields, key=FIELD_ORDER.index)].rules.append((fields, broken))
        for condition in self.conditions:
            for field in {*condition.when, *condition.then}:
                constraints[field].conditions.append(condition)
        return constraints


_NO_FIELDS = _Beginning(0, ())


@dataclass(frozen=True, kw_only=True)
class _Constraints:
    """The rules and conditions that the value of one field decides."""

    rules: list[_Broken] = dataclasses.field(default_factory=list)
    conditions: list[Condition] = dataclasses.field(default_factory=list)

    def allow(self, chosen: Mapping[str, Any]) -> bool:
        for fields, broken in self.rules:
            if tuple([chosen[name] for name in fields]) in broken:
                return False
        return all(condition.allows(chosen) for condition in self.conditions)


def check_space(space: SearchSpace) -> None:
    """Raise InvalidInput unless all values of a stored space are values of their techniques.

    `space_file.py` checks them, and more, in a file; a database or an export may have any.
    """
    for field, values in space.techniques.items():
        if not (values == DIVISORS and field == "micro_batch_size"):
            _check_values(field, values)
    for condition in space.conditions:
        for field, values in (*condition.when.items(), *condition.then.items()):
            _check_values(field, values)
    for field, value in space.defaults.items():
        check_value(field, value)
    for configuration in space.configurations:
        if not isinstance(configuration.get("name"), str):
            raise InvalidSpace(f"a configuration of search space {space.name!r} has no name")
        for field, value in configuration.items():
            if field != "name":
                check_value(field, value)


def _check_values(field: str, values: object) -> None:
    if not isinstance(values, tuple) or not values:
        raise InvalidSpace(f"{field} = {values!r:.60} is not a list of values")
    for value in values:
        check_value(field, value)


def _to_tuple(values: Any) -> tuple[Any, ...] | str:
    return values if isinstance(values, str) else tuple(values)


# -- binding to a workload and a device ------------------------------------------------------------


def bind_space(
    space: SearchSpace, at: LegalityContext, *, unavailable: Mapping[str, Mapping[str, str]]
) -> LegalSpace:
    """Returns the part of `space` that is legal in these circumstances on a device.

    `unavailable` says what the device cannot do: {technique: {value: reason}}. Raises InvalidSpace
    if nothing is left.
    """
    excluded: list[str] = []
    values = _available_values(space, at, unavailable=unavailable, excluded=excluded)
    named = _legal_configurations(space, at, unavailable=unavailable, excluded=excluded)
    conditions = (*space.conditions, *_let_dependent_fields_rest(values))
    legal = LegalSpace(
        values=values, conditions=conditions, at=at, named=named, excluded=tuple(excluded)
    )
    if not named and not legal.count():
        reason = "; ".join(excluded) if excluded else _why_none_is_legal(values, at)
        raise InvalidSpace(
            f"no configuration of search space {space.name!r} is legal here: {reason}",
            hint=_way_out(space, at, unavailable=unavailable),
        )
    return legal


def _way_out(
    space: SearchSpace, at: LegalityContext, *, unavailable: Mapping[str, Mapping[str, str]]
) -> str:
    """Returns what to change where nothing is legal: the space, unless no space would help.

    The baseline of another optimizer than that of the space would do, too.
    """
    plain = baseline_of(optimizer=TrainingConfig().optimizer, at=at).to_dict()
    for field, value in plain.items():
        if field != "optimizer" and str(value) in unavailable.get(field, {}):
            return f"no search space has a legal configuration here, because of {field} {value}"
    if space.conditions:
        return "widen the space, or relax its conditions"
    return "widen the space"


_LOOKED_AT = 1000
"""Number of illegal configurations that are looked at for the rule that most of them break."""


def _why_none_is_legal(values: Mapping[str, Sequence[Any]], at: LegalityContext) -> str:
    """Returns the rule that most configurations break; of the space's conditions, that they do."""
    broken: Counter[str] = Counter()
    for combination in itertools.islice(itertools.product(*values.values()), _LOOKED_AT):
        sentences = rule_violations(dict(zip(values, combination, strict=True)), at)
        if not sentences:
            return "its conditions contradict each other"
        broken.update(sentences)
    [(sentence, _)] = broken.most_common(1)
    return sentence


def _available_values(
    space: SearchSpace,
    at: LegalityContext,
    *,
    unavailable: Mapping[str, Mapping[str, str]],
    excluded: list[str],
) -> dict[str, tuple[Any, ...]]:
    """Returns the usable values by field, and append a line to `excluded` for each other one."""
    if not space.techniques:
        return {}
    values: dict[str, tuple[Any, ...]] = {}
    for field in FIELD_ORDER:
        default = space.defaults.get(field, at.default_of(field))
        listed = space.techniques.get(field, (default,))
        if listed == DIVISORS:
            listed = _divisors(at.global_batch)
        own = at.default_of(field)
        if field in AS_IS and getattr(TrainingConfig(), field) in listed and own not in listed:
            listed = (own, *listed)  # what a script brings in place of the default
        if at.own is not None and own not in listed:
            listed = (own, *listed)  # what the trainer's file has
        available = []
        for value in listed:
            reason = unavailable.get(field, {}).get(str(value))
            if reason is None and field == "micro_batch_size" and at.global_batch % int(value):
                reason = f"it does not divide the global batch of {at.global_batch}"
            if reason is None:
                available.append(value)
            else:
                excluded.append(f"{field} {value}: {reason}")
        values[field] = tuple(available)
    return values


def _let_dependent_fields_rest(values: dict[str, tuple[Any, ...]]) -> Iterator[Condition]:
    """Add the default of a field that refines a technique, for where that is `none`.

    The condition that is yielded keeps it out where the technique is used and the space does not
    list it: adapters of rank 16 or 64 do not make one of the default rank 8 a choice.
    """
    for technique, fields in DEPENDENT_FIELDS.items():
        for field in fields:
            in_use = tuple(
                value for value in values.get(technique, ()) if _is_in_use(field, with_value=value)
            )
            default = getattr(TrainingConfig(), field)
            listed = values.get(field, ())
            if len(in_use) < len(values.get(technique, ())) and default not in listed:
                values[field] = (default, *listed)
                yield Condition(when={technique: in_use}, then={field: listed})


def _is_in_use(field: str, *, with_value: str) -> bool:
    """Returns whether a dependent field means anything with a value of its technique."""
    if field == "sharding_group":
        return with_value == "hsdp"
    return with_value != "none"


def _divisors(number: int) -> tuple[int, ...]:
    """Returns the divisors of a whole number, the largest first.

    Each one up to the root has its partner above it, so that even the largest batch takes
    milliseconds.
    """
    small = [size for size in range(1, math.isqrt(number) + 1) if number % size == 0]
    return tuple(sorted({*small, *(number // size for size in small)}, reverse=True))


def _legal_configurations(
    space: SearchSpace,
    at: LegalityContext,
    *,
    unavailable: Mapping[str, Mapping[str, str]],
    excluded: list[str],
) -> dict[str, TrainingConfig]:
    """Returns the legal named configurations; each other one is a line in `excluded`."""
    named = {}
    without_file = dataclasses.replace(at, own=None)
    defaults = {
        # What the space searches is in a named configuration as its name says, whatever the file.
        field: (without_file if field in space.techniques else at).default_of(field)
        for field in FIELD_ORDER
    }
    for configuration in space.configurations:
        chosen = {**defaults, **space.defaults, **configuration}
        name = chosen.pop("name")
        if at.own is not None and not OPTIMIZERS[at.own.optimizer].has_fusion(
            chosen["optimizer_fusion"]
        ):
            chosen["optimizer_fusion"] = at.own.optimizer_fusion
        reasons = [
            f"{field} {value}: {unavailable[field][str(value)]}"
            for field, value in chosen.items()
            if str(value) in unavailable.get(field, {})
        ]
        reasons += rule_violations(chosen, at)
        if reasons:
            excluded.append(f"configuration {name!r}: {reasons[0]}")
        else:
            named[name] = TrainingConfig(**chosen)
    return named
