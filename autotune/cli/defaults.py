"""Defaults of options: from `autotune.toml`, `[tool.autotune]` of pyproject.toml, the environment.

A key at the top is an option of `autotune search` without its dashes, such as `max-mem`; it holds
for every command that has the option in the same meaning. A table of the name of a command, such as
`[predict]`, has options of that command. What stands on the command line comes first, then
`AUTOTUNE_DEFAULT_MAX_MEM` of the environment (and `AUTOTUNE_STORAGE`; `AUTOTUNE_SERVER` for the
commands that read a study), then the file, then what is
built in.

They are Click's `default_map` of the command, which checks a value as if it stood on the command
line.

A file that merely lies in a folder, such as one of a repository that was just cloned, must not run
code, and must not say which files are written: such keys are rejected.
"""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from autotune.cli.help import SOURCES_OF_DEFAULTS
from autotune.cli.lines import on_one_line, print_line
from autotune.client.address import SERVER_VARIABLE
from autotune.errors import InvalidInput, suggestion
from autotune.spec.setting import InvalidSetting, all_options_of, option_of, options_of
from autotune.spec.user_code import SET_BY_SCRIPT, is_function_reference
from autotune.spec.workload import OF_ONE_DATASET, SIZE_SETTINGS, Workload

FILE = "autotune.toml"
PROJECT_FILE = "pyproject.toml"
VARIABLE = "AUTOTUNE_DEFAULT_"
"""Begins the names of environment variables; `AUTOTUNE_DEFAULT_TRIALS` is for `--trials`."""
OF_STORAGE = "AUTOTUNE_STORAGE"
"""The variable of `--storage`, whose password would stand in the list of processes."""
ENVIRONMENT = "the environment"
WITHOUT = "leave all defaults out with autotune --no-defaults"


def _parameters(names: Iterable[str]) -> set[str]:
    """Returns the parameters of settings of the workload."""
    return {option_of(Workload, name).parameter for name in names}


_WORKLOAD = _parameters(options_of(Workload))
SHARED = _WORKLOAD | {
    "max_mem",
    "tolerance",
    "prefer",
    "max_perplexity_increase",
    "storage",
    "server",
    "quiet",
}
"""Options of a search that mean the same in the other commands that have them."""
_OF_ANY_MODEL = ("sequence_length", "global_batch", "gradient_clipping")
_EXCLUDED = {
    "study": _WORKLOAD,
    "storage": {"server"},
    "server": {"storage"},
    "reference": {"server"},
    "script": {"seeds"} | _parameters(SET_BY_SCRIPT),
    "model": {"script", "pretrained"} | _parameters(SIZE_SETTINGS) - _parameters(_OF_ANY_MODEL),
    "dataset": _parameters(OF_ONE_DATASET),
    "space": {"scale"},
    "device": {"devices", "workers"},
    "devices": {"device", "workers"},
    "workers": {"device", "devices"},
}
"""{option: defaults that do not apply where it is given}, because they belong to another model,
dataset or space, or because the command does not take both."""
_OF_PATHS = ("space", "dataset", "model", "tokenizer")
REJECTED_IN_FILES = {
    "script": "would run code",
    "allow_code": "would run code",
    "storage": "would choose where studies are stored",
    "server": "would choose who gets what is submitted",
    "webhook": "would choose who is told of searches",
    "host": "would choose who can connect",
    "allow_host": "would choose who can connect",
    "internal_address": "would choose where other servers send their secret",
    "trust_user_header": "would choose who can connect",
    "trust_proxy": "would choose who can connect",
    "tls_certificate": "would choose who can connect",
    "tls_key": "would choose who can connect",
    "ray": "would choose which cluster gets your code and data",
    "to_optuna": "would choose where studies are written",
    "data_root": "would choose which files are read",
    "keep": "would choose which files are deleted",
    "quota": "would choose which files are deleted",
    "out": "would choose which files are written",
    "plot": "would choose which files are written",
    "into": "would choose which files are written",
    "in_place": "would choose which files are written",
    "force": "would choose which files are written",
}


def defaults_for(command: Any, name: str, args: list[str], parent: Any) -> dict[str, Any]:
    """Returns {parameter: value} of the defaults that apply to a command line.

    Raises InvalidInput for a file that is invalid and for keys that are no options.
    """
    if parent is None or parent.find_root().params.get("no_defaults"):
        return {}
    # What is given decides which defaults apply. Nothing is rejected or run here.
    tried = command.make_context(name, list(args), parent=parent, resilient_parsing=True)
    given = {known for known in [*tried.params, "help"] if _is_given(tried, known)}
    if "help" in given:
        return {}
    excluded = given.union(*(_EXCLUDED.get(option, set()) for option in given))
    options = _options(command)
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    of_command = tried.command_path.split()[1]
    for source, found in _tables(parent.find_root().command.commands, of_command):
        for option, value in found.items():
            if option in options and option not in excluded:
                values[option] = _as_typed(value, options[option])
                sources[option] = source
    _check_values(command.callback.kind, values, sources)
    parent.meta[SOURCES_OF_DEFAULTS] = sources
    return values


def _check_values(kind: type, values: Mapping[str, Any], sources: Mapping[str, str]) -> None:
    """Raise InvalidInput, which says where it stands, for a value that its setting cannot have."""
    if not values:
        return
    from autotune.spec.checked import checked_beside  # noqa: PLC0415  # imports pydantic, 0.07 s

    for option in all_options_of(kind).values():
        value = values.get(option.parameter)
        if value is None or option.is_switch:
            continue  # typer reads a switch
        try:
            checked_beside(kind, {option.name: option.parse(value)})
        except InvalidSetting as error:
            named = error.by_flag()
            source = sources[option.parameter]
            raise InvalidInput(f"{source}: {named.message}", hint=named.hint) from None


def print_defaults(context: Any) -> None:
    """Print what applies to a command on stderr, URLs without a token or a password."""
    sources = context.meta.get(SOURCES_OF_DEFAULTS, {})
    values = dict(context.default_map or {})
    if "server" in values:
        from autotune.client.address import server_address  # noqa: PLC0415  # only with a server

        values["server"] = server_address(values["server"]).url
    if "storage" in values:
        from autotune.storage.error_translation import redacted_url  # noqa: PLC0415  # as above

        values["storage"] = redacted_url(values["storage"])
    for source in dict.fromkeys(sources.values()):
        listed = [f"{_key(name)} = {values[name]}" for name in values if sources[name] == source]
        print_line(on_one_line(f"defaults from {source}: {', '.join(listed)}"), to_stderr=True)


def _is_given(context: Any, parameter: str) -> bool:
    source = context.get_parameter_source(parameter)
    return source is not None and source.name == "COMMANDLINE"


def _options(command: Any) -> dict[str, Any]:
    return {each.name: each for each in command.params if each.param_type_name == "option"}


def _as_typed(value: Any, option: Any) -> Any:
    """Returns the value as it would come from the command line: as text, or as a list of texts."""
    if option.multiple:
        return value.split() if isinstance(value, str) else value
    return value if option.is_flag else str(value)


def _tables(commands: Mapping[str, Any], of_command: str) -> list[tuple[str, dict[str, Any]]]:
    """Returns (source, {parameter: value}) of all defaults for a command; the last one counts."""
    of_search = _options(commands["search"].load())
    file, content = nearest_file() or (Path(FILE), {})
    top = {key: value for key, value in content.items() if key not in commands}
    own = content.get(of_command, {})
    for key, table in content.items():
        if key in commands and not isinstance(table, dict):
            raise InvalidInput(
                f"{file}: {key} = {table!r} is not a table",
                hint=f"write [{key}] with its options below it, or {WITHOUT}",
            )
    environment = {
        _key(name.removeprefix(VARIABLE).lower()): text
        for name, text in os.environ.items()
        if name.startswith(VARIABLE) and text
    }
    if storage := os.environ.get(OF_STORAGE):
        environment["storage"] = storage
    server = os.environ.get(SERVER_VARIABLE)
    if server and "storage" not in environment and _reads_a_study(commands[of_command].load()):
        environment.setdefault("server", server)
    return [
        (str(file), _meant(_of_file(file, top, [*of_search, *commands]), of_command)),
        (str(file), _of_file(file, own, [*_options(commands[of_command].load())])),
        (ENVIRONMENT, _meant(_known(ENVIRONMENT, environment, [*of_search]), of_command)),
    ]


def _reads_a_study(command: Any) -> bool:
    """Whether a command shows a study, of a database or of a server."""
    return {"study", "storage", "server"} <= {each.name for each in command.params}


def _meant(values: dict[str, Any], of_command: str) -> dict[str, Any]:
    """Returns the defaults of a search that mean the same in another command."""
    if of_command == "search":
        return values
    return {name: value for name, value in values.items() if name in SHARED}


def _of_file(file: Path, table: Mapping[str, Any], known: list[str]) -> dict[str, Any]:
    values = _known(str(file), table, known)
    for name, value in values.items():
        _check_harmless(name, str(value), f"{file}: {_key(name)} = {value!r}")
        if name in _OF_PATHS:
            values[name] = _below(file.parent, str(value))
    return values


def _known(source: str, table: Mapping[str, Any], known: list[str]) -> dict[str, Any]:
    """Returns {parameter: value} of a table. Raises InvalidInput for a key that is no option."""
    names = [_key(name) for name in known]
    for key in table:
        if _key(key) not in names:
            hint = suggestion(key, names, otherwise=f"remove it, or {WITHOUT}")
            raise InvalidInput(f"{source}: there is no option {key}", hint=hint)
    return {key.replace("-", "_"): value for key, value in table.items()}


def _key(name: str) -> str:
    return name.replace("_", "-")


def _check_harmless(name: str, value: str, what: str) -> None:
    """Raise InvalidInput for what a file that only lies in a folder may not decide."""
    why = REJECTED_IN_FILES.get(name)
    if name == "model" and is_function_reference(value):
        why = REJECTED_IN_FILES["script"]
    if why is not None:
        raise InvalidInput(
            f"{what} {why}, which a file that is found in a folder may not do",
            hint=f"give --{_key(name)} on the command line or as {VARIABLE}{name.upper()}",
        )


def _below(folder: Path, value: str) -> str:
    """Returns a path of a file of defaults, which is relative to that file, for this folder."""
    looks_like_path = "/" in value or "." in value
    if looks_like_path and not os.path.isabs(value) and (folder / value).exists():
        return os.path.relpath(folder / value)
    return value


def nearest_file() -> tuple[Path, dict[str, Any]] | None:
    """Returns the file of defaults that is nearest to the current folder, with its table.

    Looked for in the current folder and the folders above it, up to the root of its repository or
    the user's home, whichever comes first; only in the current folder where it is in neither, so
    that nobody's file in a shared folder counts. Raises InvalidInput.
    """
    try:
        here = Path.cwd()
    except OSError:  # it has been removed
        return None
    folders = [here, *here.parents]
    home = Path(os.path.expanduser("~"))
    ends = [n for n, folder in enumerate(folders) if folder == home or (folder / ".git").exists()]
    for folder in folders[: ends[0] + 1 if ends else 1]:
        own = folder / FILE
        if own.is_file():
            return _named(own, here), _content(own)
        project = folder / PROJECT_FILE
        if project.is_file():
            tool = _content(project).get("tool", {})
            table = tool.get("autotune") if isinstance(tool, dict) else None
            if isinstance(table, dict):
                return _named(project, here), table
    return None


def _named(file: Path, here: Path) -> Path:
    """Returns the file as messages name it: by its name alone if it is in this folder."""
    return Path(file.name) if file.parent == here else file


def _content(file: Path) -> dict[str, Any]:
    from autotune.spec.user_files import read_toml  # noqa: PLC0415  # only where there is a file

    return read_toml(file, hint=f"correct it, or {WITHOUT}")
