"""Part 9: every command once on a study of this device, and the other options of a search."""

import json
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from studies.gpu.items import Item, Part, Place, Settings, TimeIsUp
from studies.gpu.processes import (
    MORE_THAN_THERE_ARE,
    ROOT,
    STORAGE,
    CommandFailed,
    autotune,
    environment,
    search,
    space,
    trials_of,
)

STUDY = "commands"
TARGETS = (
    "pytorch",
    "transformers",
    "accelerate",
    "deepspeed",
    "trl",
    "lightning",
    "torchtitan",
    "axolotl",
    "llamafactory",
    "ms-swift",
    "unsloth",
    "forgather",
)
SECONDS = 150.0
CONFIRM_SECONDS = 60.0
FIT_SECONDS = 300.0
"""For the predictions of every technique at many sizes."""
LAST_LINES = 6
COMMANDS: Mapping[str, Sequence[str]] = {
    "show": ("show", STUDY, "--storage", STORAGE),
    "plot": ("plot", STUDY, "pareto", "--out", "pareto.html", "--storage", STORAGE),
    "plot-memory": ("plot", STUDY, "memory", "--out", "memory.html", "--storage", STORAGE),
    "report": ("report", STUDY, "--out", "report.html", "--storage", STORAGE),
    "compare": ("compare", STUDY, f"{STUDY}-seeds", "--storage", STORAGE),
    "studies": ("studies", "--storage", STORAGE),
    "studies-check": ("studies", "check", "--storage", STORAGE),
    "predict": ("predict", "--study", STUDY, "--trial", "1", "--storage", STORAGE),
    "explain": ("explain", STUDY, "1", "--storage", STORAGE),
    "doctor": ("doctor",),
}
"""Those that only read, in the part's folder."""


def items(settings: Settings) -> list[Item]:
    return [
        Item(name="search", work=_search, least_seconds=60.0),
        Item(name="search-snapshot", work=_with_snapshots, least_seconds=60.0),
        Item(name="search-seeds", work=_with_seeds, least_seconds=60.0),
        Item(name="search-script", work=_of_script, least_seconds=60.0),
        Item(name="two-searches", work=_two_searches, least_seconds=75.0),
        Item(name="search-devices", work=_on_all_devices, least_seconds=60.0),
        Item(name="confirm", work=_confirm, least_seconds=CONFIRM_SECONDS + 30.0),
        Item(name="fit", work=_fit, least_seconds=60.0),
        *(
            Item(name=f"export-{target}", work=partial(_export, target=target))
            for target in TARGETS
        ),
        *(Item(name=name, work=partial(_command, words=words)) for name, words in COMMANDS.items()),
    ]


def _short(place: Place) -> list[str]:
    return [*space("commands", place), "--trials", MORE_THAN_THERE_ARE]


def _search(place: Place) -> Mapping[str, Any]:
    """As a user does it, with predictions, rivals and shared perplexities."""
    return _told(search(STUDY, *_short(place), place=place))


def _with_snapshots(place: Place) -> Mapping[str, Any]:
    study = search(f"{STUDY}-snapshot", *_short(place), "--memory-snapshot", place=place)
    held = [trial["name"] for trial in trials_of(study) if trial.get("peak_bytes_by_category")]
    return {**_told(study), "peaks read from the allocator's history": held}


def _with_seeds(place: Place) -> Mapping[str, Any]:
    study = search(f"{STUDY}-seeds", *_short(place), "--seeds", "2", place=place)
    spreads = {str(trial["name"]): trial.get("perplexity_spread") for trial in trials_of(study)}
    return {**_told(study), "perplexity spreads": spreads}


def _on_all_devices(place: Place) -> Mapping[str, Any]:
    """A trial at a time on each device of this machine."""
    return _told(
        search(f"{STUDY}-devices", *_short(place), "--devices", "all", "--no-predict", place=place)
    )


def _of_script(place: Place) -> Mapping[str, Any]:
    words = [
        "--script",
        str(ROOT / "studies" / "your_script" / "train.py"),
        "--global-batch",
        "16",
        "--steps",
        "40",
    ]
    return _told(
        search(f"{STUDY}-script", "--space", "quick", *words, "--trials", "5", place=place)
    )


def _two_searches(place: Place) -> Mapping[str, Any]:
    """Two searches on one device take turns: their trials never run at the same time."""
    words = [
        "search",
        "--fresh",
        "--no-confirm",
        "--json",
        "--quiet",
        "--no-predict",
        "--device",
        place.settings.device,
    ]
    words += [
        *_short(place),
        "--storage",
        STORAGE,
        "--time-budget",
        f"{place.clock.left() - 30:.0f}s",
    ]
    log = (place.folder / "logs" / "two-searches.log").open("ab")
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "autotune", *words, "--name", f"{STUDY}-{number}"],
            cwd=place.folder,
            env=environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
        )
        for number in (1, 2)
    ]
    try:
        outputs = [process.communicate(timeout=place.clock.left())[0] for process in processes]
    except subprocess.TimeoutExpired:
        raise TimeIsUp from None
    finally:
        for process in processes:
            process.terminate()
            process.wait()
        log.close()
    if any(process.returncode for process in processes):
        raise CommandFailed(f"they ended with {[process.returncode for process in processes]}")
    return {
        f"search {number}": _told(json.loads(output))
        for number, output in enumerate(outputs, start=1)
    }


def _confirm(place: Place) -> Mapping[str, Any]:
    """Measures the finalists of the first study again, in turn with its baseline."""
    words = ["confirm", STUDY, "--time-budget", f"{CONFIRM_SECONDS:.0f}s", "--storage", STORAGE]
    return _command(place, words)


def _fit(place: Place) -> Mapping[str, Any]:
    cap = "256MiB" if place.settings.rehearse else "8GiB"
    kind = "cuda" if place.settings.is_cuda else "cpu"
    size = ["--width", "64", "--heads", "4", "--seq-len", "64"] if place.settings.rehearse else []
    context = ["--context", "1MiB"] if place.settings.rehearse and place.settings.is_cuda else []
    words = ["fit", "--max-mem", cap, "--vary", "layers", "--device", kind, *size, *context]
    return _command(place, words, seconds=FIT_SECONDS)


def _export(place: Place, target: str) -> Mapping[str, Any]:
    return _command(
        place, ["export", STUDY, "--to", target, "-o", f"exports/{target}", "--storage", STORAGE]
    )


def _command(place: Place, words: Sequence[str], *, seconds: float = SECONDS) -> Mapping[str, Any]:
    ended = autotune(*words, place=place, log_name=words[0], seconds=seconds)
    lines = ended.output.splitlines()
    return {"code": ended.code, "lines": len(lines), "last": lines[-LAST_LINES:]}


def _told(study: Mapping[str, Any]) -> dict[str, Any]:
    trials = trials_of(study)
    kept = (
        "name",
        "outcome",
        "message",
        "peak_memory_bytes",
        "context_bytes",
        "tokens_per_second",
        "perplexity",
    )
    return {
        "trials": [{key: trial[key] for key in (*kept, "parity")} for trial in trials],
        "pick": study["pick"],
        "front": study["front"],
    }


def summary(results: Mapping[str, Mapping[str, Any]]) -> Iterable[str]:
    for item, found in results.items():
        if "code" in found:
            yield f"{item}: ended with {found['code']}, {found['lines']} lines"
        else:
            searches = found.values() if "trials" not in found else [found]
            for one in searches:
                outcomes = [trial["outcome"] for trial in one["trials"]]
                counts = ", ".join(
                    f"{outcomes.count(each)} {each}" for each in sorted(set(outcomes))
                )
                yield f"{item}: {counts}; pick {one['pick']}, front {one['front']}"


PART = Part(
    name="commands",
    minutes=9.0,
    about="every command, and searches of every kind",
    items=items,
    summary=summary,
)
