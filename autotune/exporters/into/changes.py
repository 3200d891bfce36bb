"""Finds which keys of a trainer's file to change, so that it describes a trial's configuration.

The trainer's exporter writes a configuration twice: that which the file describes, and the trial's.
Keys in which the two differ are what the trial changes; all others are the user's. A key that says
the same already, by whichever name, is not touched.

The changed file is then read by the importer. What it still says otherwise is changed by the other
keys of that technique, and listed as not expressed where there are none.
"""

import dataclasses
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from autotune.errors import InvalidInput
from autotune.exporters import TARGETS
from autotune.exporters.export import Export, Unsupported
from autotune.exporters.into.dialects import AS_BEFORE, DIALECTS, Content, Dialect, Own
from autotune.exporters.into.edited import (
    REMOVED,
    CannotEdit,
    KeyPath,
    changed_content,
    edited,
    same_content,
)
from autotune.exporters.launch import FILE as LAUNCHER
from autotune.exporters.launch import PROCESS_SETTINGS
from autotune.exporters.recipe import Recipe
from autotune.importers.imported import ImportedTraining
from autotune.importers.key_table import KeyTable
from autotune.importers.keys_of_file import KeysOfFile
from autotune.importers.registry import TRAINERS, trainer_of
from autotune.importers.trainer_file import parse_trainer_file
from autotune.spec.config import (
    CHOICES,
    FIELD_ORDER,
    OF_SCRIPTS,
    OF_SEVERAL_DEVICES,
    TECHNIQUES,
    TrainingConfig,
    rule_violations,
)
from autotune.spec.workload import BESIDE_ADAPTERS, Workload
from autotune.system.allocator_settings import assignments

_IDLE = (
    *("adam_beta1", "adam_beta2", "adam_epsilon"),
    *("gradient_checkpointing_kwargs", "activation_checkpointing_kwargs"),
)
"""Keys that nothing reads where the exporter leaves them out: they stay."""


@dataclass(frozen=True, kw_only=True)
class KeyChange:
    """A key of the file that a trial changes."""

    path: KeyPath
    before: Any
    """None where the file has no such key."""
    after: Any
    """REMOVED where it is taken out."""
    techniques: tuple[str, ...]
    """Those of the trial's choices that the key belongs to."""

    @property
    def name(self) -> str:
        return ".".join(self.path)


@dataclass(frozen=True, kw_only=True)
class TrainerFile:
    """A file that a trainer reads, and what it describes."""

    path: Path
    text: str
    """Without the mark of byte order that the file may begin with."""
    content: Content
    trainer: str
    """Its name among the importers."""
    training: ImportedTraining
    options: Mapping[str, Any]
    """What it was read with, beside itself."""

    @property
    def config(self) -> TrainingConfig:
        return TrainingConfig(**self.training.config)

    @property
    def dialect(self) -> Dialect:
        return DIALECTS[self.trainer]

    @property
    def title(self) -> str:
        return TRAINERS[self.trainer].table.title


def read_file_of_trainer(path: Path, text: bytes, workload: Workload) -> TrainerFile:
    """Returns what a file of that text describes. Raises InvalidInput.

    `workload` is that of the study, which says what a file leaves to the command or to code: the
    number of devices, and where it must, also model, length and batch.
    """
    content = parse_trainer_file(text, path)
    found = trainer_of(content, file=path)
    trainer = next(name for name, one in TRAINERS.items() if one is found)
    if trainer not in DIALECTS or DIALECTS[trainer].target not in TARGETS:
        raise InvalidInput(
            f"{path} is a file of {found.table.title}, which autotune only reads",
            hint="write new files with --to",
        )
    training, options = _first_readable(content, trainer, path=path, workload=workload)
    return TrainerFile(
        path=path,
        text=text.decode("utf-8-sig"),
        content=content,
        trainer=trainer,
        training=training,
        options=options,
    )


def _first_readable(
    content: Content, trainer: str, *, path: Path, workload: Workload
) -> tuple[ImportedTraining, Mapping[str, Any]]:
    """Returns the training by as few settings of the study as a file needs, and these."""
    options: dict[str, Any] = {}
    for names in (("devices_per_trial",), ("model", "script", "sequence_length")):
        options |= {name: getattr(workload, name) for name in names}
        try:
            return _training(content, trainer, path=path, options=options), options
        except InvalidInput:  # what it leaves out may be what the study knows
            continue
    options["global_batch"] = workload.global_batch
    return _training(content, trainer, path=path, options=options), options


def _training(
    content: Content, trainer: str, *, path: Path, options: Mapping[str, Any]
) -> ImportedTraining:
    found = TRAINERS[trainer]
    return found.read(KeysOfFile(content, found.table, file=path, options=options))


@dataclass(frozen=True, kw_only=True)
class ChangedFile:
    """The text of a file that describes a trial's configuration, as far as it can."""

    text: str
    not_read: str | None
    """Why the importer could not compare the file with the trial; None if it did."""
    techniques: tuple[str, ...]
    """Those in which the trial differs from what the file described."""
    changes: tuple[KeyChange, ...]
    unsupported: tuple[Unsupported, ...]
    notes: tuple[str, ...]
    command: str
    files: Mapping[str, str]
    """Others that the command needs, which the user does not have yet."""


def changed_file(file: TrainerFile, recipe: Recipe) -> ChangedFile:
    """Returns the file with the configuration of the recipe. Raises InvalidInput."""
    return _Change(file, recipe).made()


def config_on_device(config: TrainingConfig, device_type: str) -> TrainingConfig:
    """Returns the configuration in the words of that device.

    On a CPU torch does not batch an update by itself, so what trainers leave to torch is `none`.
    """
    if device_type == "cpu" and config.optimizer_fusion == "foreach":
        return dataclasses.replace(config, optimizer_fusion="none")
    return config


class _NotRead(Exception):
    """The importer has no configuration for what the changed file describes; the message is why."""


class _Change:
    """The change of one file to one configuration."""

    def __init__(self, file: TrainerFile, recipe: Recipe) -> None:
        self._file = file
        self._exports: dict[TrainingConfig, Export] = {}
        self._dialect = file.dialect
        self._has = self._shared_out_as_now(
            config_on_device(file.config, recipe.device_type), recipe.workload.own_config
        )
        wanted = config_on_device(recipe.config, recipe.device_type)
        for technique, values in OF_SCRIPTS.items():
            if getattr(wanted, technique) in values:  # the script's own, which is the file's
                own = {technique: getattr(self._has, technique)}
                wanted = dataclasses.replace(wanted, **own)
        self._wanted = wanted
        self._recipe = dataclasses.replace(recipe, workload=self._workload(recipe))
        self._own = self._dialect.own(wanted, self._has, file.content)
        self._before = self._keys(self._has)
        self._after = self._keys(wanted)

    def _shared_out_as_now(
        self, config: TrainingConfig, own: Mapping[str, Any] | None
    ) -> TrainingConfig:
        """Returns the configuration with what devices share out as in the study's own training.

        A file of accelerate or the command line may say that, and not this file.
        """
        if own is None:
            return config
        return dataclasses.replace(config, **{name: own[name] for name in OF_SEVERAL_DEVICES})

    def _workload(self, recipe: Recipe) -> Any:
        """Returns the trial's workload with the file's sequences in a step, and its dropout."""
        of_file = self._file.training.workload
        replicas = of_file.get("devices_per_trial", 1) // self._file.config.tensor_parallel
        on_a_device = of_file["global_batch"] // replicas
        devices = recipe.workload.devices_per_trial
        global_batch = on_a_device * (devices // self._has.tensor_parallel)
        on_each = devices // self._wanted.tensor_parallel * self._wanted.micro_batch_size
        if global_batch % on_each:
            raise InvalidInput(
                f"a step of {self._file.path} has {global_batch} sequences, which micro batches of "
                f"{self._wanted.micro_batch_size} do not divide",
                hint="name another trial with --trial, or search with --from and this file",
            )
        beside = {name: of_file[name] for name in BESIDE_ADAPTERS if name in of_file}
        return dataclasses.replace(recipe.workload, global_batch=global_batch, **beside)

    # -- keys --------------------------------------------------------------------------------------

    def _keys(self, config: TrainingConfig) -> dict[KeyPath, Any]:
        recipe = self._recipe_of(config)
        return self._dialect.keys(self._export(config), self._file.content, recipe)

    def _export(self, config: TrainingConfig) -> Export:
        if config not in self._exports:
            self._exports[config] = self._dialect.write(self._recipe_of(config))
        return self._exports[config]

    @property
    def _table(self) -> KeyTable:
        return TRAINERS[self._file.trainer].table

    def _recipe_of(self, config: TrainingConfig) -> Recipe:
        config = dataclasses.replace(config, **self._own.said)
        return dataclasses.replace(self._recipe, config=config)

    @property
    def _techniques(self) -> list[str]:
        """The techniques in which the file and the trial differ."""
        return [
            name for name in FIELD_ORDER if getattr(self._has, name) != getattr(self._wanted, name)
        ]

    def _names(self, path: KeyPath) -> Iterator[KeyPath]:
        """Yield the path by every name under which the file has it, or its own name."""
        renamed: list[KeyPath] = []
        for end in range(1, len(path) + 1):
            now = ".".join(path[:end])
            for old in [old for old, new in self._table.renamed.items() if new == now]:
                earlier = tuple(old.split("."))
                if self._is_in_file(earlier):
                    renamed.append((*earlier, *path[end:]))
        yield from renamed
        first = path if path[0] in self._table.sections else path[:1]
        if not renamed or self._is_in_file(first):
            yield path
        for name in self._dialect.same.get(path[0], ()):
            if self._is_in_file((name,)):
                yield (name, *path[1:])

    def _value(self, path: KeyPath) -> Any:
        """Returns what the file has at a path, or by the trainer's default; None without one."""
        at: Any = self._file.content
        for name in path:
            at = at.get(name) if isinstance(at, Mapping) else None
        return self._table.defaults.get(".".join(path)) if at is None else at

    def _is_in_file(self, path: KeyPath) -> bool:
        at: Any = self._file.content
        for name in path:
            if not isinstance(at, Mapping) or name not in at:
                return False
            at = at[name]
        return True

    # -- changes -----------------------------------------------------------------------------------

    def made(self) -> ChangedFile:
        changes = self._changes(
            {
                **{
                    path: REMOVED
                    for technique in self._techniques
                    for path in self._dialect.off.get(technique, ())
                },
                **self._own.keys,
                **self._of_the_batch(),
                **_differences(self._before, self._after),
            }
        )
        also: dict[str, set[KeyPath]] = {}
        misread, not_read = self._misread(changes)
        for technique in misread:
            more = self._more(technique, changes)
            left, failed = self._misread({**changes, **more})
            is_read = technique not in left and failed is None
            if is_read or technique in self._exporters_reasons:
                also[technique] = set(more)
                changes, misread, not_read = {**changes, **more}, left, failed
        text, _ = self._text(changes)
        export = self._export_with_command()
        files = self._other_files(export)
        return ChangedFile(
            text=text,
            techniques=tuple(self._techniques),
            changes=tuple(self._described(changes, also)),
            unsupported=tuple(self._unsupported(misread)),
            notes=self._own.notes,
            not_read=not_read,
            command=self._command(export, files),
            files=files,
        )

    def _more(self, technique: str, changes: Mapping[KeyPath, Any]) -> dict[KeyPath, Any]:
        """Returns further keys by which the changed file has the trial's choice of a technique.

        Those without which it is read in the same way are left out.
        """
        wanted = {path: self._after.get(path, REMOVED) for path in self._keys_of(technique)}
        more = {path: value for path, value in self._changes(wanted).items() if path not in changes}
        says = self._misread({**changes, **more})
        for path in list(more):
            fewer = {other: value for other, value in more.items() if other != path}
            if self._misread({**changes, **fewer}) == says:
                more = fewer
        return more

    def _of_the_batch(self) -> dict[KeyPath, Any]:
        """Returns the keys that keep the sequences of a step, if micro batches change."""
        if "micro_batch_size" not in self._techniques:
            return {}
        return {path: self._after[path] for path in self._dialect.batch}

    def _changes(self, wanted: Mapping[KeyPath, Any]) -> dict[KeyPath, Any]:
        """Returns what of `wanted` the file does not say yet, with the names that it has."""
        tables = {
            path[0]
            for path in wanted
            if path in self._after and len(path) > 1 and path[0] not in self._table.sections
        }
        whole = {name for name in tables if not self._has_table(name)}
        wanted = {
            **wanted,
            **{path: value for path, value in self._after.items() if path[0] in whole},
        }
        written = {path[0] for path in self._after}
        changes: dict[KeyPath, Any] = {}
        for path, value in wanted.items():
            names = list(self._names(path))
            if value is True and any(_means(self._value(name), value) for name in names):
                continue
            for name in names:
                if value is REMOVED:
                    is_idle = path[0] in _IDLE and path[0] not in written
                    if self._is_in_file(name) and not is_idle:
                        changes[name] = REMOVED
                elif not _means(self._value(name), value):
                    changes[name] = value
        return self._without_empty_tables(changes)

    def _has_table(self, name: str) -> bool:
        return any(isinstance(self._value(path), Mapping) for path in self._names((name,)))

    def _without_empty_tables(self, changes: dict[KeyPath, Any]) -> dict[KeyPath, Any]:
        """Returns the changes with tables taken out of which nothing would be left."""
        changed = changed_content(self._file.content, changes)
        for path in [path for path, value in changes.items() if value is REMOVED]:
            parent = path[:-1]
            if len(parent) == 1 and changed.get(parent[0]) == {}:
                del changes[path]
                changes[parent] = REMOVED
        return changes

    def _keys_of(self, technique: str) -> set[KeyPath]:
        """Returns the paths that the exporter writes otherwise for other values of a technique."""
        paths: set[KeyPath] = set()
        at = self._recipe.workload.legality_context
        for value in CHOICES.get(technique, ()):
            config = dataclasses.replace(self._wanted, **{technique: value})
            if not rule_violations(config.to_dict(), at):
                paths |= _differences(self._after, self._keys(config)).keys()
        return paths

    # -- reading back ------------------------------------------------------------------------------

    def _text(self, changes: Mapping[KeyPath, Any]) -> tuple[str, Content]:
        """Returns the text with the changes, and what it says. Raises InvalidInput."""
        file = self._file
        by_hand = ", ".join(".".join(path) for path in changes)
        try:
            text = edited(file.text, changes, suffix=file.path.suffix.lower())
            content = parse_trainer_file(text.encode(), file.path)
        except (CannotEdit, InvalidInput):
            text, content = "", {}
        if not same_content(content, changed_content(file.content, changes)):
            raise InvalidInput(
                f"{file.path} is written in a form in which {by_hand} cannot be changed",
                hint=f"write the configuration as a new file: --to {self._dialect.target}",
            )
        return text, content

    def _read_back(self, changes: Mapping[KeyPath, Any]) -> TrainingConfig:
        """Returns the configuration that the changed file describes.

        Raises _NotRead for one that has no counterpart among trials.
        """
        file = self._file
        _, content = self._text(changes)
        try:
            training = _training(content, file.trainer, path=file.path, options=file.options)
        except InvalidInput as error:
            raise _NotRead(error.message) from None
        self._check_batch(training)
        says = config_on_device(TrainingConfig(**training.config), self._recipe.device_type)
        own = self._recipe.workload.own_config
        return says if own is None else self._shared_out_as_now(says, own)

    def _check_batch(self, training: ImportedTraining) -> None:
        """Raise InvalidInput where a step of the changed file would have other sequences."""
        before = self._file.training.workload["global_batch"]
        if training.workload["global_batch"] != before and self._wanted.tensor_parallel == 1:
            raise InvalidInput(
                f"{self._file.path} cannot have micro batches of {self._wanted.micro_batch_size} "
                f"with its {before} sequences in a step",
                hint="say the number of accumulated micro batches in the file, and try again",
            )

    def _misread(self, changes: Mapping[KeyPath, Any]) -> tuple[dict[str, Any], str | None]:
        """Returns {technique: what the changed file says} where that is not the trial's choice.

        The second value says why the file could not be compared; None if it was.
        """
        try:
            says = self._read_back(changes)
        except _NotRead as error:
            return {}, str(error)
        differs = {
            name: getattr(says, name)
            for name in FIELD_ORDER
            if getattr(says, name) != getattr(self._wanted, name)
        }
        return differs, None

    # -- what the file cannot say ------------------------------------------------------------------

    def _unsupported(self, misread: Mapping[str, Any]) -> Iterator[Unsupported]:
        """Yield each choice of the trial that the changed file does not express.

        What the trainer did otherwise than trials before, and still does, is not listed.
        """
        changed = self._techniques
        listed = {
            setting: entry
            for setting, entry in self._exporters_reasons.items()
            if setting in changed or setting in misread
        }
        for setting, (instead, why) in self._own.lacking.items():
            value = getattr(self._wanted, setting)
            listed[setting] = Unsupported(setting=setting, value=value, instead=instead, why=why)
        for setting in [name for name, entry in listed.items() if entry.instead is None]:
            if setting not in misread:  # left to the user's code, of which the file has the value
                del listed[setting]
        for technique, says in misread.items():
            by_command = technique in (*PROCESS_SETTINGS, *OF_SEVERAL_DEVICES)
            is_part = TECHNIQUES[technique].refines in listed
            if technique not in listed and not by_command and not is_part:
                listed[technique] = Unsupported(
                    setting=technique,
                    value=getattr(self._wanted, technique),
                    instead=says,
                    why=f"autotune knows no key of {self._file.title} by which this file could "
                    f"say it{self._dialect.otherwise}",
                )
        yield from listed.values()

    @cached_property
    def _exporters_reasons(self) -> dict[str, Unsupported]:
        """The techniques that the exporter does not express: it writes what is closest."""
        export = self._export(self._wanted)
        return {entry.setting: entry for entry in export.unsupported if entry.is_technique}

    # -- the command -------------------------------------------------------------------------------

    def _export_with_command(self) -> Export:
        """Returns the export whose command is that of the changed file.

        tf32 is a key of the file, and the allocator a variable of the environment, so neither needs
        the launcher.
        """
        config = dataclasses.replace(self._wanted, allocator=self._has.allocator)
        if config.precision == "tf32":
            config = dataclasses.replace(config, precision="fp32")
        return self._export(config)

    def _command(self, export: Export, files: Collection[str]) -> str:
        """Returns how the changed file is used: the command line, or a sentence with `{file}`.

        Where the exporter writes nothing beside it, that is as before.
        """
        command = self._dialect.command if self._recipe.devices == 1 else AS_BEFORE
        if files and self._dialect.command != AS_BEFORE:
            command = export.command
        elif LAUNCHER in files:
            command += f", by python {LAUNCHER} and the name of your script"
        if self._wanted.allocator == self._has.allocator:
            return command
        setting = assignments(expandable=self._wanted.allocator == "expandable")
        if command.startswith(AS_BEFORE):
            return f"{command}, with {setting} in its environment"
        return f"{setting} {command}"

    def _other_files(self, export: Export) -> dict[str, str]:
        """Returns the files beside the changed one, but for those that it needed before."""
        before = self._export(self._has).files
        return {
            name: text
            for name, text in export.files.items()
            if name != self._dialect.file
            and name not in self._dialect.leaves_out
            and _body(text) != _body(before.get(name, ""))
        }

    # -- what each key is for ----------------------------------------------------------------------

    def _described(
        self, changes: Mapping[KeyPath, Any], also: Mapping[str, set[KeyPath]]
    ) -> Iterator[KeyChange]:
        belongs = {technique: self._changed_by(technique) for technique in self._techniques}
        for technique, paths in also.items():
            belongs[technique] = belongs.get(technique, set()) | paths
        for path, value in changes.items():
            # What else a new table says is for the same technique.
            end = len(path) if path[0] in self._table.sections else 1
            yield KeyChange(
                path=path,
                before=self._value(path) if self._is_in_file(path) else None,
                after=value,
                techniques=tuple(
                    name
                    for name, paths in belongs.items()
                    if path[:end] in {each[:end] for each in paths}
                ),
            )

    def _changed_by(self, technique: str) -> set[KeyPath]:
        """Returns the paths that one choice of the trial changes alone.

        One that refines a technique changes them beside what the trial has of that.
        """
        refined = TECHNIQUES[technique].refines
        beside = {refined: getattr(self._wanted, refined)} if refined else {}
        before = dataclasses.replace(self._has, **beside)
        alone = dataclasses.replace(before, **{technique: getattr(self._wanted, technique)})
        own: Own = self._dialect.own(alone, self._has, self._file.content)
        paths = [
            *own.keys,
            *_differences(self._keys(before), self._keys(alone)),
            *self._dialect.off.get(technique, ()),
        ]
        if technique == "micro_batch_size":
            paths += self._dialect.batch
        return {name for path in paths for name in self._names(path)}


def _differences(before: Mapping[KeyPath, Any], after: Mapping[KeyPath, Any]) -> dict[KeyPath, Any]:
    """Returns {path: value of `after`, or REMOVED} of the paths in which the two differ."""
    return {
        path: after.get(path, REMOVED)
        for path in {**before, **after}
        if path not in before or path not in after or before[path] != after[path]
    }


def _means(in_file: Any, value: Any) -> bool:
    """Returns whether a value of a file says what another does, as "1e-5" says 1e-5."""
    if isinstance(in_file, str) and not isinstance(value, str):
        if isinstance(value, bool):
            return in_file.lower() == str(value).lower()
        if isinstance(value, int | float):
            try:
                return float(in_file) == value
            except ValueError:
                return False
    return bool(in_file == value) and isinstance(in_file, bool) == isinstance(value, bool)


def _body(text: str) -> str:
    """Returns a text without its comments, which name the trial."""
    return "\n".join(line for line in text.splitlines() if not line.startswith("#"))
