"""Workload, device, versions, settings and dates of a study, as (name, text) pairs."""

import shlex
from collections.abc import Iterator

from autotune.analysis.pick import Preferences
from autotune.reporting.report.excluded import combinations
from autotune.reporting.study_view import StudyView
from autotune.reporting.trial_facts import Facts
from autotune.spec.model_file import ignored_quantization
from autotune.spec.script_files import files_of
from autotune.spec.workload import BESIDE_ADAPTERS, STANDARD_LIBRARY_TEXT, Workload
from autotune.units import format_duration, format_size


def workload_facts(workload: Workload) -> Facts:
    """Returns the facts about the model or script, the data and the training."""
    if workload.script is not None:
        return tuple(_script_facts(workload))
    return tuple(_model_facts(workload))


def _script_facts(workload: Workload) -> Iterator[tuple[str, str]]:
    yield "script", workload.script or ""
    if workload.script_arguments:
        yield "its arguments", shlex.join(workload.script_arguments)
    if workload.one_rank:
        yield "run as", "the only rank of torchrun"
    if workload.model_sha256:
        yield "hash of the script", workload.model_sha256
    yield from _files(workload)
    yield "its own precision", workload.own_precision
    yield "its own optimizer fusion", workload.own_fusion
    yield "a step", f"{workload.global_batch} sequences"
    yield "steps", _steps(workload)
    yield "seed", str(workload.seed)


def _model_facts(workload: Workload) -> Iterator[tuple[str, str]]:
    yield "model", workload.describe_model()
    if ignored := ignored_quantization(workload.model_config):
        yield "not used", ignored
    if workload.model_source:
        yield "weights from", workload.model_source
    if workload.model_sha256:
        yield "hash of the model", workload.model_sha256
    yield from _files(workload)
    yield "vocabulary", f"{workload.vocab_size:,} tokens, tokenizer {workload.tokenizer}"
    yield "text", _text(workload)
    if workload.text_sha256:
        yield "hash of the tokens", workload.text_sha256
    yield (
        "held out",
        f"{workload.evaluation_sequences} sequences for the perplexity, of {_held_out(workload)}",
    )
    batch = (
        f"{workload.global_batch} x {workload.sequence_length:,} "
        f"= {workload.tokens_per_step:,} tokens"
    )
    yield "a step", f"{batch}, {workload.packing}"
    yield "steps", _steps(workload)
    rates = ", ".join(f"{name} {rate:g}" for name, rate in workload.learning_rates.items())
    warmup = f"{workload.learning_rate_warmup_steps} steps of warm-up"
    yield "learning rates", f"{rates}; {workload.schedule} after {warmup}"
    yield (
        "gradient clipping",
        "none" if workload.gradient_clipping is None else f"{workload.gradient_clipping:g}",
    )
    if workload.adapter_dropout:
        yield "dropout of adapters", f"{workload.adapter_dropout:g}"
    if said := list(_of_adapters(workload)):
        yield "adapters", ", ".join(said)
    if workload.modules_to_save:
        of = {"adapter": "adapters", "base": "frozen weights"}[workload.modules_to_save_dtype]
        names = ", ".join(workload.modules_to_save)
        yield "trained whole beside adapters", f"{names}, in the number format of {of}"
    yield "seed", f"{workload.seed}, of weights and data order"


def _of_adapters(workload: Workload) -> Iterator[str]:
    """Yield how adapters are scaled and begin, where it is not as in other trainings."""
    if workload.adapter_alpha != BESIDE_ADAPTERS["adapter_alpha"]:
        yield f"alpha {workload.adapter_alpha}"
    if workload.adapter_scaling == "rslora":
        yield "scaled by the root of the rank"
    if workload.adapter_init == "pissa":
        yield "a start by PiSSA"
    for what in ("rank", "alpha"):
        for layer, value in getattr(workload, f"adapter_{what}_pattern").items():
            yield f"{what} {value} in {layer}"


def _files(workload: Workload) -> Iterator[tuple[str, str]]:
    files = files_of(workload)
    if files:
        yield "files that it reads", ", ".join(files)
    if workload.packages:
        versions = (f"{name} {version}" for name, version in workload.packages.items())
        yield "packages that it imports", ", ".join(versions)


def _steps(workload: Workload) -> str:
    return f"{workload.steps}, the first {workload.warmup_steps} neither timed nor measured"


def _text(workload: Workload) -> str:
    if workload.dataset == STANDARD_LIBRARY_TEXT:
        return "the documentation of Python's standard library"
    config = f" ({workload.dataset_config})" if workload.dataset_config else ""
    read = "" if workload.prompts is None else f": {workload.prompts.describe()}"
    return f"{workload.dataset}{config}, split {workload.dataset_split}{read}"


def _held_out(workload: Workload) -> str:
    part = f"split {workload.held_out_split}" if workload.held_out_split else "a tenth of the text"
    if workload.learns_answers:
        part += ", the answers only"
    return part


def study_facts(view: StudyView, preferences: Preferences) -> Facts:
    """Returns the facts about the device, the search and how the pick was made."""
    return tuple(_study_facts(view, preferences))


def _study_facts(view: StudyView, preferences: Preferences) -> Iterator[tuple[str, str]]:
    definition, result = view.definition, view.result
    device = result.device
    yield "device", f"{device.name}, {device.device}, {format_size(device.total_memory_bytes)}"
    devices = result.workload.devices_per_trial
    if devices > 1:
        nodes = result.workload.nodes_per_trial
        on_nodes = "" if nodes == 1 else f" on {nodes} nodes"
        yield "devices of a trial", f"{devices}{on_nodes}; cap and peak memory are those of each"
    if device.others:
        yield "in use by others", device.others
    yield "cap", format_size(result.cap_bytes)
    yield "versions", ", ".join(f"{name} {version}" for name, version in device.versions.items())
    space = definition.space
    yield "search space", space.name + (f": {space.description}" if space.description else "")
    total, allowed = combinations(definition)
    if total:
        yield "its size", f"{total:,} combinations, {allowed:,} of them legal"
    yield "sampler", f"{definition.sampler}, seed {definition.seed}"
    yield "trials", f"{len(result.trials):,}, {_trial_time(view)}"
    if view.begun_at:
        ended = f", last result {view.last_result_at}" if view.last_result_at else ""
        yield "begun", f"{view.begun_at}{ended} (UTC)"
    tolerance = preferences.tolerance
    yield (
        "front",
        f"speeds within {100 * tolerance.speed:g} % and "
        f"{result.terms.worded('perplexities')} within "
        f"{result.terms.share(tolerance.perplexity)} are equal; memory is exact",
    )
    increase = result.terms.share(preferences.max_perplexity_increase)
    yield "pick", f"{preferences.prefer}, {result.terms.quality} at most {increase} above the best"


def _trial_time(view: StudyView) -> str:
    trials = view.result.trials
    reused = sum(record.reused_from is not None for record in trials)
    total = format_duration(sum(record.seconds or 0.0 for record in trials))
    if reused:
        return f"{total} in all, {reused:,} of them from earlier studies"
    return f"{total} in all"
