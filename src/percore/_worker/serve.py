"""The worker's heart: messages become tasks and calls on threads, and those become outcomes.

Rules that hold everywhere here:
    A call's start mark is set before its arguments are unpickled, since that already runs user code.
    User code runs in `_run`, `_arguments` and `_answer` alone, and whatever it raises, BaseException included, is its call's.
    Each call is answered exactly once.
"""

import asyncio
import inspect
import sys
from collections.abc import Callable
from contextvars import copy_context
from time import monotonic_ns
from typing import TYPE_CHECKING, Any, Final, cast

from percore._errors import PayloadTooLarge
from percore._ipc.channel import Channel
from percore._ipc.codec import is_inline_value
from percore._ipc.exceptions import dump_exception
from percore._ipc.pickles import dump, load, qualified_name, unpicklable
from percore._ipc.slots import Sink
from percore._messages import (
    CANCEL,
    CANCELLED,
    DEFINE,
    DRAINING,
    ERROR,
    FINISH,
    ONCE_TASK,
    ONCE_THREAD,
    RECALL,
    RELEASE,
    RESULT,
    RETURNED,
    UNDEFINE,
    UNPICKLED,
    VALUE,
    Body,
    Kind,
    Payload,
)
from percore._points import POINTS, point
from percore._worker.eager import task_starter
from percore._worker.threads import Threads

if TYPE_CHECKING:
    from types import CoroutineType

TASK: Final = Kind.TASK
Send = Callable[[int, int, Body], None]


class Function:
    """A function the supervisor has named by a number, unpickled by the first call that needs it."""

    __slots__ = ("fn", "kind", "name", "payload")

    def __init__(self, kind: int, payload: Payload) -> None:
        self.kind = kind
        self.payload = payload
        self.fn: Callable[..., Any] | None = None
        self.name = "percore"


def _name_of(function: Function | None) -> str:
    """What a call's task is called: as its function, where that stays known. Making a name up would cost more than it tells."""
    return "percore" if function is None else function.name


def _is_unbegun(task: asyncio.Task[None]) -> bool:
    return inspect.getcoroutinestate(cast("CoroutineType[Any, Any, None]", task.get_coro())) == inspect.CORO_CREATED


class Server:
    """Serves one channel. Methods are the loop's unless they say otherwise."""

    def __init__(self, channel: Channel, marks: memoryview, *, threads: int, main_by_value: bool) -> None:
        """`marks`: two words a place, as many places as a power of two: the call that began there last, and when."""
        self._channel = channel
        self._loop = channel.loop
        self._marks = marks
        self._mask = len(marks) // 2 - 1
        self._main_by_value = main_by_value
        self._functions: dict[int, Function] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._cancelled: set[int] = set()
        self._handed_over: dict[int, Any] = {}
        self._threads = Threads(threads, self._run_on_thread, copy_context())
        self._start = task_starter(self._loop)
        self._is_draining = False
        self.finished: asyncio.Future[None] = self._loop.create_future()
        self._handlers: dict[int, Callable[[int, Any], None]] = {
            DEFINE: self._define,
            UNDEFINE: self._undefine,
            CANCEL: self._cancel,
            RELEASE: self._channel.outgoing.give,
            RECALL: self._recall,
            FINISH: self._finish,
            ONCE_TASK: self._once_task,
            ONCE_THREAD: self._once_thread,
        }

    # Messages

    def receive(self, op: int, call_id: int, body: Body) -> None:
        """Take one message. Raises for what no supervisor says."""
        if op > 0:
            function = self._functions[op]
            if function.kind == TASK:
                fn = function.fn
                if fn is None or type(body) is not tuple or self._is_draining or POINTS:
                    self._start_task(call_id, function, body)
                else:  # the same, for most calls, in fewer steps
                    self._mark(call_id)
                    task = self._start(self._run(call_id, fn, body, None), function.name)
                    if not task.done():
                        self._tasks[call_id] = task
            else:
                self._put_on_thread(call_id, function, body)
        else:
            self._handlers[op](call_id, body)

    def _mark(self, call_id: int) -> None:
        """The call begins. The id comes last: from then on the mark counts."""
        place = (call_id & self._mask) * 2
        self._marks[place + 1] = monotonic_ns()
        self._marks[place] = call_id

    def _define(self, number: int, body: tuple[int, Payload]) -> None:
        kind, payload = body
        self._functions[number] = Function(kind, payload)

    def _undefine(self, number: int, _body: None) -> None:
        del self._functions[number]

    def _once_task(self, call_id: int, body: Payload) -> None:
        self._start_task(call_id, None, body)

    def _once_thread(self, call_id: int, body: Payload) -> None:
        self._put_on_thread(call_id, None, body)

    def _cancel(self, call_id: int, _body: None) -> None:
        task = self._tasks.get(call_id)
        if call_id in self._handed_over or (task is not None and _is_unbegun(task)):
            # Its task is about to be made, or to take its first step. Cancelled before that, it would end without an answer.
            self._loop.call_soon(self._cancel, call_id, None)
        elif task is not None:
            self._cancelled.add(call_id)
            task.cancel()
        elif self._threads.take_back(call_id):
            self._channel.send(CANCELLED, call_id, None)

    def _recall(self, count: int, _body: None) -> None:
        for call_id in self._threads.take_back_some(count):
            self._channel.send(RETURNED, call_id, None)
        self._channel.send(RETURNED, 0, None)

    def _finish(self, _zero: int, _body: None) -> None:
        if not self.finished.done():
            self.finished.set_result(None)

    def drain(self) -> None:
        """Take no more calls, hand back those that have not begun, and finish when the last one has ended and is published."""
        if self._is_draining or self.finished.done():
            return
        self._is_draining = True
        # What does not fit into the ring or a slot goes when the supervisor has read some; that is flushed after the batch.
        self._channel.on_batch = self._look_soon
        self._channel.send(DRAINING, 0, None)
        for call_id in self._threads.take_back_some(sys.maxsize):
            self._channel.send(RETURNED, call_id, None)
        self._threads.when_idle(lambda: self._loop.call_soon_threadsafe(self._look_drained))
        self._look_soon()

    def _look_soon(self) -> None:
        self._loop.call_soon(self._look_drained)  # after the flush that ends this iteration

    def _look_drained(self) -> None:
        has_calls = self._tasks or self._handed_over or not self._threads.is_idle()
        if not has_calls and self._channel.is_flushed():
            self._finish(0, None)

    def stop(self) -> None:
        """Let go of the threads."""
        self._threads.stop()

    def join(self) -> None:
        """Wait for threads that have no call to end."""
        self._threads.join()

    def own_tasks(self) -> set[asyncio.Task[Any]]:
        """The tasks of calls that still run."""
        return set(self._tasks.values())

    # Coroutine functions

    def _start_task(self, call_id: int, function: Function | None, body: Body) -> None:
        channel = self._channel
        if self._is_draining:
            channel.send(RETURNED, call_id, None)
            return
        self._mark(call_id)
        if POINTS:
            point("worker.call.marked")
        try:
            run = self._run(call_id, *self._unpack(call_id, function, body, channel.send))
        except BaseException as error:  # user code ran; whatever it raised is this call's outcome
            self._answer_error(call_id, error, channel.send)
            return
        task = self._start(run, _name_of(function))
        if not task.done():
            self._tasks[call_id] = task

    async def _run(self, call_id: int, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> None:
        try:
            if POINTS:
                point("worker.call.running")
            result = await (fn(*args, **kwargs) if kwargs else fn(*args))
        except BaseException as error:
            self._end_task(call_id, error)
        else:
            self._tasks.pop(call_id, None)
            if self._cancelled:
                self._cancelled.discard(call_id)
            if is_inline_value(result) and not POINTS:
                self._channel.send(VALUE, call_id, result)
            else:
                self._answer(call_id, result, self._channel.send)
        if self._is_draining:
            self._look_soon()

    def _end_task(self, call_id: int, error: BaseException) -> None:
        self._tasks.pop(call_id, None)
        if call_id in self._cancelled:
            self._cancelled.discard(call_id)
            if isinstance(error, asyncio.CancelledError):
                self._channel.send(CANCELLED, call_id, None)
                return
        self._answer_error(call_id, error, self._channel.send)

    # Plain functions

    def _put_on_thread(self, call_id: int, function: Function | None, body: Body) -> None:
        if self._is_draining:
            self._channel.send(RETURNED, call_id, None)
            return
        try:
            self._threads.put(call_id, (function, body))
        except RuntimeError as error:  # not even one thread can be started: a limit on processes
            self._answer_error(call_id, error, self._channel.send)

    def _run_on_thread(self, call_id: int, item: tuple[Function | None, Body]) -> None:
        """Run a call in the current thread and answer it. Never raises."""
        channel = self._channel
        self._mark(call_id)
        if POINTS:
            point("worker.call.marked")
        try:
            fn, args, kwargs = self._unpack(call_id, item[0], item[1], channel.send_from_thread)
            if POINTS:
                point("worker.call.running")
            result = fn(*args, **kwargs) if kwargs else fn(*args)
            is_inline = is_inline_value(result)
            is_awaitable = not is_inline and hasattr(type(result), "__await__")  # a metaclass may have its say
        except BaseException as error:
            self._answer_error(call_id, error, channel.send_from_thread)
        else:
            if is_inline:
                if POINTS:
                    point("worker.outcome.ready")
                channel.send_from_thread(VALUE, call_id, result)
            elif is_awaitable:
                self._handed_over[call_id] = result  # before this thread leaves: at no moment does the call seem to be nowhere
                self._loop.call_soon_threadsafe(self._await, call_id)
            else:
                self._answer(call_id, result, channel.send_from_thread)

    def _await(self, call_id: int) -> None:
        """A plain function has returned an awaitable: it is awaited here."""
        awaitable = self._handed_over.pop(call_id)

        async def wait_for() -> Any:
            return await awaitable

        self._tasks[call_id] = self._loop.create_task(self._run(call_id, wait_for, (), None))

    # User data

    def _unpack(
        self, call_id: int, function: Function | None, body: Body, send: Send
    ) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any] | None]:
        """Function, arguments and keywords of a call. Runs user code, in any thread."""
        if function is None:
            fn, args, kwargs = self._load(call_id, cast("Payload", body), send)
            return fn, args, kwargs
        fn = function.fn
        if fn is None:
            # Two threads may do this at once: twice the work, once in a function's life, and nobody waits for anyone.
            fn = cast("Callable[..., Any]", load(self._channel.incoming.read(function.payload)))
            function.name = qualified_name(fn)
            function.fn = fn
        if type(body) is tuple:
            return fn, body, None
        args, kwargs = self._load(call_id, cast("Payload", body), send)
        return fn, args, kwargs

    def _load(self, call_id: int, payload: Payload, send: Send) -> Any:
        if type(payload) is bytes:
            return load(payload)
        data = cast("memoryview", self._channel.incoming.read(payload))
        try:
            return load(data)
        finally:
            data.release()
            send(UNPICKLED, call_id, None)

    def _answer(self, call_id: int, value: object, send: Send) -> None:
        """Send a result. Pickling runs user code, in any thread."""
        if is_inline_value(value):
            if POINTS:
                point("worker.outcome.ready")
            send(VALUE, call_id, value)
            return
        sink = Sink(self._channel.outgoing)
        try:
            dump(value, sink, main_by_value=self._main_by_value)
            payload = sink.payload()
        except PayloadTooLarge as error:
            self._answer_error(call_id, error, send)
        except BaseException as error:
            self._answer_error(call_id, unpicklable(value, error), send)
        else:
            if POINTS:
                point("worker.outcome.ready")
            self._channel.send_payload(RESULT, call_id, payload, send)

    def _answer_error(self, call_id: int, error: BaseException, send: Send) -> None:
        sink = dump_exception(error, lambda: Sink(self._channel.outgoing), main_by_value=self._main_by_value)
        if POINTS:
            point("worker.outcome.ready")
        self._channel.send_payload(ERROR, call_id, sink.payload(), send)
