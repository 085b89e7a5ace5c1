"""Callbacks that a loop calls even if a Ctrl-C comes just before one begins.

An exception such as a Ctrl-C may come when the loop has taken a callback and not yet begun it. Then nobody calls that callback. So
the loop gets it twice here, and the second one is cancelled once the first has returned. This is for callbacks that are rare, or
for whose loss nothing else makes up: the parts of a supervisor have `catch_up` (see `_supervisor.timing`).
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable


class SureHandle:
    """Two handles for one callback.

    A Ctrl-C before or in the callback has the loop call it once more. So it must be one that may be called twice. An Exception is
    left to the loop, and nothing is called again.
    """

    __slots__ = ("_callback", "_handles", "_when")

    def __init__(
        self, schedule: Callable[[Callable[[], None]], asyncio.Handle], when: float, callback: Callable[[], object]
    ) -> None:
        """`schedule` gives the loop a callback. `when`: the time of the loop at which that is due."""
        self._callback: Callable[[], object] | None = callback
        self._when = when
        self._handles: list[asyncio.Handle] = []
        try:
            for _ in range(2):
                self._handles.append(schedule(self._run))
        except Exception:  # after a Ctrl-C the loop calls it by the handle that it has
            self.cancel()
            raise

    def when(self) -> float:
        """Return the time of the loop at which the callback is due."""
        return self._when

    def cancel(self) -> None:
        """Do not call it any more, and keep nothing of it alive. Idempotent."""
        self._callback = None
        while self._handles:  # also breaks the circle of references
            self._handles.pop().cancel()

    def _run(self) -> None:
        callback = self._callback
        if callback is None:
            return
        try:
            callback()
        except Exception:
            self.cancel()
            raise
        self.cancel()


def surely_soon(loop: asyncio.AbstractEventLoop, callback: Callable[..., object], *args: Any) -> SureHandle:
    """As `loop.call_soon`, for a callback that may be called twice."""
    return SureHandle(loop.call_soon, loop.time(), partial(callback, *args))


def surely_later(loop: asyncio.AbstractEventLoop, seconds: float, callback: Callable[..., object], *args: Any) -> SureHandle:
    """As `loop.call_later`, for a callback that may be called twice."""
    when = loop.time() + seconds
    return SureHandle(partial(loop.call_at, when), when, partial(callback, *args))


def surely_from_thread(loop: asyncio.AbstractEventLoop, callback: Callable[..., object], *args: Any) -> SureHandle:
    """As `loop.call_soon_threadsafe`, for a callback that may be called twice.

    Raises:
        RuntimeError: the loop is closed.
    """
    return SureHandle(loop.call_soon_threadsafe, loop.time(), partial(callback, *args))
