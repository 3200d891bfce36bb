"""The records of a study with everything that was measured after their trials."""

import dataclasses
from collections.abc import Sequence

from autotune.analysis.confirmed_perplexity import with_seed_perplexities
from autotune.analysis.confirmed_speed import with_confirmed_speeds
from autotune.analysis.number_of_seeds import with_one_number_of_seeds
from autotune.spec.confirmation import Confirmation, VariantMeasurement
from autotune.spec.result import VARIANT_NUMBER, Measurement, TrialRecord

_MEASURED = tuple(field.name for field in dataclasses.fields(Measurement))


def confirmed_records(
    records: Sequence[TrialRecord], confirmations: Sequence[Confirmation]
) -> list[TrialRecord]:
    """Returns the records with confirmed speeds, and with perplexities that compare.

    Those are of one number of seeds, and then over all seeds that were trained later.
    """
    comparable = with_one_number_of_seeds(with_confirmed_speeds(records, confirmations))
    return with_seed_perplexities(comparable, confirmations)


def variant_records(confirmations: Sequence[Confirmation]) -> list[TrialRecord]:
    """Returns the pick without single techniques, for the ablation: they are not on the front."""
    return [
        TrialRecord(
            number=VARIANT_NUMBER,
            config=one.config,
            seconds=one.seconds,
            **{name: getattr(one.measurement, name) for name in _MEASURED},
        )
        for one in confirmations
        if isinstance(one, VariantMeasurement)
    ]
