"""The server of a worker: it turns messages into calls, as `Tasks` of the loop and as `PlainCalls` on threads, and ends the worker.

Invariants:

- Each call is answered exactly once: by `Tasks` or `PlainCalls`, which have it from its start, or it is handed back here.
- No user code runs here. What a message of the supervisor makes this module raise breaks the channel.
- A worker that drains has finished when no call is in `Tasks` or `PlainCalls`, and all that they have sent has left the channel.
"""

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Iterable
from time import monotonic_ns
from typing import TYPE_CHECKING, Any, Final

from percore._common.endings import settle_by, wake
from percore._common.errors import as_error
from percore._common.fault_points import POINTS, point
from percore._common.steps import step
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
    FINISH,
    FORGET,
    MARK_WORDS,
    ONCE_TASK,
    ONCE_THREAD,
    RECALL,
    RETURNED,
    SHARE,
    TERMS,
    TIMEOUT,
    UNDEFINE,
    WITHDRAW,
    Body,
    Kind,
    Message,
    Payload,
    StartMarks,
)
from percore._worker.answers import Answers, WorkerFunction
from percore._worker.batches import WorkerBatch, item_id
from percore._worker.families import Families
from percore._worker.plain_calls import PlainCalls
from percore._worker.sampling import Sampler
from percore._worker.shared_objects import WorkerShares
from percore._worker.tasks import Tasks
from percore._worker.terms import SentTerms, Variables
from percore._worker.threads import Threads

if TYPE_CHECKING:
    from percore._protocol.interfaces import WorkerChannel

TASK: Final = Kind.TASK


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
        self._marks = marks
        self._mask = len(marks) // MARK_WORDS - 1
        assert not (self._mask + 1) & self._mask, "two calls at once could have one start mark"
        self._functions: dict[int, WorkerFunction] = {}
        variables = Variables(()) if variables is None else variables
        self.shares = WorkerShares(channel)
        self.sampler = sampler
        self._answers = Answers(channel, sampler) if answers is None else answers
        self._terms = SentTerms()
        self._waiting = self._terms.waiting
        self._tasks = Tasks(channel, marks, self._answers, variables, self._terms, self._look_soon)
        self._plain = PlainCalls(
            channel, self._answers, marks, threads, thread_initializer, variables, self._tasks.hand_over, has_spare=has_spare
        )
        self._recalls = self._plain.recalls
        self._threads = self._plain.threads
        self._threads.on_failure = lambda error: self._loop.call_soon_threadsafe(self._thread_failed, error)
        self._streams = self._tasks.streams = self._plain.streams
        self.families = Families(channel, self._plain, variables, self.shares, self._tasks.noted)
        self._plain.families = self._tasks.families = self.families
        self.families.runs = self._runs
        self._tickets: deque[None] = deque()
        self._tickets_lock = threading.Lock()
        self.finished: asyncio.Future[None] = self._loop.create_future()
        self._handlers = self._handlers_by_op()

    # Messages

    def _handlers_by_op(self) -> dict[int, Callable[[int, Any], object]]:
        return {
            DEFINE_TASK: lambda number, payload: self._define(number, Kind.TASK, payload),
            DEFINE_THREAD: lambda number, payload: self._define(number, Kind.THREAD, payload),
            UNDEFINE: lambda number, _: self._functions.pop(number),
            CANCEL: self._cancel,
            RECALL: lambda count, stay: self._recalls.recall(count, frozenset(memoryview(stay).cast("I"))),
            FINISH: self._finish,
            ONCE_TASK: lambda call_id, body: self._tasks.begin(call_id, None, body),
            ONCE_THREAD: lambda call_id, body: self._put_on_thread(call_id, None, body),
            BATCH: self._batch,
            TERMS: self._terms.under,
            CREDIT: self._credit,
            BEGIN_BY: self._terms.begin_by,
            TIMEOUT: self._terms.timeout,
            WITHDRAW: lambda call_id, _: self._recalls.withdraw(call_id),
            DRAIN: lambda _, __: self.drain(),
            FORGET: self.shares.forget,
            SHARE: self.shares.meet,
            **self.families.handlers,
            **self._channel.own,
        }

    def receive(self, messages: Iterable[Message]) -> None:
        """Handle the messages of a frame, up to one that ends the channel. Raises for messages that no supervisor sends."""
        channel, tasks = self._channel, self._tasks
        for op, call_id, body in messages:
            if op > 0:
                function = self._functions[op]
                if function.kind == TASK:
                    fn = function.fn
                    if fn is None or type(body) is not tuple or tasks.is_draining or self._waiting or POINTS:
                        tasks.begin(call_id, function, body)
                    else:  # fast path of `begin`, which most calls take
                        place = (call_id & self._mask) * MARK_WORDS
                        marks = self._marks
                        marks[place + 1] = monotonic_ns()
                        marks[place] = call_id
                        task = tasks.start(tasks.run(call_id, fn, body, None, function.gauges), function.name, None)
                        if not task.done():
                            tasks.by_id[call_id] = task
                else:
                    self._put_on_thread(call_id, function, body)
            else:
                self._handlers[op](call_id, body)
            if not channel.is_open:
                return

    def limit(self, calls: int) -> None:
        """Begin at most this many calls. This worker drains when the last of them begins. Call it before the worker serves."""
        self._tickets.extend([None] * calls)
        self._threads.take = self._take_with_ticket
        self.receive = self._receive_some  # type: ignore[method-assign]

    def _receive_some(self, messages: Iterable[Message]) -> None:
        """Like `receive`, with a limit on calls."""
        for message in messages:
            op, call_id, body = message
            is_task = op == ONCE_TASK or (op > 0 and self._functions[op].kind == TASK)
            if is_task and not self._tasks.is_draining:
                try:
                    with self._tickets_lock:
                        self._tickets.pop()
                except IndexError:  # a thread has taken the last ticket, and `drain` is about to run
                    self._channel.send(RETURNED, call_id, None)
                    continue
                self._tasks.begin(call_id, self._functions[op] if op > 0 else None, body)
                if not self._tickets:
                    self.drain()
            else:
                Server.receive(self, [message])
            if not self._channel.is_open:
                return

    @step
    def _take_with_ticket(self, call_id: int) -> Any | None:
        """Take a waiting call and a ticket for it. None: no ticket is left, or the call was taken back. From a thread."""
        # The ticket and the call together: whoever takes the last ticket lets the worker drain, which takes back what waits then.
        with self._tickets_lock:
            try:
                self._tickets.pop()
            except IndexError:  # `drain` is about to run and hands back the waiting calls
                return None
            item = self._threads.waiting.pop(call_id, None)
            if item is None:
                self._tickets.append(None)
            elif not self._tickets:
                self._loop.call_soon_threadsafe(self.drain)
        return item

    def _define(self, number: int, kind: int, payload: Payload) -> None:
        self._functions[number] = WorkerFunction(kind, payload)

    def _batch(self, call_id: int, body: bytes) -> None:
        number, bodies, is_bare = self._channel.unpack_items(body)
        if self._tasks.is_draining:
            self._channel.send(RETURNED, call_id, len(bodies))
            return
        try:
            self._plain.put(call_id, WorkerBatch(self._functions[number], bodies, is_bare, self._terms.waiting.pop(call_id, None)))
        except RuntimeError as error:  # as in `_put_on_thread`
            for index in range(len(bodies)):
                self._answers.error(item_id(call_id, index), error, self._channel.send)

    def _credit(self, call_id: int, count: int) -> None:
        stream = self._streams.get(call_id)
        if stream is not None:  # else it has ended, and the supervisor is about to hear of it
            stream.credit(count)

    def _cancel(self, call_id: int, wanted: int | None) -> None:
        if wanted is not None:
            self._plain.cancel(call_id, wanted)
            first = item_id(call_id, wanted)  # the ids of a batch's items ascend; items before `first` are still wanted
            for task_id in self._tasks.items(call_id, first):
                self._cancel(task_id, None)
        elif self._tasks.is_unbegun(call_id):
            self._loop.call_soon(self._cancel, call_id, None)
        elif self._tasks.cancel(call_id):
            pass
        elif self._plain.cancel(call_id, None):
            self._channel.send(CANCELLED, call_id, True)
        else:
            # The clean-up of a generator may make calls. A plain function is not told that it was cancelled.
            self.families.fail(call_id, asyncio.CancelledError, refuses=call_id not in self._streams)

    def _finish(self, _zero: int, _body: None) -> None:
        if self.sampler is not None:
            self.sampler.send()
        wake(self.finished)

    def _thread_failed(self, error: BaseException) -> None:
        """End the worker: a thread has ended outside a call, whose caller might otherwise wait for ever."""
        settle_by(self.finished, as_error(error, "a thread"))

    def drain(self) -> None:
        """Accept no more calls, hand back those that have not begun, and finish when the last running call has been answered."""
        if self._tasks.is_draining or self.finished.done():
            return
        self._tasks.is_draining = True
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
        self._tasks.is_draining = True
        self._recalls.give_back_all()
        self._tasks.abandon()

    def take_all(self) -> dict[int, int]:
        """Take back everything that has not begun, because the worker is given up: as `Recalls.take_all`. From any thread."""
        return self._recalls.take_all()

    def _look_soon(self) -> None:
        self._loop.call_soon(self._look_drained)  # after the flush that ends this iteration

    def _look_drained(self) -> None:
        # The threads first: a thread hands a call over before it ends it.
        has_calls = not self._threads.is_idle() or self._tasks.has_any()
        self._channel.flush()  # messages that were held back to share a wake-up, too
        if not has_calls and self._channel.is_flushed():
            self._finish(0, None)

    def stop(self) -> None:
        """Stop the threads and release the shared objects."""
        if self.sampler is not None:
            self.sampler.stop()
        self._tasks.stop()
        self._plain.stop()
        self.shares.stop()

    def forsake(self) -> None:
        """Let plain functions that run on wait for no answer: nested calls raise CancelledError from now on. From any thread."""
        for call_id in self._threads.running():
            self.families.fail(call_id, asyncio.CancelledError)

    def join(self) -> None:
        """Wait until the stopped threads have ended."""
        self._threads.join()

    @property
    def threads(self) -> Threads:
        """The threads of plain functions."""
        return self._threads

    def _runs(self, call_id: int) -> bool:
        """Whether a call runs. To be asked between the steps of tasks."""
        return self._tasks.runs(call_id) or self._threads.runs(call_id)

    def has_had_tasks(self) -> bool:
        """Whether any call has had a task."""
        return self._tasks.have_begun

    def own_tasks(self) -> set[asyncio.Task[Any]]:
        """Return the tasks of the calls that still run."""
        return set(self._tasks.by_id.values())

    # Plain functions

    def _put_on_thread(self, call_id: int, function: WorkerFunction | None, body: Body) -> None:
        terms = self._terms.of(call_id, body) if self._waiting else None
        if self._tasks.is_draining:
            self._channel.send(RETURNED, call_id, None)
            return
        try:
            if terms is not None and terms.prefetch:
                self._plain.put_stream(call_id, function, body, terms)
            else:
                self._plain.put(call_id, (function, body, terms))
        except RuntimeError as error:  # the pool has no thread and cannot start one, as under a limit on processes
            self._answers.error(call_id, error, self._channel.send)
