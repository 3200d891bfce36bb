import optuna
import pytest
from optuna.distributions import CategoricalDistribution

from autotune.spec.space_content import named_spaces
from autotune.study.sampler.distributions import as_parameters, decide, decide_static
from tests.building.results import bound

DEPENDENT = """
[techniques]
precision = ["fp32", "fp16-mixed"]
compile = ["none", "block", "model"]
memory_budget = [1.0, 0.5, 0.1]
checkpointing = ["none", "attention", "block"]
optimizer = ["adamw", "adafactor"]
optimizer_fusion = ["foreach", "kernel", "backward"]
micro_batch_size = [8, 4]

[[conditions]]
if = { compile = ["model"] }
then = { memory_budget = [1.0, 0.1] }
"""


@pytest.fixture(params=["quick", DEPENDENT], ids=["quick", "dependent"])
def legal(request, tmp_path):
    if request.param in named_spaces():
        return bound(request.param)
    file = tmp_path / "space.toml"
    file.write_text(request.param)
    return bound(file)


def replayed(legal, parameters):
    """The configuration that exactly these parameters lead to."""
    suggested = []

    def choose(name, values):
        suggested.append(name)
        assert parameters[name] in values
        return parameters[name]

    config = decide(legal, choose)
    assert suggested == list(parameters)
    return config


def test_parameters_lead_back_to_their_configuration(legal):
    for config in legal.configurations():
        assert replayed(legal, as_parameters(legal, config)[0]) == config


def test_different_configurations_have_different_parameters(legal):
    configs = list(legal.configurations())
    assert len({tuple(as_parameters(legal, config)[0].items()) for config in configs}) == len(
        configs
    )


def test_one_parameter_name_has_one_distribution_in_the_whole_space(legal):
    seen = {}
    for config in legal.configurations():
        for name, distribution in as_parameters(legal, config)[1].items():
            assert seen.setdefault(name, distribution) == distribution


def choices_of(distribution):
    assert isinstance(distribution, CategoricalDistribution)
    return distribution.choices


def test_every_parameter_is_a_choice_of_its_distribution(legal):
    for config in legal.configurations():
        parameters, distributions = as_parameters(legal, config)
        assert list(parameters) == list(distributions)
        assert all(parameters[name] in choices_of(distributions[name]) for name in parameters)


def test_a_field_with_one_legal_value_is_not_suggested(legal):
    for config in legal.configurations():
        assert all(
            len(choices_of(distribution)) > 1
            for distribution in as_parameters(legal, config)[1].values()
        )


def test_a_set_that_depends_on_earlier_choices_is_in_the_name(legal):
    distributions = {}
    for config in legal.configurations():
        distributions |= as_parameters(legal, config)[1]
    for name, distribution in distributions.items():
        field, _, listed = name.partition("|")
        assert listed == (
            ""
            if distribution.choices == legal.values[field]
            else ",".join(map(str, distribution.choices))
        )


def test_the_first_choice_of_everything_is_legal(legal):
    assert decide(legal, lambda _, values: values[0]) in legal


def test_a_space_of_one_configuration_asks_nothing(tmp_path):
    file = tmp_path / "one.toml"
    file.write_text('[techniques]\nprecision = ["fp32"]')
    assert as_parameters(bound(file), next(bound(file).configurations())) == ({}, {})


def test_optuna_accepts_every_configuration_in_one_study(legal):
    study = optuna.create_study()
    for config in legal.configurations():
        parameters, distributions = as_parameters(legal, config)
        study.add_trial(
            optuna.trial.create_trial(params=parameters, distributions=distributions, value=0.0)
        )
    assert len(study.trials) == len(list(legal.configurations()))


def test_suggested_and_added_parameters_are_the_same(legal):
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    for _ in range(20):
        trial = study.ask()
        config = decide(
            legal, lambda name, values, trial=trial: trial.suggest_categorical(name, values)
        )
        assert (trial.params, trial.distributions) == as_parameters(legal, config)


def test_a_parameter_is_a_fixed_choice_and_never_a_range(legal):
    distributions = as_parameters(legal, next(legal.configurations()))[1]
    assert distributions
    assert all(
        isinstance(distribution, CategoricalDistribution) for distribution in distributions.values()
    )


def test_with_every_technique_under_one_name_the_same_choices_lead_to_the_same_configuration(legal):
    for config in legal.configurations():
        asked = {}

        def choose(name, values, config=config, asked=asked):
            asked[name] = values
            return getattr(config, name)

        assert decide_static(legal, choose) == config
        assert asked == {name: values for name, values in legal.values.items() if len(values) > 1}
