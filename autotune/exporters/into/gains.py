"""What each of a trial's choices brings, in a few words, by what the study has measured."""

from collections.abc import Mapping, Sequence

from autotune.analysis.ablation import Effect, ablation_steps
from autotune.analysis.confirmed_speed import on_one_scale
from autotune.analysis.variants import named
from autotune.spec.config import TrainingConfig
from autotune.spec.result import StudyResult, TrialRecord
from autotune.units import format_percent, format_size


def gain_of_all(result: StudyResult, record: TrialRecord, before: TrainingConfig) -> str | None:
    """Returns speed and peak of a trial beside those of another configuration.

    None if the study has not measured that, or it is the trial's own.
    """
    other = next((one for one in result.trials if one.config == before), None)
    if other is None or other.config == record.config:
        return None
    parts = []
    record, other = on_one_scale(record, other)
    if record.tokens_per_second and other.tokens_per_second:
        ratio = record.tokens_per_second / other.tokens_per_second
        parts.append(f"{ratio:.2f} times as fast as #{other.number}, the file as it is")
    if record.peak_memory_bytes and other.peak_memory_bytes:
        sizes = format_size(record.peak_memory_bytes), format_size(other.peak_memory_bytes)
        parts.append(f"a peak of {sizes[0]} instead of {sizes[1]}")
    return ", ".join(parts) or None


def gains(
    result: StudyResult,
    record: TrialRecord,
    *,
    before: TrainingConfig,
    techniques: Sequence[str],
) -> Mapping[str, str]:
    """Returns {technique: what the trial gains by it, or why that is not known}.

    The trial is compared with itself without the technique, as the study has measured or predicted
    it.
    """
    steps = ablation_steps(
        (*result.trials, *result.variants),
        plain=before,
        pick=record,
        predicted_peak=lambda config: None,
        at=result.workload.legality_context,
    )
    known = {
        step.technique: step.on_top
        for step in steps
        if step.value == getattr(record.config, step.technique)
    }
    return {
        technique: _words(known.get(technique, "not tried"), by=_name(before, technique))
        for technique in techniques
    }


_NOT_KNOWN = {
    "not tried": "the trial was not measured without it",
    "not possible": "the trial is not possible without it",
    "failed": "the trial without it failed",
}


def _name(before: TrainingConfig, technique: str) -> str:
    return named(technique, getattr(before, technique))


def _words(effect: Effect | str, *, by: str) -> str:
    if isinstance(effect, str):
        return _NOT_KNOWN.get(effect, effect)
    parts = []
    if effect.saved_bytes is not None:
        amount = format_size(abs(effect.saved_bytes))
        kind = "less" if effect.saved_bytes >= 0 else "more"
        share = format_percent(abs(effect.saved_share or 0.0))
        source = ", predicted" if effect.is_predicted else ""
        parts.append(f"{amount} {kind} ({share} %{source})" if effect.saved_bytes else "same peak")
    if effect.speed_share is not None:
        share = format_percent(abs(effect.speed_share))
        parts.append(f"{share} % {'faster' if effect.speed_share >= 0 else 'slower'}")
    return f"{', '.join(parts)} than with {by}"
