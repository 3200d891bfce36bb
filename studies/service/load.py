"""Fifty clients read and two hundred listen while a search runs: latencies, memory, events.

    python studies/service/load.py --minutes 10 > studies/service/load.json

The server is the real one, in a process of its own; the search is real apart from its trials, which
take `--seconds-of-trial` and no processor (`quick_search.py`). The database also has a study of
10,000 trials. A client asks for something else about once a second, as a page that somebody reads
does. The streams are followed by another process, which checks that the numbers of the events are
without gaps and repeats. All processes share the cores of one machine.
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
import uuid
from collections import defaultdict
from pathlib import Path
from typing import Any

import httpx
import psutil

from studies.reliability.kills import about_this_machine
from studies.service.kills import SPACE, free_port
from tests.building import made_study

ROOT = Path(__file__).resolve().parents[2]
TOKEN = uuid.uuid4().hex
HEADERS = {"Authorization": f"Bearer {TOKEN}"}
FOLLOW = Path(__file__).with_name("follow.py")
LARGE = "ten-thousand"
TRIALS_OF_LARGE = 10_000
READS = (
    "/",
    f"/studies/{LARGE}",
    "/studies/{running}",
    "/api/v1/searches",
    "/api/v1/studies",
    "/api/v1/devices",
    f"/api/v1/studies/{LARGE}/front",
    f"/api/v1/studies/{LARGE}/front?prefer=smallest",
    f"/api/v1/studies/{LARGE}/trials?sort=-tokens_per_second&limit=50&offset={{offset}}",
    f"/api/v1/studies/{LARGE}/trials?technique=precision:bf16-mixed&limit=50",
    f"/api/v1/studies/{LARGE}/trials/{{trial}}",
    f"/api/v1/studies/{LARGE}/figures/pareto",
    "/api/v1/studies/{running}/front",
    "/api/v1/studies/{running}/trials?limit=50",
    "/api/v1/studies/{running}/figures/pareto",
)


async def read(
    client: httpx.AsyncClient,
    until: float,
    chance: random.Random,
    running: str,
    seconds: dict[str, list[float]],
    wrong: list[str],
    pause: float,
) -> None:
    """Ask for one thing after the other, as somebody who looks at pages does."""
    await asyncio.sleep(chance.random() * pause)
    while time.monotonic() < until:
        route = chance.choice(READS)
        path = route.format(
            running=running,
            offset=50 * chance.randrange(200),
            trial=chance.randrange(TRIALS_OF_LARGE),
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


async def sample_memory(pid: int, until: float, found: list[float]) -> None:
    process = psutil.Process(pid)
    while time.monotonic() < until:
        found.append(process.memory_info().rss / 2**20)
        await asyncio.sleep(2.0)


def milliseconds(seconds: list[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    return {
        "requests": len(ordered),
        "median": round(1000 * statistics.median(ordered), 1),
        "p95": round(1000 * ordered[int(0.95 * (len(ordered) - 1))], 1),
        "p99": round(1000 * ordered[int(0.99 * (len(ordered) - 1))], 1),
        "largest": round(1000 * ordered[-1], 1),
    }


async def measure(base: str, pid: int, running: str, arguments: Any) -> dict[str, Any]:
    """Read for the whole time, and return latencies, errors and memory."""
    seconds: dict[str, list[float]] = defaultdict(list)
    wrong: list[str] = []
    memory: list[float] = []
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(
        base_url=base, headers=HEADERS, limits=limits, timeout=30.0
    ) as client:
        for route in READS:  # the first reads fill the caches
            await client.get(route.format(running=running, offset=0, trial=0))
        until = time.monotonic() + 60 * arguments.minutes
        await asyncio.gather(
            sample_memory(pid, until, memory),
            *(
                read(
                    client,
                    until,
                    random.Random(number),
                    running,
                    seconds,
                    wrong,
                    arguments.pause,
                )
                for number in range(arguments.clients)
            ),
        )
    third = max(1, len(memory) // 3)
    everything = [one for of_route in seconds.values() for one in of_route]
    return {
        "milliseconds": milliseconds(everything),
        "milliseconds_by_route": {
            route: milliseconds(found) for route, found in sorted(seconds.items())
        },
        "errors": wrong[:20],
        "server_mib": {
            "first_third": round(statistics.median(memory[:third]), 1),
            "last_third": round(statistics.median(memory[-third:]), 1),
            "largest": round(max(memory), 1),
        },
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--clients", type=int, default=50)
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--pause", type=float, default=1.0, help="seconds between two reads")
    parser.add_argument("--seconds-of-trial", type=float, default=1.0)
    parser.add_argument("--real-search", action="store_true", help="run real trials meanwhile")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        storage = f"sqlite:///{folder}/studies/autotune.db"
        study = made_study.definition(LARGE)
        made_study.write(storage, study, made_study.make(study, trials=TRIALS_OF_LARGE))
        port = free_port()
        base = f"http://127.0.0.1:{port}"
        environment = {
            **os.environ,
            "AUTOTUNE_TOKEN": TOKEN,
            "PYTHONPATH": str(ROOT),
            "STAND_IN_SECONDS": str(arguments.seconds_of_trial),
            "AUTOTUNE_LOCK_FOLDER": folder,
        }
        if arguments.real_search:
            environment["SEARCH_MODULE"] = "autotune.service.search_process"
        server = subprocess.Popen(
            [sys.executable, str(ROOT / "studies/service/quick_server.py"), str(port), storage],
            stdin=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
        )
        try:
            running = begin_search(base, arguments)
            following = subprocess.Popen(
                [sys.executable, str(FOLLOW), base, TOKEN, str(arguments.streams)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
            time.sleep(5.0)
            found = asyncio.run(measure(base, server.pid, running, arguments))
            output, _ = following.communicate()
            streams = json.loads(output)
        finally:
            server.terminate()
            server.wait(timeout=60)
    print(
        json.dumps(
            {
                **about_this_machine(),
                "command": " ".join(["python", "studies/service/load.py", *sys.argv[1:]]),
                "clients": arguments.clients,
                "minutes": arguments.minutes,
                "streams": {"number": arguments.streams, **streams},
                **found,
            },
            indent=2,
        )
    )
    return 0


def begin_search(base: str, arguments: Any) -> str:
    """Submit a search that runs all the time, and return its study once it has trials."""
    body: dict[str, Any] = {
        "space": "quick-trials",
        "space_content": SPACE.read_text(),
        "sampler": "random",
        "trials": 5000,
        "fresh": True,
        "predict": False,
        "confirm": False,
        "max_mem": "80MiB",
    }
    if arguments.real_search:
        body = {"space": "quick", "max_mem": "48MiB", "time_budget": "none", "fresh": True}
    end = time.monotonic() + 120
    search: dict[str, Any] = {}
    while time.monotonic() < end:
        try:
            if not search:
                search = httpx.post(f"{base}/api/v1/searches", json=body, headers=HEADERS).json()
            found = httpx.get(f"{base}/api/v1/searches/{search['id']}", headers=HEADERS).json()
            if found["trials"]:
                return str(found["study"])
        except httpx.HTTPError:
            pass
        time.sleep(0.5)
    raise SystemExit("no search has begun")


if __name__ == "__main__":
    sys.exit(main())
