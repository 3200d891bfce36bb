"""`autotune search --dry-run`: print what would be tried, what is excluded, and the time."""

from collections.abc import Mapping
from typing import Any

from autotune.cli.live import make_display
from autotune.cli.tables import as_text, make_console
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
    _print_plan(planned.to_dict())
    _print_time(planned)


def print_plan_of_server(plan: Mapping[str, Any]) -> None:
    """Print the plan that a server has made, from its JSON; it times no trainings."""
    _print_plan(plan)
    if plan["seconds"] is not None:
        _say(f"Time      about {format_duration(plan['seconds'])} of trials, by earlier studies")


def _say(line: str) -> None:
    make_console().print(as_text(line), soft_wrap=True)


def _print_plan(plan: Mapping[str, Any]) -> None:
    """Print the JSON of a plan, apart from what is known of its time."""
    _say(f"Search space {plan['space']}: {_counted(plan['configurations'])}")
    for field, values in plan["values"].items():
        if len(values) > 1:
            _say(f"  {field}: {', '.join(map(str, values))}")
    if lines := excluded_lines(plan["excluded"]):
        _say("Excluded:")
        for line in lines:
            _say(f"  {line}")
    device = plan["device"]
    cap = f"{format_size(plan['cap_bytes'])} on {device['device']} ({device['name']})"
    # What an earlier version does not say is looked for with `get`.
    _say(f"Cap       {plan.get('cap', cap)}")
    if others := device.get("others"):
        _say(f"Warning   {device['device']}: {others}")
    for note in device.get("notes", ()):
        _say(f"Note      {note}")
    if line := reused_line(plan["reused"]):
        _say(line)
    first = plan["first"][: plan["trials_wanted"]]
    wanted = None if plan.get("ends_by_time") else plan["trials_wanted"]
    _say(_first_line(wanted, at_once=plan["trials_at_once"], named=len(first)))
    for entry in first:
        _say(f"  {entry['name']}: {entry['label']}{_predicted(entry)}")
    _say(_confirmation_line(plan))
    seconds = plan["seconds_for_trials"]
    if line := time_budget_line(plan["default_time_budget_seconds"], for_trials=seconds):
        _say(f"Time      {line}")
    elif seconds is not None:
        _say(f"Time      trials begin for at most {format_duration(seconds)}")


def _predicted(entry: Mapping[str, Any]) -> str:
    """Returns the predicted peak of a configuration, to stand behind it; empty if there is none."""
    peak_bytes = entry["predicted_peak_memory_bytes"]
    if peak_bytes is None:
        return " (not predicted)" if entry.get("was_predicted", True) else ""
    over = ", over the cap" if entry["is_over_cap"] else ""
    speed = _speed(entry.get("predicted_tokens_per_second"))
    return f" (about {format_size(peak_bytes)}{speed}{over})"


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


def _confirmation_line(plan: Mapping[str, Any]) -> str:
    if not plan["variants_share"]:
        return "Confirm   nothing: each speed is that of one measurement"
    for_finalists = f"{100 * plan['confirm_share']:.0f} % of the search's time"
    for_variants = f"{100 * plan['variants_share']:.0f} %"
    confirm_seconds, variants_seconds = plan.get("confirm_seconds"), plan.get("variants_seconds")
    if confirm_seconds is not None and variants_seconds is not None:
        for_finalists += f" ({format_duration(confirm_seconds)})"
        for_variants += f" ({format_duration(variants_seconds)})"
    return (
        f"Confirm   the finalists are measured again, in at most {for_finalists}, and the pick "
        f"without each of its techniques, in at most {for_variants}; --no-confirm leaves both out"
    )


def _print_time(planned: Plan) -> None:
    if not planned.is_timed:
        if planned.seconds is None:
            _say("Time      not measured; --time-trials times a few short trainings")
        else:
            _say(
                f"Time      about {format_duration(planned.seconds)} of trials, if each takes what "
                "a trial of those studies took on average; --time-trials times a few short "
                "trainings"
            )
        return
    if planned.seconds is None:
        _say("Time      unknown: no short training finished")
        return
    _say(
        f"Time      about {format_duration(planned.seconds)} of trials, if they were drawn "
        "uniformly from the space; per trial:"
    )
    for precision, seconds in planned.seconds_by_precision.items():
        shared = format_duration(planned.shared_seconds_by_precision[precision])
        _say(
            f"  {precision}, eager: {format_duration(seconds)} for a full training, "
            f"{shared} for memory and speed only"
        )
    _say(f"  {planned.full_trainings} of {planned.trials_wanted} are full trainings")
    if planned.compile_seconds is not None:
        share = f"{100 * planned.compiled_share:.0f} %"
        _say(f"  and {format_duration(planned.compile_seconds)} more for the {share} that compile")
