"""Ctrl-C and the stop button of a notebook, noted instead of raised in the middle of a write."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from autotune.errors import Stopped


@contextmanager
def noted_interrupt() -> Iterator[Callable[[], bool]]:
    """Yield a function that returns whether the process was interrupted since.

    The first interrupt is only noted: raised wherever the program is, it could cut a result off
    from the database. The second one raises KeyboardInterrupt at once. Without effect in another
    thread than the main one, and where the program handles the signal itself.
    """
    noted: list[int] = []
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield lambda: False
        return

    def on_signal(number: int, frame: FrameType | None) -> None:
        if noted:
            signal.default_int_handler(number, frame)
        noted.append(number)

    signal.signal(signal.SIGINT, on_signal)
    try:
        yield lambda: bool(noted)
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def stoppable(
    should_stop: Callable[[], bool] | None, *, what_happened: str
) -> Iterator[Callable[[], bool]]:
    """Yields a function that returns whether to stop: the user asks for it, or `should_stop` does.

    Stopped that follows from the user's interrupt is raised as KeyboardInterrupt with a sentence on
    `what_happened`.
    """
    with noted_interrupt() as is_interrupted:
        try:
            yield lambda: is_interrupted() or (should_stop is not None and should_stop())
        except Stopped:
            if not is_interrupted():
                raise
            raise KeyboardInterrupt(what_happened) from None
