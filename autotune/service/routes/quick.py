"""Questions that need no search: what it would do, what a configuration needs, what fits."""

from dataclasses import asdict
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Body
from pydantic import BaseModel, ConfigDict, Field

from autotune.service.problems import documented
from autotune.service.state import Service, ServiceState
from autotune.service.submission_schema import SUBMISSION_BODY

router = APIRouter(tags=["predictions"])

Sizes = int | str | None
_LONGEST = 100


class PredictQuestion(BaseModel):
    """A trial of a study, or a configuration of a workload."""

    model_config = ConfigDict(extra="forbid")

    study: str | None = Field(None, max_length=_LONGEST, description="Name of a study.")
    trial: int | None = Field(None, ge=0, le=2**31, description="Of the study; else its pick.")
    device: str | None = Field(
        None,
        pattern=r"^[a-z0-9-]{1,20}$",
        description="cpu, cuda, or a GPU by its data sheet, such as h100.",
    )
    configuration: dict[str, Any] | None = Field(
        None, description="Fields of a configuration, such as precision."
    )
    compute_capability: str | None = Field(None, max_length=10)
    torch_version: str | None = Field(None, max_length=40)
    workload: dict[str, Any] = Field(
        default_factory=dict, description="Fields of a workload, such as layers and width."
    )


class FitQuestion(PredictQuestion):
    """What fits under a cap: the largest model, sequence length or micro batch."""

    max_mem: Annotated[Sizes, Field(description="Such as 8GiB, or bytes.")] = None
    vary: Literal["layers", "width", "seq-len", "micro-batch"] = "layers"
    space: str | None = Field(None, max_length=_LONGEST, description="Name of a search space.")
    scale: str | None = Field(None, max_length=_LONGEST)
    context: Annotated[Sizes, Field(description="Memory of a CUDA context.")] = None


@router.post(
    "/dry-run",
    summary="What a search would do",
    openapi_extra=dict(SUBMISSION_BODY),
    responses=documented(422, 429, 503),
)
async def dry_run(service: Service, settings: Annotated[dict[str, Any], Body()]) -> dict[str, Any]:
    """Answers what would be tried, what is left out and why, and how long it would take.

    With the predicted peaks of the first trials. Creates no study and trains nothing.
    """
    group = settings.get("group", "")
    order = {
        "settings": settings,
        "rules": asdict(service.settings.rules(group if isinstance(group, str) else "")),
        "groups": list(service.settings.device_groups),
    }
    answer: dict[str, Any] = await service.quick.ask("dry-run", order)
    return answer


@router.post(
    "/predict",
    summary="Predict the peak memory of a configuration",
    responses=documented(422, 429, 503),
)
async def predict(
    service: Service,
    question: Annotated[
        PredictQuestion,
        Body(
            openapi_examples={
                "a workload": {
                    "value": {
                        "device": "cpu",
                        "configuration": {"checkpointing": "block"},
                        "workload": {"layers": 2, "width": 64, "heads": 2},
                    }
                }
            }
        ),
    ],
) -> dict[str, Any]:
    """Needs no device: a training step is carried out on tensors without data."""
    order = await _order(service, question)
    answer: dict[str, Any] = await service.quick.ask("predict", order)
    return answer


@router.post(
    "/fit",
    summary="Find what fits under a cap",
    responses=documented(422, 429, 503),
)
async def fit(
    service: Service,
    question: Annotated[
        FitQuestion,
        Body(
            openapi_examples={
                "layers": {
                    "value": {
                        "max_mem": "64MiB",
                        "vary": "layers",
                        "device": "cpu",
                        "workload": {"width": 64, "heads": 2},
                    }
                }
            }
        ),
    ],
) -> dict[str, Any]:
    """Finds the largest model, sequence length or micro batch by prediction."""
    order = await _order(service, question)
    answer: dict[str, Any] = await service.quick.ask("fit", order)
    return answer


async def _order(service: ServiceState, question: PredictQuestion) -> dict[str, Any]:
    """Return a question with all that its answer depends on."""
    version = None
    if question.study is not None:
        version = str(await service.reader.version(question.study))
    return {
        "settings": question.model_dump(exclude_none=True),
        "rules": asdict(service.settings.rules()),
        "version": version,
    }
