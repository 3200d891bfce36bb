"""A legal space as Optuna distributions, and configurations as Optuna parameters and back.

Optuna refuses choices that change within a study. So a field whose legal values depend on the
fields before it is asked under a name that carries the set: `memory_budget|1.0,0.5`. A field with
one legal value is not asked.
"""

from collections.abc import Callable
from typing import Any

from optuna.distributions import BaseDistribution, CategoricalDistribution

from autotune.spec.config import FIELD_ORDER, TrainingConfig
from autotune.spec.search_space import LegalSpace

Chooser = Callable[[str, tuple[Any, ...]], Any]
"""From a parameter's name and its choices to the choice."""


def decide(legal: LegalSpace, choose: Chooser) -> TrainingConfig:
    """Goes through the techniques in order and lets `choose` decide where there is a choice."""
    chosen: dict[str, Any] = {}
    for field in FIELD_ORDER:
        values = legal.legal_values(field, chosen)
        chosen[field] = (
            values[0] if len(values) == 1 else choose(_parameter_name(legal, field, values), values)
        )
    return TrainingConfig(**chosen)


def as_parameters(
    legal: LegalSpace, config: TrainingConfig
) -> tuple[dict[str, Any], dict[str, BaseDistribution]]:
    """The parameters and distributions Optuna would have asked to arrive at `config`, which must be in the space."""
    parameters: dict[str, Any] = {}
    distributions: dict[str, BaseDistribution] = {}
    remaining = iter(FIELD_ORDER)

    def follow(parameter: str, values: tuple[Any, ...]) -> Any:
        field = parameter.partition("|")[0]
        while next(remaining) != field:
            pass
        parameters[parameter] = getattr(config, field)
        distributions[parameter] = CategoricalDistribution(values)
        return parameters[parameter]

    decide(legal, follow)
    return parameters, distributions


def decide_static(legal: LegalSpace, choose: Chooser) -> TrainingConfig:
    """Asks every technique under one name with all its values, for samplers that model a fixed space only (GP).

    Where the choice is illegal after those before it, the first legal value takes its place.
    """
    wanted = {
        field: choose(field, values) for field, values in legal.values.items() if len(values) > 1
    }
    return decide(legal, lambda name, values: _if_legal(wanted[name.partition("|")[0]], values))


def as_static_parameters(
    legal: LegalSpace, config: TrainingConfig
) -> tuple[dict[str, Any], dict[str, BaseDistribution]]:
    """As `as_parameters`, for `decide_static`."""
    choices = {field: values for field, values in legal.values.items() if len(values) > 1}
    parameters = {field: getattr(config, field) for field in choices}
    return parameters, {field: CategoricalDistribution(values) for field, values in choices.items()}


def _if_legal(value: Any, values: tuple[Any, ...]) -> Any:
    return value if value in values else values[0]


def _parameter_name(legal: LegalSpace, field: str, values: tuple[Any, ...]) -> str:
    return field if values == legal.values[field] else f"{field}|{','.join(map(str, values))}"
