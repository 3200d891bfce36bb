"""A trial server whose tasks take milliseconds: the real server with other trainings.

    python tests/quick_study/stand_in.py    # autotune starts it so; requests on stdin

Every trial is still a separate process, forked, limited and ended as always. Its result is a
function of the configuration alone, so that a reader of the studies database knows the result of
each trial; its prediction is the peak. A trial takes `STAND_IN_SECONDS` on average, in which it is
timed, and a prediction as long. If `STAND_IN_GATE` names a file, trials wait until it exists.
"""

import os
import random
import time
from typing import NoReturn

from autotune.execution.server.replies import TrainingFailed
from autotune.execution.tasks import Predict, Trace, Train
from autotune.spec.attempt import FinishedTrial
from autotune.spec.config import TrainingConfig
from autotune.spec.prediction import Prediction
from autotune.spec.provenance import MEASURED
from autotune.spec.result import Measurement
from autotune.spec.training_request import ReportsStage

MIB = 1024**2


def measurement_of(config: TrainingConfig) -> Measurement:
    """Returns the result of a configuration: saving memory lowers speed, one in nine crashes."""
    chance = random.Random(config.fingerprint)
    if chance.random() < 1 / 9:
        return Measurement(outcome="crashed", message="RuntimeError: as one in nine does")
    saved = sum(
        value not in ("none", "auto", "full", "default", 1.0, "fp32")
        for value in config.to_dict().values()
    )
    peak_bytes = int(MIB * (100 - 5 * saved + chance.uniform(-4, 4)) * config.micro_batch_size**0.5)
    return Measurement(
        outcome="ok",
        peak_memory_bytes=peak_bytes,
        device_bytes=peak_bytes,
        tokens_per_second=1000.0
        * config.micro_batch_size**0.3
        / (1 + 0.1 * saved)
        * chance.uniform(0.9, 1.1),
        tokens_per_second_spread=10.0,
        perplexity=20.0 + chance.uniform(0.0, 1.0),
        perplexity_source=MEASURED,
        final_loss=3.0,
        compile_seconds=0.0,
        startup_seconds=0.0,
    )


def predict(task: Predict) -> Prediction:
    _take_time()
    config = task.request.config
    peak_bytes = measurement_of(config).peak_memory_bytes or MIB
    return Prediction(
        device="cpu",
        fake_device="cpu",
        peak_memory_bytes=peak_bytes,
        upper_bound_bytes=peak_bytes,
        lower_bound_bytes=1,  # whatever the cap is, it is trained
        phase="backward",
        module="a stand-in",
        operator="none",
        bytes_by_category={"activations": peak_bytes},
        parameters=1,
        holders=(),
    )


def train(task: Train, told: ReportsStage) -> FinishedTrial:
    while "STAND_IN_GATE" in os.environ and not os.path.exists(os.environ["STAND_IN_GATE"]):
        time.sleep(0.1)
    told("step")
    _take_time()
    return FinishedTrial(measurement=measurement_of(task.training.config), seconds=0.01)


def _take_time() -> None:
    if seconds := float(os.environ.get("STAND_IN_SECONDS", "0.01")):
        time.sleep(random.expovariate(1 / seconds))


def trace(_task: Trace, _told: object) -> NoReturn:
    raise TrainingFailed(Measurement(outcome="out_of_memory", message="no first steps"))


def main() -> None:
    from autotune.execution.process import answers
    from autotune.execution.server import fork_server

    fork_server._import_what_trials_need = lambda: None  # nothing is trained here
    answers.FUNCTIONS = {**answers.FUNCTIONS, Train: train, Trace: trace, Predict: predict}
    fork_server.main()


if __name__ == "__main__":
    main()
