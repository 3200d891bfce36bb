"""A search space: which values each technique may take, and under which conditions; what of it is legal where.

`space_file.py` reads one from a TOML file. What is illegal anywhere (`autotune/spec/config.py`)
need not be said in it.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

from autotune.errors import InvalidInput, InvalidSpace
from autotune.spec.config import (
    FIELD_ORDER,
    RULES,
    Circumstances,
    Rule,
    TrainingConfig,
    broken_rules,
)
from autotune.spec.published_table import Reference
from autotune.spec.workload_settings import overridden

DIVISORS = "divisors"


@dataclass(frozen=True, kw_only=True)
class Condition:
    """Where every field of `when` has one of its values, every field of `then` must have one of its own."""

    when: Mapping[str, tuple[Any, ...]]
    then: Mapping[str, tuple[Any, ...]]

    def allows(self, chosen: Mapping[str, Any]) -> bool:
        """False when `chosen`, which may be incomplete, already breaks the condition."""
        if any(
            field not in chosen or chosen[field] not in values
            for field, values in self.when.items()
        ):
            return True
        return all(
            field not in chosen or chosen[field] in values for field, values in self.then.items()
        )


@dataclass(frozen=True, kw_only=True)
class SearchSpace:
    """A search-space file, read and checked; not yet bound to a workload or a device.

    Two are equal where they make the same trials, whatever else they say.
    """

    name: str
    description: str = dataclasses.field(default="", compare=False)
    techniques: Mapping[str, tuple[Any, ...] | str]
    """Field to values; `micro_batch_size` may be the word `divisors`."""
    conditions: tuple[Condition, ...] = ()
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    configurations: tuple[Mapping[str, Any], ...] = ()
    """Named configurations: `name` and fields."""
    workload: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    scales: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    """Name to the workload settings that make the same study smaller or larger."""
    scale: str | None = None
    """The scale whose settings `workload` has taken in; None: none was asked for."""
    reference: Reference | None = dataclasses.field(default=None, compare=False)
    """What others published for the named configurations."""

    def at_scale(self, scale: str | None) -> "SearchSpace":
        """This space with the workload of one of its scales; None leaves it as it is.

        Raises InvalidInput.
        """
        if scale is None:
            return self
        if scale not in self.scales:
            known = (
                f"its scales are {', '.join(self.scales)}"
                if self.scales
                else "it has none: leave --scale out"
            )
            raise InvalidInput(f"search space {self.name!r} has no scale {scale!r}", hint=known)
        return dataclasses.replace(
            self, workload=overridden(self.workload, self.scales[scale]), scale=scale
        )

    def is_a_scale_of(self, other: "SearchSpace") -> bool:
        """Whether this is `other` at the scale it has, be it none."""
        return self.scale in (None, *other.scales) and other.at_scale(self.scale) == self

    def choices(self) -> dict[str, list[Any]]:
        """Every value of each technique that some configuration of the space may have."""
        found: dict[str, list[Any]] = {}
        for field in FIELD_ORDER:
            listed = self.techniques.get(field, ())
            values = list(listed) if listed != DIVISORS else []
            values += [
                chosen[field] for chosen in (self.defaults, *self.configurations) if field in chosen
            ]
            if field != "micro_batch_size":
                values.append(_default(field, 1))
            found[field] = list(dict.fromkeys(values))
        return found

    def to_dict(self) -> dict[str, Any]:
        """Without what younger files alone can hold and this one does not: studies keep their names."""
        younger: dict[str, Any] = {"scales": {}, "scale": None, "reference": None}
        return {
            k: v for k, v in dataclasses.asdict(self).items() if k not in younger or v != younger[k]
        }

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> "SearchSpace":
        """The inverse of `to_dict`, also after a trip through JSON."""
        return cls(
            name=stored["name"],
            description=stored["description"],
            techniques={field: _frozen(values) for field, values in stored["techniques"].items()},
            conditions=tuple(
                Condition(
                    when={field: tuple(values) for field, values in condition["when"].items()},
                    then={field: tuple(values) for field, values in condition["then"].items()},
                )
                for condition in stored["conditions"]
            ),
            defaults=dict(stored["defaults"]),
            configurations=tuple(dict(configuration) for configuration in stored["configurations"]),
            workload=dict(stored["workload"]),
            scales={name: dict(settings) for name, settings in stored.get("scales", {}).items()},
            scale=stored.get("scale"),
            reference=Reference.from_dict(stored["reference"]) if stored.get("reference") else None,
        )


@dataclass(frozen=True, kw_only=True)
class LegalSpace:
    """A search space bound to a workload and to what its device can do: only legal configurations are left.

    A configuration is decided field by field in `FIELD_ORDER`; `legal_values` never leads into a
    dead end.
    """

    values: Mapping[str, tuple[Any, ...]]
    conditions: tuple[Condition, ...]
    at: Circumstances
    named: Mapping[str, TrainingConfig]
    """The file's named configurations that work here, in its order."""
    excluded: tuple[str, ...]
    """One line for everything of the file that cannot be used, and why."""

    def legal_values(self, field: str, chosen: Mapping[str, Any]) -> tuple[Any, ...]:
        """Values of `field` with which the fields in `chosen`, all before it, can still be completed."""
        begun = tuple(chosen.values())
        return tuple(
            value for value in self.values[field] if self._can_be_completed((*begun, value))
        )

    def configurations(self) -> Iterator[TrainingConfig]:
        """Every legal configuration, in a fixed order; nothing for a space that only names configurations."""
        if self.values:
            for chosen in self._completions({}):
                yield TrainingConfig(**chosen)

    def count(self) -> int:
        """How many `configurations` there are."""
        return sum(1 for _ in self._completions({})) if self.values else 0

    def __contains__(self, config: TrainingConfig) -> bool:
        chosen = config.to_dict()
        return (
            bool(self.values)
            and all(chosen[f] in self.values[f] for f in FIELD_ORDER)
            and self._allows(chosen)
        )

    def _allows(self, chosen: Mapping[str, Any]) -> bool:
        return not broken_rules(chosen, self.at) and all(
            condition.allows(chosen) for condition in self.conditions
        )

    @cached_property
    def _can_be_completed(self) -> Callable[[tuple[Any, ...]], bool]:
        """Of the values of the first fields.

        Remembered: most configurations begin as many others do.
        """

        @lru_cache(maxsize=_BEGINNINGS_REMEMBERED)
        def can_be_completed(begun: tuple[Any, ...]) -> bool:
            chosen = dict(zip(FIELD_ORDER, begun, strict=False))
            return next(self._completions(chosen), None) is not None

        return can_be_completed

    def _completions(self, chosen: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        if self._allows(chosen):
            yield from self._completions_of_legal(chosen)

    def _completions_of_legal(self, chosen: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Of a beginning that breaks nothing, so that only what its next field decides has to be looked at."""
        if len(chosen) == len(FIELD_ORDER):
            yield dict(chosen)
            return
        field = FIELD_ORDER[len(chosen)]
        rules, conditions = self._decided_with[field]
        for value in self.values[field]:
            longer = {**chosen, field: value}
            if not any(rule.broken(longer, self.at) for rule in rules) and all(
                condition.allows(longer) for condition in conditions
            ):
                yield from self._completions_of_legal(longer)

    @cached_property
    def _decided_with(self) -> dict[str, tuple[list[Rule], list[Condition]]]:
        """For each field what is decided by its value and those before it, and not without it."""
        return {
            field: (
                [rule for rule in RULES if max(rule.fields, key=FIELD_ORDER.index) == field],
                [
                    condition
                    for condition in self.conditions
                    if field in (*condition.when, *condition.then)
                ],
            )
            for field in FIELD_ORDER
        }


_BEGINNINGS_REMEMBERED = 50_000


def _frozen(values: Any) -> tuple[Any, ...] | str:
    return values if isinstance(values, str) else tuple(values)


# -- binding to a workload and a device ------------------------------------------------------------


def bind_space(
    space: SearchSpace, at: Circumstances, *, unavailable: Mapping[str, Mapping[str, str]]
) -> LegalSpace:
    """What of `space` can be trained in these circumstances on a device where `unavailable` does not work.

    Raises InvalidSpace when nothing is left.
    """
    excluded: list[str] = []
    values = _values_that_work(space, at.global_batch, unavailable=unavailable, excluded=excluded)
    named = _named_that_work(space, at, unavailable=unavailable, excluded=excluded)
    legal = LegalSpace(
        values=values, conditions=space.conditions, at=at, named=named, excluded=tuple(excluded)
    )
    if not named and next(legal.configurations(), None) is None:
        raise InvalidSpace(
            f"no configuration of search space {space.name!r} is legal here: "
            + ("; ".join(excluded) or "its conditions contradict each other"),
            hint="widen the space, or relax its conditions",
        )
    return legal


def _values_that_work(
    space: SearchSpace,
    global_batch: int,
    *,
    unavailable: Mapping[str, Mapping[str, str]],
    excluded: list[str],
) -> dict[str, tuple[Any, ...]]:
    if not space.techniques:
        return {}
    values: dict[str, tuple[Any, ...]] = {}
    for field in FIELD_ORDER:
        listed = space.techniques.get(
            field, (space.defaults.get(field, _default(field, global_batch)),)
        )
        if listed == DIVISORS:
            listed = tuple(size for size in range(global_batch, 0, -1) if global_batch % size == 0)
        works = []
        for value in listed:
            reason = unavailable.get(field, {}).get(str(value))
            if reason is None and field == "micro_batch_size" and global_batch % int(value):
                reason = f"it does not divide the global batch of {global_batch}"
            if reason is None:
                works.append(value)
            else:
                excluded.append(f"{field} {value}: {reason}")
        values[field] = tuple(works)
    return values


def _named_that_work(
    space: SearchSpace,
    at: Circumstances,
    *,
    unavailable: Mapping[str, Mapping[str, str]],
    excluded: list[str],
) -> dict[str, TrainingConfig]:
    named = {}
    plain = {field: _default(field, at.global_batch) for field in FIELD_ORDER}
    for given in space.configurations:
        chosen = plain | dict(space.defaults) | dict(given)
        name = chosen.pop("name")
        reasons = [
            f"{field} {value}: {unavailable[field][str(value)]}"
            for field, value in chosen.items()
            if str(value) in unavailable.get(field, {})
        ] or broken_rules(chosen, at)
        if reasons:
            excluded.append(f"configuration {name!r}: {reasons[0]}")
        else:
            named[name] = TrainingConfig(**chosen)
    return named


def _default(field: str, global_batch: int) -> Any:
    return global_batch if field == "micro_batch_size" else getattr(TrainingConfig(), field)
