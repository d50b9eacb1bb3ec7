"""SIGTERM and Ctrl-C: the first asks the run to stop after its step, the second stops at once."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from ..progress import is_main_process


class StopRequest:
    """Whether a signal asked for the run to stop, and which."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None:
            raise KeyboardInterrupt
        self.signal = signal.Signals(number)
        if is_main_process():  # written past the buffers: the signal may have come in the middle of a print
            text = f"\n{self.signal.name}: finishing this step and writing a checkpoint (again to stop at once)\n"
            os.write(2, text.encode())


@contextmanager
def stop_on_signals() -> Iterator[StopRequest]:
    """Catches SIGTERM and SIGINT inside the block; in a thread that may not set handlers it catches nothing."""
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    before = {number: signal.signal(number, request._receive) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
