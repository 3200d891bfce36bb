"""Reads the JSON of a study, as `--json` and the server have it, into the result that Python has.

Unknown fields, which a later version may add, are left out. The JSON says in a sentence where a
perplexity or a result comes from; the sentences are read as those of earlier releases are, which
gives facts only where these give the same sentence again.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from autotune.client.connection import reading_answer
from autotune.spec.config import TrainingConfig
from autotune.spec.result import DeviceInfo, Measurement, Pick, StudyResult, TrialRecord
from autotune.spec.study import check_study_name
from autotune.spec.workload import Workload
from autotune.storage.old_measurements import upgraded_measurement
from autotune.storage.typed import check_measurement, check_types

_PROVENANCE = ("perplexity_source", "reused_from")


def result_of(values: Any) -> StudyResult:
    """Return the result of a study from its JSON. Raises InvalidInput for other JSON."""
    with reading_answer():
        check_study_name(values["study"])  # reports and exports are files of that name
        number = values["pick"]
        pick = None
        if number is not None:
            # The parts of the reason are one sentence in JSON.
            pick = Pick(number=number, criterion=values.get("pick_reason") or "")
        result = StudyResult(
            study=values["study"],
            storage=values["storage"],
            workload=Workload(**_known(values["workload"], Workload)),
            device=DeviceInfo(**_known(values["device"], DeviceInfo)),
            cap_bytes=values["cap_bytes"],
            trials=tuple(record_of(trial) for trial in values["trials"]),
            front=tuple(values["front"]),
            pick=pick,
            baseline=values["baseline"],
            initial_perplexity=values.get("initial_perplexity"),
        )
        check_types(result)
        check_types(result.device)
        if result.pick is not None:
            check_types(result.pick)
        return result


def record_of(values: Mapping[str, Any]) -> TrialRecord:
    """Return the record of a trial from its JSON. Raises InvalidInput for other JSON."""
    with reading_answer():
        fields = {k: v for k, v in _known(values, TrialRecord).items() if k not in _PROVENANCE}
        fields["config"] = TrainingConfig(**_known(values["config"], TrainingConfig))
        if (interval := fields.get("tokens_per_second_interval")) is not None:
            fields["tokens_per_second_interval"] = tuple(interval)
        fields["peak_memory_bytes_by_rank"] = tuple(fields.get("peak_memory_bytes_by_rank", ()))
        facts = upgraded_measurement({name: values.get(name) for name in _PROVENANCE})
        measurement = Measurement.from_dict(
            {"outcome": fields["outcome"], **{k: v for k, v in facts.items() if _is_fact(v)}}
        )
        for name in _PROVENANCE:
            fields[name] = getattr(measurement, name)
        record = TrialRecord(**fields)
        check_measurement(record)
        return record


def _is_fact(value: Any) -> bool:
    return isinstance(value, Mapping)


def _known(values: Mapping[str, Any], kind: type[Any]) -> dict[str, Any]:
    fields = {field.name for field in dataclasses.fields(kind) if field.init}
    return {name: value for name, value in values.items() if name in fields}
