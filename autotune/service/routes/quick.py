"""Questions that need no search: what it would do, what a configuration needs, what fits."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Annotated, Any

import anyio.to_thread
from fastapi import APIRouter, Body

from autotune.service.problems import documented
from autotune.service.request_body import (
    body_of,
    check_names,
    check_values,
    open_beside_parts,
    open_settings,
)
from autotune.service.routes.searches import SUBMISSION_BODY
from autotune.service.state import Service, ServiceState
from autotune.spec.checked import checked, parts_of
from autotune.study.fit.request import FitRequest
from autotune.study.prediction.predicted_training import PredictedTraining

router = APIRouter(tags=["predictions"])

_PREDICT_BODY = body_of(
    PredictedTraining,
    open_beside_parts(PredictedTraining),
    description="A trial of a study, or a configuration of a workload.",
    examples={
        "a workload": {
            "value": {
                "device": "cpu",
                "configuration": {"checkpointing": "block"},
                "workload": {"layers": 2, "width": 64, "heads": 2},
            }
        }
    },
)
_FIT_BODY = body_of(
    FitRequest,
    open_beside_parts(FitRequest),
    description="What fits under a cap: the largest model, sequence length or micro batch.",
    examples={
        "layers": {
            "value": {
                "max_mem": "64MiB",
                "vary": "layers",
                "device": "cpu",
                "workload": {"width": 64, "heads": 2},
            }
        }
    },
)


@router.post(
    "/dry-run",
    summary="What a search would do",
    openapi_extra=SUBMISSION_BODY,
    responses=documented(422, 429, 503),
)
async def dry_run(service: Service, settings: Annotated[dict[str, Any], Body()]) -> dict[str, Any]:
    """Answers what would be tried, what is left out and why, and how long it would take.

    With the predicted peaks of the first trials. Creates no study and trains nothing.
    """
    order = await anyio.to_thread.run_sync(service.dry_run_order, settings)
    answer: dict[str, Any] = await service.quick.ask("dry-run", order)
    return answer


@router.post(
    "/predict",
    summary="Predict the peak memory of a configuration",
    openapi_extra=_PREDICT_BODY,
    responses=documented(404, 422, 429, 503),
)
async def predict(service: Service, question: Annotated[dict[str, Any], Body()]) -> dict[str, Any]:
    """Needs no device: a training step is carried out on tensors without data."""
    order = await _order(service, PredictedTraining, question)
    answer: dict[str, Any] = await service.quick.ask("predict", order)
    return answer


@router.post(
    "/fit",
    summary="Find what fits under a cap",
    openapi_extra=_FIT_BODY,
    responses=documented(404, 422, 429, 503),
)
async def fit(service: Service, question: Annotated[dict[str, Any], Body()]) -> dict[str, Any]:
    """Finds the largest model, sequence length or micro batch by prediction."""
    order = await _order(service, FitRequest, question)
    answer: dict[str, Any] = await service.quick.ask("fit", order)
    return answer


async def _order(service: ServiceState, kind: type, question: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a question with all that its answer depends on."""
    settings = {name: value for name, value in question.items() if value is not None}
    check_names(settings, kind, accepted=open_beside_parts(kind))
    for name, part in parts_of(kind).items():
        of_part = settings.get(name, {})
        if isinstance(of_part, Mapping):
            check_names(of_part, part, accepted=open_settings(part))
            check_values(of_part)
    check_values({name: value for name, value in settings.items() if name not in parts_of(kind)})
    checked(kind, settings)  # whether they fit together is the question
    version = None
    if "study" in settings:
        version = str(await service.reader.version(settings["study"]))
    return {
        "settings": settings,
        "rules": asdict(service.settings.rules()),
        "version": version,
    }
