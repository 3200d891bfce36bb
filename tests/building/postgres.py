"""Temporary PostgreSQL servers for tests and studies, without preparation or leftovers.

    with PostgresServer() as server:
        # postgresql+psycopg://autotune@127.0.0.1:23456/studies
        url = server.create_database("studies")
        # Like a crash; what was committed is still there after start().
        server.stop(mode="immediate")
        server.start()

The server ends with the process that made it, even if that is killed: a shell reads from a pipe
whose other end that process holds; when the pipe closes, it stops the server and removes its
folder. The server does not run as root: for root it is started as the user `postgres`.
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
"""A user that needs a password; no password is right."""

ROOM_BYTES = 2**29
"""With less free shared memory the data folder is on disk: containers often have 64 MiB."""

PORTS = range(20_000, 32_000)
"""Below the ephemeral ports of the system, so that the port of a stopped server is not reused."""

SETTINGS = """
listen_addresses = '127.0.0.1'
unix_socket_directories = ''
max_connections = 200
lc_messages = 'C'
log_min_messages = fatal
"""
# Tests crash the server, not the machine: no fsync, but synchronous_commit stays on.
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
    """Returns why no server can be started here; None if it can."""
    if _programs() is None:
        return "PostgreSQL's initdb and pg_ctl are neither in PATH nor in /usr/lib/postgresql/*/bin"
    if os.geteuid() == 0 and _owner() is None:
        return "PostgreSQL does not run as root, and there is no user 'postgres' to run it as"
    return None


class PostgresServer:
    """A server that runs after start().

    `durable`: on disk and with every commit synced, as in production.
    """

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
        """Start the server and return when it accepts connections.

        After stop() it has the same databases and the same port.
        """
        if self.folder is None:
            self._initialize()
        self._pg_ctl("start", "-w", "-l", f"{self.folder}/log", "-o", f"-p {self.port}")

    def stop(self, *, mode: Literal["fast", "immediate"] = "fast") -> None:
        """Stop the server.

        fast: close the connections and shut down. immediate: like a crash; start() recovers.
        """
        self._pg_ctl("stop", "-w", "-m", mode)

    def restart(self, *, mode: Literal["fast", "immediate"] = "fast") -> None:
        self.stop(mode=mode)
        self.start()

    @contextmanager
    def stopped(self, *, mode: Literal["fast", "immediate"] = "fast") -> Iterator[None]:
        """Stop the server for the duration of the block."""
        self.stop(mode=mode)
        try:
            yield
        finally:
            self.start()

    def close(self) -> None:
        """End the server, running or stopped, and remove its folder."""
        if self._watcher is not None:
            self._watcher.communicate()  # closes the pipe and waits
        self._watcher = self.folder = None

    # -- its databases -----------------------------------------------------------------------------

    def create_database(self, name: str) -> str:
        """Create an empty database and return its SQLAlchemy URL."""
        self._execute("CREATE DATABASE {}", name)
        return self.url(name)

    def drop_database(self, name: str) -> None:
        """Close the connections to a database and drop it."""
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
            connection.execute(SQL(statement).format(Identifier(name)))

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
        """Returns the arguments of subprocess.run for the owner of the folder."""
        owner = _owner() if os.geteuid() == 0 else None
        who = {"user": owner.pw_uid, "group": owner.pw_gid, "extra_groups": []} if owner else {}
        return {"cwd": self.folder, **who}


def _programs() -> Path | None:
    """Returns the folder of initdb and pg_ctl, which on Debian is not in PATH."""
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
    """Returns the user as whom root runs the server; None if this process is not root."""
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
