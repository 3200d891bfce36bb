"""The JSON objects of the interface, as its OpenAPI document describes them.

Those of a study are the contract of `autotune show --json`: `Trial` has the fields of `TrialRecord`
because it is made from them.
"""

import dataclasses
from typing import Annotated, Any, Literal, get_args, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, create_model

from autotune.spec.config import TrainingConfig
from autotune.spec.queued_search import SearchState
from autotune.spec.result import NOT_SHOWN, Outcome, TrialRecord
from autotune.storage.tokens import Action

_EXAMPLE_TRIAL: dict[str, Any] = {
    "number": 4,
    "name": None,
    "outcome": "ok",
    "feasible": True,
    "config": TrainingConfig(precision="bf16-mixed", checkpointing="block").to_dict(),
    "peak_memory_bytes": 6_442_450_944,
    "device_bytes": 6_979_321_856,
    "tokens_per_second": 20_480.0,
    "perplexity": 21.5,
    "message": "",
}


class Described(BaseModel):
    """An object that may get further fields in later versions."""

    model_config = ConfigDict(extra="allow")


# Text where the record has facts, and null where a number is not finite.
_AS_TEXT = ("perplexity_source", "reused_from")
_Interval = Annotated[list[float], Field(min_length=2, max_length=2)]


def _trial_fields() -> dict[str, Any]:
    """Returns the fields of a trial's JSON object by their names, as pydantic takes them."""
    hints = get_type_hints(TrialRecord)
    described: dict[str, Any] = {}
    for field in dataclasses.fields(TrialRecord):
        kind: Any = hints[field.name]
        if field.name in NOT_SHOWN:
            continue
        if field.name in _AS_TEXT:
            kind = str | None
        elif field.name == "tokens_per_second_interval":
            kind = _Interval | None
        elif field.name == "config":
            kind = dict[str, str | int | float]
        elif kind is float:
            kind = float | None
        described[field.name] = (kind, ...)
    return described


Trial: Any = create_model(
    "Trial",
    __doc__="One configuration with everything that was measured of it; null was not measured.",
    __config__=ConfigDict(extra="allow", json_schema_extra={"example": _EXAMPLE_TRIAL}),
    **_trial_fields(),
)

OUTCOMES: tuple[str, ...] = get_args(Outcome)


class Study(Described):
    """What `autotune show --json` prints: settings, trials, front, pick and baseline."""

    schema_: Literal[1] = Field(alias="schema")
    study: str
    storage: str = Field(description="The URL of this server: that of its database is not told.")
    workload: dict[str, Any]
    device: dict[str, Any]
    cap_bytes: int
    directions: dict[str, Literal["minimize", "maximize"]]
    trials: list[Trial]
    front: list[int] = Field(description="Numbers of the trials on the Pareto front.")
    pick: int | None = Field(description="Number of the recommended trial; null: none is feasible.")
    pick_reason: str | None
    baseline: int | None
    initial_perplexity: float | None = Field(
        description="Of the pretrained weights, before any training; null without such weights, "
        "or where it was not measured."
    )


class ListedStudy(Described):
    """A study in the list."""

    name: str
    created_at: str = Field(description="ISO 8601 in UTC.")
    trials: int = Field(description="How many have a result.")
    trials_wanted: int
    state: SearchState | None = Field(description="Of its latest search; null: it has none here.")
    owner: str = Field(description="Who may change it; `owner`: the owner of the server.")
    cap_bytes: int
    device: str = Field(description="The vendor's name of the device.")


class Studies(BaseModel):
    """A page of the list of studies."""

    studies: list[ListedStudy]
    total: int = Field(description="How many studies fit the query, on all pages.")


class Trials(BaseModel):
    """A page of the trials of a study."""

    trials: list[Trial]
    total: int = Field(description="How many trials fit the filters, on all pages.")


class Preferred(Described):
    """By what a front and a pick were chosen."""

    prefer: Literal["fastest", "smallest", "balanced"]
    max_perplexity_increase: float
    speed_tolerance: float
    perplexity_tolerance: float


class Front(Described):
    """The front of a study under some preferences."""

    study: str
    preferences: Preferred
    front: list[int]
    pick: int | None
    pick_reason: str | None
    baseline: int | None
    trials: list[Trial] = Field(description="The trials on the front, in its order.")


class Figure(Described):
    """A figure for plotly.js."""

    data: list[dict[str, Any]]
    layout: dict[str, Any]


class ExportTarget(BaseModel):
    """A trainer that a trial can be exported to."""

    target: str
    title: str
    versions: list[str] = Field(description="Accepted values of `version`, the default first.")


class ExportedFile(BaseModel):
    """One file of an export."""

    name: str
    text: str


class Refusal(Described):
    """A setting that the files do not express."""

    setting: str
    value: Any
    instead: Any = Field(description="What the files do instead; null: the user's code decides.")
    why: str
    is_technique: bool


class ExportTexts(Described):
    """An export as text, with what a user should know about it."""

    target: str
    target_version: str
    trial: int
    files: list[ExportedFile] = Field(description="In the order in which to read them.")
    command: str
    refusals: list[Refusal]
    notes: list[str]


class Actions(BaseModel):
    """A page of the log of actions, newest first."""

    actions: list[Action]
    total: int
