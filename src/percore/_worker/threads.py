"""The thread pool of a worker, which runs plain functions.

`PlainCalls` queues the calls. They wait in a dict; the queue carries only their ids. The loop can take a call back by id until a
thread begins it.

Guarantees:

- A call begins once, or is taken back: if a thread and the loop both want it, `dict.pop` gives it to exactly one of them.
- From `put` until its end, a call is in `waiting`, in `_running`, or for a moment in both. So `is_idle` is never true too early.
- No exception is lost: one outside a call, which may have cost that call its answer, goes to `on_failure`.

Assumptions:

- Single operations on a dict, a list or a SimpleQueue are atomic, with the GIL or by the locks of these objects. Nothing else is.
- An id is given to one call at a time. The supervisor uses it again only once the call was answered or handed back.

`Turns` decides which of these threads compute at a time. It runs every call of the pool but those that are long or beside the pool.
It knows nothing of queues and threads, and this module knows nothing of time.
"""

import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from contextvars import Context
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Final

from percore._common.steps import step
from percore._common.system import limit_of_processes
from percore._worker.pacing import Pacing
from percore._worker.turns import Turns

if TYPE_CHECKING:
    from percore._worker.answers import WorkerFunction

_NUDGE: Final = -1
"""In place of a call's id: the thread that takes it runs for a moment and waits again. Other negative numbers are inverted ids."""


def started(thread: threading.Thread) -> threading.Thread:
    """Start a thread and return it.

    Raises:
        RuntimeError: the system starts no more threads; the text says which limit to raise.
    """
    try:
        thread.start()
    except RuntimeError as error:
        raise RuntimeError(f"no thread can be started: {limit_of_processes()}") from error
    return thread


def _run_long(_call_id: int, item: Callable[[], None]) -> None:
    item()


def _raise(error: BaseException) -> None:
    raise error


class Threads:
    """A pool of daemon threads, started as they are needed; or the main thread alone, if it calls `work`."""

    def __init__(self, limit: int, run: Callable[[int, Any], None], context: Context, pacing: Pacing | None = None) -> None:
        """`run(call_id, item)` must not raise; it is called in a copy of `context`. `pacing`: None if no call is held."""
        self._limit = limit
        self.pacing = pacing
        self.turns = Turns(run, pacing, self._let_begin)
        self.give_way: Callable[[], None] = self.turns.give_way
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
        self.take: Callable[[int], Any | None] = lambda call_id: self.waiting.pop(call_id, None)
        """A thread calls this to take a call from `waiting` and begin it. None: it must not, or the call was taken back."""

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

    def _let_begin(self, due: list[int]) -> None:
        """As `_release`, from the thread of the call whose end lets them begin."""
        self._release(due)
        if len(due) > 1 and self.on_due is not None:  # this thread takes one of them
            self.on_due()

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
            started(thread)
        except RuntimeError:
            del self._beside[call_id], self.waiting[call_id]
            raise

    def runs(self, call_id: int) -> bool:
        """Whether a thread runs this call."""
        return call_id in self._running

    def running(self) -> list[int]:
        """Return the calls that threads run. Any thread may call this."""
        return list(self._running)

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
        return self.turns.begun

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
        self.turns.stop()
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
        self._threads.append(started(thread))
        if self.on_start is not None:
            self.on_start()

    # In a thread

    def _guard(self, work: Callable[..., None], *args: Any) -> None:
        try:
            work(*args)
        except BaseException as error:  # outside a call: one that a call's timer has raised in this thread, but too late
            self.on_failure(error)

    def _work(self) -> None:
        get, run = self._ids.get, self.turns.run
        while (call_id := get()) is not None:
            if call_id >= 0:
                self._begin(call_id, run)
            elif call_id != _NUDGE:
                self._begin(~call_id, _run_long)

    def _run_beside(self, call_id: int) -> None:
        self._begin(call_id, self._run)
        del self._beside[call_id]

    def _begin(self, call_id: int, run: Callable[[int, Any], None]) -> None:
        # Add to `_running` before removing from `waiting`, so that the loop always finds the call in one of them.
        self._running[call_id] = None
        if self._is_crowded and call_id not in self._beside:
            self._enter(call_id)
        item = self.take(call_id)
        if item is not None:
            run(call_id, item)
            item = None
        del self._running[call_id]
        if self._is_crowded:
            self._leave(call_id)
        if self._on_idle is not None and self.is_idle():
            self._on_idle()

    # Threads beyond the limit, while others wait for nested calls

    @step
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

    @step
    def come_back(self, call_id: int) -> bool:
        """Wait until fewer threads run than the limit. Return False, and do nothing, if the call is not aside."""
        if call_id not in self._aside:
            return False
        turn = threading.Lock()
        turn.acquire()
        try:
            with self._gate:
                self._back.append((call_id, turn))
                self._admit()
            turn.acquire()
        except BaseException:  # of a signal handler of the user: the call stays aside, and nobody lets it go on any more
            with self._gate, suppress(ValueError):
                self._back.remove((call_id, turn))
            raise
        return True

    @step
    def _enter(self, call_id: int) -> None:
        """Wait, before a call begins, until fewer threads run than the limit."""
        turn = threading.Lock()
        turn.acquire()
        with self._gate:
            del self._running[call_id]
            self._entering.append((call_id, turn))
            self._admit()
        turn.acquire()

    @step
    def _leave(self, call_id: int) -> None:
        """Let threads go on, because a call has ended."""
        with self._gate:
            self._aside.discard(call_id)  # an exception between two steps may have left it
            self._admit()

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
