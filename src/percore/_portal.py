"""The loop of an executor, on a thread of its own, over a Runner's workers.

    submit (any thread) ─▶ inbox ─▶ waiting ─▶ Intake.submit ─▶ workers
    Future              ◀─ outcomes           ◀─ Job              ◀─

Guarantees:
    A submitting thread appends to the inbox and wakes the loop unless that is due already; it takes no lock and waits for nothing.
    A call *waits* until the workers have room for it, as they have for those that run and those that are queued ahead. Until then
    cancelling its future withdraws it; from then on the future is running, as one in the call queue of the standard library's pool.
    Its arguments are pickled at that moment.
    Each future that was accepted ends, whatever becomes of the workers, of this thread and of the interpreter.
    User code (callbacks of futures) runs between two turns, when everything is settled, and whatever it raises is logged.

The inbox needs no lock:    1. a thread appends, then looks whether a wake-up is due   2. the loop clears that mark, then empties
the inbox. Whichever comes first, either the loop sees the item or the thread sees no mark. After the end a thread finds the mark of
the end, and ends what is left itself; each item is popped once.

How it ends. Each phase has one way out, so there is one decision, `_look`, and one closing of the runner:

    unused ──first submit──▶ starting ──workers ready──▶ running ──nothing to wait for──▶ closing ──workers gone──▶ over
                                └──────the start failed───────────────────────────────────▲

`thread`, `_is_started` and `_is_over` tell `unused`, `starting` and `over`; `_end` tells `closing`. There is nothing to wait for
when the executor is broken, or when it is shut and every accepted future has its outcome. Users and workers only mark and signal:

    event                                     mark                    what follows, in whatever phase
    shutdown, collected                       is_shut                 calls that wait here are cancelled, if asked for; `_look`
    kill_workers, terminate_workers           is_shut, _is_killed     workers get the signal and are not replaced; calls that
                                                                      none has begun end with the last of them; `_look`
    a death in a pool, a failed initializer   broken                  every call ends; the supervisor kills its workers; `_look`

The supervisor tells its one `Closing` of each end of a call or of a worker, and tells nobody else.
"""

import asyncio
import contextlib
import itertools
import logging
import os
import signal
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar, Final, TypeAlias, cast

from percore._calls import Call, Function
from percore._errors import RemoteError
from percore._futures import begins, resolve
from percore._member import Member
from percore._messages import Kind
from percore._platform import uvloop_wanted
from percore._runner import HALF, Runner
from percore._worker.manners import ThreadInitializerFailed

if TYPE_CHECKING:
    from percore._supervisor import Supervisor

logger: Final = logging.getLogger("percore")

Request: TypeAlias = tuple[Future[Any], Callable[..., Any], tuple[Any, ...], dict[str, Any]]
Waiting: TypeAlias = tuple[Future[Any], Function, tuple[Any, ...], dict[str, Any], Any]
"""The last of it: what keeps the function held, where something does."""

ABRUPTLY: Final = "a worker process ended abruptly while the call was running or waiting; the pool is broken"

AFTER_SHUTDOWN: Final = "cannot schedule new futures after shutdown"

_portals: Final[set["Portal"]] = set()
"""Those whose threads run."""

_start_lock = threading.RLock()
"""Held while an executor's thread is started. Reentrant: a `__del__` may submit in the midst of that."""

_numbers: Final = itertools.count()
is_interpreter_ending = False


class Held:
    """A function that travels by value and is the same for many calls: it is pickled once, for as long as one of them needs it."""

    __slots__ = ("_portal", "fn", "function")

    def __init__(self, portal: "Portal", fn: Callable[..., Any]) -> None:
        self._portal = portal
        self.fn = fn
        self.function: Function | None = None
        """The loop's."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.fn(*args, **kwargs)

    def __del__(self) -> None:
        if self.function is not None:
            self._portal.forget(self.function)


class Job:
    """One call, as the supervisor sees it. Its future is told at the end of the turn."""

    __slots__ = ("_held", "_portal", "body", "call_id", "function", "future", "is_done", "key", "kind", "member", "owner", "plan")

    queue: ClassVar[None] = None
    size: ClassVar[int] = 1

    # Set by the supervisor, as those of a Call.
    function: Function
    kind: int
    body: Any
    call_id: int
    member: Any
    owner: Any
    key: None
    plan: None

    def __init__(self, portal: "Portal", future: Future[Any], held: Any) -> None:
        self._portal = portal
        self._held = held
        self.future: Future[Any] | None = future
        self.is_done = False

    def done(self) -> bool:
        return self.is_done

    def set_result(self, value: Any) -> None:
        self._portal.ended(self, value, None)

    def deliver(self, value: Any, _size: int) -> None:
        self._portal.ended(self, value, None)

    def set_exception(self, error: BaseException) -> None:
        self._portal.ended(self, None, error)

    def cut_off(self) -> None:
        """Its workers are stopped. Why, the portal tells when they have ended."""
        self._portal.cut_off(self)


class Portal:
    """Runs a runner on a thread, for futures of the standard library. Methods are the loop's unless they say otherwise."""

    def __init__(self, runner: Runner, *, is_pool: bool) -> None:
        """`is_pool`: the death of one worker breaks all of it."""
        self.runner = runner
        self._is_pool = is_pool
        self._pid: int | None = None
        """The process that uses it. None: nobody does yet, so a fork may."""
        self.thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop
        self._supervisor: Supervisor | None = None
        self._inbox: deque[Request] = deque()
        self._is_due = False
        self._is_over = False
        self._waiting: tuple[deque[Waiting], deque[Waiting]] = (deque(), deque())
        self._room = [0, 0]
        self._jobs: set[Job] = set()
        self._cut: list[Future[Any]] = []
        self._outcomes: list[tuple[Future[Any], Any, BaseException | None]] = []
        self._is_started = self._is_killed = False
        self._has_launched = threading.Event()
        self._asked: list[Callable[[], None]] = []
        """What was asked for before there was a supervisor."""
        self._end: asyncio.Future[None]
        self.is_shut = False
        self.broken: str = ""
        """Why no call is taken any more; empty: it works."""
        self.reason: BaseException | None = None
        """What broke it."""

    # From any thread

    def check(self) -> None:
        """That calls are taken.

        Raises:
            BrokenProcessPool: a worker could not be started, or died, and the executor does not go on without it.
            RuntimeError: it is shut down, the interpreter ends, or this is a fork of the process that made it.
        """
        if self.broken:
            raise BrokenProcessPool(self.broken) from self.reason
        if self.is_shut:
            raise RuntimeError(AFTER_SHUTDOWN)
        if is_interpreter_ending:
            raise RuntimeError("cannot schedule new futures after interpreter shutdown")
        if self._pid is not None and self._pid != os.getpid():
            raise RuntimeError("this executor was used before a fork and works only in the process that used it; make a new one")

    def _is_of_another_process(self) -> bool:
        return self._pid is not None and self._pid != os.getpid()

    def submit(self, request: Request) -> None:
        """Take a call. Its future ends in any case."""
        if self.thread is None:
            self._start()
        self._inbox.append(request)
        if not self._is_due:
            self._is_due = True
            self._wake(self._take)
        if self._is_over:
            self._empty_inbox()

    def wait_launched(self) -> None:
        """Wait until the processes of the first workers are started, ready or not."""
        self._has_launched.wait()

    def shut(self, *, cancel: bool = False) -> None:
        """Take no more calls, finish those that were accepted, and end. `cancel`: but none that waits."""
        if self._is_of_another_process():  # the thread is not there
            self.is_shut = True
            return
        with _start_lock:
            self.is_shut = True
            if self.thread is not None:
                self._wake(lambda: self._shut(cancel))

    def kill(self, signum: int) -> None:
        """Shut, cancel what waits, and send all workers this signal. They are not replaced."""
        self.shut(cancel=True)
        if self.thread is not None and os.getpid() == self._pid:
            self._wake(lambda: self._kill(signum))

    def join(self) -> None:
        """Wait until the thread has ended, unless this is that thread."""
        thread = self.thread
        if thread is not None and thread is not threading.current_thread() and os.getpid() == self._pid:
            thread.join()

    def release(self) -> None:
        """Nobody has the executor any more. From any thread, in the midst of anything."""
        if not self.is_shut and not self._is_of_another_process():
            self.is_shut = True
            if self.thread is not None:
                self._wake(lambda: self._shut(False))

    def forget(self, function: Function) -> None:
        """No call needs this held function any more. From any thread, in the midst of anything."""
        supervisor = self._supervisor
        if supervisor is not None and os.getpid() == self._pid:
            self._wake(lambda: supervisor.forget(function, ()))  # each call holds what holds the function

    def _start(self) -> None:
        with _start_lock:
            if self.thread is not None:
                return
            self.check()
            self._pid = os.getpid()
            loop = _new_loop()
            # A daemon, and joined when the interpreter ends: so a third Ctrl-C gets past it.
            thread = threading.Thread(target=self._run, args=(loop,), name=f"percore-executor-{next(_numbers)}", daemon=True)
            self._loop = loop
            _portals.add(self)
            try:
                thread.start()
            except BaseException:
                _portals.discard(self)
                loop.close()
                raise
            self.thread = thread

    def _wake(self, callback: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: it is over
            self._loop.call_soon_threadsafe(callback)

    def _empty_inbox(self) -> None:
        """After the end: nobody else will look at these."""
        while True:
            try:
                future, *_ = self._inbox.popleft()
            except IndexError:
                return
            if begins(future):
                resolve(future, None, self._last_word())

    # The thread

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        try:
            for name in HALF:  # so that the first step of a start starts the processes
                import_module(name)
            asyncio.set_event_loop(loop)
            loop.run_until_complete(self._main())
            loop.run_until_complete(loop.shutdown_asyncgens())
        except BaseException as error:  # a fault of percore: nobody may wait for ever
            logger.exception("percore: the thread of an executor failed")
            self.broken, self.reason = self.broken or f"its thread failed: {error!r}", self.reason or error
        finally:
            asyncio.set_event_loop(None)
            loop.close()
            self._has_launched.set()
            self._is_over = True
            self._end_all()
            _portals.discard(self)

    async def _main(self) -> None:
        loop = self._loop
        self._end = loop.create_future()
        starting = loop.create_task(self.runner.start(), name="percore-start")
        loop.call_soon(self._launched)  # after its first step, which starts the processes
        try:
            await starting
        except Exception as error:  # StartupFailed, and what pickling the lifespan raised, or no memory
            if not self.broken:
                self._break(str(error), error)
        else:
            self._is_started = True
            self._look()
            await self._end
        await self.runner.aclose(grace=0 if self.broken else None)

    def _launched(self) -> None:
        self._has_launched.set()
        supervisor: Supervisor | None = getattr(self.runner, "_supervisor", None)
        if supervisor is None:  # the start has failed before that
            return
        self._supervisor = supervisor
        workers = len(supervisor.slots)
        self._room = [supervisor.dispatch.room_for(Kind.TASK) * workers, supervisor.dispatch.room_for(Kind.THREAD) * workers]
        if self._is_pool:
            supervisor.on_death = self._died
        self._take()
        while self._asked:
            self._asked.pop(0)()

    # Calls

    def _take(self) -> None:
        """Take what has been submitted."""
        self._is_due = False
        supervisor = self._supervisor
        if supervisor is None or self._end.done():  # `_launched` takes it, or it comes too late
            return
        known, of, inbox, waiting = supervisor.known, supervisor.functions.of, self._inbox, self._waiting
        for _ in range(len(inbox)):
            future, fn, args, kwargs = inbox.popleft()
            try:
                function = known.get(id(fn)) or (self._hold(supervisor, fn) if type(fn) is Held else of(fn))
            except BaseException as error:  # a generator function, or nothing that can be called
                if begins(future):
                    self._tell(future, None, error)
            else:
                waiting[function.kind].append((future, function, args, kwargs, fn if type(fn) is Held else None))
        self._pump()

    def _hold(self, supervisor: "Supervisor", held: Held) -> Function:
        if held.function is None:
            held.function = supervisor.functions.hold(held.fn)
        return held.function

    def _pump(self) -> None:
        """Hand over what there is room for."""
        supervisor, room = self._supervisor, self._room
        if supervisor is None:
            return
        if supervisor.is_closing:  # broken or killed: no worker will have room for what a thread submitted meanwhile
            self._refuse_waiting()
            return
        submit = supervisor.intake.submit
        for kind, waiting in enumerate(self._waiting):
            while waiting and room[kind] > 0:
                future, function, args, kwargs, held = waiting.popleft()
                if not begins(future):
                    continue
                job = Job(self, future, held)
                job.kind = kind
                self._jobs.add(job)
                room[kind] -= 1
                try:
                    _ = submit(function, args, kwargs, None, None, cast("Call", job))
                except BaseException as error:  # broken; or pickling has raised KeyboardInterrupt, which is this call's alone
                    self.ended(job, None, error)

    def _refuse_waiting(self) -> None:
        for waiting in self._waiting:
            while waiting:
                future = waiting.popleft()[0]
                if begins(future):
                    self._tell(future, None, self._last_word())

    def ended(self, job: Job, value: Any, error: BaseException | None) -> None:
        """A call has ended so."""
        if job.is_done:
            return
        future = self._leave(job)
        if error is not None:
            if type(error) is ThreadInitializerFailed:
                self._break("a thread_initializer failed", error)
                error = self._last_word()
            elif self._is_pool and type(error) is RemoteError and not error.remote_traceback:
                # Its result could not be read here.
                self._break(ABRUPTLY, error.__cause__ or error)
                error = self._last_word()
        self._tell(future, value, error)

    def cut_off(self, job: Job) -> None:
        """A call was stopped with its worker; its future is told when all have ended."""
        if not job.is_done:
            self._cut.append(self._leave(job))
            self._loop.call_soon(self._look)

    def _leave(self, job: Job) -> Future[Any]:
        job.is_done = True
        self._jobs.discard(job)
        self._room[job.kind] += 1
        future, job.future = job.future, None
        assert future is not None
        return future

    def _tell(self, future: Future[Any], value: Any, error: BaseException | None) -> None:
        if not self._outcomes:
            self._loop.call_soon(self._deliver)
        self._outcomes.append((future, value, error))

    def _deliver(self) -> None:
        """Tell the futures. Runs user code: their callbacks."""
        outcomes, self._outcomes = self._outcomes, []
        self._pump()  # first the workers
        outcomes.reverse()
        while outcomes:
            resolve(*outcomes.pop())
        self._look()

    # Ending

    def _look(self) -> None:
        """Whether there is nothing left to wait for."""
        if not self._is_started or self._end.done():
            return
        is_idle = not (self._jobs or self._waiting[0] or self._waiting[1] or self._inbox or self._outcomes)
        supervisor = self._supervisor
        if supervisor is not None and supervisor.broken is not None and not self.broken:
            self._break(str(supervisor.broken), supervisor.broken)
        if self.broken or (self.is_shut and is_idle):
            self._end.set_result(None)

    def _shut(self, cancel: bool) -> None:
        if self._supervisor is None:
            self._asked.append(lambda: self._shut(cancel))
            return
        self._take()
        if cancel:
            for waiting in self._waiting:
                while waiting:
                    future = waiting.popleft()[0]
                    if future.cancel():
                        begins(future)  # which tells those who wait
        self._look()

    def _kill(self, signum: int) -> None:
        supervisor = self._supervisor
        if supervisor is None:
            self._asked.append(lambda: self._kill(signum))
            return
        self._is_killed = True
        supervisor.signal_all(signum)  # with the last worker goes what none of them had begun

    def _end_jobs(self, supervisor: "Supervisor") -> None:
        for job in list(self._jobs):
            self._tell(self._leave(job), None, self._last_word())
            if job.member is None:  # it waits there
                supervisor.cancelled(cast("Call", job))

    def _died(self, member: Member, exitcode: int | None, was_ready: bool) -> None:
        """A worker has died, in a pool."""
        if was_ready or self._is_started:
            self._break(ABRUPTLY, None)

    def _break(self, text: str, reason: BaseException | None) -> None:
        """Take no more calls, end all there are, and all workers."""
        if self.broken:
            return
        self.reason = reason
        self.broken = text or "the workers could not be started"
        supervisor = self._supervisor
        if supervisor is not None:
            supervisor.refuse_calls()
            self._end_jobs(supervisor)
            self._loop.call_soon(supervisor.kill_all)
        self._look()

    def _last_word(self) -> BaseException:
        """What calls get that are not made any more."""
        reason = self.reason
        if isinstance(reason, BrokenProcessPool):
            return reason
        if not self.broken and not self._is_killed:
            return RuntimeError(AFTER_SHUTDOWN)
        error = BrokenProcessPool(self.broken or ABRUPTLY)
        error.__cause__ = reason
        return error

    def _end_all(self) -> None:
        """At the end of the thread: whatever is left ends now."""
        outcomes, self._outcomes = self._outcomes, []
        for outcome in outcomes:
            resolve(*outcome)
        left = [*self._cut, *(self._leave(job) for job in list(self._jobs))]
        self._cut.clear()
        for waiting in self._waiting:
            while waiting:
                future = waiting.popleft()[0]
                if begins(future):
                    left.append(future)
        for future in left:
            resolve(future, None, self._last_word())
        self._empty_inbox()


def _new_loop() -> asyncio.AbstractEventLoop:
    if uvloop_wanted():
        with contextlib.suppress(ImportError):
            import uvloop

            return uvloop.new_event_loop()
    return asyncio.new_event_loop()


def _at_exit() -> None:
    """The interpreter ends: every executor finishes what it has accepted."""
    global is_interpreter_ending
    is_interpreter_ending = True
    portals = list(_portals)
    for portal in portals:
        portal.shut()
    for portal in portals:
        portal.join()


threading._register_atexit(_at_exit)  # type: ignore[attr-defined]  # as the standard library's: before threads are joined


def _forget_all() -> None:
    """In a fork the threads are gone, one of which may have held the lock."""
    global _start_lock
    _start_lock = threading.RLock()
    _portals.clear()


os.register_at_fork(after_in_child=_forget_all)

TERMINATE: Final = int(signal.SIGTERM)
KILL: Final = int(signal.SIGKILL)
