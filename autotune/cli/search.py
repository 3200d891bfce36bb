"""`autotune search`: run the search and print the front and the pick."""

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
from autotune.errors import InvalidInput, Stopped, StorageUnreachable, TrialLost
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
            metavar="SIZE",
            help="Memory cap: 8GiB, 8GB, 8192MiB. [default: all memory of the device]",
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
        typer.Option(metavar="STUDY", help="Name of the study. An existing study is continued."),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(
            metavar="DEVICE", help="Device: cpu, cuda or cuda:1. [default: a GPU if there is one]"
        ),
    ] = None,
    trials: Annotated[
        int | None, typer.Option(help="Number of different configurations to try. [default: 30]")
    ] = None,
    time_budget: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="Start no new trial after this time: 30m, 2h."),
    ] = None,
    until_converged: Annotated[
        bool,
        typer.Option(
            "--until-converged",
            help="Stop when no remaining trial is expected to improve the front by much.",
        ),
    ] = False,
    trial_time_limit: Annotated[
        str, typer.Option(metavar="TIME", help="Stop a trial after this time.")
    ] = "10m",
    compile_time_limit: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="Stop a trial if one compiling step takes longer than this. "
            "[default: half of --trial-time-limit]",
        ),
    ] = None,
    step_time_limit: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="Stop a trial if one step takes longer than this. "
            "[default: a fifth of --trial-time-limit]",
        ),
    ] = None,
    sampler: Annotated[
        str | None,
        typer.Option(
            metavar="|".join(SAMPLERS),
            help=f"How the next configuration is chosen. [default: {DEFAULT_SAMPLER}]",
        ),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(help="Random seed for weights, data order and sampler. [default: 0]"),
    ] = None,
    no_predict: Annotated[
        bool,
        typer.Option(
            "--no-predict",
            help="Train configurations even if their predicted memory is over the cap.",
        ),
    ] = False,
    full_trainings: Annotated[
        bool,
        typer.Option(
            "--full-trainings",
            help="Train every trial to the end. By default, trials with the same numerics share "
            "one full training.",
        ),
    ] = False,
    seeds: Annotated[
        int,
        typer.Option(
            metavar="N", help="Number of trainings per measured perplexity, each with another seed."
        ),
    ] = 1,
    fresh: Annotated[
        bool,
        typer.Option(
            "--fresh",
            help="Measure everything again instead of reusing results of earlier studies.",
        ),
    ] = False,
    workers: Annotated[
        int,
        typer.Option(
            metavar="N",
            help="Number of worker processes, one per GPU. Another search with the same --name "
            "also joins the study.",
        ),
    ] = 1,
    trials_per_device: Annotated[
        int,
        typer.Option(
            metavar="N",
            help="Number of trials that run at once on one device. More than one makes the "
            "measured speeds less reliable.",
        ),
    ] = 1,
    database_wait: Annotated[
        str,
        typer.Option(
            metavar="TIME",
            help="How long to wait for an unreachable database before giving up. "
            "No result is lost while waiting.",
        ),
    ] = "5m",
    memory_snapshot: Annotated[
        bool,
        typer.Option(
            "--memory-snapshot", help="Record torch's allocation history in each trial (CUDA only)."
        ),
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Print what the search would do and how long it would take, without running it.",
        ),
    ] = False,
    workload: Mapping[str, Any],
    tolerance: options.ToleranceOption = None,
    prefer: options.PreferOption = options.PREFER,
    max_perplexity_increase: options.PerplexityOption = options.PERPLEXITY_INCREASE,
    storage: options.StorageOption = options.STORAGE,
    as_json: options.JsonOption = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print no progress.")] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Print every trial at the end.")
    ] = False,
) -> None:
    """Search for the fastest way to train a model under a memory cap.

    Runs short real trainings. Prints the Pareto front of memory, speed and perplexity, and a pick.
    """
    from autotune.study.search import SearchRequest

    request = SearchRequest(
        name=name,
        storage=storage,
        space=space,
        scale=scale,
        device=device,
        cap_bytes=None if max_mem is None else parse_size(max_mem),
        sampler=sampler,  # type: ignore[arg-type]  # SearchRequest rejects unknown values
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
        raise InvalidInput("--dry-run has no JSON output", hint="leave --json out")
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
                    f"Stopped; every finished trial is stored. Continue with:\n  {command}",
                    file=sys.stderr,
                )
            else:
                print("Stopped before the study began.", file=sys.stderr)
            raise typer.Exit(128 + signals[0]) from None
        except (StorageUnreachable, TrialLost) as error:
            if opened:
                command = continue_command(opened[0].definition.name, request)
            else:
                command = "the same command"
            hint = error.hint or "measured results are stored"
            raise type(error)(error.message, hint=f"{hint}; continue with: {command}") from None
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
    """Collect SIGINT and SIGTERM in the yielded list; the second signal ends the process at once.

    The processes that it started end with it.
    """
    received: list[int] = []

    def on_signal(number: int, _frame: FrameType | None) -> None:
        if received:
            os._exit(128 + number)
        received.append(number)

    previous = {
        number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def continue_command(study: str, request: "SearchRequest", *, trials: int | None = None) -> str:
    """Return the command that continues a study, with every option that is not a default.

    A password in the storage URL is replaced by a placeholder.
    """
    from autotune.storage.error_translation import redacted_url
    from autotune.study.request import DEFAULT_TIME_LIMIT_SECONDS
    from autotune.study.workers.retry import DEFAULT_DATABASE_WAIT_SECONDS

    arguments = ["autotune", "search", "--name", study]
    if request.storage != options.STORAGE:
        arguments += ["--storage", redacted_url(request.storage)]
    if trials is not None:
        arguments += ["--trials", str(trials)]
    if request.until_converged:
        arguments.append("--until-converged")
    if request.full_trainings:
        arguments.append("--full-trainings")
    if not request.predict:
        arguments.append("--no-predict")
    if request.memory_snapshot:
        arguments.append("--memory-snapshot")
    if request.workers > 1:
        arguments += ["--workers", str(request.workers)]
    if request.trials_per_device > 1:
        arguments += ["--trials-per-device", str(request.trials_per_device)]
    if request.database_wait_seconds != DEFAULT_DATABASE_WAIT_SECONDS:
        arguments += ["--database-wait", f"{request.database_wait_seconds:g}s"]
    if request.perplexity_seeds > 1:
        arguments += ["--seeds", str(request.perplexity_seeds)]
    if request.trial_time_limit_seconds != DEFAULT_TIME_LIMIT_SECONDS:
        arguments += ["--trial-time-limit", f"{request.trial_time_limit_seconds:g}s"]
    if request.compile_time_limit_seconds is not None:
        arguments += ["--compile-time-limit", f"{request.compile_time_limit_seconds:g}s"]
    if request.step_time_limit_seconds is not None:
        arguments += ["--step-time-limit", f"{request.step_time_limit_seconds:g}s"]
    return shlex.join(arguments)


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
    study = [result.study]
    if request.storage != options.STORAGE:
        study += ["--storage", result.storage]
    study_arguments = shlex.join(study)
    reused = sum(record.reused_from is not None for record in result.trials)
    trials_to_continue = wanted if len(result.trials) < wanted else 2 * len(result.trials)
    commands = [
        (f"autotune show {study_arguments}", "every trial"),
        (f"autotune report {study_arguments}", "the whole study as one HTML page"),
    ]
    if result.pick:
        commands.append(
            (f"autotune export {study_arguments} --to pytorch", "the pick, for your trainer")
        )
    commands.append(
        (continue_command(result.study, request, trials=trials_to_continue - reused), "continue")
    )
    console.print()
    console.print(Text(f"Results  {result.storage}"))
    for command, purpose in commands:
        console.print(Text(f"  {command}  # {purpose}"), soft_wrap=True)
