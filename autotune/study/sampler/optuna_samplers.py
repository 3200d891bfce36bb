"""Suggests the next configuration by one of Optuna's samplers, or in the order of the legal space.

The Optuna study lives in memory and is rebuilt from the study's records, in the order of their
results. So the studies database is the only source of truth, and the suggestion after n results is
the same, whether the search was stopped, killed or run by several processes until then.
"""

import hashlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import optuna
from optuna.samplers import BaseSampler, GPSampler, NSGAIISampler, RandomSampler, TPESampler
from optuna.trial import FrozenTrial, TrialState, create_trial

from autotune.spec.config import TrainingConfig
from autotune.spec.result import DIRECTIONS, TrialRecord
from autotune.spec.search_space import LegalSpace
from autotune.spec.study import Sampler, StudyDefinition
from autotune.study.sampler.distributions import (
    as_parameters,
    as_static_parameters,
    decide,
    decide_static,
)
from autotune.study.sampler.optuna_values import ObjectiveEncoder, OptunaValues

NSGA2_POPULATION = 10
"""With Optuna's default of 50, a study of 30 trials would be a random search: children are made
only after one generation is full."""


def _tpe(seed: int) -> BaseSampler:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        return TPESampler(seed=seed, multivariate=True, group=True, constant_liar=True)


def _gp(seed: int) -> BaseSampler:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        return GPSampler(seed=seed)


SAMPLER_FACTORIES: Mapping[Sampler, Callable[[int], BaseSampler]] = {
    # Not used for suggestions (`ehvi_sampler.py` makes them), only to show its trials in Optuna.
    "ehvi": lambda seed: RandomSampler(seed=seed),
    "tpe": _tpe,
    "gp": _gp,
    "nsga2": lambda seed: NSGAIISampler(seed=seed, population_size=NSGA2_POPULATION),
    "random": lambda seed: RandomSampler(seed=seed),
    # Not Optuna's GridSampler: it has no conditional parameters, and with ask and tell it raises at
    # its last point.
    "grid": lambda seed: RandomSampler(seed=seed),
}
_STATIC = ("gp",)
"""Samplers that model a fixed space only."""

RESULTS_SEEN: Mapping[Sampler, int] = {"tpe": 500, "gp": 200, "nsga2": 200}
"""How many results a sampler is told at most, so that a suggestion takes no longer after 10,000
trials than after these; the other samplers need no results."""

_GENERATION = "NSGAIISampler:generation"
"""The system attribute in which Optuna's NSGA-II stores the generation of a trial."""


def derived_seed(seed: int, *, told: int, repeat: int = 0) -> int:
    """Returns the seed of a suggestion after `told` results.

    It depends on nothing else, so a resumed study goes on like an uninterrupted one. `repeat`
    counts the suggestions since the last result that were not used.
    """
    text = f"{seed}:{told}:{repeat}" if repeat else f"{seed}:{told}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big")


class OptunaStudy:
    """Wraps an Optuna study: takes results in their order, and returns suggestions.

    It exposes no types of Optuna.
    """

    def __init__(self, *, legal: LegalSpace, sampler: Sampler, seed: int) -> None:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._legal = legal
        self._sampler = sampler
        self._seed = seed
        self._told: list[tuple[TrainingConfig, OptunaValues]] = []
        self._study = _empty_study()
        self._first_shown = 0
        self._shown = 0
        self._front: list[int] = []
        """Indices of the Pareto front, by Optuna's rules, of the results before `_first_shown`."""

    def tell(self, config: TrainingConfig, values: OptunaValues) -> None:
        """Add a result; one of a configuration outside the space is ignored."""
        if config in self._legal:
            self._told.append((config, values))

    def ask(self, *, repeat: int = 0, in_flight: Sequence[TrainingConfig] = ()) -> TrainingConfig:
        """Returns the suggestion after the results so far, a different one for each `repeat`.

        The sampler is shown the configurations `in_flight`, which run at this moment, as Optuna's
        running trials. TPE and the Gaussian process avoid them; the others ignore them.
        """
        self._show_results()
        seed = derived_seed(self._seed, told=len(self._told), repeat=repeat)
        self._study.sampler = SAMPLER_FACTORIES[self._sampler](seed)
        _settle_parents(self._study)
        running = self._add_running(in_flight)
        trial = self._study.ask()
        decide_config = decide_static if self._sampler in _STATIC else decide
        config = decide_config(self._legal, trial.suggest_categorical)
        # The results are added with those of all trials.
        self._study.tell(trial, state=TrialState.FAIL)
        for number in running:
            self._study.tell(number, state=TrialState.FAIL)
        return config

    def _add_running(self, in_flight: Sequence[TrainingConfig]) -> range:
        """Add running trials to Optuna's study, and return their numbers there."""
        to_parameters = as_static_parameters if self._sampler in _STATIC else as_parameters
        first = len(self._study.get_trials(deepcopy=False))
        running = [config for config in in_flight if config in self._legal]
        for config in running:
            parameters, distributions = to_parameters(self._legal, config)
            self._study.add_trial(
                create_trial(
                    state=TrialState.RUNNING, params=parameters, distributions=distributions
                )
            )
        return range(first, first + len(running))

    def unseen(self, seen: set[str]) -> Iterator[TrainingConfig]:
        """Returns the legal configurations without a trial, in order for `grid`, else shuffled.

        `seen` holds the fingerprints of those with a trial.
        """
        if self._sampler == "grid":
            configs = self._legal.configurations()
        else:
            configs = self._legal.shuffled(derived_seed(self._seed, told=len(self._told)))
        return (config for config in configs if config.fingerprint not in seen)

    # -- the results that the sampler is told ------------------------------------------------------

    def _show_results(self) -> None:
        """Add the new results to Optuna's study, or start a new study if they are too many."""
        most = RESULTS_SEEN.get(self._sampler, 0)
        if not most:
            self._study = _empty_study()  # otherwise it would store every suggestion ever made
            return
        first = _first_of_window(len(self._told), most=most)
        if first != self._first_shown:
            # The front of all results is that of the previous front and the results since.
            self._front = _front_of(self._told, [*self._front, *range(self._first_shown, first)])
            chosen = dict.fromkeys([*self._front[-most // 4 :], *range(first - 1, -1, -1)])
            self._study = _empty_study()
            self._first_shown = first
            self._shown = first
            self._add(self._told[index] for index in sorted(list(chosen)[: most // 2]))
        self._add(self._told[self._shown :])
        self._shown = len(self._told)

    def _add(self, results: Iterable[tuple[TrainingConfig, OptunaValues]]) -> None:
        to_parameters = as_static_parameters if self._sampler in _STATIC else as_parameters
        count = sum(
            trial.state == TrialState.COMPLETE for trial in self._study.get_trials(deepcopy=False)
        )
        for index, (config, encoded) in enumerate(results, start=count):
            parameters, distributions = to_parameters(self._legal, config)
            self._study.add_trial(
                create_trial(
                    params=parameters,
                    distributions=distributions,
                    values=list(encoded.values),
                    system_attrs={_GENERATION: index // NSGA2_POPULATION},
                    constraints=encoded.constraints,
                )
            )


def _settle_parents(study: optuna.Study) -> None:
    """Make NSGA-II choose the parents of every generation now, the oldest generation first.

    It returns them in one order when it chooses them and in another order later: the suggestion
    would depend on whether this process or an earlier one reached the generation first.
    """
    if isinstance(study.sampler, NSGAIISampler):
        results = sum(
            trial.state == TrialState.COMPLETE for trial in study.get_trials(deepcopy=False)
        )
        for generation in range(1, results // NSGA2_POPULATION + 1):
            study.sampler.get_parent_population(study, generation)


def optuna_study_of(definition: StudyDefinition, records: Iterable[TrialRecord]) -> optuna.Study:
    """Returns an Optuna study, in memory, with all results, for Optuna's figures and tools."""
    legal = definition.legal_space()
    encoder = ObjectiveEncoder(
        cap_bytes=definition.cap_bytes, vocab_size=definition.workload.vocab_size
    )
    study = _empty_study(definition.name)
    for record in records:
        if record.is_finished and record.config in legal:
            parameters, distributions = as_parameters(legal, record.config)
            encoded = encoder.to_optuna_values(record)
            study.add_trial(
                create_trial(
                    params=parameters,
                    distributions=distributions,
                    values=list(encoded.values),
                    user_attrs={"autotune_number": record.number, "outcome": record.outcome},
                    constraints=encoded.constraints,
                )
            )
    return study


def _empty_study(name: str | None = None) -> optuna.Study:
    return optuna.create_study(study_name=name, directions=[*DIRECTIONS.values()])


def _first_of_window(told: int, *, most: int) -> int:
    """Returns the index from which all results are told.

    Of the results before it, only the front and the latest are told.
    """
    step = most // 4
    if told <= most + step:
        return 0
    return most + (told - most) // step * step - most // 2


def _front_of(results: list[tuple[TrainingConfig, OptunaValues]], indices: list[int]) -> list[int]:
    study = _empty_study()
    for index in indices:
        _, encoded = results[index]
        study.add_trial(
            create_trial(
                values=list(encoded.values),
                user_attrs={"index": index},
                constraints=encoded.constraints,
            )
        )
    front: list[FrozenTrial] = study.best_trials
    return [trial.user_attrs["index"] for trial in front]
