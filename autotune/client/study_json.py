"""Reads the JSON of a study, as `--json` and the server have it, into the result that Python has.

Unknown fields, which a later version may add, are left out. The JSON says in a sentence where a
perplexity or a result comes from.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from autotune.client.connection import reading_answer
from autotune.spec.config import TrainingConfig
from autotune.spec.provenance_sentences import with_facts
from autotune.spec.reading import parse
from autotune.spec.result import StudyResult, TrialRecord
from autotune.spec.study import check_study_name
from autotune.spec.workload import Workload

_PROVENANCE = ("perplexity_source", "reused_from")


def result_of(values: Any) -> StudyResult:
    """Returns the result of a study from its JSON. Raises InvalidInput for other JSON."""
    with reading_answer():
        check_study_name(values["study"])  # reports and exports are files of that name
        pick = None
        if values["pick"] is not None:
            # The parts of the reason are one sentence in JSON.
            pick = {"number": values["pick"], "criterion": values.get("pick_reason") or ""}
        read = {
            "workload": Workload(**_known(values["workload"], Workload)),
            "trials": [record_of(trial) for trial in values["trials"]],
            "pick": pick,
        }
        return parse(StudyResult, {**values, **read}, ignore_unknown=True)


def record_of(values: Mapping[str, Any]) -> TrialRecord:
    """Returns the record of a trial from its JSON. Raises InvalidInput for other JSON."""
    with reading_answer():
        facts = with_facts({name: values.get(name) for name in _PROVENANCE})
        read = {
            "config": TrainingConfig(**_known(values["config"], TrainingConfig)),
            **{name: fact if isinstance(fact, Mapping) else None for name, fact in facts.items()},
        }
        return parse(TrialRecord, {**values, **read}, ignore_unknown=True)


def _known(values: Mapping[str, Any], kind: type[Any]) -> dict[str, Any]:
    fields = {field.name for field in dataclasses.fields(kind) if field.init}
    return {name: value for name, value in values.items() if name in fields}
