"""The threads of a worker: plain functions run here.

Calls wait in a dict, from which they can be taken back by id until a thread begins them; the queue carries ids alone. A thread
and the loop may both want a call: `dict.pop` gives it to exactly one.

The loop shares the GIL with these threads, and is starved by them if they let it: each time a thread rings the bell it releases
the GIL, another takes it before the loop's wait of 5 ms is over, and the wait starts anew. So every few milliseconds a thread that
has rung sits out for a moment, and short CPU-bound calls take turns, which costs nothing under a GIL:
    Whether calls are CPU-bound (thread time against wall time) is measured on those that run alone: beside many others, waiting for
    the GIL cannot be told from waiting for something else. Beside one other it can: a call that has computed for nearly half of its
    time, in a process that computed for about all of it, had to share the GIL. Without a GIL between them the process had more.
    Where none runs alone and the process keeps a CPU busy, turns are tried, more and more rarely if in vain.
    As soon as one call has its turn for longer than a few milliseconds, turns are over, so that none holds the others up.
    Calls that compute for longer than that lose the GIL in their midst anyway. While there are such, they lose it ten times as
    often: the loop needs it several times to answer one message, and each time may find every thread before it.
"""

import sys
import threading
import time
from collections.abc import Callable
from contextvars import Context
from queue import SimpleQueue
from typing import Any, Final

JOIN_AFTER: Final = 0.005
"""Seconds that one call may have its turn before the others run beside it."""

_YIELD_EVERY: Final = 0.005
_YIELD_FOR: Final = 50e-6
_LOOK_EVERY: Final = 0.05
_LONGEST_PAUSE: Final = 5.0
_BUSY: Final = 0.8
_LONG: Final = 0.01
"""Seconds of computing above which a call loses the GIL in its midst."""

_SWITCH_EVERY: Final = 0.0005

_SHARE: Final = 0.4
_ONE: Final = 1.3
_SHORT: Final = 0.002
"""Of its time a call has computed so much, and the process no more than so much: of the two one computed at a time. Shorter calls
say nothing: a thread may wait for that long before it is given a CPU."""


class Threads:
    """A pool of daemon threads, started as they are needed."""

    def __init__(self, limit: int, run: Callable[[int, Any], None], context: Context) -> None:
        """`run(call_id, item)` must not raise; it is called in a copy of `context`."""
        self._limit = limit
        self._run = run
        self._context = context
        self.waiting: dict[int, Any] = {}
        """What has not begun, by id, in the order it came."""
        self._running: dict[int, None] = {}
        self._ids: SimpleQueue[int | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._leaving: list[threading.Thread] = []
        """So many have been told to end, whichever of all of them take the word."""
        self._beside: dict[int, threading.Thread] = {}
        self._active: dict[int, None] = {}
        self._begun = 0
        self._turn = threading.Lock()
        self._turn_began = 0.0
        self._takes_turns = False
        self._yielded = 0.0
        self._looked = (0.0, 0.0)
        self._try_after = 0.0
        self._pause = 2 * _LOOK_EVERY
        self._switches_often = False
        self._switched_every = 0.0
        self._on_idle: Callable[[], object] | None = None
        self.on_start: Callable[[], object] | None = None
        """Called by `put` when it has started a thread of the pool."""
        self.may_begin: Callable[[], bool] | None = None
        """Asked by a thread before it begins a call, which else stays where it waits."""

    # From the loop

    def put(self, call_id: int, item: Any) -> None:
        """Queue a call.

        Raises:
            RuntimeError: no thread can be started, and there is none; the call is not queued.
        """
        self.waiting[call_id] = item
        if len(self._threads) < self._limit and len(self.waiting) + len(self._running) > len(self._threads):
            try:
                self._start_thread()
            except RuntimeError:
                if not self._threads:
                    del self.waiting[call_id]
                    raise
        self._ids.put(call_id)

    def take_back(self, call_id: int) -> Any | None:
        """The call, which had not begun and never will here; None: it had."""
        return self.waiting.pop(call_id, None)

    def free(self) -> int:
        """How many threads of the pool, started or not, have no call."""
        return self._limit - sum(call_id not in self._beside for call_id in list(self._running))

    def run_beside(self, call_id: int, item: Any) -> None:
        """Run a call now, in a thread of its own, whatever waits.

        Raises:
            RuntimeError: no thread can be started; the call is nowhere.
        """
        self.waiting[call_id] = item
        self._beside[call_id] = thread = threading.Thread(
            target=self._context.copy().run, args=(self._run_beside, call_id), name=f"percore-beside-{call_id}", daemon=True
        )
        try:
            thread.start()
        except RuntimeError:
            del self._beside[call_id], self.waiting[call_id]
            raise

    def is_idle(self) -> bool:
        """Whether nothing waits or runs."""
        return not self.waiting and not self._running

    def when_idle(self, tell: Callable[[], object]) -> None:
        """From now on call `tell`, in some thread, each time that a thread leaves nothing waiting or running behind.

        No wake-up is lost when the loop asks `is_idle` after this: 1. a thread has answered its call, and still counts as running;
        2. the loop asks and hears that something runs; 3. the thread leaves, and now tells.
        """
        self._on_idle = tell

    @property
    def begun(self) -> int:
        """How many calls the pool has begun, about: while it stays the same, none is begun."""
        return self._begun

    def end_idle(self) -> bool:
        """End the threads of the pool that have nothing to do; calls that come later have new ones. Whether any thread is left."""
        idle = len(self._threads) - len(self.waiting) - (self._limit - self.free())
        for _ in range(idle):  # whoever takes the word ends: one that has just ended its call, perhaps, instead of another
            self._leaving.append(self._threads.pop())
            self._ids.put(None)
        self._leaving = [thread for thread in self._leaving if thread.is_alive()]
        return bool(self._threads)

    def stop(self) -> None:
        """End every thread that is not in a call; the others are daemons."""
        self._switch_often(is_wanted=False)
        for _ in self._threads:
            self._ids.put(None)

    def join(self) -> None:
        """Wait for threads that were stopped; for workers that share a process with others."""
        for thread in [*self._threads, *self._leaving, *self._beside.values()]:
            thread.join()

    def _start_thread(self) -> None:
        thread = threading.Thread(
            target=self._context.copy().run, args=(self._work,), name=f"percore-{len(self._threads)}", daemon=True
        )
        thread.start()
        self._threads.append(thread)
        if self.on_start is not None:
            self.on_start()

    # In a thread

    def _work(self) -> None:
        get = self._ids.get
        while (call_id := get()) is not None:
            self._begin(call_id, self._run_one)

    def _run_beside(self, call_id: int) -> None:
        self._begin(call_id, self._run)
        del self._beside[call_id]

    def _begin(self, call_id: int, run: Callable[[int, Any], None]) -> None:
        if self.may_begin is not None and not self.may_begin():
            return
        # In `running` before it leaves `waiting`: at no moment does the call seem to be nowhere.
        self._running[call_id] = None
        item = self.waiting.pop(call_id, None)
        if item is not None:
            run(call_id, item)
            item = None
        del self._running[call_id]
        if self._on_idle is not None and self.is_idle():
            self._on_idle()

    def _run_one(self, call_id: int, item: Any) -> None:
        has_turn = self._takes_turns and self._wait_for_turn()
        self._active[call_id] = None
        self._begun = begun = self._begun + 1
        is_alone = len(self._active) == 1
        wall = self._turn_began = time.perf_counter()
        cpu, process = time.thread_time(), time.process_time()
        try:
            self._run(call_id, item)
        finally:
            cpu = time.thread_time() - cpu
            if self._switches_often is not (cpu > _LONG):
                self._switch_often(is_wanted=cpu > _LONG)
            wall = time.perf_counter() - wall
            if is_alone and self._begun == begun:
                self._measured(is_busy=cpu > 0.5 * wall)
            elif cpu > max(_SHARE * wall, _SHORT) and time.process_time() - process < _ONE * wall:
                self._measured(is_busy=True)
            del self._active[call_id]
            if has_turn:
                self._turn.release()
        self._give_way()

    def _measured(self, *, is_busy: bool) -> None:
        self._takes_turns = is_busy
        if is_busy:
            self._pause = 2 * _LOOK_EVERY

    def _switch_often(self, *, is_wanted: bool) -> None:
        """Have the interpreter hand the GIL over often, or as often as it did before."""
        if self._switches_often is is_wanted:
            return
        self._switches_often = is_wanted
        if is_wanted:
            # The longest that was seen: another thread may have shortened it in this very moment.
            self._switched_every = max(self._switched_every, sys.getswitchinterval())
            sys.setswitchinterval(min(_SWITCH_EVERY, self._switched_every))
        else:
            sys.setswitchinterval(self._switched_every)

    def _wait_for_turn(self) -> bool:
        """Whether the turn is ours. If not, turns are over."""
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

    def _give_way(self) -> None:
        """Let the loop have the GIL for a moment, as often as it would ask for it itself."""
        now = time.perf_counter()
        if now - self._yielded < _YIELD_EVERY:
            return
        self._yielded = now
        if not self._takes_turns and now - self._looked[0] > _LOOK_EVERY:
            self._look(now)
        time.sleep(_YIELD_FOR)

    def _look(self, now: float) -> None:
        """Calls run beside each other: try turns if the process keeps a CPU busy, whoever in it does."""
        cpu = time.process_time()
        (before, cpu_before), self._looked = self._looked, (now, cpu)
        if now > self._try_after and cpu - cpu_before > _BUSY * (now - before):
            self._takes_turns = True
            self._try_after = now + self._pause
            self._pause = min(_LONGEST_PAUSE, 2 * self._pause)
