"""Wakes threads that sleep, in a Python without a GIL, so that they free what other threads have dropped.

There, an object that one thread has made and another one drops last is freed when its maker next runs Python code. The results of
calls are made by the thread of the runner's loop, or, with the engine of threads, by a worker's. That thread sleeps when there is
nothing to do. So a large result that the program has dropped elsewhere, such as in the thread that has called
`executor.submit(...).result()`, would stay in memory until the next call, and views that it contains would keep their slots.

While calls are under way, the threads are woken every second. After that they are woken after 1, 2, 4 seconds and so on, and in
the end once a minute. So an object that is dropped `t` seconds after the last call is freed about `t` seconds later, and after a
minute at most.
"""

import asyncio
from collections.abc import Callable
from typing import Final, Protocol
from weakref import ref

FIRST: Final = 1.0
"""Seconds between two wake-ups while calls are under way, and up to the first one after that."""

LONGEST: Final = 64.0


class Busy(Protocol):
    """A runner, as this sees it."""

    def is_busy(self) -> bool:
        """Whether calls are under way."""


class Watched(Protocol):
    """What else is armed with the first call."""

    @property
    def is_armed(self) -> bool: ...

    def arm(self) -> None: ...

    def close(self) -> None: ...


class Reclaiming:
    """Wakes the loop of a runner and its workers' threads. Only the thread of the loop may use it."""

    def __init__(self, loop: asyncio.AbstractEventLoop, busy: Busy, inner: Watched, rouse: Callable[[], object]) -> None:
        """`busy` is not kept alive by this. `inner` is armed and closed with it. `rouse` is the engine's."""
        self._loop = loop
        self._busy = ref(busy)
        self._inner = inner
        self._rouse = rouse
        self._delay = FIRST
        self._timer: asyncio.TimerHandle | None = None

    @property
    def is_armed(self) -> bool:
        """Whether `arm` has nothing to do."""
        return self._inner.is_armed and self._timer is not None and self._delay == FIRST

    def arm(self) -> None:
        """Wake the threads soon. To be called with each call for which it is not armed."""
        if not self._inner.is_armed:
            self._inner.arm()
        if self._timer is None or self._delay != FIRST:
            self._stop()
            self._delay = FIRST
            self._start()

    def close(self) -> None:
        """Wake nobody any more. Idempotent."""
        self._stop()
        self._inner.close()

    def _start(self) -> None:
        self._timer = self._loop.call_later(self._delay, self._tick)

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _tick(self) -> None:
        # The thread of this loop needs nothing more than to run.
        busy = self._busy()
        if busy is None:
            self._timer = None
            return
        self._rouse()
        if not busy.is_busy():
            self._delay = min(LONGEST, 2 * self._delay)
        self._start()
