"""`watch_loop`: a thread that reports when the event loop of the program is blocked."""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import traceback
from collections.abc import Iterator  # noqa: TC003  # get_type_hints needs it
from contextlib import contextmanager
from queue import Empty, SimpleQueue
from time import monotonic, process_time
from typing import Final

from percore._common.log import report
from percore._common.options import seconds_of

_BUSY: Final = 0.5
"""The share of CPU time below which a process whose threads did not run was stopped, or had no CPU."""

_STOP: Final = -1.0
_EACH: Final = 2
"""How often the loop gets each callback: it drops one that a Ctrl-C keeps from beginning."""


class _LoopWatcher:
    """Sends the loop a callback from a thread, again and again, and reports when the loop does not run it in time."""

    def __init__(self, loop: asyncio.AbstractEventLoop, after: float) -> None:
        self._loop = loop
        self._after = after
        self._of_loop = threading.get_ident()
        self._heard: SimpleQueue[tuple[int, float]] = SimpleQueue()
        """The number of a callback and when the loop has run it, or _STOP."""
        self._number = 0
        """That of the callback which the loop was sent last."""
        self._thread = threading.Thread(target=self._run, name="percore-watch-loop", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._heard.put((0, _STOP))
        self._thread.join()

    def _run(self) -> None:
        while self._hear(self._after / 2) is None:  # no callback is under way that anybody waits for, so only _STOP can arrive
            started, used = monotonic(), process_time()
            self._number += 1
            try:
                for _ in range(_EACH):
                    self._loop.call_soon_threadsafe(self._ran, self._number)
            except RuntimeError:  # the loop is closed
                return
            if self._wait(started, used) == _STOP:
                return

    def _wait(self, started: float, used: float) -> float:
        """Wait until the loop has run the callback, and report what happened meanwhile. Return as `_hear`."""
        ran, is_late = None, True
        while ran is None and is_late:  # a wait in which this thread could not run either says nothing about the loop
            begun = monotonic()
            ran = self._hear(self._after, self._number)
            is_late = monotonic() - begun >= 2 * self._after
        if ran is None:
            seconds = f"{monotonic() - started:.1f}"
            report(logging.WARNING, "the event loop has been blocked for %s s:\n%s", seconds, self._stack())
            while ran is None:
                ran = self._hear(None, self._number)
            if ran != _STOP:
                report(logging.WARNING, "the event loop goes on, after %s s", f"{ran - started:.1f}")
        elif ran != _STOP and held_the_gil(ran - started, process_time() - used, self._after):
            seconds = f"{ran - started:.1f}"
            report(
                logging.WARNING,
                "the event loop was blocked for %s s, and all threads with it, by code that holds the GIL",
                seconds,
            )
        return ran

    def _ran(self, number: int) -> None:
        self._heard.put((number, monotonic()))

    def _hear(self, seconds: float | None, number: int = 0) -> float | None:
        """Return when the loop has run the callback of this number, or _STOP. None: neither comes in these seconds (None: ever).

        The second callback of a number ends no pause and answers no later one. The seconds begin again with it: the loop runs.
        """
        while True:
            try:
                heard, ran = self._heard.get(timeout=seconds)
            except Empty:
                return None
            if ran == _STOP or heard == number:
                return ran

    def _stack(self) -> str:
        frame = sys._current_frames().get(self._of_loop)
        return "".join(traceback.format_stack(frame)).rstrip() if frame is not None else "(its thread has ended)"


def held_the_gil(seconds: float, used: float, after: float) -> bool:
    """Whether code that holds the GIL has blocked the loop. Otherwise the process did not run: it was stopped, or had no CPU.

    Args:
        seconds: how long the loop did not run a callback.
        used: the CPU time of the process meanwhile.
        after: from how many seconds on the loop counts as blocked.
    """
    return seconds >= after and used >= _BUSY * seconds


@contextmanager
def watch_loop(blocked_after: float = 1.0) -> Iterator[None]:
    """Report when the running event loop is blocked, for as long as the `with` block runs.

    A thread sends the loop a callback every `blocked_after / 2` seconds. If the loop has not run it after `blocked_after` seconds,
    the thread logs a warning to the logger `percore` with the stack of the loop's thread. It logs another one with the seconds for
    which the loop was blocked, when the loop goes on. While C code holds the GIL, the thread cannot run: it reports the block
    afterwards, without a stack. A process that was stopped, or had no CPU, is not reported.

        with percore.watch_loop():
            await serve()

    Raises:
        RuntimeError: no event loop is running.
        TypeError, ValueError: `blocked_after` is no positive number of seconds.
    """
    after = seconds_of("blocked_after", blocked_after)
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        raise RuntimeError("watch_loop() watches the running event loop, and there is none: use it inside a coroutine") from None
    watcher = _LoopWatcher(loop, after)
    watcher.start()
    try:
        yield
    finally:
        watcher.stop()
