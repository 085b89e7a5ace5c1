"""The portal of an executor: an event loop in a thread of its own, which makes calls for futures of the standard library.

    submit (any thread) ─▶ inbox ─▶ waiting ─▶ Intake.submit ─▶ workers
    Future              ◀─ outcomes           ◀─ Job              ◀─

Guarantees:
    A submitting thread appends to the inbox and wakes the loop unless a wake-up is already due. It takes no lock and never blocks,
    except that the first `submit` starts the thread.
    A call *waits* until the workers have room for it; the room includes the calls that are queued ahead in a worker. While a call
    waits, cancelling its future withdraws it. When the portal hands it over, its arguments are pickled and its future is set
    running, like a future in the call queue of ProcessPoolExecutor.
    Every accepted future ends, even if the workers, this thread or the interpreter end first.
    User code (callbacks of futures) runs between two turns of the loop, when the state is consistent. Its exceptions are logged.

The inbox needs no lock. A thread first appends and then checks whether a wake-up is due; the loop first clears that mark and then
empties the inbox. In every interleaving, either the loop sees the item or the thread finds the mark cleared and wakes the loop.
After the end, a thread finds `_is_over` set and ends the remaining futures itself. Each item is popped once.

How the portal ends: each phase has one way out, so `_look` makes the only decision, and the workers are closed in one place:

    unused ──first submit──▶ starting ──workers ready──▶ running ──nothing to wait for──▶ closing ──workers gone──▶ over
                                └──────the start failed───────────────────────────────────▲

`thread`, `_is_started` and `_is_over` distinguish `unused`, `starting` and `over`; `_end` is done from `closing` on. There is
nothing to wait for when the executor is broken, or when it is shut down and every accepted future has its outcome. Each event sets
a mark, and the same steps follow in every phase:

    event                                     mark                    what follows
    shutdown, collected                       is_shut                 calls that wait here are cancelled, if asked for; `_look`
    kill_workers, terminate_workers           is_shut, _is_killed     workers get the signal and are not replaced; calls that no
                                                                      worker has begun end with the last worker; `_look`
    a death in a pool, a failed initializer   broken                  every call ends; the supervisor kills its workers; `_look`

The supervisor reports each end of a call or worker to its one `Closing`. To the portal it reports ended calls (through
their `Job`) and, in a pool, deaths of workers (`on_death`).
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

from percore._assembly import MODULES, Assembly
from percore._calls import Call, Function
from percore._errors import RemoteError
from percore._futures import begins, resolve
from percore._member import Member
from percore._messages import Kind
from percore._platform import uvloop_wanted
from percore._worker.manners import ThreadInitializerFailed

if TYPE_CHECKING:
    from percore._supervisor import Supervisor

logger: Final = logging.getLogger("percore")

Request: TypeAlias = tuple[Future[Any], Callable[..., Any], tuple[Any, ...], dict[str, Any]]
Waiting: TypeAlias = tuple[Future[Any], Function, tuple[Any, ...], dict[str, Any], Any]
"""A waiting call. The last item is its `Held`, which keeps the function registered, or None."""

ABRUPTLY: Final = "a worker process ended abruptly while the call was running or waiting; the pool is broken"

AFTER_SHUTDOWN: Final = "cannot schedule new futures after shutdown"

_portals: Final[set["Portal"]] = set()
"""The portals whose threads run."""

_start_lock = threading.RLock()
"""Held while an executor's thread is started. Reentrant: a `__del__` that runs meanwhile in this thread may submit."""

_numbers: Final = itertools.count()
is_interpreter_ending = False


class Held:
    """A function that is pickled by value and shared by many calls. It is pickled once, and forgotten when no call needs it."""

    __slots__ = ("_portal", "fn", "function")

    def __init__(self, portal: "Portal", fn: Callable[..., Any]) -> None:
        self._portal = portal
        self.fn = fn
        self.function: Function | None = None
        """Its registration with the supervisor. Only the loop's thread sets it."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.fn(*args, **kwargs)

    def __del__(self) -> None:
        if self.function is not None:
            self._portal.forget(self.function)


class Job:
    """One call, with the interface that the supervisor expects of a call. Its future is resolved at the end of the turn."""

    __slots__ = ("_held", "_portal", "body", "call_id", "function", "future", "is_done", "key", "kind", "member", "owner", "plan")

    queue: ClassVar[None] = None
    size: ClassVar[int] = 1

    # The supervisor sets these, as it does for a Call.
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
        """End with the worker. The portal resolves the future, with the reason, when all workers have ended."""
        self._portal.cut_off(self)


class Portal:
    """Runs workers from a thread, for futures of the standard library. Unless noted, call methods only from the loop's thread."""

    def __init__(self, assemble: Callable[[asyncio.AbstractEventLoop], Assembly], *, is_pool: bool) -> None:
        """`assemble`: makes the workers' supervisor in the loop. `is_pool`: the death of one worker breaks the executor."""
        self._assemble: Callable[[asyncio.AbstractEventLoop], Assembly] | None = assemble
        self._is_pool = is_pool
        self._pid: int | None = None
        """The process that uses the portal. None: not used yet, so a fork may still use its copy."""
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
        """Requests made before the supervisor existed."""
        self._end: asyncio.Future[None]
        self.is_shut = False
        self.broken: str = ""
        """Why the executor takes no more calls. Empty: it is not broken."""
        self.reason: BaseException | None = None
        """The exception that broke the executor."""

    # From any thread

    def check(self) -> None:
        """Check that the executor takes calls.

        Raises:
            BrokenProcessPool: the executor is broken: a worker could not be started, or it died and is not replaced.
            RuntimeError: the executor is shut down, the interpreter is ending, or this is a fork of the process that uses it.
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
        """Accept a call. Its future always ends."""
        if self.thread is None:
            self._start()
        self._inbox.append(request)
        if not self._is_due:
            self._is_due = True
            self._wake(self._take)
        if self._is_over:
            self._empty_inbox()

    def wait_launched(self) -> None:
        """Wait until the processes of the first workers have been started, whether or not they are ready."""
        self._has_launched.wait()

    def shut(self, *, cancel: bool = False) -> None:
        """Take no more calls, finish the accepted ones, and end. `cancel`: cancel the calls that wait instead."""
        if self._is_of_another_process():  # the thread does not exist here
            self.is_shut = True
            return
        with _start_lock:
            self.is_shut = True
            if self.thread is not None:
                self._wake(lambda: self._shut(cancel))

    def kill(self, signum: int) -> None:
        """Shut down, cancel the waiting calls, and send all workers this signal. They are not replaced."""
        self.shut(cancel=True)
        if self.thread is not None and os.getpid() == self._pid:
            self._wake(lambda: self._kill(signum))

    def join(self) -> None:
        """Wait until the thread has ended. Return at once in that thread itself, and in a fork."""
        thread = self.thread
        if thread is not None and thread is not threading.current_thread() and os.getpid() == self._pid:
            thread.join()

    def release(self) -> None:
        """Shut down because the executor was garbage-collected. May be called from any thread, at any point of its code."""
        if not self.is_shut and not self._is_of_another_process():
            self.is_shut = True
            if self.thread is not None:
                self._wake(lambda: self._shut(False))

    def forget(self, function: Function) -> None:
        """Forget a held function that no call needs any more. May be called from any thread, at any point of its code."""
        supervisor = self._supervisor
        if supervisor is not None and os.getpid() == self._pid:
            self._wake(lambda: supervisor.forget(function, ()))  # (): each call references its Held, so none is left

    def _start(self) -> None:
        with _start_lock:
            if self.thread is not None:
                return
            self.check()
            self._pid = os.getpid()
            loop = _new_loop()
            # A daemon that `_at_exit` joins: a third Ctrl-C can then still end the interpreter.
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
        with contextlib.suppress(RuntimeError):  # the loop is closed: the portal is over
            self._loop.call_soon_threadsafe(callback)

    def _empty_inbox(self) -> None:
        """End the calls that were submitted after the end, since the loop no longer reads the inbox."""
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
            for name in MODULES:
                import_module(name)
            asyncio.set_event_loop(loop)
            loop.run_until_complete(self._main())
            loop.run_until_complete(loop.shutdown_asyncgens())
        except BaseException as error:  # a bug in percore: every future must end all the same
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
        assemble, self._assemble = self._assemble, None  # it refers to the user's initializer and initargs
        assert assemble is not None
        try:
            assembly = assemble(loop)
        except Exception as error:  # an error of pickling the lifespan or the initializer, or no memory
            self._break(str(error), error)
            return
        starting = loop.create_task(assembly.supervisor.pool.start(), name="percore-start")
        loop.call_soon(self._launched, assembly.supervisor)  # runs after the first step of `starting`, which starts the processes
        try:
            await starting
        except Exception as error:  # StartupFailed
            await assembly.aclose(grace=0)
            if not self.broken:
                self._break(str(error), error)
        else:
            self._is_started = True
            self._look()
            await self._end
        await assembly.aclose(grace=0 if self.broken else None)

    def _launched(self, supervisor: "Supervisor") -> None:
        self._has_launched.set()
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
        """Move submitted calls from the inbox to `_waiting`, and hand over as many as there is room for."""
        self._is_due = False
        supervisor = self._supervisor
        if supervisor is None or self._end.done():  # `_launched` will take them, or `_end_all` will end them
            return
        known, of, inbox, waiting = supervisor.known, supervisor.functions.of, self._inbox, self._waiting
        for _ in range(len(inbox)):
            future, fn, args, kwargs = inbox.popleft()
            try:
                function = known.get(id(fn)) or (self._hold(supervisor, fn) if type(fn) is Held else of(fn))
            except BaseException as error:  # a generator function, or not callable
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
        """Hand over as many waiting calls as there is room for."""
        supervisor, room = self._supervisor, self._room
        if supervisor is None:
            return
        if supervisor.phase.is_closing:  # broken or killed: no worker will have room for the calls that threads submitted meanwhile
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
                except BaseException as error:  # broken; or pickling raised KeyboardInterrupt, which ends only this call
                    self.ended(job, None, error)

    def _refuse_waiting(self) -> None:
        for waiting in self._waiting:
            while waiting:
                future = waiting.popleft()[0]
                if begins(future):
                    self._tell(future, None, self._last_word())

    def ended(self, job: Job, value: Any, error: BaseException | None) -> None:
        """Record the outcome of a call. Its future is resolved in `_deliver`."""
        if job.is_done:
            return
        future = self._leave(job)
        if error is not None:
            if type(error) is ThreadInitializerFailed:
                self._break("a thread_initializer failed", error)
                error = self._last_word()
            elif self._is_pool and type(error) is RemoteError and not error.remote_traceback:
                # The result could not be unpickled in this process.
                self._break(ABRUPTLY, error.__cause__ or error)
                error = self._last_word()
        self._tell(future, value, error)

    def cut_off(self, job: Job) -> None:
        """A call was stopped with its worker: keep its future until all workers have ended."""
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
        """Resolve the futures of the calls that have ended. Runs user code: their callbacks."""
        outcomes, self._outcomes = self._outcomes, []
        self._pump()  # before the callbacks, so that no worker waits for them
        outcomes.reverse()
        while outcomes:
            resolve(*outcomes.pop())
        self._look()

    # Ending

    def _look(self) -> None:
        """Begin closing if there is nothing left to wait for."""
        if not self._is_started or self._end.done():
            return
        is_idle = not (self._jobs or self._waiting[0] or self._waiting[1] or self._inbox or self._outcomes)
        supervisor = self._supervisor
        if supervisor is not None and supervisor.phase.broken is not None and not self.broken:
            self._break(str(supervisor.phase.broken), supervisor.phase.broken)
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
                        begins(future)  # notifies `concurrent.futures.wait` and `as_completed`
        self._look()

    def _kill(self, signum: int) -> None:
        supervisor = self._supervisor
        if supervisor is None:
            self._asked.append(lambda: self._kill(signum))
            return
        self._is_killed = True
        supervisor.signal_all(signum)  # calls that no worker has begun end with the last worker

    def _end_jobs(self, supervisor: "Supervisor") -> None:
        for job in list(self._jobs):
            self._tell(self._leave(job), None, self._last_word())
            if job.member is None:  # it waits in the supervisor's queue
                supervisor.cancelled(cast("Call", job))

    def _died(self, member: Member, exitcode: int | None, was_ready: bool) -> None:
        """Break the executor: a worker of a pool has died. During the start, one that was not ready yet is left to the start."""
        if was_ready or self._is_started:
            self._break(ABRUPTLY, None)

    def _break(self, text: str, reason: BaseException | None) -> None:
        """Take no more calls, end every call that was handed over, and kill all workers."""
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
        """Return the exception for calls that will not be run any more."""
        reason = self.reason
        if isinstance(reason, BrokenProcessPool):
            return reason
        if not self.broken and not self._is_killed:
            return RuntimeError(AFTER_SHUTDOWN)
        error = BrokenProcessPool(self.broken or ABRUPTLY)
        error.__cause__ = reason
        return error

    def _end_all(self) -> None:
        """End every future that is left, when the thread ends."""
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
    """Shut down every executor when the interpreter ends, and wait until its accepted calls are finished."""
    global is_interpreter_ending
    is_interpreter_ending = True
    portals = list(_portals)
    for portal in portals:
        portal.shut()
    for portal in portals:
        portal.join()


threading._register_atexit(_at_exit)  # type: ignore[attr-defined]  # as concurrent.futures does: before threads are joined


def _forget_all() -> None:
    """Start anew in a fork: the portals' threads do not exist there, and one of them may have held the lock."""
    global _start_lock
    _start_lock = threading.RLock()
    _portals.clear()


os.register_at_fork(after_in_child=_forget_all)

TERMINATE: Final = int(signal.SIGTERM)
KILL: Final = int(signal.SIGKILL)
