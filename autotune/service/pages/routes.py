"""The pages: what a browser gets at each address, and the parts that a page asks for again.

The state of a page is in its address. A part takes the same parameters as its page, and answers
with the address to show.
"""

import json
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, TypeVar
from urllib.parse import parse_qsl, urlencode

import anyio.to_thread
from fastapi import APIRouter, HTTPException, Request
from fastapi import Path as InPath
from fastapi.responses import RedirectResponse, Response

import autotune
from autotune.analysis.pick import PREFERENCES, Preferences
from autotune.errors import AutotuneError, InvalidInput
from autotune.exporters import TARGETS
from autotune.exporters.written import composed_export
from autotune.reporting.profile_files import CODE_USE
from autotune.reporting.report import contents
from autotune.reporting.report.cards import CARDS_ON_SERVER, sections
from autotune.reporting.study_view import StudyView
from autotune.service.pages import assets, contexts, fit
from autotune.service.pages import form as forms
from autotune.service.pages.field_names import LABELS, in_fields
from autotune.service.pages.paged_trials import TrialAddress, paged_trials
from autotune.service.pages.plan import plan_text
from autotune.service.pages.rendering import render
from autotune.service.problems import Problem
from autotune.service.routes.devices import devices_of_searches
from autotune.service.routes.profiles import profile_entry
from autotune.service.routes.searches import submit as submit_search
from autotune.service.search_json import search_object
from autotune.service.state import Caller, Service, ServiceState
from autotune.service.submissions import limits_of
from autotune.service.trial_logs import Log, log_of_search, log_of_trial
from autotune.spec.queued_search import ENDED, SEARCH_STATES, QueuedSearch
from autotune.spec.result import StudyResult
from autotune.storage.tokens import OWNER
from autotune.units import format_size

router = APIRouter(include_in_schema=False)
router.include_router(assets.router)
router.include_router(fit.router)

_QUEUE_SHOWN = 100
_ENDED_SHOWN = 5
_PAGE_SIZE = 25
_MOST_COMPARED = 6
_LOG_BYTES = 64 * 1024

Name = TypeVar("Name", bound=str)
StudyName = Annotated[str, InPath(max_length=100)]
TrialNumber = Annotated[int, InPath(ge=0, le=2**31 - 1)]
SearchNumber = Annotated[int, InPath(ge=1, le=2**31 - 1)]

# -- home ------------------------------------------------------------------------------------------


@router.get("/")
def home(request: Request, service: Service) -> Response:
    """What runs, what waits, on which devices, and all studies."""
    running = service.searches.running()
    return render(
        request,
        "home.html",
        here="/",
        last_event=service.stream.position,
        **_running(service, running),
        **_queue(service),
        **_devices(request, service, running),
        **_studies(request, service),
    )


@router.get("/sign-out")
def not_signed_out() -> Response:
    """Leads home: only the button of a page, which sends a POST to the gate, signs out."""
    return RedirectResponse("/", 303)


@router.get("/parts/running")
def running_part(request: Request, service: Service) -> Response:
    return render(request, "parts/running.html", **_running(service, service.searches.running()))


@router.get("/parts/queue")
def queue_part(request: Request, service: Service) -> Response:
    return render(request, "parts/queue.html", **_queue(service))


@router.get("/parts/devices")
def devices_part(request: Request, service: Service) -> Response:
    found = _devices(request, service, service.searches.running())
    return render(request, "parts/devices.html", **found)


@router.get("/parts/studies")
def studies_part(request: Request, service: Service) -> Response:
    found = _studies(request, service)
    answer = render(request, "parts/studies.html", **found)
    shown = found["studies"]
    pairs = {"query": shown.query, "sort": shown.sort, "page": str(shown.page)}
    defaults = {"query": "", "sort": contexts.DEFAULT_SORT, "page": "1"}
    parameters = {name: value for name, value in pairs.items() if value != defaults[name]}
    return _with_address(request, answer, "/", urlencode(parameters), part="studies")


def _running(service: ServiceState, searches: Sequence[QueuedSearch]) -> dict[str, Any]:
    return {
        "running": [
            contexts.running_search(search_object(search), _result_if_begun(service, search.study))
            for search in searches
        ]
    }


def _queue(service: ServiceState) -> dict[str, Any]:
    places = service.searches.places()
    queued, _ = service.searches.find(states=("queued",), limit=_QUEUE_SHOWN, order=places)
    ended, _ = service.searches.find(states=ENDED, limit=_ENDED_SHOWN)
    rows = [search_object(search, place=places.get(search.id)) for search in queued]
    return {
        "queued": [contexts.search_row(row) for row in rows],
        "recent": [contexts.search_row(search_object(search)) for search in ended],
    }


def _devices(
    request: Request, service: ServiceState, running: Sequence[QueuedSearch]
) -> dict[str, Any]:
    found = devices_of_searches(service, request.state.caller, running)
    return {"devices": [contexts.device_row(device) for device in found["devices"]]}


def _studies(request: Request, service: ServiceState) -> dict[str, Any]:
    parameters = request.query_params
    return {
        "studies": contexts.study_list(
            service.reader.summaries_in_thread(),
            service.searches.states_of_studies(),
            query=parameters.get("query", "")[:100],
            sort=parameters.get("sort", contexts.DEFAULT_SORT),
            page=_page_wanted(request),
        )
    }


def _page_wanted(request: Request) -> int:
    page = request.query_params.get("page", "")
    return int(page) if page.isascii() and page.isdigit() and 0 < len(page) < 8 else 1


# -- all searches, and who did what ----------------------------------------------------------------


@router.get("/searches")
def searches(request: Request, service: Service) -> Response:
    """All searches, those in one state, or those of one person."""
    return render(
        request,
        "searches.html",
        here="/searches",
        last_event=service.stream.position,
        **_searches(request, service),
    )


@router.get("/parts/searches")
def searches_part(request: Request, service: Service) -> Response:
    found = _searches(request, service)
    answer = render(request, "parts/searches.html", **found)
    parameters = {name: value for name, value in found["asked"].items() if value}
    if found["shown"].page > 1:
        parameters["page"] = found["shown"].page
    return _with_address(request, answer, "/searches", urlencode(parameters), part="searches")


def _searches(request: Request, service: ServiceState) -> dict[str, Any]:
    people = sorted({*service.searches.people(), request.state.caller.name})
    state = _one_of(SEARCH_STATES, request.query_params.get("state"))
    by = _one_of(people, request.query_params.get("by"))
    places = service.searches.places()
    find = partial(service.searches.find, states=(state,) if state else (), by=by, order=places)
    shown = _page(request, find)
    return {
        "shown": shown,
        "rows": [
            contexts.search_row(search_object(search, place=places.get(search.id)))
            for search in shown.rows
        ],
        "asked": {"state": state or "", "by": by or ""},
        "states": contexts.STATES,
        "people": people,
    }


@router.get("/actions")
def actions(request: Request, service: Service) -> Response:
    """Who submitted, cancelled, renamed or deleted what, newest first."""
    people = service.tokens.people()
    who = _one_of(people, request.query_params.get("who"))
    return render(
        request,
        "actions.html",
        here="",
        last_event=service.stream.position,
        shown=_page(request, partial(service.tokens.actions, who=who)),
        asked={"who": who or ""},
        people=people,
        moment_text=contexts.moment_text,
    )


def _one_of(known: Iterable[Name], wanted: str | None) -> Name | None:
    """Returns what an address asks for; None, for everything, where there is no such thing."""
    return next((name for name in known if name == wanted), None)


def _page(request: Request, find: Callable[..., tuple[list[Any], int]]) -> contexts.Page:
    """Returns the page that the address asks for; past the last it is the last."""
    page = max(1, _page_wanted(request))
    rows, total = find(limit=_PAGE_SIZE, offset=(page - 1) * _PAGE_SIZE)
    pages = max(1, -(-total // _PAGE_SIZE))
    if page > pages:
        page = pages
        rows, total = find(limit=_PAGE_SIZE, offset=(page - 1) * _PAGE_SIZE)
    return contexts.Page(rows=rows, page=page, pages=pages, total=total)


# -- a new search ----------------------------------------------------------------------------------


@router.get("/new")
def new_search(request: Request, service: Service) -> Response:
    """The form, filled with the parameters of the address."""
    filled = forms.filled(dict(request.query_params))
    return _form_page(request, service, filled.form, problem=None)


@router.post("/new")
async def submit(request: Request, service: Service) -> Response:
    """Queues the search, or shows the form again with what is wrong; nothing typed is lost."""
    given = await _form_fields(request)
    filled = forms.filled(given)
    show_again = partial(_form_page, request, service)
    if not filled.is_valid:
        return await anyio.to_thread.run_sync(partial(show_again, filled.form, problem=None))
    queue = partial(
        submit_search,
        service=service,
        caller=request.state.caller,
        response=Response(),
        body=dict(filled.body),
        key=forms.key_of(given.get("key", ""), filled.body),
    )
    try:
        search = await anyio.to_thread.run_sync(queue)
    except InvalidInput as error:
        form = forms.with_error(given, error)
        problem = None if form.wrong else error
        return await anyio.to_thread.run_sync(partial(show_again, form, problem=problem))
    return RedirectResponse(f"/searches/{search['id']}", 303)


@router.post("/new/plan")
async def plan_part(request: Request, service: Service) -> Response:
    """What the form would try, and how long it takes."""
    given = await _form_fields(request)
    filled = forms.filled(given)
    if not filled.is_valid:
        first = filled.form.wrong[0]
        error = InvalidInput(f"{first.label}: {first.error}", hint=first.hint)
        return render(request, "parts/plan.html", plan=plan_text(error))
    try:
        order = await anyio.to_thread.run_sync(service.dry_run_order, filled.body)
        answer = await service.quick.ask("dry-run", order)
    except AutotuneError as error:
        return render(request, "parts/plan.html", plan=plan_text(error))
    return render(request, "parts/plan.html", plan=plan_text(answer))


async def _form_fields(request: Request) -> dict[str, str]:
    body = (await request.body()).decode("utf-8", errors="replace")
    return dict(parse_qsl(body, keep_blank_values=True, max_num_fields=500))


def _form_page(
    request: Request, service: ServiceState, form: forms.Form, *, problem: InvalidInput | None
) -> Response:
    is_wrong = problem is not None or bool(form.wrong)
    return render(
        request,
        "new.html",
        status=422 if is_wrong else 200,
        here="/new",
        last_event=service.stream.position,
        form=form,
        limits={
            keyword: in_fields(text)
            for keyword, text in limits_of(service.rules({})).items()
            if keyword in LABELS
        },
        limits_of_person=list(service.settings.limits_of_person()),
        problem=problem,
        key=secrets.token_urlsafe(16),
    )


# -- one search ------------------------------------------------------------------------------------


@router.get("/searches/{number}")
def search_page(request: Request, service: Service, number: SearchNumber) -> Response:
    """What was asked for and its log; leads to the study once there is one."""
    search = service.searches.get(number)
    has_study = service.store.has_study(search.study)
    if has_study and "log" not in request.query_params:
        return RedirectResponse(f"/studies/{search.study}", 303)
    return render(
        request,
        "search.html",
        here="",
        last_event=service.stream.position,
        has_study=has_study,
        **_log_shown(
            partial(log_of_search, service, request.state.caller, number),
            no_log="Its processes have written nothing." if search.run else "It has not begun.",
        ),
        request_facts=[
            (name.replace("_", " "), _value_text(value)) for name, value in search.request.items()
        ],
        **_state(service, search, search.study),
    )


@router.get("/searches/{number}/parts/state")
def search_state_part(request: Request, service: Service, number: SearchNumber) -> Response:
    search = service.searches.get(number)
    answer = render(request, "parts/state.html", **_state(service, search, search.study))
    if "log" not in request.query_params and service.store.has_study(search.study):
        answer.headers["HX-Redirect"] = f"/studies/{search.study}"
    return answer


def _value_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _state(service: ServiceState, search: QueuedSearch | None, study: str) -> dict[str, Any]:
    row = None
    if search is not None:
        places = service.searches.places() if search.state == "queued" else {}
        row = contexts.search_row(search_object(search, place=places.get(search.id)))
    of_name = OWNER if search is None else search.submitted_by
    owner = service.searches.owner_of(study) or of_name
    return {"search": row, "owner": owner}


# -- one study -------------------------------------------------------------------------------------


@router.get("/studies/{name}")
def study(request: Request, service: Service, name: StudyName) -> Response:
    """The answer, the front, and everything behind it."""
    if "increase" in request.query_params:
        return RedirectResponse(_with_share(request), 303)
    preferences = _preferences(request)
    others = [other for other in service.store.names() if other != name]
    return render(
        request,
        "study.html",
        here="",
        last_event=service.stream.position,
        layout="base.html",
        cards=CARDS_ON_SERVER,
        figures={},
        sources={
            card.id: service.settings.root_path + _figure_address(name, card.id, preferences)
            for card in CARDS_ON_SERVER
        },
        sections=[*sections(CARDS_ON_SERVER), ("compare", "Compare")],
        preferred=preferences,
        prefer_choices=PREFERENCES,
        others=others[::-1],
        files=None,
        **_report(service, name, preferences),
        **_state(service, service.searches.latest_of(name), name),
        **_trials(request, service, name, preferences),
    )


@router.get("/studies/{name}/parts/state")
def state_part(request: Request, service: Service, name: StudyName) -> Response:
    latest = service.searches.latest_of(name)
    return render(request, "parts/state.html", **_state(service, latest, name))


@router.get("/studies/{name}/parts/answer")
def answer_part(request: Request, service: Service, name: StudyName) -> Response:
    return render(request, "answer.html", **_report(service, name, _preferences(request)))


@router.get("/studies/{name}/parts/front")
def front_part(request: Request, service: Service, name: StudyName) -> Response:
    return render(request, "front.html", **_report(service, name, _preferences(request)))


@router.get("/studies/{name}/parts/trials")
def trials_part(request: Request, service: Service, name: StudyName) -> Response:
    preferences = _preferences(request)
    pairs = contexts.preference_pairs(preferences)
    found = _trials(request, service, name, preferences)
    answer = render(request, "parts/trials.html", **found)
    parameters = "&".join(filter(None, (urlencode(pairs), found["trials"].address.text())))
    return _with_address(request, answer, f"/studies/{name}", parameters, part="trial-list")


@router.get("/studies/{name}/parts/filter")
def filter_part(request: Request, service: Service, name: StudyName) -> Response:
    found = _trials(request, service, name, _preferences(request))
    return render(request, "parts/filter.html", **found)


@router.get("/studies/{name}/parts/numbers/{kind}")
def numbers_part(request: Request, service: Service, name: StudyName, kind: str) -> Response:
    """The numbers of a figure, as a table."""
    preferences = _preferences(request)
    tables = service.reader.part_in_thread(name, preferences, "numbers", _tables_of_figures)
    return render(request, "parts/numbers.html", table=tables.get(kind), kind=kind)


def _tables_of_figures(view: StudyView) -> Mapping[str, Any]:
    # It imports plotly, half a second that the start of the server does without.
    from autotune.reporting.report.figures import figures_of  # noqa: PLC0415

    return {kind: figure.table for kind, figure in figures_of(view).items()}


@router.get("/studies/{name}/parts/files/{number}/{target}")
def files_part(
    request: Request, service: Service, name: StudyName, number: TrialNumber, target: str
) -> Response:
    return render(request, "parts/files.html", files=_files(service, name, number, target))


def _trials(
    request: Request, service: ServiceState, name: str, preferences: Preferences
) -> dict[str, Any]:
    address = TrialAddress.of(request.query_params.multi_items())
    pairs = contexts.preference_pairs(preferences)
    trials = service.reader.part_in_thread(
        name,
        preferences,
        f"trials {address.text()}",
        lambda view: paged_trials(view.result, address),
    )
    return {
        "trials": trials,
        "study_name": name,
        "preference_pairs": pairs,
        "preferences": urlencode(pairs),
    }


def _files(service: ServiceState, name: str, number: int, target: str) -> dict[str, Any]:
    """Returns the files of a trial for a trainer, or the sentence that says why there are none."""
    if target not in TARGETS:
        raise HTTPException(404)
    result = _view(service, name, Preferences()).result
    shown: dict[str, Any] = {"error": "", "hint": ""}
    try:
        written = composed_export(result, result.trial(number), target)
    except AutotuneError as error:
        return {"error": contexts.sentence(error.message), "hint": contexts.sentence(error.hint)}
    sections = [
        (title, lines) for title, lines in written.sections() if not title.startswith("Use it")
    ]
    return shown | {
        "study": name,
        "target": target,
        "title": TARGETS[target].title,
        "trial": number,
        "command": written.content.command,
        "sections": sections,
        "files": list(written.content.files.items()),
    }


# -- one trial -------------------------------------------------------------------------------------


@router.get("/studies/{name}/trials/{number}")
def trial(request: Request, service: Service, name: StudyName, number: TrialNumber) -> Response:
    """Everything that is known of a trial, and its log."""
    result = _view(service, name, Preferences()).result
    known = {record.number for record in result.trials}
    if number not in known:
        raise HTTPException(404)
    target = request.query_params.get("export")
    return render(
        request,
        "trial.html",
        here="",
        last_event=service.stream.position,
        trial=contexts.trial_page(result, number),
        address=f"{service.settings.root_path}/studies/{name}",
        study_name=name,
        number=number,
        **_log_shown(partial(log_of_trial, service, request.state.caller, name, number)),
        **_profile(service, request.state.caller, name, number),
        format_size=format_size,
        code_use=CODE_USE,
        viewers="https://",
        files=_files(service, name, number, target) if target else None,
    )


def _log_shown(
    read: Callable[..., Log | None], *, no_log: str = "It has not begun."
) -> dict[str, Any]:
    """Returns the end of a log, or why there is none; `no_log` where nobody has written one."""
    try:
        log = read(most_bytes=_LOG_BYTES)
    except Problem as problem:
        return {"log": None, "no_log": contexts.sentence(problem.detail)}
    return {"log": None if log is None else log.text, "no_log": no_log}


def _profile(service: ServiceState, caller: Caller, name: str, number: int) -> dict[str, Any]:
    """Returns the profile of a trial, or why there is none."""
    try:
        return {"profile": profile_entry(service, caller, name, number), "no_profile": ""}
    except Problem as problem:
        return {"profile": None, "no_profile": contexts.sentence(problem.detail)}


# -- comparison, reference -------------------------------------------------------------------------


@router.get("/compare")
def compare(request: Request, service: Service) -> Response:
    """Fronts and picks of several studies next to each other."""
    given = [name for name in request.query_params.getlist("study") if name]
    chosen = list(dict.fromkeys(given))[:_MOST_COMPARED]
    compared, error, hint = None, "", ""
    if chosen:
        try:
            views = [_view(service, name, Preferences()) for name in chosen]
            compared = _comparison(views)
        except InvalidInput as problem:
            error, hint = contexts.sentence(problem.message), contexts.sentence(problem.hint)
    return render(
        request,
        "compare.html",
        here="/compare",
        last_event=service.stream.position,
        chosen=chosen,
        names=service.store.names()[::-1],
        slots=min(_MOST_COMPARED, max(2, len(chosen) + 1)),
        compared=compared,
        error=error,
        hint=hint,
        address=urlencode([("study", name) for name in chosen]),
    )


def _comparison(views: Sequence[StudyView]) -> Any:
    # It imports plotly, half a second that the start of the server does without.
    from autotune.reporting.figures import comparison  # noqa: PLC0415

    return comparison.compute(views)


# -- shared ----------------------------------------------------------------------------------------


def _report(service: ServiceState, name: str, preferences: Preferences) -> dict[str, Any]:
    compute = partial(contents.compute, version=autotune.__version__, preferences=preferences)
    return {
        "report": service.reader.part_in_thread(name, preferences, "page", compute),
        "address": f"{service.settings.root_path}/studies/{name}",
        "is_live": True,
    }


def _figure_address(name: str, kind: str, preferences: Preferences) -> str:
    pairs = urlencode(contexts.preference_pairs(preferences))
    return f"/api/v1/studies/{name}/figures/{kind}" + (f"?{pairs}" if pairs else "")


def _view(service: ServiceState, name: str, preferences: Preferences) -> StudyView:
    return service.reader.view_in_thread(name, preferences)


def _result_if_begun(service: ServiceState, study: str) -> StudyResult | None:
    if not study or not service.store.has_study(study):
        return None
    return _view(service, study, Preferences()).result


def _preferences(request: Request) -> Preferences:
    """Returns the preferences of the address. Raises InvalidInput."""
    given: dict[str, Any] = {}
    parameters = request.query_params
    if parameters.get("prefer"):
        given["prefer"] = parameters["prefer"]
    increase = parameters.get("max_perplexity_increase")
    if increase:
        try:
            given["max_perplexity_increase"] = float(increase)
        except ValueError:
            raise InvalidInput(
                f"{increase!r} is not a number", hint="give a share, for example 0.01 for 1 %"
            ) from None
    return Preferences(**given)


def _with_share(request: Request) -> str:
    """Returns the address with the percent of the form as the share that programs use."""
    pairs = [
        (name, value)
        for name, value in request.query_params.multi_items()
        if name not in ("increase", "max_perplexity_increase")
    ]
    percent = request.query_params["increase"]
    try:
        share = f"{float(percent) / 100:.10g}"
    except ValueError:
        share = percent
    default = f"{Preferences().max_perplexity_increase:g}"
    if percent and share != default:
        pairs.append(("max_perplexity_increase", share))
    pairs = [pair for pair in pairs if pair != ("prefer", Preferences().prefer)]
    return f"{request.url.path}?{urlencode(pairs)}" if pairs else request.url.path


def _with_address(
    request: Request, answer: Response, path: str, parameters: str, *, part: str
) -> Response:
    """Let the browser show the address of the page with this part, unless it was only refreshed."""
    if request.headers.get("hx-trigger") != part:
        answer.headers["HX-Replace-Url"] = f"{path}?{parameters}" if parameters else path
    return answer
