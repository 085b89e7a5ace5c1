"""How many calls of a plain function run at once in a worker.

Calls that wait, such as for a network, gain from threads. Calls that compute gain nothing, as they share one GIL; and a call that
has begun cannot move to another worker that has nothing left to do. So the calls of a function begin one at a time until they are
seen to wait. A call that has not begun for this reason is *held*: it takes no thread, and a recall may take it.

    one at a time ── they wait ──▶ 2 ──▶ 4 ──▶ … ──▶ open: each call begins as soon as there is a thread
          ▲                                           │
          └───────────────── they compute ────────────┘

The calls are looked at when one of them ends, and every few milliseconds while one is held. So a call that begins to wait lets the
next one begin, and calls that wait for each other all begin. Calls that compute only to wait for each other begin after `PATIENCE`.

A function whose calls are brief is open: calls of a millisecond need no place elsewhere, and `Threads` lets them take turns. Where
there are fewer workers than CPUs, two calls begin at once, to see whether they release the GIL while they compute.

`Pace` decides. `Pacing` tells it what happens, from several threads.
"""

import threading
import time
from collections import deque
from typing import Final

from percore._common.steps import step
from percore._worker.thread_clocks import Reading, wants_cpu

BRIEF: Final = 0.001
"""Seconds of computing below which a call, or an item of a batch, is brief."""

_MANY: Final = 16
"""Brief calls in a row after which their function is open. The first files of a folder are often empty."""

COMPUTING: Final = 0.6
"""Seconds of computing in a second from which on calls compute, and do not wait. A second here is one that the rest of the process
leaves them: a call that waits for the GIL computes."""

_FULL: Final = 0.85
"""The same for several calls that were let begin because they wait. If there is time in which all of them wait, others can use it.
If one of them computed, there would be none."""

_LEAST: Final = 0.5
"""The part of the time that is left to the calls at least: calls that wait beside a busy loop begin in spite of it."""

_SOON: Final = 0.002
"""Seconds below which a look at a call tells nothing."""

_LONG: Final = 0.005
"""Seconds from which on a computing call of an open function closes it."""

_ONE: Final = 1.3
"""Seconds of computing in a second above which calls compute beside each other, without the GIL."""

PATIENCE: Final = 60.0
"""Seconds after which a call begins beside calls that compute: they may compute until it has done something."""


class Pace:
    """How many calls of one function may run at once. Time is an argument."""

    __slots__ = (
        *("_begun", "_brief", "_floor", "_limit", "_moved_at", "_passed_at", "_seconds"),
        *("admitted", "allowed", "held", "is_open"),
    )

    def __init__(self, limit: int, *, has_spare: bool) -> None:
        """`limit`: the number of threads. `has_spare`: whether there are CPUs for more than one call of this worker."""
        self._limit = limit
        self._floor = self.allowed = 2 if has_spare else 1
        self.admitted: set[int] = set()
        """The calls that run, or wait for a thread."""
        self.held: deque[int] = deque()
        self.is_open = False
        self._brief = 0
        self._moved_at = 0.0
        self._begun: dict[int, tuple[float, float]] = {}
        """When each running call began, and for how long calls had run then, all together."""
        self._seconds = self._passed_at = 0.0

    def enters(self, call_id: int, now: float) -> bool:
        """Add a call. Return whether it may begin; else it is held."""
        if self.is_open or len(self.admitted) < self.allowed:
            self.admitted.add(call_id)
            self._moved_at = now
            return True
        self.held.append(call_id)
        return False

    def due(self, now: float) -> list[int]:
        """Return the held calls that may begin now, in order."""
        due: list[int] = []
        while self.held and (self.is_open or len(self.admitted) < self.allowed):
            due.append(self.held.popleft())
            self.admitted.add(due[-1])
            self._moved_at = now
        return due

    def began(self, call_id: int, now: float) -> None:
        """Note that a thread runs a call."""
        self._pass(now)
        self._begun[call_id] = now, self._seconds

    def beside(self, call_id: int, now: float) -> float:
        """Return how many calls have run while this one ran, on the average, with itself."""
        self._pass(now)
        at, seconds = self._begun[call_id]
        return max(1.0, (self._seconds - seconds) / max(1e-9, now - at))

    def _pass(self, now: float) -> None:
        self._seconds += len(self._begun) * (now - self._passed_at)
        self._passed_at = now

    def left(self, call_id: int, now: float) -> None:
        """Note that a call was taken back, or waits for its nested calls."""
        self._pass(now)
        self._begun.pop(call_id, None)
        self.admitted.discard(call_id)
        if call_id in self.held:
            self.held.remove(call_id)

    def ended(self, call_id: int, share: float, rest: float = 0.0, *, brief: int = 0) -> None:
        """Note that a call, or a batch, has ended.

        Args:
            call_id: the call.
            share: how many seconds it and the calls beside it have computed in each second that it has run.
            rest: how many seconds the rest of the process has computed meanwhile.
            brief: how many brief calls it was; 0: it was not brief.
        """
        running = max(1, len(self.admitted))
        self.admitted.discard(call_id)
        self._begun.pop(call_id, None)
        self._brief = self._brief + brief if brief else 0
        if self._brief >= _MANY:
            self.is_open = True
        else:
            self._judge(share, rest, running, is_over=True)

    def looked(self, share: float, running: int, now: float, rest: float = 0.0) -> None:
        """Take a look at the calls that run.

        Args:
            share: how many seconds they have computed in each second since the last look, all together.
            running: how many they are. The others wait for a thread.
            now: the time of this look.
            rest: how many seconds the rest of the process has computed in each second.
        """
        if now - self._moved_at > PATIENCE:
            self.allowed = len(self.admitted) + 1
            self._moved_at = now
        elif running:
            self._judge(share, rest, running, is_over=False)

    def _judge(self, share: float, rest: float, running: int, *, is_over: bool) -> None:
        """Allow more calls if those that run wait, or compute beside each other; fewer if they have computed."""
        most = COMPUTING if running <= self._floor else _FULL
        waits = share < most * min(1.0, max(_LEAST, 1.0 - rest))
        if waits or (self._floor > 1 and running > 1 and share > max(_ONE, COMPUTING * running)):
            self.allowed = max(self.allowed, 2 * running)
            self.is_open = self.allowed >= self._limit
            return
        if self._floor > 1 and running > 1:  # they share the GIL
            self._floor = self.allowed = 1
        elif is_over:
            self.allowed = max(self._floor, min(self.allowed, running) // 2)

    def forget(self) -> None:
        """Forget the calls of a function that is open."""
        self.admitted.clear()
        self._begun.clear()

    def close(self) -> None:
        """Let calls begin one at a time again: a long one of this open function has computed."""
        self.is_open = False
        self.allowed = self._floor
        self._brief = 0


@step
class Pacing:
    """The paces of all functions of a worker, and its calls that are held. Any thread may call the methods."""

    def __init__(self, limit: int, *, has_spare: bool) -> None:
        """As for `Pace`."""
        self._limit = limit
        self._has_spare = has_spare
        self._lock = threading.RLock()  # a garbage collection may run user code that makes a nested call
        self.paces: dict[int, Pace] = {}
        """The calls of functions that are not open, by id."""
        self._readings: dict[int, tuple[Reading, Reading]] = {}
        """The readings of each running call: when it began, and at the last look."""
        self.held = 0
        """How many calls are held."""

    def new(self) -> Pace:
        """Return the pace of a new function."""
        return Pace(self._limit, has_spare=self._has_spare)

    def holds(self, call_id: int, pace: Pace) -> bool:
        """Add a call of a function that was not open. Return whether the call is held."""
        with self._lock:
            if pace.is_open:
                return False
            self.paces[call_id] = pace
            if pace.enters(call_id, time.perf_counter()):
                return False
            self.held += 1
            return True

    def is_held(self, call_id: int) -> bool:
        """Whether a call is held."""
        with self._lock:
            pace = self.paces.get(call_id)
            return pace is not None and call_id in pace.held

    def began(self, call_id: int) -> None:
        """Note that this thread begins a call that is in `paces`. Tell its end to `ended`."""
        with self._lock:
            reading, pace = Reading(threading.get_native_id(), time.perf_counter()), self.paces.get(call_id)
            self._readings[call_id] = reading, reading
            if pace is not None:
                pace.began(call_id, reading.at)

    def ended(self, call_id: int, cpu: float, items: int) -> list[int]:
        """Note that this thread has ended a call. Return the held calls that may begin now.

        `cpu`: how many seconds it has computed, with all its items if it was a batch.
        """
        with self._lock:
            (began, _), pace = self._readings.pop(call_id), self.paces.pop(call_id, None)
            if pace is None:  # it has made nested calls
                return []
            now = time.perf_counter()
            share, process = began.until(Reading(began.tid, now))
            share *= pace.beside(call_id, now)
            pace.ended(call_id, share, process - share, brief=items if cpu < BRIEF * items else 0)
            return self._due(pace, now)

    def left(self, call_id: int) -> list[int]:
        """Note that a call was taken back, or waits for its nested calls. Return the held calls that may begin now."""
        with self._lock:
            pace = self.paces.pop(call_id, None)
            if pace is None:
                return []
            now = time.perf_counter()
            self.held -= call_id in pace.held
            pace.left(call_id, now)
            return self._due(pace, now)

    def look(self) -> list[int]:
        """Look at the running calls of functions with held calls. Return the held calls that may begin now."""
        due: list[int] = []
        with self._lock:
            now = time.perf_counter()
            for pace in {id(pace): pace for pace in list(self.paces.values()) if pace.held}.values():
                shares = [share for call_id in list(pace.admitted) if (share := self._share(call_id, now)) is not None]
                together = sum(share for share, _ in shares)
                pace.looked(together, len(shares), now, max((process for _, process in shares), default=0.0) - together)
                due += self._due(pace, now)
        return due

    def closes(self, pace: Pace, seconds: float, cpu: float, process: float, active: int, items: int) -> bool:
        """Close an open function if a call of it has computed for long. Return whether the function is not open now.

        Calls that wait much and compute a little use a whole CPU together, once there are enough of them. They stay open.

        Args:
            pace: that of the function.
            seconds: how long the call has run.
            cpu: seconds of computing of its thread.
            process: those of all threads.
            active: how many calls run.
            items: how many calls it was, if it was a batch.
        """
        is_long = cpu > _LONG * items
        if is_long and cpu * active > COMPUTING * seconds and (process < _ONE * seconds or not self._has_spare):
            with self._lock:
                pace.close()
        return not pace.is_open

    def _share(self, call_id: int, now: float) -> tuple[float, float] | None:
        """Return how many seconds of each second a call, and the process, have computed since the last look.

        None if no thread runs the call, or only since a moment ago.
        """
        began, before = self._readings.get(call_id, (None, None))
        if began is None or before is None or now - before.at < _SOON:
            return None
        reading = Reading(before.tid, now)
        self._readings[call_id] = began, reading
        share, process = before.until(reading)
        return 1.0 if share < COMPUTING and wants_cpu(before.tid) else share, process

    def _due(self, pace: Pace, now: float) -> list[int]:
        due = pace.due(now)
        self.held -= len(due)
        if pace.is_open:
            for call_id in [one for one, its in self.paces.copy().items() if its is pace]:
                self.paces.pop(call_id, None)
            pace.forget()
        return due
