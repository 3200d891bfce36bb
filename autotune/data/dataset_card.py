"""Read the configurations in the card of a dataset, and let them name nothing but its own files.

A card, the README.md of a dataset, begins with YAML, whose `configs` name the files of each
configuration: https://huggingface.co/docs/hub/datasets-manual-configuration. `datasets` would also
read absolute paths, those of other folders, and URLs.
"""

import glob
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

from autotune.errors import InvalidDataset
from autotune.spec.user_files import read_file

CARD, CARD_OF_YAML = "README.md", ".huggingface.yaml"

_FILES, _FOLDER, _NAME = "data_files", "data_dir", "config_name"
_ABOUT_THE_CONFIG = (_NAME, _FILES, _FOLDER, "default", "description", "version", "drop_labels")
_COLLECTIONS = (list, dict, tuple, set)
"""What YAML makes of anything but a single value. By aliases it can be of any size, written out."""
_OPTIONS = (
    *("sep", "delimiter", "header", "names", "column_names", "quotechar", "quoting", "escapechar"),
    *("skiprows", "encoding", "encoding_errors", "field", "sample_by", "columns"),
)
"""What a configuration may say of how its files are read; others could name files of their own."""


@dataclass(frozen=True, kw_only=True)
class Configuration:
    """The files of a configuration by split, and how the reader of their kind is to read them."""

    files: Mapping[str, Sequence[Path]]
    options: Mapping[str, Any]


def configuration(folder: Path, name: str, *, dataset: str) -> Configuration | None:
    """Returns a configuration of a local dataset; None for the default one without a card.

    Raises InvalidDataset for one that the card does not have, and for a card that names files which
    are not below the folder.
    """
    texts = [
        read_file(file, kind=InvalidDataset)
        for file in (folder / CARD, folder / CARD_OF_YAML)
        if file.exists()
    ]
    configs = checked_configs(texts, dataset=dataset)
    if not configs and name == "default":
        return None
    if name not in configs:
        known = ", ".join(configs) or "none"
        raise InvalidDataset(
            f"dataset {dataset!r}: configuration {name!r} not found in its card, which has {known}",
            hint="name one of the card, or leave --dataset-config out",
        )
    config = configs[name]
    options = {key: value for key, value in config.items() if key not in _ABOUT_THE_CONFIG}
    for key, value in options.items():
        values = value if isinstance(value, list) else [value]
        if key not in _OPTIONS or any(isinstance(each, _COLLECTIONS) for each in values):
            raise InvalidDataset(
                f"dataset {dataset!r}: its card sets {key!r:.60} for configuration {name!r}, which "
                "is not read",
                hint="remove it from the card, or name a file of the dataset",
            )
    return Configuration(files=_files(folder, config, dataset=dataset), options=options)


def checked_configs(
    texts: Sequence[bytes], *, dataset: str, own_address: str = ""
) -> Mapping[str, Mapping[str, Any]]:
    """Returns the configurations of cards by name; of equal names the last one.

    Raises InvalidDataset where one names a file that cannot be one of the dataset. `own_address` is
    how the files of a dataset on the hub may be named as well.
    """
    configs: dict[str, Mapping[str, Any]] = {}
    for text in texts:
        for config in _configs(text, dataset=dataset):
            for pattern in (config.get(_FOLDER), *(each for _, each in _patterns(config))):
                if pattern is not None and not _is_of_dataset(pattern, own_address):
                    named = f"{pattern!r:.100}" if isinstance(pattern, str) else "what is no text"
                    raise InvalidDataset(
                        f"dataset {dataset!r}: its card names {named}, which is no file of the "
                        "dataset",
                        hint="a card may only name files below its own folder, by relative paths",
                    )
            configs[str(config[_NAME])] = config
    return configs


def _configs(text: bytes, *, dataset: str) -> list[Mapping[str, Any]]:
    """Returns what the YAML of a card, or a file of only that, has as its `configs`."""
    content = text.decode("utf-8-sig", errors="replace")
    lines = content.splitlines()
    if lines and lines[0].rstrip() == "---":
        end = next((at for at, line in enumerate(lines) if at and line.rstrip() == "---"), 1)
        content = "\n".join(lines[1:end])
    elif "\nconfigs:" not in f"\n{content}":
        return []
    try:
        found = yaml.safe_load(content)
    except (yaml.YAMLError, ValueError, AttributeError, LookupError, RecursionError) as error:
        # AttributeError and LookupError for a value that its tag does not allow.
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise InvalidDataset(
            f"dataset {dataset!r}: its card is not valid YAML: {reason}",
            hint=f"correct the beginning of its {CARD}",
        ) from None
    configs = found.get("configs") if isinstance(found, dict) else None
    if configs is None:
        return []
    if not isinstance(configs, list) or not all(
        isinstance(config, dict) and _NAME in config and not isinstance(config[_NAME], _COLLECTIONS)
        for config in configs
    ):
        raise InvalidDataset(
            f"dataset {dataset!r}: the configs of its card are no list of tables with a {_NAME}",
            hint=f"correct the beginning of its {CARD}",
        )
    return configs


def _patterns(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield each split with a pattern of its files; one that is not well formed is no text."""
    data_files = config.get(_FILES)
    entries = data_files if isinstance(data_files, list) else [data_files]
    for entry in entries:
        split, patterns = "train", entry
        if isinstance(entry, dict):
            named = entry.get("split", "train")
            if not isinstance(named, _COLLECTIONS):
                split, patterns = str(named), entry.get("path", entry)
        for pattern in patterns if isinstance(patterns, list) else [patterns]:
            if pattern is not None:
                yield split, pattern


def _is_of_dataset(pattern: Any, own_address: str) -> bool:
    """Whether a pattern can only lead to files below the folder of the dataset."""
    if not isinstance(pattern, str):
        return False
    if own_address and pattern.startswith((f"{own_address}/", f"{own_address}@")):
        pattern = pattern.removeprefix(own_address).lstrip("/")
    # A chain of addresses is joined by two colons.
    is_address = "://" in pattern or "::" in pattern or "\\" in pattern
    path = PurePosixPath(pattern)
    return not (is_address or path.is_absolute() or pattern.startswith("~") or ".." in path.parts)


def _files(
    folder: Path, config: Mapping[str, Any], *, dataset: str
) -> Mapping[str, Sequence[Path]]:
    # Seconds to import, which only few datasets need.
    from datasets.data_files import DataFilesDict, get_data_patterns  # noqa: PLC0415

    base = glob.escape(str(folder.resolve() / str(config.get(_FOLDER) or "")))
    patterns: dict[str, list[str]] = {}
    for split, pattern in _patterns(config):
        patterns.setdefault(split, []).append(pattern)
    try:
        found = DataFilesDict.from_patterns(patterns or get_data_patterns(base), base_path=base)
    except FileNotFoundError as error:
        raise InvalidDataset(
            f"dataset {dataset!r}: {str(error).splitlines()[0]}",
            hint="check the paths in its card",
        ) from None
    files = {str(split): [Path(name) for name in names] for split, names in found.items()}
    for file in (file for files_of_split in files.values() for file in files_of_split):
        if not file.parent.resolve().is_relative_to(folder.resolve()):
            raise InvalidDataset(
                f"dataset {dataset!r}: its card names {file.name!r:.100} in a folder that a link "
                "leads to",
                hint="put the files below the folder of the dataset",
            )
    return files
