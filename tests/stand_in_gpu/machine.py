"""A machine with stand-in GPUs on which a test runs commands, isolated from other tests."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.stand_in_gpu import ledger

FOLDER = Path(__file__).parent
PROJECT = FOLDER.parents[1]

BUILD_VARIABLE = "STAND_IN_BUILD"
"""The variable with the folder of the built libraries; `make test-cuda` sets it."""

SMALL_MODEL = (
    *("--layers", "2", "--width", "64", "--heads", "2", "--seq-len", "64", "--global-batch", "4"),
    *("--steps", "12", "--warmup-steps", "3", "--eval-sequences", "8"),
)
COMMAND_SECONDS = 900.0

TEXT = "The caching allocator keeps what it has; the driver counts what everybody has.\n" * 2000


class Machine:
    """Stand-in GPUs with a separate ledger, device locks, log and folder of studies.

    Settings are the stand-in's variables in lower case: `gpus=2` is STAND_IN_GPUS=2. Those given
    here apply to all commands of the machine; None unsets one.
    """

    def __init__(self, folder: Path, **settings: object) -> None:
        self.folder = folder
        self.ledger = folder / "ledger"
        self.log = folder / "log"
        self.database = folder / "studies" / "autotune.db"
        self.python_path: list[Path] = []
        """Folders from which all commands import before the project's."""
        self._settings = settings
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "text.txt").write_text(TEXT)

    def environment(self, *, visible: str | None = None, **settings: object) -> dict[str, str]:
        """Returns the environment of a command; `visible` is CUDA_VISIBLE_DEVICES."""
        inherited = {
            k: v
            for k, v in os.environ.items()
            if not k.startswith("STAND_IN_") or k == BUILD_VARIABLE
        }
        inherited.pop("CUDA_VISIBLE_DEVICES", None)
        chosen = {
            f"STAND_IN_{name.upper()}": str(v)
            for name, v in {**self._settings, **settings}.items()
            if v is not None
        }
        return {
            **inherited,
            **chosen,
            **({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}),
            "STAND_IN_LEDGER": str(self.ledger),
            "STAND_IN_LOG": str(self.log),
            "AUTOTUNE_LOCK_FOLDER": str(self.folder / "locks"),
            "PYTHONPATH": os.pathsep.join(map(str, [*self.python_path, PROJECT])),
            "OMP_NUM_THREADS": "1",
            "COLUMNS": "200",
        }

    def start(
        self, *arguments: str, visible: str | None = None, **settings: object
    ) -> "subprocess.Popen[str]":
        """Starts Python with these arguments, with pipes for stdin, stdout and stderr."""
        return subprocess.Popen(
            [str(FOLDER / "run"), os.environ[BUILD_VARIABLE], sys.executable, *arguments],
            cwd=self.folder,
            env=self.environment(visible=visible, **settings),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def run(
        self,
        *arguments: str,
        visible: str | None = None,
        seconds: float = COMMAND_SECONDS,
        **settings: object,
    ) -> "subprocess.CompletedProcess[str]":
        """Runs Python with these arguments and waits for its end."""
        with self.start(*arguments, visible=visible, **settings) as process:
            try:
                out, err = process.communicate(timeout=seconds)
            except subprocess.TimeoutExpired:
                process.kill()
                raise
        return subprocess.CompletedProcess(arguments, process.returncode, out, err)

    def python(self, program: str, *, visible: str | None = None, **settings: object) -> str:
        """Returns what a program prints; fails the test if the program fails."""
        done = self.run("-c", program, visible=visible, **settings)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def autotune(
        self,
        *arguments: str,
        visible: str | None = None,
        codes: tuple[int, ...] = (0,),
        **settings: object,
    ) -> "subprocess.CompletedProcess[str]":
        done = self.run("-m", "autotune", *arguments, visible=visible, **settings)
        assert done.returncode in codes, (
            f"exit code {done.returncode}\n{done.stdout[-500:]}\n{done.stderr[-3000:]}"
        )
        return done

    def search(
        self,
        *arguments: str,
        visible: str | None = None,
        codes: tuple[int, ...] = (0, 1),
        model: Sequence[str] = SMALL_MODEL,
        **settings: object,
    ) -> dict[str, Any]:
        """Runs a search, of the small model unless told otherwise; returns what --json prints.

        Exit code 1 means that no configuration is feasible.
        """
        done = self.autotune(
            *self.search_arguments(*arguments, model=model),
            visible=visible,
            codes=codes,
            **settings,
        )
        return dict(json.loads(done.stdout))

    def trials(
        self,
        *configurations: str,
        options: Sequence[str] = (),
        techniques: str = "",
        visible: str | None = None,
        **settings: object,
    ) -> list[dict[str, Any]]:
        """Trains the baseline and these configurations without predictions; returns the trials."""
        space = self.space(*configurations, techniques=techniques)
        count = str(1 + len(configurations))
        arguments = ("--space", space, "--trials", count, "--no-predict", *options)
        return list(self.search(*arguments, visible=visible, **settings)["trials"])

    def start_search(
        self, *arguments: str, visible: str | None = None, **settings: object
    ) -> "subprocess.Popen[str]":
        return self.start(
            "-m", "autotune", *self.search_arguments(*arguments), visible=visible, **settings
        )

    def search_arguments(self, *arguments: str, model: Sequence[str] = SMALL_MODEL) -> list[str]:
        return [
            "search",
            *model,
            "--dataset",
            str(self.folder / "text.txt"),
            "--json",
            "--no-confirm",
            *arguments,
        ]

    def space(self, *configurations: str, techniques: str = "") -> str:
        """Writes a search-space file with these configurations; returns its path.

        Each is TOML, such as 'precision = "bf16-mixed"'.
        """
        text = [
            'description = "of a test"',
            "[techniques]",
            'micro_batch_size = "divisors"',
            techniques,
        ]
        for number, configuration in enumerate(configurations):
            text += [
                "[[configurations]]",
                f'name = "configuration {number}"',
                *configuration.split(", "),
            ]
        file = self.folder / f"space_{len(list(self.folder.glob('space_*.toml')))}.toml"
        file.write_text("\n".join(text) + "\n")
        return str(file)

    def intruder(self, device: str = "cuda:0", **settings: object) -> "Intruder":
        return Intruder(self.start(str(FOLDER / "intruder.py"), device, **settings))

    def logged(self, text: str) -> list[str]:
        """Returns the lines of the stand-in's log that contain this text."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        return [line for line in lines if text in line]

    def used_bytes(self, device: int = 0) -> int:
        return ledger.used_bytes(self.ledger, device)

    def processes(self) -> list[ledger.Use]:
        return ledger.live_processes(self.ledger)


class Intruder:
    """Another process that uses a device. A context manager that ends it."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process

    def do(self, command: str) -> str:
        """Sends `context`, `take 512` or `give`; returns `done` or an error."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(command + "\n")
        self._process.stdin.flush()
        return self._process.stdout.readline().strip()

    def leave(self) -> None:
        self._process.communicate("leave\n", timeout=30)

    def __enter__(self) -> "Intruder":
        return self

    def __exit__(self, *exception: object) -> None:
        self._process.kill()
        self._process.communicate()


def wait_until(condition: Callable[[], object], *, seconds: float = 60.0, what: str = "it") -> None:
    """Checks the condition ten times a second; fails after `seconds`."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"{what} did not come within {seconds:g} s"
        time.sleep(0.1)
