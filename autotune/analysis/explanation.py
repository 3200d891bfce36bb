"""What other choices would save at a predicted peak and cost, what cannot help and why: sentences a person can act on.

Pure functions over predictions and records; which ones are predicted is decided in
`autotune/study/explain/explain.py`.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from autotune.analysis.front import DEFAULT_PERPLEXITY_TOLERANCE, DEFAULT_SPEED_TOLERANCE
from autotune.analysis.peak import listed, peak_sentences
from autotune.analysis.reasons import why_nothing
from autotune.analysis.variants import Explained, Pair, Variant, named
from autotune.spec.config import FIELD_ORDER, TrainingConfig
from autotune.spec.prediction import Prediction
from autotune.units import format_size


@dataclass(frozen=True, kw_only=True)
class Alternative:
    """One technique changed. `saved_bytes` is negative where it needs more."""

    technique: str
    value: Any
    config: TrainingConfig
    predicted_peak_memory_bytes: int
    saved_bytes: int
    changes_numbers: bool
    """Other numbers are trained, so the perplexity may differ."""
    cost: str
    """As measured in the study; empty where nothing was measured."""
    sentence: str


@dataclass(frozen=True, kw_only=True)
class InUse:
    """A technique of the configuration, and what it saves; negative where it costs memory."""

    technique: str
    value: Any
    predicted_peak_memory_bytes_without: int
    saved_bytes: int
    sentence: str


@dataclass(frozen=True, kw_only=True)
class Remark:
    """What cannot help, or is not possible, and why."""

    technique: str
    sentence: str


@dataclass(frozen=True, kw_only=True)
class PairSaving:
    """What a technique that saves nothing by itself saves beside `partner_technique`, beyond what that one saves."""

    technique: str
    value: Any
    partner_technique: str
    partner_value: Any
    config: TrainingConfig
    predicted_peak_memory_bytes: int
    saved_bytes: int
    sizes: str
    """The peak of both for that of the partner alone."""
    sentence: str


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """Everything in it is predicted, apart from what is said to be measured."""

    config: TrainingConfig
    prediction: Prediction
    peak: tuple[str, ...]
    in_use: tuple[InUse, ...]
    alternatives: tuple[Alternative, ...]
    """What saves something by itself, most first."""
    no_help: tuple[Remark, ...]
    pairs: tuple[PairSaving, ...]
    others: tuple[Alternative, ...] = field(default=())
    """What was predicted and saves nothing."""

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def explain(
    explained: Explained,
    variants: Sequence[Variant],
    pairs: Sequence[Pair],
    *,
    impossible: Mapping[str, str],
) -> Explanation:
    """`impossible`: {technique: why none of its values can be had}."""
    predicted = [variant for variant in variants if variant.prediction is not None]
    alternatives = sorted(
        (_alternative(explained, v) for v in predicted if not v.is_removal),
        key=lambda one: -one.saved_bytes,
    )
    savings = [_pair_saving(pair) for pair in pairs]
    return Explanation(
        config=explained.config,
        prediction=dataclasses.replace(explained.prediction, timeline=None),
        peak=peak_sentences(
            explained.prediction,
            explained.config,
            global_batch=explained.at.global_batch,
            measured_bytes=None if explained.record is None else explained.record.peak_memory_bytes,
        ),
        in_use=tuple(_in_use(explained, v, pairs) for v in predicted if v.is_removal),
        alternatives=tuple(
            one for one in alternatives if explained.is_worth_a_word(one.saved_bytes)
        ),
        no_help=tuple(_no_help(explained, variants, pairs, impossible=impossible)),
        pairs=tuple(
            s for s in savings if s is not None and explained.is_worth_a_word(s.saved_bytes)
        ),
        others=tuple(one for one in alternatives if not explained.is_worth_a_word(one.saved_bytes)),
    )


# -- one technique changed -------------------------------------------------------------------------


def _alternative(explained: Explained, variant: Variant) -> Alternative:
    assert variant.prediction is not None
    saved, peak = explained.saved_by(variant), variant.prediction.peak_memory_bytes
    changes, cost = explained.trains_other_numbers(variant), _cost(explained, variant.config)
    less = "less" if saved >= 0 else "more"
    sentence = f"{variant.words}: {format_size(abs(saved))} {less}, {format_size(peak)}"
    sentence += "; it trains other numbers" if changes else ""
    sentence += f"; {cost}" if cost else ""
    return Alternative(
        technique=variant.technique,
        value=variant.value,
        config=variant.config,
        predicted_peak_memory_bytes=peak,
        saved_bytes=saved,
        changes_numbers=changes,
        cost=cost,
        sentence=sentence,
    )


def _in_use(explained: Explained, without: Variant, pairs: Sequence[Pair]) -> InUse:
    assert without.prediction is not None
    saved, value = explained.saved_by(without), getattr(explained.config, without.technique)
    words = named(without.technique, value)
    if (
        without.technique == "compile"
        and explained.config.memory_budget != without.config.memory_budget
    ):
        words += f" with its {named('memory_budget', explained.config.memory_budget)}"
    peak = format_size(without.prediction.peak_memory_bytes)
    cost = _cost(explained, without.config)
    if explained.is_worth_a_word(saved):
        sentence = f"{words} saves {format_size(saved)}: without it the peak would be {peak}"
    elif explained.is_worth_a_word(-saved):
        sentence = f"{words} costs {format_size(-saved)}: without it the peak would be {peak}"
    else:
        reason = _reason(explained, without)
        sentence = (
            f"{words} saves nothing here: {reason}{_together(explained, without.technique, pairs)}"
        )
    return InUse(
        technique=without.technique,
        value=value,
        predicted_peak_memory_bytes_without=without.prediction.peak_memory_bytes,
        saved_bytes=saved,
        sentence=sentence + (f"; without it, {cost}" if cost else ""),
    )


def _cost(explained: Explained, config: TrainingConfig) -> str:
    """`measured in #7: 12.53 GiB, 24 % slower, the same perplexity`; empty where `config` was not measured."""
    other = next((r for r in explained.records if r.config == config and r.outcome == "ok"), None)
    if other is None or not other.tokens_per_second or not other.perplexity:
        return ""
    trial = explained.record
    words = [] if other.peak_memory_bytes is None else [format_size(other.peak_memory_bytes)]
    if trial is None or not trial.tokens_per_second or not trial.perplexity:
        words += [f"{other.tokens_per_second:,.0f} tokens/s", f"perplexity {other.perplexity:.2f}"]
    else:
        speed = other.tokens_per_second / trial.tokens_per_second - 1
        pace = f"{100 * abs(speed):.0f} % {'faster' if speed > 0 else 'slower'}"
        words.append("the same speed" if abs(speed) <= DEFAULT_SPEED_TOLERANCE else pace)
        change = other.perplexity / trial.perplexity - 1
        same = abs(change) <= DEFAULT_PERPLEXITY_TOLERANCE
        words.append("the same perplexity" if same else f"perplexity {100 * change:+.1f} %")
    return f"measured in #{other.number}: {', '.join(words)}"


# -- what cannot help ------------------------------------------------------------------------------


def _no_help(
    explained: Explained,
    variants: Sequence[Variant],
    pairs: Sequence[Pair],
    *,
    impossible: Mapping[str, str],
) -> Iterator[Remark]:
    for technique in FIELD_ORDER:
        mine = [v for v in variants if v.technique == technique and not v.is_removal]
        predicted = [v for v in mine if v.prediction is not None]
        sentence = ""
        if technique in impossible:
            subject = next(
                (
                    named(pair.technique, pair.value)
                    for pair in pairs
                    if pair.technique == technique
                ),
                "",
            )
            sentence = (
                f"{impossible[technique]}{_together(explained, technique, pairs, subject=subject)}"
            )
        elif predicted and not any(
            explained.is_worth_a_word(explained.saved_by(v)) for v in predicted
        ):
            in_use = any(v.technique == technique and v.is_removal for v in variants)
            differs = any(explained.is_worth_a_word(abs(explained.saved_by(v))) for v in predicted)
            if not in_use:
                sentence = _saves_nothing(explained, predicted, pairs)
            elif differs:
                sentence = _no_better(explained, predicted)
        if sentence:
            yield Remark(technique=technique, sentence=sentence)
        for variant in mine:
            if variant.prediction is None:
                refused = f"{variant.words} could not be predicted: {variant.refusal}"
                yield Remark(technique=technique, sentence=refused)


def _saves_nothing(explained: Explained, variants: Sequence[Variant], pairs: Sequence[Pair]) -> str:
    best = max(reversed(variants), key=explained.saved_by)
    others = [variant for variant in variants if variant is not best]
    more = [
        variant for variant in others if explained.is_worth_a_word(-explained.saved_by(variant))
    ]
    neither = [str(variant.value) for variant in others if variant not in more]
    verdict = f"saves nothing here{f', nor do {listed(*neither)}' if neither else ''}"
    if explained.is_worth_a_word(-explained.saved_by(best)):
        verdict = f"would need {format_size(-explained.saved_by(best))} more"
    together = _together(explained, best.technique, pairs)
    also = f"; {_what_they_need(explained, more)}" if more else ""
    return f"{best.words} {verdict}: {_reason(explained, best)}{together}{also}"


def _no_better(explained: Explained, variants: Sequence[Variant]) -> str:
    technique = variants[0].technique
    words = named(technique, getattr(explained.config, technique))
    return f"no other value tried needs less than {words}, in use: {_what_they_need(explained, variants)}"


def _what_they_need(explained: Explained, variants: Sequence[Variant]) -> str:
    words = []
    for variant in variants:
        more = -explained.saved_by(variant)
        size = f"{format_size(more)} more" if explained.is_worth_a_word(more) else "as much"
        words.append(f"{size} with {variant.value}")
    return listed(*words)


def _reason(explained: Explained, variant: Variant) -> str:
    """Why a technique saves nothing, from who holds the bytes at the peak without it."""
    assert variant.prediction is not None
    with_it, without_it = (
        (variant.config, variant.prediction),
        (explained.config, explained.prediction),
    )
    if variant.is_removal:
        with_it, without_it = without_it, with_it
    return why_nothing(
        variant.technique,
        getattr(with_it[0], variant.technique),
        config=without_it[0],
        prediction=without_it[1],
        prediction_with_it=with_it[1],
        global_batch=explained.at.global_batch,
    )


# -- pairs -----------------------------------------------------------------------------------------


def _together(
    explained: Explained, technique: str, pairs: Sequence[Pair], *, subject: str = "it"
) -> str:
    """`; with checkpointing block it would save 5.15 GiB more (7.39 GiB for 12.53 GiB)`."""
    words = []
    for saving in (_pair_saving(pair) for pair in pairs if pair.technique == technique):
        if saving is not None:
            size = format_size(saving.saved_bytes)
            would = f"{subject} would save {size} more ({saving.sizes})"
            none = (
                f"{subject} would not either ({saving.sizes})"
                if subject == "it"
                else f"{subject} saves nothing"
            )
            partner = named(saving.partner_technique, saving.partner_value)
            words.append(
                f"; with {partner} {would if explained.is_worth_a_word(saving.saved_bytes) else none}"
            )
    return "".join(words)


def _pair_saving(pair: Pair) -> PairSaving | None:
    if pair.alone_peak_bytes is None or pair.together_peak_bytes is None:
        return None
    saved, words = (
        pair.alone_peak_bytes - pair.together_peak_bytes,
        named(pair.technique, pair.value),
    )
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
        sentence=f"with {pair.partner.words}, {words} saves {format_size(saved)} more: {sizes}",
    )
