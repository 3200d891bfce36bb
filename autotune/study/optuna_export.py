"""Exports studies to an Optuna database, for optuna-dashboard and Optuna's own tools.

A trial is exported as what it was, and nothing is made up for it:

- COMPLETE: trained to its end, also over the cap, with memory, speed and perplexity measured
- PRUNED: some of these are unknown, because it was predicted to be over the cap, ran out of memory,
  or was dominated and stopped early
- FAIL: the training itself failed

Optuna's samplers learn nothing from a failed trial, so one that needs too much memory is not FAIL:
its constraint says by how much. A trial without a result is left out. (`optuna_values.py` is for a
sampler instead, and fills in what was not measured.)
"""

import math
import shlex
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.storages import RDBStorage
from optuna.trial import FrozenTrial, TrialState, create_trial
from sqlalchemy import URL, Connection
from sqlalchemy.orm import scoped_session, sessionmaker

from autotune.errors import StorageUnavailable, StorageUnreachable, StudyMismatch
from autotune.spec.config import FIELD_ORDER
from autotune.spec.result import DIRECTIONS, StudyResult, TrialRecord
from autotune.spec.search_space import LegalSpace
from autotune.spec.study import StudyDefinition
from autotune.storage.database import connection_options, sqlite_file, with_driver
from autotune.storage.error_translation import (
    OPTUNA_DATABASE,
    StorageBusy,
    parse_url,
    redacted_url,
    storage_errors,
)
from autotune.storage.store import StudyStore
from autotune.study.records import result_of
from autotune.study.sampler.optuna_values import constraints_of

_CONSTRAINTS_AS_LIST = "constraints"
"""The system attribute in which Optuna stored constraints before they had names. optuna-dashboard
0.21 reads this one only, and Optuna reads both."""


@dataclass(frozen=True, kw_only=True)
class OptunaExport:
    """What was written of a study."""

    study: str
    url: str
    """The URL of the Optuna database, without its password."""
    trials: int
    left_out: tuple[int, ...]
    """Numbers of the trials without a result, which are left out. Optuna counts the others without
    a gap; each has its own number as the user attribute `autotune_number`."""


@dataclass(frozen=True, kw_only=True)
class _Content:
    """What Optuna is to store of a study."""

    name: str
    attributes: Mapping[str, Any]
    trials: Sequence[FrozenTrial]
    left_out: tuple[int, ...]


def export_to_optuna(store: StudyStore, studies: Sequence[str], url: str) -> list[OptunaExport]:
    """Write studies to the Optuna database at `url`: all of them, or nothing.

    The database is created where it is a file that does not exist. Raises UnknownStudy,
    StudyMismatch where Optuna has a study of that name, and StorageUnavailable.
    """
    contents = [_content_of(store, study) for study in studies]
    shown = redacted_url(url)
    with _transaction(url) as storage:
        for content in contents:
            _write(storage, content, url=shown)
    return [
        OptunaExport(
            study=content.name, url=shown, trials=len(content.trials), left_out=content.left_out
        )
        for content in contents
    ]


# -- a study as Optuna stores it -------------------------------------------------------------------


def _content_of(store: StudyStore, study: str) -> _Content:
    definition, _ = store.definition(study)
    result = result_of(store, study)
    dates = store.trial_dates(study)
    records = [record for record in result.trials if record.is_finished and record.number in dates]
    distributions = _distributions(definition.legal_space(), records)
    trials = [
        _trial(record, distributions, dates[record.number], cap_bytes=definition.cap_bytes)
        for record in records
    ]
    written = {record.number for record in records}
    return _Content(
        name=study,
        attributes=_study_attributes(definition, result),
        trials=trials,
        left_out=tuple(record.number for record in result.trials if record.number not in written),
    )


def _study_attributes(definition: StudyDefinition, result: StudyResult) -> dict[str, Any]:
    """Returns what describes a study; `pick`, `front` and `baseline` are autotune's numbers."""
    return {
        "cap_bytes": definition.cap_bytes,
        "device": asdict(definition.device),
        "workload": definition.workload.to_dict(),
        "sampler": definition.sampler,
        "seed": definition.seed,
        "front": list(result.front),
        "pick": None if result.pick is None else result.pick.number,
        "pick_reason": None if result.pick is None else result.pick.reason,
        "baseline": result.baseline,
    }


def _distributions(
    legal: LegalSpace, records: Iterable[TrialRecord]
) -> dict[str, CategoricalDistribution]:
    """Returns the distribution of each technique with more than one value.

    Its choices are the values of the search space, and after them those that only trials outside
    it have, such as the configurations that a space names.
    """
    configs = [record.config for record in records]
    distributions = {}
    for field in FIELD_ORDER:
        of_trials = [getattr(config, field) for config in configs]
        values = tuple(dict.fromkeys([*legal.values.get(field, ()), *of_trials]))
        if len(values) > 1:
            distributions[field] = CategoricalDistribution(values)
    return distributions


def _trial(
    record: TrialRecord,
    distributions: Mapping[str, CategoricalDistribution],
    dates: tuple[datetime, datetime],
    *,
    cap_bytes: int,
) -> FrozenTrial:
    state = _state(record)
    values = None
    if state == TrialState.COMPLETE:
        values = [float(getattr(record, objective)) for objective in DIRECTIONS]
    constraints = constraints_of(record, cap_bytes=cap_bytes)
    of_optuna: dict[str, BaseDistribution] = dict(distributions)
    trial = create_trial(
        state=state,
        values=values,
        params={field: getattr(record.config, field) for field in distributions},
        distributions=of_optuna,
        user_attrs=_trial_attributes(record, state),
        system_attrs={_CONSTRAINTS_AS_LIST: list(constraints.values())},
        constraints=constraints,
    )
    started, finished = dates
    trial.datetime_start = _as_optuna_stores(min(started, finished))
    trial.datetime_complete = _as_optuna_stores(finished)
    return trial


def _state(record: TrialRecord) -> TrialState:
    if record.failed:
        return TrialState.FAIL
    objectives = [getattr(record, objective) for objective in DIRECTIONS]
    is_measured = all(value is not None and math.isfinite(value) for value in objectives)
    if is_measured and record.outcome in ("ok", "over_cap"):
        return TrialState.COMPLETE
    return TrialState.PRUNED


def _trial_attributes(record: TrialRecord, state: TrialState) -> dict[str, Any]:
    """Returns everything known of a trial that Optuna's values and parameters do not say."""
    attributes = {
        name: value for name, value in record.to_dict().items() if value not in (None, "", {})
    }
    if state == TrialState.COMPLETE:
        for objective in DIRECTIONS:
            del attributes[objective]
    return {"autotune_number": attributes.pop("number"), **attributes}


def _as_optuna_stores(moment: datetime) -> datetime:
    """Returns a moment as Optuna stores it: by the clock of this machine, without a time zone."""
    return moment.astimezone().replace(tzinfo=None)


# -- Optuna's database -----------------------------------------------------------------------------


def _write(storage: RDBStorage, content: _Content, *, url: str) -> None:
    try:
        study = optuna.create_study(
            study_name=content.name, storage=storage, directions=[*DIRECTIONS.values()]
        )
    except optuna.exceptions.DuplicatedStudyError:
        delete = shlex.join(
            ["optuna", "delete-study", "--study-name", content.name, "--storage", url]
        )
        raise StudyMismatch(
            f"there is an Optuna study {content.name!r} in {url} already",
            hint=f"name another database with {OPTUNA_DATABASE.option}, or delete it with: "
            f"{delete}",
        ) from None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        study.set_metric_names([*DIRECTIONS])
    for name, value in content.attributes.items():
        study.set_user_attr(name, value)
    for trial in content.trials:
        study.add_trial(trial)


@contextmanager
def _transaction(url: str) -> Iterator[RDBStorage]:
    """Yield a storage whose writes are one transaction, committed at the block's end.

    Optuna commits each trial by itself. Here all its sessions use one connection, and their commits
    leave its transaction open (`rollback_only`), so whatever ends this process leaves no part of a
    study. Other processes cannot write to an SQLite file meanwhile.
    """
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    storage = _opened(url)
    try:
        with _optuna_errors(url), storage.engine.connect() as connection:
            _begin(connection)
            storage.scoped_session = scoped_session(
                sessionmaker(bind=connection, join_transaction_mode="rollback_only")
            )
            yield storage
            connection.commit()
    finally:
        storage.engine.dispose()


def _opened(url: str) -> RDBStorage:
    """Open the Optuna database, and create its file and its tables where they are missing."""
    try:
        with _optuna_errors(url):
            parsed = with_driver(parse_url(url))
            file = sqlite_file(url)
            if file is not None:
                file.parent.mkdir(parents=True, exist_ok=True)
            elif parsed.get_backend_name() == "sqlite":
                raise StorageUnavailable(
                    f"{redacted_url(url)!r} is a database in memory, which ends with this process",
                    hint=f"write for example {OPTUNA_DATABASE.example}",
                )
            return _storage(parsed)
    except StorageBusy:
        raise
    except StorageUnreachable as error:  # was never reached: waiting does not help
        raise StorageUnavailable(error.message, hint=error.hint) from None


def _storage(url: URL) -> RDBStorage:
    """Returns Optuna's storage. Raises StorageUnavailable if its tables are of another version."""
    text = url.render_as_string(hide_password=False)
    try:
        return RDBStorage(text, engine_kwargs={"connect_args": connection_options(url)})
    except RuntimeError:
        shown = redacted_url(text)
        upgrade = shlex.join(["optuna", "storage", "upgrade", "--storage", shown])
        raise StorageUnavailable(
            f"the tables of {shown} are those of another version of Optuna than "
            f"{optuna.__version__}",
            hint=f"upgrade them with: {upgrade}; or name another database with "
            f"{OPTUNA_DATABASE.option}",
        ) from None


def _begin(connection: Connection) -> None:
    """Begin the transaction; of SQLite with its lock, which could be refused after reading."""
    if connection.dialect.name == "sqlite":
        connection.exec_driver_sql("BEGIN IMMEDIATE")
    else:
        connection.begin()


@contextmanager
def _optuna_errors(url: str) -> Iterator[None]:
    """Translate the errors of SQLAlchemy, and those of Optuna around them, into autotune's."""
    with storage_errors(url, OPTUNA_DATABASE):
        try:
            yield
        except (ImportError, optuna.exceptions.StorageInternalError) as error:
            raise error.__cause__ or error from None
