"""A Ray cluster on this machine: a head without devices, and nodes that a test kills and stops.

Every node is a `ray start`, with a home, a cache and device locks of its own, as on a machine of
its own. All end with the context manager, and with the process that made it.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.building.keeper import descendants

CHECKOUT = Path(__file__).parents[2]
_RAY = (sys.executable, "-c", "from ray.scripts.scripts import main; main()")
_OBJECT_STORE_BYTES = 80_000_000
_SECONDS_TO_START = 150.0
_TOKEN = "0123456789abcdef0123456789abcdef"


@dataclass(kw_only=True, eq=False)
class Node:
    """A node of the cluster; a new one may take the place of one that was killed."""

    folder: Path
    """Its cache, its locks, and what it says."""
    words: tuple[str, ...]
    """Of its `ray start`."""
    log: Path = Path()
    pid: int = 0
    """Of its `ray start`, which all its processes descend from while they live."""
    raylet: int = 0

    @property
    def cache(self) -> Path:
        return self.folder / "cache"

    def workers(self) -> list[int]:
        """Returns the ids of the processes in which its actors run."""
        return [pid for pid in descendants(self.raylet) if _title(pid).startswith("ray::NodeWo")]


class RayCluster:
    """A head at `address`, and nodes with `cpus` each. Use it as a context manager.

    Who connects to it needs `environment`, to which the options of that name are added.
    """

    def __init__(self, *, nodes: int = 2, cpus: int = 1, **environment: str) -> None:
        self._added = environment
        self._count = nodes
        self._cpus = cpus
        self.nodes: list[Node] = []
        self.folder = Path()
        self.address = ""
        self.environment: dict[str, str] = {}
        self._head: Node | None = None

    def __enter__(self) -> "RayCluster":
        # The addresses of the sockets in it have at most 107 bytes.
        self.folder = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))
        self.environment = {
            **os.environ,
            "HOME": str(self.folder / "home"),
            "PYTHONPATH": str(CHECKOUT),
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": _TOKEN,
            "RAY_USAGE_STATS_ENABLED": "0",
            "OMP_NUM_THREADS": "1",
            **self._added,
        }
        (self.folder / "home").mkdir()
        self._keeper = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("keeper.py")), str(self.folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            self._port = _free_port()
            self.address = f"127.0.0.1:{self._port}"
            self.start_head()
            self.nodes = [self.add_node(waits=False) for _ in range(self._count)]
            self._wait_for(*self.nodes)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._keeper.communicate()

    # -- the head ----------------------------------------------------------------------------------

    def start_head(self) -> None:
        """Start the head, anew at the same address where it was killed."""
        self._head = self._start(
            "head",
            "--head",
            f"--port={self._port}",
            "--include-dashboard=false",
            cpus=0,
        )
        self._wait_for(self._head)

    def kill_head(self) -> None:
        """Kill the head and all nodes, as where the cluster is started anew."""
        assert self._head is not None
        for node in [*self.nodes, self._head]:
            self.end(node)
        self.nodes = []

    # -- nodes -------------------------------------------------------------------------------------

    def add_node(self, name: str | None = None, *, waits: bool = True) -> Node:
        """Start a node; `name` is that of one that was killed, whose files it finds."""
        taken = [node.folder.name for node in self.nodes]
        free = (f"node{number}" for number in range(1000))
        name = name or next(one for one in free if not (self.folder / one).exists())
        assert name not in taken
        node = self._start(name, f"--address={self.address}", cpus=self._cpus)
        if waits:
            self._wait_for(node)
            self.nodes.append(node)
        return node

    def kill_node(self, node: Node) -> None:
        """Kill its raylet, upon which its workers end by themselves."""
        self.nodes.remove(node)
        _send(signal.SIGKILL, node.raylet)

    def stop_node(self, node: Node) -> None:
        """Stop all processes of a node, as where its network is gone."""
        _send(signal.SIGSTOP, node.raylet, *descendants(node.raylet))

    def continue_node(self, node: Node) -> None:
        _send(signal.SIGCONT, node.raylet, *descendants(node.raylet))

    def workers(self) -> list[int]:
        return [pid for node in self.nodes for pid in node.workers()]

    # -- processes ---------------------------------------------------------------------------------

    def _start(self, name: str, *words: str, cpus: int) -> Node:
        folder = self.folder / name
        for part in ("cache", "locks"):
            (folder / part).mkdir(parents=True, exist_ok=True)
        node = Node(folder=folder, words=(*words, f"--num-cpus={cpus}"))
        self._begin(node)
        return node

    def _begin(self, node: Node) -> None:
        options = (
            "--num-gpus=0",
            f"--object-store-memory={_OBJECT_STORE_BYTES}",
            "--include-log-monitor=false",
            "--disable-usage-stats",
            "--block",
            # Two nodes that start at once in one folder would choose the same socket.
            f"--temp-dir={node.folder / 'r'}",
        )
        count = len(list(node.folder.glob("ray-*.log")))
        node.log = node.folder / f"ray-{count}.log"
        node.pid = self.start_command(
            (*_RAY, "start", *node.words, *options),
            folder=node.folder,
            log=node.log,
            AUTOTUNE_LOCK_FOLDER=str(node.folder / "locks"),
            XDG_CACHE_HOME=str(node.cache),
        )

    def start_command(
        self, command: Sequence[str], *, folder: Path, log: Path, **environment: str
    ) -> int:
        """Start a process that ends with the cluster, at the latest; return its id."""
        assert self._keeper.stdin is not None
        assert self._keeper.stdout is not None
        wanted = {
            "command": list(command),
            "folder": str(folder),
            "log": str(log),
            "environment": {**self.environment, **environment},
        }
        print(json.dumps(wanted), file=self._keeper.stdin, flush=True)
        return int(self._keeper.stdout.readline())

    def has_joined(self, node: Node) -> bool:
        """Whether a node that was started without waiting is there; one that fails starts again."""
        raylets = [pid for pid in descendants(node.pid) if _program(pid) == "raylet"]
        if not raylets and (node.raylet or not Path(f"/proc/{node.pid}").exists()):
            self.end(node)
            self._begin(node)
        node.raylet = raylets[0] if raylets else 0
        return bool(raylets) and "--block" in node.log.read_text()

    def end(self, node: Node) -> None:
        """Kill all processes of a node."""
        _kill_all(node)

    def _wait_for(self, *nodes: Node) -> None:
        try:
            wait_until(lambda: all(map(self.has_joined, nodes)), what="Ray")
        except AssertionError as error:
            said = [node.log.read_text()[-1000:] for node in nodes]
            raise AssertionError(f"{error}; its nodes say: {said}") from None


def wait_until(is_so: Callable[[], bool], *, what: str, seconds: float = _SECONDS_TO_START) -> None:
    end = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < end, f"waited {seconds:g} s for {what}"
        time.sleep(0.05)


def _kill_all(node: Node) -> None:
    _send(signal.SIGKILL, node.pid, *descendants(node.pid))


def _send(number: signal.Signals, *pids: int) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            pass


def _title(pid: int) -> str:
    try:
        return (Path("/proc") / str(pid) / "cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return ""


def _program(pid: int) -> str:
    return Path(_title(pid).partition("\0")[0]).name


def _free_port() -> int:
    with socket.socket() as opened:
        opened.bind(("127.0.0.1", 0))
        return int(opened.getsockname()[1])
