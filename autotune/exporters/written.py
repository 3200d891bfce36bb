"""Writes the configuration of a trial as the files of another trainer."""

import dataclasses
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune.errors import IllegalConfiguration, InvalidInput, StorageUnavailable, suggestion
from autotune.exporters import TARGETS
from autotune.exporters.adapters import trained_dtype
from autotune.exporters.export import Export, Target, Unsupported
from autotune.exporters.recipe import DECIDED_BY_SCRIPT, Recipe, recipe_of
from autotune.printable import printable
from autotune.spec.config import OF_SCRIPTS
from autotune.spec.result import JSON_SCHEMA, StudyResult, TrialRecord
from autotune.spec.study import RESULTS_FOLDER
from autotune.spec.user_code import is_function_reference, read_reference, script_sha256
from autotune.spec.user_paths import expanded, path_exists
from autotune.spec.workload import STANDARD_LIBRARY_TEXT, Workload


@dataclass(frozen=True, kw_only=True, repr=False)
class WrittenExport:
    """The files that were written, and what the trainer cannot express."""

    target: str
    target_version: str
    record: TrialRecord
    folder: Path
    content: Export

    @property
    def files(self) -> tuple[Path, ...]:
        """The files, in the order in which a user should read them."""
        return tuple(self.folder / name for name in self.content.files)

    @property
    def file_contents(self) -> dict[str, bytes]:
        """The bytes of each file by its name."""
        return _contents(self.content)

    @property
    def lacks_techniques(self) -> bool:
        """Whether the trainer cannot express a technique, so that memory and speed differ."""
        return any(entry.is_technique for entry in self.content.unsupported)

    def sections(self) -> Iterator[tuple[str, list[str]]]:
        """Yield a title and its lines for each part of what a user should know."""
        content = self.content
        where = "" if content.is_for_any_folder else ", in that folder"
        to_replace = [
            f"replace {' and '.join(names)} in {file}"
            for file, names in content.placeholders().items()
        ]
        if content.same_script:
            yield "Shorter: your script as it is, with this configuration", [content.same_script]
        before_use = [*to_replace, *content.before_use]
        if before_use:
            yield "Before you use it", before_use
        use = "Or with these files" if content.same_script else "Use it"
        yield f"{use}{where}:", content.command.splitlines()
        techniques = [_line(entry) for entry in content.unsupported if entry.is_technique]
        others = [_line(entry) for entry in content.unsupported if not entry.is_technique]
        for title, lines in (
            ("Not expressed", techniques),
            ("Left to you", others),
            ("Good to know", list(content.notes)),
        ):
            if lines:
                yield title, lines

    def __str__(self) -> str:
        """Returns the files and all sections as text."""
        lines = [
            f"#{self.record.number} {self.record.config.describe()}",
            f"for {TARGETS[self.target].title}:",
            *(f"  {file}" for file in self.files),
        ]
        for title, of_section in self.sections():
            lines += ["", title, *(f"  {line}" for line in of_section)]
        return printable("\n".join(lines), keep_lines=True)

    def __repr__(self) -> str:
        """Returns the text, which Python and notebooks show, instead of the fields."""
        return str(self)

    def to_dict(self) -> dict[str, Any]:
        """Returns the JSON object that `autotune export --json` prints."""
        return {
            "schema": JSON_SCHEMA,
            "target": self.target,
            "target_version": self.target_version,
            "trial": self.record.number,
            "files": [str(file) for file in self.files],
            "command": self.content.command,
            "same_script": self.content.same_script or None,
            "refusals": [
                {
                    "setting": entry.setting,
                    "value": entry.value,
                    "instead": entry.instead,
                    "why": entry.why,
                    "is_technique": entry.is_technique,
                }
                for entry in self.content.unsupported
            ],
            "notes": [*self.content.before_use, *self.content.notes],
        }


def target_of(name: str) -> Target:
    """Returns the trainer of that name. Raises InvalidInput."""
    if name not in TARGETS:
        raise InvalidInput(
            f"there is no target {name!r}",
            hint=suggestion(name, TARGETS, otherwise=f"use one of {', '.join(TARGETS)}"),
        )
    return TARGETS[name]


def version_of(name: str, requested: str | None) -> str:
    """Returns the version to write for, by default the first supported one. Raises InvalidInput."""
    versions = target_of(name).versions
    if requested is not None and requested not in versions:
        raise InvalidInput(
            f"there is no export to version {requested!r} of {name}",
            hint=f"use one of {', '.join(versions)}",
        )
    return requested or versions[0]


def write_export(
    result: StudyResult,
    record: TrialRecord,
    target: str,
    *,
    folder: Path | None = None,
    target_version: str | None = None,
    strict: bool = False,
    overwrite: bool = False,
) -> WrittenExport:
    """Write the files of a trial for a trainer, and return what was written.

    The default folder is of the export's own and is overwritten; files in another folder only with
    `overwrite`. With `strict`, raises IllegalConfiguration and writes nothing if the trainer cannot
    express the whole configuration. Raises InvalidInput and StorageUnavailable.
    """
    export = composed_export(
        result,
        record,
        target,
        folder=folder,
        target_version=target_version,
        strict=strict,
    )
    write_files(export.content, export.folder, overwrite=folder is None or overwrite)
    return export


def composed_export(
    result: StudyResult,
    record: TrialRecord,
    target: str,
    *,
    folder: Path | None = None,
    target_version: str | None = None,
    strict: bool = False,
) -> WrittenExport:
    """Returns the export of a trial without writing it: the texts are in its `content`.

    Raises InvalidInput, and with `strict` IllegalConfiguration.
    """
    version = version_of(target, target_version)
    _check_that_no_script_is_needed(record, target)
    recipe = recipe_of(result, record)
    folder_of_files = folder or RESULTS_FOLDER / f"{result.study}-{target}-{record.number}"
    search_folder = _search_folder(recipe.workload)
    recipe = dataclasses.replace(
        recipe,
        workload=_with_absolute_paths(recipe.workload, also_script=search_folder is not None),
        folder=folder_of_files.absolute(),
        search_folder=search_folder,
        marks_answers=_marks_answers(recipe.workload),
    )
    content = _without_guesses(target_of(target).write(recipe, version), recipe.workload)
    content = dataclasses.replace(content, notes=(*content.notes, *_cast_note(recipe, target)))
    if recipe.workload.script is not None and target != "pytorch":
        own = TARGETS["pytorch"].write(recipe, version_of("pytorch", None))
        files = {**content.files, **own.files}
        content = dataclasses.replace(content, files=files, same_script=own.command)
    if strict:
        _check_complete(content, target)
    return WrittenExport(
        target=target,
        target_version=version,
        record=record,
        folder=folder_of_files,
        content=content,
    )


def _marks_answers(workload: Workload) -> bool | None:
    """Returns whether the chat template of a local tokenizer marks answers; None if not known."""
    name = workload.model_source if workload.tokenizer == "model" else workload.tokenizer
    if workload.chat_column is None or name is None or not path_exists(name):
        return None
    from autotune.data.tokenizer import load_chat_template  # noqa: PLC0415  imports numpy

    try:
        template = load_chat_template(name)
    except InvalidInput:  # it has changed since the trial
        return None
    return None if template is None else template.marks_answers


def _check_that_no_script_is_needed(record: TrialRecord, target: str) -> None:
    """Raise InvalidInput for what only the script of the trial can bring."""
    for technique, values in OF_SCRIPTS.items():
        value = getattr(record.config, technique)
        if value in values and target != "pytorch":
            raise InvalidInput(
                f"#{record.number} has {technique} {value}, that which its script brings: no file "
                f"for {target} can ask for it",
                hint="use --to pytorch: the script itself then trains with the configuration",
            )


_TAKES_THE_SCRIPTS_MODEL = ("accelerate", "deepspeed", "lightning")
"""Targets that leave the number format of weights to the user's code, if it is float32."""


def _cast_note(recipe: Recipe, target: str) -> Iterator[str]:
    """Yield that the user's code has to cast weights up, as the trial did."""
    own = recipe.workload.own_precision
    is_cast_up = own != "fp32" and trained_dtype(recipe.config) == "float32"
    if is_cast_up and target in _TAKES_THE_SCRIPTS_MODEL:
        yield (
            f"The script's weights are those of precision {own}, and the trial cast them: write "
            "for weight in model.parameters(): weight.data = weight.data.to(torch.float32) before "
            "the optimizer."
        )


def _search_folder(workload: Workload) -> Path | None:
    """Returns the current folder if the script of a study is found from it, as in the search.

    Another script of that name, or an edited one, is not the study's.
    """
    if workload.script is None:
        return None
    try:
        is_here = workload.model_sha256 in ("", script_sha256(workload.script))
    except InvalidInput:  # it is not there
        is_here = False
    return Path.cwd() if is_here else None


def _without_guesses(content: Export, workload: Workload) -> Export:
    """Leave out the values of settings that a user's script makes itself, which nobody knows."""
    if workload.script is None:
        return content
    unsupported = tuple(
        dataclasses.replace(entry, value=None, instead=None, why=f"{workload.script} decides it")
        if entry.setting in DECIDED_BY_SCRIPT
        else entry
        for entry in content.unsupported
    )
    return dataclasses.replace(content, unsupported=unsupported)


def _with_absolute_paths(workload: Workload, *, also_script: bool) -> Workload:
    """Make the paths of the workload absolute: the export is used in another folder."""
    paths: dict[str, str | None] = {"dataset": workload.dataset, "tokenizer": workload.tokenizer}
    if also_script:
        paths["script"] = workload.script
    found = {name: _absolute(path) for name, path in paths.items() if path not in _NOT_PATHS}
    if is_function_reference(workload.model):
        reference = read_reference(workload.model)
        if reference.file is not None:
            found["model"] = f"{_absolute(str(reference.file))}:{reference.function}"
    return dataclasses.replace(workload, **found)  # type: ignore[arg-type]  # all are strings


_NOT_PATHS = (None, STANDARD_LIBRARY_TEXT, "bytes", "bpe")


def _absolute(path: str | None) -> str | None:
    return str(expanded(path).absolute()) if path and path_exists(path) else path


def _check_complete(written: Export, target: str) -> None:
    """Raise IllegalConfiguration if the target cannot express the trial.

    A setting that is left to the user's script does not count, unless it is a technique.
    """
    missing = [
        entry for entry in written.unsupported if entry.is_technique or entry.instead is not None
    ]
    if not missing:
        return
    message = f"{target} cannot express {_setting(missing[0])}: {missing[0].why}"
    if len(missing) > 1:
        message += f" (and {len(missing) - 1} more)"
    hint = "leave --strict out to write what it can"
    if target != "pytorch":
        hint += ", or export to pytorch"
    raise IllegalConfiguration(message, hint=hint)


def write_files(written: Export, folder: Path, *, overwrite: bool) -> None:
    """Write the files. Without `overwrite`, write nothing if a different file exists already.

    Raises InvalidInput and StorageUnavailable.
    """
    contents = {folder / name: content for name, content in _contents(written).items()}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for file, content in contents.items():
            if not overwrite and file.exists() and file.read_bytes() != content:
                raise InvalidInput(
                    f"{file} already exists, with other content",
                    hint="name another folder with --out, or overwrite it with --force",
                )
        for file, content in contents.items():
            file.write_bytes(content)
        _warn_of_others(folder, set(written.files))
    except OSError as error:
        raise StorageUnavailable(
            f"{folder} cannot be written to: {error.strerror or error}",
            hint="name another folder with --out",
        ) from None


def _contents(written: Export) -> dict[str, bytes]:
    """Returns the bytes of each file by its name."""
    return {
        name: text.encode("utf-8", errors="backslashreplace")
        for name, text in written.files.items()
    }


def _warn_of_others(folder: Path, written: set[str]) -> None:
    """Warn about modules of an earlier export in the folder: Python would import them as well."""
    others = sorted(file.name for file in folder.glob("autotune_*") if file.name not in written)
    if others:
        note = f"{folder} also holds {', '.join(others)}, which is not part of this export"
        print(f"note: {printable(note)}", file=sys.stderr)


def _setting(entry: Unsupported) -> str:
    return entry.setting if entry.value is None else f"{entry.setting} {entry.value}"


def _line(entry: Unsupported) -> str:
    instead = "" if entry.instead is None else f" ({entry.instead} instead)"
    return f"{_setting(entry)}{instead}: {entry.why}"
