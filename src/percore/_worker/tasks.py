"""The calls of a worker that run as tasks of its loop, from their start to their answer.

They are the calls of coroutine functions, streams of async generators, and awaitables that plain functions have returned.

Invariants:

- A call's start mark is set before its arguments are unpickled, because unpickling already runs user code.
- User code runs only in `run`, `_run_stream`, in the methods of `Answers` and in `Variables.context`. Any exception that it raises,
  including BaseException, becomes the outcome of its call.
- Each call is answered once: by its task, or by `begin` if it gets none. A call that has begun and is not answered is in
  `handed_over` or `by_id`, where a cancellation and a server that drains find it.

The server decides which calls begin, and when the worker is done. It alone reads messages; to it a call here is an id.
"""

import asyncio
import inspect
from collections.abc import Callable, Coroutine
from contextvars import Context
from time import monotonic_ns
from typing import TYPE_CHECKING, Any, cast

from percore._common.callables import qualified_name
from percore._common.errors import overrun
from percore._common.fault_points import POINTS, point
from percore._protocol.messages import CANCELLED, ENDED, ID_MASK, MARK_WORDS, RETURNED, STARTED, VALUE, Body, StartMarks
from percore._worker.answers import Answers, ItemFailed, WorkerFunction
from percore._worker.context import of_id
from percore._worker.eager_tasks import Starter, task_starter
from percore._worker.sampling import UNGAUGED, FunctionGauges
from percore._worker.streams import TaskStream
from percore._worker.terms import SentTerms, Variables, within
from percore._worker.timeouts import Timeouts
from percore._worker.traced import traced

if TYPE_CHECKING:
    from types import CoroutineType

    from percore._common.tracing import Tracing
    from percore._protocol.interfaces import WorkerChannel
    from percore._worker.families import Families
    from percore._worker.recalls import Streams


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


class Tasks:
    """The tasks of one worker. The loop calls the methods, unless their docstring says otherwise."""

    families: "Families"
    """The nested calls of these calls. The server sets it."""

    def __init__(
        self,
        channel: "WorkerChannel",
        marks: StartMarks,
        answers: Answers,
        variables: Variables,
        terms: SentTerms,
        when_left: Callable[[], object],
    ) -> None:
        """`when_left`: called when a call has ended while the worker drains."""
        self._channel = channel
        self._loop = channel.loop
        self._passes = channel.passes
        self._marks = marks
        self._mask = len(marks) // MARK_WORDS - 1
        self._answers = answers
        self._variables = variables
        self._tracing = variables.tracing
        self._terms = terms
        self._waiting = terms.waiting
        self.when_left = when_left
        self.streams: Streams
        """The streams of the worker. The server sets it."""
        self.start: Starter = self._start_first
        """Starts a task on the loop."""
        self.have_begun = False
        """Whether any call has had a task."""
        self.by_id: dict[int, asyncio.Task[None]] = {}
        self.handed_over: dict[int, tuple[Any, float | None, FunctionGauges]] = {}
        """Awaitables from threads, which have no task yet."""
        self.noted: set[int] = set()
        """Calls that were cancelled or may have nested calls."""
        self.is_draining = self.is_abandoned = False
        """Whether no further call begins; and whether cancelled calls are not answered."""
        self._cancelled: set[int] = set()
        self._timeouts = Timeouts(self._loop, marks, self._overran)
        self._overruns: dict[int, float] = {}
        """The timeouts of the calls that have exceeded them, and were cancelled for it."""

    def _start_first(self, coro: Coroutine[Any, Any, None], name: str, context: Context | None) -> asyncio.Task[None]:
        self.have_begun = True
        self.start = task_starter(self._loop)
        return self.start(coro, name, context)

    def has_any(self) -> bool:
        """Whether any call runs here."""
        return bool(self.by_id or self.handed_over)

    def runs(self, call_id: int) -> bool:
        """Whether a call runs. To be asked between the steps of tasks."""
        return call_id in self.by_id or call_id in self.handed_over

    def is_unbegun(self, call_id: int) -> bool:
        """Whether a call cannot be cancelled yet: its task is not created, or would end without an answer before its first step."""
        if call_id in self.handed_over:
            return True
        task = self.by_id.get(call_id)
        return task is not None and _is_unbegun(task)

    def cancel(self, call_id: int) -> bool:
        """Cancel a call for its caller. Return False if it has no task."""
        task = self.by_id.get(call_id)
        if task is None:
            return False
        self._cancelled.add(call_id)
        self.noted.add(call_id)
        stream = self.streams.get(call_id)
        if stream is None:
            task.cancel()
        else:
            stream.close(task)
        return True

    def items(self, call_id: int, first: int) -> list[int]:
        """Return the ids of the items of a batch that run here, from `first` on."""
        return [one for one in (*self.by_id, *self.handed_over) if one & ID_MASK == call_id and one >= first]

    def abandon(self) -> None:
        """Cancel all calls, and do not answer them."""
        self.is_draining = self.is_abandoned = True
        for stream in list(self.streams.values()):
            stream.abandon()
        for task in list(self.by_id.values()):
            task.cancel()

    def stop(self) -> None:
        """Stop the timer."""
        self._timeouts.stop()

    def begin(self, call_id: int, function: WorkerFunction | None, body: Body) -> None:  # noqa: C901, PLR0912, PLR0915  # a call more would cost all with terms
        """Begin a call, or hand it back."""
        send = self._channel.send
        terms = self._terms.of(call_id, body) if self._waiting else None
        if self.is_draining:
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
                terms is self._terms.limited
                and type(body) is tuple
                and function is not None
                and (fn := function.fn) is not None
                and not POINTS
            ):
                task = self.start(self.run(call_id, fn, body, None, function.gauges), function.name, None)
                if not task.done():
                    self.by_id[call_id] = task
                    if terms.timeout is not None:
                        self._limit_time(call_id, terms.timeout)
                return
        if POINTS:
            point("worker.call.marked")
        context: Context | None = None
        try:
            if terms is not None and terms.values is not None:
                context = self._variables.context(terms.values)
            fn, args, kwargs, gauges = self._answers.unpack(call_id, function, body, self._channel.keep)
            timeout = None if terms is None else terms.timeout
            if context is not None and self._tracing is not None and terms is not None and not terms.prefetch:
                args, kwargs = _in_span(self._tracing, timeout, fn, args, kwargs), None
                fn, timeout = traced, None
            if terms is not None and terms.prefetch:
                run = self._run_stream(call_id, terms.prefetch, fn, args, kwargs, gauges)
            else:
                run = self.run(call_id, fn, args, kwargs, gauges)
        except BaseException as error:  # user code ran: any exception is the outcome of this call
            self._answers.error(call_id, error, send)
            return
        # The task gets the name of its function if the function has a number. A unique name per call would cost too much.
        task = self.start(run, "percore" if function is None else function.name, context)
        if not task.done():
            self.by_id[call_id] = task
            if timeout is not None:
                self._limit_time(call_id, timeout)

    async def run(
        self,
        call_id: int,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None,
        gauges: FunctionGauges,
    ) -> None:
        """Run a call whose start mark is set, in its task, and answer it."""
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
            self.by_id.pop(call_id, None)
            if self.noted:
                self._leave(call_id)
            if POINTS:
                self._answers.result(call_id, result, self._channel.send, gauges)
            elif self._passes(result):
                self._channel.send(VALUE, call_id, result)
            else:
                self._answers.pickled(call_id, result, self._channel.send, gauges)
        if self.is_draining:
            self.when_left()

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
        stream = self.streams[call_id] = TaskStream(self._channel, self._answers, call_id, prefetch)
        stream.gauges = gauges
        try:
            if POINTS:
                point("worker.call.running")
            if self._tracing is None:
                await stream.run(fn, args, kwargs)
            else:
                await traced(self._tracing, fn, stream.run, (fn, args, kwargs), None)
        except BaseException as error:
            del self.streams[call_id]
            self._measure(gauges, call_id)
            self._end_task(call_id, error.error if type(error) is ItemFailed else error)
        else:
            del self.streams[call_id]
            self._measure(gauges, call_id)
            self.by_id.pop(call_id, None)
            self._leave(call_id)
            self._channel.send(CANCELLED if stream.is_closing else ENDED, call_id, None)
        if self.is_draining:
            self.when_left()

    def _leave(self, call_id: int) -> bool:
        """Note that a call ends, before it is answered. Return whether it was cancelled."""
        if call_id not in self.noted:
            return False
        self.noted.discard(call_id)
        self._timeouts.end(call_id)
        self._overruns.pop(call_id, None)
        self.families.left(call_id)
        is_cancelled = call_id in self._cancelled
        self._cancelled.discard(call_id)
        return is_cancelled

    def _limit_time(self, call_id: int, seconds: float) -> None:
        self.noted.add(call_id)
        if self._timeouts.begin(call_id, seconds):
            self._timeouts.look()

    def _overran(self, call_id: int, seconds: float) -> None:
        """Cancel a call that has exceeded its timeout."""
        task = self.by_id.get(call_id)
        if task is not None and _is_unbegun(task):  # it would end without an answer
            self._loop.call_soon(self._overran, call_id, seconds)
        elif task is not None and call_id not in self._cancelled:
            self._overruns[call_id] = seconds
            task.cancel()

    def _end_task(self, call_id: int, error: BaseException) -> None:
        self.by_id.pop(call_id, None)
        is_cancelled = self._leave(call_id)
        if self.is_abandoned and isinstance(error, asyncio.CancelledError):
            return
        if is_cancelled and isinstance(error, asyncio.CancelledError):
            self._channel.send(CANCELLED, call_id, None)
            return
        self._answers.error(call_id, error, self._channel.send)

    def hand_over(self, call_id: int, awaitable: Any, deadline: float | None, gauges: FunctionGauges = UNGAUGED) -> None:
        """Await in the loop, until the deadline, what a plain function has returned. From the function's thread."""
        # Before the thread ends the call, so that the loop always finds it.
        self.handed_over[call_id] = awaitable, deadline, gauges
        self._loop.call_soon_threadsafe(self._await, call_id)

    def _await(self, call_id: int) -> None:
        awaitable, deadline, gauges = self.handed_over.pop(call_id)

        async def wait_for() -> Any:
            async with asyncio.timeout_at(deadline):
                return await awaitable

        # It takes its first step at once: code of a call that cancels all tasks would end one that has not begun without an answer.
        task = self.start(self.run(call_id, wait_for, (), None, gauges), "percore", None)
        if not task.done():
            self.by_id[call_id] = task
