"""A search of a server, and the request that submits one."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from autotune.analysis.pick import DEFAULT_PREFERENCES, Preferences, check_preferences
from autotune.analysis.tolerance import Tolerance
from autotune.client.connection import reading_answer
from autotune.errors import InvalidInput
from autotune.importers import with_trainer_file
from autotune.spec.model_choice import MODEL_NAMES, with_model_config
from autotune.spec.queued_search import Search
from autotune.spec.reading import parse
from autotune.spec.setting import NO_LIMIT, all_options_of, options_of
from autotune.spec.space_content import named_spaces
from autotune.spec.space_file import load_space
from autotune.spec.space_text import space_text
from autotune.spec.study import check_study_name
from autotune.spec.user_code import is_function_reference
from autotune.spec.user_paths import path_exists
from autotune.study.submission import Submission

_OF_THIS_PROCESS = ("listener", "should_stop")


@dataclass(frozen=True, kw_only=True)
class RemoteSearch(Search):
    """A search as the server had it when it was asked."""

    url: str = ""
    """Its page."""
    answer: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)
    """All that the server said of it."""


def search_of(answer: Mapping[str, Any], *, server: str) -> RemoteSearch:
    """Returns the search of a server's answer; what only a later version says is in `answer`.

    Raises InvalidInput for an answer that is no search.
    """
    names = RemoteSearch.__dataclass_fields__.keys() - {"url", "answer"}
    with reading_answer():
        known = {name: answer[name] for name in names if answer.get(name) is not None}
        known |= {"url": f"{server}/searches/{answer['id']}", "answer": answer}
        search = parse(RemoteSearch, known, ignore_unknown=True)
    if search.study:
        check_study_name(search.study)  # reports and exports are files of that name
    return search


def submission(
    settings: Mapping[str, Any], *, preferences: Preferences = DEFAULT_PREFERENCES
) -> dict[str, Any]:
    """Returns the body that submits a search with these settings of `autotune.search`.

    A search space and a model's config that are files of this machine are sent as their content.
    Whatever else names a file, such as a dataset or code, is sent as it is: the server looks for it
    in its own folders. Raises InvalidInput.
    """
    check_preferences(preferences)
    settings = with_trainer_file(settings, Submission)
    settings.pop("from_file", None)
    for name in _OF_THIS_PROCESS:
        if settings.get(name) is not None:
            raise InvalidInput(
                f"a search of a server has no {name}", hint="watch it: client.watch(search.id)"
            )
    if settings.get("storage") is not None:
        raise InvalidInput(
            "a server has one studies database, and a search of it names none",
            hint="leave storage out",
        )
    options = all_options_of(Submission)
    chosen = {name: getattr(preferences, name) for name in options_of(Preferences)}
    body: dict[str, Any] = {}
    for name, given in {**settings, **chosen}.items():
        option = options.get(name)
        value = given if option is None else option.format.read(given)
        # What is at its default is the server's to decide.
        if value is not None and (option is None or value != option.default):
            body[name] = _plain(value)
    return with_model_content(_with_space(body))


def _plain(value: Any) -> Any:
    """Returns a value as JSON has it."""
    if isinstance(value, float) and value == math.inf:
        return NO_LIMIT
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Tolerance):
        return asdict(value)
    return list(value) if isinstance(value, tuple) else value


def preference_parameters(preferences: Preferences) -> dict[str, Any]:
    """Returns the parameters by which a server chooses the front and the pick of a study."""
    check_preferences(preferences)
    return preferences.parameters()


def _with_space(body: dict[str, Any]) -> dict[str, Any]:
    """Replace the file of a search space by its content, with all that it extends."""
    space = body.get("space")
    if not isinstance(space, str) or space in named_spaces() or not path_exists(space):
        return body
    loaded = load_space(space)
    named = loaded.workload.get("model")
    if isinstance(named, str) and _is_file_of_model(named):
        # The content of this file is sent, too, unless another model is named.
        loaded = replace(
            loaded, workload={k: v for k, v in loaded.workload.items() if k != "model"}
        )
        if body.get("script") is None:
            body = {"model": named, **body}
    return {**body, "space": loaded.name, "space_content": space_text(loaded)}


def with_model_content(body: dict[str, Any]) -> dict[str, Any]:
    """Replace the file of a model's config by its content.

    Pretrained weights stay where they are, so that the folder of those is only named.
    """
    model = body.get("model")
    is_resolved = body.get("model_config") is not None or body.get("script") is not None
    if is_resolved or body.get("pretrained") or not _is_file_of_model(model):
        return body
    resolved = with_model_config({"model": model})
    return {**body, "model": resolved["model"], "model_config": resolved["model_config"]}


def _is_file_of_model(model: object) -> bool:
    if not isinstance(model, str) or model in MODEL_NAMES or is_function_reference(model):
        return False
    return path_exists(model)
