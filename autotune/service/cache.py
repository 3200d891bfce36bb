"""Keeps results of slow computations, and computes each one once however many ask for it."""

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable
from functools import partial
from typing import Any, TypeVar

T = TypeVar("T")

MOST_BYTES = 256 * 2**20


class Cache:
    """Results by key, the most recently used ones, up to a number of bytes.

    For one event loop. A key says all that its result depends on, so that nothing gets stale.
    """

    def __init__(self, *, most_bytes: int = MOST_BYTES) -> None:
        self._most_bytes = most_bytes
        self._results: OrderedDict[Hashable, tuple[Any, int]] = OrderedDict()
        self._computing: dict[Hashable, asyncio.Task[Any]] = {}
        self.bytes = 0
        """Of all results that it holds, as far as their sizes are known."""

    async def get(
        self, key: Hashable, compute: Callable[[], Awaitable[T]], *, bytes_of: Callable[[T], int]
    ) -> T:
        """Returns the result for a key, which `compute` gives unless it is there.

        Whoever asks meanwhile gets the same result or the same error, which is not kept. The
        computation goes on where the client that has asked first leaves.
        """
        if key in self._results:
            self._results.move_to_end(key)
            found: T = self._results[key][0]
            return found
        task = self._computing.get(key)
        if task is None:
            task = asyncio.create_task(self._computed(key, compute, bytes_of))
            self._computing[key] = task
            task.add_done_callback(partial(self._ended, key))
        computed: T = await asyncio.shield(task)
        return computed

    def _ended(self, key: Hashable, task: asyncio.Task[Any]) -> None:
        self._computing.pop(key, None)
        if not task.cancelled():
            task.exception()  # seen, in case every client that has asked has left

    async def _computed(
        self, key: Hashable, compute: Callable[[], Awaitable[T]], bytes_of: Callable[[T], int]
    ) -> T:
        result = await compute()
        size = bytes_of(result)
        if size <= self._most_bytes:
            self._results[key] = (result, size)
            self.bytes += size
        while self.bytes > self._most_bytes:
            _, (_, size_of_oldest) = self._results.popitem(last=False)
            self.bytes -= size_of_oldest
        return result

    def peek(self, key: Hashable) -> Any:
        """Returns the result for a key if it is there, else None."""
        return self._results.get(key, (None, 0))[0]

    def forget(self, is_stale: Callable[[Hashable], bool]) -> None:
        """Drops the results that nobody will ask for again."""
        for key in [key for key in self._results if is_stale(key)]:
            _, size = self._results.pop(key)
            self.bytes -= size
