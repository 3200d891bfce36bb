"""Reads thousands of changed inputs at every border of `tests/fuzzing/borders.py`.

    python studies/fuzzing/fuzz.py --inputs 10000 --out studies/fuzzing/results.json
    python studies/fuzzing/fuzz.py --inputs 500 --border "import file" --seed 3
    python studies/fuzzing/fuzz.py --table studies/fuzzing/results.json

Each border is read in processes of its own, of PART inputs each, so that one that crashes or hangs
is noticed with the input that did it. Of each kind of defect the first input is shrunk, and
written to the folder `--defects`. The results have for each border the inputs, how many passed the
first check, were accepted whole or rejected, the defects, the seconds of its processes, and the
line coverage of its modules, by the first part and what is run when they are imported. The last
form prints results as a table of Markdown.
"""

import argparse
import json
import os
import platform
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import coverage

PART = 2000
HANGS_AFTER_SECONDS = 180.0
"""A process that ends no input for so long is killed."""
PACKAGE = Path(__file__).parents[2] / "autotune"
VERSIONS = ("hypothesis", "torch", "transformers", "datasets", "tokenizers", "fastapi", "httpx")


# -- the process of one part -----------------------------------------------------------------------


def run_part(name: str, *, inputs: int, seed: int, folder: Path, measures_coverage: bool) -> None:
    """Judge inputs, and write a line for each: coverage begins before autotune is imported."""
    measured = _coverage(folder / f"coverage.{seed}") if measures_coverage else None
    if measured is not None:
        measured.start()
    from hypothesis import HealthCheck, Phase, given, settings
    from hypothesis import seed as seeded

    from tests.fuzzing.borders import BORDERS
    from tests.fuzzing.judging import Judge

    border = BORDERS[name]
    current = folder / f"current.{seed}"
    work = folder / f"work.{seed}"
    work.mkdir()
    with (folder / f"verdicts.{seed}").open("w") as lines, Judge(border, work) as judge:

        @seeded(seed)
        @settings(
            max_examples=inputs,
            deadline=None,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(border.inputs())
        def look(content: bytes) -> None:
            current.write_bytes(content)
            verdict = judge.judge(content)
            found = {key: value for key, value in asdict(verdict).items() if value}
            if verdict.defect:
                found["input"] = content.decode("latin-1")
            lines.write(json.dumps(found) + "\n")
            lines.flush()

        look()
    if measured is not None:
        measured.stop()
        measured.save()


def shrink(name: str, *, inputs: int, seed: int, defect: str, folder: Path) -> None:
    """Print, as latin-1 in JSON, the smallest input that is found for a defect of that part."""
    from hypothesis import HealthCheck, Phase, given, settings
    from hypothesis import seed as seeded

    from tests.fuzzing.borders import BORDERS
    from tests.fuzzing.judging import Judge

    smallest: list[bytes] = []
    with Judge(BORDERS[name], folder) as judge:

        @seeded(seed)
        @settings(
            max_examples=inputs,
            deadline=None,
            database=None,
            phases=[Phase.generate, Phase.shrink],
            suppress_health_check=list(HealthCheck),
            report_multiple_bugs=False,
        )
        @given(BORDERS[name].inputs())
        def look(content: bytes) -> None:
            if judge.judge(content).defect == defect:
                smallest.append(content)
                raise AssertionError(defect)

        try:
            look()
        except AssertionError:
            pass
    if smallest:
        print(json.dumps(smallest[-1].decode("latin-1")))


def _coverage(file: Path) -> coverage.Coverage:
    return coverage.Coverage(data_file=str(file), include=[f"{PACKAGE}/*"], config_file=False)


# -- a border, from its parts ----------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Part:
    """What became of the inputs of one process."""

    seed: int
    inputs: int
    """How many it was to have."""
    verdicts: list[dict[str, Any]]
    seconds: float


def run_border(name: str, *, inputs: int, seed: int, defects: Path | None) -> dict[str, Any]:
    parts = []
    with TemporaryDirectory(prefix="fuzzing-", dir=_memory_folder()) as temporary:
        folder = Path(temporary)
        left = inputs
        while left > 0:
            part = _run_process(
                name,
                inputs=min(PART, left),
                seed=seed + len(parts),
                folder=folder,
                measures_coverage=not parts,  # it makes everything slower
            )
            parts.append(part)
            left -= max(len(part.verdicts), 1)
        verdicts = [verdict for part in parts for verdict in part.verdicts]
        found = {
            "border": name,
            "inputs": len(verdicts),
            "passed_first_check": sum("passed_first_check" in each for each in verdicts),
            "accepted_whole": sum(not each.keys() & {"error", "defect"} for each in verdicts),
            "rejected": dict(Counter(each["error"] for each in verdicts if "error" in each)),
            "seconds": round(sum(part.seconds for part in parts)),
            "line_coverage": _line_coverage(name, folder),
            "defects": list(_defects(name, parts, folder)),
        }
    if defects is not None:
        _write_defects(found, defects)
    return found


def _run_process(
    name: str, *, inputs: int, seed: int, folder: Path, measures_coverage: bool
) -> Part:
    begun = time.monotonic()
    arguments = ["--part", str(folder), "--border", name]
    if measures_coverage:
        arguments.append("--coverage")
    process = _start([*arguments, "--inputs", str(inputs), "--seed", str(seed)])
    current = folder / f"current.{seed}"
    hangs = False
    while process.poll() is None:
        time.sleep(0.5)
        changed_at = current.stat().st_mtime if current.exists() else time.time()
        idle_seconds = min(time.time() - changed_at, time.monotonic() - begun)
        if idle_seconds > HANGS_AFTER_SECONDS:
            hangs = True
            process.kill()
            process.wait()
    lines = folder / f"verdicts.{seed}"
    verdicts = (
        [json.loads(line) for line in lines.read_text().splitlines()] if lines.exists() else []
    )
    if process.returncode != 0:
        what = "hangs" if hangs else _end_of(process.returncode)
        told = process.stderr.read().decode(errors="replace") if process.stderr else ""
        content = current.read_bytes() if current.exists() else b""
        verdicts.append(
            {"defect": what, "input": content.decode("latin-1"), "details": told[-2000:]}
        )
    return Part(seed=seed, inputs=inputs, verdicts=verdicts, seconds=time.monotonic() - begun)


def _start(arguments: Sequence[str]) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        [sys.executable, "-X", "faulthandler", "-m", "studies.fuzzing.fuzz", *arguments],
        cwd=PACKAGE.parent,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE if "--shrink" in arguments else subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(PACKAGE.parent)},
        start_new_session=True,
    )


def _end_of(code: int) -> str:
    if code < 0:
        return f"the process died of {signal.Signals(-code).name}"
    return f"the process ended with {code}"


def _line_coverage(name: str, folder: Path) -> dict[str, float]:
    """Return the share of lines of each module of a border that ran, in percent."""
    from tests.fuzzing.borders import BORDERS

    measured = _coverage(folder / "coverage")
    measured.combine([str(file) for file in folder.glob("coverage.*")])
    shares = {}
    for module in BORDERS[name].modules:
        _, lines, _, missing, _ = measured.analysis2(str(PACKAGE / module))
        shares[module] = round(100 * (1 - len(missing) / len(lines)), 1)
    return shares


def _defects(name: str, parts: Iterable[Part], folder: Path) -> Iterator[dict[str, Any]]:
    """Yield each kind of defect with its number, a traceback and a small input."""
    number = Counter(
        verdict["defect"] for part in parts for verdict in part.verdicts if "defect" in verdict
    )
    for defect, times in number.most_common():
        part, first = next(
            (part, verdict)
            for part in parts
            for verdict in part.verdicts
            if verdict.get("defect") == defect
        )
        smaller = _shrunk(name, part, defect, folder)
        yield {
            "defect": defect,
            "times": times,
            "details": first.get("details", ""),
            "input": smaller if smaller is not None else first["input"],
        }


def _shrunk(name: str, part: Part, defect: str, folder: Path) -> str | None:
    below = folder / f"shrinking.{abs(hash(defect))}"
    below.mkdir()
    of_part = ["--border", name, "--seed", str(part.seed), "--inputs", str(part.inputs)]
    process = _start(["--shrink", defect, "--part", str(below), *of_part])
    try:
        answer, _ = process.communicate(timeout=300)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return None
    return str(json.loads(answer)) if answer.strip() else None


def _write_defects(found: dict[str, Any], folder: Path) -> None:
    """Write the input and the traceback of each defect, and leave the inputs out of the results."""
    for number, defect in enumerate(found["defects"]):
        below = folder / found["border"].replace(" ", "-")
        below.mkdir(parents=True, exist_ok=True)
        (below / f"{number}.input").write_bytes(defect["input"].encode("latin-1"))
        (below / f"{number}.txt").write_text(f"{defect['defect']}\n\n{defect['details']}\n")


def _memory_folder() -> str | None:
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


# -- all borders -----------------------------------------------------------------------------------


def run_borders(
    names: Sequence[str],
    *,
    inputs: int,
    seed: int,
    processes: int,
    defects: Path | None,
    out: Path | None,
) -> None:
    """Run borders, some at a time, and write the results of each as soon as it has ended."""
    writing = threading.Lock()

    def run(name: str) -> None:
        found = run_border(name, inputs=inputs, seed=seed, defects=defects)
        with writing:
            print(_in_short(found), file=sys.stderr, flush=True)
            _write(found, out)

    with ThreadPoolExecutor(processes) as pool:
        list(pool.map(run, names))  # raises what a border has raised


def _entry(border: dict[str, Any]) -> dict[str, Any]:
    """Return the results of a border with what they were made by, and defects without inputs."""
    return {
        **border,
        "defects": {each["defect"]: each["times"] for each in border["defects"]},
        "command": " ".join(["python", "studies/fuzzing/fuzz.py", *map(shlex.quote, sys.argv[1:])]),
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "machine": f"{os.cpu_count()} cores, {_processor()}, {platform.system()} "
        f"{platform.release().partition('-')[0]}, Python {platform.python_version()}",
        "versions": {name: metadata.version(name) for name in VERSIONS},
    }


def _processor() -> str:
    """Return the name of the processor, where the operating system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _write(found: dict[str, Any], file: Path | None) -> None:
    """Print the results of a border, or put them into a file, in the place of earlier ones."""
    if file is None:
        print(json.dumps(_entry(found), indent=1))
        return
    entries = json.loads(file.read_text()) if file.exists() else []
    by_name = {border["border"]: border for border in [*entries, _entry(found)]}
    file.write_text(json.dumps(list(by_name.values()), indent=1) + "\n")


def _in_short(found: dict[str, Any]) -> str:
    inputs = found["inputs"]
    shares = ", ".join(f"{module} {share} %" for module, share in found["line_coverage"].items())
    return (
        f"{found['border']}: {inputs} inputs in {found['seconds']} s, "
        f"{found['passed_first_check'] / inputs:.0%} passed the first check, "
        f"{found['accepted_whole'] / inputs:.0%} accepted whole, rejected {found['rejected']}, "
        f"defects { {each['defect']: each['times'] for each in found['defects']} }, {shares}"
    )


def table(entries: Iterable[dict[str, Any]]) -> Iterator[str]:
    """Yield the lines of a Markdown table of results."""
    yield (
        "| border | inputs | passed the first check | accepted whole | rejected | defects | "
        "seconds | lines run |"
    )
    yield "|---|---|---|---|---|---|---|---|"
    for entry in entries:
        inputs = entry["inputs"]
        rejected = [f"{error} {number:,}" for error, number in entry["rejected"].items()]
        cells = (
            entry["border"],
            f"{inputs:,}",
            f"{entry['passed_first_check'] / inputs:.0%}",
            f"{entry['accepted_whole'] / inputs:.0%}",
            ", ".join(rejected),
            str(sum(entry["defects"].values())),
            str(entry["seconds"]),
            ", ".join(
                f"{module} {share:.0f} %" for module, share in entry["line_coverage"].items()
            ),
        )
        yield f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inputs", type=int, default=10_000)
    parser.add_argument("--border", action="append", help="Several may be named. [default: all]")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=1, help="Borders at a time.")
    parser.add_argument("--out", type=Path, help="File of the results as JSON.")
    parser.add_argument("--defects", type=Path, help="Folder for an input of each defect.")
    parser.add_argument("--part", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--coverage", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--shrink", help=argparse.SUPPRESS)
    parser.add_argument("--table", type=Path, help="Print the results in this file as a table.")
    given = parser.parse_args()
    if given.table is not None:
        print("\n".join(table(json.loads(given.table.read_text()))))
        return
    if given.part is not None:
        (name,) = given.border
        settings = {"inputs": given.inputs, "seed": given.seed, "folder": given.part}
        if given.shrink is None:
            run_part(name, measures_coverage=given.coverage, **settings)
        else:
            shrink(name, defect=given.shrink, **settings)
        return
    from tests.fuzzing.borders import BORDERS

    run_borders(
        given.border or list(BORDERS),
        inputs=given.inputs,
        seed=given.seed,
        processes=given.processes,
        defects=given.defects,
        out=given.out,
    )


if __name__ == "__main__":
    main()
