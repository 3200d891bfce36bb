"""The first hour on a GPU: all measurements that need a real one, in one resumable command.

    python studies/gpu/run.py                        # all parts, most informative first
    python studies/gpu/run.py device tests           # these only, or by number: 1 2
    python studies/gpu/run.py --minutes 9            # stop in time; the same command continues
    python studies/gpu/run.py --list                 # show what is done and what is open

Every part has a wall-clock budget of at most nine minutes and reports what it left open. Results
are JSON files in `--out`, one per item; existing results are not measured again. After every part
the results are written to one archive of at most 16 MiB. If `--out` is empty and the archive
exists, it is unpacked first, so that another machine of the same kind can continue. Needs the
repository and its dependencies, no network.

Exits with 0 when all is done, 75 when something is left open, 1 when something failed.
"""

import argparse
import hashlib
import json
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # the repository need not be installed
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from studies.gpu.archive import unpack_archive, write_archive
from studies.gpu.items import Clock, Kept, Part, Place, Settings, kept_of, run_part
from studies.gpu.parts import (
    by_hand,
    commands,
    device,
    endings,
    exported,
    gpu_tests,
    precisions,
    predictions,
    published_table,
    speeds,
    techniques,
)
from studies.gpu.processes import ROOT, CommandFailed, program

PARTS: Sequence[Part] = (
    device.PART,
    gpu_tests.PART,
    techniques.PART,
    exported.PART,
    predictions.PART,
    by_hand.PART,
    published_table.PART,
    endings.PART,
    commands.PART,
    speeds.PART,
    precisions.PART,
)
"""Most informative first; the first five fit into 30 minutes."""

TO_BE_CONTINUED = 75
FAILED = 1
REHEARSAL_MINUTES = 4.0
MACHINE_SECONDS = 120.0
"""Time limit for importing torch and examining the device."""


def main() -> None:
    # SystemExit also ends the processes that run.
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    arguments = parsed()
    try:
        chosen = [part_named(name) for name in arguments.parts] or list(PARTS)
    except KeyError as unknown:
        sys.exit(
            f"Invalid part: {unknown}. Choose one of {', '.join(part.name for part in PARTS)}."
        )
    out = arguments.out.resolve()
    archive = (arguments.archive or out.with_name(f"{out.name}.tar.gz")).resolve()
    began = time.monotonic()
    if archive.exists() and not (out.exists() and any(out.iterdir())):
        say(f"continuing from {archive}")
        unpack_archive(archive, out)
    if arguments.list:
        say(*standing(chosen, out))
        return
    settings = Settings(
        out=out,
        device=arguments.device,
        rehearse=arguments.rehearse,
        trials_per_device=arguments.trials_per_device,
        source=source_hash(),
    )
    out.mkdir(parents=True, exist_ok=True)
    say(check_machine(settings))
    ends = None if arguments.minutes is None else began + 60 * arguments.minutes
    left_open: list[str] = []
    for part in chosen:
        if arguments.again:
            kept_of(part, out).forget_failures()
        minutes = min(part.minutes, REHEARSAL_MINUTES) if arguments.rehearse else part.minutes
        seconds = 60 * (arguments.part_minutes or minutes)
        if ends is not None:
            seconds = min(seconds, ends - time.monotonic())
        say("", f"== {number_of(part)} {part.name}: {part.about} ({max(0.0, seconds):.0f} s)")
        started = time.monotonic()
        open_items = run_part(part, settings=settings, clock=Clock(seconds), say=say)
        left_open += [f"{part.name}/{item}" for item in open_items]
        say(*summary(part, out), f"  took {time.monotonic() - started:.0f} s")
        excluded = write_archive(out, archive)
        say(f"  {archive}: {archive.stat().st_size / 2**20:.2f} MiB")
        say(*(f"  too large for it: {name}" for name in excluded))
    failures = [
        f"{part.name}/{item}"
        for part in chosen
        for item, kept in results_of(part, out)
        if failed(kept)
    ]
    say(
        "",
        f"left open: {', '.join(left_open) or 'nothing'}",
        f"failed: {', '.join(failures) or 'nothing'}",
    )
    sys.exit(TO_BE_CONTINUED if left_open else FAILED if failures else 0)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "parts", nargs="*", metavar="PART", help=", ".join(part.name for part in PARTS)
    )
    parser.add_argument(
        "--out", type=Path, default=ROOT / "studies" / "gpu" / "out", help="folder for the results"
    )
    parser.add_argument("--archive", type=Path, help="[default: OUT.tar.gz, next to --out]")
    parser.add_argument(
        "--minutes", type=float, help="time limit of this call, for all parts together"
    )
    parser.add_argument(
        "--part-minutes", type=float, help="time limit of each part, instead of its budget"
    )
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument(
        "--trials-per-device",
        type=int,
        default=1,
        metavar="N",
        help="trials at once where only memory and losses count; their speeds mean nothing then",
    )
    parser.add_argument(
        "--rehearse",
        action="store_true",
        help="tiny sizes on any device, as a test; the numbers mean nothing",
    )
    parser.add_argument(
        "--again", action="store_true", help="repeat items that failed or were missing"
    )
    parser.add_argument(
        "--list", action="store_true", help="show what is done and what is open, and run nothing"
    )
    return parser.parse_args()


def say(*lines: str) -> None:
    for line in lines:
        print(line, flush=True)


def part_named(name: str) -> Part:
    """Returns the part with this name or number. Raises KeyError."""
    for part in PARTS:
        if name in (part.name, str(number_of(part))):
            return part
    raise KeyError(name)


def number_of(part: Part) -> int:
    return PARTS.index(part) + 1


# -- results ---------------------------------------------------------------------------------------


def results_of(part: Part, out: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    kept: Kept = kept_of(part, out)
    for file in sorted(kept.folder.glob("*.json")):
        if (found := kept.read(file.stem)) is not None:
            yield file.stem, found


def failed(kept: dict[str, Any]) -> bool:
    return bool(kept["state"] == "failed")


def standing(parts: Sequence[Part], out: Path) -> Iterator[str]:
    for part in parts:
        states = [kept["state"] for _, kept in results_of(part, out)]
        counts = (
            ", ".join(f"{states.count(state)} {state}" for state in sorted(set(states)))
            or "not begun"
        )
        yield f"{number_of(part)} {part.name}: {part.about}; {part.minutes:g} minutes; {counts}"


def summary(part: Part, out: Path) -> list[str]:
    """Returns the part's summary, and why items failed or were not possible; also stores it."""
    kept = dict(results_of(part, out))
    try:
        lines = list(
            part.summary({item: found["result"] for item, found in kept.items() if found["result"]})
        )
    except Exception as error:  # results may be incomplete
        lines = [f"no summary: {type(error).__name__}: {error}"]
    for item, found in kept.items():
        if found["state"] == "missing":
            lines.append(f"{item}: not here: {found['error']}")
        elif found["state"] == "failed":
            lines += [f"{item}: FAILED", *(f"    {line}" for line in found["error"].splitlines())]
    (out / part.name / "summary.txt").write_text("\n".join(lines) + "\n")
    return [f"  {line}" for line in lines]


# -- where it runs ---------------------------------------------------------------------------------


def check_machine(settings: Settings) -> str:
    """Stores the machine in `--out`, or checks that existing results are from the same kind.

    Returns one line on the machine. Exits if it cannot run the study.
    """
    place = Place(settings=settings, folder=settings.out / "machine", clock=Clock(MACHINE_SECONDS))
    try:
        machine = program("facts.py", "machine", settings.device, place=place, log_name="machine")
    except CommandFailed as error:
        sys.exit(f"{error}")
    if settings.is_cuda and not machine["device"]["name"]:
        why = machine["device"]["why"]
        sys.exit(f"no device {settings.device} ({why}). Choose --rehearse --device cpu to test.")
    if not settings.is_cuda and not settings.rehearse:
        sys.exit(f"{settings.device} is not a GPU. Choose --rehearse to test with tiny sizes.")
    identity = {
        "device": machine["device"]["name"],
        "torch": machine["versions"]["torch"],
        "python": machine["versions"]["python"],
        "rehearsal": settings.rehearse,
    }
    file = settings.out / "about.json"
    if file.exists():
        before = json.loads(file.read_text())
        if before["identity"] != identity:
            sys.exit(
                f"{settings.out} has results of {before['identity']}, but this is {identity}. "
                "Choose another --out."
            )
        calls = before["calls"]
    else:
        calls = []
    about = {
        "identity": identity,
        "calls": [*calls, {**machine, "arguments": sys.argv[1:], "source": settings.source}],
    }
    file.write_text(json.dumps(about, indent=1) + "\n")
    rehearsal = "REHEARSAL, no number counts; " if settings.rehearse else ""
    return (
        f"{rehearsal}{identity['device']}, torch {identity['torch']}, Python {identity['python']}"
    )


def source_hash() -> str:
    """Returns a hash of autotune and of this study, twelve hexadecimal digits."""
    digest = hashlib.sha256()
    folders = (ROOT / "autotune", ROOT / "search_spaces", Path(__file__).parent)
    for file in sorted(
        file for folder in folders for file in folder.rglob("*") if file.suffix in (".py", ".toml")
    ):
        if not {"out", "__pycache__"} & set(file.relative_to(ROOT).parts):
            digest.update(f"{file.relative_to(ROOT)}\n".encode() + file.read_bytes())
    return digest.hexdigest()[:12]


if __name__ == "__main__":
    main()
