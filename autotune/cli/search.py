"""`autotune search`: the main job."""

import json
import os
import shlex
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autotune.cli import options
from autotune.cli.option_groups import with_workload
from autotune.errors import InvalidInput, Stopped, StorageAway, TrialLost
from autotune.spec.study import DEFAULT_SAMPLER, SAMPLERS
from autotune.units import format_duration, parse_duration, parse_size

if TYPE_CHECKING:
    from rich.console import Console

    from autotune.spec.result import StudyResult
    from autotune.study.search import SearchRequest


@with_workload
def search(
    *,
    max_mem: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE", help="Memory cap: 8GiB, 8GB, 8192MiB. [default: all of the device]"
        ),
    ] = None,
    space: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|FILE",
            help="Search space: default, quick, peak_memory, peak_memory_search or a .toml file.",
        ),
    ] = None,
    scale: options.SpaceScaleOption = None,
    name: Annotated[
        str | None,
        typer.Option(metavar="STUDY", help="Name of the study; one that exists is continued."),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(
            metavar="DEVICE", help="cpu, cuda or cuda:1. [default: a GPU if there is one]"
        ),
    ] = None,
    trials: Annotated[
        int | None, typer.Option(help="Distinct configurations in the study. [default: 30]")
    ] = None,
    time_budget: Annotated[
        str | None, typer.Option(metavar="TIME", help="Begin no trial after this: 30m.")
    ] = None,
    until_converged: Annotated[
        bool,
        typer.Option(
            "--until-converged",
            help="End once no trial is likely to make the front better by much.",
        ),
    ] = False,
    trial_time_limit: Annotated[
        str, typer.Option(metavar="TIME", help="End a trial after this.")
    ] = "10m",
    compile_time_limit: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="End a trial in which a step that compiles takes longer. [default: half of the trial's]",
        ),
    ] = None,
    step_time_limit: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="End a trial in which no step ends for so long. [default: a fifth of the trial's]",
        ),
    ] = None,
    sampler: Annotated[
        str | None,
        typer.Option(
            metavar="|".join(SAMPLERS),
            help=f"Who suggests the trials. [default: {DEFAULT_SAMPLER}]",
        ),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="Of weights, data order and sampler. [default: 0]")
    ] = None,
    no_predict: Annotated[
        bool, typer.Option("--no-predict", help="Train also what is predicted to be over the cap.")
    ] = False,
    full_trainings: Annotated[
        bool,
        typer.Option(
            "--full-trainings",
            help="Train every trial to the end; else one for all that compute the same numbers.",
        ),
    ] = False,
    seeds: Annotated[
        int,
        typer.Option(
            metavar="N", help="Trainings behind each perplexity that is measured, for its spread."
        ),
    ] = 1,
    fresh: Annotated[
        bool,
        typer.Option(
            "--fresh", help="Measure again what earlier studies of the same workload have measured."
        ),
    ] = False,
    workers: Annotated[
        int,
        typer.Option(
            metavar="N",
            help="Processes that share the study, one a GPU; a second search joins it too.",
        ),
    ] = 1,
    trials_per_device: Annotated[
        int,
        typer.Option(
            metavar="N", help="Trials at a time on one device; more than one disturb each other."
        ),
    ] = 1,
    database_wait: Annotated[
        str,
        typer.Option(
            metavar="TIME", help="Wait so long for a database that is away; results are kept."
        ),
    ] = "5m",
    memory_snapshot: Annotated[
        bool,
        typer.Option(
            "--memory-snapshot", help="Keep torch's allocation history of each trial (CUDA)."
        ),
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would be done and how long it takes.")
    ] = False,
    workload: Mapping[str, Any],
    tolerance: options.ToleranceOption = None,
    prefer: options.PreferOption = options.PREFER,
    max_perplexity_increase: options.PerplexityOption = options.PERPLEXITY_INCREASE,
    storage: options.StorageOption = options.STORAGE,
    as_json: options.JsonOption = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Show every trial in the end.")
    ] = False,
) -> None:
    """Measure real trainings under a memory cap; find the front of memory, speed and perplexity, and a pick."""
    from autotune.study.search import SearchRequest

    request = SearchRequest(
        name=name,
        storage=storage,
        space=space,
        scale=scale,
        device=device,
        cap_bytes=None if max_mem is None else parse_size(max_mem),
        sampler=sampler,  # type: ignore[arg-type]  # SearchRequest refuses what it does not know
        seed=seed,
        trials=trials,
        time_budget_seconds=None if time_budget is None else parse_duration(time_budget),
        until_converged=until_converged,
        trial_time_limit_seconds=parse_duration(trial_time_limit),
        compile_time_limit_seconds=None
        if compile_time_limit is None
        else parse_duration(compile_time_limit),
        step_time_limit_seconds=None
        if step_time_limit is None
        else parse_duration(step_time_limit),
        predict=not no_predict,
        full_trainings=full_trainings,
        perplexity_seeds=seeds,
        fresh=fresh,
        workers=workers,
        trials_per_device=trials_per_device,
        database_wait_seconds=parse_duration(database_wait),
        memory_snapshot=memory_snapshot,
        workload=workload,
        preferences=options.preferences_of(tolerance, prefer, max_perplexity_increase),
    )
    if dry_run and as_json:
        raise InvalidInput("--dry-run has no JSON form", hint="leave --json out")
    if dry_run:
        from autotune.cli.dry_run import print_plan

        print_plan(request, quiet=quiet)
    else:
        _search(request, as_json=as_json, quiet=quiet, verbose=verbose)


def _search(request: "SearchRequest", *, as_json: bool, quiet: bool, verbose: bool) -> None:
    from autotune.cli.live import make_display
    from autotune.cli.tables import make_console
    from autotune.study.events import Event, StudyOpened
    from autotune.study.search import search as run_search

    display = make_display(
        quiet=quiet,
        preferences=request.preferences,
        time_budget_seconds=request.time_budget_seconds,
        until_converged=request.until_converged,
    )
    opened: list[StudyOpened] = []

    def listener(event: Event) -> None:
        if isinstance(event, StudyOpened):
            opened.append(event)
        display(event)

    with _stop_on_signals() as signals:
        try:
            with display:
                result = run_search(request, listener=listener, should_stop=lambda: bool(signals))
        except Stopped:
            if opened:
                command = continue_command(opened[0].definition.name, request)
                print(
                    f"Stopped; every finished trial is kept. Go on with:\n  {command}",
                    file=sys.stderr,
                )
            else:
                print("Stopped before the study began.", file=sys.stderr)
            raise typer.Exit(128 + signals[0]) from None
        except (StorageAway, TrialLost) as error:
            command = (
                continue_command(opened[0].definition.name, request)
                if opened
                else "the same command"
            )
            raise type(error)(
                error.message,
                hint=f"{error.hint or 'what was measured is kept'}; go on with: {command}",
            ) from None
    if as_json:
        print(json.dumps(result.to_dict(), indent=2, allow_nan=False))
    else:
        print_summary(
            result, make_console(), request, wanted=opened[0].trials_wanted, verbose=verbose
        )
    if not result.front:
        raise typer.Exit(1)


@contextmanager
def _stop_on_signals() -> Iterator[list[int]]:
    """Collects SIGINT and SIGTERM; the second one ends this process at once, and with it all it started."""
    received: list[int] = []

    def note(number: int, _frame: FrameType | None) -> None:
        if received:
            os._exit(128 + number)
        received.append(number)

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def continue_command(study: str, request: "SearchRequest", *, trials: int | None = None) -> str:
    """The command that goes on with a study; a password in its URL is left for the reader to fill in."""
    from autotune.storage.error_translation import shown_url
    from autotune.study.request import DEFAULT_TIME_LIMIT_SECONDS
    from autotune.study.workers.retry import DEFAULT_DATABASE_WAIT_SECONDS

    storage = request.storage
    words = ["autotune", "search", "--name", study]
    words += ["--storage", shown_url(storage)] if storage != options.STORAGE else []
    words += ["--trials", str(trials)] if trials is not None else []
    limit = request.trial_time_limit_seconds
    words += ["--until-converged"] if request.until_converged else []
    words += ["--full-trainings"] if request.full_trainings else []
    words += [] if request.predict else ["--no-predict"]
    words += ["--memory-snapshot"] if request.memory_snapshot else []
    words += ["--workers", str(request.workers)] if request.workers > 1 else []
    if request.trials_per_device > 1:
        words += ["--trials-per-device", str(request.trials_per_device)]
    if request.database_wait_seconds != DEFAULT_DATABASE_WAIT_SECONDS:
        words += ["--database-wait", f"{request.database_wait_seconds:g}s"]
    words += ["--seeds", str(request.perplexity_seeds)] if request.perplexity_seeds > 1 else []
    words += ["--trial-time-limit", f"{limit:g}s"] if limit != DEFAULT_TIME_LIMIT_SECONDS else []
    for option, seconds in (
        ("--compile-time-limit", request.compile_time_limit_seconds),
        ("--step-time-limit", request.step_time_limit_seconds),
    ):
        words += [option, f"{seconds:g}s"] if seconds is not None else []
    return shlex.join(words)


def print_summary(
    result: "StudyResult",
    console: "Console",
    request: "SearchRequest",
    *,
    wanted: int,
    verbose: bool,
) -> None:
    from rich.text import Text

    from autotune.cli.tables import print_result, print_trials
    from autotune.reporting.outcomes import outcome_counts

    seconds = sum(record.seconds or 0.0 for record in result.trials)
    counts = outcome_counts(result.trials)
    console.print(
        Text(f"Study {result.study}: {counts}, {format_duration(seconds)} of trials", style="bold")
    )
    console.print()
    if verbose:
        print_trials(console, result, result.trials, title="All trials")
        console.print()
    print_result(result, console)
    shown = shlex.join(
        [
            result.study,
            *(["--storage", result.storage] if request.storage != options.STORAGE else []),
        ]
    )
    reused = sum(record.reused_from is not None for record in result.trials)
    total = (wanted if len(result.trials) < wanted else 2 * len(result.trials)) - reused
    console.print()
    console.print(Text(f"Results  {result.storage}"))
    for command, purpose in (
        (f"autotune show {shown}", "every trial"),
        (f"autotune report {shown}", "all of it as one page to send"),
        *(
            [(f"autotune export {shown} --to pytorch", "the pick, for your trainer")]
            if result.pick
            else []
        ),
        (continue_command(result.study, request, trials=total), "go on"),
    ):
        console.print(Text(f"  {command}  # {purpose}"), soft_wrap=True)
