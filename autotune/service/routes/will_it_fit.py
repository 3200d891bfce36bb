"""Whether the training of a pasted text fits a card, in parts of which each takes longer."""

import asyncio
from collections.abc import Mapping
from dataclasses import asdict
from typing import Annotated, Any

import anyio.to_thread
from fastapi import APIRouter, Query

from autotune.errors import InvalidInput
from autotune.service.parameters import WITHOUT_NUL
from autotune.service.problems import documented
from autotune.service.quick import Asked
from autotune.service.state import Service, ServiceState
from autotune.spec.setting import options_of
from autotune.study.prediction.pasted import LARGEST_ADDRESS, Part, PastedTraining

router = APIRouter(tags=["predictions"])

_Text = Annotated[str, Query(max_length=LARGEST_ADDRESS, pattern=WITHOUT_NUL)]


def question_of(given: Mapping[str, str]) -> PastedTraining:
    """Returns the question of the parameters of an address, whose text was read.

    Raises InvalidInput.
    """
    if not given.get("text", "").strip():
        raise InvalidInput("text is empty", hint="give a trainer's file, or a config.json")
    question = PastedTraining.of(
        {
            name: option.parse(given[name].replace("\r\n", "\n"))
            for name, option in options_of(PastedTraining).items()
            if given.get(name, "").strip()
        }
    )
    _ = question.read  # what is wrong in it is said at once, not by each part
    return question


def asked_of(service: ServiceState, part: Part, question: PastedTraining) -> Asked:
    """Returns a part of the question, which a process answers. Raises TooBusy."""
    order = {
        "part": part,
        "settings": {k: v for k, v in asdict(question).items() if v is not None},
        "rules": asdict(service.settings.rules()),
    }
    return service.quick.asked("bound" if part == "least" else "will-it-fit", order)


@router.get(
    "/will-it-fit/{part}",
    summary="Whether a trainer's file, or a model, fits a card",
    responses=documented(422, 429, 503),
)
async def will_it_fit(
    service: Service,
    part: Part,
    text: _Text,
    model_text: _Text = "",
    card: _Text = "",
    max_mem: _Text = "",
    way: _Text = "",
    sequence_length: _Text = "",
    global_batch: _Text = "",
) -> dict[str, Any]:
    """Answers by prediction: nothing is trained, and no file of the server is read.

    `text` is a trainer's file or a config.json. `least` is a bound from shapes, `peak` the memory
    of that training and what makes it fit, `front` what a search space around it would give, and
    `longest` the longest sequence.
    """
    given = {
        "text": text,
        "model_text": model_text,
        "card": card,
        "max_mem": max_mem,
        "way": way,
        "sequence_length": sequence_length,
        "global_batch": global_batch,
    }
    question = await anyio.to_thread.run_sync(question_of, given)
    answer: dict[str, Any] = await asyncio.shield(asked_of(service, part, question).answer)
    return answer
