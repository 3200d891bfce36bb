"""Which configuration next: Optuna's samplers over the legal space, or its enumeration.

The Optuna study lives in memory and is made of the study's own records, in the order of their
results: there is one truth, the studies database, and what is suggested after so many results is
the same whether the search was stopped, killed or run by several processes until then.
"""

import hashlib
import random
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property

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
"""Optuna's 50 would leave a study of 30 trials at random search: nothing is bred before one
generation is full."""


def _tpe(seed: int) -> BaseSampler:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        return TPESampler(seed=seed, multivariate=True, group=True)


def _gp(seed: int) -> BaseSampler:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        return GPSampler(seed=seed)


SAMPLER_FACTORIES: Mapping[Sampler, Callable[[int], BaseSampler]] = {
    # ehvi chooses by itself (`ehvi_sampler.py`); Optuna only has a name for it where its trials are
    # looked at.
    "ehvi": lambda seed: RandomSampler(seed=seed),
    "tpe": _tpe,
    "gp": _gp,
    "nsga2": lambda seed: NSGAIISampler(seed=seed, population_size=NSGA2_POPULATION),
    "random": lambda seed: RandomSampler(seed=seed),
    # Not Optuna's GridSampler: it knows no conditions and raises at its last point under ask and
    # tell.
    "grid": lambda seed: RandomSampler(seed=seed),
}
_STATIC = ("gp",)
"""Samplers that see a fixed space only."""

RESULTS_SEEN: Mapping[Sampler, int] = {"tpe": 500, "gp": 200, "nsga2": 200}
"""How many results a sampler is told of at most, so that a suggestion takes no longer after 10,000
trials than after these; the others need none."""

_GENERATION = "NSGAIISampler:generation"
"""Where Optuna's NSGA-II looks for the generation of a trial."""


def derived_seed(seed: int, *, told: int, repeat: int = 0) -> int:
    """The seed of the ask after `told` results: a continued study goes on as an uninterrupted one would.

    `repeat` counts the suggestions since then that were of no use.
    """
    text = f"{seed}:{told}:{repeat}" if repeat else f"{seed}:{told}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big")


class OptunaStudy:
    """The sampler's side of a study: results in, in their order; suggestions out.

    No type of Optuna's leaves it.
    """

    def __init__(self, *, legal: LegalSpace, sampler: Sampler, seed: int) -> None:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._legal, self._sampler, self._seed = legal, sampler, seed
        self._told: list[tuple[TrainingConfig, OptunaValues]] = []
        self._study = _empty_study()
        self._first_shown, self._shown = 0, 0
        self._front: list[int] = []
        """Of the results before `_first_shown`, as Optuna sees it: their indices."""

    def tell(self, config: TrainingConfig, observation: OptunaValues) -> None:
        """One of the space's own configurations; others say nothing about it."""
        if config in self._legal:
            self._told.append((config, observation))

    def ask(self, *, repeat: int = 0) -> TrainingConfig:
        """The suggestion after the results told so far; another one for each `repeat`."""
        self._show_results()
        seed = derived_seed(self._seed, told=len(self._told), repeat=repeat)
        self._study.sampler = SAMPLER_FACTORIES[self._sampler](seed)
        _settle_parents(self._study)
        trial = self._study.ask()
        decided = decide_static if self._sampler in _STATIC else decide
        config = decided(self._legal, lambda name, values: trial.suggest_categorical(name, values))
        self._study.tell(trial, state=TrialState.FAIL)  # its result comes with those of all trials
        return config

    def unseen(self, seen: set[str]) -> Iterator[TrainingConfig]:
        """Legal configurations that were not tried: in their order for `grid`, else shuffled by the seed."""
        unseen = [config for config in self._configurations if config.fingerprint not in seen]
        if self._sampler != "grid":
            random.Random(derived_seed(self._seed, told=len(self._told))).shuffle(unseen)
        return iter(unseen)

    @cached_property
    def _configurations(self) -> list[TrainingConfig]:
        """Once: of a large space it takes seconds, and each keeps its fingerprint."""
        return list(self._legal.configurations())

    # -- what the sampler sees ---------------------------------------------------------------------

    def _show_results(self) -> None:
        """Brings Optuna's study up to date; begins another one where the sampler would see too many results."""
        most = RESULTS_SEEN.get(self._sampler, 0)
        if not most:
            self._study = _empty_study()  # or it would keep every suggestion there ever was
            return
        first = _first_of_window(len(self._told), most=most)
        if first != self._first_shown:
            # The front of all is that of the front before and what came since: no need to look at
            # all again.
            self._front = _front_of(self._told, [*self._front, *range(self._first_shown, first)])
            chosen = dict.fromkeys([*self._front[-most // 4 :], *range(first - 1, -1, -1)])
            self._study, self._first_shown, self._shown = _empty_study(), first, first
            self._add(self._told[index] for index in sorted(list(chosen)[: most // 2]))
        self._add(self._told[self._shown :])
        self._shown = len(self._told)

    def _add(self, results: Iterable[tuple[TrainingConfig, OptunaValues]]) -> None:
        parametrized = as_static_parameters if self._sampler in _STATIC else as_parameters
        count = sum(
            trial.state == TrialState.COMPLETE for trial in self._study.get_trials(deepcopy=False)
        )
        for index, (config, observation) in enumerate(results, start=count):
            parameters, distributions = parametrized(self._legal, config)
            self._study.add_trial(
                create_trial(
                    params=parameters,
                    distributions=distributions,
                    values=list(observation.values),
                    system_attrs={_GENERATION: index // NSGA2_POPULATION},
                    constraints=observation.constraints,
                )
            )


def _settle_parents(study: optuna.Study) -> None:
    """Has NSGA-II choose the parents of every generation now, the eldest first.

    It hands them out in one order when it chooses them and in another ever after: the suggestion
    would depend on whether this process or an earlier one came to the generation first.
    """
    if isinstance(study.sampler, NSGAIISampler):
        results = sum(
            trial.state == TrialState.COMPLETE for trial in study.get_trials(deepcopy=False)
        )
        for generation in range(1, results // NSGA2_POPULATION + 1):
            study.sampler.get_parent_population(study, generation)


def optuna_study_of(definition: StudyDefinition, records: Iterable[TrialRecord]) -> optuna.Study:
    """A study of Optuna's with everything that was measured, in memory: for its own figures and tools."""
    legal, observer = definition.legal_space(), _observer_of(definition)
    study = _empty_study(definition.name)
    for record in records:
        if record.is_finished and record.config in legal:
            parameters, distributions = as_parameters(legal, record.config)
            observation = observer.to_optuna_values(record)
            study.add_trial(
                create_trial(
                    params=parameters,
                    distributions=distributions,
                    values=list(observation.values),
                    user_attrs={"autotune_number": record.number, "outcome": record.outcome},
                    constraints=observation.constraints,
                )
            )
    return study


def _observer_of(definition: StudyDefinition) -> ObjectiveEncoder:
    return ObjectiveEncoder(
        cap_bytes=definition.cap_bytes, vocab_size=definition.workload.vocab_size
    )


def _empty_study(name: str | None = None) -> optuna.Study:
    return optuna.create_study(study_name=name, directions=[*DIRECTIONS.values()])


def _first_of_window(told: int, *, most: int) -> int:
    """Index of the first result that is shown for its own sake; those before it, by their front and the latest."""
    step = most // 4
    return 0 if told <= most + step else most + (told - most) // step * step - most // 2


def _front_of(results: list[tuple[TrainingConfig, OptunaValues]], indices: list[int]) -> list[int]:
    study = _empty_study()
    for index in indices:
        _, observation = results[index]
        study.add_trial(
            create_trial(
                values=list(observation.values),
                user_attrs={"index": index},
                constraints=observation.constraints,
            )
        )
    front: list[FrozenTrial] = study.best_trials
    return [trial.user_attrs["index"] for trial in front]
