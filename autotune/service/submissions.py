"""Checks what is submitted to the service: a submission chooses settings, and never runs code.

A search on the command line may name any file of the user and any Python code, which is the user's
own. A submission comes from somebody else. Its paths must be below the folders that the server was
given for data, its code below those for code, and there are none of either by default. That holds
for every place where a path can stand: the submission, and the workload and the scales of a search
space that came with it. What the server decides itself is not accepted, and what would fill the
memory or the disk of its machine is rejected before anything is read.
"""

import dataclasses
import hashlib
import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import psutil

from autotune.data.hub import is_local_name
from autotune.errors import DiskFull, InvalidInput, InvalidSpace, NotAllowed, suggestion
from autotune.execution.compile_cache import CACHE
from autotune.memory.nvml import all_devices
from autotune.service.request_body import (
    LARGEST_CONFIG_CHARACTERS,
    SPACE_CONTENT,
    check_names,
    check_values,
    open_settings,
)
from autotune.service.settings import SubmissionRules, is_group_name
from autotune.shipped.dataset_files import READERS
from autotune.spec.checked import checked_beside
from autotune.spec.full_disk import LEAST_FREE_BYTES
from autotune.spec.model_choice import MODEL_NAMES, with_model_config
from autotune.spec.model_file import FILE_NAME, check_sizes, is_hub_name
from autotune.spec.model_file import model_name as name_of_config
from autotune.spec.model_size import check_weights_fit, free_disk_bytes, largest_weights_bytes
from autotune.spec.search_space import SearchSpace
from autotune.spec.setting import specified
from autotune.spec.space_content import named_spaces
from autotune.spec.space_file import load_space
from autotune.spec.study import check_study_name
from autotune.spec.user_code import is_function_reference, read_reference
from autotune.spec.user_files import LARGEST_TOKENIZER_BYTES, parse_toml, read_json
from autotune.spec.user_paths import path_exists
from autotune.spec.workload import (
    DEFAULT_BPE_VOCABULARY,
    DEFAULTS_BY_DEVICE,
    STANDARD_LIBRARY_TEXT,
    Workload,
)
from autotune.study.opening.requested_space import DEFAULT_SPACE, space_of
from autotune.study.running.devices import parse_devices
from autotune.study.submission import Submission
from autotune.units import format_duration, format_size

ACCEPTED = open_settings(Submission)
"""The fields of a submission."""

TRIALS_BEFORE = "trials_before"
"""Of a stored request that continues a study: how many trials it had before. Nobody submits it."""

NOT_OF_STUDIES = ("logs", "predictions", CACHE)
"""Folders in the work folder that are of no study."""

_LARGEST_OF_CONFIG = 2**24
_TOKEN_BYTES = 8

_PATHS = ("dataset", "tokenizer", "model", "model_source")
_WORDS_FOR_PATHS = {
    "dataset": (STANDARD_LIBRARY_TEXT,),
    "tokenizer": ("bytes", "bpe", "model"),
    "model": (*MODEL_NAMES, "script"),
    "model_source": (),
}
_LARGEST_FILES = {
    "tokenizer": ("tokenizer.json", LARGEST_TOKENIZER_BYTES),
    "model": (FILE_NAME, LARGEST_CONFIG_CHARACTERS),
    "model_source": (FILE_NAME, LARGEST_CONFIG_CHARACTERS),
}
"""Of a setting the file that the server reads as a whole, and its largest size in bytes."""
_REMEMBERED_SPACES = 1000
"""Workers look at each search that waits once a second."""
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.pkl", "*.ckpt")


@dataclass(frozen=True, kw_only=True)
class CheckedSubmission:
    """A submission that may be queued."""

    settings: Mapping[str, Any]
    """As submitted, without what is None."""
    name: str | None
    """Name of the study; None: the service gives it one that begins with `base`."""
    base: str
    priority: int
    group: str
    request: Submission
    space: SearchSpace
    budget_seconds: float | None
    """The longest that it runs; None: unknown."""

    @property
    def digest(self) -> str:
        """Hash of the content, by which a repeated submission is told from another one."""
        text = json.dumps(self.settings, sort_keys=True)
        return hashlib.sha256(text.encode(errors="replace")).hexdigest()


def check_submission(
    body: Mapping[str, Any],
    rules: SubmissionRules,
    *,
    folder: Path,
    trials_before: int = 0,
) -> CheckedSubmission:
    """Returns the submission of a request's body.

    `folder` is an empty folder for the file of a search space, and `trials_before` of its trials
    were run by earlier searches. A group that is not there now may come later. Raises InvalidInput
    for what is wrong anywhere, and NotAllowed for what is right on a command line and not accepted
    here.
    """
    settings = {name: value for name, value in body.items() if value is not None}
    check_names(settings, Submission, accepted=ACCEPTED)
    check_values(settings)
    checked_beside(Submission, settings)
    group = settings.get("group", "")
    if group and not is_group_name(group):
        raise InvalidInput(
            f"Invalid group: {group!r:.60}",
            hint="use a name such as left, of letters, digits, - and _, or leave it out",
        )
    name = settings.get("name")
    if name is not None:
        check_new_name(name)
    request = request_of_submission(
        settings, rules, study=name, folder=folder, trials_before=trials_before
    )
    space = load_space(DEFAULT_SPACE if request.space is None else request.space)
    workload = {**space.at_scale(request.scale).workload, **request.specified_workload()}
    _check_size(workload, rules)
    # The process of the search reads the data; here it would be the memory of the server.
    space = space_of(request, reads_data=False)
    base = _base_name(space.name, workload)
    budget_seconds = request.time_budget
    if budget_seconds is None:
        budget_seconds = default_time_budget_seconds(request, rules)
    return CheckedSubmission(
        settings=settings,
        name=name,
        base=base,
        priority=request.priority,
        group=group,
        request=request,
        space=space,
        budget_seconds=None if budget_seconds == math.inf else budget_seconds,
    )


def default_time_budget_seconds(request: Submission, rules: SubmissionRules) -> float | None:
    """Returns the time budget on the devices that a search will use; None where it has its own."""
    return request.default_time_budget_seconds(_device_type(rules))


def check_new_name(name: str) -> None:
    """Raise InvalidInput for what a study cannot be called."""
    check_study_name(name)
    if name in NOT_OF_STUDIES:
        raise InvalidInput(
            f"{name!r} cannot be a study's name: the server has a folder of that name",
            hint="choose another name",
        )


def check_space_name(name: object) -> None:
    """Raise NotAllowed for a search space that does not come with autotune."""
    known = named_spaces()
    if name is not None and name not in known:
        raise NotAllowed(
            f"the server has no search space {name!r:.80}",
            hint=suggestion(
                str(name)[:80],
                known,
                otherwise=f"use one of {', '.join(known)}, or send the text of a file as "
                f"{SPACE_CONTENT}",
            ),
        )


def request_of_submission(
    settings: Mapping[str, Any],
    rules: SubmissionRules,
    *,
    study: str | None,
    folder: Path,
    trials_before: int = 0,
) -> Submission:
    """Returns the request of a submission, whose paths are those of the server.

    `folder` is where the file of a search space is written to. Raises InvalidInput and NotAllowed.
    """
    given = {name: value for name, value in settings.items() if name in ACCEPTED}
    given |= {"storage": rules.storage, "ray": rules.ray, "name": study}
    if rules.ray is not None and settings.get("profile") is not None:
        raise NotAllowed(
            "nothing can be profiled here: the trials of the server run on a Ray cluster",
            hint="leave profile out",
        )
    given["devices"] = _devices(settings.get("devices"), rules)
    given["space"] = _space(settings, folder)
    given.pop(SPACE_CONTENT, None)
    try:
        space = load_space(given["space"] or DEFAULT_SPACE)
    except InvalidSpace as error:
        # The file is one that the server has written; its folder means nothing to the user.
        message = error.message.replace(f"{folder}/", "")
        raise InvalidSpace(message, hint=error.hint) from None
    for of_space in (space.workload, *space.scales.values()):
        _check_paths_of_space(of_space, rules)
    request = Submission.of(with_model_config(_with_paths(given, rules)))
    return _within_limits(request, rules, trials_before=trials_before)


def limits_of(rules: SubmissionRules) -> dict[str, str]:
    """Returns {setting: what the server allows of it}, a sentence each; no others are limited."""
    memory, files = format_size(largest_weights_bytes(Path.cwd())), _data_hint(rules)
    limits = {
        "model": f"In float32 its weights have at most {memory}; {files}; {_code_hint(rules)}.",
        "dataset": f"Of files, {files}.",
        "tokenizer": f"Of files, {files}.",
        "script": f"{_code_hint(rules)}.",
    }
    if rules.most_trials is not None:
        limits["trials"] = f"At most {rules.most_trials} in a search."
    if rules.most_seconds is not None:
        limits["time_budget"] = f"At most {format_duration(rules.most_seconds)}."
    if rules.most_devices is not None:
        at_once = f"At most {rules.most_devices} trials of a search run at once."
        limits |= {"devices": at_once, "trials_per_device": at_once}
    return {name: text[0].upper() + text[1:] for name, text in limits.items()}


# -- what the server decides -----------------------------------------------------------------------


def _devices(wanted: Any, rules: SubmissionRules) -> str | None:
    """Returns the devices of a search: those of the server, or as many of them as it asks for."""
    if wanted is None:
        return rules.devices
    text = str(wanted)
    if type(wanted) not in (int, str) or not text.isascii() or not text.isdigit():
        raise NotAllowed(
            f"a submission cannot choose the devices {str(wanted)[:60]!r}",
            hint="give a number of devices, or leave it out to use all of the group",
        )
    number = parse_devices(text)
    assert isinstance(number, int)
    most = rules.most_devices
    if most is not None and number > most:
        raise NotAllowed(
            f"{number} devices are asked for, and a search of this server may have {most}",
            hint=f"ask for at most {most}",
        )
    names = parse_devices(rules.devices) if rules.devices is not None else None
    if isinstance(names, tuple):
        if number > len(names):
            raise NotAllowed(
                f"{number} devices are asked for, and the server uses {len(names)}",
                hint=f"ask for at most {len(names)}",
            )
        return ",".join(names[:number])
    return text


def _within_limits(
    request: Submission, rules: SubmissionRules, *, trials_before: int
) -> Submission:
    """Returns the request with the limits of the server where it has none of its own.

    Raises NotAllowed for one that asks for more.
    """
    changes: dict[str, Any] = {}
    if rules.most_trials is not None:
        most_trials = trials_before + rules.most_trials
        if request.trials is not None and request.trials > most_trials:
            raise NotAllowed(
                f"{request.trials - trials_before} trials are asked for, and a search of this "
                f"server may have {rules.most_trials}",
                hint=f"ask for at most {rules.most_trials}, and continue the search later",
            )
        if request.trials is None and request.new_trials("cuda") > most_trials:
            changes["trials"] = most_trials
    seconds = request.time_budget
    if rules.most_seconds is not None and seconds is not None and seconds > rules.most_seconds:
        raise NotAllowed(
            f"the time budget is longer than {format_duration(rules.most_seconds)}, the longest of "
            "this server",
            hint="give a shorter time budget, and continue the search later",
        )
    if seconds is None and (rules.most_seconds is not None or changes):
        # A new search that says nothing of its end has one by default, which the limit replaces.
        default_seconds = request.default_time_budget_seconds("cuda")
        limits = [one for one in (rules.most_seconds, default_seconds) if one is not None]
        if limits:
            changes["time_budget"] = min(limits)
    if rules.most_devices is not None and request.trials_per_device > 1:
        devices = request.devices or "1"
        count = int(devices) if devices.isdigit() else len(devices.split(","))
        if count * request.trials_per_device > rules.most_devices:
            raise NotAllowed(
                f"{request.trials_per_device} trials on each of {count} devices are more than "
                f"{rules.most_devices} at once, the most of this server",
                hint="ask for fewer trials per device",
            )
    return dataclasses.replace(request, **changes)


def _space(settings: Mapping[str, Any], folder: Path) -> str | None:
    """Returns the name of a search space, or the file that its content was written to."""
    space, content = settings.get("space"), settings.get(SPACE_CONTENT)
    if content is None:
        check_space_name(space)
        return space
    _check_toml(content)
    name = space if isinstance(space, str) and space else "submitted"
    stem = re.sub("[^A-Za-z0-9_-]", "-", Path(name).stem)[:40] or "submitted"
    if stem in named_spaces():
        stem = f"{stem}-submitted"
    file = folder / f"{stem}.toml"
    file.write_text(content, encoding="utf-8")
    return str(file)


def _check_toml(content: str) -> None:
    """Raise InvalidSpace for a space that would read another file of the server."""
    table = parse_toml(content.encode(), source=SPACE_CONTENT, kind=InvalidSpace)
    base = table.get("extends")
    if base is not None and base not in named_spaces():
        raise NotAllowed(
            f"{SPACE_CONTENT}: extends = {base!r:.80} names no search space of the server",
            hint=f"use one of {', '.join(named_spaces())}",
        )


# -- paths and code --------------------------------------------------------------------------------


def _with_paths(workload: Mapping[str, Any], rules: SubmissionRules) -> dict[str, Any]:
    """Returns the settings with absolute paths. Raises NotAllowed for those of other folders."""
    resolved = dict(workload)
    config = workload.get("model_config")
    if config is not None:
        _check_config(config)
        resolved["model"] = name_of_config(config)
    if "script" in workload:
        resolved["script"] = _allowed_script(workload["script"], rules)
    for name in _PATHS:
        value = workload.get(name)
        if value is None or value in _WORDS_FOR_PATHS[name]:
            continue
        if name == "model" and config is not None:
            continue  # named after the config that came with the submission
        if name == "model" and is_function_reference(value):
            resolved[name] = _allowed_function(value, rules)
        else:
            resolved[name] = _allowed_path(name, value, rules)
    if resolved.get("pretrained") or "model" in resolved:
        _check_model_folder(resolved, rules)
    return resolved


def _check_paths_of_space(settings: Mapping[str, Any], rules: SubmissionRules) -> None:
    """Raise NotAllowed unless the paths of a space's workload are right as they stand.

    The space is loaded again by the search, so that its paths cannot be replaced.
    """
    for name, value in _with_paths(settings, rules).items():
        if name in (*_PATHS, "script") and value != settings[name]:
            raise NotAllowed(
                f"the search space has {name} = {settings[name]!r:.80}, which is no absolute path",
                hint=f"write {value!r}, or give {name} in the submission",
            )


def _allowed_path(name: str, value: str, rules: SubmissionRules) -> str:
    """Returns the absolute path of a file below a folder for data, or the name of the hub."""
    file = _below(value, rules.data_roots)
    if file is not None:
        _check_file_size(name, file)
        # Next to a config.json or a tokenizer.json stand others that are read with it.
        is_alone = name == "dataset" or file.is_dir()
        _check_links(name, file if is_alone else file.parent, rules)
        return str(file)
    is_file_name = is_local_name(value, suffixes=tuple(READERS))  # such as `folder/text.txt`
    if is_hub_name(value) and not is_file_name and not path_exists(value) and ".." not in value:
        return value
    raise NotAllowed(
        f"{name} = {value!r:.80} is no file below a folder that the server reads from",
        hint=f"{_data_hint(rules)}; autotune serve --data-root FOLDER adds one, and a name of the "
        "Hugging Face hub such as owner/name needs none",
    )


def _check_file_size(name: str, file: Path) -> None:
    """Raise NotAllowed for a config or a tokenizer that is read as a whole and is too large."""
    largest = _LARGEST_FILES.get(name)
    if largest is None:
        return
    file_name, largest_bytes = largest
    read = file / file_name if file.is_dir() else file
    size = read.stat().st_size if read.exists() else 0
    if size > largest_bytes:
        raise NotAllowed(
            f"{name} = {file.name!r:.80} has {format_size(size)}, more than any {file_name}",
            hint=f"name a {file_name}, or a folder with one",
        )


def _check_links(name: str, folder: Path, rules: SubmissionRules) -> None:
    """Raise NotAllowed for a folder with a link to a file that could not be named itself."""
    for parent, folders, files in os.walk(folder):
        for entry in (*folders, *files):
            path = Path(parent, entry)
            if path.is_symlink() and _below(str(path), rules.data_roots) is None:
                raise NotAllowed(
                    f"{name} = {str(folder)!r:.80} has a link, {str(path)[-80:]!r}, that leads out "
                    "of the folders that the server reads from, or nowhere",
                    hint="put the file itself there, or have the folder that it is in added with "
                    "autotune serve --data-root FOLDER",
                )


def _below(value: str, folders: Sequence[str]) -> Path | None:
    """Returns the file that `value` names in one of the folders, links followed; None without."""
    if value.startswith("~"):
        return None
    for folder in folders:
        root = Path(folder).resolve()
        try:
            file = (root / value).resolve()
            if file.is_relative_to(root) and file.exists():
                return file
        except (OSError, ValueError, RuntimeError):  # no name of a file, or a circle of links
            continue
    return None


def _allowed_script(value: Any, rules: SubmissionRules) -> str:
    file = _below(value, rules.code_folders) if isinstance(value, str) else None
    if file is None or not file.is_file():
        raise NotAllowed(
            f"script = {value!r:.80}: a submission cannot run code", hint=_code_hint(rules)
        )
    return str(file)


def _allowed_function(value: str, rules: SubmissionRules) -> str:
    reference = read_reference(value)
    file = None if reference.file is None else _below(reference.place, rules.code_folders)
    if file is None or not file.is_file():
        raise NotAllowed(
            f"model = {value!r:.80}: a submission cannot run code", hint=_code_hint(rules)
        )
    return f"{file}:{reference.function}"


def file_not_here(settings: Mapping[str, Any], rules: SubmissionRules) -> str | None:
    """Returns the file or folder of a submission that this machine does not have; None without one.

    The server that took the submission has it, also what the text of its search space names. Of a
    name that could be one of the hub nothing is said.
    """
    tables = (settings, *_workloads_of(settings.get(SPACE_CONTENT)))
    return next(filter(None, (_file_not_here(table, rules) for table in tables)), None)


@lru_cache(maxsize=_REMEMBERED_SPACES)
def _workloads_of(space: str | None) -> Sequence[Mapping[str, Any]]:
    """Returns what may name files in a space's text, by tables; none of a text that is no TOML."""
    try:
        content = parse_toml((space or "").encode(), source=SPACE_CONTENT, kind=InvalidSpace)
    except InvalidSpace:
        return ()  # its search says so
    scales = content.get("scales")
    tables = [content.get("workload"), *(scales.values() if isinstance(scales, dict) else ())]
    may_name_files = {*_PATHS, "script"}
    return [
        {name: table[name] for name in may_name_files & table.keys()}
        for table in tables
        if isinstance(table, dict)
    ]


def _file_not_here(settings: Mapping[str, Any], rules: SubmissionRules) -> str | None:
    own_words = {**_WORDS_FOR_PATHS, "script": ()}
    for name, words in own_words.items():
        value = settings.get(name)
        is_of_config = name == "model" and settings.get("model_config") is not None
        if not isinstance(value, str) or value in words or is_of_config:
            continue
        folders, file = rules.data_roots, value
        if name == "script":
            folders = rules.code_folders
        elif name == "model" and is_function_reference(value):
            folders, file = rules.code_folders, read_reference(value).place
        elif is_hub_name(value) and not is_local_name(value, suffixes=tuple(READERS)):
            continue
        if _below(file, folders) is None:
            return file
    return None


def _data_hint(rules: SubmissionRules) -> str:
    if rules.data_roots:
        return f"the folders for data are {', '.join(rules.data_roots)}"
    return "the server has no folder for data"


def _code_hint(rules: SubmissionRules) -> str:
    if rules.code_folders:
        return f"the folders for code are {', '.join(rules.code_folders)}"
    return "whoever runs the server can allow a folder: autotune serve --allow-code FOLDER"


def _check_model_folder(settings: Mapping[str, Any], rules: SubmissionRules) -> None:
    """Raise NotAllowed for a folder whose model needs code, or whose weights are pickled."""
    for name in ("model", "model_source"):
        value = settings.get(name)
        if not isinstance(value, str):
            continue
        if _below(value, rules.data_roots) is None:
            if settings.get("pretrained") and is_hub_name(value):
                raise NotAllowed(
                    f"the weights of {value!r:.80} would be downloaded, and may be pickled",
                    hint="download them as safetensors into a folder for data of the server",
                )
            continue
        folder = Path(value)
        folder = folder if folder.is_dir() else folder.parent
        config = folder / FILE_NAME
        if config.exists():
            _check_config(read_json(config))
        pickled = [file.name for pattern in _PICKLES for file in folder.glob(pattern)]
        if settings.get("pretrained") and pickled:
            raise NotAllowed(
                f"the weights {pickled[0]!r:.80} are pickled, and a pickle can run code",
                hint="leave only weights in safetensors in the folder",
            )


def _check_config(config: Any) -> None:
    """Raise NotAllowed for the config.json of a model that comes with its own code.

    Raises InvalidInput for sizes that are none.
    """
    if isinstance(config, Mapping):
        check_sizes(config, source=f"the model's {FILE_NAME}")
    if isinstance(config, Mapping) and _has_key(config, "auto_map"):
        raise NotAllowed(
            "the config has an auto_map: its model comes with code, which the service does not run",
            hint="use a model that transformers has itself",
        )


def _has_key(value: Any, key: str) -> bool:
    if isinstance(value, Mapping):
        return key in value or any(_has_key(inner, key) for inner in value.values())
    if isinstance(value, list):
        return any(_has_key(inner, key) for inner in value)
    return False


# -- sizes -----------------------------------------------------------------------------------------


def _check_size(given: Mapping[str, Any], rules: SubmissionRules) -> None:
    """Raise NotAllowed for a model or a text that would fill the machine of the server."""
    workload = _with_defaults(given, device_type=_device_type(rules))
    _check_numbers(workload.get("model_config") or {})
    free_bytes = free_disk_bytes(Path.cwd())
    if free_bytes < LEAST_FREE_BYTES:
        raise DiskFull(
            f"the disk of the server is full: {format_size(free_bytes)} are left",
            hint="whoever runs it has to make room",
        )
    check_weights_fit(workload, folder=Path.cwd(), kind=NotAllowed)
    if workload.get("script") is not None:
        return  # which reads its own text
    sizes = ("steps", "global_batch", "evaluation_sequences", "sequence_length")
    # The product of anything else says nothing.
    workload |= specified(Workload, {name: workload[name] for name in sizes})
    sequences = workload["steps"] * workload["global_batch"] + workload["evaluation_sequences"]
    tokens = sequences * workload["sequence_length"]
    if tokens * _TOKEN_BYTES > min(free_bytes, psutil.virtual_memory().total):
        raise NotAllowed(
            f"a trial reads {tokens:.3g} tokens, more than the server can hold",
            hint="choose fewer steps, a smaller batch or shorter sequences",
        )


def _with_defaults(given: Mapping[str, Any], *, device_type: str) -> dict[str, Any]:
    """Returns the settings with the sizes that a search takes where they are not given."""
    defaults = dict(DEFAULTS_BY_DEVICE[device_type])
    if given.get("script") is not None or given.get("model", "gpt") not in MODEL_NAMES:
        for name in ("layers", "width", "heads"):  # the model has its own
            del defaults[name]
    if given.get("tokenizer") == "bpe":
        defaults["vocab_size"] = DEFAULT_BPE_VOCABULARY
    return {**defaults, **{name: value for name, value in given.items() if value is not None}}


def _device_type(rules: SubmissionRules) -> str:
    """Returns the kind of device that a search will use, without touching one."""
    if rules.device_type:
        return rules.device_type
    names = rules.devices or ""
    if names.startswith("cpu"):
        return "cpu"
    has_gpu = names.startswith("cuda") or rules.ray is not None or bool(all_devices())
    return "cuda" if has_gpu else "cpu"


def _check_numbers(config: Any) -> None:
    """Raise NotAllowed for a number in a config that no model has."""
    if isinstance(config, Mapping):
        for name, value in config.items():
            if type(value) is int and abs(value) > _LARGEST_OF_CONFIG:
                raise NotAllowed(
                    f"the config has {str(name)[:60]} = {value}, more than any model",
                    hint=f"give at most {_LARGEST_OF_CONFIG}",
                )
            _check_numbers(value)
    elif isinstance(config, list):
        for value in config:
            _check_numbers(value)


def _base_name(space: str, workload: Mapping[str, Any]) -> str:
    """Returns the beginning of a study's name, such as `quick-gpt`."""
    model = str(workload.get("model") or "gpt")
    if workload.get("script") is not None:
        model = Path(str(workload["script"])).stem
    elif is_function_reference(model):
        model = model.rpartition(":")[2]
    text = re.sub("[^A-Za-z0-9.]+", "-", f"{space}-{Path(model).name}").strip("-.")
    return text[:60] or "search"


def checked_workload(settings: Mapping[str, Any], rules: SubmissionRules) -> dict[str, Any]:
    """Returns the settings of a workload to predict, under the rules of a submission.

    It may be larger than this machine: a prediction has no weights. Raises InvalidInput and
    NotAllowed.
    """
    given = {name: value for name, value in settings.items() if value is not None}
    check_names(given, Workload, accepted=open_settings(Workload))
    check_values(given)
    given = specified(Workload, given)
    workload = _with_paths(given, rules)
    _check_numbers(with_model_config(workload).get("model_config") or {})
    return workload
