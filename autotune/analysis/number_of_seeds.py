"""Perplexities of one number of seeds, where a study has several.

Another seed moves the perplexity of every class by more than classes differ (see
`confirmed_perplexity.py`), so that a perplexity of one seed and a mean of three do not compare. A
study that was continued with another `--seeds`, which earlier releases allowed, has both. Those of
the number that the first trial was trained with count. A trial of another number takes the
perplexity of one that has that number and trains the same; where there is none, its own counts for
nothing, and it is no solution.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from autotune.spec.provenance import MEASURED
from autotune.spec.result import VARIANT_NUMBER, TrialRecord


def number_of_seeds(records: Sequence[TrialRecord]) -> int | None:
    """Returns with how many seeds the first trial with an own perplexity was trained, if any."""
    measured = sorted(filter(_has_own, records), key=lambda record: record.number)
    return _trained_seeds(measured[0]) if measured else None


def with_one_number_of_seeds(records: Sequence[TrialRecord]) -> list[TrialRecord]:
    """Returns the records with perplexities of one number of seeds only, in their order."""
    by_number = {record.number: record for record in records}
    trained = number_of_seeds(records)
    alike = [one for one in records if _has_own(one) and _trained_seeds(one) == trained]
    # Some of them may have failed, in every trial the same ones.
    counts = Counter(_seeds(record, by_number) for record in alike)
    wanted = max(counts, key=counts.__getitem__, default=None)
    representatives = [
        record
        for record in alike
        if record.parity == "same" and _seeds(record, by_number) == wanted
    ]
    compared = []
    for record in records:
        if record.perplexity is None or _seeds(record, by_number) in (None, wanted):
            compared.append(record)
            continue
        same = next((one for one in representatives if _train_the_same(one, record)), None)
        if same is None:
            source = replace(record.perplexity_source or MEASURED, of_other_seeds=True)
            compared.append(replace(record, feasible=False, perplexity_source=source))
        else:
            compared.append(record.with_perplexity_of(same))
    return compared


def _has_own(record: TrialRecord) -> bool:
    """Returns whether the trial measured a perplexity itself; a variant of the pick is no trial."""
    is_trial = record.number != VARIANT_NUMBER
    return is_trial and record.perplexity is not None and not record.shares_perplexity


def _trained_seeds(record: TrialRecord) -> int:
    source = record.perplexity_source or MEASURED
    return source.seeds + len(source.failed_seeds)


def _seeds(record: TrialRecord, by_number: dict[int, TrialRecord]) -> int | None:
    """Returns of how many seeds the perplexity is the mean; None: another study measured it."""
    source = record.perplexity_source
    if source is not None and source.is_shared:
        assert source.trial is not None
        measured = None if source.trial.study is not None else by_number.get(source.trial.number)
        source = None if measured is None else measured.perplexity_source
    return None if source is None or source.is_shared else source.seeds


def _train_the_same(record: TrialRecord, other: TrialRecord) -> bool:
    """Returns whether both are known to be one training.

    The loss of a user's model may depend on the micro batch.
    """
    return (
        other.parity == "same"
        and record.config.numerics_class == other.config.numerics_class
        and record.config.micro_batch_size == other.config.micro_batch_size
    )
