"""The calls of an executor, between the portal's inbox and the outcomes of the standard library's futures.

    inbox ─▶ waiting ─▶ Submission.enter ─▶ workers
    Future   ◀─ outcomes           ◀─ Job   ◀─

A call *waits* until the workers have room for it; the room includes the calls that are queued ahead in a worker. While a call
waits, cancelling its future withdraws it. When it is handed over, its arguments are pickled and its future is set running, like a
future in the call queue of ProcessPoolExecutor.

A call that takes long is handed over only to begin at once, because until then it can be cancelled. Whether the calls of a function
take long is measured here. Until a first call has ended, they are taken to.

User code (callbacks of futures) runs between two turns of the loop, when the state is consistent. Its exceptions are logged. Users
may set or cancel a future themselves at any time.
"""

import time
from collections import deque
from collections.abc import Hashable, Iterator
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, ClassVar, Final, Protocol, TypeAlias

from percore._calls.calls import CallBase
from percore._calls.functions import Function
from percore._calls.policy import CallPlan
from percore._common.errors import RemoteError, ThreadInitializerFailed
from percore._common.tracing import Span
from percore._common.worker_errors import WorkerDied
from percore._executor.futures import Held, Request, begins, resolve, withdraw
from percore._executor.life import ABRUPTLY, ExecutorLife, the_end
from percore._protocol.messages import Kind
from percore._scheduler.places import AHEAD
from percore._scheduler.windows import Cost

if TYPE_CHECKING:
    import asyncio

    from percore._supervisor.supervisor import Supervisor


Waiting: TypeAlias = tuple[Future[Any], Function, tuple[Any, ...], dict[str, Any], Any]
"""A waiting call. The last item is its `Held`, which keeps the function registered, or None."""


_LONG: Final = 0.1
"""Seconds above which a call is long. On a loaded machine a message may take some hundredth of a second."""


class Keeper(Protocol):
    """The owner of the jobs, as they see it."""

    def break_off(self, text: str, cause: BaseException | None) -> None:
        """Break the executor."""

    def look(self) -> None:
        """Begin closing if there is nothing left to wait for."""


class Job(CallBase):
    """One call, with the interface that the supervisor expects of a call. Its future is resolved at the end of the turn."""

    __slots__ = (
        *("_held", "_jobs", "accepted", "begun_at", "body", "call_id", "function", "future"),
        *("is_done", "key", "kind", "member", "owner", "plan"),
    )

    queue: ClassVar[None] = None

    # `Submission.enter` and `PoolWorker.send` set these, as for a Call.
    function: Function
    kind: int
    body: Any
    call_id: int
    accepted: int
    member: Any
    owner: Any
    key: Hashable | None
    plan: CallPlan | None

    def __init__(self, jobs: "Jobs", future: Future[Any], held: Any, now: float) -> None:
        self._jobs = jobs
        self._held = held
        self.begun_at = now
        """When it was handed over."""
        self.future: Future[Any] | None = future
        self.is_done = False

    @property
    def span(self) -> Span | None:  # type: ignore[override]  # only read
        return getattr(self.future, "span", None)

    def done(self) -> bool:
        return self.is_done

    def set_result(self, value: Any) -> None:
        self._jobs.ended(self, value, None)

    def deliver(self, value: Any, _size: int) -> None:
        self._jobs.ended(self, value, None)

    def set_exception(self, error: BaseException) -> None:
        self._jobs.ended(self, None, error)

    def cut_off(self) -> None:
        """End with the worker. The future is resolved, with the reason, when all workers have ended."""
        self._jobs.cut_off(self)


class Jobs:
    """The calls that wait, run, or have an outcome that is not in their futures yet. Only the loop's thread may use it."""

    def __init__(self, supervisor: "Supervisor", life: ExecutorLife, keeper: Keeper, *, is_pool: bool) -> None:
        """`is_pool`: a result that cannot be unpickled here breaks the executor."""
        self.supervisor = supervisor
        self._loop: asyncio.AbstractEventLoop = supervisor.loop
        self._life = life
        self._keeper = keeper
        self._is_pool = is_pool
        workers, room_for = len(supervisor.slots), supervisor.dispatch.room_for
        self._room = [room_for(Kind.TASK) * workers, room_for(Kind.THREAD) * workers]
        self._cost_by_value = Cost()
        """How long the calls of functions take that are sent with each call."""
        self._waiting: tuple[deque[Waiting], deque[Waiting]] = (deque(), deque())
        self._running: set[Job] = set()
        self._cut: list[Future[Any]] = []
        self._outcomes: list[tuple[Future[Any], Any, BaseException | None]] = []

    def is_idle(self) -> bool:
        """Return whether every call has its outcome."""
        return not (self._running or self._waiting[0] or self._waiting[1] or self._outcomes)

    def waiting(self) -> int:
        """Return how many calls wait, those included that were cancelled and are not discarded yet. Any thread may call this."""
        return len(self._waiting[0]) + len(self._waiting[1])

    def are_sent(self) -> bool:
        """Return whether a worker holds a call."""
        return any(job.member is not None for job in self._running)

    # In

    def take(self, inbox: deque[Request]) -> None:
        """Move submitted calls to those that wait, and hand over as many as there is room for."""
        supervisor, waiting = self.supervisor, self._waiting
        known, of = supervisor.known, supervisor.functions.of
        for _ in range(len(inbox)):
            future, fn, args, kwargs = inbox.popleft()
            try:
                function = known.get(id(fn)) or (self._hold(fn) if type(fn) is Held else of(fn))
            except BaseException as error:  # a generator function, or not callable
                if begins(future):
                    self._tell(future, None, error)
            else:
                waiting[function.kind].append((future, function, args, kwargs, fn if type(fn) is Held else None))
        self._pump()

    def _hold(self, held: Held) -> Function:
        if held.function is None:
            held.function = self.supervisor.functions.hold(held.fn)
        return held.function

    def _pump(self) -> None:
        """Hand over as many waiting calls as there is room for."""
        supervisor, room = self.supervisor, self._room
        if supervisor.phase.is_closing:  # broken or killed: no worker will have room for the calls that threads submitted meanwhile
            for future in self._withdrawn():
                if begins(future):
                    self._tell(future, None, self._life.last_word())
            return
        enter, now = supervisor.submission.enter, time.monotonic()
        for kind, waiting in enumerate(self._waiting):
            while waiting and room[kind] > 0:
                seconds = waiting[0][1].cost.seconds
                if (seconds is None or seconds > _LONG) and self._must_wait(waiting[0][1]):
                    break
                future, function, args, kwargs, held = waiting.popleft()
                if not begins(future):
                    continue
                job = Job(self, future, held, now)
                job.kind = kind
                job.function = function
                self._running.add(job)
                room[kind] -= 1
                try:
                    _ = enter(job, function, args, kwargs)
                except BaseException as error:  # broken; or pickling raised KeyboardInterrupt, which ends only this call
                    self.ended(job, None, error)

    def _cost(self, function: Function) -> Cost:
        return function.cost if function.number else self._cost_by_value

    def _is_short(self, function: Function) -> bool:
        """Return whether the calls of a plain function are short, so that they may be queued ahead."""
        seconds = self._cost(function).seconds
        return seconds is not None and seconds <= _LONG

    def _must_wait(self, function: Function) -> bool:
        """Return whether a call must wait here: it is a long one of a plain function, and no worker can begin it now.

        One call is always handed over. It fails if no worker can be started any more, and so ends the others.
        """
        if function.kind != Kind.THREAD or self._is_short(function) or not self._running:
            return False
        return not self.supervisor.dispatch.has_place(Kind.THREAD)

    def _measure(self, job: Job) -> None:
        """Measure how long a plain call has taken. One that may have been queued ahead is taken to have been the last of them."""
        calls = 1 + AHEAD if self._is_short(job.function) else 1
        self._cost(job.function).measured(calls, time.monotonic() - job.begun_at)

    def _withdrawn(self) -> Iterator[Future[Any]]:
        """Remove the waiting calls one by one, and return their futures. User code may run between two of them."""
        for waiting in self._waiting:
            while waiting:
                yield waiting.popleft()[0]

    def seated(self) -> None:
        """A worker has become ready: calls that wait may begin there."""
        self._loop.call_soon(self._pump)

    # Out

    def ended(self, job: Job, value: Any, error: BaseException | None) -> None:
        """Record the outcome of a call. Its future is resolved in `_deliver`."""
        if job.is_done:
            return
        if job.kind == Kind.THREAD and not self._outcomes:  # one call of a turn is enough
            self._measure(job)
        future = self._leave(job)
        if error is not None:
            if type(error) is ThreadInitializerFailed:
                self._keeper.break_off("a thread_initializer failed", error)
                error = self._life.last_word()
            elif self._is_pool and type(error) is RemoteError and not error.remote_traceback:
                # The result could not be unpickled in this process.
                self._keeper.break_off(ABRUPTLY, error.__cause__ or error)
                error = self._life.last_word()
            elif self._is_pool and type(error) is WorkerDied:
                who = "the worker" if error.pid is None else f"worker (pid {error.pid})"
                error.__cause__ = the_end(who, error.exitcode, error.why or error.detail)
        self._tell(future, value, error)

    def cut_off(self, job: Job) -> None:
        """A call was stopped with its worker: keep its future until all workers have ended."""
        if not job.is_done:
            self._cut.append(self._leave(job))
            self._loop.call_soon(self._keeper.look)

    def _leave(self, job: Job) -> Future[Any]:
        job.is_done = True
        self._running.discard(job)
        self._room[job.kind] += 1
        future, job.future = job.future, None
        assert future is not None
        return future

    def _tell(self, future: Future[Any], value: Any, error: BaseException | None) -> None:
        if not self._outcomes:
            self._loop.call_soon(self._deliver)
        self._outcomes.append((future, value, error))

    def _deliver(self) -> None:
        """Resolve the futures of the calls that have ended. Runs user code: their callbacks."""
        outcomes, self._outcomes = self._outcomes, []
        try:
            self._pump()  # before the callbacks, so that no worker waits for them
        finally:  # nothing else knows these futures any more
            outcomes.reverse()
            while outcomes:
                resolve(*outcomes.pop())
            self._keeper.look()

    # Ends

    def cancel_waiting(self) -> None:
        """Cancel the calls that wait."""
        for future in self._withdrawn():
            withdraw(future)

    def fail_running(self) -> None:
        """End the calls that were handed over, because the executor is broken."""
        for job in list(self._running):
            self._tell(self._leave(job), None, self._life.last_word())
            if job.member is None:  # it waits in the supervisor's queue
                self.supervisor.calls.cancelled(job)

    def end(self) -> None:
        """End every future that is left, when the thread ends."""
        outcomes, self._outcomes = self._outcomes, []
        for outcome in outcomes:
            resolve(*outcome)
        left = [*self._cut, *(self._leave(job) for job in list(self._running))]
        self._cut.clear()
        left += [future for future in self._withdrawn() if begins(future)]
        for future in left:
            resolve(future, None, self._life.last_word())
