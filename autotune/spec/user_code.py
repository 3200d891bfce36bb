"""Python of the user's own, named on the command line: a function that makes a model, or a training script.

Here it is only read, never run: that happens in a trial's own process. What is plainly wrong with
it is said at once.
"""

import ast
import hashlib
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune.errors import InvalidInput, StudyMismatch
from autotune.spec.user_paths import expanded, is_plain_file, is_there

SCRIPT = "script"
"""What stands for the model where a script is run."""

_NOT_OF_A_SCRIPT = {
    **dict.fromkeys(("model", "pretrained"), "its model"),
    **dict.fromkeys(("layers", "width", "heads", "feed_forward_width", "vocab_size"), "its model"),
    **dict.fromkeys(
        ("sequence_length", "dataset", "dataset_config", "dataset_split", "text_column"), "its text"
    ),
    **dict.fromkeys(("held_out_split", "streaming", "tokenizer", "packing"), "its text"),
    **dict.fromkeys(
        ("learning_rates", "schedule", "learning_rate_warmup_steps"), "its learning rate"
    ),
    "evaluation_sequences": "how it evaluates",
}
"""Settings that a script decides by itself."""

_FORMS = "write path/to/file.py:function or package.module:function"


@dataclass(frozen=True, kw_only=True)
class FunctionReference:
    """`path/to/file.py:function` or `package.module:function`, taken apart."""

    place: str
    function: str

    @property
    def file(self) -> Path | None:
        """None for a module, which only an import finds."""
        return expanded(self.place) if self.place.endswith(".py") else None

    @property
    def short_name(self) -> str:
        """Fit for a file's name: `model-build`."""
        place = Path(self.place).stem if self.file else self.place
        words = f"{place}-{self.function}"
        return "".join(
            letter if letter.isascii() and letter.isalnum() else "-" for letter in words
        ).strip("-")


def is_function_reference(model: str) -> bool:
    return ":" in model


def read_reference(model: str) -> FunctionReference:
    """Raises InvalidInput for what has not the form of one."""
    place, _, function = model.rpartition(":")
    is_place = place.endswith(".py") or all(word.isidentifier() for word in place.split("."))
    if not is_place or not function.isidentifier():
        raise InvalidInput(f"{model!r} names no function", hint=_FORMS)
    return FunctionReference(place=place, function=function)


def parameters_of(reference: FunctionReference) -> frozenset[str] | None:
    """The names the function takes, read from its file without running it; None where that does not tell.

    Raises InvalidInput for a file that is missing or is no Python.
    """
    if reference.file is None:
        return None
    tree = read_python(reference.file)
    if not _may_define(tree, reference.function):
        raise InvalidInput(
            f"{reference.file} has no function {reference.function!r}",
            hint=f"name one that it defines: {_FORMS}",
        )
    for statement in tree.body:
        if isinstance(statement, ast.FunctionDef) and statement.name == reference.function:
            given = statement.args
            if given.kwarg is not None or statement.decorator_list:
                return None
            return frozenset(
                one.arg for one in [*given.posonlyargs, *given.args, *given.kwonlyargs]
            )
    return None  # a class, or a name that comes from elsewhere


def _may_define(tree: ast.Module, name: str) -> bool:
    """Whether the name appears where one is given, or may come from elsewhere without appearing."""
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
    """Raises InvalidInput for a function that cannot be, and for sizes in `settings` that it does not take."""
    taken = parameters_of(read_reference(model))
    for field in ("layers", "width", "heads", "feed_forward_width"):
        if settings.get(field) is not None and taken is not None and field not in taken:
            raise InvalidInput(
                f"{model} takes no {field}",
                hint=f"leave --{field.replace('_', '-')} out, or give the function one",
            )


def check_script(settings: Mapping[str, Any]) -> None:
    """Raises InvalidInput for a script that cannot be, and for `settings` that it decides by itself."""
    script = settings["script"]
    if not isinstance(script, str) or not script.endswith(".py"):
        raise InvalidInput(
            f"script {script!r} is no Python file", hint="name your training script: train.py"
        )
    for field, what in _NOT_OF_A_SCRIPT.items():
        if settings.get(field) is not None and (field, settings[field]) != ("model", SCRIPT):
            raise InvalidInput(
                f"a script decides {what} itself, {field} = {settings[field]!r} cannot be set from outside",
                hint=f"leave --{field.replace('_', '-')} or --script out",
            )
    read_python(expanded(script))


def takes_size(model: str, size: str) -> bool:
    """Whether a size can be said of `model`; of a function, whether it plainly takes one of that name."""
    return not is_function_reference(model) or size in (parameters_of(read_reference(model)) or ())


def read_python(file: Path) -> ast.Module:
    """The file's syntax tree. Raises InvalidInput."""
    if is_there(str(file)) and not is_plain_file(file):
        raise InvalidInput(f"{file} is no file", hint="name a Python file")
    try:
        with warnings.catch_warnings(action="ignore"):  # of Python, about what the user's code says
            return ast.parse(file.read_bytes(), filename=str(file))
    except OSError as error:
        raise InvalidInput(
            f"{file} cannot be read: {error.strerror}", hint="check the path"
        ) from None
    except SyntaxError as error:
        raise InvalidInput(
            f"{file} is no valid Python: {error.msg}"
            + (f" in line {error.lineno}" if error.lineno else ""),
            hint="mend the place it names",
        ) from None
    except (ValueError, RecursionError, MemoryError) as error:
        reason = str(error) or "it is nested too deeply"
        raise InvalidInput(
            f"{file} is no valid Python: {reason}", hint="name a Python file"
        ) from None


def sha256_of(file: Path) -> str:
    """Raises OSError."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def script_sha256(script: str) -> str:
    """Raises InvalidInput where the script is not there, as seen from the folder the search runs in."""
    try:
        return sha256_of(expanded(script))
    except OSError as error:
        raise InvalidInput(
            f"script {script} cannot be read: {error.strerror}",
            hint="run from the folder the study was begun in",
        ) from None


def changed_since(what: str) -> StudyMismatch:
    """The refusal of code that is no longer the one a study was begun with."""
    return StudyMismatch(
        f"{what} is no longer what the study was begun with",
        hint="bring the old content back, or begin another study",
    )
