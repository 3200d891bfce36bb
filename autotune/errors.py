"""Errors a user can act on: one drawn tree, each with what is wrong and the way out.

    AutotuneError
    ├── InvalidInput            what was asked for cannot be done as asked (exit 2)
    │   ├── InvalidSize             a byte size or a duration that cannot be read
    │   ├── InvalidSpace            a search-space file with a wrong key, value or condition
    │   ├── InvalidDataset          text that is missing, empty or too short
    │   ├── IllegalConfiguration    techniques that cannot be combined
    │   ├── UnknownStudy            no study of that name in that storage
    │   └── StudyMismatch           the study of that name was made with other settings
    ├── StorageUnavailable      the database or a results folder cannot be used (exit 2)
    │   └── StorageAway             it could be used before and may be again; the search can be continued (exit 75)
    ├── PredictionImpossible    a model that cannot run on fake tensors (exit 2)
    ├── PreparationFailed       the workload could not be built in its own process (exit 70)
    ├── TrialLost               the machine ended a trial: killed, device gone, disk full; to be continued (exit 75)
    │   ├── TrialServerLost         the process that starts the trials has ended
    │   └── DeviceDisturbed         another process began or ended on the device while a trial was measured
    └── Stopped                 the search was asked to stop; the search can be continued (exit 75)

Expected failures of a trial (out of memory, timeout, crash) are not errors: they are outcomes
(`result.py`).
"""


class AutotuneError(Exception):
    """Base of everything autotune raises on purpose.

    `message` is one sentence that names the offending value; `hint` is one sentence with the way
    out.
    """

    exit_code = 70

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class InvalidInput(AutotuneError):
    exit_code = 2


class InvalidSize(InvalidInput):
    pass


class InvalidSpace(InvalidInput):
    pass


class InvalidDataset(InvalidInput):
    pass


class IllegalConfiguration(InvalidInput):
    pass


class UnknownStudy(InvalidInput):
    pass


class StudyMismatch(InvalidInput):
    pass


class StorageUnavailable(AutotuneError):
    exit_code = 2


class StorageAway(StorageUnavailable):
    exit_code = 75


class PredictionImpossible(AutotuneError):
    exit_code = 2


class PreparationFailed(AutotuneError):
    exit_code = 70


class TrialLost(AutotuneError):
    exit_code = 75


class TrialServerLost(TrialLost):
    pass


class DeviceDisturbed(TrialLost):
    pass


class Stopped(AutotuneError):
    exit_code = 75
