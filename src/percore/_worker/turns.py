"""Turns: which calls of a worker compute at a time, so that its loop gets the GIL.

The loop shares the GIL with these threads, and busy threads can starve it. Each time a thread rings the bell it releases the GIL.
Another thread takes the GIL before the loop has waited for 5 ms (the switch interval), and the loop's wait starts again. There are
two countermeasures. Every few milliseconds, a thread that has rung the bell sleeps for a moment. And short CPU-bound calls take
turns, which costs nothing under a GIL:

- A call is CPU-bound if its thread time is most of its wall time. The pool measures this on calls that run alone: among many calls,
  waiting for the GIL looks like waiting for anything else. With one other call beside it, it can still be measured. If a call
  computed for nearly half of its wall time, and the process for about all of it, then the two shared the GIL. Without a GIL, the
  process would have computed for longer.
- If no call runs alone and the process keeps a CPU busy, the pool tries turns. It tries more and more rarely if they do not help.
- As soon as one turn takes longer than a few milliseconds, the pool stops taking turns, so that no call blocks the others. Whether
  further calls of the same function begin beside a long one, `pacing` decides.
- Calls that compute for longer than that lose the GIL while they run in any case. While such calls run, the switch interval is a
  tenth of the usual one: the loop needs the GIL several times to answer one message, and may queue behind every thread each time.
  In somebody else's process the switch interval is not touched.

Where there is no GIL, both are left out: the loop and the threads run at once.

`Turns` gets each call from the thread that begins it, and runs it there. Several threads may be in any method at once, with no lock
but that of the turn itself: `begun`, `_takes_turns` and the times only affect the turns, and may be off by some.
"""

import sys
import threading
import time
from collections.abc import Callable
from typing import Any, Final

from percore._common.steps import step
from percore._common.system import IS_FREE_THREADED, has_gil
from percore._worker.pacing import Pacing

JOIN_AFTER: Final = 0.005
"""Seconds that one turn may take before the other calls run beside it."""

_YIELD_EVERY: Final = 0.005
_YIELD_FOR: Final = 50e-6
_LOOK_EVERY: Final = 0.05
_LONGEST_PAUSE: Final = 5.0
_BUSY: Final = 0.8
_LONG: Final = 0.01
"""CPU seconds above which a call counts as long: it loses the GIL while it runs."""

_SWITCH_EVERY: Final = 0.0005

_SHARE: Final = 0.4
_ONE: Final = 1.3
_SHORT: Final = 0.002
"""Two calls shared the GIL if one computed for more than `_SHARE` of its wall time while the process computed for less than `_ONE`
of it. Calls of up to `_SHORT` CPU seconds are not judged: a thread may wait for that long until it is scheduled."""


class SwitchInterval:
    """The switch interval of this interpreter. It is shorter while any pool of the process has a long call."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pools: set[Turns] = set()
        self._usual = 0.0

    @step
    def shorten(self, pool: "Turns", *, is_wanted: bool) -> None:
        """Shorten the interval for a pool that may do so, or no longer. Any thread may call this."""
        with self._lock:
            was_short = bool(self._pools)
            is_wanted = is_wanted and pool.may_switch_often  # it may have been stopped while this thread came here
            pool.switches_often = is_wanted
            (self._pools.add if is_wanted else self._pools.discard)(pool)
            if self._pools and not was_short:
                self._usual = sys.getswitchinterval()
                sys.setswitchinterval(min(_SWITCH_EVERY, self._usual))
            elif was_short and not self._pools:
                sys.setswitchinterval(self._usual)


_interval: Final = SwitchInterval()


class Turns:
    """The turns of one pool of threads."""

    may_switch_often = True
    """Whether this pool may shorten the switch interval: the process is the worker's own."""

    def __init__(
        self, run: Callable[[int, Any], None], pacing: Pacing | None = None, let_begin: Callable[[list[int]], None] | None = None
    ) -> None:
        """`run(call_id, item)` runs a call. `pacing`: None if no call is held. `let_begin`: lets held calls begin."""
        self._run = run
        self._pacing = pacing
        self._paced = {} if pacing is None else pacing.paces
        self._let_begin = let_begin
        self.begun = 0
        """Roughly how many calls have begun."""
        self._active: dict[int, None] = {}
        self._turn = threading.Lock()
        self._turn_began = 0.0
        self._takes_turns = False
        self._yielded = 0.0
        self._looked = (0.0, 0.0)
        self._try_after = 0.0
        self._pause = 2 * _LOOK_EVERY
        self.switches_often = False
        """Whether this pool has shortened the switch interval."""

    def stop(self) -> None:
        """Leave the switch interval to the other pools: this one gets no more calls. Those in its threads may end later."""
        self.may_switch_often = False
        _interval.shorten(self, is_wanted=False)

    def run(self, call_id: int, item: Any) -> None:
        """Run a call in this thread, in its turn, and measure it."""
        if IS_FREE_THREADED and not has_gil():
            self.begun += 1
            self._run(call_id, item)
            return
        has_turn = self._takes_turns and self._wait_for_turn()
        self._active[call_id] = None
        self.begun = begun = self.begun + 1
        is_alone = len(self._active) == 1
        wall = self._turn_began = time.perf_counter()
        cpu, process = time.thread_time(), time.process_time()
        is_paced = call_id in self._paced
        if is_paced:
            self._tell_begun(call_id)
        try:
            self._run(call_id, item)
        finally:
            cpu = time.thread_time() - cpu
            if self.switches_often is not (cpu > _LONG) and self.may_switch_often:
                _interval.shorten(self, is_wanted=cpu > _LONG)
            now = time.perf_counter()
            wall = now - wall
            if is_paced:
                self._tell_ended(call_id, cpu, getattr(item, "end", 1))
            elif wall > JOIN_AFTER:
                self._closes(item, wall, cpu, time.process_time() - process)
            if is_alone and self.begun == begun:
                self._measured(is_busy=cpu > 0.5 * wall)
            elif cpu > max(_SHARE * wall, _SHORT) and time.process_time() - process < _ONE * wall:
                self._measured(is_busy=True)
            del self._active[call_id]
            if has_turn:
                self._turn.release()
        if now - self._yielded >= _YIELD_EVERY:
            self.give_way()

    def _tell_begun(self, call_id: int) -> None:
        assert self._pacing is not None
        self._pacing.began(call_id)

    def _tell_ended(self, call_id: int, cpu: float, items: int) -> None:
        assert self._pacing is not None
        assert self._let_begin is not None
        self._let_begin(self._pacing.ended(call_id, cpu, max(1, items)))

    def _closes(self, item: Any, seconds: float, cpu: float, process: float) -> None:
        """Let calls of this function begin one at a time from now on if this one, which was not paced, has computed for long."""
        function = item[0] if type(item) is tuple else getattr(item, "function", None)
        if self._pacing is not None and function is not None and function.pace is not None:
            function.is_paced = self._pacing.closes(
                function.pace, seconds, cpu, process, len(self._active), max(1, getattr(item, "end", 1))
            )

    def _measured(self, *, is_busy: bool) -> None:
        self._takes_turns = is_busy
        if is_busy:
            self._pause = 2 * _LOOK_EVERY

    def _wait_for_turn(self) -> bool:
        """Wait for the turn. Return True with the turn held, False if the pool has stopped taking turns."""
        while not self._turn.acquire(timeout=JOIN_AFTER):
            if not self._takes_turns:
                return False
            if time.perf_counter() - self._turn_began > JOIN_AFTER:
                self._takes_turns = False
                return False
        if self._takes_turns:
            return True
        self._turn.release()
        return False

    def give_way(self) -> None:
        """Sleep for a moment so that the loop gets the GIL, at most once per switch interval."""
        if IS_FREE_THREADED and not has_gil():
            return
        now = time.perf_counter()
        if now - self._yielded < _YIELD_EVERY:
            return
        self._yielded = now
        if not self._takes_turns and now - self._looked[0] > _LOOK_EVERY:
            self._look(now)
        time.sleep(_YIELD_FOR)

    def _look(self, now: float) -> None:
        """Try turns if the process keeps a CPU busy. Calls run concurrently here, so the CPU time may be that of any thread."""
        cpu = time.process_time()
        (before, cpu_before), self._looked = self._looked, (now, cpu)
        if now > self._try_after and cpu - cpu_before > _BUSY * (now - before):
            self._takes_turns = True
            self._try_after = now + self._pause
            self._pause = min(_LONGEST_PAUSE, 2 * self._pause)
