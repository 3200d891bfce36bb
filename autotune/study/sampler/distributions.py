"""Converts a legal space to Optuna distributions, and configurations to Optuna parameters and back.

Optuna rejects choices that change within a study. So a field whose legal values depend on the
fields before it is suggested under a name that includes the values: `memory_budget|1.0,0.5`. A
field with one legal value is not suggested.
"""

from collections.abc import Callable
from typing import Any

from optuna.distributions import BaseDistribution, CategoricalDistribution

from autotune.spec.config import FIELD_ORDER, TrainingConfig
from autotune.spec.search_space import LegalSpace

Chooser = Callable[[str, tuple[Any, ...]], Any]
"""Maps a parameter's name and its choices to the choice."""


def decide(legal: LegalSpace, choose: Chooser) -> TrainingConfig:
    """Build a configuration field by field, calling `choose` wherever there is a choice."""
    chosen: dict[str, Any] = {}
    for field in FIELD_ORDER:
        values = legal.legal_values(field, chosen)
        if len(values) == 1:
            chosen[field] = values[0]
        else:
            name = field
            if values != legal.values[field]:
                name = f"{field}|{','.join(map(str, values))}"
            chosen[field] = choose(name, values)
    return TrainingConfig(**chosen)


def as_parameters(
    legal: LegalSpace, config: TrainingConfig
) -> tuple[dict[str, Any], dict[str, BaseDistribution]]:
    """Returns the parameters and distributions with which Optuna would have suggested `config`.

    The configuration must be in the space.
    """
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
    """As `decide`, with every technique under one name with all its values.

    For samplers that model a fixed space only (GP). A choice that is illegal after the earlier ones
    is replaced by the first legal value.
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
