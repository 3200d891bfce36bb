"""`autotune search --dry-run`: print what would be tried, what is excluded, and the time."""

import math
from collections.abc import Callable, Mapping
from typing import Any

from autotune.cli.live import make_display
from autotune.cli.tables import as_text, make_console
from autotune.spec.config import TrainingConfig
from autotune.spec.search_space import SearchSpace
from autotune.study.dry_run import Plan, plan
from autotune.study.event_text import excluded_lines, reused_line, time_budget_line
from autotune.study.request import SearchRequest
from autotune.units import format_duration, format_estimate, format_size


def print_plan(
    request: SearchRequest, *, space: SearchSpace | None, time_trials: bool, quiet: bool
) -> None:
    display = make_display(quiet=quiet, preferences=request.preferences)
    with display:
        planned = plan(request, space=space, time_trials=time_trials, listener=display)
    console = make_console()

    def say(line: str) -> None:
        console.print(as_text(line), soft_wrap=True)

    definition, legal = planned.definition, planned.legal
    say(f"Search space {definition.space.name}: {_counted(planned.configurations)}")
    for field, values in legal.values.items():
        if len(values) > 1:
            say(f"  {field}: {', '.join(map(str, values))}")
    if lines := excluded_lines(legal.excluded):
        say("Excluded:")
        for line in lines:
            say(f"  {line}")
    device = definition.device
    devices = definition.workload.devices_per_trial
    each_of = "" if devices == 1 else "each of "
    cap = format_size(definition.cap_bytes)
    say(f"Cap       {cap} on {each_of}{device.describe(devices=devices)}")
    if device.others:
        say(f"Warning   {device.device}: {device.others}")
    for note in device.notes:
        say(f"Note      {note}")
    if line := reused_line(planned.reused):
        say(line)
    first = planned.first[: planned.trials_wanted]
    wanted = None if planned.ends_by_time else planned.trials_wanted
    say(_first_line(wanted, at_once=planned.trials_at_once, named=len(first)))
    for name, config in first:
        say(f"  {name}: {config.describe()}{_predicted(planned, config)}")
    _say_confirmation(planned, say)
    line = time_budget_line(
        planned.default_time_budget_seconds, for_trials=planned.seconds_for_trials
    )
    if line:
        say(f"Time      {line}")
    elif planned.seconds_for_trials is not None and math.isfinite(planned.seconds_for_trials):
        say(f"Time      no trial begins after {format_duration(planned.seconds_for_trials)}")
    _say_time(planned, say)


def print_plan_of_server(plan: Mapping[str, Any]) -> None:
    """Print the plan that a server has made, from its JSON; it times no trainings."""
    console = make_console()

    def say(line: str) -> None:
        console.print(as_text(line), soft_wrap=True)

    say(f"Search space {plan['space']}: {_counted(plan['configurations'])}")
    for field, values in plan["values"].items():
        if len(values) > 1:
            say(f"  {field}: {', '.join(map(str, values))}")
    if lines := excluded_lines(plan["excluded"]):
        say("Excluded:")
        for line in lines:
            say(f"  {line}")
    device = plan["device"]
    say(f"Cap       {format_size(plan['cap_bytes'])} on {device['device']} ({device['name']})")
    if line := reused_line(plan["reused"]):
        say(line)
    first = plan["first"][: plan["trials_wanted"]]
    wanted = None if plan.get("ends_by_time") else plan["trials_wanted"]
    say(_first_line(wanted, at_once=plan["trials_at_once"], named=len(first)))
    for one in first:
        predicted = " (not predicted)"
        if one["predicted_peak_memory_bytes"] is not None:
            over = ", over the cap" if one["is_over_cap"] else ""
            speed = _speed(one.get("predicted_tokens_per_second"))
            predicted = f" (about {format_size(one['predicted_peak_memory_bytes'])}{speed}{over})"
        say(f"  {one['name']}: {one['label']}{predicted}")
    line = time_budget_line(
        plan["default_time_budget_seconds"], for_trials=plan["seconds_for_trials"]
    )
    if line:
        say(f"Time      {line}")
    if plan["seconds"] is not None:
        say(f"Time      about {format_duration(plan['seconds'])} of trials, by earlier studies")


def _predicted(planned: Plan, config: TrainingConfig) -> str:
    """Returns the predicted peak of a configuration, to stand behind it; empty if there is none."""
    forecast = planned.forecasts.get(config.fingerprint)
    if forecast is None:
        return ""
    prediction = forecast.prediction
    if prediction is None:
        return " (not predicted)"
    text = f"about {format_size(prediction.peak_memory_bytes)}"
    text += _speed(prediction.predicted_tokens_per_second)
    if prediction.lower_bound_bytes > planned.definition.cap_bytes:
        text += ", over the cap"
    return f" ({text})"


def _speed(tokens_per_second: float | None) -> str:
    """Returns `, 52,300 tokens/s`; empty where no speed is predicted."""
    return "" if tokens_per_second is None else f", {format_estimate(tokens_per_second)} tokens/s"


def _counted(configurations: int) -> str:
    return f"{configurations} legal configuration{'' if configurations == 1 else 's'}"


def _first_line(trials: int | None, *, at_once: int, named: int) -> str:
    """Returns how many trials there would be; lines with the first `named` ones follow.

    None: as many as the time allows.
    """
    line = f"First     {trials} trial{'' if trials == 1 else 's'} wanted"
    if trials is None:
        line = "First     as many trials as the time allows"
    if at_once > 1:
        line += f", {at_once} at once"
    if named == 1:
        return f"{line}; the first is"
    if named:
        return f"{line}; the first are"
    return line if trials == 0 else f"{line}, chosen by the sampler"


def _say_confirmation(planned: Plan, say: Callable[[str], None]) -> None:
    if not planned.variants_share:
        say("Confirm   nothing: each speed is that of one measurement")
        return
    for_finalists = f"{100 * planned.confirm_share:.0f} % of the search's time"
    for_variants = f"{100 * planned.variants_share:.0f} %"
    if planned.confirm_seconds is not None and planned.variants_seconds is not None:
        for_finalists += f" ({format_duration(planned.confirm_seconds)})"
        for_variants += f" ({format_duration(planned.variants_seconds)})"
    say(
        f"Confirm   the finalists are measured again, in at most {for_finalists}, and the pick "
        f"without each of its techniques, in at most {for_variants}; --no-confirm leaves both out"
    )


def _say_time(planned: Plan, say: Callable[[str], None]) -> None:
    if not planned.is_timed:
        if planned.seconds is None:
            say("Time      not measured; --time-trials times a few short trainings")
        else:
            say(
                f"Time      about {format_duration(planned.seconds)} of trials, if each takes what "
                "a trial of those studies took on average; --time-trials times a few short "
                "trainings"
            )
        return
    if planned.seconds is None:
        say("Time      unknown: no short training finished")
        return
    say(
        f"Time      about {format_duration(planned.seconds)} of trials, if they were drawn "
        "uniformly from the space; per trial:"
    )
    for precision, seconds in planned.seconds_by_precision.items():
        shared = format_duration(planned.shared_seconds_by_precision[precision])
        say(
            f"  {precision}, eager: {format_duration(seconds)} for a full training, "
            f"{shared} for memory and speed only"
        )
    say(f"  {planned.full_trainings} of {planned.trials_wanted} are full trainings")
    if planned.compile_seconds is not None:
        share = f"{100 * planned.compiled_share:.0f} %"
        say(f"  and {format_duration(planned.compile_seconds)} more for the {share} that compile")
