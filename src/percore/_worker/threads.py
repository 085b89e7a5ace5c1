"""The thread pool of a worker, which runs plain functions.

`PlainCalls` queues the calls. They wait in a dict; the queue carries only their ids. The loop can take a call back by id until a
thread begins it.

Guarantees:

- A call begins once, or is taken back: if a thread and the loop both want it, `dict.pop` gives it to exactly one of them.
- From `put` until its end, a call is in `waiting`, in `_running`, or for a moment in both. So `is_idle` is never true too early.
- No exception is lost: one outside a call, which may have cost that call its answer, goes to `on_failure`.

Assumptions:

- Single operations on a dict, a list or a SimpleQueue are atomic, with the GIL or by the locks of these objects. Nothing else is:
  the counters that several threads change (`_begun`, `_takes_turns`, the times) only affect the turns, and may be off by some.
- An id is given to one call at a time. The supervisor uses it again only once the call was answered or handed back.

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
"""

import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from contextvars import Context
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Final

from percore._common.system import IS_FREE_THREADED, has_gil
from percore._worker.pacing import Pacing

if TYPE_CHECKING:
    from percore._worker.answers import WorkerFunction

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


_NUDGE: Final = -1
"""In place of a call's id: the thread that takes it runs for a moment and waits again. Other negative numbers are inverted ids."""


def _run_long(_call_id: int, item: Callable[[], None]) -> None:
    item()


class SwitchInterval:
    """The switch interval of this interpreter. It is shorter while any pool of the process has a long call."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pools: set[Threads] = set()
        self._usual = 0.0

    def shorten(self, pool: "Threads", *, is_wanted: bool) -> None:
        """Shorten the interval for a pool, or no longer. Any thread may call this."""
        with self._lock:
            was_short = bool(self._pools)
            pool.switches_often = is_wanted
            (self._pools.add if is_wanted else self._pools.discard)(pool)
            if self._pools and not was_short:
                self._usual = sys.getswitchinterval()
                sys.setswitchinterval(min(_SWITCH_EVERY, self._usual))
            elif was_short and not self._pools:
                sys.setswitchinterval(self._usual)


_interval: Final = SwitchInterval()


def _raise(error: BaseException) -> None:
    raise error


class Threads:
    """A pool of daemon threads, started as they are needed; or the main thread alone, if it calls `work`."""

    may_switch_often = True
    """Whether this pool may shorten the switch interval: the process is the worker's own."""

    def __init__(  # noqa: PLR0915  # one state
        self, limit: int, run: Callable[[int, Any], None], context: Context, pacing: Pacing | None = None
    ) -> None:
        """`run(call_id, item)` must not raise; it is called in a copy of `context`. `pacing`: None if no call is held."""
        self._limit = limit
        self.pacing = pacing
        self._paced = {} if pacing is None else pacing.paces
        self._run = run
        self._context = context
        self.waiting: dict[int, Any] = {}
        """Calls that have not begun, by id, oldest first."""
        self._running: dict[int, None] = {}
        self._ids: SimpleQueue[int | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._leaving: list[threading.Thread] = []
        """As many threads as were told to end. The threads that end may be others of the pool."""
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
        self.switches_often = False
        """Whether this pool has shortened the switch interval."""
        self._on_idle: Callable[[], object] | None = None
        self._is_main = False
        self.on_due: Callable[[], object] | None = None
        """A thread calls this if calls may begin now that need further threads, for `spread`."""
        self.on_start: Callable[[], object] | None = None
        """`put` calls this after it has started a thread of the pool, and before each call of the main thread."""
        self.on_failure: Callable[[BaseException], object] = _raise
        """Called with an exception that ends a thread, except the main one. The call that it was about to answer may be lost."""
        self._aside: set[int] = set()
        """Calls whose thread waits for nested calls."""
        self._is_crowded = False
        """Whether a call has ever stepped aside. There may then be more threads than the limit, and `_gate` decides which run."""
        self._gate = threading.Lock()
        self._back: deque[tuple[int, threading.Lock]] = deque()
        """Calls that want to go on, in order, with the locks that their threads wait for."""
        self._entering: deque[tuple[int, threading.Lock]] = deque()
        """As `_back`, of calls that are about to begin."""
        self.may_begin: Callable[[], bool] | None = None
        """A thread calls this before it begins a call. If it returns False, the call keeps waiting."""

    # From the main thread

    def use_main(self) -> None:
        """Make the calling thread the only one of this pool, whose limit is 1. Call it before the first call, and `work` next."""
        self._is_main = True
        self._threads.append(threading.current_thread())

    def work(self) -> None:
        """Run the calls in this thread until `stop`.

        An exception outside a call propagates, such as one that a signal handler of the user has raised too late. A call
        may then be lost, so the process must end.
        """
        self._context.copy().run(self._work)

    # From the loop

    def put(self, call_id: int, item: Any, function: "WorkerFunction | None" = None, *, is_long: bool = False) -> bool:
        """Queue a call. Return whether it is held.

        A long call takes no turns and is not measured; `item` is then a function, which runs it and never raises.

        `function`: that of the call, which is held while others of its calls compute; None: it is never held.

        Raises:
            RuntimeError: the pool has no thread and cannot start one; the call is not queued.
        """
        self.waiting[call_id] = item
        if function is not None and function.is_paced and self._holds(call_id, function):
            return True
        aside = len(self._aside)
        if len(self._threads) < self._limit + aside and self._needs_thread():
            try:
                self._start_thread()
            except RuntimeError:
                if len(self._threads) <= aside:
                    del self.waiting[call_id]
                    if self.pacing is not None:
                        self._release(self.pacing.left(call_id))
                    raise
        if self._is_main and self.on_start is not None:
            self.on_start()
        self._ids.put(~call_id if is_long else call_id)
        return False

    def _holds(self, call_id: int, function: "WorkerFunction") -> bool:
        """Return whether a call of a function that was not known to be open is held."""
        if self.pacing is None:
            function.is_paced = False
            return False
        pace = function.pace
        if pace is None:
            pace = function.pace = self.pacing.new()
        if pace.is_open:
            function.is_paced = False
            return False
        return self.pacing.holds(call_id, pace)

    def _needs_thread(self) -> bool:
        """Whether there are fewer threads than calls that run, or wait and are not held."""
        held = 0 if self.pacing is None else self.pacing.held
        return len(self.waiting) - held + len(self._running) > len(self._threads)

    def spread(self) -> None:
        """Start the threads that calls need which are held no more."""
        while len(self._threads) < self._limit + len(self._aside) and self._needs_thread():
            try:
                self._start_thread()
            except RuntimeError:  # there is one at least: the calls were held because another one ran
                return

    def look(self) -> bool:
        """Let held calls begin if the calls before them wait. Return whether any call is held then."""
        assert self.pacing is not None
        self._release(self.pacing.look())
        self.spread()
        return self.pacing.held > 0

    def _release(self, due: list[int]) -> None:
        """Let calls begin that were held. Any thread may call this."""
        for call_id in due:
            self._ids.put(call_id)

    def take_back(self, call_id: int) -> Any | None:
        """Remove a call that has not begun and return it. None if it has begun."""
        item = self.waiting.pop(call_id, None)
        if item is not None and self.pacing is not None and self.pacing.paces:
            self._release(self.pacing.left(call_id))
        return item

    def free(self) -> int:
        """The number of threads that have no call. Threads that are not started yet count, up to the limit."""
        return self._limit - self._busy()

    def _busy(self) -> int:
        """The number of threads of the pool that run a call."""
        return sum(call_id not in self._beside and call_id not in self._aside for call_id in list(self._running))

    def trim(self) -> None:
        """End threads that are more than the limit and the calls that are aside."""
        for _ in range(len(self._threads) - self._limit - len(self._aside)):
            self._leaving.append(self._threads.pop())
            self._ids.put(None)
        self._leaving = [thread for thread in self._leaving if thread.is_alive()]

    def run_beside(self, call_id: int, item: Any) -> None:
        """Run a call now, in a new thread outside the pool, ahead of all waiting calls.

        Raises:
            RuntimeError: no thread can be started; the call is not queued.
        """
        self.waiting[call_id] = item
        self._beside[call_id] = thread = threading.Thread(
            target=self._context.copy().run,
            args=(self._guard, self._run_beside, call_id),
            name=f"percore-beside-{call_id}",
            daemon=True,
        )
        try:
            thread.start()
        except RuntimeError:
            del self._beside[call_id], self.waiting[call_id]
            raise

    def runs(self, call_id: int) -> bool:
        """Whether a thread runs this call."""
        return call_id in self._running

    def is_idle(self) -> bool:
        """Whether no call waits or runs."""
        return not self.waiting and not self._running

    def when_idle(self, tell: Callable[[], object]) -> None:
        """Call `tell` from now on whenever a thread ends a call and no other call waits or runs. `tell` runs in that thread.

        The loop misses no wake-up if it checks `is_idle` after this call. A thread that has answered its call still counts as
        running, so `is_idle` is False. When the call stops counting, the thread calls `tell`.
        """
        self._on_idle = tell

    @property
    def begun(self) -> int:
        """Roughly how many calls the pool has begun. While the number stays the same, no call begins."""
        return self._begun

    def end_idle(self) -> bool:
        """End the idle threads of the pool. Later calls start new ones. Return whether any thread is left.

        The main thread cannot end. It runs for a moment instead, which has the same effect on what it keeps alive.
        """
        if self._is_main:
            self._ids.put(_NUDGE)
            return False
        idle = len(self._threads) - len(self.waiting) - self._busy() - len(self._aside)
        for _ in range(idle):  # any thread may take the None and end, perhaps one that has just finished a call
            self._leaving.append(self._threads.pop())
            self._ids.put(None)
        self._leaving = [thread for thread in self._leaving if thread.is_alive()]
        return bool(self._threads)

    def living(self) -> list[threading.Thread]:
        """Return the threads of the pool, and those beside it, that have begun and not ended. Any thread may call this."""
        return [thread for thread in [*self._threads, *list(self._beside.values())] if thread.is_alive()]

    def stop(self) -> None:
        """Tell the threads of the pool to end when no calls are left. They are daemons: the process does not wait for them."""
        if self.switches_often:
            _interval.shorten(self, is_wanted=False)
        for _ in self._threads:
            self._ids.put(None)

    def join(self) -> None:
        """Wait until the stopped threads have ended. For workers that share a process with other workers."""
        for thread in [*self._threads, *self._leaving, *self._beside.values()]:
            thread.join()

    def _start_thread(self) -> None:
        thread = threading.Thread(
            target=self._context.copy().run, args=(self._guard, self._work), name=f"percore-{len(self._threads)}", daemon=True
        )
        thread.start()
        self._threads.append(thread)
        if self.on_start is not None:
            self.on_start()

    # In a thread

    def _guard(self, work: Callable[..., None], *args: Any) -> None:
        try:
            work(*args)
        except BaseException as error:  # outside a call: one that a call's timer has raised in this thread, but too late
            self.on_failure(error)

    def _work(self) -> None:
        get = self._ids.get
        while (call_id := get()) is not None:
            if call_id >= 0:
                self._begin(call_id, self._run_one)
            elif call_id != _NUDGE:
                self._begin(~call_id, _run_long)

    def _run_beside(self, call_id: int) -> None:
        self._begin(call_id, self._run)
        del self._beside[call_id]

    def _begin(self, call_id: int, run: Callable[[int, Any], None]) -> None:
        if self.may_begin is not None and not self.may_begin():
            return
        # Add to `_running` before removing from `waiting`, so that the loop always finds the call in one of them.
        self._running[call_id] = None
        if self._is_crowded and call_id not in self._beside:
            self._enter(call_id)
        item = self.waiting.pop(call_id, None)
        if item is not None:
            run(call_id, item)
            item = None
        del self._running[call_id]
        if self._is_crowded:
            with self._gate:
                self._admit()
        if self._on_idle is not None and self.is_idle():
            self._on_idle()

    # Threads beyond the limit, while others wait for nested calls

    def step_aside(self, call_id: int) -> bool:
        """Let another thread run in place of that of a call. Return False, and do nothing, if the call is on no pool thread.

        Raises:
            RuntimeError: another thread is needed and cannot be started.
        """
        if call_id not in self._running or call_id in self._beside:
            return False
        with self._gate:
            self._is_crowded = True
            self._aside.add(call_id)
            if self.pacing is not None:
                self._release(self.pacing.left(call_id))
            self._admit()
            if self.waiting and len(self.waiting) + len(self._running) > len(self._threads):
                try:
                    self._start_thread()
                except RuntimeError:
                    self._aside.discard(call_id)
                    raise
        return True

    def come_back(self, call_id: int) -> bool:
        """Wait until fewer threads run than the limit. Return False, and do nothing, if the call is not aside."""
        if call_id not in self._aside:
            return False
        turn = threading.Lock()
        turn.acquire()
        with self._gate:
            self._back.append((call_id, turn))
            self._admit()
        turn.acquire()
        return True

    def _enter(self, call_id: int) -> None:
        """Wait, before a call begins, until fewer threads run than the limit."""
        turn = threading.Lock()
        turn.acquire()
        with self._gate:
            del self._running[call_id]
            self._entering.append((call_id, turn))
            self._admit()
        turn.acquire()

    def _admit(self) -> None:
        """Let threads go on, first those that come back. Call it with the gate held."""
        free = self.free()
        while free > 0 and self._back:
            call_id, turn = self._back.popleft()
            self._aside.discard(call_id)
            turn.release()
            free -= 1
        while free > 0 and self._entering:
            call_id, turn = self._entering.popleft()
            self._running[call_id] = None
            turn.release()
            free -= 1

    def _run_one(self, call_id: int, item: Any) -> None:
        if IS_FREE_THREADED and not has_gil():
            self._begun += 1
            self._run(call_id, item)
            return
        has_turn = self._takes_turns and self._wait_for_turn()
        self._active[call_id] = None
        self._begun = begun = self._begun + 1
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
                self._ended(call_id, cpu, getattr(item, "end", 1))
            elif wall > JOIN_AFTER:
                self._closes(item, wall, cpu, time.process_time() - process)
            if is_alone and self._begun == begun:
                self._measured(is_busy=cpu > 0.5 * wall)
            elif cpu > max(_SHARE * wall, _SHORT) and time.process_time() - process < _ONE * wall:
                self._measured(is_busy=True)
            del self._active[call_id]
            if has_turn:
                self._turn.release()
        if now - self._yielded >= _YIELD_EVERY:
            self.give_way()

    def _tell_begun(self, call_id: int) -> None:
        assert self.pacing is not None
        self.pacing.began(call_id)

    def _ended(self, call_id: int, cpu: float, items: int) -> None:
        assert self.pacing is not None
        due = self.pacing.ended(call_id, cpu, max(1, items))
        self._release(due)
        if len(due) > 1 and self.on_due is not None:  # this thread takes one of them
            self.on_due()

    def _closes(self, item: Any, seconds: float, cpu: float, process: float) -> None:
        """Let calls of this function begin one at a time from now on if this one, which was not paced, has computed for long."""
        function = item[0] if type(item) is tuple else getattr(item, "function", None)
        if self.pacing is not None and function is not None and function.pace is not None:
            function.is_paced = self.pacing.closes(function.pace, seconds, cpu, process, len(self._active))

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
