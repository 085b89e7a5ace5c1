"""Samples of the calls in a worker: how long they have run, and how long pickling took. The supervisor gets them twice a second.

    a call, in any thread ── Gauge ─▶ deque of samples ── 0.5 s ─▶ a MEASURED for each function ─▶ supervisor

The calls only append to a deque. The timer runs while there are samples, so a worker at rest has no timer and sends nothing.
"""

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from percore._common.callables import full_name
from percore._common.measuring import Gauge, Histogram
from percore._protocol.messages import MEASURED

if TYPE_CHECKING:
    import asyncio

    from percore._protocol.interfaces import WorkerChannel

INTERVAL: Final = 0.5
"""Seconds for which samples wait for others."""

_MOST: Final = 8192
"""Samples that wait. If there are more, the oldest are dropped."""

_MOST_NAMES: Final = 1024

_RUN, _LOAD, _DUMP = range(3)


class FunctionGauges(Gauge):
    """The gauges of the functions of one name in this worker. It is itself the one of how long calls run."""

    __slots__ = ("dumps", "loads")

    def __init__(self, take: Callable[[int, int, int], object] | None) -> None:
        """`take` takes each sample: what was measured, then as for `Gauge`."""
        run, load, dump = (None if take is None else partial(take, kind) for kind in (_RUN, _LOAD, _DUMP))
        super().__init__(run)
        self.loads = Gauge(load)
        """Of unpickling arguments."""
        self.dumps = Gauge(dump)
        """Of pickling results."""


UNGAUGED: Final = FunctionGauges(None)
"""The gauges of a function that nobody measures."""


class Sampler:
    """Collects the samples of a worker. The loop calls the methods, unless their docstring says otherwise."""

    def __init__(self, channel: "WorkerChannel") -> None:
        self._channel = channel
        self._loop = channel.loop
        self._gauges: dict[str, FunctionGauges] = {}
        self._samples: deque[tuple[str, int, int, int]] = deque(maxlen=_MOST)
        self._is_due = False
        """Whether the timer runs, or is about to be set."""
        self._timer: asyncio.TimerHandle | None = None

    def gauges_of(self, fn: Callable[..., Any]) -> FunctionGauges:
        """Return the gauges of a function. Any thread may call this."""
        name = full_name(fn)
        gauges = self._gauges.get(name)
        if gauges is None:
            if len(self._gauges) >= _MOST_NAMES:
                return UNGAUGED
            gauges = self._gauges.setdefault(name, FunctionGauges(partial(self._take, name)))
        return gauges

    def _take(self, name: str, kind: int, nanoseconds: int, weight: int) -> None:
        """Keep a sample. From any thread."""
        self._samples.append((name, kind, nanoseconds, weight))
        if not self._is_due and self._channel.is_open:
            try:
                self._is_due = True  # first: the loop's thread may set the timer, and even send, at once
                self._loop.call_soon_threadsafe(self._set_timer)
            except BaseException:  # such as a Ctrl-C: the next sample tries again
                self._is_due = False
                raise

    def _set_timer(self) -> None:
        if self._timer is None and self._channel.is_open:
            self._timer = self._loop.call_later(INTERVAL, self.send)

    def send(self) -> None:
        """Send what was measured since the last time."""
        self.stop()
        self._is_due = False  # before the samples are taken: one that comes later sets the timer again
        found: dict[str, tuple[Histogram, Histogram, Histogram]] = {}
        for _ in range(len(self._samples)):
            name, kind, nanoseconds, weight = self._samples.popleft()
            if name not in found:
                found[name] = Histogram(), Histogram(), Histogram()
            found[name][kind].add(nanoseconds, weight)
        for name, (run, load, dump) in found.items():
            body = (name, tuple(run.counts.items()), run.total, load.count, load.total, dump.count, dump.total)
            self._channel.send(MEASURED, 0, body)

    def stop(self) -> None:
        """Stop the timer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
