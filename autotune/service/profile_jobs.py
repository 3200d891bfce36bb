"""Puts a profile of a trial into the queue, where it waits for its devices as a search does."""

import hashlib
import json
from typing import Any
from urllib.parse import quote

from autotune.analysis.pick import Preferences
from autotune.errors import InvalidInput, NotAllowed, suggestion
from autotune.service.state import Caller, ServiceState
from autotune.spec.queued_search import PROFILED_TRIAL, QueuedSearch
from autotune.spec.result import StudyResult
from autotune.storage.searches import PROFILE_DIGEST, NewSearch
from autotune.study.profilable import check_can_be_profiled

DEFAULT_STEPS = 3


def address_of(study: str, trial: int, file: str) -> str:
    """Return the path at which the server has a file of a profile."""
    return f"/api/v1/studies/{study}/trials/{trial}/profile/{quote(file)}"


def check_profilable(service: ServiceState, result: StudyResult, trial: int) -> None:
    """Raise InvalidInput for a trial that cannot be profiled, and NotAllowed on a Ray cluster."""
    if service.settings.ray is not None:
        raise NotAllowed(
            "nothing can be profiled here: the trials of the server run on a Ray cluster",
            hint="profile it on a machine with such a device: autotune profile",
        )
    check_can_be_profiled(result.trial(trial), study=result.study, workload=result.workload)


def why_not_profilable(service: ServiceState, result: StudyResult, trial: int) -> str:
    """Return why a trial cannot be profiled; empty where it can."""
    try:
        check_profilable(service, result, trial)
    except InvalidInput as error:
        return error.message
    return ""


def active_profiles(service: ServiceState, study: str) -> dict[int, QueuedSearch]:
    """Return the profiles of a study that wait or are taken, by the number of the trial."""
    active, _ = service.searches.find(states=("queued", "running"), study=study, limit=1000)
    found = {}
    for search in active:
        if search.profiled_trial is not None:
            found[search.profiled_trial] = search
    return found


def queue_profile(
    service: ServiceState,
    caller: Caller,
    *,
    study: str,
    trial: int,
    steps: int = DEFAULT_STEPS,
    fresh: bool = False,
    priority: int = 0,
    group: str = "",
) -> tuple[QueuedSearch, bool]:
    """Queue a profile and return it, and whether it is new: one that waits is not queued again.

    Raises UnknownStudy, InvalidInput, NotAllowed, and SearchConflict for a full queue.
    """
    groups = list(service.settings.device_groups)
    if group not in ("", *groups):
        raise InvalidInput(
            f"Invalid group: {group!r:.60}",
            hint=suggestion(
                group[:60], groups, otherwise=f"use one of {', '.join(groups)}, or leave it out"
            ),
        )
    result = service.reader.view_in_thread(study, Preferences()).result
    check_profilable(service, result, trial)
    waiting = active_profiles(service, study).get(trial)
    if waiting is not None:
        return waiting, False
    request: dict[str, Any] = {PROFILED_TRIAL: trial, "steps": steps, "fresh": fresh}
    if group:
        request["group"] = group
    digest = hashlib.sha256(json.dumps([study, request]).encode()).hexdigest()
    search, is_new = service.searches.submit(
        NewSearch(
            request=request,
            submitted_by=caller.name,
            study=study,
            priority=priority,
            group=group,
            digest=f"{PROFILE_DIGEST}{digest}"[:64],
        )
    )
    service.tokens.record_action(
        who=caller.name, action="profile trial", target=f"{study}/{trial}", detail=str(search.id)
    )
    service.scheduler.wake()
    return search, is_new
