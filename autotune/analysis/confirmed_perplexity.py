"""Perplexity over several seeds, where one training each could decide by chance.

In 16 bit, rounding alone moves the perplexity of a short training by more than the 1 % within which
a configuration may be picked: with one training each, a truly equal class is rejected in 37 to 57 %
of searches. So the representatives of the classes that compete are trained with further seeds, and
the spread over the seeds is part of the allowance.

Another seed means other initial weights and another order of the text, which moves the perplexity
of every class alike, and by more than rounding does: in a default search from 19.6 to 21.7. So what
is averaged is the difference to a class of full precision with the same seed,

    d = log(perplexity of the class with the seed / perplexity of full precision with the seed)

and the perplexity of the class is that of full precision with the study's seed times exp(mean(d)),
which can be compared with classes that were trained once.
"""

import math
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from autotune.analysis.confirmed_speed import measured_alone
from autotune.spec.config import FULL_PRECISIONS, TrainingConfig
from autotune.spec.confirmation import Confirmation, SeedPerplexity
from autotune.spec.provenance import PerplexitySource
from autotune.spec.result import VARIANT_NUMBER, TrialRecord, bits_per_byte_at


def with_seed_perplexities(
    records: Sequence[TrialRecord], confirmations: Sequence[Confirmation]
) -> list[TrialRecord]:
    """Return the records with the perplexity of their class over several seeds, and its spread.

    It applies to the trial that was trained with further seeds and to all that share its
    perplexity. Only seeds count with which the class of full precision was trained, too.
    """
    by_config: dict[TrainingConfig, dict[int, float]] = defaultdict(dict)
    for one in confirmations:
        if isinstance(one, SeedPerplexity) and one.perplexity is not None:
            by_config[one.config][one.seed] = one.perplexity
    trained = [record for record in records if record.config in by_config and _has_own(record)]
    reference = next((record for record in trained if _is_full(record)), None)
    repeated: dict[int, tuple[float, float, int]] = {}
    for record in trained:
        if reference is None or _is_full(record):
            continue
        differences = [_log_ratio(record.perplexity, reference.perplexity)]
        of_reference = by_config[reference.config]
        for seed, perplexity in by_config[record.config].items():
            if seed in of_reference:
                differences.append(_log_ratio(perplexity, of_reference[seed]))
        if len(differences) > 1:
            assert reference.perplexity is not None
            mean = reference.perplexity * math.exp(statistics.fmean(differences))
            spread = max(mean * statistics.stdev(differences), record.perplexity_spread or 0.0)
            repeated[record.number] = (mean, spread, len(differences))
    result = []
    for record in records:
        source = record.perplexity_source
        measured_in = _number_of_representative(record)
        known = None if measured_in is None else repeated.get(measured_in)
        if known is None or record.perplexity is None:
            result.append(record)
            continue
        mean, spread, seeds = known
        if measured_in == record.number:
            source = PerplexitySource(
                kind="measured",
                seeds=seeds,
                over_random_weights=record.perplexity_says_nothing,
                of_own_loss=record.perplexity_is_of_own_loss,
            )
        result.append(
            replace(
                record,
                perplexity=mean,
                perplexity_spread=spread,
                perplexity_source=source,
                bits_per_byte=bits_per_byte_at(mean, record),
            )
        )
    return result


def classes_to_repeat(
    records: Sequence[TrialRecord], *, contenders: Sequence[int]
) -> list[TrialRecord]:
    """Return the representatives that should be trained with further seeds, the reference first.

    The reference is that of the fastest feasible trial of full precision. A class in 16 bit is
    compared with it where one of its trials is among the `contenders`: the numbers of the trials
    that nothing but their perplexity may keep from being the pick (`pick.contenders`).
    """
    counting = [record for record in records if not record.perplexity_says_nothing]
    full = [record for record in counting if record.feasible and _is_full(record)]
    if not full:
        return []
    fastest = max(full, key=lambda record: measured_alone(record).tokens_per_second or 0.0)
    reference = _representative(fastest, records)
    if reference is None:
        return []
    found = [reference]
    for record in counting:
        if record.number not in contenders or _is_full(record):
            continue
        representative = _representative(record, records)
        if representative is not None and representative not in found:
            found.append(representative)
    return found if len(found) > 1 else []


def rounding_warning(records: Sequence[TrialRecord], *, contenders: Sequence[int]) -> str:
    """Return that rounding may have decided between classes; empty if it cannot have, or did not.

    It did not where each class of the `contenders` was trained with several seeds.
    """
    once = sorted(
        {
            record.config.precision
            for record in classes_to_repeat(records, contenders=contenders)
            if not _is_full(record) and record.perplexity_spread is None
        }
    )
    if not once:
        return ""
    return (
        f"the perplexity of {' and '.join(once)} is of one seed, and may differ from that of fp32 "
        "by rounding alone: use --seeds 3, or autotune confirm"
    )


def _log_ratio(perplexity: float | None, other: float | None) -> float:
    assert perplexity is not None
    assert other is not None
    return math.log(perplexity / other)


def _has_own(record: TrialRecord) -> bool:
    """Return whether the trial measured a perplexity itself; a variant of the pick is no trial."""
    source = record.perplexity_source
    counts = record.number != VARIANT_NUMBER and not (source is not None and source.of_other_seeds)
    return counts and record.perplexity is not None and not record.shares_perplexity


def _is_full(record: TrialRecord) -> bool:
    return record.config.precision in FULL_PRECISIONS


def _number_of_representative(record: TrialRecord) -> int | None:
    """Return in which trial of this study the perplexity was measured; None: in another study."""
    source = record.perplexity_source
    if source is None or not source.is_shared:
        return record.number
    if source.trial is None or source.trial.study is not None:
        return None
    return source.trial.number


def _representative(record: TrialRecord, records: Sequence[TrialRecord]) -> TrialRecord | None:
    """Return the trial in which the perplexity of `record` was measured; None if elsewhere."""
    number = _number_of_representative(record)
    return next((one for one in records if one.number == number), None)
