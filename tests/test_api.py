"""The parts of the Python interface that the command line does not use."""

import autotune
from autotune.predictor.predict import PredictionRequest, predict
from autotune.spec.config import TrainingConfig
from autotune.spec.workload import make_workload

SIZES = {"layers": 2, "width": 32, "heads": 2, "sequence_length": 32, "global_batch": 4}


def test_a_prediction_from_python_is_the_predictors_own():
    prediction = autotune.predict(configuration={"checkpointing": "block"}, device="cpu", **SIZES)
    config = TrainingConfig(checkpointing="block", micro_batch_size=SIZES["global_batch"])
    own = predict(
        PredictionRequest(workload=make_workload("cpu", SIZES), config=config, device="cpu")
    )
    assert prediction.bytes_by_category == own.bytes_by_category
