"""Finalisers run in any thread, at any point of the program. `Endings` lets them only queue a callback, which the loop runs."""

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable
from time import monotonic
from typing import Final

Ended = Callable[[], None]

_LOST: Final = 1.0
"""Seconds after which the loop is asked again."""


class Endings:
    """Runs the callbacks of finalisers in the loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._ended: deque[Ended] = deque()
        self._is_due = False
        self._asked_at = 0.0

    def add(self, ended: Ended) -> None:
        """Have the loop call `ended`. If the loop is closed, it is never called. Any thread may call this."""
        self._ended.append(ended)
        # The loop has lost `_run` if an exception such as a Ctrl-C came just before it.
        if not self._is_due or monotonic() - self._asked_at > _LOST:
            self._schedule()

    def _schedule(self) -> None:
        # Whatever is raised here, such as a Ctrl-C, the next ending schedules `_run`. If it is scheduled twice, that does no harm.
        self._asked_at = monotonic()
        with contextlib.suppress(RuntimeError):  # the loop is closed
            if asyncio._get_running_loop() is self._loop:
                self._loop.call_soon(self._run)
                self._is_due = True  # only now: no other thread runs `_run`
                return
            try:
                self._is_due = True  # first: the loop's thread may run `_run` at once
                self._loop.call_soon_threadsafe(self._run)
            except BaseException:
                self._is_due = False
                raise

    def _run(self) -> None:
        self._is_due = False
        try:
            while self._ended:
                self._ended.popleft()()
        finally:
            if self._ended:  # one has raised, which the loop reports: the others must not wait for the next finaliser
                self._schedule()
