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
which can be compared with classes that were trained once. Where no class of full precision was
measured, as in a short search on a GPU, the best of the classes that compete stands in for it.

Full precision takes up to eight times as long on a GPU. Until it was trained with the same seeds,
the spread of the class's own perplexities is the allowance, which is wider.
"""

import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from autotune.analysis.confirmed_speed import measured_alone
from autotune.spec.config import FULL_PRECISIONS, TrainingConfig
from autotune.spec.confirmation import Confirmation, SeedPerplexity
from autotune.spec.provenance import PerplexitySource
from autotune.spec.result import VARIANT_NUMBER, TrialRecord, bits_per_byte_at, terms_of


def with_seed_perplexities(
    records: Sequence[TrialRecord], confirmations: Sequence[Confirmation]
) -> list[TrialRecord]:
    """Returns the records with the perplexity of their class over several seeds, and its spread.

    It applies to the trial that was trained with further seeds and to all that share its
    perplexity. Only seeds count with which the class of full precision was trained, too.
    """
    by_config: dict[TrainingConfig, dict[int, float]] = defaultdict(dict)
    for one in confirmations:
        if isinstance(one, SeedPerplexity) and one.perplexity is not None:
            by_config[one.config][one.seed] = one.perplexity
    trained = [record for record in records if record.config in by_config and _has_own(record)]
    reference = _reference(trained)
    if any(_is_full(record) for record in records) and not (reference and _is_full(reference)):
        reference = None  # full precision was measured, but not with further seeds yet
    repeated = {
        record.number: _over_seeds(record, reference, trained=trained, by_config=by_config)
        for record in trained
        if not _is_full(record)
    }
    result = []
    for record in records:
        source = record.perplexity_source
        measured_in = _number_of_representative(record)
        known = None if measured_in is None else repeated.get(measured_in)
        if known is None or record.perplexity is None:
            result.append(record)
            continue
        if measured_in == record.number and known.seeds > 1:
            source = PerplexitySource(
                kind="measured",
                seeds=known.seeds,
                over_random_weights=record.perplexity_says_nothing,
                of_own_loss=record.perplexity_is_of_own_loss,
            )
        result.append(
            replace(
                record,
                perplexity=known.mean,
                perplexity_spread=known.spread,
                perplexity_source=source,
                bits_per_byte=bits_per_byte_at(known.mean, record),
            )
        )
    return result


@dataclass(frozen=True)
class _OverSeeds:
    """A perplexity over so many seeds; of one, it is that of the study's own seed."""

    mean: float
    spread: float
    seeds: int


def _over_seeds(
    record: TrialRecord,
    reference: TrialRecord | None,
    *,
    trained: Sequence[TrialRecord],
    by_config: Mapping[TrainingConfig, Mapping[int, float]],
) -> _OverSeeds:
    """Returns the perplexity of a class that was trained with further seeds."""
    assert record.perplexity is not None
    own_spread = record.perplexity_spread or 0.0
    of_record = by_config[record.config]
    if record is reference and len(trained) > 1:
        return _OverSeeds(record.perplexity, own_spread, 1 + len(of_record))
    differences = []
    if reference is not None and record is not reference:
        assert reference.perplexity is not None
        of_reference = by_config[reference.config]
        shared = of_record.keys() & of_reference.keys()
        differences = [math.log(of_record[seed] / of_reference[seed]) for seed in sorted(shared)]
    if not differences:
        alone = [0.0, *(math.log(one / record.perplexity) for one in of_record.values())]
        spread = record.perplexity * statistics.stdev(alone)
        return _OverSeeds(record.perplexity, max(spread, own_spread), 1)
    assert reference is not None
    assert reference.perplexity is not None
    differences.insert(0, math.log(record.perplexity / reference.perplexity))
    mean = reference.perplexity * math.exp(statistics.fmean(differences))
    spread = mean * statistics.stdev(differences)
    return _OverSeeds(mean, max(spread, own_spread), len(differences))


def classes_to_repeat(
    records: Sequence[TrialRecord], *, contenders: Sequence[int]
) -> list[TrialRecord]:
    """Returns the representatives that should be trained with further seeds, the reference first.

    The reference is that of the fastest feasible trial of full precision. A class in 16 bit is
    compared with it where one of its trials is among the `contenders`: the numbers of the trials
    that nothing but their perplexity may keep from being the pick (`pick.contenders`). Without a
    trial of full precision these are compared with the best of them.
    """
    counting = [record for record in records if not record.perplexity_says_nothing]
    competing: list[TrialRecord] = []
    for record in counting:
        if record.number not in contenders or _is_full(record):
            continue
        representative = _representative(record, records)
        if representative is not None and representative not in competing:
            competing.append(representative)
    full = [record for record in counting if record.feasible and _is_full(record)]
    if full:
        fastest = max(full, key=lambda record: measured_alone(record).tokens_per_second or 0.0)
        reference = _representative(fastest, records)
    else:
        reference = _reference([record for record in competing if _has_own(record)])
    if reference is None:
        return []
    others = [record for record in competing if record is not reference]
    return [reference, *others] if others else []


def rounding_warning(records: Sequence[TrialRecord], *, contenders: Sequence[int]) -> str:
    """Returns that rounding may have decided between classes; empty if it cannot have, or did not.

    It did not where each class of the `contenders` was trained with several seeds.
    """
    compared = classes_to_repeat(records, contenders=contenders)
    once = sorted(
        {
            record.config.precision
            for record in compared
            if not _is_full(record) and record.perplexity_spread is None
        }
    )
    if not once:
        return ""
    terms = terms_of(records)
    if not _is_full(compared[0]):
        return terms.worded(
            f"perplexities ({', '.join(once)}) are of one seed, and may differ by rounding alone: "
            "use --seeds 3, or autotune confirm"
        )
    return terms.worded(
        f"the perplexity of {' and '.join(once)} is of one seed, and may differ from that of fp32 "
        "by rounding alone: use --seeds 3, or autotune confirm"
    )


def _reference(trained: Sequence[TrialRecord]) -> TrialRecord | None:
    """Returns what the others are compared with: full precision, else the best perplexity."""
    full = next((record for record in trained if _is_full(record)), None)
    if full is not None:
        return full
    return min(trained, key=lambda record: record.perplexity or math.inf, default=None)


def _has_own(record: TrialRecord) -> bool:
    """Returns whether the trial measured a perplexity itself; a variant of the pick is no trial."""
    source = record.perplexity_source
    counts = record.number != VARIANT_NUMBER and not (source is not None and source.of_other_seeds)
    return counts and record.perplexity is not None and not record.shares_perplexity


def _is_full(record: TrialRecord) -> bool:
    return record.config.precision in FULL_PRECISIONS


def _number_of_representative(record: TrialRecord) -> int | None:
    """Returns in which trial of this study the perplexity was measured; None: in another study."""
    source = record.perplexity_source
    if source is None or not source.is_shared:
        return record.number
    if source.trial is None or source.trial.study is not None:
        return None
    return source.trial.number


def _representative(record: TrialRecord, records: Sequence[TrialRecord]) -> TrialRecord | None:
    """Returns the trial in which the perplexity of `record` was measured; None if elsewhere."""
    number = _number_of_representative(record)
    return next((one for one in records if one.number == number), None)
