"""Shell commands of a report: to repeat the study or one of its trials, and to export a trial.

Each is text for a shell that also writes the files it needs. Commands that repeat a study name no
database, because the reader stores the new study in their own; only commands that read this study
say where it is stored.
"""

import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from autotune.analysis.pick import DEFAULT_PREFERENCES, Preferences
from autotune.errors import InvalidInput
from autotune.spec.config import FIELD_ORDER, TrainingConfig
from autotune.spec.learning_rates import default_learning_rates
from autotune.spec.model_choice import MODEL_NAMES
from autotune.spec.model_file import sizes_of
from autotune.spec.search_space import SearchSpace
from autotune.spec.setting import option_of, options_of
from autotune.spec.space_content import named_spaces
from autotune.spec.space_file import load_space
from autotune.spec.space_text import space_text, workload_table
from autotune.spec.study import DEFAULT_SAMPLER, DEFAULT_STORAGE, StudyDefinition, check_study_name
from autotune.spec.user_code import is_function_reference
from autotune.spec.workload import DEFAULTS_BY_DEVICE, OF_ONE_DATASET, Workload
from autotune.units import exact_size

NUMBER, CONFIGURATION, TARGET = "\0number\0", "\0configuration\0", "\0target\0"
"""Placeholders in a template. No user's text can contain them: neither a path nor an escaped TOML
string has a zero byte."""

_PLACEHOLDER = re.compile("\0(number|configuration|target)\0")
_END = "END_OF_FILE"


def rerun_template(definition: StudyDefinition) -> str:
    """Returns the command that runs one configuration, after the baseline that every search runs.

    It contains the placeholders `NUMBER` and `CONFIGURATION`.
    """
    stem = f"{_stem(definition.name)}-trial-{NUMBER}"
    settings, files, options = _model(definition.workload, stem=_stem(definition.name))
    defaults = {}
    optimizer = definition.baseline_config().optimizer
    if optimizer != TrainingConfig().optimizer:
        # A search begins with the baseline of its space's first optimizer.
        defaults["optimizer"] = optimizer
    space = SearchSpace(
        name=definition.name,
        techniques={},
        workload={**workload_table(definition.workload), **settings},
        defaults=defaults,
    )
    about = f"Trial {{}} of study {definition.name}, and nothing else."
    text = space_text(space, about=about).replace("{}", NUMBER, 1)
    text += f'\n[[configurations]]\nname = "trial {NUMBER}"\n{CONFIGURATION}\n'
    # --fresh: measure it again even if the database already holds a result.
    arguments = shlex.join(
        ["--fresh", *_device(definition), *options, *_script_arguments(definition.workload)]
    )
    command = f"autotune search --space {stem}.toml --name {stem} {arguments}"
    return _shell([*files, (f"{stem}.toml", text)], command)


def rerun_command(definition: StudyDefinition, *, number: int, config: TrainingConfig) -> str:
    """Returns the command that runs one trial again."""
    template = rerun_template(definition)
    return template.replace(NUMBER, str(number)).replace(CONFIGURATION, configuration_lines(config))


def template_parts(template: str) -> list[str]:
    """Returns the template's texts and, between each two of them, the name of a placeholder.

    A page receives this form: in its texts every control character becomes an escape.
    """
    return _PLACEHOLDER.split(template)


def configuration_lines(config: TrainingConfig) -> str:
    """Returns every technique as a line of TOML."""
    return "\n".join(f"{field} = {_literal(getattr(config, field))}" for field in FIELD_ORDER)


def search_command(definition: StudyDefinition, *, trials: int) -> str:
    """Returns the command that repeats the study, with `trials` trials, under a new name."""
    name = f"{_stem(definition.name)}-again"
    settings, files, options = _model(definition.workload, stem=name)
    space = definition.space
    if not _is_shipped(space):
        # A model that is not built in is named by --model.
        named = {k: v for k, v in space.workload.items() if k != "model" or v in MODEL_NAMES}
        files = [*files, (f"{name}.toml", space_text(replace(space, workload=named)))]
    arguments = ["autotune", "search", "--name", name, "--fresh"]
    arguments += ["--space", space.name if _is_shipped(space) else f"{name}.toml"]
    if space.scale:
        # The written file has the scaled sizes already. Without the scale they would be taken for
        # the sizes of its published table.
        arguments += ["--scale", space.scale]
    arguments += [*_device(definition), "--trials", str(max(1, trials))]
    if definition.sampler != DEFAULT_SAMPLER:
        arguments += ["--sampler", definition.sampler]
    if settings:
        arguments += ["--model", settings["model"]]
    if definition.workload.pretrained:
        arguments.append("--pretrained")
    arguments += [*options, *_workload_options(definition)]
    arguments += _script_arguments(definition.workload)
    return _shell(files, shlex.join(arguments))


def reading_command(
    command: str,
    study: str,
    *,
    storage: str,
    preferences: Preferences = DEFAULT_PREFERENCES,
    suffix: str = "",
) -> str:
    """Returns a command that reads the study, such as `autotune report tour --prefer smallest`.

    `storage` is the URL of a database, or of the server that has the study. `suffix` is appended
    unquoted.
    """
    arguments = ["autotune", command, study]
    if storage.startswith(("http://", "https://")):
        arguments += ["--server", storage]
    elif storage != DEFAULT_STORAGE:
        arguments += ["--storage", storage]
    arguments += preference_arguments(preferences)
    return shlex.join(arguments) + suffix


def preference_arguments(preferences: Preferences) -> list[str]:
    """Returns the arguments that set the preferences, without those that are defaults."""
    arguments = []
    for name, option in options_of(Preferences).items():
        arguments += option.arguments(getattr(preferences, name))
    return arguments


def export_template(study: str, *, storage: str) -> str:
    """Returns the command that exports a trial, with the placeholders `NUMBER` and `TARGET`."""
    return reading_command(
        "export", study, storage=storage, suffix=f" --trial {NUMBER} --to {TARGET}"
    )


# -- parts -----------------------------------------------------------------------------------------


def _shell(files: list[tuple[str, str]], command: str) -> str:
    """Returns the command after the files it reads; the shell interprets nothing in a file."""
    written = [f"cat > {name} <<'{_END}'\n{text.rstrip()}\n{_END}\n" for name, text in files]
    return "".join(written) + command.rstrip()


def _device(definition: StudyDefinition) -> list[str]:
    return ["--max-mem", exact_size(definition.cap_bytes), "--device", definition.device.type]


def _model(
    workload: Workload, *, stem: str
) -> tuple[dict[str, Any], list[tuple[str, str]], list[str]]:
    """Returns how to name a model that is not built in.

    The result is (settings of a search-space file, files to write as (name, text), options).
    """
    if workload.script is not None:
        return {}, [], ["--script", workload.script]
    if is_function_reference(workload.model):
        return {}, [], ["--model", workload.model]
    if workload.pretrained and workload.model_source is not None:
        return {"model": workload.model_source}, [], []
    if workload.model_config is not None:
        content = json.dumps(workload.model_config, indent=2)
        return {"model": f"./{stem}-model.json"}, [(f"{stem}-model.json", content)], []
    return {}, [], []


def _script_arguments(workload: Workload) -> list[str]:
    """Returns what stands at the end of the command line for the script's arguments."""
    return ["--", *workload.script_arguments] if workload.script_arguments else []


def _is_shipped(space: SearchSpace) -> bool:
    return space.name in named_spaces() and space.is_a_scale_of(load_space(space.name))


def _workload_options(definition: StudyDefinition) -> list[str]:
    """Returns an option for every setting that differs from the defaults and the search space."""
    workload = definition.workload
    expected = _expected(definition)
    arguments: list[str] = []
    for name, value in workload_table(workload).items():
        if name == "pretrained" or value == expected.get(name):
            continue
        if name == "learning_rates":
            value = {one: rate for one, rate in value.items() if rate != expected[name].get(one)}
        arguments += option_of(Workload, name).arguments(value)
    return arguments


def _expected(definition: StudyDefinition) -> dict[str, Any]:
    """Returns the workload that results if the command line sets nothing but the model."""
    defaults = {field.name: field.default for field in fields(Workload)}
    by_device: Mapping[str, Any] = DEFAULTS_BY_DEVICE[definition.device.type]
    by_space = definition.space.workload
    expected = {**defaults, **by_device, **by_space}
    if "dataset" in by_space and definition.workload.dataset != by_space["dataset"]:
        # The splits and columns of the space belong to its dataset and do not apply to another.
        expected |= {name: defaults[name] for name in OF_ONE_DATASET}
    if definition.workload.model_config is not None:
        expected |= sizes_of(definition.workload.model_config)
    rates = default_learning_rates(
        definition.device.type, pretrained=definition.workload.pretrained
    )
    return {**expected, "learning_rates": {**rates, **by_space.get("learning_rates", {})}}


def _literal(value: Any) -> str:
    """Returns a value as TOML. For techniques that is JSON, except that 1.0 is written as 1."""
    if isinstance(value, float):
        return repr(value).removesuffix(".0")
    return json.dumps(value)


def _stem(study: str) -> str:
    """Returns the study's name if it can be a file name; a database may hold other names."""
    try:
        check_study_name(study)
    except InvalidInput:
        return "study"
    return study[:80]
