"""Defaults of options: from `autotune.toml`, `[tool.autotune]` of pyproject.toml, the environment.

A key at the top is an option of `autotune search` without its dashes, such as `max-mem`; it holds
for every command that has the option in the same meaning. A table of the name of a command, such as
`[predict]`, has options of that command. What stands on the command line comes first, then
`AUTOTUNE_DEFAULT_MAX_MEM` of the environment, then the file, then what is built in.

A file that merely lies in a folder, such as one of a repository that was just cloned, must not run
code, and must not say which files are written: such keys are rejected.
"""

import os
import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from autotune.cli.lines import on_one_line, print_line
from autotune.errors import InvalidInput, near_misses, suggestion
from autotune.spec.user_code import SET_BY_SCRIPT, is_function_reference
from autotune.spec.workload_options import SIZE_SETTINGS, WORKLOAD_OPTIONS
from autotune.spec.workload_settings import OF_ONE_DATASET

FILE = "autotune.toml"
PROJECT_FILE = "pyproject.toml"
VARIABLE = "AUTOTUNE_DEFAULT_"
"""Begins the names of environment variables; `AUTOTUNE_DEFAULT_TRIALS` is for `--trials`."""
WITHOUT = "leave all defaults out with autotune --no-defaults"
APPLIED = "autotune:defaults"
"""The key of a context's `meta` that says whether a default applies to the command."""

_WORKLOAD = {option.parameter for option in WORKLOAD_OPTIONS.values()}
_SIZES = {WORKLOAD_OPTIONS[name].parameter for name in SIZE_SETTINGS}
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
_EXCLUDED = {
    "study": _WORKLOAD,
    "storage": {"server"},
    "server": {"storage"},
    "script": {"seeds", *(WORKLOAD_OPTIONS[name].parameter for name in SET_BY_SCRIPT)},
    "model": {"script", "pretrained", *_SIZES} - {"seq_len", "global_batch", "gradient_clipping"},
    "dataset": {WORKLOAD_OPTIONS[name].parameter for name in OF_ONE_DATASET},
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
    "tls_certificate": "would choose who can connect",
    "tls_key": "would choose who can connect",
    "ray": "would choose which cluster gets your code and data",
    "to_optuna": "would choose where studies are written",
    "data_root": "would choose which files are read",
    "keep": "would choose which files are deleted",
    "quota": "would choose which files are deleted",
    "out": "would choose which files are written",
    "plot": "would choose which files are written",
    "force": "would choose which files are written",
}
_SWITCHES = {
    **dict.fromkeys(("1", "true", "yes", "on"), True),
    **dict.fromkeys(("0", "false", "no", "off"), False),
}


@dataclass(frozen=True, kw_only=True)
class Default:
    """A value for an option, and where it comes from."""

    source: str
    """A file, or "the environment"."""
    option: Any
    """The option of the command, as typer has it."""
    value: Any
    is_of_command: bool = False
    """Whether it stands in the table of one command, and not at the top."""

    @property
    def arguments(self) -> list[str]:
        """The arguments that set the same; none for a switch that is left off."""
        flag = next(str(name) for name in self.option.opts if name.startswith("--"))
        if self.option.is_flag:
            return [flag] if self.value else list(self.option.secondary_opts)
        values = self.value if self.option.multiple else [self.value]
        if self.option.name == "server":
            values = [_without_token(value) for value in values]
        return [word for value in values for word in (flag, str(value))]


def defaults_for(command: Any, name: str, args: list[str], parent: Any) -> dict[str, Any]:
    """Return {parameter: value} of the defaults that apply to a command line, and print them.

    Raises InvalidInput for a file, key, variable or value that is invalid.
    """
    if parent is None or parent.find_root().params.get("no_defaults"):
        return {}
    # What is given decides which defaults apply. Nothing is rejected or run here.
    tried = command.make_context(name, list(args), parent=parent, resilient_parsing=True)
    given = {known for known in [*tried.params, "help"] if _is_given(tried, known)}
    if "help" in given:
        return {}
    commands = parent.find_root().command.commands
    of_command = tried.command_path.split()[1]
    applied: dict[str, Default] = {}
    for default in (*_of_files(commands, of_command), *_of_environment(commands)):
        option = _options(command).get(default.option.name)
        is_meant = default.is_of_command or of_command == "search"
        if option is not None and (is_meant or option.name in SHARED):
            applied[option.name] = replace(default, option=option)
    excluded = given.union(*(_EXCLUDED.get(option, set()) for option in given))
    applied = {
        option: default
        for option, default in applied.items()
        if option not in excluded and default.arguments
    }
    _print(applied.values())
    parent.meta[APPLIED] = bool(applied)
    return {option: default.value for option, default in applied.items()}


def _without_token(server: str) -> str:
    """Return the URL of a server as it may be printed. Raises InvalidInput."""
    from autotune.client.address import server_address  # noqa: PLC0415  # only with a server

    return server_address(server).url


def _print(applied: Iterable[Default]) -> None:
    """Print one line on stderr for each source, with the arguments that would set the same."""
    by_source: dict[str, list[str]] = {}
    for default in applied:
        by_source.setdefault(default.source, []).extend(default.arguments)
    for source, arguments in by_source.items():
        line = f"defaults from {source}: {shlex.join(arguments)}"
        print_line(on_one_line(line), to_stderr=True)


def _is_given(context: Any, parameter: str) -> bool:
    source = context.get_parameter_source(parameter)
    return source is not None and source.name == "COMMANDLINE"


def _options(command: Any) -> dict[str, Any]:
    return {each.name: each for each in command.params if each.param_type_name == "option"}


# -- the environment -------------------------------------------------------------------------------


def _of_environment(commands: Mapping[str, Any]) -> Iterator[Default]:
    found = {name: text for name, text in os.environ.items() if name.startswith(VARIABLE)}
    if not found:
        return
    known = {f"{VARIABLE}{name.upper()}": each for name, each in _options_of_search(commands)}
    for name, text in found.items():
        if name not in known:
            hint = f"remove it, or {WITHOUT}"
            near = near_misses(name.removeprefix(VARIABLE), [key[len(VARIABLE) :] for key in known])
            if near:
                hint = f"did you mean {VARIABLE}{near[0]}? otherwise {hint}"
            raise InvalidInput(f"the variable {name} sets no option of autotune search", hint=hint)
        if text:
            value = _read(text, known[name])
            yield Default(
                source="the environment",
                option=known[name],
                value=_checked(value, known[name], f"{name} = {text!r}"),
            )


def _read(text: str, option: Any) -> Any:
    """Return the value that a text of the environment means, or the text if it means none."""
    if option.is_flag:
        return _SWITCHES.get(text.lower(), text)
    if option.multiple:
        return text.split()
    kind = option.type_descriptor.annotation
    if kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            return text
    return text


# -- files -----------------------------------------------------------------------------------------


def _of_files(commands: Mapping[str, Any], of_command: str) -> Iterator[Default]:
    """Yield what the nearest file says for all commands, and then what it says for this one."""
    found = nearest_file()
    if found is None:
        return
    file, content = found
    common = dict(_options_of_search(commands))
    tables = {key: value for key, value in content.items() if key in commands}
    keys = {key: value for key, value in content.items() if key not in commands}
    yield from _of_table(file, keys, common, known=[*map(_key, common), *commands], where="")
    for key, table in tables.items():
        if not isinstance(table, dict):
            raise InvalidInput(
                f"{file}: {key} = {table!r} is not a table",
                hint=f"write [{key}] with its options below it, or {WITHOUT}",
            )
    if of_command in tables:
        own = _options(commands[of_command].load())
        of_table = _of_table(
            file, tables[of_command], own, known=[*map(_key, own)], where=f"{of_command}."
        )
        for default in of_table:
            yield replace(default, is_of_command=True)


def _of_table(
    file: Path,
    table: Mapping[str, Any],
    options: Mapping[str, Any],
    *,
    known: list[str],
    where: str,
) -> Iterator[Default]:
    for key, given in table.items():
        name = key.replace("-", "_")
        if name not in options or key.startswith("-"):
            hint = suggestion(key, known, otherwise=f"remove it, or {WITHOUT}")
            raise InvalidInput(f"{file}: there is no option {where}{key}", hint=hint)
        what = f"{file}: {where}{key} = {given!r}"
        value = _checked(given, options[name], what)
        _check_harmless(name, value, what)
        if name in _OF_PATHS:
            value = _below(file.parent, value)
        yield Default(source=str(file), option=options[name], value=value)


def _options_of_search(commands: Mapping[str, Any]) -> list[tuple[str, Any]]:
    return list(_options(commands["search"].load()).items())


def _key(name: str) -> str:
    return name.replace("_", "-")


def _check_harmless(name: str, value: Any, what: str) -> None:
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
    """Return a path of a file of defaults, which is relative to that file, for this folder."""
    looks_like_path = "/" in value or "." in value
    if looks_like_path and not os.path.isabs(value) and (folder / value).exists():
        return os.path.relpath(folder / value)
    return value


def _checked(value: Any, option: Any, what: str) -> Any:
    """Return the value as the command takes it. Raises InvalidInput for one of another type."""
    if option.is_flag:
        if isinstance(value, bool):
            return value
        raise InvalidInput(f"{what} is not a switch", hint="write true or false")
    if option.multiple:
        values = [value] if isinstance(value, str) else value
        if isinstance(values, list) and all(isinstance(each, str) for each in values):
            return values
        raise InvalidInput(f"{what} is not a list of texts", hint='write ["...", "..."]')
    kind = option.type_descriptor.annotation
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if kind is int:
        if is_number and not isinstance(value, float):
            return value
        raise InvalidInput(f"{what} is not a whole number", hint="write a number without quotes")
    if kind is float:
        if is_number:
            return value
        raise InvalidInput(f"{what} is not a number", hint="write a number without quotes")
    if isinstance(value, str) or is_number:
        return str(value)
    raise InvalidInput(f"{what} is not a text", hint='write it between quotes: "..."')


def nearest_file() -> tuple[Path, dict[str, Any]] | None:
    """Return the file of defaults that is nearest to the current folder, with its table.

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
    """Return the file as messages name it: by its name alone if it is in this folder."""
    return Path(file.name) if file.parent == here else file


def _content(file: Path) -> dict[str, Any]:
    from autotune.spec.user_files import read_toml  # noqa: PLC0415  # only where there is a file

    return read_toml(file, hint=f"correct it, or {WITHOUT}")
