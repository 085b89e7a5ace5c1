"""Plain functions in a worker: calls and batches on threads.

A result is sent as soon as it exists, with one exception. While more than two calls per thread wait, the results of slow calls are
collected, and a timer of the loop sends them. The supervisor then wakes up once for several results, and so does this loop for the
calls that the supervisor sends in their place.
"""

import asyncio
import threading
import time
from collections.abc import Callable
from contextvars import copy_context
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Protocol

from percore._common.fault_points import POINTS, point
from percore._common.system import IS_FREE_THREADED
from percore._protocol.messages import CANCELLED, ENDED, HOLDING, MARK_WORDS, RETURNED, STARTED, TIMED_OUT, VALUE, Body, StartMarks
from percore._worker.answers import Answers, ItemFailed, WorkerFunction
from percore._worker.batches import KEEP, BatchResults, WorkerBatch, item_id
from percore._worker.context import of_id
from percore._worker.pacing import Pacing
from percore._worker.recalls import Item, Recalls, Streams
from percore._worker.sampling import UNGAUGED, FunctionGauges
from percore._worker.streams import ThreadStream
from percore._worker.terms import Terms, Variables
from percore._worker.threads import Threads
from percore._worker.timeouts import Timeouts
from percore._worker.traced import Unpack, traced_batch, traced_plain

if TYPE_CHECKING:
    from percore._protocol.interfaces import WorkerChannel

_KEEP_RESULTS: Final = 0.01
"""Seconds that the result of a slow call may wait for other results. Sent alone, it would cost the supervisor a wake-up."""

_SLOW_NS: Final = 20_000_000
"""Nanoseconds after which a call counts as slow."""

_LATE_NS: Final = 100_000_000
"""Nanoseconds without a tick of the timer after which the loop counts as blocked. The threads then send results themselves."""

_FIRST_LOOK: Final = 0.005
_LOOKS: Final = 0.01
"""Seconds between two looks at the calls that others wait for, as long as any is held."""

_IDLE: Final = 1.0
"""Seconds after which idle threads end, in a Python without a GIL.

There, if one thread has created an object and another thread drops the last reference, the object is freed only when the first
thread next runs. So a sleeping thread of the pool would keep alive what its calls created: large results, views of shared memory,
shared objects. A thread that has ended keeps nothing alive.
"""


class Ends(Protocol):
    """The nested calls of a worker's calls."""

    open: dict[int, Any]
    """Those of each call."""

    def left(self, call_id: int) -> bool:
        """End those of a call that is about to be answered. Return whether the call was cancelled while it had nested calls."""

    def fail(self, call_id: int, error: Callable[[], BaseException], *, refuses: bool = True) -> None:
        """End those of a call that goes on. `refuses`: it can make no more."""


class NoNested:
    """Of a worker without nested calls."""

    def __init__(self) -> None:
        self.open: dict[int, Any] = {}

    def left(self, call_id: int) -> bool:
        """There are none."""
        return False

    def fail(self, call_id: int, error: Callable[[], BaseException], *, refuses: bool = True) -> None:
        """There are none."""


class PlainCalls:
    """Runs plain functions. The loop calls the methods, unless their docstring says otherwise."""

    def __init__(  # noqa: PLR0913, PLR0917  # parts of one worker, put together in one place
        self,
        channel: "WorkerChannel",
        answers: Answers,
        marks: StartMarks,
        threads: int,
        initializer: Callable[[], Callable[[], object]] | None,
        variables: Variables,
        hand_over: Callable[..., None],
        *,
        has_spare: bool = False,
    ) -> None:
        """`initializer` unpickles and returns the user's thread initializer. `has_spare`: as for `Pacing`.

        If a plain function returns an awaitable, its thread calls `hand_over(call_id, awaitable, deadline, gauges)`.
        """
        self._channel = channel
        self._loop: asyncio.AbstractEventLoop = channel.loop
        self._answers = answers
        self._unpack: Unpack = answers.unpack
        self._passes = answers.passes
        self._marks = marks
        self._mask = len(marks) // MARK_WORDS - 1
        self._initializer = initializer
        self._variables = variables
        self._tracing = variables.tracing
        if self._tracing is not None:
            self._unpack = traced_plain(self._tracing, answers.unpack)
        self._hand_over = hand_over
        self._thread = threading.local()
        self._batches: dict[int, WorkerBatch] = {}
        self.streams: Streams = {}
        """The streams of this worker that have not ended, also those of tasks."""
        self._timeouts = Timeouts(self._loop, marks, self._expired)
        self._overdue: set[int] = set()
        """Calls that have exceeded their timeout and run on. Some may have ended since."""
        self._keeps_watch = False
        self._keeps_results: asyncio.TimerHandle | None = None
        self._sent_at = 0
        self._enough = 2 * threads
        pacing = None if IS_FREE_THREADED or threads == 1 else Pacing(threads, has_spare=has_spare)
        self.threads = Threads(threads, self._run, copy_context(), pacing)
        self.threads.on_due = lambda: self._loop.call_soon_threadsafe(self.threads.spread)
        self._looks: asyncio.TimerHandle | None = None
        self._told = False
        """Whether the supervisor knows that calls are held here."""
        self.recalls = Recalls(channel, self.threads, self._batches, self.streams, self._mask)
        self._idles: asyncio.TimerHandle | None = None
        self.families: Ends = NoNested()
        """The nested calls of this worker's calls. The server sets it."""
        self._begun = 0
        """How many calls the pool had begun at the last check for idle threads."""
        if IS_FREE_THREADED:
            self.threads.on_start = self._watch_idle

    def put(self, call_id: int, item: Item | WorkerBatch) -> None:
        """Queue a call or a batch.

        Raises:
            RuntimeError: the pool has no thread and cannot start one.
        """
        terms = item.terms if isinstance(item, WorkerBatch) else item[2]
        if terms is not None and terms.is_broadcast:
            self.threads.run_beside(call_id, item)
        elif isinstance(item, WorkerBatch):
            self._put_batch(call_id, item)
        elif self.threads.put(call_id, item, item[0]) and self._looks is None:
            self._looks = self._loop.call_later(_FIRST_LOOK, self._look)
        if self._keeps_results is None:
            self._keep_results()

    def put_stream(self, call_id: int, function: WorkerFunction | None, body: Body, terms: Terms) -> None:
        """Queue a stream.

        Raises:
            RuntimeError: as `put`.
        """
        # As `_put_batch`: register it first.
        stream = ThreadStream(self._channel, self._answers, call_id, terms.prefetch, self.threads, terms.patience)
        self.streams[call_id] = stream
        try:
            self.threads.put(call_id, partial(self._run_stream, call_id, stream, function, body, terms), is_long=True)
        except RuntimeError:
            del self.streams[call_id]
            raise
        if self._keeps_results is None:  # it waits, too: with it, there may be enough calls for threads to collect results
            self._keep_results()

    def _look(self) -> None:
        """Let held calls begin if those before them wait, and tell the supervisor whether any is held now."""
        self._looks = None
        is_held = self.threads.look()
        if is_held:
            self._looks = self._loop.call_later(_LOOKS, self._look)
        if is_held is not self._told or (is_held and self.recalls.was_asked):
            self._told = is_held
            self.recalls.was_asked = False
            self._channel.send(HOLDING, 0, is_held)

    def _watch_idle(self) -> None:
        if self._idles is None:
            self._idles = self._loop.call_later(_IDLE, self._end_idle)

    def _end_idle(self) -> None:
        """End the idle threads if no call has begun since the last check, and check again later while threads are left."""
        self._idles = None
        before, self._begun = self._begun, self.threads.begun
        if self._begun != before or self.threads.end_idle():
            self._watch_idle()

    def _keep_results(self) -> None:
        """Set the timer that sends collected results, if enough calls wait here to keep the threads busy in the meantime."""
        is_enough = len(self.threads.waiting) > self._enough
        self._keeps_results = self._loop.call_later(_KEEP_RESULTS, self._send_results) if is_enough else None

    def _send_results(self) -> None:
        # Set the timer before the flush: if a thread still finds enough calls, its result is flushed here, or by the next timer.
        self._keep_results()
        self._sent_at = time.monotonic_ns()
        self._channel.flush()

    def _send_result(self, op: int, call_id: int, body: Body) -> None:
        """Send the result of a call, or keep it for the timer if the call was slow. From a thread."""
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
        """Stop the timers and the threads. All results have been sent by then, or no call waits for them."""
        if self._keeps_results is not None:
            self._keeps_results.cancel()
        for timer in (self._idles, self._looks):
            if timer is not None:
                timer.cancel()
        self._timeouts.stop()
        self.threads.stop()

    def _put_batch(self, call_id: int, batch: WorkerBatch) -> None:
        # Register it first, so that `cancel` and `recall` reach the batch at all times, also while a thread begins it.
        self._batches[call_id] = batch
        try:
            is_held = self.threads.put(call_id, batch, batch.function)
        except RuntimeError:
            del self._batches[call_id]
            raise
        if is_held and self._looks is None:
            self._looks = self._loop.call_later(_FIRST_LOOK, self._look)
        if not self._keeps_watch and batch.end > 1:  # the result of a single item is sent at once
            self._keeps_watch = True
            self._loop.call_later(KEEP, self._send_kept)

    def _send_kept(self) -> None:
        """Send results that wait behind a slow item. Their thread is busy with that item, so the loop does this."""
        batches = [batch for batch in self._batches.values() if batch.end > 1]
        self._keeps_watch = bool(batches)
        if batches:  # before they are sent, which may fail
            self._loop.call_later(KEEP, self._send_kept)
        for batch in batches:
            if batch.results is not None:
                batch.results.flush_kept()

    def cancel(self, call_id: int, wanted: int | None) -> bool:
        """Cancel a call that has not begun; of a batch, the items from `wanted` on. True if a whole call was cancelled."""
        if wanted is None:
            if self.threads.take_back(call_id) is not None:
                self.streams.pop(call_id, None)
                return True
            if (stream := self.streams.get(call_id)) is not None:
                stream.close()
            return False
        batch = self._batches.get(call_id)
        if batch is None:
            return False
        if wanted == 0 and batch.begun_at is None:
            # An empty batch must not begin: another call will soon have its id and the place of its start mark.
            self.recalls.take_back(call_id)
        elif count := batch.give_up(batch.end - wanted):
            self._channel.send(RETURNED, call_id, count)
        return False

    # In a thread

    def step_aside(self, call_id: int) -> None:
        """Let another thread run while this call waits for its nested calls. Does nothing for a call that is on no pool thread.

        Raises:
            RuntimeError: another thread is needed and cannot be started.
        """
        if self.threads.step_aside(call_id) and call_id in self._batches:
            self._loop.call_soon_threadsafe(self.recalls.give_rest_back, call_id)

    def come_back(self, call_id: int) -> None:
        """Wait until this call may run again."""
        if self.threads.come_back(call_id):
            self._loop.call_soon_threadsafe(self.threads.trim)

    def _run(self, call_id: int, item: Item | WorkerBatch) -> None:
        """Run a call or a batch in this thread and answer it. Never raises."""
        of_id.set(call_id)
        word = (call_id & self._mask) * MARK_WORDS
        marks = self._marks
        marks[word + 1] = time.monotonic_ns()
        marks[word + 2] = 0
        marks[word] = call_id  # last: this makes the mark valid
        if POINTS:
            point("worker.call.marked")
        if isinstance(item, WorkerBatch):
            item.begun_at = time.perf_counter()
            try:
                self._in_context(call_id, item.terms, self._run_items, call_id, item, word + 2)
            finally:
                del self._batches[call_id]
                if self.families.open:
                    self.families.left(call_id)
            return
        function, body, terms = item
        if terms is None:
            self._run_call(call_id, function, body, None)
        elif terms.is_too_late():
            marks[word] = 0
            self._channel.send_from_thread(RETURNED, call_id, None)
        else:
            if terms.announces:
                self._channel.send_from_thread(STARTED, call_id, None)
            self._in_context(call_id, terms, self._run_call, call_id, function, body, terms.timeout)

    def _run_stream(self, call_id: int, stream: ThreadStream, function: WorkerFunction | None, body: Body, terms: Terms) -> None:
        """Run a stream in this thread and answer it. Never raises."""
        of_id.set(call_id)
        word = (call_id & self._mask) * MARK_WORDS
        self._marks[word + 1] = time.monotonic_ns()
        self._marks[word] = call_id
        if POINTS:
            point("worker.call.marked")
        if terms.announces:
            self._channel.send_from_thread(STARTED, call_id, None)
        try:
            self._in_context(call_id, terms, self._run_generator, call_id, stream, function, body)
        finally:
            del self.streams[call_id]

    def _run_generator(self, call_id: int, stream: ThreadStream, function: WorkerFunction | None, body: Body) -> None:
        send = self._channel.send_from_thread
        try:
            self._initialize()
            fn, args, kwargs, stream.gauges = self._answers.unpack(call_id, function, body, send)
            if POINTS:
                point("worker.call.running")
            if self._tracing is None:
                stream.run(fn, args, kwargs)
            else:
                with self._tracing.around(fn):
                    stream.run(fn, args, kwargs)
        except BaseException as error:
            self._measure(stream.gauges, call_id)
            was_cancelled = bool(self.families.open) and self.families.left(call_id)
            if stream.is_abandoned:
                return
            if was_cancelled and stream.is_closing and isinstance(error, asyncio.CancelledError):  # of a nested call
                send(CANCELLED, call_id, None)
            else:
                self._answers.error(call_id, error.error if type(error) is ItemFailed else error, send)
        else:
            self._measure(stream.gauges, call_id)
            if self.families.open:
                self.families.left(call_id)
            if not stream.is_abandoned:
                send(CANCELLED if stream.is_closing else ENDED, call_id, None)

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
        """Answer a call, or all items of a batch, with an error that keeps them from running."""
        if type(args[1]) is not WorkerBatch:
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
        """Run the user's initializer before the first call of this thread. If it fails, the next call tries again."""
        if self._initializer is not None and not getattr(self._thread, "is_ready", False):
            self._initializer()()
            self._thread.is_ready = True

    def _run_call(  # noqa: C901, PLR0912  # each further function would cost every call
        self, call_id: int, function: WorkerFunction | None, body: Body, timeout: float | None
    ) -> None:
        send, gauges = self._channel.send_from_thread, UNGAUGED
        if timeout is not None and self._timeouts.begin(call_id, timeout):
            self._loop.call_soon_threadsafe(self._timeouts.look)
        try:
            self._initialize()
            fn, args, kwargs, gauges = self._unpack(call_id, function, body, send)
            if POINTS:
                point("worker.call.running")
            result = fn(*args, **kwargs) if kwargs else fn(*args)
            passes = self._passes(result)
            is_awaitable = not passes and hasattr(type(result), "__await__")  # may run code of a metaclass
        except BaseException as error:
            self._measure(gauges, call_id)
            if self.families.open and self.families.left(call_id) and isinstance(error, asyncio.CancelledError):
                send(CANCELLED, call_id, None)
            else:
                self._answers.error(call_id, error, send)
        else:
            if not is_awaitable:
                self._measure(gauges, call_id)
                if self.families.open:
                    self.families.left(call_id)
            if passes:
                if POINTS:
                    point("worker.outcome.ready")
                self._send_result(VALUE, call_id, result)
            elif is_awaitable:
                self._hand_over(call_id, result, None if timeout is None else self._deadline(call_id, timeout), gauges)
            else:
                self._answers.result(call_id, result, self._send_result, gauges)
        finally:
            if timeout is not None:
                self._timeouts.end(call_id)

    def _measure(self, gauges: FunctionGauges, call_id: int) -> None:
        """Measure for how long a call has run, if it is due. Call it before the call is answered: then its mark is its own."""
        gauges.left -= 1
        if gauges.left < 0:
            gauges.took(time.monotonic_ns() - self._marks[(call_id & self._mask) * MARK_WORDS + 1])

    def _run_items(self, call_id: int, batch: WorkerBatch, word: int) -> None:
        function = batch.function

        def late(*args: Any, **kwargs: Any) -> Any:
            self._initialize()
            return self._answers.function(function)(*args, **kwargs)

        fn = late if function.fn is None or self._initializer is not None else function.fn
        send = self._send_result if batch.end == 1 else self._channel.send_from_thread
        results = BatchResults(call_id, function, self._answers, send, self._hand_over)
        if self._tracing is None:
            batch.run(results, fn, self._marks, word)
        else:
            with traced_batch(self._tracing, self._answers, function, batch.end, fn) as traced:
                batch.run(results, traced, self._marks, word)

    # Time

    def _deadline(self, call_id: int, timeout: float) -> float:
        """Return when the time of a call is over, as a time of the loop."""
        has_run = time.monotonic() - self._marks[(call_id & self._mask) * MARK_WORDS + 1] / 1e9
        return self._loop.time() + timeout - has_run

    def _expired(self, call_id: int, _seconds: float) -> None:
        self._overdue = set(filter(self.threads.runs, (*self._overdue, call_id)))  # first: see `Families.of`
        self._channel.send(TIMED_OUT, call_id, None)
        self.families.fail(call_id, caller_overran)

    def has_expired(self, call_id: int) -> bool:
        """Whether a call that runs on has exceeded its timeout."""
        return call_id in self._overdue


def caller_overran() -> TimeoutError:
    return TimeoutError("the call that waits for this one has run for longer than its timeout")
