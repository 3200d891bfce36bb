"""`autotune.Client`: everything that a server does, as calls."""

import copy
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import autotune
from autotune.analysis.pick import DEFAULT_PREFERENCES, Preferences, chosen_trial
from autotune.client.address import server_address, token_for
from autotune.client.connection import Connection, reading_answer
from autotune.client.events import ServerEvent, events_of
from autotune.client.searches import (
    RemoteSearch,
    preference_parameters,
    search_of,
    submission,
    with_model_content,
)
from autotune.client.study_json import record_of, result_of
from autotune.errors import InvalidInput
from autotune.exporters.export import Export
from autotune.exporters.written import WrittenExport, version_of, write_files
from autotune.printable import printable_values
from autotune.reporting.figures import FigureOptions
from autotune.result import Result
from autotune.spec.prediction import Prediction
from autotune.spec.reading import parse
from autotune.spec.result import TrialRecord
from autotune.spec.setting import options_of
from autotune.spec.study import RESULTS_FOLDER

if TYPE_CHECKING:
    import plotly.graph_objects as go

    from autotune.analysis.explanation import Explanation
    from autotune.reporting.study_view import StudyView

_SILENCE_AFTER_END_SECONDS = 10.0
"""A search that has ended for so long without the event of it has none any more."""


class Client:
    """A server of autotune, at the URL that `autotune serve` prints.

    Without `token`, that of the URL (`?token=`), of the variable AUTOTUNE_TOKEN or of
    `~/.config/autotune/tokens.toml` is used. Nothing is sent before the first call. Every call
    raises AutotuneError: what the server rejects as the same class as on the server, with the same
    message and hint, and ServerUnreachable where there is no answer. A client is also a context
    manager, which closes its connections.
    """

    def __init__(self, url: str, token: str | None = None) -> None:
        address = server_address(url)
        self.url = address.url
        """Without the token."""
        token = token or address.token or token_for(address.url)
        self._connection = Connection(self.url, token=token, version=autotune.__version__)

    def __enter__(self) -> "Client":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<autotune server at {self.url}>"

    def close(self) -> None:
        """Close the connections; the next call opens new ones."""
        self._connection.close()

    def patient(self, on_wait: Callable[[str], None] = lambda message: None) -> "Client":
        """Returns a client of the same server whose calls hold out while that is away.

        A server that this client has reached, also one that answers that its database is away, may
        be away for five minutes. Only then do calls that change nothing, and `submit` and
        `continue_search`, raise ServerUnreachable or StorageUnreachable; a download of a profile's
        file raises at once. `on_wait` is told of each
        outage once. Close it, or use it as a context manager.
        """
        other = copy.copy(self)
        other._connection = self._connection.patient(on_wait)
        return other

    # -- searches ----------------------------------------------------------------------------------

    def submit(
        self,
        *,
        preferences: Preferences = DEFAULT_PREFERENCES,
        **settings: Any,
    ) -> RemoteSearch:
        """Put a search in the queue, and return it; the server runs it when it is its turn.

        Takes the settings of `autotune.search`, apart from `storage`, `listener` and
        `should_stop`, and `priority`, `group` and `kind` (of device). Of two searches that wait for
        the same `group` of devices the one with the higher `priority`, from -100 to 100, runs
        first. A search space and a model's config.json may be files here; datasets and scripts are
        files of the server.
        """
        body = submission(settings, preferences=preferences)
        # With the key, a repetition after a lost answer does not submit it again.
        answer = self._connection.json(
            "POST", "/searches", body=body, idempotency_key=str(uuid.uuid4())
        )
        return self._search(answer)

    def search(self, id: int) -> RemoteSearch:
        """Returns the search of that number."""
        return self._search(self._connection.json("GET", f"/searches/{id:d}"))

    def searches(
        self,
        *,
        state: str | None = None,
        study: str | None = None,
        limit: int | None = None,
        offset: int | None = None,
    ) -> list[RemoteSearch]:
        """Returns the searches: those in the queue in its order, then the others, newest first."""
        parameters = {"state": state, "study": study, "limit": limit, "offset": offset}
        answer = self._connection.json("GET", "/searches", parameters=parameters)
        return [self._search(each) for each in _objects(answer, "searches")]

    def cancel(self, id: int) -> RemoteSearch:
        """End a search that is queued or runs; its trials are kept, and it can be continued."""
        return self._search(self._connection.json("POST", f"/searches/{id:d}/cancel"))

    def continue_search(
        self,
        id: int,
        *,
        name: str | None = None,
        trials: int | None = None,
        time_budget: str | float | None = None,
    ) -> RemoteSearch:
        """Put a search in the queue that continues the study of one that has ended.

        The study of somebody else is continued by a study of your own, by its `name`, which takes
        over what was measured.
        """
        wanted = {"name": name, "trials": trials, "time_budget": time_budget}
        body = {name: value for name, value in wanted.items() if value is not None}
        answer = self._connection.json(
            "POST", f"/searches/{id:d}/continue", body=body, idempotency_key=str(uuid.uuid4())
        )
        return self._search(answer)

    def set_priority(self, id: int, priority: int) -> RemoteSearch:
        """Change the place of a queued search: those with a higher priority run first.

        A priority above 0 is for admins.
        """
        answer = self._connection.json("PATCH", f"/searches/{id:d}", body={"priority": priority})
        return self._search(answer)

    def remove(self, id: int) -> None:
        """Take a search that has ended off the list; its study stays."""
        self._connection.json("DELETE", f"/searches/{id:d}")

    def search_log(self, id: int) -> str:
        """Returns the end of what the process of a search has printed."""
        return self._connection.send("GET", f"/searches/{id:d}/log").text

    def watch(
        self,
        id: int,
        *,
        after: int = 0,
        on_wait: Callable[[str], None] = lambda message: None,
    ) -> Iterator[ServerEvent]:
        """Yield the events of a search until it has ended, each once and in their order.

        The last one is of the kind `search` and has the search as it ended. `after` is the number
        of the last event that is known already. Where the stream breaks it goes on after the last
        event; the server may be away for five minutes, as for a `patient` client, which `on_wait`
        is told. An event `reset` says that older events are gone: read the study with `show`.
        """
        with self.patient(on_wait) as patient:
            stream = events_of(patient._connection, parameters={"search": id}, after=after)
            ended_at: float | None = None
            for event in stream:
                if isinstance(event, ServerEvent):
                    ended_at = None
                    yield event
                    if event.kind == "search" and self._search(event.data).has_ended:
                        return
                is_reset = isinstance(event, ServerEvent) and event.kind == "reset"
                if isinstance(event, ServerEvent) and not is_reset:
                    continue
                # The event of its end may be among those that are gone.
                now = patient.search(id)
                if now.has_ended:
                    ended_at = ended_at or time.monotonic()
                    if is_reset or time.monotonic() - ended_at > _SILENCE_AFTER_END_SECONDS:
                        yield ServerEvent(id=0, kind="search", data=now.answer)
                        return

    def wait(self, id: int) -> RemoteSearch:
        """Returns a search once it has ended; an outage is waited out as by `watch`."""
        with self.patient() as patient:
            for event in patient.watch(id):
                if event.kind == "search" and self._search(event.data).has_ended:
                    break
            return patient.search(id)

    def _search(self, answer: Mapping[str, Any]) -> RemoteSearch:
        return search_of(answer, server=self.url)

    # -- studies -----------------------------------------------------------------------------------

    def studies(
        self,
        *,
        query: str | None = None,
        sort: str | None = None,
        limit: int | None = None,
        offset: int | None = None,
    ) -> list[Mapping[str, Any]]:
        """Returns the studies, each as the server describes it: name, created_at, trials, state."""
        parameters = {"query": query, "sort": sort, "limit": limit, "offset": offset}
        answer = self._connection.json("GET", "/studies", parameters=parameters)
        return _objects(answer, "studies")

    def show(self, study: str, *, preferences: Preferences = DEFAULT_PREFERENCES) -> "RemoteResult":
        """Returns the records of a study with its front and pick. Raises UnknownStudy."""
        values = self.study_json(study, preferences=preferences)
        return RemoteResult(
            **vars(result_of(values)), preferences=preferences, _client=self, _answer=values
        )

    def study_json(
        self, study: str, *, preferences: Preferences = DEFAULT_PREFERENCES
    ) -> dict[str, Any]:
        """Returns the JSON object that `autotune show --json` prints on the server."""
        values: dict[str, Any] = self._connection.json(
            "GET", _path(study), parameters=preference_parameters(preferences)
        )
        return values

    def trial(self, study: str, number: int) -> TrialRecord:
        """Returns the record of one trial."""
        return record_of(self._connection.json("GET", f"{_path(study)}/trials/{number:d}"))

    def trial_log(self, study: str, number: int) -> str:
        """Returns the end of what the process of a trial has printed."""
        return self._connection.send("GET", f"{_path(study)}/trials/{number:d}/log").text

    def report(self, study: str, *, preferences: Preferences = DEFAULT_PREFERENCES) -> bytes:
        """Returns a study as one HTML page that opens offline."""
        parameters = preference_parameters(preferences)
        return self._connection.send("GET", f"{_path(study)}/report", parameters=parameters).content

    def figure(
        self,
        study: str,
        kind: str = "pareto",
        *,
        x: str | None = None,
        y: str | None = None,
        three_d: bool = False,
        feasible: bool = False,
        trials: Sequence[int] | None = None,
        trial: int | None = None,
        preferences: Preferences = DEFAULT_PREFERENCES,
    ) -> "go.Figure":
        """Returns a figure of a study as a plotly figure; the kinds are those of `Result.plot`."""
        options = {
            "x": x,
            "y": y,
            "three_d": "true" if three_d else None,
            "feasible": "true" if feasible else None,
            "trials": None if trials is None else ",".join(map(str, trials)),
            "trial": trial,
        }
        path = f"{_path(study)}/figures/{quote(kind, safe='')}"
        return self._figure(path, {**preference_parameters(preferences), **options})

    def compare(self, *studies: str) -> "go.Figure":
        """Returns a figure with the fronts of several studies."""
        return self._figure("/compare", {"study": list(studies)})

    def _figure(self, path: str, parameters: Mapping[str, Any]) -> "go.Figure":
        import plotly.graph_objects as go  # noqa: PLC0415  # 0.1 s, only for figures

        answer = self._connection.json("GET", path, parameters=parameters)
        with reading_answer():
            return go.Figure(printable_values(answer))

    def export(
        self,
        study: str,
        to: str,
        *,
        trial: int | None = None,
        out: str | Path | None = None,
        target_version: str | None = None,
        strict: bool = False,
        overwrite: bool = False,
        preferences: Preferences = DEFAULT_PREFERENCES,
    ) -> WrittenExport:
        """Write a trial's configuration, by default the pick's, for another trainer.

        The files are those of the server; they are written to `out` on this machine, by default to
        `studies/STUDY-TARGET-TRIAL`. Raises InvalidInput, also for a name of a file that leads out
        of the folder, IllegalConfiguration and StorageUnavailable.
        """
        result = self.show(study, preferences=preferences)
        record = chosen_trial(result, trial)
        parameters = {
            "trial": record.number,
            "version": target_version,
            "strict": "true" if strict else None,
        }
        answer = self._connection.json(
            "GET", f"{_path(study)}/exports/{quote(to, safe='')}", parameters=parameters
        )
        folder = Path(out) if out is not None else RESULTS_FOLDER / f"{study}-{to}-{record.number}"
        with reading_answer():
            values = {
                "files": {_checked_name(file["name"]): file["text"] for file in answer["files"]},
                "command": answer["command"],
                "unsupported": answer["refusals"],
                "notes": answer["notes"],
            }
            content = parse(Export, values, ignore_unknown=True)
        write_files(content, folder, overwrite=out is None or overwrite)
        return WrittenExport(
            target=to,
            target_version=answer.get("target_version") or version_of(to, target_version),
            record=record,
            folder=folder,
            content=content,
        )

    def rename(self, study: str, name: str) -> None:
        """Give a study another name."""
        self._connection.json("PATCH", _path(study), body={"name": name})

    def delete(self, study: str, *, confirm: str | None = None) -> Mapping[str, Any]:
        """Delete a study, in two calls.

        The first returns what will be deleted, and the code `confirm`. With that code, the second
        writes the study to a file on the server, deletes it and returns the file's name as
        `exported_to`.
        """
        answer = self._connection.send(
            "DELETE", _path(study), parameters={"confirm": confirm}, expected=(409,)
        )
        with reading_answer():
            content: Mapping[str, Any] = dict(answer.json())
        if answer.status_code == 409 and (confirm is not None or "confirm" not in content):
            self._connection.check(answer)
        return content

    # -- quick calls -------------------------------------------------------------------------------

    def predict(self, study: str | None = None, **settings: Any) -> Prediction:
        """Predict the peak memory of one configuration, with the parameters of `autotune.predict`.

        Raises PredictionImpossible for a model that cannot run on fake tensors.
        """
        body = _question({**settings, "study": study}, _OF_A_PREDICTION)
        answer = self._connection.json("POST", "/predict", body=body)
        with reading_answer():
            return parse(Prediction, answer, ignore_unknown=True)

    def fit(self, study: str | None = None, **settings: Any) -> Mapping[str, Any]:
        """Find what fits under a memory cap, with the parameters of `autotune.fit`.

        Returns the JSON object that `autotune fit --json` prints.
        """
        found: Mapping[str, Any] = self._connection.json(
            "POST", "/fit", body=_question({**settings, "study": study}, _OF_A_FIT)
        )
        return found

    def dry_run(
        self, *, preferences: Preferences = DEFAULT_PREFERENCES, **settings: Any
    ) -> Mapping[str, Any]:
        """Returns what a search with these settings would do; see `submit` for the settings."""
        body = submission(settings, preferences=preferences)
        found: Mapping[str, Any] = self._connection.json("POST", "/dry-run", body=body)
        return found

    # -- the server --------------------------------------------------------------------------------

    def devices(self) -> list[Mapping[str, Any]]:
        """Returns the devices of the server, with the memory in use and the searches on them."""
        return _objects(self._connection.json("GET", "/devices"), "devices")

    def actions(
        self, *, limit: int | None = None, offset: int | None = None
    ) -> list[Mapping[str, Any]]:
        """Returns who did what, newest first."""
        parameters = {"limit": limit, "offset": offset}
        answer = self._connection.json("GET", "/actions", parameters=parameters)
        return _objects(answer, "actions")

    def health(self) -> Mapping[str, Any]:
        """Returns version, role and whether the server reaches its database; needs no token."""
        found: Mapping[str, Any] = self._connection.json("GET", "/health")
        return found


@dataclass(frozen=True, kw_only=True, repr=False)
class RemoteResult(Result):
    """The result of a study on a server, which makes its figures, its report and its exports."""

    _client: Client
    _answer: Mapping[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """Returns the JSON object that the server has sent."""
        return dict(self._answer)

    def view(self) -> "StudyView":
        """Raise InvalidInput: the definition of the study stays on the server."""
        raise InvalidInput(
            f"the database of study {self.study!r} is that of the server",
            hint="plot, write_report and export ask the server; autotune studies export, on the "
            "server, writes the whole study to a file",
        )

    def explain(
        self, trial: int | None = None, *, torch_version: str | None = None
    ) -> "Explanation":
        """Raise InvalidInput: an explanation needs the definition of the study."""
        raise InvalidInput(
            f"study {self.study!r} is explained where it is stored",
            hint=f"run autotune explain {self.study} on the server",
        )

    def figure(self, kind: str, options: FigureOptions) -> "go.Figure":
        """Returns a figure of the study, which the server draws. Raises InvalidInput."""
        chosen = {name: getattr(options, name) for name in options_of(FigureOptions)}
        return self._client.figure(self.study, kind, preferences=self.preferences, **chosen)

    def report(self) -> bytes:
        """Returns the page of the server's report."""
        return self._client.report(self.study, preferences=self.preferences)

    def export(
        self,
        to: str,
        *,
        trial: int | None = None,
        out: str | Path | None = None,
        target_version: str | None = None,
        strict: bool = False,
        overwrite: bool = False,
    ) -> WrittenExport:
        """Write a trial's configuration, by default the pick's, with the files of the server."""
        return self._client.export(
            self.study,
            to,
            trial=trial,
            out=out,
            target_version=target_version,
            strict=strict,
            overwrite=overwrite,
            preferences=self.preferences,
        )


def _objects(answer: Any, name: str) -> list[Mapping[str, Any]]:
    """Returns the list of objects of that name in an answer. Raises InvalidInput for another."""
    with reading_answer():
        return [dict(each) for each in answer[name]]


def _path(study: str) -> str:
    """Returns the path of a study; its name may have any characters in an old database."""
    if study in ("", ".", ".."):
        raise InvalidInput(f"{study!r} cannot be a study's name", hint="see autotune studies")
    return f"/studies/{quote(study, safe='')}"


_OF_A_PREDICTION = (
    "study",
    "trial",
    "device",
    "configuration",
    "compute_capability",
    "torch_version",
)
_OF_A_FIT = (*_OF_A_PREDICTION, "max_mem", "vary", "space", "scale", "context")


def _question(settings: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Returns the body of a quick call: its settings `names`, and in `workload` the others."""
    given = {name: value for name, value in settings.items() if value is not None}
    body = {name: given.pop(name) for name in names if name in given}
    return {**body, "workload": with_model_content(given)} if given else body


def _checked_name(name: str) -> str:
    """Returns the name of a file of an export. Raises InvalidInput for one that leads elsewhere.

    All files of an export lie in its folder itself.
    """
    if (
        not isinstance(name, str)
        or not name
        or name in (".", "..")
        or any(letter in name for letter in "/\\\0:")
        or not name.isprintable()
    ):
        raise InvalidInput(
            f"the server has sent a file named {name!r}, which would lie outside the folder",
            hint="nothing was written; make sure that this is the server that you mean",
        )
    return name
