"""Texts about one trial or study, for tables, pages and the hover labels of figures."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from autotune.analysis.feasibility import least_needed_bytes
from autotune.analysis.pick import closest_miss, is_no_better, savings
from autotune.analysis.reasons import left_in_16_bits
from autotune.analysis.roofline import matrix_format, matrix_rate, model_flops_utilization
from autotune.reporting import style
from autotune.reporting.outcomes import outcome_counts, outcome_label, outcome_reason
from autotune.spec.config import (
    FIELD_ORDER,
    TECHNIQUES,
    TrainingConfig,
)
from autotune.spec.prediction import Prediction, Resource
from autotune.spec.provenance import OF_OTHER_SEEDS, OF_OWN_LOSS
from autotune.spec.result import DeviceInfo, StudyResult, TrialRecord, terms_of
from autotune.units import (
    different_sizes,
    format_duration,
    format_estimate,
    format_percent,
    format_rate,
    format_size,
)


def speed_text(prediction: Prediction) -> str:
    """Returns the predicted speed; empty where there is none.

    For example `about 52,300 tokens/s (31,400 to 65,400), most of the time for matrix products,
    87 % MFU`.
    """
    speed, bounds = (
        prediction.predicted_tokens_per_second,
        prediction.predicted_tokens_per_second_bounds,
    )
    if speed is None or bounds is None:
        return ""
    least, most = map(format_estimate, bounds)
    text = f"about {format_estimate(speed)} tokens/s ({least} to {most})"
    if prediction.bound_by:
        text += f", most of the time for {_TIME_FOR[prediction.bound_by]}"
    if prediction.predicted_model_flops_utilization is not None:
        text += f", {format_percent(prediction.predicted_model_flops_utilization)} % MFU"
    return text


_TIME_FOR: Mapping[Resource, str] = {
    "matrix products": "matrix products",
    "memory bandwidth": "reading and writing memory",
    "host link": "moving activations to the host and back",
    "host": "operators that the host launches",
    "collectives": "what devices send each other",
}


def trial_label(record: TrialRecord) -> str:
    """Returns name and configuration as plain text."""
    description = record.config.describe()
    return f"{record.name}: {description}" if record.name else description


_SHORT = {
    "micro_batch_size": "mb",
    "checkpointing": "ckpt",
    "compile": "compile",
    "memory_budget": "budget",
    "compile_mode": "mode",
    "optimizer_fusion": "fusion",
    "attention": "attn",
    "activation_offload": "offload",
    "adapter_rank": "rank",
    "base_weights": "base",
    "sharding_group": "group",
    "tensor_parallel": "tp",
    "offload": "to host",
    "gradient_reduction": "reduce",
    "gradient_accumulation_dtype": "sums",
}
"""Short names of techniques. The values of the others say what they are: `bf16-mixed`, `lora`."""


def short_label(record: TrialRecord, baseline: TrialRecord | None) -> str:
    """Returns the name or, without one, what differs from the baseline: `bf16-true, ckpt block`.

    Without a baseline the configuration is described in full.
    """
    if record.name:
        return record.name
    if baseline is None:
        return record.config.describe()
    return short_description(record.config, baseline.config)


def short_description(config: TrainingConfig, baseline: TrainingConfig) -> str:
    """Returns in short what differs from the baseline: `bf16-true, mb 4, ckpt block`."""
    values, plain = config.to_dict(), baseline.to_dict()
    differences = [
        f"{_SHORT.get(field, '')} {values[field]}".strip()
        for field in FIELD_ORDER
        if values[field] != plain[field]
    ]
    return ", ".join(differences) or "as the baseline"


def format_speed(tokens_per_second: float | None, spread: float | None) -> str:
    """Returns `8,052 ±6%`, or an empty text if there is no speed."""
    if not tokens_per_second:
        return ""
    return f"{tokens_per_second:,.0f} ±{format_percent((spread or 0.0) / tokens_per_second)}%"


def format_perplexity(record: TrialRecord) -> str:
    """Returns `23.91 ±0.05`, with the spread over seeds, or an empty text without a perplexity.

    Of a trial of rows it is the loss.

    `SHARED_MARK` stands before a perplexity that was measured in another trial, and parentheses
    around one that says nothing; `perplexity_notes` explains both.
    """
    if record.perplexity is None:
        return ""
    mark = SHARED_MARK if record.shares_perplexity else ""
    text = mark + record.terms.with_spread(record.perplexity, record.perplexity_spread)
    return f"({text})" if record.perplexity_says_nothing else text


def perplexity_source_text(record: TrialRecord) -> str:
    """Returns where the perplexity comes from, for a table.

    Empty if the trial measured it itself, on the held-out text.
    """
    source = record.perplexity_source
    if record.perplexity is None or source is None:
        return ""
    if source.of_other_seeds:
        return OF_OTHER_SEEDS.removeprefix("; ")
    if source.is_shared:
        return f"of {source.trial}"
    if source.kind == "measured":
        return source.seeds_text
    return str(replace(source, over_random_weights=False, of_own_loss=False))


NO_BETTER = "no better than before training"
"""Is said of a perplexity that the training has not lowered."""


def perplexity_warning(record: TrialRecord, initial_perplexity: float | None) -> str:
    """Returns what speaks against the perplexity of a trial; empty if nothing does.

    `initial_perplexity` is that before training, None without pretrained weights.
    """
    return NO_BETTER if is_no_better(record, initial_perplexity) else ""


def perplexity_remarks(record: TrialRecord, initial_perplexity: float | None) -> str:
    """Returns where the perplexity comes from and what speaks against it, for a table."""
    remarks = (perplexity_source_text(record), perplexity_warning(record, initial_perplexity))
    return ", ".join(filter(None, remarks))


SHARED_MARK = "="
SHARED_MARK_NOTE = (
    "= is the perplexity of the trial trained to the end on behalf of all with the same numerics"
)
SAYS_NOTHING_NOTE = (
    "(perplexity) in parentheses says nothing, as the weights under the adapter are random: such "
    "trials are compared in memory and speed only"
)


def perplexity_notes(records: Sequence[TrialRecord]) -> list[str]:
    """Returns what explains the marks at perplexities, below or above a table that has them."""
    terms = terms_of(records)
    shares = says_nothing = of_own_loss = False
    for record in records:
        shares = shares or record.shares_perplexity
        of_own_loss = of_own_loss or record.perplexity_is_of_own_loss
        source = record.perplexity_source
        says_nothing = says_nothing or (source is not None and source.over_random_weights)
    notes = []
    if shares:
        notes.append(terms.worded(SHARED_MARK_NOTE))
    if says_nothing:
        notes.append(SAYS_NOTHING_NOTE)
    if of_own_loss:
        notes.append(f"perplexity is {OF_OWN_LOSS}: compare it within this study only")
    return notes


def outcome_line(record: TrialRecord) -> str:
    """Returns in one line how a trial without a speed ended."""
    size = f" at {format_size(record.device_bytes)}" if record.device_bytes else ""
    line = f"#{record.number} {trial_label(record)}: {outcome_label(record)}{size}"
    reason = outcome_reason(record)
    return f"{line} ({reason})" if reason else line


def no_pick_reason(result: StudyResult) -> str:
    """Returns why there is no pick, or an empty text if there is one."""
    if result.pick is not None:
        return ""
    finished = [record for record in result.trials if record.is_finished]
    if not finished:
        return "No trial has finished yet."
    if all(record.failed for record in finished):
        return f"Nothing could be trained to its end: {outcome_counts(finished)}."
    return f"Nothing that was tried trains under {format_size(result.cap_bytes)}."


def advice_without_pick(result: StudyResult) -> list[str]:
    """Returns what came closest and what to do, a sentence each, where there is no pick.

    It follows from how the trials ended: a larger cap does not help where trials crashed.
    """
    sentences = []
    closest = closest_miss(result.trials)
    if closest is not None:
        needed, _ = different_sizes(least_needed_bytes(closest), result.cap_bytes)
        outcome = outcome_label(closest)
        sentences.append(
            f"The closest miss needs {needed}, {outcome}: #{closest.number} {trial_label(closest)}."
        )
    if any(record.was_rejected for record in result.trials):
        sentences.append(_LESS_MEMORY if result.workload.script is None else _LESS_MEMORY_OF_SCRIPT)
    first_failed = next((record for record in result.trials if record.failed), None)
    if first_failed is not None:
        sentences.append(f"{outcome_line(first_failed)}.")
        log_file = _log_file(result, first_failed)
        if log_file is not None:
            sentences.append(f"Its whole output is in {log_file}.")
        if result.workload.script is not None:
            sentences.append(
                "If the script is wrong, correct it and begin another study with another --name."
            )
    return sentences


_LESS_MEMORY = (
    "Try a larger --max-mem, more --trials, a shorter --seq-len, a smaller --global-batch or a "
    "smaller model."
)
_LESS_MEMORY_OF_SCRIPT = (
    "Try a larger --max-mem, more --trials, or a smaller model or shorter sequences in the script."
)


def _log_file(result: StudyResult, record: TrialRecord) -> Path | None:
    """Returns the file with the output of the trial's last attempt; None if it is not here.

    A study that was imported, or that another machine worked on, has no logs here.
    """
    if result.folder is None:
        return None
    logs = result.folder / "logs"
    files = [
        *logs.glob(f"trial-{record.number}.log"),
        *logs.glob(f"trial-{record.number}-attempt-*.log"),
    ]
    return max(files, key=lambda file: file.stat().st_mtime, default=None)


def answer_of(result: StudyResult) -> str:
    """Returns the pick and its reason in one sentence."""
    if result.pick is None:
        return no_pick_reason(result)
    picked = result.trial(result.pick.number)
    heading = result.pick.heading
    return f"{heading}: #{picked.number} {trial_label(picked)} - {result.pick.reason}."


def about(result: StudyResult) -> str:
    """Returns workload, device and torch version in one line."""
    workload, device = result.workload, result.device
    place = device.describe(devices=workload.devices_per_trial, nodes=workload.nodes_per_trial)
    return (
        f"{workload.describe(counted=result.terms.counted)}, {workload.steps} steps, on {place}, "
        f"torch {device.versions.get('torch', '?')}"
    )


def place_and_cap(result: StudyResult) -> str:
    """Returns `NVIDIA H200 (cuda:0), cap 8.00 GiB`, with the number of devices of a trial."""
    device, devices = result.device, result.workload.devices_per_trial
    cap = format_size(result.cap_bytes)
    if devices == 1:
        return f"{device.name} ({device.device}), cap {cap}"
    place = device.describe(devices=devices, nodes=result.workload.nodes_per_trial)
    return f"{place}, cap {cap} each"


def extrapolation_note(prediction: Prediction) -> str:
    """Returns how an extrapolated prediction was made, and how well; empty for any other one."""
    if prediction.checked_at is None:
        return ""
    first, second = prediction.extrapolated_from
    error = format_size(prediction.check_error_bytes or 0)
    return (
        f"extrapolated from predictions of {first} and {second} layers, and compared with one of "
        f"{prediction.checked_at}, where it was {error} off"
    )


def peaks_text(peaks_bytes: Sequence[int]) -> str:
    """Returns the peaks, the largest first: `by rank: 6.00 MiB on rank 0; 5.00 MiB on ranks 1-3`.

    Of many different ones only the largest and the smallest are named.
    """
    ranks_of_peak: dict[int, list[int]] = {}
    for rank, peak_bytes in enumerate(peaks_bytes):
        ranks_of_peak.setdefault(peak_bytes, []).append(rank)
    peaks = sorted(ranks_of_peak, reverse=True)
    if len(peaks) == 1:
        return f"the same on all {len(peaks_bytes)} ranks"
    order = "by rank"
    if len(peaks) > _MOST_PEAKS:
        order, peaks = "from most to least", [peaks[0], peaks[-1]]
    listed = "; ".join(f"{format_size(peak)} on {_ranges(ranks_of_peak[peak])}" for peak in peaks)
    return f"{order}: {listed}"


def communication_text(record: TrialRecord) -> str:
    """Returns `26 % of a profiled step, 7.01 ms`; empty where it is not known."""
    seconds, share = record.communication_seconds, record.communication_share
    if seconds is None or share is None:
        return ""
    duration = f"{1000 * seconds:.3g} ms" if seconds < 0.9995 else format_duration(seconds)
    return f"{format_percent(share)} % of a profiled step, {duration}"


def format_utilization(record: TrialRecord) -> str:
    """Returns the model FLOPs utilization, such as `31%`; empty where it is not known."""
    if record.model_flops_utilization is None:
        return ""
    return f"{format_percent(record.model_flops_utilization)}%"


def utilization_sentence(record: TrialRecord, device: DeviceInfo) -> str:
    """Returns how much of the device's matrix rate a trial uses; empty where that is not known."""
    rate, utilization = matrix_rate(record, device), record.model_flops_utilization
    if device.matrix_flops_per_second is None or record.model_flops_per_token is None:
        return ""
    kind = matrix_format(record.config.precision)
    if rate is None:
        return (
            f"not known, as something else used the device all the time while its {kind} products "
            "were measured"
        )
    if utilization is None and model_flops_utilization(record, device) is not None:
        return (
            f"not known, as a trial was faster than the {format_rate(rate, 'FLOP')} at which "
            f"{kind} products were measured when the study began; something else used the device"
        )
    if utilization is None:
        return ""
    text = (
        f"{format_percent(utilization)} % of the {format_rate(rate, 'FLOP')} that {kind} products "
        "reach on this device"
    )
    if record.recomputed_flops_per_token and record.model_flops_per_token:
        again = record.recomputed_flops_per_token / record.model_flops_per_token
        text += f", {format_percent(utilization * again)} % more to recompute"
    return text


_MOST_PEAKS = 4
"""Of more different peaks than this, only the largest and the smallest are named."""


def _ranges(numbers: Sequence[int]) -> str:
    """Returns ascending numbers with neighbours joined: `rank 3`, or `ranks 0-2, 5`."""
    runs: list[tuple[int, int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number - 1:
            runs[-1] = (runs[-1][0], number)
        else:
            runs.append((number, number))
    text = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
    return f"rank {text}" if len(numbers) == 1 else f"ranks {text}"


def full_hover(record: TrialRecord, baseline: TrialRecord | None) -> str:
    """Returns the configuration and all measurements, as HTML lines.

    A label that is higher than the figure is not shown. So techniques that few trials use are left
    out of the others' labels.
    """
    lines = [f"<b>#{record.number} {style.wrapped(record.name or '', width=_LINE, lines=6)}</b>"]
    plain = TrainingConfig()
    lines += [
        f"{field.replace('_', ' ')}: {value}"
        for field, value in record.config.to_dict().items()
        if not TECHNIQUES[field].is_added_later or value != getattr(plain, field)
    ]
    lines += _measured(record)
    saved = savings(record, baseline)
    if saved:
        lines.append(style.wrapped(saved, width=_LINE))
    return "<br>".join(lines)


def short_hover(record: TrialRecord) -> str:
    """Returns number, configuration and measurements, for figures with thousands of marks."""
    return "<br>".join(
        [
            f"<b>#{record.number}</b> {style.wrapped(trial_label(record), width=_LINE, lines=6)}",
            *_measured(record),
        ]
    )


_LINE = 42
"""Characters per line; a phone has no room for more."""


def _measured(record: TrialRecord) -> list[str]:
    lines = []
    if record.peak_memory_bytes is not None:
        lines.append(
            f"peak memory: {format_size(record.peak_memory_bytes)}, in {record.peak_phase}"
        )
    if record.peak_memory_bytes_by_rank:
        by_rank = peaks_text(record.peak_memory_bytes_by_rank)
        lines.append(style.wrapped(f"peak memory {by_rank}", width=_LINE))
    if record.device_bytes is not None and record.device_bytes != record.peak_memory_bytes:
        lines.append(f"on the device: {format_size(record.device_bytes)}")
    if record.tokens_per_second is not None:
        lines.append(
            f"{record.terms.speed}: "
            f"{format_speed(record.tokens_per_second, record.tokens_per_second_spread)}"
        )
    if utilization := format_utilization(record):
        lines.append(f"model FLOPs utilization: {utilization}")
    if communication := communication_text(record):
        lines.append(style.wrapped(f"in collectives: {communication}", width=_LINE))
    if record.perplexity is not None:
        source = record.perplexity_source
        quality = record.terms.with_spread(record.perplexity, record.perplexity_spread, digits=3)
        line = f"{record.terms.quality}: {quality}"
        lines.append(f"{line} ({style.escaped(str(source))})" if source else line)
    if record.compile_seconds is not None:
        lines.append(f"compiled in {record.compile_seconds:.1f} s")
    if left := left_in_16_bits(record.unquantized_share):
        lines.append(style.wrapped(left, width=_LINE, lines=6))
    if record.reused_from:
        lines.append(style.wrapped(f"measured as {record.reused_from}", width=_LINE, lines=6))
    if record.outcome != "ok":
        outcome = outcome_label(record)
        if record.message:
            outcome += f": {record.message}"
        lines.append(style.wrapped(outcome, width=_LINE, lines=6))
    return lines
