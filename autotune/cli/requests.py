"""Makes the options of a command of the settings of its request (`spec/setting.py`).

A parameter of a command whose type is a request, such as `FitRequest`, is replaced by an option for
each setting, and the command is called with the request. A parameter of type `Given[FitRequest]`
gets what was typed instead, as {name of the setting: value}, for what another machine will check.
"""

import inspect
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Generic, TypeVar, get_args, get_origin

import typer

from autotune.cli.completion import completion_of
from autotune.cli.help import AFTER_SEPARATOR
from autotune.cli.lines import print_line
from autotune.errors import InvalidInput
from autotune.importers import with_trainer_file
from autotune.spec.model_choice import with_model_config
from autotune.spec.setting import InvalidSetting, Option, Settings, all_options_of

RequestType = TypeVar("RequestType", bound=Settings)


class Given(dict[str, Any], Generic[RequestType]):
    """The settings of a request that a command line names, as they were typed."""

    def __init__(self, context: typer.Context) -> None:
        super().__init__()
        self.context = context


def takes_request(command: Callable[..., None]) -> Callable[..., None]:
    """Returns `command` with its request replaced by an option for each setting.

    Its attribute `kind` is the class of the request.
    """
    signature = inspect.signature(command)
    requests = [each for each in signature.parameters.values() if _kind_of(each.annotation)]
    if not requests:
        return command
    (request,) = requests
    kind = _kind_of(request.annotation)
    assert kind is not None
    declared: type = kind
    options = [option for option in all_options_of(declared).values() if option.is_typed]

    def expanded(of_command: typer.Context, **typed: Any) -> None:
        given = Given[Settings](of_command)
        given.update(settings_typed(options, typed))
        given.update(_script_arguments(typed.get(SCRIPT_ARGUMENTS), given))
        is_raw = get_origin(request.annotation) is Given
        values: dict[str, Any] = {request.name: given if is_raw else request_of(kind, given)}
        if "context" in signature.parameters:
            values["context"] = of_command
        command(**values)

    parameters = [_CONTEXT, *(parameter_of(option) for option in options)]
    if any(option.name == "script" for option in options):
        parameters.append(_PARAMETER_OF_SCRIPT)
    expanded.kind = kind  # type: ignore[attr-defined]
    expanded.__name__ = command.__name__
    expanded.__doc__ = command.__doc__
    expanded.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    expanded.__annotations__ = {entry.name: entry.annotation for entry in parameters}
    return expanded


def settings_typed(options: Iterable[Option], typed: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings that were typed, of the values of a command's parameters.

    A size or a duration stays text. Raises InvalidInput, which names a setting by its flag.
    """
    given = {}
    for option in options:
        value = typed[option.parameter]
        if value is None:
            continue
        if option.turns_off:
            value = not value
        try:
            given[option.name] = value if option.format.takes_text else option.parse(value)
        except InvalidSetting as error:
            raise error.by_flag() from None
    return given


def _kind_of(annotation: Any) -> type[Settings] | None:
    """Returns the request that a parameter is, or of which it has what was typed."""
    if get_origin(annotation) is Given:
        (annotation,) = get_args(annotation)
    is_request = isinstance(annotation, type) and issubclass(annotation, Settings)
    return annotation if is_request else None


def taken_from(given: Given[Any], kind: type[RequestType]) -> RequestType:
    """Returns the settings of `kind` that were typed, and removes them from `given`."""
    names = [name for name in kind.__dataclass_fields__ if name in given]
    part = Given[Any](given.context)
    part.update({name: given.pop(name) for name in names})
    return request_of(kind, part)


def request_of(kind: type[RequestType], given: Given[Any]) -> RequestType:
    """Returns the request of what was typed, with the model that it names resolved.

    Raises InvalidInput, which names a setting by its flag.
    """
    try:
        complete = with_trainer_file(given, kind, told=_silent if given.get("quiet") else _say)
        return kind.of(with_model_config(complete))
    except InvalidSetting as error:
        raise error.by_flag() from None


def _say(lines: Sequence[str]) -> None:
    for line in lines:
        print_line(line, to_stderr=True)


def _silent(lines: Sequence[str]) -> None:
    pass


def parameter_of(option: Option) -> inspect.Parameter:
    """Returns a setting as a parameter of a command that typer reads; None: it is not given."""
    flags = [option.flag if option.off_flag is None else f"{option.flag}/{option.off_flag}"]
    if option.synonym is not None:
        flags.append(option.synonym)
    settings: dict[str, Any] = {
        "metavar": option.metavar or None,
        "help": option.help,
        "hidden": option.is_hidden,
        "autocompletion": completion_of(option),
    }
    if option.default is not None and not option.is_switch:
        written = option.format.write(option.default)
        settings["help"] += f" [default: {written}]" if written else ""
    default = ... if option.is_required else None
    if option.is_argument:
        declared = typer.Argument(default, **settings)
    else:
        declared = typer.Option(default, *flags, rich_help_panel=option.group, **settings)
    typed: Any = bool if option.is_switch else list[str] if option.is_repeatable else str
    return inspect.Parameter(
        option.parameter,
        inspect.Parameter.KEYWORD_ONLY,
        annotation=typed if option.is_required else typed | None,
        default=declared,
    )


# -- the arguments of a script ---------------------------------------------------------------------

SCRIPT_ARGUMENTS = "script_arguments"
_CONTEXT = inspect.Parameter("of_command", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)
_PARAMETER_OF_SCRIPT = inspect.Parameter(
    SCRIPT_ARGUMENTS,
    inspect.Parameter.KEYWORD_ONLY,
    annotation=list[str] | None,
    # Hidden: the help of --script says it, so that no heading stands before the first one.
    default=typer.Argument(None, metavar="-- ARGUMENTS", hidden=True),
)


def _script_arguments(words: list[str] | None, given: Given[Any]) -> dict[str, Any]:
    """Returns the setting of the arguments of a script, which stand behind a separate `--`.

    Raises InvalidInput for words before it, which are no option of the command.
    """
    if not words:
        return {}
    context, script = given.context, given.get("script")
    before_separator = len(words) - context.meta[AFTER_SEPARATOR]
    if script is not None and before_separator:
        raise InvalidInput(
            f"{words[0]!r} is no option of {context.command_path}",
            hint=f"put arguments of the script behind a separate --: {context.command_path} "
            f"--script {shlex.quote(script)} ... -- {shlex.join(words)}",
        )
    return {SCRIPT_ARGUMENTS: words}
