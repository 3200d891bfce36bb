"""The user's Python code: a function that builds a model, or a training script.

The code is only parsed here, never run; it runs in the process of a trial. Parsing it finds plain
mistakes before anything starts.
"""

import ast
import hashlib
import re
import sys
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from autotune.errors import InvalidInput, StudyMismatch
from autotune.spec.user_files import LARGEST_PYTHON_BYTES, open_file, read_file
from autotune.spec.user_paths import expanded
from autotune.system.syntax_trees import syntax_tree

SCRIPT = "script"
"""The value of `Workload.model` for a script."""

SET_BY_SCRIPT = {
    "model": "its model",
    "pretrained": "its model",
    "layers": "its model",
    "width": "its model",
    "heads": "its model",
    "feed_forward_width": "its model",
    "vocab_size": "its model",
    "sequence_length": "its text",
    "dataset": "its text",
    "dataset_config": "its text",
    "dataset_split": "its text",
    "text_column": "its text",
    "prompt_format": "its text",
    "held_out_split": "its text",
    "streaming": "its text",
    "tokenizer": "its text",
    "packing": "its text",
    "learning_rates": "its learning rate",
    "schedule": "its learning rate",
    "learning_rate_warmup_steps": "its learning rate",
    "evaluation_sequences": "how it evaluates",
    "adapter_dropout": "its adapters",
    "adapter_alpha": "its adapters",
    "adapter_scaling": "its adapters",
    "adapter_init": "its adapters",
    "adapter_rank_pattern": "its adapters",
    "adapter_alpha_pattern": "its adapters",
    "modules_to_save": "its adapters",
    "modules_to_save_dtype": "its adapters",
}
"""Settings that a script decides by itself, and what each of them is part of."""

_REFERENCE_HINT = "write path/to/file.py:function or package.module:function"


@dataclass(frozen=True, kw_only=True)
class FunctionReference:
    """The parts of `path/to/file.py:function` or `package.module:function`."""

    place: str
    function: str

    @property
    def file(self) -> Path | None:
        """The path of the file; None for a module, which only an import finds."""
        return expanded(self.place) if self.place.endswith(".py") else None

    @property
    def short_name(self) -> str:
        """A name such as `model-build`, valid as part of a file name."""
        module = Path(self.place).stem if self.file else self.place
        name = f"{module}-{self.function}"
        return re.sub("[^A-Za-z0-9]", "-", name).strip("-")


def is_function_reference(model: str) -> bool:
    """Whether `model` refers to a function, and not to a built-in model, a file or the hub."""
    return ":" in model


def read_reference(model: str) -> FunctionReference:
    """Returns the parts of a reference to a function. Raises InvalidInput for any other text."""
    if "://" in model:
        raise InvalidInput(
            f"{model!r:.80} is an address, from which no model is read",
            hint="give a name of the Hugging Face hub, such as owner/name, or a folder",
        )
    place, _, function = model.rpartition(":")
    is_module = all(part.isidentifier() for part in place.split("."))
    is_valid_place = place.endswith(".py") or is_module
    if not is_valid_place or not function.isidentifier():
        raise InvalidInput(f"{model!r} does not name a function", hint=_REFERENCE_HINT)
    return FunctionReference(place=place, function=function)


def parameters_of(reference: FunctionReference) -> frozenset[str] | None:
    """Returns the names of the function's parameters, parsed from its file without running it.

    None if the file does not tell: a module, a decorated function, one with **kwargs, a class or an
    imported name. Raises InvalidInput if the file is missing, is not valid Python or does not have
    the function.
    """
    if reference.file is None:
        return None
    tree = read_python(reference.file)
    if not _may_define(tree, reference.function):
        raise InvalidInput(
            f"{reference.file} has no function {reference.function!r}",
            hint=f"name a function that it defines: {_REFERENCE_HINT}",
        )
    for statement in tree.body:
        if isinstance(statement, ast.FunctionDef) and statement.name == reference.function:
            arguments = statement.args
            if arguments.kwarg is not None or statement.decorator_list:
                return None
            named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
            return frozenset(argument.arg for argument in named)
    return None  # a class, or a name that comes from elsewhere


def _may_define(tree: ast.Module, name: str) -> bool:
    """Whether the module assigns, defines or imports `name`, or may do so dynamically."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=given) | ast.ClassDef(name=given) | ast.Name(id=given):
                found = given == name or given in ("globals", "exec", "setattr", "__getattr__")
            case ast.alias(name=given, asname=other):
                found = given == "*" or name in (given, other)
            case _:
                found = False
        if found:
            return True
    return False


def check_function(model: str, settings: Mapping[str, Any]) -> None:
    """Raise InvalidInput for a missing function or for sizes in `settings` it does not take."""
    parameters = parameters_of(read_reference(model))
    if parameters is None:
        return
    for field in ("layers", "width", "heads", "feed_forward_width"):
        if settings.get(field) is not None and field not in parameters:
            raise InvalidInput(
                f"{model} takes no {field}",
                hint=f"omit --{field.replace('_', '-')}, or add this parameter to the function",
            )


def check_script(settings: Mapping[str, Any]) -> None:
    """Raise InvalidInput for an invalid script, or for `settings` that a script decides itself."""
    script = settings["script"]
    if not isinstance(script, str) or not (script.endswith(".py") or is_script_module(script)):
        raise InvalidInput(
            f"script {script!r} is not a Python file",
            hint="name your training script, train.py, or its module, package.train",
        )
    read_arguments(settings.get("script_arguments") or ())
    for field, what in SET_BY_SCRIPT.items():
        value = settings.get(field)
        if value is None or (field == "model" and value == SCRIPT):
            continue
        raise InvalidInput(
            f"a script decides {what} itself, {field} = {value!r} cannot be set from outside",
            hint=f"leave --{field.replace('_', '-')} or --script out",
        )
    read_python(script_file(script))


def read_arguments(arguments: object) -> tuple[str, ...]:
    """Returns the arguments of a script, texts that a program can be started with.

    Raises InvalidInput.
    """
    if not isinstance(arguments, list | tuple) or not all(map(_is_argument, arguments)):
        raise InvalidInput(
            f"Invalid script_arguments: {arguments!r:.60}",
            hint='use a list of strings, such as ["config/tiny.py", "--device=cpu"]',
        )
    return tuple(arguments)


def _is_argument(argument: object) -> bool:
    return isinstance(argument, str) and "\0" not in argument and _is_storable(argument)


def _is_storable(text: str) -> bool:
    """Whether `text` is Unicode that every database stores; a file name may be other bytes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def is_script_module(script: str) -> bool:
    """Whether the script is a module, as of `python -m package.train`, and not a file."""
    names = script.split(".")
    return len(names) > 1 and names[-1] != "py" and all(name.isidentifier() for name in names)


def script_file(script: str) -> Path:
    """Returns the file of a script. Raises InvalidInput for a module that is not there.

    A module is found as `python -m` finds it from this folder, but without importing the packages
    that it is in.
    """
    if not is_script_module(script):
        return expanded(script)
    places: Iterable[str] | None = [str(Path.cwd()), *sys.path]
    origin = None
    names = script.split(".")
    while places is not None and (names or origin is None):
        spec = PathFinder.find_spec(names.pop(0) if names else "__main__", list(places))
        if spec is None:
            break
        places = spec.submodule_search_locations
        is_package = places is not None
        origin = None if is_package else spec.origin
    if names or origin is None or not origin.endswith(".py"):
        raise InvalidInput(
            f"script {script!r} is not a Python file, nor a module that Python finds from here",
            hint=f"run from the folder in which python -m {script} works, or name a file: train.py",
        )
    return Path(origin)


def script_folder(script: str) -> Path:
    """Returns the absolute folder that Python puts first on the path of a script.

    Paths of its files are relative to it.
    """
    if is_script_module(script):
        return Path.cwd()
    return expanded(script).absolute().parent


def takes_size(model: str, size: str) -> bool:
    """Whether `size` applies to `model`; a function must have a parameter of that name."""
    if not is_function_reference(model):
        return True
    parameters = parameters_of(read_reference(model))
    return parameters is not None and size in parameters


def read_python(file: Path) -> ast.Module:
    """Returns the syntax tree of the file. Raises InvalidInput if it is not valid Python."""
    content = read_file(file, most_bytes=LARGEST_PYTHON_BYTES, hint="name a Python file")
    try:
        with warnings.catch_warnings(action="ignore"):  # warnings about the user's code
            return syntax_tree(content, file=str(file))
    except SyntaxError as error:
        line = f" in line {error.lineno}" if error.lineno else ""
        raise InvalidInput(
            f"{file} is not valid Python: {error.msg}{line}", hint="correct this line"
        ) from None
    except (ValueError, RecursionError, MemoryError) as error:
        reason = str(error) or "it is nested too deeply"
        raise InvalidInput(
            f"{file} is not valid Python: {reason}", hint="name a Python file"
        ) from None


def sha256_of(file: Path) -> str:
    """Returns the hexadecimal SHA-256 of the file's content. Raises OSError."""
    with open_file(file) as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def script_sha256(script: str) -> str:
    """Returns the SHA-256 of the script. Raises InvalidInput if it is not found from here."""
    try:
        return sha256_of(script_file(script))
    except OSError as error:
        raise InvalidInput(
            f"script {script} cannot be read: {error.strerror}",
            hint="run from the folder in which the study was created",
        ) from None


def changed_since(what: str) -> StudyMismatch:
    """Returns the error for code that has changed since the study was created."""
    return StudyMismatch(
        f"{what} has changed since the study was created",
        hint="restore the old content, or begin another study with another --name",
    )
