"""A PostgreSQL server of one's own, for tests and studies: nothing prepared before, nothing left behind.

    with PostgresServer() as server:
        url = server.create_database("studies")  # postgresql+psycopg://autotune@127.0.0.1:23456/studies
        server.stop(mode="immediate")  # as if it had crashed; what was committed is there after start()
        server.start()

It ends with the process that made it, also when that is killed: a watching shell reads from a pipe
whose other end that process holds, and when the pipe closes stops the server and removes its
folder. The server does not run as root: root starts it as the user `postgres`.
"""

import os
import pwd
import secrets
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

USER = "autotune"
PASSWORD_USER = "needs_password"
"""The only user that needs a password, and has none that is right."""

ROOM_BYTES = 2**29
"""Free shared memory below which the data folder is on disk: containers often have 64 MiB."""

PORTS = range(20_000, 32_000)
"""Below those the system hands out to clients: a stopped server's port is not taken from it."""

SETTINGS = """
listen_addresses = '127.0.0.1'
unix_socket_directories = ''
max_connections = 200
lc_messages = 'C'
log_min_messages = fatal
"""
# The machine is not what fails in a test; synchronous_commit stays on, for the server is.
NOT_DURABLE = """
fsync = off
full_page_writes = off
"""
ACCESS = f"""
host all {PASSWORD_USER} 127.0.0.1/32 scram-sha-256
host all all 127.0.0.1/32 trust
"""

END_WITH_ITS_MAKER = 'read -r _; "$1" -D "$2/data" -m immediate stop; cd /; rm -rf -- "$2"'


def unavailable() -> str | None:
    """Why no server can be started here; None where one can."""
    if _programs() is None:
        return "PostgreSQL's initdb and pg_ctl are neither in PATH nor in /usr/lib/postgresql/*/bin"
    if os.geteuid() == 0 and _owner() is None:
        return "PostgreSQL does not run as root, and there is no user 'postgres' to run it as"
    return None


class PostgresServer:
    """Stopped until start(). `durable`: on disk and with every commit synced, as in production."""

    def __init__(self, *, durable: bool = False) -> None:
        if reason := unavailable():
            raise RuntimeError(reason)
        self._durable = durable
        self._programs = _programs() or Path()
        self.folder: Path | None = None
        self._watcher: subprocess.Popen[bytes] | None = None
        self.port = _free_port()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- the server --------------------------------------------------------------------------------

    def start(self) -> None:
        """Returns when it takes connections.

        After stop(): with the same databases on the same port.
        """
        if self.folder is None:
            self._initialize()
        self._pg_ctl("start", "-w", "-l", f"{self.folder}/log", "-o", f"-p {self.port}")

    def stop(self, *, mode: Literal["fast", "immediate"] = "fast") -> None:
        """fast: ends its clients' connections and shuts down. immediate: as a crash, recovered from at start()."""
        self._pg_ctl("stop", "-w", "-m", mode)

    def restart(self, *, mode: Literal["fast", "immediate"] = "fast") -> None:
        self.stop(mode=mode)
        self.start()

    @contextmanager
    def stopped(self, *, mode: Literal["fast", "immediate"] = "fast") -> Iterator[None]:
        """Stopped within the block, started again after it."""
        self.stop(mode=mode)
        try:
            yield
        finally:
            self.start()

    def close(self) -> None:
        """Ends the server, running or stopped, and removes its folder."""
        if self._watcher is not None:
            self._watcher.communicate()  # closes the pipe and waits
        self._watcher = self.folder = None

    # -- its databases -----------------------------------------------------------------------------

    def create_database(self, name: str) -> str:
        """An empty database; its SQLAlchemy URL."""
        self._execute("CREATE DATABASE {}", name)
        return self.url(name)

    def drop_database(self, name: str) -> None:
        """Ends the connections to it."""
        self._execute("DROP DATABASE {} WITH (FORCE)", name)

    def url(self, database: str) -> str:
        return f"postgresql+psycopg://{USER}@127.0.0.1:{self.port}/{database}"

    def _execute(self, statement: str, name: str) -> None:
        import psycopg
        from psycopg.sql import SQL, Identifier

        where: dict[str, Any] = {
            "host": "127.0.0.1",
            "port": self.port,
            "user": USER,
            "dbname": "postgres",
        }
        with psycopg.connect(**where, autocommit=True) as connection:
            connection.execute(SQL(statement).format(Identifier(name)))  # type: ignore[arg-type]

    # -- its folder and its processes --------------------------------------------------------------

    def _initialize(self) -> None:
        folder = self.folder = Path(
            tempfile.mkdtemp(prefix="autotune-postgres-", dir=self._place())
        )
        if owner := _owner():
            os.chown(folder, owner.pw_uid, owner.pw_gid)
        self._watcher = subprocess.Popen(
            ["/bin/sh", "-c", END_WITH_ITS_MAKER, "sh", f"{self._programs}/pg_ctl", str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C ends pytest first
            **self._as_owner(),
        )
        # A WAL of small files is written in no time and stays small.
        new = [
            "-U",
            USER,
            "-A",
            "trust",
            "-E",
            "UTF8",
            "--locale=C",
            "--wal-segsize=1",
            "--no-sync",
        ]
        self._run("initdb", "-D", f"{folder}/data", *new)
        settings = SETTINGS if self._durable else SETTINGS + NOT_DURABLE
        (folder / "data" / "postgresql.conf").write_text(settings)
        (folder / "data" / "pg_hba.conf").write_text(ACCESS)

    def _place(self) -> str:
        memory = "/dev/shm"
        if (
            not self._durable
            and os.access(memory, os.W_OK)
            and shutil.disk_usage(memory).free >= ROOM_BYTES
        ):
            return memory
        return tempfile.gettempdir()

    def _pg_ctl(self, command: str, *options: str) -> None:
        self._run("pg_ctl", command, "-D", f"{self.folder}/data", *options)

    def _run(self, program: str, *options: str) -> None:
        command = [f"{self._programs}/{program}", *options]
        ended = subprocess.run(
            command, capture_output=True, text=True, check=False, **self._as_owner()
        )
        if ended.returncode:
            log = Path(f"{self.folder}/log")
            said = ended.stdout + ended.stderr + (log.read_text() if log.is_file() else "")
            raise RuntimeError(f"{' '.join(command)} failed: {said.strip()}")

    def _as_owner(self) -> dict[str, Any]:
        """How a process is started in the folder by whom it belongs to."""
        owner = _owner() if os.geteuid() == 0 else None
        who = {"user": owner.pw_uid, "group": owner.pw_gid, "extra_groups": []} if owner else {}
        return {"cwd": self.folder, **who}


def _programs() -> Path | None:
    """The folder with initdb and pg_ctl: Debian keeps each version's own out of PATH."""
    in_path = shutil.which("initdb")
    versions = [
        folder
        for folder in Path("/usr/lib/postgresql").glob("*/bin")
        if folder.parent.name.isdigit()
    ]
    newest_first = sorted(versions, key=lambda folder: -int(folder.parent.name))
    folders = [*([Path(in_path).parent] if in_path else []), *newest_first]
    return next(
        (
            folder
            for folder in folders
            if all((folder / name).exists() for name in ("initdb", "pg_ctl"))
        ),
        None,
    )


def _owner() -> pwd.struct_passwd | None:
    """Whom root runs the server as; None for an ordinary user, who runs it himself."""
    try:
        return pwd.getpwnam("postgres") if os.geteuid() == 0 else None
    except KeyError:
        return None


def _free_port() -> int:
    while True:
        port = secrets.choice(PORTS)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
