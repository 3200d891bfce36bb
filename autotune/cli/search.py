"""`autotune search`: the settings of the command; `search_run.py` runs it."""

from dataclasses import dataclass

from autotune.cli.lines import print_line
from autotune.cli.options import ShownInFull
from autotune.cli.requests import Given, request_of
from autotune.cli.server import check_one_place
from autotune.errors import InvalidInput
from autotune.spec.setting import EVERYDAY, RESULTS, THE_SEARCH, setting
from autotune.spec.study import DEFAULT_STORAGE
from autotune.study.request import SearchRequest


@dataclass(frozen=True, kw_only=True)
class SearchCommand(SearchRequest, ShownInFull):
    """A search, where it runs and how it is shown."""

    dry_run: bool = setting(
        False,
        "Print what the search would do, with predicted peaks, without running a trial.",
        group=EVERYDAY,
    )
    time_trials: bool = setting(
        False,
        "With --dry-run: time a few short trainings and estimate how long the search would take.",
        group=THE_SEARCH,
    )
    server: str | None = setting(
        None,
        "Run the search on a server that autotune serve has started, and show it here. "
        "Ctrl-C cancels it; autotune submit leaves it to the server.",
        group=RESULTS,
        metavar="URL",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dry_run and self.as_json:
            raise InvalidInput("--dry-run has no JSON output", hint="leave --json out")
        if self.time_trials and not self.dry_run:
            raise InvalidInput(
                "--time-trials belongs to --dry-run",
                hint="add --dry-run, or leave --time-trials out",
            )


def search(given: Given[SearchCommand]) -> None:
    """Search for the fastest way to train a model under a memory cap.

    Runs short real trainings. Prints the Pareto front of memory, speed and perplexity, and a pick.
    """
    if "server" in given:
        # httpx, 0.2 s that a search here does without.
        from autotune.cli.submit import plan_on_server, search_on_server  # noqa: PLC0415

        check_one_place(given["server"], given.pop("storage", DEFAULT_STORAGE))
        if given.get("time_trials"):
            raise InvalidInput(
                "--time-trials runs trainings, which a server does only in its queue",
                hint="leave --time-trials out",
            )
        if given.get("dry_run"):
            plan_on_server(given)
        else:
            search_on_server(given)
        return
    request = request_of(SearchCommand, given)
    # These import numpy, which the help of this command does without.
    from autotune.study.opening.requested_space import beginning_line, space_of  # noqa: PLC0415

    space = None
    if request.name is None and request.storage == DEFAULT_STORAGE:
        # A new study as far as is known here; a name or another database is looked up first.
        space = space_of(request)
        if not request.quiet:
            print_line(beginning_line(request, space), to_stderr=True, flush=True)
    # These import the database, half a second in which the line above is read.
    from autotune.cli.dry_run import print_plan  # noqa: PLC0415
    from autotune.cli.search_run import run_with_display  # noqa: PLC0415

    if request.dry_run:
        print_plan(request, space=space, time_trials=request.time_trials, quiet=request.quiet)
    else:
        run_with_display(request, shown=request, space=space)
