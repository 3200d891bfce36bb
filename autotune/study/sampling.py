"""Which configuration next: Optuna's samplers over the legal space, or its enumeration."""

import hashlib
import random
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

import optuna
from optuna.samplers import BaseSampler, GPSampler, NSGAIISampler, RandomSampler, TPESampler
from optuna.trial import Trial, TrialState, create_trial

from autotune.config import TrainingConfig
from autotune.definition import Sampler
from autotune.result import DIRECTIONS
from autotune.search_space import LegalSpace
from autotune.study.distributions import as_parameters, as_static_parameters, decide, decide_static
from autotune.study.observation import Observation

if TYPE_CHECKING:
    from optuna.storages import BaseStorage

_NUMBER = "autotune_number"
"""User attribute of an Optuna trial: the number of the record it stands for."""


NSGA2_POPULATION = 10
"""Optuna's 50 would leave a study of 30 trials at random search: nothing is bred before one generation is full."""


def _tpe(seed: int) -> BaseSampler:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        return TPESampler(seed=seed, multivariate=True, group=True)


def _gp(seed: int) -> BaseSampler:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        return GPSampler(seed=seed)


_STATIC: tuple[Sampler, ...] = ("gp",)
"""Samplers that model only what every trial is asked."""


SAMPLER_FACTORIES: Mapping[Sampler, Callable[[int], BaseSampler]] = {
    # The study ranks by itself (`ranking.py`): Optuna's samplers know no predictions. It keeps the trials all the same.
    "ehvi": lambda seed: RandomSampler(seed=seed),
    "gp": _gp,
    "tpe": _tpe,
    "nsga2": lambda seed: NSGAIISampler(seed=seed, population_size=NSGA2_POPULATION),
    "random": lambda seed: RandomSampler(seed=seed),
    # Enumeration is ours: Optuna's GridSampler knows no conditions and ends with an error under ask and tell.
    "grid": lambda seed: RandomSampler(seed=seed),
}


def derived_seed(seed: int, *, told: int) -> int:
    """The seed of the ask after `told` results: a continued study goes on as an uninterrupted one would."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{told}".encode()).digest()[:4], "big")


class OptunaStudy:
    """The Optuna side of one study: suggestions out, observations in. No Optuna type leaves this class but `Trial`."""

    def __init__(self, name: str, storage: "BaseStorage", *, legal: LegalSpace, sampler: Sampler, seed: int) -> None:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._legal, self._sampler, self._seed = legal, sampler, seed
        self._study = optuna.create_study(
            study_name=name, storage=storage, directions=[*DIRECTIONS.values()], load_if_exists=True
        )
        complete = self._study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
        self._told = len(complete)
        self.told_numbers = {trial.user_attrs[_NUMBER] for trial in complete if _NUMBER in trial.user_attrs}
        self.give_up_running()

    def ask(self) -> tuple[Trial, TrainingConfig]:
        """The sampler's next suggestion; answer it with `tell`, or take it back with `give_up_running`."""
        self._study.sampler = SAMPLER_FACTORIES[self._sampler](derived_seed(self._seed, told=self._told))
        trial = self._study.ask()
        decided = decide_static if self._sampler in _STATIC else decide
        return trial, decided(self._legal, lambda name, values: trial.suggest_categorical(name, values))

    def tell(self, trial: Trial, number: int, observation: Observation) -> None:
        trial.set_user_attr(_NUMBER, number)
        for key, value in observation.constraints.items():
            trial.set_constraint(key, value)
        self._study.tell(trial, observation.values)
        self._count(number)

    def add(self, number: int, config: TrainingConfig, observation: Observation) -> None:
        """Tells a result that was not asked for: a first configuration, or one adopted after a crash."""
        if config in self._legal:
            parametrized = as_static_parameters if self._sampler in _STATIC else as_parameters
            parameters, distributions = parametrized(self._legal, config)
            self._study.add_trial(
                create_trial(
                    params=parameters,
                    distributions=distributions,
                    values=list(observation.values),
                    user_attrs={_NUMBER: number},
                    constraints=observation.constraints,
                )
            )
            self._count(number)

    def give_up_running(self) -> None:
        """Closes suggestions that were never answered, so that none is left running."""
        for trial in self._study.get_trials(deepcopy=False, states=(TrialState.RUNNING, TrialState.WAITING)):
            self._study.tell(trial.number, state=TrialState.FAIL)

    def _count(self, number: int) -> None:
        self._told += 1
        self.told_numbers.add(number)

    def unseen(self, seen: set[str]) -> Iterator[TrainingConfig]:
        """Legal configurations that were not tried: in their order for `grid`, else shuffled by the seed."""
        unseen = [config for config in self._legal.configurations() if config.fingerprint not in seen]
        if self._sampler != "grid":
            random.Random(derived_seed(self._seed, told=self._told)).shuffle(unseen)
        return iter(unseen)
