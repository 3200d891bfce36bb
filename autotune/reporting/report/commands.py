"""The commands of a report: they repeat the study or one of its trials, and export a trial.

Each is text for a shell, the files it needs written by it. No command names a database: whoever
repeats a study keeps it in their own. Only what reads this very study says where it is.
"""

import json
import shlex
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from autotune.analysis.pick import DEFAULT_PREFERENCES, Preferences
from autotune.errors import InvalidInput
from autotune.spec.config import FIELD_ORDER, TrainingConfig
from autotune.spec.model_choice import MODEL_NAMES
from autotune.spec.model_file import sizes_of
from autotune.spec.search_space import SearchSpace
from autotune.spec.space_content import named_spaces
from autotune.spec.space_file import load_space
from autotune.spec.space_text import space_text, workload_table
from autotune.spec.study import DEFAULT_SAMPLER, DEFAULT_STORAGE, StudyDefinition, check_study_name
from autotune.spec.user_code import is_function_reference
from autotune.spec.workload import DEFAULT_LEARNING_RATES, DEFAULTS_BY_DEVICE, Workload
from autotune.spec.workload_settings import OF_ONE_DATASET, option_of

NUMBER, CONFIGURATION, TARGET = "\0number\0", "\0configuration\0", "\0target\0"
"""Places in a template. No text of a user's can hold them: neither a path nor an escaped TOML
string has a zero."""

_END = "END_OF_FILE"


def rerun_template(definition: StudyDefinition) -> str:
    """The command that runs exactly one configuration, beside the baseline that every search begins with."""
    stem = f"{_stem(definition.name)}-trial-{NUMBER}"
    settings, files, options = _model(definition.workload, stem=_stem(definition.name))
    space = SearchSpace(
        name=definition.name,
        techniques={},
        workload={**workload_table(definition.workload), **settings},
        defaults=_baseline_optimizer(definition),
    )
    about = f"Trial {{}} of study {definition.name}, and nothing else."
    text = space_text(space, about=about).replace("{}", NUMBER, 1)
    text += f'\n[[configurations]]\nname = "trial {NUMBER}"\n{CONFIGURATION}\n'
    words = [
        "--fresh",
        *_device(definition),
        *options,
    ]  # measured again, also beside the study that has it
    command = f"autotune search --space {stem}.toml --name {stem} {shlex.join(words)}"
    return _shell([*files, (f"{stem}.toml", text)], command)


def rerun_command(definition: StudyDefinition, *, number: int, config: TrainingConfig) -> str:
    template = rerun_template(definition)
    return template.replace(NUMBER, str(number)).replace(CONFIGURATION, configuration_lines(config))


def configuration_lines(config: TrainingConfig) -> str:
    """Every technique as a line of TOML."""
    return "\n".join(f"{field} = {_literal(getattr(config, field))}" for field in FIELD_ORDER)


def search_command(definition: StudyDefinition, *, trials: int) -> str:
    """The search that makes such a study again, under a name of its own."""
    name = f"{_stem(definition.name)}-again"
    settings, files, options = _model(definition.workload, stem=name)
    space = definition.space
    if not _is_shipped(space):
        own = {k: v for k, v in space.workload.items() if k != "model" or v in MODEL_NAMES}
        files = [*files, (f"{name}.toml", space_text(replace(space, workload=own)))]
    words = ["autotune", "search", "--name", name, "--fresh"]
    words += ["--space", space.name if _is_shipped(space) else f"{name}.toml"]
    # A written space has the scaled sizes already; without its scale they would pass for those of
    # its published table.
    words += ["--scale", space.scale] if space.scale else []
    words += [*_device(definition), "--trials", str(max(1, trials))]
    words += ["--sampler", definition.sampler] if definition.sampler != DEFAULT_SAMPLER else []
    words += ["--model", settings["model"]] if settings else []
    words += ["--pretrained"] if definition.workload.pretrained else []
    words += [*options, *_workload_options(definition)]
    return _shell(files, shlex.join(words))


def reading_command(
    command: str,
    study: str,
    *,
    storage: str,
    preferences: Preferences = DEFAULT_PREFERENCES,
    also: str = "",
) -> str:
    """`autotune report tour --prefer smallest`: a command that looks at the study where it is kept."""
    usual = DEFAULT_PREFERENCES
    words = ["autotune", command, study]
    words += ["--storage", storage] if storage != DEFAULT_STORAGE else []
    for name in ("speed", "perplexity"):
        share = getattr(preferences.tolerance, name)
        words += (
            ["--tolerance", f"{name}={share:g}"] if share != getattr(usual.tolerance, name) else []
        )
    words += ["--prefer", preferences.prefer] if preferences.prefer != usual.prefer else []
    allowed = preferences.max_perplexity_increase
    words += (
        ["--max-perplexity-increase", f"{allowed:g}"]
        if allowed != usual.max_perplexity_increase
        else []
    )
    return shlex.join(words) + also


def export_template(study: str, *, storage: str) -> str:
    return reading_command(
        "export", study, storage=storage, also=f" --trial {NUMBER} --to {TARGET}"
    )


# -- parts -----------------------------------------------------------------------------------------


def _shell(files: list[tuple[str, str]], command: str) -> str:
    """The command after the files it reads; nothing in a file is looked at by the shell."""
    written = [f"cat > {name} <<'{_END}'\n{text.rstrip()}\n{_END}\n" for name, text in files]
    return "".join(written) + command.rstrip()


def _device(definition: StudyDefinition) -> list[str]:
    return ["--max-mem", exact_size(definition.cap_bytes), "--device", definition.device.type]


def exact_size(size_bytes: int) -> str:
    """`48MiB`: in the largest unit that loses nothing."""
    for unit, size in (("GiB", 1024**3), ("MiB", 1024**2), ("KiB", 1024)):
        if size_bytes % size == 0:
            return f"{size_bytes // size}{unit}"
    return str(size_bytes)


def _model(
    workload: Workload, *, stem: str
) -> tuple[dict[str, Any], list[tuple[str, str]], list[str]]:
    """How a model that is no built-in one is named: settings of a space file, files to write, options."""
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


def _baseline_optimizer(definition: StudyDefinition) -> dict[str, Any]:
    """A search begins with the baseline of its space's first optimizer; nothing to say where that is the usual one."""
    optimizer = definition.baseline_config().optimizer
    return {} if optimizer == TrainingConfig().optimizer else {"optimizer": optimizer}


def _is_shipped(space: SearchSpace) -> bool:
    return space.name in named_spaces() and space.is_a_scale_of(load_space(space.name))


def _workload_options(definition: StudyDefinition) -> list[str]:
    """Options for every setting that neither the device's defaults nor the space already give."""
    workload, expected = definition.workload, _expected(definition)
    words: list[str] = []
    for name, value in workload_table(workload).items():
        if name == "pretrained" or value == expected.get(name):
            continue
        if name == "learning_rates":
            rates = [
                f"{one}={rate!r}" for one, rate in value.items() if rate != expected[name].get(one)
            ]
            words += [word for rate in rates for word in (option_of(name), rate)]
        elif isinstance(value, bool):
            words.append(option_of(name) if value else option_of(name).replace("--", "--no-", 1))
        else:
            words += [option_of(name), str(value)]
    return words


def _expected(definition: StudyDefinition) -> dict[str, Any]:
    """What the workload would be if nothing were said on the command line but the model."""
    defaults = {field.name: field.default for field in fields(Workload)}
    by_device: Mapping[str, Any] = DEFAULTS_BY_DEVICE[definition.device.type]
    by_space = definition.space.workload
    expected = {**defaults, **by_device, **by_space}
    if (
        "dataset" in by_space and definition.workload.dataset != by_space["dataset"]
    ):  # splits and columns of the expected one go with it
        expected |= {name: defaults[name] for name in OF_ONE_DATASET}
    if definition.workload.model_config is not None:
        expected |= sizes_of(definition.workload.model_config)
    rates = [source.get("learning_rates", {}) for source in (by_device, by_space)]
    return {**expected, "learning_rates": {**DEFAULT_LEARNING_RATES, **rates[0], **rates[1]}}


def _literal(value: Any) -> str:
    """As JSON, which is TOML for all that a technique can be; 1.0 and 1 are one budget."""
    return repr(value).removesuffix(".0") if isinstance(value, float) else json.dumps(value)


def _stem(study: str) -> str:
    """The study's name where it can be a file's; a database may hold others."""
    try:
        check_study_name(study)
    except InvalidInput:
        return "study"
    return study[:80]
