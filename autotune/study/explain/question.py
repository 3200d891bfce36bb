"""The configuration that an explanation is asked for."""

from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass

from autotune.analysis.explanation import Explanation
from autotune.errors import InvalidInput
from autotune.execution.local import LocalExecutor
from autotune.spec.config import TrainingConfig
from autotune.spec.result import TrialRecord
from autotune.storage.identity import work_folder_path
from autotune.storage.store import StudyStore
from autotune.study.explain.explain import explain_configuration
from autotune.study.opening.trusted_code import check_trusted
from autotune.study.prediction.predictions import Forecaster


@dataclass(frozen=True, kw_only=True)
class Question:
    """The configuration to explain, and the trial and study it comes from, if any."""

    forecaster: Forecaster
    config: TrainingConfig
    study: str | None = None
    record: TrialRecord | None = None
    records: tuple[TrialRecord, ...] = ()
    unavailable: Mapping[str, Mapping[str, str]]

    def about(self) -> str:
        workload = self.forecaster.workload
        return f"{workload.describe()}, for {self.forecaster.device_type}"

    def explain(self, *, progress: Callable[[int, int], None]) -> Explanation:
        """Returns the explanation; `progress` is that of `explain_configuration`."""
        return explain_configuration(
            self.forecaster,
            self.config,
            record=self.record,
            records=self.records,
            unavailable=self.unavailable,
            progress=progress,
        )


def question_of_trial(
    executor: LocalExecutor, study: str, trial: int, *, storage: str, torch_version: str | None
) -> Question:
    """Load a trial to explain. Raises UnknownStudy.

    Raises InvalidInput for an unknown trial, and where the code of the study was not named on this
    machine.
    """
    with closing(StudyStore(storage)) as store:
        definition, _ = store.definition(study)
        records = tuple(store.trials(study))
        folder = work_folder_path(store.database) / study
        shown_url = store.url
    check_trusted(definition.workload, study=study, storage=shown_url, folder=folder)
    record = next((record for record in records if record.number == trial), None)
    if record is None:
        known = f"its trials are 0 to {len(records) - 1}" if records else "it has none yet"
        raise InvalidInput(
            f"study {study!r} has no trial {trial}", hint=f"{known}; see autotune show {study}"
        )
    forecaster = Forecaster.of_device(
        definition.device,
        executor=executor,
        workload=definition.workload,
        torch_version=torch_version,
    )
    return Question(
        forecaster=forecaster,
        config=record.config,
        study=study,
        record=record,
        records=records,
        unavailable=definition.unavailable,
    )
