"""A study of quick trials in a separate folder, and its workers, for the reliability tests."""

import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from sqlalchemy import func, select

from autotune.storage.database import Database
from autotune.storage.tables import ATTEMPTS, STUDIES, TRIALS
from tests.quick_study.checks import MARK, processes, violations

WORKER = Path(__file__).parents[2] / "tests" / "quick_study" / "worker.py"
LONGEST_SECONDS = 1800.0


class Worker:
    """One process of `tests/quick_study/worker.py`; what it says goes to a file."""

    def __init__(
        self, command: list[str], *, folder: Path, environment: Mapping[str, str], number: int
    ) -> None:
        self.said_in = folder / f"worker-{number}-{uuid.uuid4().hex[:6]}.txt"
        with self.said_in.open("w") as file:
            self.process = subprocess.Popen(
                command,
                cwd=folder,
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                # a job whose shell ends is continued by the system, also where it was stopped
                start_new_session=True,
            )
        self.began = time.monotonic()

    @property
    def said(self) -> list[str]:
        return self.said_in.read_text(errors="replace").splitlines()

    @property
    def pid(self) -> int:
        return self.process.pid

    def exit_code(self, timeout: float = LONGEST_SECONDS) -> int:
        return self.process.wait(timeout=timeout)

    def has_said(self, text: str) -> bool:
        return any(text in line for line in self.said)


class QuickStudy:
    def __init__(
        self, folder: Path, *, storage: str | None = None, trials: int, places: int = 1
    ) -> None:
        self.folder, self.trials, self.places = folder, trials, places
        self.storage = storage or f"sqlite:///{folder}/quick.db"
        self.mark = uuid.uuid4().hex
        self.workers: list[Worker] = []
        (folder / "turns").mkdir(exist_ok=True)

    def start(self, *options: str, seconds: float = 0.01, **environment: str) -> Worker:
        """`seconds`: what a trial takes on average."""
        wanted = (
            "--storage",
            self.storage,
            "--trials",
            str(self.trials),
            *(("--own-device",) if self.places > 1 else ()),
        )
        command = (sys.executable, str(WORKER), *wanted, *options)
        return self.start_command(*command, STAND_IN_SECONDS=str(seconds), **environment)

    def start_command(self, *command: str, **environment: str) -> Worker:
        known = {
            MARK: self.mark,
            "OMP_NUM_THREADS": "1",
            "AUTOTUNE_LOCK_FOLDER": str(
                self.folder / "turns"
            ),  # other searches on this machine have other turns
        }
        worker = Worker(
            list(command),
            folder=self.folder,
            number=len(self.workers),
            environment={**os.environ, **known, **environment},
        )
        self.workers.append(worker)
        return worker

    # -- what is seen of it ------------------------------------------------------------------------

    def results(self) -> int:
        """0 also while there is no database."""
        return self._count(
            select(func.count()).select_from(TRIALS).where(TRIALS.c.finished_at.is_not(None))
        )

    def running(self) -> int:
        return self._count(
            select(func.count()).select_from(ATTEMPTS).where(ATTEMPTS.c.state == "running")
        )

    def attempts(self) -> dict[str, int]:
        """State to how many."""
        counted = select(ATTEMPTS.c.state, func.count()).group_by(ATTEMPTS.c.state)
        with self._connection() as connection:
            return {row[0]: row[1] for row in connection.execute(counted).all()}

    def rows(self, *columns: Any) -> list[Any]:
        with self._connection() as connection:
            query = (
                select(*columns)
                .select_from(STUDIES.join(TRIALS).join(ATTEMPTS))
                .order_by(TRIALS.c.number, ATTEMPTS.c.ordinal)
            )
            return list(connection.execute(query).all())

    def _count(self, query: Any) -> int:
        from sqlalchemy.exc import SQLAlchemyError

        from autotune.errors import AutotuneError

        try:
            with self._connection() as connection:
                return int(connection.scalar(query) or 0)
        except (SQLAlchemyError, AutotuneError):
            return 0

    @contextmanager
    def _connection(self) -> Iterator[Any]:
        with (
            closing(Database(self.storage, create=False)) as database,
            database.reading() as connection,
        ):
            yield connection

    def wait_for_results(self, count: int) -> None:
        self.wait_until(lambda: self.results() >= count, what=f"{count} results")

    def wait_until(
        self, is_so: Callable[[], bool], *, what: str, seconds: float = LONGEST_SECONDS
    ) -> None:
        end = time.monotonic() + seconds
        while not is_so():
            if time.monotonic() > end:
                raise TimeoutError(
                    f"waited {seconds:g} s for {what}; the workers say {self.last_words()}"
                )
            time.sleep(0.05)

    def last_words(self) -> list[list[str]]:
        return [worker.said[-3:] for worker in self.workers]

    def exit_codes(self) -> list[int]:
        return [worker.exit_code() for worker in self.workers]

    def violations(self) -> list[str]:
        """Also processes that are left, which have five seconds to go."""
        end = time.monotonic() + 5
        while (left := processes(self.mark)) and time.monotonic() < end:
            time.sleep(0.1)
        found = violations(self.storage, "quick", trials=self.trials)
        return found + [f"there is still a process: {one}" for one in left]


@contextmanager
def own_folder(place: str | None = None) -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="autotune-proof-", dir=place))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def quick_study(
    *, storage: str | None = None, trials: int, places: int = 1
) -> Iterator[QuickStudy]:
    """Whatever happens, its workers are ended with it."""
    with own_folder() as folder:
        study = QuickStudy(folder, storage=storage, trials=trials, places=places)
        try:
            yield study
        finally:
            for worker in study.workers:
                if worker.process.poll() is None:
                    worker.process.kill()
                worker.process.wait()


def say(what: str) -> None:
    """Progress; the result alone is on stdout."""
    print(f"{datetime.now(UTC):%H:%M:%S} {what}", file=sys.stderr, flush=True)


def report(seen: Any, found: list[str]) -> int:
    """Prints one JSON object; the exit code."""
    print(json.dumps({**provenance(), "seen": seen, "violations": found}, indent=2))
    return 1 if found else 0


def provenance() -> dict[str, Any]:
    """Which command this is, when and where it ran."""
    return {
        "command": " ".join(
            ["python", f"studies/reliability/{Path(sys.argv[0]).name}", *sys.argv[1:]]
        ),
        "date": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        "machine": {"cpu": _cpu(), "cores": os.cpu_count(), "system": platform.platform()},
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in ("sqlalchemy", "optuna", "psycopg")},
        },
        "load_average_at_the_end": round(os.getloadavg()[0], 1),
    }


def _cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")),
        "unknown",
    )
