"""Plain functions in a worker: calls and batches on threads.

What a worker has not begun it hands back when it is recalled: waiting calls first, then parts of batches that take too long.
Results go when they are there. But where two calls a thread wait, those of calls that have taken long go with the loop's timer: one
wake-up of the supervisor for several of them, and one of this loop for what is sent in their place.
"""

import threading
import time
from collections.abc import Callable, Collection
from contextvars import copy_context
from typing import TYPE_CHECKING, Any, Final

from percore._ipc.channel import Channel
from percore._ipc.codec import is_inline_value
from percore._messages import RETURNED, TIMED_OUT, VALUE, Body
from percore._platform import IS_FREE_THREADED
from percore._points import POINTS, point
from percore._worker.answers import Answers, Function
from percore._worker.batches import KEEP, Batch, Results, item_id
from percore._worker.terms import Terms, Variables
from percore._worker.threads import Threads

if TYPE_CHECKING:
    import asyncio

MARK_WORDS: Final = 3
"""64-bit words of a start mark: the id of the call, the monotonic ns at which it began, how many of its items have begun."""

SPLIT_AFTER: Final = 0.002
"""Seconds that a batch may run before items of it are handed back: it was made to take one millisecond."""

_KEEP_RESULTS: Final = 0.01
"""Seconds that a call's result may wait for others: alone, it costs the supervisor a wake-up."""

_SLOW_NS: Final = 20_000_000
"""Nanoseconds that the call must have taken for that."""

_LATE_NS: Final = 100_000_000
"""After so many without a word from the timer the loop must be blocked: results wait for it no longer."""

_IDLE: Final = 1.0
"""Seconds after which threads that have had nothing to do end, in a Python without a GIL.

There an object that one thread has made is freed, where another thread lets go of it last, when the first one next runs: what calls
have made (large results, views of shared memory, shared objects) would be kept for as long as a thread of the pool sleeps. A thread
that has ended keeps nothing.
"""

Item = tuple[Function | None, Body, Terms | None]


class Plain:
    """Runs plain functions. Methods are the loop's unless they say otherwise."""

    def __init__(  # noqa: PLR0913, PLR0917  # parts of one worker, put together in one place
        self,
        channel: Channel,
        answers: Answers,
        marks: memoryview,
        threads: int,
        initializer: Callable[[], Callable[[], object]] | None,
        variables: Variables,
        hand_over: Callable[[int, Any, float | None], None],
    ) -> None:
        """`initializer` unpickles the user's. `hand_over` takes an awaitable that a function has returned, from its
        thread, and the time by which it has to be done."""
        self._channel = channel
        self._loop: asyncio.AbstractEventLoop = channel.loop
        self._answers = answers
        self._marks = marks
        self._mask = len(marks) // MARK_WORDS - 1
        self._initializer = initializer
        self._variables = variables
        self._hand_over = hand_over
        self._thread = threading.local()
        self._batches: dict[int, Batch] = {}
        self._timers: dict[int, asyncio.TimerHandle | None] = {}
        self._keeps_watch = False
        self._keeps_results: asyncio.TimerHandle | None = None
        self._sent_at = 0
        self._enough = 2 * threads
        self.threads = Threads(threads, self._run, copy_context())
        self._idles: asyncio.TimerHandle | None = None
        self._begun = 0
        """Calls that the pool had begun when it was looked at last."""
        if IS_FREE_THREADED:
            self.threads.on_start = self._watch_idle

    def put(self, call_id: int, item: Item | Batch) -> None:
        """Queue a call or a batch.

        Raises:
            RuntimeError: no thread can be started, and there is none.
        """
        terms = item.terms if isinstance(item, Batch) else item[2]
        if terms is not None and terms.is_beside:
            self.threads.run_beside(call_id, item)
        elif isinstance(item, Batch):
            self._put_batch(call_id, item)
        else:
            self.threads.put(call_id, item)
        if self._keeps_results is None:
            self._keep_results()

    def _watch_idle(self) -> None:
        if self._idles is None:
            self._idles = self._loop.call_later(_IDLE, self._end_idle)

    def _end_idle(self) -> None:
        """End threads that have begun nothing for a while, and look again while there are any."""
        self._idles = None
        before, self._begun = self._begun, self.threads.begun
        if self._begun != before or self.threads.end_idle():
            self._watch_idle()

    def _keep_results(self) -> None:
        """Where calls enough wait here, results may wait, too, for one another: nobody runs dry meanwhile."""
        is_enough = len(self.threads.waiting) > self._enough
        self._keeps_results = self._loop.call_later(_KEEP_RESULTS, self._send_results) if is_enough else None

    def _send_results(self) -> None:
        # In this order: a thread that still finds calls enough has kept its result before this goes, or there is a next time.
        self._keep_results()
        self._sent_at = time.monotonic_ns()
        self._channel.flush()

    def _send_result(self, op: int, call_id: int, body: Body) -> None:
        """From a thread: the result of a call. If that took its time, it may travel with others."""
        waiting = self.threads.waiting
        began = self._marks[(call_id & self._mask) * MARK_WORDS + 1]
        if len(waiting) > self._enough and (now := time.monotonic_ns()) - began > _SLOW_NS:
            self._channel.keep(op, call_id, body)
            if len(waiting) > self._enough and now - self._sent_at < _LATE_NS:
                return
            self._sent_at = now
            self._channel.flush()
        else:
            self._channel.send_from_thread(op, call_id, body)

    def stop(self) -> None:
        """Let go of the threads. All results have gone by then, or nobody waits for them."""
        if self._keeps_results is not None:
            self._keeps_results.cancel()
        if self._idles is not None:
            self._idles.cancel()
        self.threads.stop()

    def _put_batch(self, call_id: int, batch: Batch) -> None:
        # Known from now on: at no moment may one be out of reach because a thread is about to begin it.
        self._batches[call_id] = batch
        try:
            self.threads.put(call_id, batch)
        except RuntimeError:
            del self._batches[call_id]
            raise
        if not self._keeps_watch and batch.end > 1:  # the result of a single one goes when it is there
            self._keeps_watch = True
            self._loop.call_later(KEEP, self._send_kept)

    def _send_kept(self) -> None:
        """Results must not wait for an item behind them that takes its time. Their thread is in there, so it falls to the loop."""
        self._keeps_watch = False
        for batch in list(self._batches.values()):
            if batch.end > 1:
                self._keeps_watch = True
                if batch.results is not None:
                    batch.results.flush_kept()
        if self._keeps_watch:
            self._loop.call_later(KEEP, self._send_kept)

    def cancel(self, call_id: int, wanted: int | None) -> bool:
        """Do not begin this call; of a batch, the items from `wanted` on. Whether it was a call that had not begun."""
        if wanted is None:
            return self.threads.take_back(call_id) is not None
        batch = self._batches.get(call_id)
        if batch is None:
            return False
        if wanted == 0 and batch.begun_at is None:
            # It must not begin empty: its id, and the place of its start mark, are another call's soon.
            self._take_back(call_id)
        elif count := batch.give_up(batch.end - wanted):
            self._channel.send(RETURNED, call_id, count)
        return False

    # Handing back

    def recall(self, count: int, stay: Collection[int]) -> None:
        """Hand back about so many calls that have not begun, but none in the places that `stay`, and say when that is all."""
        if self._give_back(count, stay):
            self._channel.send(RETURNED, 0, None)
        else:
            self._split(count)

    def give_back_all(self) -> None:
        """Hand back everything that has not begun."""
        for call_id in reversed(list(self.threads.waiting)):
            self._take_back(call_id)
        for call_id, batch in list(self._batches.items()):
            if count := batch.give_up(batch.end):
                self._channel.send(RETURNED, call_id, count)

    def _give_back(self, most: int, stay: Collection[int] | None) -> int:
        """Hand back calls that wait for a thread. `stay`: None: all but batches, since calls that came later may have a key."""
        given = 0
        # What a free thread is about to begin would only come back here, and be asked for again, and again.
        waiting = [item for item in list(self.threads.waiting.items()) if not self._is_beside(item[1])][self.threads.free() :]
        for call_id, item in reversed(waiting):
            if given >= most:
                break
            if type(item) is Batch if stay is None else call_id & self._mask not in stay:
                given += self._take_back(call_id)
        return given

    def _is_beside(self, item: Item | Batch) -> bool:
        return type(item) is tuple and item[2] is not None and item[2].is_beside

    def _take_back(self, call_id: int) -> int:
        """Hand back a call, or a batch as a whole: how many; 0: it has begun."""
        item = self.threads.take_back(call_id)
        if item is None:
            return 0
        count = None
        if type(item) is Batch:
            count = len(item.items)
            del self._batches[call_id]
        self._channel.send(RETURNED, call_id, count)
        return count or 1

    def _split(self, most: int) -> None:
        """Half of what running batches have not begun goes back: at once if they run for longer than they were meant to."""
        now, wait, given = time.perf_counter(), 0.0, 0
        for call_id, batch in list(self._batches.items()):
            age = 0.0 if batch.begun_at is None else now - batch.begun_at
            if batch.items and age < SPLIT_AFTER:
                wait = max(wait, SPLIT_AFTER - age)
            elif count := batch.give_up((len(batch.items) + 1) // 2):
                given += count
                self._channel.send(RETURNED, call_id, count)
        if wait and not given:
            self._loop.call_later(wait, self._split_later, most)
        else:
            self._channel.send(RETURNED, 0, None)

    def _split_later(self, most: int) -> None:
        if self._give_back(most, None):
            self._channel.send(RETURNED, 0, None)
        else:
            self._split(most)

    # In a thread

    def _run(self, call_id: int, item: Item | Batch) -> None:
        """Run a call or a batch in this thread and answer it. Never raises."""
        word = (call_id & self._mask) * MARK_WORDS
        marks = self._marks
        marks[word + 1] = time.monotonic_ns()
        marks[word + 2] = 0
        marks[word] = call_id  # last: from now on the mark counts
        if POINTS:
            point("worker.call.marked")
        if isinstance(item, Batch):
            item.begun_at = time.perf_counter()
            try:
                self._in_context(call_id, item.terms, self._run_items, call_id, item, word + 2)
            finally:
                del self._batches[call_id]
            return
        function, body, terms = item
        if terms is None:
            self._run_call(call_id, function, body, None)
        else:
            self._in_context(call_id, terms, self._run_call, call_id, function, body, terms.timeout)

    def _in_context(self, call_id: int, terms: Terms | None, run: Callable[..., None], *args: Any) -> None:
        if terms is None or terms.values is None:
            run(*args)
            return
        try:
            context = self._variables.context(terms.values)
        except BaseException as error:
            self._fail(call_id, args, error)
            return
        context.run(run, *args)

    def _fail(self, call_id: int, args: tuple[Any, ...], error: BaseException) -> None:
        """Nothing of it can run."""
        if type(args[1]) is not Batch:
            self._answers.error(call_id, error, self._channel.send_from_thread)
            return
        for index in range(len(args[1].items)):
            try:
                args[1].items.popleft()
            except IndexError:  # the loop has taken the rest
                return
            self._marks[args[2]] = index + 1
            self._answers.error(item_id(call_id, index), error, self._channel.send_from_thread)

    def _initialize(self) -> None:
        """Before the first call of this thread. Where that fails the next call tries again."""
        if self._initializer is not None and not getattr(self._thread, "is_ready", False):
            self._initializer()()
            self._thread.is_ready = True

    def _run_call(self, call_id: int, function: Function | None, body: Body, timeout: float | None) -> None:
        send = self._channel.send_from_thread
        if timeout is not None:
            deadline = self._loop.time() + timeout
            self._loop.call_soon_threadsafe(self._watch, call_id, deadline)
        try:
            self._initialize()
            fn, args, kwargs = self._answers.unpack(call_id, function, body, send)
            if POINTS:
                point("worker.call.running")
            result = fn(*args, **kwargs) if kwargs else fn(*args)
            is_inline = is_inline_value(result)
            is_awaitable = not is_inline and hasattr(type(result), "__await__")  # a metaclass may have its say
        except BaseException as error:
            self._answers.error(call_id, error, send)
        else:
            if is_inline:
                if POINTS:
                    point("worker.outcome.ready")
                self._send_result(VALUE, call_id, result)
            elif is_awaitable:
                self._hand_over(call_id, result, None if timeout is None else deadline)
            else:
                self._answers.result(call_id, result, self._send_result)
        finally:
            if timeout is not None:
                self._loop.call_soon_threadsafe(self._unwatch, call_id)

    def _run_items(self, call_id: int, batch: Batch, word: int) -> None:
        function = batch.function

        def late(*args: Any, **kwargs: Any) -> Any:
            self._initialize()
            return self._answers.function(function)(*args, **kwargs)

        fn = late if function.fn is None or self._initializer is not None else function.fn
        send = self._send_result if batch.end == 1 else self._channel.send_from_thread
        results = Results(call_id, self._answers, send, self._hand_over)
        batch.run(results, fn, self._marks, word)

    # Time

    def _watch(self, call_id: int, deadline: float) -> None:
        self._timers[call_id] = self._loop.call_at(deadline, self._expired, call_id)

    def _unwatch(self, call_id: int) -> None:
        timer = self._timers.pop(call_id, None)
        if timer is not None:
            timer.cancel()

    def _expired(self, call_id: int) -> None:
        self._timers[call_id] = None
        self._channel.send(TIMED_OUT, call_id, None)
