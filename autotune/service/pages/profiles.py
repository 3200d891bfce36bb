"""What the pages show of profiles: those of a study or of a trial, and those that wait."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from autotune.reporting.profile_files import ProfileFile, TrialProfile, profile_of, profiles_of
from autotune.reporting.report.profiles import ProfileLinks, links_of
from autotune.service.pages.contexts import SearchRow, search_row, sentence
from autotune.service.profile_jobs import active_profiles, address_of, why_not_profilable
from autotune.service.search_json import search_object
from autotune.service.state import ServiceState
from autotune.spec.queued_search import ENDED
from autotune.spec.result import StudyResult

_MOST_ENDED = 100
"""Among so many of a study's last searches and profiles one that has failed is looked for."""


@dataclass(frozen=True, kw_only=True)
class ProfilesCard:
    """The profiles of a study, or the one of a trial."""

    study: str
    profiles: tuple[ProfileLinks, ...]
    jobs: tuple[SearchRow, ...]
    """Profiles that wait in the queue or are taken."""
    trial: int | None
    """The trial that the button profiles: that of the page, or the pick; None without one."""
    is_of_trial: bool
    """Whether this is on the page of that trial."""
    failed: SearchRow | None
    """The last profile of that trial that was asked for, if it has failed."""
    why_not: str
    """Why that trial cannot be profiled; empty where it can."""

    @property
    def why_failed(self) -> str:
        """Why that profile was not taken, and what to do."""
        if self.failed is None:
            return ""
        return f"{sentence(self.failed.reason)} {sentence(self.failed.hint)}".strip()

    @property
    def is_profiled(self) -> bool:
        """Whether there is a profile of the trial that the button profiles."""
        return any(links.trial == self.trial for links in self.profiles)

    @property
    def waits(self) -> bool:
        """Whether that trial is about to be profiled."""
        return any(job.profiled_trial == self.trial for job in self.jobs)


def profiles_of_study(service: ServiceState, result: StudyResult) -> ProfilesCard:
    """Return the profiles of a study, and a button for its pick."""
    pick = None if result.pick is None else result.pick.number
    return _card(service, result, profiles_of(result), trial=pick, is_of_trial=False)


def profiles_of_trial(service: ServiceState, result: StudyResult, number: int) -> ProfilesCard:
    """Return the profile of a trial, if there is one, and a button for it."""
    profile = profile_of(result, number)
    found = () if profile is None else (profile,)
    return _card(service, result, found, trial=number, is_of_trial=True)


def _card(
    service: ServiceState,
    result: StudyResult,
    profiles: Sequence[TrialProfile],
    *,
    trial: int | None,
    is_of_trial: bool,
) -> ProfilesCard:
    jobs = active_profiles(service, result.study)
    if is_of_trial:
        jobs = {number: job for number, job in jobs.items() if number == trial}
    positions = service.searches.positions() if jobs else {}
    failed = None if trial is None or trial in jobs else _failed(service, result.study, trial)
    why_not = "" if trial is None else why_not_profilable(service, result, trial)
    return ProfilesCard(
        study=result.study,
        profiles=tuple(
            links_of(
                profile,
                words=result.trial(profile.trial).config.describe(),
                address_of=partial(_address, result.study, profile.trial),
            )
            for profile in profiles
        ),
        jobs=tuple(
            search_row(search_object(job, position=positions.get(job.id))) for job in jobs.values()
        ),
        trial=trial,
        is_of_trial=is_of_trial,
        failed=failed,
        why_not=sentence(why_not),
    )


def _failed(service: ServiceState, study: str, trial: int) -> SearchRow | None:
    """Return the last profile of a trial that has ended, if it has failed."""
    ended, _ = service.searches.find(states=ENDED, study=study, limit=_MOST_ENDED)
    last = next((job for job in ended if job.profiled_trial == trial), None)
    if last is None or last.state != "failed":
        return None
    return search_row(search_object(last))


def _address(study: str, trial: int, file: ProfileFile) -> str:
    return address_of(study, trial, file.name)
