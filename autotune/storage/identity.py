"""Names the work folder of a database: logs, prepared files and results on their way into it.

The folder of a SQLite database is next to its file. A database on a server is reached by many
spellings of its URL, and with passwords that change, so its folder has the name of an identity that
is drawn once and kept in the database itself: results that wait in the folder are found again,
however the database is named. A copy of a database has the identity of the original.
"""

from contextlib import closing
from pathlib import Path

from autotune.spec.study import RESULTS_FOLDER
from autotune.storage.database import Database, sqlite_file

_SERVERS_FOLDER = RESULTS_FOLDER / "work"
_NOT_CREATED = "new-database"
"""Name of the folder of a database in which no study was ever begun, as a dry run needs one."""


def work_folder_path(database: Database) -> Path:
    """Returns the path of a database's work folder; it may not exist.

    Raises StorageUnavailable for a database that has lost its identity.
    """
    if database.file is not None:
        return _folder_of_file(database.file)
    return _SERVERS_FOLDER / (database.identity or _NOT_CREATED)


def find_work_folder(storage: str) -> Path:
    """Returns the path of the work folder of the database behind a URL; it may not exist.

    Raises StorageUnavailable for a database that cannot be used, and StorageUnreachable for one
    that cannot be used at the moment.
    """
    file = sqlite_file(storage)
    if file is not None:
        return _folder_of_file(file)
    with closing(Database(storage, read_only=True, was_reached=True)) as database:
        return work_folder_path(database)


def _folder_of_file(file: Path) -> Path:
    return file.parent / "work" / file.name.removesuffix(".db")
