"""Profiles on a server: asks for them, waits until they are taken, and downloads their files."""

from collections.abc import Sequence
from pathlib import Path

import typer

from autotune.analysis.pick import DEFAULT_PREFERENCES, chosen_trial
from autotune.cli.remote_search import Interrupted, follow, interrupts, raise_unless_finished
from autotune.cli.server import open_client
from autotune.client.client import Client
from autotune.client.searches import RemoteSearch
from autotune.study.profiling import StoredProfile


def profiles_on_server(
    server: str,
    study: str,
    trials: Sequence[int | None],
    *,
    steps: int,
    fresh: bool,
    out: Path | None,
    quiet: bool,
) -> list[StoredProfile]:
    """Return the profiles of trials, which are taken first where the server has none.

    Ctrl-C cancels the profile that is waited for.
    """
    with open_client(server) as client:
        numbers = [
            chosen_trial(client.show(study), None).number if trial is None else trial
            for trial in trials
        ]
        there = {one["trial"]: one.get("steps") for one in client.profiles(study)}
        for number in numbers:
            if fresh or there.get(number) != steps:
                job = client.profile(study, number, steps=steps, fresh=fresh)
                raise_unless_finished(_followed(client, job, quiet=quiet), client)
        return [client.download_profile(study, number, out=out) for number in numbers]


def _followed(client: Client, job: RemoteSearch, *, quiet: bool) -> RemoteSearch:
    with interrupts():
        try:
            return follow(client, job, quiet=quiet, preferences=DEFAULT_PREFERENCES)
        except Interrupted as interrupted:
            client.cancel(job.id)
            raise typer.Exit(128 + interrupted.number) from None
