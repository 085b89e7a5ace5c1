"""Wakes threads that sleep, in a Python without a GIL, so that they free what other threads have dropped.

There, an object that one thread has made and another one drops last is freed when its maker next runs Python code. The results of
calls are made by the thread of the runner's loop, or, with the engine of threads, by a worker's. That thread sleeps when there is
nothing to do. So a large result that the program has dropped elsewhere, such as in the thread that has called
`executor.submit(...).result()`, would stay in memory until the next call, and views that it contains would keep their slots.

While calls are under way, the threads are woken every second. So they are after the last call while the process has 16 MB more
than before, until its memory falls or a minute is over: then the program keeps what it has got. After that the threads are
woken after 2, 4, 8 seconds and so on, and in the end once a minute. So a large object that is dropped within a minute after the
last call is freed within a second. Another one that is dropped `t` seconds after the last call is freed about `t` seconds
later, and after a minute at most.
"""

import asyncio
from collections.abc import Callable
from typing import Final, Protocol
from weakref import ref

from percore._monitor.memory import resident_memory
from percore._supervisor.timing import is_lost

FIRST: Final = 1.0
"""Seconds between two wake-ups while calls are under way, and up to the first one after that."""

LONGEST: Final = 64.0

ENOUGH: Final = 16 << 20
"""Bytes that are worth a wake-up every second."""

PATIENCE: Final = 60.0
"""Seconds after which memory that has not fallen is taken for memory that the program uses."""


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

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        busy: Busy,
        inner: Watched,
        rouse: Callable[[], object],
        memory: Callable[[], int] = resident_memory,
    ) -> None:
        """`busy` is not kept alive by this. `inner` is armed and closed with it. `rouse` is the engine's.

        `memory` returns how many bytes of memory this process has.
        """
        self._loop = loop
        self._busy = ref(busy)
        self._inner = inner
        self._rouse = rouse
        self._memory = memory
        self._least = memory()
        """The least memory that was seen, or that the program was found to use."""
        self._heavy_for = 0.0
        """For how many seconds since the last calls the process has had more than that."""
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
            self._delay, self._heavy_for = FIRST, 0.0
            self._start()

    def catch_up(self) -> None:
        """Go on if the loop has lost the timer."""
        if is_lost(self._timer, self._loop):
            self._stop()
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
        if busy.is_busy():
            self._heavy_for = 0.0
        elif not self._is_heavy():
            self._delay = min(LONGEST, 2 * self._delay)
        self._start()

    def _is_heavy(self) -> bool:
        """Whether the process has so much more memory than before that threads may hold much of what the program has dropped."""
        memory = self._memory()
        self._least = min(self._least, memory)
        if self._delay != FIRST or memory - self._least < ENOUGH:
            return False
        self._heavy_for += FIRST
        if self._heavy_for <= PATIENCE:
            return True
        self._least = memory
        return False
