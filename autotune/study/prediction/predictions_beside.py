"""Predictions that run while a place is at work, of what may come next there."""

import math
from concurrent.futures import Future

from autotune.errors import TrialLost
from autotune.execution.flow import Flow, Pause
from autotune.spec.config import TrainingConfig
from autotune.study.prediction.prediction_cache import PredictionCache, Predictor


class PredictionsBeside:
    """Puts forecasts into a cache that nobody waits for yet, each configuration's once at most."""

    def __init__(self, cache: PredictionCache) -> None:
        self._cache = cache
        self._begun: set[TrainingConfig] = set()
        self._coming: dict[tuple[TrainingConfig, Predictor], Future[None]] = {}
        """Those that are not over, each done once it is."""

    def wants(self, config: TrainingConfig) -> bool:
        """Returns whether a configuration has no forecast, and none was begun here."""
        return config not in self._begun and not self._cache.is_known(config)

    def predict(self, config: TrainingConfig, predict: Predictor) -> Flow[None]:
        """Predict a configuration; where the process is lost, it stays without a forecast."""
        self._begun.add(config)
        coming = self._coming[config, predict] = Future()
        try:
            self._cache.add((yield from predict(config)))
        except TrialLost:
            pass  # it is predicted again where it is chosen
        finally:
            del self._coming[config, predict]
            coming.set_result(None)

    def wait_for(self, config: TrainingConfig, predict: Predictor) -> Flow[None]:
        """Wait for a prediction of a configuration that the same predictor has begun.

        That of another place may rest for as long as a training there is timed.
        """
        if coming := self._coming.get((config, predict)):
            yield Pause(math.inf, unless=coming)
