"""Ctrl-C and the stop button of a notebook, noted instead of raised in the middle of a write."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


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
