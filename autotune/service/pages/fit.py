"""The page that says whether a training fits a card: its address holds the whole question.

So an address can be sent to others, who see the same. Each part of the answer is asked for by
itself, the quick ones first, and says what is done until it is there.
"""

import secrets
from collections.abc import Mapping
from functools import partial
from typing import Any
from urllib.parse import urlencode

import anyio.to_thread
from fastapi import APIRouter, Request
from fastapi.responses import RedirectResponse, Response

from autotune.errors import AutotuneError, InvalidInput
from autotune.service.pages.field_names import LABELS_OF_FIT
from autotune.service.pages.fit_text import FitText, fit_text
from autotune.service.pages.form import key_of
from autotune.service.pages.rendering import render
from autotune.service.routes.searches import submit
from autotune.service.routes.will_it_fit import asked_of, question_of
from autotune.service.state import Service, ServiceState
from autotune.spec.data_sheets import DATA_SHEETS, sheet_of
from autotune.spec.setting import options_of
from autotune.study.prediction.pasted import LARGEST_ADDRESS, Part, PastedTraining, ways_to_train

router = APIRouter(include_in_schema=False)

PARTS: Mapping[Part, str] = {
    "least": "A bound from shapes",
    "peak": "The peak",
    "front": "What else would fit",
    "longest": "The longest sequence",
}
"""{part of the answer: its heading}, in the order of the page."""


@router.get("/fit")
async def fit_page(request: Request, service: Service) -> Response:
    """The form, and with a text the parts of the answer."""
    given, problem = _given(request.query_params), None
    if given.get("text"):
        try:
            await anyio.to_thread.run_sync(question_of, given)
        except InvalidInput as error:
            problem = error
    return await anyio.to_thread.run_sync(partial(_page, request, service, given, problem=problem))


@router.get("/fit/parts/{part}")
async def fit_part(request: Request, service: Service, part: Part) -> Response:
    """A part of the answer, or what is done until it is there; the page then asks again."""
    given = _given(request.query_params)
    text: FitText | None = None
    problem: AutotuneError | None = None
    progress = ""
    try:
        question = await anyio.to_thread.run_sync(question_of, given)
        asked = asked_of(service, part, question)
        if asked.answer.done():
            text = fit_text(part, asked.answer.result())
        else:
            progress = asked.progress or "Waiting for its turn"
    except AutotuneError as error:
        problem = error
    return render(
        request,
        "parts/fit.html",
        part=part,
        labels=LABELS_OF_FIT,
        title=PARTS[part],
        question=urlencode(given),
        text=text,
        progress=progress,
        problem=problem,
    )


@router.post("/fit/search")
async def search_it(request: Request, service: Service) -> Response:
    """Queues a search that starts from the training, under its cap, and leads to it."""
    given = _given(request.query_params)
    key = key_of(request.query_params.get("key", ""), given)

    def queue() -> Mapping[str, Any]:
        return submit(
            service=service,
            caller=request.state.caller,
            response=Response(),
            body=question_of(given).submission(),
            key=key,
        )

    try:
        search = await anyio.to_thread.run_sync(queue)
    except InvalidInput as error:
        return _page(request, service, given, problem=error)
    return RedirectResponse(f"/searches/{search['id']}", 303)


def _page(
    request: Request,
    service: ServiceState,
    given: Mapping[str, str],
    *,
    problem: InvalidInput | None,
) -> Response:
    options = options_of(PastedTraining)
    is_asked = bool(given.get("text")) and problem is None
    return render(
        request,
        "fit.html",
        status=200 if problem is None else 422,
        here="/fit",
        last_event=service.stream.position,
        given={name: given.get(name, "") for name in options},
        card=given.get("card") or _usual_card(service, is_asked=bool(given.get("text"))),
        problem=problem,
        parts=PARTS if is_asked else {},
        question=urlencode(given),
        cards=DATA_SHEETS,
        ways=tuple(ways_to_train()),
        options=options,
        labels=LABELS_OF_FIT,
        longest=LARGEST_ADDRESS,
        key=secrets.token_urlsafe(16),
    )


def _usual_card(service: ServiceState, *, is_asked: bool) -> str:
    """Returns the card that is chosen for now: the largest group's; that of the answer once asked.

    A group of a kind without a data sheet, and one of CPUs, leaves it to the default.
    """
    group = None if is_asked else service.largest_group()
    sheet = None if group is None else sheet_of(group.kind)
    usual = options_of(PastedTraining)["card"].default
    return next((name for name, known in DATA_SHEETS.items() if known is sheet), str(usual))


def _given(parameters: Mapping[str, str]) -> dict[str, str]:
    """Returns the parameters of an address that are part of the question, without empty ones."""
    return {name: parameters[name] for name in options_of(PastedTraining) if parameters.get(name)}
