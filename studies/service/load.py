"""Readers of a server with a study of 10,000 trials and 200 others: latencies and CPU of answers.

    python studies/service/load.py > studies/service/load.json

The database is made, the server is the real one on 127.0.0.1, in a process of its own. First each
kind of answer is asked for by itself, and costs what the process of the server takes of the CPU for
it: cold, as it is the first time, and warm. Then `--readers` ask, each for something else after a
pause of a second on average, as somebody who looks at pages does. No search runs meanwhile. All
processes share the machine, and `load_average` says what else it had to do.
"""

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import httpx
import psutil

from autotune.service.listening import listening_sockets
from autotune.storage.database import Database
from autotune.storage.searches import NewSearch, Searches
from studies.reliability.kills import about_this_machine
from tests.building import made_study

ROOT = Path(__file__).resolve().parents[2]
TOKEN = "the-token-of-this-load"
HEADERS = {"Authorization": f"Bearer {TOKEN}"}
LARGE = "ten-thousand"

PAGES = ("/", f"/studies/{LARGE}", "/studies/{small}", "/studies/{small}/trials/3", "/new")
ANSWERS = (
    "/api/v1/searches",
    "/api/v1/studies",
    "/api/v1/studies/{small}",
    f"/api/v1/studies/{LARGE}/front",
    f"/api/v1/studies/{LARGE}/trials?sort=-tokens_per_second&limit=50&offset={{offset}}",
    f"/api/v1/studies/{LARGE}/trials/{{trial}}",
    f"/api/v1/studies/{LARGE}/figures/pareto",
    "/api/v1/studies/{small}/figures/pareto",
)
REPORTS = (f"/api/v1/studies/{LARGE}/report", "/api/v1/studies/{small}/report")
KINDS: Mapping[str, Sequence[str]] = {"page": PAGES, "json": ANSWERS, "report": REPORTS}
KIND_OF = {route: kind for kind, routes in KINDS.items() for route in routes}


def write_studies(storage: str, *, trials: int, studies: int, trials_of_small: int) -> None:
    """Write the large study, and small ones of two workloads, whose legal spaces differ."""
    large = made_study.definition(LARGE)
    made = made_study.make(large, trials=trials)
    made_study.write(storage, large, made)
    small = made_study.Made(
        records=made.records[:trials_of_small], forecasts=made.forecasts[:trials_of_small]
    )
    for number in range(studies):
        workload = replace(large.workload, global_batch=8 * (1 + number % 2))
        study = replace(large, name=f"study-{number}", workload=workload)
        made_study.write(storage, study, small)
    queue = Searches(Database(storage, was_reached=True))
    for number in range(studies):  # each was searched by a server, which is over
        request = {"max_mem": "6GiB", "space": "default", "trials": trials_of_small}
        new = NewSearch(
            request=request, submitted_by="ada", is_of_admin=True, study=f"study-{number}"
        )
        search, _ = queue.submit(new)
        queue.cancel(search.id, by="ada")


@contextmanager
def server_of(storage: str, folder: str) -> Iterator[tuple[str, psutil.Process]]:
    """Yield the URL of a server that runs, and its process."""
    (free,) = listening_sockets("127.0.0.1", 0)
    port = free.getsockname()[1]
    free.close()
    base = f"http://127.0.0.1:{port}"
    server = subprocess.Popen(
        [sys.executable, "-m", "autotune", "serve", "--port", str(port), "--storage", storage],
        env={**os.environ, "AUTOTUNE_TOKEN": TOKEN, "PYTHONPATH": str(ROOT)},
        cwd=folder,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        until = time.monotonic() + 120
        while True:
            try:
                if httpx.get(f"{base}/api/v1/health").is_success:
                    break
            except httpx.TransportError:
                if time.monotonic() > until:
                    raise
            time.sleep(0.2)
        yield base, psutil.Process(server.pid)
    finally:
        server.terminate()
        server.wait(timeout=60)


def one_by_one(
    base: str, process: psutil.Process, *, studies: int, repeats: int
) -> dict[str, dict[str, float]]:
    """Returns CPU and wall milliseconds of each kind of answer: the mean, with nobody else there.

    Cold are the studies that were not asked for before, each once; warm are repetitions.
    """
    fresh = iter(range(studies))
    costs: dict[str, dict[str, float]] = {}
    with httpx.Client(base_url=base, headers=HEADERS, timeout=120.0) as client:

        def cost(paths: Sequence[str]) -> tuple[float, float]:
            before, began = sum(process.cpu_times()[:2]), time.monotonic()
            for path in paths:
                client.get(path).raise_for_status()
            wall = time.monotonic() - began
            spent = sum(process.cpu_times()[:2]) - before
            return 1000 * spent / len(paths), 1000 * wall / len(paths)

        for route in KIND_OF:
            if "{small}" in route:
                numbers = [next(fresh) for _ in range(min(repeats, studies // 8))]
                paths = [route.format(small=f"study-{number}") for number in numbers]
            else:
                paths = [route.format(offset=0, trial=3)]
            cold = cost(paths)
            warm = cost([paths[0]] * repeats)
            costs[route] = {
                "cold_cpu": round(cold[0], 1),
                "cold": round(cold[1], 1),
                "warm_cpu": round(warm[0], 1),
                "warm": round(warm[1], 1),
            }
    return costs


async def read(
    client: httpx.AsyncClient,
    chance: random.Random,
    *,
    until: float,
    pause: float,
    trials: int,
    studies: int,
    seconds: dict[str, list[float]],
    wrong: list[str],
) -> None:
    """Ask for one thing after the other, as somebody who looks at pages does."""
    await asyncio.sleep(chance.random() * pause)
    routes, weights = list(KIND_OF), [1 if KIND_OF[route] == "report" else 6 for route in KIND_OF]
    while time.monotonic() < until:
        (route,) = chance.choices(routes, weights)
        path = route.format(
            small=f"study-{chance.randrange(studies)}",
            offset=50 * chance.randrange(trials // 50),
            trial=chance.randrange(trials),
        )
        began = time.monotonic()
        try:
            async with client.stream("GET", path) as answer:
                async for _ in answer.aiter_raw():  # unpacking it is the work of a client
                    pass
            seconds[route].append(time.monotonic() - began)
            if answer.status_code != 200:
                wrong.append(f"{path}: {answer.status_code}")
        except httpx.HTTPError as error:
            wrong.append(f"{path}: {type(error).__name__}")
        await asyncio.sleep(chance.expovariate(1 / pause))


async def read_together(
    base: str, arguments: argparse.Namespace
) -> tuple[dict[str, list[float]], list[str]]:
    """Returns the seconds of every answer by its route, and what went wrong."""
    seconds: dict[str, list[float]] = defaultdict(list)
    wrong: list[str] = []
    async with httpx.AsyncClient(
        base_url=base,
        headers=HEADERS,
        limits=httpx.Limits(max_connections=None),
        timeout=60.0,
    ) as client:
        until = time.monotonic() + arguments.seconds
        readers = (
            read(
                client,
                random.Random(number),
                until=until,
                pause=arguments.pause,
                trials=arguments.trials,
                studies=arguments.studies,
                seconds=seconds,
                wrong=wrong,
            )
            for number in range(arguments.readers)
        )
        await asyncio.gather(*readers)
    return seconds, wrong


def milliseconds(seconds: Sequence[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    return {
        "answers": len(ordered),
        "p50": round(1000 * statistics.median(ordered), 1),
        "p95": round(1000 * ordered[int(0.95 * (len(ordered) - 1))], 1),
        "largest": round(1000 * ordered[-1], 1),
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--readers", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--pause", type=float, default=1.0, help="seconds between two reads")
    parser.add_argument("--trials", type=int, default=10_000, help="of the large study")
    parser.add_argument("--studies", type=int, default=200)
    parser.add_argument("--trials-of-small", type=int, default=40)
    parser.add_argument("--repeats", type=int, default=20, help="of each answer by itself")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        storage = f"sqlite:///{folder}/autotune.db"
        write_studies(
            storage,
            trials=arguments.trials,
            studies=arguments.studies,
            trials_of_small=arguments.trials_of_small,
        )
        with server_of(storage, folder) as (base, process):
            costs = one_by_one(base, process, studies=arguments.studies, repeats=arguments.repeats)
            average_before = os.getloadavg()[0]
            seconds, wrong = asyncio.run(read_together(base, arguments))
            memory = process.memory_info().rss / 2**20
    of_kind = {
        kind: milliseconds([each for route in routes for each in seconds[route]])
        for kind, routes in KINDS.items()
    }
    found = {
        **about_this_machine(),
        "command": " ".join(["python", "studies/service/load.py", *sys.argv[1:]]),
        "load_average": {"before": average_before, "after": os.getloadavg()[0]},
        "one_by_one_milliseconds": costs,
        "together_milliseconds": of_kind,
        "together_milliseconds_by_route": {
            route: milliseconds(found) for route, found in sorted(seconds.items())
        },
        "errors": wrong[:20],
        "server_mib": round(memory, 1),
    }
    print(json.dumps(found, indent=2))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
