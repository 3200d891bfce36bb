"""Opens streams of events and counts: `python studies/service/follow.py URL TOKEN STREAMS`.

Ends when its stdin is closed, and prints how many events came, and how many were not the next ones.
"""

import asyncio
import json
import sys

import httpx


async def follow(client: httpx.AsyncClient, found: dict[str, int], stop: asyncio.Event) -> None:
    last: int | None = None
    while not stop.is_set():
        try:
            headers = {} if last is None else {"Last-Event-ID": str(last)}
            async with client.stream("GET", "/api/v1/events", headers=headers) as answer:
                found["opened"] += 1
                rest = b""
                async for part in answer.aiter_raw():
                    if stop.is_set():
                        return
                    *whole, rest = (rest + part).split(b"\n\n")
                    for one in whole:
                        found["events"] += one.startswith(b"event: ")
                        number = int(one.rpartition(b"id: ")[2].split(b"\n")[0] or 0)
                        if not number:
                            continue  # a sign of life
                        if last is not None and one.startswith(b"event: "):
                            found["wrong"] += number != last + 1
                        last = number
        except httpx.HTTPError:
            found["errors"] += 1
            await asyncio.sleep(1)


async def main(base: str, token: str, streams: int) -> None:
    found = {"opened": 0, "events": 0, "wrong": 0, "errors": 0}
    stop = asyncio.Event()
    limits = httpx.Limits(max_connections=None)
    headers = {"Authorization": f"Bearer {token}"}
    timeout = httpx.Timeout(10, read=60)
    async with httpx.AsyncClient(
        base_url=base, headers=headers, limits=limits, timeout=timeout
    ) as client:
        tasks = [asyncio.create_task(follow(client, found, stop)) for _ in range(streams)]
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
        stop.set()
        await asyncio.sleep(1)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    print(json.dumps(found))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
