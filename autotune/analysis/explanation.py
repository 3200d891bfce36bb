"""Explains a predicted peak: what other choices would save and cost, and what cannot help and why.

Pure functions over predictions and records, which return sentences that a person can act on. Which
configurations are predicted is decided in `autotune/study/explain/explain.py`.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from autotune.analysis.confirmed_speed import on_one_scale
from autotune.analysis.peak import listed, peak_sentences
from autotune.analysis.reasons import why_nothing
from autotune.analysis.tolerance import DEFAULT_PERPLEXITY_TOLERANCE, DEFAULT_SPEED_TOLERANCE
from autotune.analysis.variants import Explained, Pair, Variant, named
from autotune.printable import printable
from autotune.spec.config import FIELD_ORDER, FULL_PRECISIONS, TrainingConfig
from autotune.spec.prediction import Prediction
from autotune.spec.result import TrialRecord
from autotune.spec.terms import Terms
from autotune.units import format_size


@dataclass(frozen=True, kw_only=True)
class Alternative:
    """A configuration with one technique changed; `saved_bytes` is negative if it needs more."""

    technique: str
    value: Any
    config: TrainingConfig
    predicted_peak_memory_bytes: int
    saved_bytes: int
    predicted_speed_ratio: float | None
    """Its predicted speed over that of the configuration; None where the device's rates are not
    known."""
    changes_numbers: bool
    """Whether it computes other numbers, so that the perplexity may differ."""
    cost: str
    """The cost as measured in the study; empty if it was not measured."""
    sentence: str


@dataclass(frozen=True, kw_only=True)
class InUse:
    """A technique of the configuration, and what it saves; negative if it costs memory."""

    technique: str
    value: Any
    predicted_peak_memory_bytes_without: int
    saved_bytes: int
    sentence: str


@dataclass(frozen=True, kw_only=True)
class Remark:
    """A technique that cannot help or is not possible, and why."""

    technique: str
    sentence: str


@dataclass(frozen=True, kw_only=True)
class PairSaving:
    """What a technique that saves nothing alone saves in addition to `partner_technique`."""

    technique: str
    value: Any
    partner_technique: str
    partner_value: Any
    config: TrainingConfig
    predicted_peak_memory_bytes: int
    saved_bytes: int
    sizes: str
    """`7.39 GiB for 12.53 GiB`: the peak of both together, and of the partner alone."""
    sentence: str


SIZES_NOTE = "All sizes are predicted, except where a line says measured."


@dataclass(frozen=True, kw_only=True, repr=False)
class Explanation:
    """The whole explanation; all numbers are predicted unless marked as measured."""

    config: TrainingConfig
    prediction: Prediction
    peak: tuple[str, ...]
    in_use: tuple[InUse, ...]
    alternatives: tuple[Alternative, ...]
    """Changes that save something by themselves, the largest saving first."""
    no_help: tuple[Remark, ...]
    pairs: tuple[PairSaving, ...]
    others: tuple[Alternative, ...] = field(default=())
    """Changes that were predicted and save nothing."""

    def sections(self) -> Iterator[tuple[str, list[str]]]:
        """Yield a title and its lines for each part that has any."""
        for title, lines in (
            ("Where the peak is", [f"{line[:1].upper()}{line[1:]}" for line in self.peak]),
            ("In use", [remark.sentence for remark in self.in_use]),
            ("What would save memory", [change.sentence for change in self.alternatives]),
            ("What would not", [remark.sentence for remark in self.no_help]),
        ):
            if lines:
                yield title, lines

    def __str__(self) -> str:
        """Returns the explanation as the text that `autotune explain` prints."""
        lines = [self.config.describe()]
        for title, of_section in self.sections():
            lines += ["", title, *(f"  {line}" for line in of_section)]
        lines += ["", SIZES_NOTE, *(f"Note: {note}." for note in self.prediction.notes)]
        return printable("\n".join(lines), keep_lines=True)

    def __repr__(self) -> str:
        """Returns the text, which Python and notebooks show, instead of the fields."""
        return str(self)

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def explain(
    explained: Explained,
    variants: Sequence[Variant],
    pairs: Sequence[Pair],
    *,
    impossible: Mapping[str, str],
) -> Explanation:
    """Returns the explanation.

    `impossible` is {technique: why none of its values is possible}.
    """
    predicted = [variant for variant in variants if variant.prediction is not None]
    alternatives = [_alternative(explained, v) for v in predicted if not v.is_removal]
    alternatives.sort(key=lambda alternative: -alternative.saved_bytes)
    savings = [saving for pair in pairs if (saving := _pair_saving(pair)) is not None]
    return Explanation(
        config=explained.config,
        prediction=dataclasses.replace(explained.prediction, timeline=None),
        peak=peak_sentences(
            explained.prediction,
            explained.config,
            sequences_per_step=explained.sequences_per_step,
            measured_bytes=None if explained.record is None else explained.record.peak_memory_bytes,
        ),
        in_use=tuple(_in_use(explained, v, pairs) for v in predicted if v.is_removal),
        alternatives=tuple(
            alternative
            for alternative in alternatives
            if explained.is_notable(alternative.saved_bytes)
        ),
        no_help=tuple(_no_help(explained, variants, pairs, impossible=impossible)),
        pairs=tuple(saving for saving in savings if explained.is_notable(saving.saved_bytes)),
        others=tuple(
            alternative
            for alternative in alternatives
            if not explained.is_notable(alternative.saved_bytes)
        ),
    )


# -- one technique changed -------------------------------------------------------------------------


def _alternative(explained: Explained, variant: Variant) -> Alternative:
    assert variant.prediction is not None
    saved = explained.saved_by(variant)
    peak = variant.prediction.peak_memory_bytes
    changes_numbers = explained.trains_other_numbers(variant)
    cost = _cost(explained, variant.config)
    less = "less" if saved >= 0 else "more"
    sentence = f"{variant.name}: {format_size(abs(saved))} {less}, {format_size(peak)}"
    if changes_numbers:
        sentence += "; it trains other numbers"
    ratio = _speed_ratio(explained, variant)
    if ratio is not None and not cost:
        sentence += f"; predicted {_difference_of_speed(ratio, 1.0)}"
    measured = cost or _not_measured(explained, variant.config)
    if measured:
        sentence += f"; {measured}"
    return Alternative(
        technique=variant.technique,
        value=variant.value,
        config=variant.config,
        predicted_peak_memory_bytes=peak,
        saved_bytes=saved,
        predicted_speed_ratio=ratio,
        changes_numbers=changes_numbers,
        cost=cost,
        sentence=sentence,
    )


def _speed_ratio(explained: Explained, variant: Variant) -> float | None:
    """Returns the predicted speed of a variant, relative to that of the configuration.

    None on a CPU where one is in 16 bit: predictions there are too high (`expected_step.py`).
    """
    is_full = [config.precision in FULL_PRECISIONS for config in (explained.config, variant.config)]
    if explained.prediction.device == "cpu" and is_full[0] != is_full[1]:
        return None
    own = explained.prediction.predicted_tokens_per_second
    assert variant.prediction is not None
    other = variant.prediction.predicted_tokens_per_second
    return None if own is None or other is None else other / own


def _in_use(explained: Explained, without: Variant, pairs: Sequence[Pair]) -> InUse:
    assert without.prediction is not None
    saved = explained.saved_by(without)
    value = getattr(explained.config, without.technique)
    name = named(without.technique, value)
    memory_budget = explained.config.memory_budget
    if without.technique == "compile" and memory_budget != without.config.memory_budget:
        name += f" with its {named('memory_budget', memory_budget)}"
    peak = format_size(without.prediction.peak_memory_bytes)
    cost = _cost(explained, without.config)
    if explained.is_notable(saved):
        sentence = f"{name} saves {format_size(saved)}: without it the peak would be {peak}"
    elif explained.is_notable(-saved):
        sentence = f"{name} costs {format_size(-saved)}: without it the peak would be {peak}"
    else:
        reason = _reason(explained, without)
        together = _together(explained, without.technique, pairs)
        sentence = f"{name} {_how_little(saved)}: {reason}{together}"
    return InUse(
        technique=without.technique,
        value=value,
        predicted_peak_memory_bytes_without=without.prediction.peak_memory_bytes,
        saved_bytes=saved,
        sentence=sentence + (f"; without it, {cost}" if cost else ""),
    )


def _trial_of(explained: Explained, config: TrainingConfig) -> TrialRecord | None:
    """Returns the study's trial of `config`, a measured one if there are several."""
    found = [record for record in explained.records if record.config == config]
    found = [record for record in found if record.is_finished]
    return max(found, key=lambda record: record.tokens_per_second is not None, default=None)


def _cost(explained: Explained, config: TrainingConfig) -> str:
    """Returns `measured in #7: 12.53 GiB, 760 tokens/s (24 % slower), the same perplexity`.

    Empty if `config` was not measured.
    """
    other = _trial_of(explained, config)
    if other is None or other.outcome not in ("ok", "dominated"):
        return ""
    trial = explained.record
    if trial is not None:
        trial, other = on_one_scale(trial, other)
    if not other.tokens_per_second:
        return ""
    parts = []
    if other.peak_memory_bytes is not None:
        parts.append(format_size(other.peak_memory_bytes))
    speed = f"{other.tokens_per_second:,.0f} {other.terms.speed}"
    if trial is not None and trial.tokens_per_second:
        speed += f" ({_difference_of_speed(other.tokens_per_second, trial.tokens_per_second)})"
    parts.append(speed)
    if other.perplexity and not other.perplexity_says_nothing:
        parts.append(_difference_of_perplexity(other.perplexity, trial, terms=other.terms))
    return f"measured in #{other.number}: {', '.join(parts)}"


def _difference_of_perplexity(perplexity: float, trial: TrialRecord | None, *, terms: Terms) -> str:
    """Returns the difference to that of `trial`, or the perplexity itself where it has none."""
    if trial is None or not trial.perplexity or trial.perplexity_says_nothing:
        return f"{terms.quality} {terms.text(perplexity)}"
    change = perplexity / trial.perplexity - 1
    if abs(change) <= DEFAULT_PERPLEXITY_TOLERANCE:
        return f"the same {terms.quality}"
    return (
        terms.change(1 + change) if terms.quality == "loss" else f"perplexity {100 * change:+.1f} %"
    )


def _difference_of_speed(speed: float, other_speed: float) -> str:
    change = speed / other_speed - 1
    if abs(change) <= DEFAULT_SPEED_TOLERANCE:
        return "the same speed"
    return f"{100 * abs(change):.0f} % {'faster' if change > 0 else 'slower'}"


def _not_measured(explained: Explained, config: TrainingConfig) -> str:
    """Returns why the study has no speed of `config`; empty without a study."""
    if not explained.records:
        return ""
    trial = _trial_of(explained, config)
    if trial is None:
        return "not measured in this study"
    if trial.outcome == "predicted_over_cap":
        return f"not trained in #{trial.number}: predicted over the cap"
    outcome = trial.outcome.replace("_", " ").replace("over cap", "over the cap")
    return f"tried in #{trial.number}: {outcome}"


# -- what cannot help ------------------------------------------------------------------------------


def _no_help(
    explained: Explained,
    variants: Sequence[Variant],
    pairs: Sequence[Pair],
    *,
    impossible: Mapping[str, str],
) -> Iterator[Remark]:
    """Yield a remark for each technique that cannot help, and for each change not predicted."""
    for technique in FIELD_ORDER:
        changes = [v for v in variants if v.technique == technique and not v.is_removal]
        predicted = [v for v in changes if v.prediction is not None]
        sentence = ""
        if technique in impossible:
            subject = ""
            for pair in pairs:
                if pair.technique == technique:
                    subject = named(pair.technique, pair.value)
                    break
            together = _together(explained, technique, pairs, subject=subject)
            sentence = f"{impossible[technique]}{together}"
        elif predicted and not any(explained.is_notable(explained.saved_by(v)) for v in predicted):
            in_use = any(v.technique == technique and v.is_removal for v in variants)
            differs = any(explained.is_notable(abs(explained.saved_by(v))) for v in predicted)
            if not in_use:
                sentence = _saves_nothing(explained, predicted, pairs)
            elif differs:
                sentence = _no_better(explained, predicted)
        if sentence:
            yield Remark(technique=technique, sentence=sentence)
        for variant in changes:
            if variant.prediction is None:
                failed = f"{variant.name} could not be predicted: {variant.error}"
                yield Remark(technique=technique, sentence=failed)


def _saves_nothing(explained: Explained, variants: Sequence[Variant], pairs: Sequence[Pair]) -> str:
    best = max(reversed(variants), key=explained.saved_by)
    others = [variant for variant in variants if variant is not best]
    more = [variant for variant in others if explained.is_notable(-explained.saved_by(variant))]
    neither = [str(variant.value) for variant in others if variant not in more]
    if explained.is_notable(-explained.saved_by(best)):
        verdict = f"would need {format_size(-explained.saved_by(best))} more"
    else:
        verdict = _how_little(explained.saved_by(best))
        if neither:
            verdict += f", nor do {listed(*neither)}"
    together = _together(explained, best.technique, pairs)
    sentence = f"{best.name} {verdict}: {_reason(explained, best)}{together}"
    if more:
        sentence += f"; {_what_they_need(explained, more)}"
    return sentence


def _how_little(saved_bytes: int) -> str:
    """Returns the verdict on a technique whose saving is not notable."""
    if saved_bytes <= 0:
        return "saves nothing here"
    return f"saves only {format_size(saved_bytes)} here"


def _no_better(explained: Explained, variants: Sequence[Variant]) -> str:
    technique = variants[0].technique
    in_use = named(technique, getattr(explained.config, technique))
    return (
        f"no other value tried needs less than {in_use}, in use: "
        f"{_what_they_need(explained, variants)}"
    )


def _what_they_need(explained: Explained, variants: Sequence[Variant]) -> str:
    """Returns `1.21 GiB more with block and as much with every-2`."""
    parts = []
    for variant in variants:
        more = -explained.saved_by(variant)
        size = f"{format_size(more)} more" if explained.is_notable(more) else "as much"
        parts.append(f"{size} with {variant.value}")
    return listed(*parts)


def _reason(explained: Explained, variant: Variant) -> str:
    """Returns why a technique saves nothing, from what holds the bytes at the peak without it."""
    assert variant.prediction is not None
    with_it = (variant.config, variant.prediction)
    without_it = (explained.config, explained.prediction)
    if variant.is_removal:
        with_it, without_it = without_it, with_it
    config, prediction = without_it
    config_with_it, prediction_with_it = with_it
    return why_nothing(
        variant.technique,
        getattr(config_with_it, variant.technique),
        config=config,
        prediction=prediction,
        prediction_with_it=prediction_with_it,
        sequences_per_step=explained.sequences_per_step,
    )


# -- pairs -----------------------------------------------------------------------------------------


def _together(
    explained: Explained, technique: str, pairs: Sequence[Pair], *, subject: str = "it"
) -> str:
    """Returns `; with checkpointing block it would save 5.15 GiB more (7.39 GiB for 12.53 GiB)`."""
    text = ""
    for pair in pairs:
        saving = _pair_saving(pair)
        if pair.technique != technique or saving is None:
            continue
        if explained.is_notable(saving.saved_bytes):
            size = format_size(saving.saved_bytes)
            effect = f"{subject} would save {size} more ({saving.sizes})"
        elif subject == "it":
            effect = f"{subject} would not either ({saving.sizes})"
        else:
            effect = f"{subject} saves nothing"
        text += f"; with {named(saving.partner_technique, saving.partner_value)} {effect}"
    return text


def _pair_saving(pair: Pair) -> PairSaving | None:
    if pair.alone_peak_bytes is None or pair.together_peak_bytes is None:
        return None
    saved = pair.alone_peak_bytes - pair.together_peak_bytes
    name = named(pair.technique, pair.value)
    sizes = f"{format_size(pair.together_peak_bytes)} for {format_size(pair.alone_peak_bytes)}"
    return PairSaving(
        technique=pair.technique,
        value=pair.value,
        partner_technique=pair.partner.technique,
        partner_value=pair.partner.value,
        config=pair.together,
        predicted_peak_memory_bytes=pair.together_peak_bytes,
        saved_bytes=saved,
        sizes=sizes,
        sentence=f"with {pair.partner.name}, {name} saves {format_size(saved)} more: {sizes}",
    )
