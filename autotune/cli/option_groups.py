"""Makes a command's parameters of declared options (`spec/option.py`).

A decorator replaces one parameter of a command by the options of a group, and calls the command
with {name of the setting: value} for it: `@with_workload` the parameter `workload`,
`@with_configuration` that of the techniques, `@with_search_settings` what only a search has.
"""

import inspect
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import typer

from autotune.cli.help import AFTER_SEPARATOR
from autotune.cli.options import parse_pairs, typer_option
from autotune.errors import InvalidInput
from autotune.spec.learning_rates import LEARNING_RATE_NAMES
from autotune.spec.model_choice import with_model_config
from autotune.spec.option import Option
from autotune.spec.technique_options import CONFIGURATION_OPTIONS
from autotune.spec.workload_options import SIZE_SETTINGS, WORKLOAD_OPTIONS
from autotune.study.request import SEARCH_OPTIONS

_FLAGS = {
    option.keyword: option.flag for option in (*WORKLOAD_OPTIONS.values(), *CONFIGURATION_OPTIONS)
}
"""{field of `Workload` or `TrainingConfig`: its flag}"""

_ONLY_OF_SEARCH = [option for name, option in SEARCH_OPTIONS.items() if name != "storage"]


def with_search_settings(command: Callable[..., None]) -> Callable[..., None]:
    return _expanded(command, "settings", _ONLY_OF_SEARCH, dict)


def with_workload(command: Callable[..., None]) -> Callable[..., None]:
    """Like `with_model_size` with all settings; the command itself resolves the model.

    A server may be asked to train it, whose files this machine does not have.
    """
    return _expanded(command, "workload", WORKLOAD_OPTIONS.values(), _typed_workload)


def with_model_size(command: Callable[..., None]) -> Callable[..., None]:
    """Replace `workload` by the settings on which memory depends, with the model resolved."""
    options = [WORKLOAD_OPTIONS[name] for name in SIZE_SETTINGS]
    return _expanded(command, "workload", options, _workload_settings)


def with_predicted_model(command: Callable[..., None]) -> Callable[..., None]:
    """Like `with_model_size`, where the number of devices may also be called the world size."""
    settings = {name: WORKLOAD_OPTIONS[name] for name in SIZE_SETTINGS}
    settings["devices_per_trial"] = replace(settings["devices_per_trial"], synonym="--world-size")
    return _expanded(command, "workload", settings.values(), _workload_settings)


def with_configuration(command: Callable[..., None]) -> Callable[..., None]:
    return _expanded(command, "configuration", CONFIGURATION_OPTIONS, _configuration_choices)


def with_script_arguments(
    workload: Mapping[str, Any], given: Sequence[str] | None, context: typer.Context
) -> Mapping[str, Any]:
    """Return the workload with the arguments of its script, which stand behind a separate `--`.

    Raises InvalidInput for words before it, which are no option of the command.
    """
    if not given:
        return workload
    before_separator = len(given) - context.meta[AFTER_SEPARATOR]
    if workload.get("script") is not None and before_separator:
        raise InvalidInput(
            f"{given[0]!r} is no option of {context.command_path}",
            hint=f"put arguments of the script behind a separate --: {context.command_path} "
            f"--script {shlex.quote(workload['script'])} ... -- {shlex.join(given)}",
        )
    return {**workload, "script_arguments": given}


def options_given(
    workload: Mapping[str, Any], configuration: Mapping[str, Any], **others: object
) -> list[str]:
    """Return the options that have a value, as they are typed: `--seq-len` for `sequence_length`.

    `others` are parameters of the command that belong to neither group.
    """
    settings = {**workload, **configuration}
    flags = [flag for name, flag in _FLAGS.items() if settings.get(name) is not None]
    for name, value in others.items():
        if value is not None:
            flags.append(f"--{name.replace('_', '-')}")
    return flags


def _typed_workload(given: Mapping[str, Any]) -> dict[str, Any]:
    settings = dict(given)
    if "learning_rates" in given:
        rates = parse_pairs("--learning-rate", given["learning_rates"], known=LEARNING_RATE_NAMES)
        settings["learning_rates"] = dict(rates) or None
    return settings


def _workload_settings(given: Mapping[str, Any]) -> dict[str, Any]:
    return with_model_config(_typed_workload(given))


def _configuration_choices(given: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in given.items() if value is not None}


def _expanded(
    command: Callable[..., None],
    parameter: str,
    options: Iterable[Option],
    collect: Callable[[Mapping[str, Any]], dict[str, Any]],
) -> Callable[..., None]:
    """Return `command` with its `parameter` replaced by `options`.

    The result of `collect`, called with {name of the setting: typed value}, is passed as
    `parameter`.
    """
    options = list(options)

    def expanded(**given: Any) -> None:
        values = {}
        for option in options:
            typed = given.pop(option.parameter)
            values[option.keyword] = not typed if option.turns_off else typed
        command(**given, **{parameter: collect(values)})

    parameters: list[inspect.Parameter] = []
    for original in inspect.signature(command).parameters.values():
        if original.name == parameter:
            parameters += [_parameter(option) for option in options]
        else:
            parameters.append(original.replace(kind=inspect.Parameter.KEYWORD_ONLY))
    expanded.__name__ = command.__name__
    expanded.__doc__ = command.__doc__
    expanded.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    expanded.__annotations__ = {entry.name: entry.annotation for entry in parameters}
    return expanded


def _parameter(option: Option) -> inspect.Parameter:
    """Return the option as a parameter of a command that typer reads."""
    default = False if option.turns_off else option.default
    return inspect.Parameter(
        option.parameter,
        inspect.Parameter.KEYWORD_ONLY,
        annotation=option.kind.typed | None if default is None else option.kind.typed,
        default=typer_option(option, default=default),
    )
