"""The server of a worker: it turns messages into tasks and calls on threads, and answers them.

Invariants:

- A call's start mark is set before its arguments are unpickled, because unpickling already runs user code.
- On the loop, user code runs only in `_run`, in the methods of `Answers` and in `Variables.context`. Any exception that it raises,
  including BaseException, becomes the outcome of its call.
- Each call is answered exactly once.
"""

import asyncio
import inspect
from collections import deque
from collections.abc import Callable, Iterable
from time import monotonic_ns
from typing import TYPE_CHECKING, Any, Final, cast

from percore._common.callables import qualified_name
from percore._common.errors import as_error, overrun
from percore._common.fault_points import POINTS, point
from percore._protocol.messages import (
    BATCH,
    BEGIN_BY,
    CANCEL,
    CANCELLED,
    CREDIT,
    DEFINE_TASK,
    DEFINE_THREAD,
    DRAIN,
    DRAINING,
    ENDED,
    FINISH,
    FORGET,
    ID_MASK,
    ONCE_TASK,
    ONCE_THREAD,
    RECALL,
    RETURNED,
    SHARE,
    STARTED,
    TERMS,
    TIMEOUT,
    UNDEFINE,
    VALUE,
    WITHDRAW,
    Body,
    Kind,
    Message,
    Payload,
)
from percore._protocol.start_marks import MARK_WORDS, StartMarks
from percore._worker.answers import Answers, ItemFailed, WorkerFunction
from percore._worker.batches import WorkerBatch, item_id
from percore._worker.context import of_id
from percore._worker.eager_tasks import task_starter
from percore._worker.families import Families
from percore._worker.plain_calls import PlainCalls
from percore._worker.sampling import UNGAUGED, FunctionGauges, Sampler
from percore._worker.shared_objects import WorkerShares
from percore._worker.streams import TaskStream
from percore._worker.terms import Terms, Variables, within
from percore._worker.threads import Threads
from percore._worker.timeouts import Timeouts
from percore._worker.traced import traced

if TYPE_CHECKING:
    from contextvars import Context
    from types import CoroutineType

    from percore._common.tracing import Tracing
    from percore._protocol.interfaces import WorkerChannel

TASK: Final = Kind.TASK


def _is_unbegun(task: asyncio.Task[None]) -> bool:
    return inspect.getcoroutinestate(cast("CoroutineType[Any, Any, None]", task.get_coro())) == inspect.CORO_CREATED


def _in_span(
    tracing: "Tracing", timeout: float | None, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any] | None
) -> tuple[Any, ...]:
    """Return the arguments of `traced` for a call. Its time is limited inside the span, which gets the error."""
    if timeout is None:
        return tracing, fn, fn, args, kwargs
    return tracing, fn, within, (timeout, fn, args, kwargs), None


def _late(fn: Callable[..., Any], seconds: float, error: BaseException) -> BaseException:
    """Return the error of a call that was cancelled because it has exceeded its timeout, and has ended by `error`."""
    if not isinstance(error, asyncio.CancelledError):
        return error
    late = overrun(qualified_name(fn), seconds)
    late.__cause__ = error
    return late


class Server:
    """Serves one channel. The loop calls the methods, unless their docstring says otherwise."""

    def __init__(  # noqa: PLR0913  # parts of one worker, put together in one place
        self,
        channel: "WorkerChannel",
        marks: StartMarks,
        *,
        threads: int,
        has_spare: bool = False,
        thread_initializer: Callable[[], Callable[[], object]] | None = None,
        variables: Variables | None = None,
        answers: Answers | None = None,
        sampler: Sampler | None = None,
    ) -> None:
        """`marks` has MARK_WORDS words per place; the number of places is a power of two.

        `has_spare`: whether there are CPUs for more than one plain call of this worker. `thread_initializer` unpickles and returns
        the user's thread initializer. `answers` defaults to `Answers(channel, sampler)`. `sampler`: None if nothing is measured.
        """
        self._channel = channel
        self._loop = channel.loop
        self._passes = channel.passes
        self._marks = marks
        self._mask = len(marks) // MARK_WORDS - 1
        assert not (self._mask + 1) & self._mask, "two calls at once could have one start mark"
        self._functions: dict[int, WorkerFunction] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._cancelled: set[int] = set()
        self._handed_over: dict[int, tuple[Any, float | None, FunctionGauges]] = {}
        self._terms: dict[int, Terms] = {}
        self._limits = Terms()
        """What BEGIN_BY and TIMEOUT have given."""
        self._limited: Terms | None = None
        """The terms of the calls that have none of their own, if `_limits` limit them. Then `_terms` has them under 0, the id of no
        call: the fast path of `receive` asks whether there are terms."""
        self._timeouts = Timeouts(self._loop, marks, self._overran)
        self._overruns: dict[int, float] = {}
        """The timeouts of the calls that have exceeded them, and were cancelled for it."""
        self._variables = Variables(()) if variables is None else variables
        self._tracing = self._variables.tracing
        self.shares = WorkerShares(channel)
        self.sampler = sampler
        self._answers = Answers(channel, sampler) if answers is None else answers
        self._plain = PlainCalls(
            channel, self._answers, marks, threads, thread_initializer, self._variables, self._hand_over, has_spare=has_spare
        )
        self._recalls = self._plain.recalls
        self._threads = self._plain.threads
        self._threads.on_failure = lambda error: self._loop.call_soon_threadsafe(self._thread_failed, error)
        self._streams = self._plain.streams
        self._noted: set[int] = set()
        """Calls that were cancelled or may have nested calls."""
        self.families = Families(channel, self._plain, self._variables, self.shares, self._noted)
        self._plain.families = self.families
        self.families.runs = self._runs
        self._start = task_starter(self._loop)
        self._is_draining = self._is_abandoned = False
        self._tickets: deque[None] = deque()
        self.finished: asyncio.Future[None] = self._loop.create_future()
        self._handlers: dict[int, Callable[[int, Any], object]] = {
            DEFINE_TASK: lambda number, payload: self._define(number, Kind.TASK, payload),
            DEFINE_THREAD: lambda number, payload: self._define(number, Kind.THREAD, payload),
            UNDEFINE: lambda number, _: self._functions.pop(number),
            CANCEL: self._cancel,
            RECALL: lambda count, stay: self._recalls.recall(count, frozenset(memoryview(stay).cast("I"))),
            FINISH: self._finish,
            ONCE_TASK: lambda call_id, body: self._start_task(call_id, None, body),
            ONCE_THREAD: lambda call_id, body: self._put_on_thread(call_id, None, body),
            BATCH: self._batch,
            TERMS: self._under,
            CREDIT: self._credit,
            BEGIN_BY: lambda _, when: self._limit(self._limits._replace(begin_by=when)),
            TIMEOUT: lambda _, seconds: self._limit(self._limits._replace(timeout=seconds)),
            WITHDRAW: lambda call_id, _: self._recalls.withdraw(call_id),
            DRAIN: lambda _, __: self.drain(),
            FORGET: self.shares.forget,
            SHARE: self.shares.meet,
            **self.families.handlers,
            **channel.own,
        }

    # Messages

    def receive(self, messages: Iterable[Message]) -> None:
        """Handle the messages of a frame, up to one that ends the channel. Raises for messages that no supervisor sends."""
        channel = self._channel
        for op, call_id, body in messages:
            if op > 0:
                function = self._functions[op]
                if function.kind == TASK:
                    fn = function.fn
                    if fn is None or type(body) is not tuple or self._is_draining or self._terms or POINTS:
                        self._start_task(call_id, function, body)
                    else:  # fast path of `_start_task`, which most calls take
                        place = (call_id & self._mask) * MARK_WORDS
                        marks = self._marks
                        marks[place + 1] = monotonic_ns()
                        marks[place] = call_id
                        task = self._start(self._run(call_id, fn, body, None, function.gauges), function.name, None)
                        if not task.done():
                            self._tasks[call_id] = task
                else:
                    self._put_on_thread(call_id, function, body)
            else:
                self._handlers[op](call_id, body)
            if not channel.is_open:
                return

    def limit(self, calls: int) -> None:
        """Begin at most this many calls. This worker drains when the last of them begins. Call it before the worker serves."""
        self._tickets.extend([None] * calls)
        self._threads.may_begin = self._take_ticket
        self.receive = self._receive_some  # type: ignore[method-assign]

    def _receive_some(self, messages: Iterable[Message]) -> None:
        """Like `receive`, with a limit on calls."""
        for message in messages:
            op, call_id, body = message
            is_task = op == ONCE_TASK or (op > 0 and self._functions[op].kind == TASK)
            if is_task and not self._is_draining:
                try:
                    self._tickets.pop()
                except IndexError:  # a thread has taken the last ticket, and `drain` is about to run
                    self._channel.send(RETURNED, call_id, None)
                    continue
                self._start_task(call_id, self._functions[op] if op > 0 else None, body)
                if not self._tickets:
                    self.drain()
            else:
                Server.receive(self, [message])
            if not self._channel.is_open:
                return

    def _take_ticket(self) -> bool:
        """Return whether a call may begin. From the thread that is about to begin it."""
        try:
            self._tickets.pop()
        except IndexError:  # `drain` is about to run and hands back the waiting calls
            return False
        if not self._tickets:
            self._loop.call_soon_threadsafe(self.drain)
        return True

    def _define(self, number: int, kind: int, payload: Payload) -> None:
        self._functions[number] = WorkerFunction(kind, payload)

    def _batch(self, call_id: int, body: bytes) -> None:
        number, bodies, is_bare = self._channel.unpack_items(body)
        if self._is_draining:
            self._channel.send(RETURNED, call_id, len(bodies))
            return
        try:
            self._plain.put(call_id, WorkerBatch(self._functions[number], bodies, is_bare, self._terms.pop(call_id, None)))
        except RuntimeError as error:  # as in `_put_on_thread`
            for index in range(len(bodies)):
                self._answers.error(item_id(call_id, index), error, self._channel.send)

    def _under(self, call_id: int, body: tuple[Any, ...] | None) -> None:
        if body is None:
            self._terms.pop(call_id, None)
        else:
            self._terms[call_id] = Terms(*body)

    def _credit(self, call_id: int, count: int) -> None:
        stream = self._streams.get(call_id)
        if stream is not None:  # else it has ended, and the supervisor is about to hear of it
            stream.credit(count)

    def _limit(self, limits: Terms) -> None:
        self._limits = limits
        if limits.begin_by is None and limits.timeout is None:
            self._limited = None
            self._terms.pop(0, None)
        else:
            self._limited = self._terms[0] = limits

    def _terms_of(self, call_id: int, body: Body) -> Terms | None:
        limited = self._limited if type(body) is not int else None  # a parcel may arrive later than the calls sent with it
        if call_id not in self._terms:
            return limited
        terms = self._terms.pop(call_id)
        return terms if limited is None else terms._replace(begin_by=limited.begin_by)

    def _cancel(self, call_id: int, wanted: int | None) -> None:
        if wanted is not None:
            self._plain.cancel(call_id, wanted)
            first = item_id(call_id, wanted)  # the ids of a batch's items ascend; items before `first` are still wanted
            for task_id in [one for one in (*self._tasks, *self._handed_over) if one & ID_MASK == call_id and one >= first]:
                self._cancel(task_id, None)
            return
        task = self._tasks.get(call_id)
        if call_id in self._handed_over or (task is not None and _is_unbegun(task)):
            # Its task is not created yet, or has not taken its first step. If cancelled now, it would end without an answer.
            self._loop.call_soon(self._cancel, call_id, None)
        elif task is not None:
            self._cancelled.add(call_id)
            self._noted.add(call_id)
            stream = self._streams.get(call_id)
            if stream is None:
                task.cancel()
            else:
                stream.close(task)
        elif self._plain.cancel(call_id, None):
            self._channel.send(CANCELLED, call_id, True)
        else:
            # The clean-up of a generator may make calls. A plain function is not told that it was cancelled.
            self.families.fail(call_id, asyncio.CancelledError, refuses=call_id not in self._streams)

    def _finish(self, _zero: int, _body: None) -> None:
        if self.sampler is not None:
            self.sampler.send()
        if not self.finished.done():
            self.finished.set_result(None)

    def _thread_failed(self, error: BaseException) -> None:
        """End the worker: a thread has ended outside a call, whose caller might otherwise wait for ever."""
        if not self.finished.done():
            self.finished.set_exception(as_error(error, "a thread"))

    def drain(self) -> None:
        """Accept no more calls, hand back those that have not begun, and finish when the last running call has been answered."""
        if self._is_draining or self.finished.done():
            return
        self._is_draining = True
        if POINTS:
            point("worker.draining")
        # Messages that do not fit into the ring or a slot are sent when the supervisor has read. Look again after each batch.
        self._channel.on_batch = self._look_soon
        self._channel.send(DRAINING, 0, None)
        self._recalls.give_back_all()
        self._threads.when_idle(lambda: self._loop.call_soon_threadsafe(self._look_drained))
        self._look_soon()

    def abandon(self) -> None:
        """After the lifespan has failed: accept no more calls, hand back those that have not begun, and cancel running tasks.

        The worker does not answer calls that end by this cancellation. The supervisor fails them when the worker ends.
        """
        self._is_draining = self._is_abandoned = True
        self._recalls.give_back_all()
        for stream in list(self._streams.values()):
            stream.abandon()
        for task in list(self._tasks.values()):
            task.cancel()

    def take_all(self) -> dict[int, int]:
        """Take back everything that has not begun, because the worker is given up: as `Recalls.take_all`. From any thread."""
        return self._recalls.take_all()

    def _look_soon(self) -> None:
        self._loop.call_soon(self._look_drained)  # after the flush that ends this iteration

    def _look_drained(self) -> None:
        # The threads first: a thread hands a call over before it ends it.
        has_calls = not self._threads.is_idle() or self._tasks or self._handed_over
        self._channel.flush()  # messages that were held back to share a wake-up, too
        if not has_calls and self._channel.is_flushed():
            self._finish(0, None)

    def stop(self) -> None:
        """Stop the threads and release the shared objects."""
        if self.sampler is not None:
            self.sampler.stop()
        self._timeouts.stop()
        self._plain.stop()
        self.shares.stop()

    def join(self) -> None:
        """Wait until the stopped threads have ended."""
        self._threads.join()

    @property
    def threads(self) -> Threads:
        """The threads of plain functions."""
        return self._threads

    def _runs(self, call_id: int) -> bool:
        """Whether a call runs. To be asked between the steps of tasks."""
        return call_id in self._tasks or call_id in self._handed_over or self._threads.runs(call_id)

    def own_tasks(self) -> set[asyncio.Task[Any]]:
        """Return the tasks of the calls that still run."""
        return set(self._tasks.values())

    # Coroutine functions

    def _start_task(self, call_id: int, function: WorkerFunction | None, body: Body) -> None:  # noqa: C901, PLR0912, PLR0915  # a call more would cost all with terms
        send = self._channel.send
        terms = self._terms_of(call_id, body) if self._terms else None
        if self._is_draining:
            send(RETURNED, call_id, None)
            return
        place, marks = (call_id & self._mask) * MARK_WORDS, self._marks
        marks[place + 1] = monotonic_ns()
        marks[place] = call_id  # last: it makes the mark valid
        if terms is not None:
            if terms.is_too_late():
                marks[place] = 0
                send(RETURNED, call_id, None)
                return
            if terms.announces:
                self._channel.send_from_thread(STARTED, call_id, None)  # now: the call may block the loop
            if (
                terms is self._limited
                and type(body) is tuple
                and function is not None
                and (fn := function.fn) is not None
                and not POINTS
            ):
                task = self._start(self._run(call_id, fn, body, None, function.gauges), function.name, None)
                if not task.done():
                    self._tasks[call_id] = task
                    if terms.timeout is not None:
                        self._limit_time(call_id, terms.timeout)
                return
        if POINTS:
            point("worker.call.marked")
        context: Context | None = None
        try:
            if terms is not None and terms.values is not None:
                context = self._variables.context(terms.values)
            fn, args, kwargs, gauges = self._answers.unpack(call_id, function, body, self._channel.send_later)
            timeout = None if terms is None else terms.timeout
            if context is not None and self._tracing is not None and terms is not None and not terms.prefetch:
                args, kwargs = _in_span(self._tracing, timeout, fn, args, kwargs), None
                fn, timeout = traced, None
            if terms is not None and terms.prefetch:
                run = self._run_stream(call_id, terms.prefetch, fn, args, kwargs, gauges)
            else:
                run = self._run(call_id, fn, args, kwargs, gauges)
        except BaseException as error:  # user code ran: any exception is the outcome of this call
            self._answers.error(call_id, error, send)
            return
        # The task gets the name of its function if the function has a number. A unique name per call would cost too much.
        task = self._start(run, "percore" if function is None else function.name, context)
        if not task.done():
            self._tasks[call_id] = task
            if timeout is not None:
                self._limit_time(call_id, timeout)

    async def _run(
        self,
        call_id: int,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None,
        gauges: FunctionGauges,
    ) -> None:
        of_id.set(call_id)
        try:
            if POINTS:
                point("worker.call.running")
            result = await (fn(*args, **kwargs) if kwargs else fn(*args))
        except BaseException as error:
            self._measure(gauges, call_id)
            seconds = self._overruns.get(call_id)
            self._end_task(call_id, error if seconds is None else _late(fn, seconds, error))
        else:
            gauges.left = left = gauges.left - 1
            if left < 0:  # as `_measure`
                gauges.took(monotonic_ns() - self._marks[(call_id & self._mask) * MARK_WORDS + 1])
            self._tasks.pop(call_id, None)
            if self._noted:
                self._leave(call_id)
            if POINTS:
                self._answers.result(call_id, result, self._channel.send, gauges)
            elif self._passes(result):
                self._channel.send(VALUE, call_id, result)
            else:
                self._answers.pickled(call_id, result, self._channel.send, gauges)
        if self._is_draining:
            self._look_soon()

    def _measure(self, gauges: FunctionGauges, call_id: int) -> None:
        """Measure for how long a call has run, if it is due. Call it before the call is answered."""
        gauges.left -= 1
        if gauges.left < 0:
            gauges.took(monotonic_ns() - self._marks[(call_id & self._mask) * MARK_WORDS + 1])

    async def _run_stream(
        self,
        call_id: int,
        prefetch: int,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None,
        gauges: FunctionGauges,
    ) -> None:
        of_id.set(call_id)
        stream = self._streams[call_id] = TaskStream(self._channel, self._answers, call_id, prefetch)
        stream.gauges = gauges
        try:
            if POINTS:
                point("worker.call.running")
            if self._tracing is None:
                await stream.run(fn, args, kwargs)
            else:
                await traced(self._tracing, fn, stream.run, (fn, args, kwargs), None)
        except BaseException as error:
            del self._streams[call_id]
            self._measure(gauges, call_id)
            self._end_task(call_id, error.error if type(error) is ItemFailed else error)
        else:
            del self._streams[call_id]
            self._measure(gauges, call_id)
            self._tasks.pop(call_id, None)
            self._leave(call_id)
            self._channel.send(CANCELLED if stream.is_closing else ENDED, call_id, None)
        if self._is_draining:
            self._look_soon()

    def _leave(self, call_id: int) -> bool:
        """Note that a call ends, before it is answered. Return whether it was cancelled."""
        if call_id not in self._noted:
            return False
        self._noted.discard(call_id)
        self._timeouts.end(call_id)
        self._overruns.pop(call_id, None)
        self.families.left(call_id)
        is_cancelled = call_id in self._cancelled
        self._cancelled.discard(call_id)
        return is_cancelled

    def _limit_time(self, call_id: int, seconds: float) -> None:
        self._noted.add(call_id)
        if self._timeouts.begin(call_id, seconds):
            self._timeouts.look()

    def _overran(self, call_id: int, seconds: float) -> None:
        """Cancel a call that has exceeded its timeout."""
        task = self._tasks.get(call_id)
        if task is not None and _is_unbegun(task):  # as in `_cancel`
            self._loop.call_soon(self._overran, call_id, seconds)
        elif task is not None and call_id not in self._cancelled:
            self._overruns[call_id] = seconds
            task.cancel()

    def _end_task(self, call_id: int, error: BaseException) -> None:
        self._tasks.pop(call_id, None)
        is_cancelled = self._leave(call_id)
        if self._is_abandoned and isinstance(error, asyncio.CancelledError):
            return
        if is_cancelled and isinstance(error, asyncio.CancelledError):
            self._channel.send(CANCELLED, call_id, None)
            return
        self._answers.error(call_id, error, self._channel.send)

    # Plain functions

    def _put_on_thread(self, call_id: int, function: WorkerFunction | None, body: Body) -> None:
        terms = self._terms_of(call_id, body) if self._terms else None
        if self._is_draining:
            self._channel.send(RETURNED, call_id, None)
            return
        try:
            if terms is not None and terms.prefetch:
                self._plain.put_stream(call_id, function, body, terms)
            else:
                self._plain.put(call_id, (function, body, terms))
        except RuntimeError as error:  # the pool has no thread and cannot start one, as under a limit on processes
            self._answers.error(call_id, error, self._channel.send)

    def _hand_over(self, call_id: int, awaitable: Any, deadline: float | None, gauges: FunctionGauges = UNGAUGED) -> None:
        """Await in the loop, until the deadline, what a plain function has returned. From the function's thread."""
        # Before the thread ends the call, so that the loop always finds it.
        self._handed_over[call_id] = awaitable, deadline, gauges
        self._loop.call_soon_threadsafe(self._await, call_id)

    def _await(self, call_id: int) -> None:
        awaitable, deadline, gauges = self._handed_over.pop(call_id)

        async def wait_for() -> Any:
            async with asyncio.timeout_at(deadline):
                return await awaitable

        self._tasks[call_id] = self._loop.create_task(self._run(call_id, wait_for, (), None, gauges))
