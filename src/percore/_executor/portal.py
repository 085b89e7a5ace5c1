"""The portal of an executor: an event loop in a thread of its own, which makes calls for futures of the standard library.

Guarantees:
    A submitting thread appends to the inbox and wakes the loop unless a wake-up is already due. It takes no lock and never blocks,
    except that the first `submit` starts the thread.
    Every accepted future ends, even if the workers, this thread or the interpreter end first.

The inbox needs no lock. A thread first appends and then checks whether a wake-up is due; the loop first clears that mark and then
empties the inbox. In every interleaving, either the loop sees the item or the thread finds the mark cleared and wakes the loop.
After the end, a thread finds the phase OVER and ends the remaining futures itself. Each item is popped once.

The phases are those of `ExecutorLife`. Each has one way out: `look` makes the only decision, and the workers are closed in one
place. Each event sets a mark, and the same steps follow in every phase:

    event                                     mark      what follows
    shutdown, collected                       SHUT      calls that wait here are cancelled, if asked for; `look`
    kill_workers, terminate_workers           KILLED    workers get the signal and are not replaced; calls that no worker has begun
                                                        end with the last worker; `look`
    a death in a pool, a failed initializer   BROKEN    every call ends; the supervisor kills its workers; `look`

The supervisor reports each end of a call or worker to its one `Closing`. It also reports ended calls to the `Jobs`, and new workers
and deaths to the portal, its `WorkerObserver`. Only in a pool a death breaks the executor.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import threading
from collections import deque
from typing import TYPE_CHECKING, Final, TypeAlias

import percore
from percore._common.log import report
from percore._common.system import new_loop
from percore._executor.futures import begins, resolve, waits_in_step
from percore._executor.life import ABRUPTLY, ExecutorEvent, ExecutorLife, ExecutorPhase, Mark, the_end
from percore._executor.readings import Readings
from percore._runner.early import MODULES, cool_down, holds_fork_servers

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from percore._calls.functions import Function
    from percore._executor.futures import Request
    from percore._executor.jobs import Jobs
    from percore._monitor.statistics import Statistics
    from percore._monitor.usage import Usage
    from percore._runner.assembly import Assembly
    from percore._supervisor.burials import WorkerObserver
    from percore._supervisor.pool_worker import PoolWorker


_portals: Final[set[Portal]] = set()
"""The portals whose threads start or run."""

_start_lock = threading.RLock()
"""Held while an executor's thread is started. Reentrant: a `__del__` that runs meanwhile in this thread may submit."""

_numbers: Final = itertools.count()
_OVER: Final = ExecutorPhase.OVER


def _import_modules() -> None:
    for name in (*MODULES, "percore._runner.assembly", "percore._executor.jobs"):
        percore._import_uncollected(name)


Assemble: TypeAlias = "Callable[[asyncio.AbstractEventLoop, WorkerObserver | None], Assembly]"
WarmUp: TypeAlias = "Callable[[], None]"
is_interpreter_ending = False


class Portal:
    """Makes the calls of an executor in a thread. Unless noted, call methods only from the loop's thread."""

    def __init__(self, assemble: Assemble, warm_up: WarmUp = lambda: None, *, is_pool: bool) -> None:
        """Start nothing.

        `assemble`: makes the workers' engine in the loop. `warm_up`: begins to start the processes that it needs, before the
        imports. `is_pool`: the death of one worker breaks the executor.
        """
        self._assemble: Assemble | None = assemble
        """None after the end: it refers to the user's initializer and initargs."""
        self._warm_up: WarmUp | None = warm_up
        """None after the end, for the same reason."""
        self._is_pool = is_pool
        self._of_parent: object = None
        self._renew()

    def _renew(self) -> None:
        """Become unused."""
        self.life = ExecutorLife()
        self._pid: int | None = None
        """The process that uses the portal. None: not used yet."""
        self.thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop
        self._inbox: deque[Request] = deque()
        self._is_due = False
        self.jobs: Jobs | None = None
        """None until the first workers have been launched."""
        self._has_launched = threading.Event()
        self._asked: list[Callable[[Jobs], None]] = []
        """Steps that were asked for before the workers were launched."""
        self._settled: asyncio.Future[None]
        self._readings = Readings()

    def forked(self) -> None:
        """In a fork, which has no thread but its own: become unused, unless the portal takes no more calls.

        The futures of calls that were submitted before end only in the parent.
        """
        if not self.life.marks:
            # Finalizers of the parent's loop and workers must not run here while the parent uses them.
            self._of_parent = self._of_parent, vars(self).get("_loop"), self._readings, self.jobs, self._inbox, self.life
            self._renew()

    # From any thread

    def check(self) -> None:
        """Check that the executor takes calls.

        Raises:
            BrokenProcessPool: the executor is broken: a worker could not be started, or it died and is not replaced.
            RuntimeError: the executor is shut down, or the interpreter is ending.
        """
        if self.life.marks:
            raise self.life.refusal()
        if is_interpreter_ending:
            raise RuntimeError("cannot schedule new futures after interpreter shutdown")

    def _is_here(self) -> bool:
        """Return whether this process uses the portal, or none does yet."""
        return self._pid is None or self._pid == os.getpid()

    def submit(self, request: Request) -> None:
        """Accept a call. Its future always ends."""
        if self.thread is None:
            self.start()
        self._inbox.append(request)
        if not self._is_due and self.thread is not None:  # None: this thread is starting it, and `_launched` takes the calls
            try:
                self._is_due = True
                self._wake(self._take)
            except BaseException:  # a Ctrl-C: perhaps the loop was not woken, and then the next call must wake it
                self._is_due = False
                raise
        if self.life.phase is _OVER:
            self._empty_inbox()

    def statistics(self) -> Statistics:
        """Return the counters of the supervisor, and count the calls that wait here as queued."""
        self.check()
        from dataclasses import replace

        from percore._monitor.statistics import Statistics
        from percore._supervisor.snapshot import snapshot

        jobs, waiting = self.jobs, len(self._inbox)
        if jobs is None:
            return Statistics(running=0, queued=waiting, done=0, failed=0, retried=0, restarts=0, workers=())
        now = snapshot(jobs.supervisor, is_here=threading.current_thread() is self.thread)
        return replace(now, queued=now.queued + waiting + jobs.waiting())

    def usage(self) -> Usage:
        """Return what this process, the fork server and the workers use, as the loop has read it."""
        self.check()
        if self.thread is None:
            from percore._monitor.usage import UsageMeter

            return UsageMeter().measure({os.getpid(): "supervisor"})
        if self.thread is threading.current_thread():
            raise RuntimeError(
                "usage() waits for the executor's own thread, which runs this code: a callback of a future, or code that is run "
                "while an object is pickled. Call it in another thread"
            )
        asked = self._readings.add()
        self._wake(self._readings.take)
        if self.life.phase is _OVER:
            self._readings.fail(self.life.refusal())
        return asked.result()

    def wait_launched(self) -> None:
        """Wait until the processes of the first workers have been started, whether or not they are ready.

        Return at once in the thread that starts them: the user's code may submit while it is pickled there.
        """
        if self.thread is not None and self.thread is not threading.current_thread():
            self._has_launched.wait()

    def shut(self, *, cancel: bool = False) -> None:
        """Take no more calls, finish the accepted ones, and end. `cancel`: cancel the calls that wait instead."""
        if not self._is_here():  # the thread does not exist here
            self.life.marks.add(Mark.SHUT)
            return
        with _start_lock:
            self.life.marks.add(Mark.SHUT)
            if self.thread is not None:
                self._ask(lambda jobs: self._shut(jobs, cancel))

    def kill(self, signum: int) -> None:
        """Shut down, cancel the waiting calls, and send all workers this signal. They are not replaced."""
        self.shut(cancel=True)
        if self.thread is not None and self._is_here():
            self._ask(lambda jobs: self._kill(jobs, signum))

    def join(self) -> None:
        """Wait until the thread has ended. Return at once in that thread itself, and in a fork.

        Raises:
            RuntimeError: a garbage collection has run the code that waits, in the middle of a step that the thread may wait for.
        """
        thread = self.thread
        if thread is threading.current_thread() or not self._is_here():
            return
        if thread is None:
            if self in _portals:  # this thread starts it
                raise waits_in_step()
            return
        if thread.is_alive() and (_start_lock._is_owned() or holds_fork_servers()):  # type: ignore[attr-defined]
            raise waits_in_step()
        thread.join()

    def release(self) -> None:
        """Shut down because the executor was garbage-collected. May be called from any thread, at any point of its code."""
        if Mark.SHUT not in self.life.marks and self._is_here():
            self.life.marks.add(Mark.SHUT)
            if self.thread is not None:
                self._ask(lambda jobs: self._shut(jobs, cancel=False))

    def forget(self, function: Function) -> None:
        """Forget a held function that no call needs any more. May be called from any thread, at any point of its code."""
        jobs = self.jobs
        if jobs is not None and self._is_here():
            self._wake(lambda: jobs.supervisor.functions.retire(function, ()))  # (): each call references its Held, so none is left

    def start(self) -> None:
        """Start the thread and the workers, unless that has been done. Any thread may call this."""
        with _start_lock:
            if self.thread is not None or self in _portals:  # a `__del__` submits while this thread starts it
                return
            self.check()
            self._pid = os.getpid()
            _portals.add(self)
            try:
                assert self._warm_up is not None
                self._warm_up()
                self._start_thread()
            except BaseException as error:
                if self.thread is None:
                    _portals.discard(self)
                    self._empty_inbox(error)  # what a `__del__` has submitted meanwhile
                    if not _portals:
                        cool_down()  # the limit that forbids the thread may have ended the fork server, and nothing would reap it
                raise

    def _start_thread(self) -> None:
        """Start the thread, and set `thread`.

        Whoever pops the ticket decides whether it runs: a Ctrl-C may come while this thread waits for the new one to begin, and
        nobody knows then whether it has.
        """
        _import_modules()  # not in the new thread: a fork made while another thread imports a module could never import it
        self._loop = loop = new_loop()
        tickets = deque([loop])
        # A daemon that `_at_exit` joins: a third Ctrl-C can then still end the interpreter.
        name = f"percore-executor-{next(_numbers)}"
        thread = threading.Thread(target=self._begin, args=(tickets,), name=name, daemon=True)
        try:
            thread.start()
            self.thread = thread
        except BaseException:
            try:
                tickets.pop().close()
            except IndexError:  # it runs
                self.thread = thread
            raise

    def _wake(self, callback: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: the portal is over
            self._loop.call_soon_threadsafe(callback)

    def _ask(self, step: Callable[[Jobs], None]) -> None:
        """Take this step in the loop, once the first workers have been launched."""
        self._wake(lambda: self._asked.append(step) if self.jobs is None else step(self.jobs))

    def _empty_inbox(self, error: BaseException | None = None) -> None:
        """End the calls in the inbox, which no loop reads, with this error. None: they were submitted after the end."""
        while True:
            try:
                future, *_ = self._inbox.popleft()
            except IndexError:
                return
            if begins(future):
                resolve(future, None, error or self.life.last_word())

    # The thread

    def _begin(self, tickets: deque[asyncio.AbstractEventLoop]) -> None:
        try:
            loop = tickets.pop()
        except IndexError:  # the start was given up
            return
        self._run(loop)

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        import asyncio

        self.life.advance(ExecutorEvent.USE)
        try:
            asyncio.set_event_loop(loop)
            loop.run_until_complete(self._main())
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.run_until_complete(self._readings.settle())
        except BaseException as error:  # a bug in percore: every future must end all the same
            report(logging.ERROR, "the thread of an executor failed", exc_info=error)
            self.life.break_off(f"its thread failed: {error!r}", error)
        finally:
            asyncio.set_event_loop(None)
            loop.close()
            self._has_launched.set()
            self.life.advance(ExecutorEvent.END)
            if self.jobs is not None:
                self.jobs.end()
            self._assemble = self._warm_up = None
            self._empty_inbox()
            self._readings.fail(self.life.refusal())
            _portals.discard(self)

    async def _main(self) -> None:
        loop = self._loop
        assert self._assemble is not None
        try:
            assembly = await self._assemble(loop, self).supervise()
        except Exception as error:  # an error of pickling the lifespan or the initializer, or no memory
            self._fail(error)
            return
        starting = loop.create_task(assembly.supervisor.pool.start(), name="percore-start")
        loop.call_soon(self._launched, assembly)  # runs after the first step of `starting`, which starts the processes
        try:
            await starting
        except Exception as error:  # StartupFailed
            self._fail(error)  # first: a call that runs in another worker must not hold up the close
            await assembly.closing.close(grace=0)
            return
        self.life.advance(ExecutorEvent.READY)
        self._settled = loop.create_future()
        self.look()
        await self._settled
        await assembly.closing.close(grace=0 if self.life.text else None)

    def _fail(self, error: Exception) -> None:
        """End, because the workers could not be started."""
        self.break_off(str(error), error)
        self.life.advance(ExecutorEvent.FAIL)

    def _launched(self, assembly: Assembly) -> None:
        from percore._executor.jobs import Jobs

        self._has_launched.set()
        self._readings.open(assembly.usage)
        self.jobs = Jobs(assembly.supervisor, self.life, self, is_pool=self._is_pool)
        self._take()
        while self._asked:
            self._asked.pop(0)(self.jobs)

    def _take(self) -> None:
        self._is_due = False
        # Otherwise `_launched` will take the calls, or the end of the thread will end them.
        if self.jobs is not None and self.life.phase in (ExecutorPhase.STARTING, ExecutorPhase.RUNNING):
            self.jobs.take(self._inbox)

    # Ending

    def look(self) -> None:
        """Begin closing if there is nothing left to wait for."""
        if self.life.phase is not ExecutorPhase.RUNNING:
            return
        assert self.jobs is not None
        broken = self.jobs.supervisor.phase.broken
        if broken is not None and not self.life.text:
            self.break_off(str(broken), broken)  # which looks again
        elif self.life.may_settle(is_idle=not self._inbox and self.jobs.is_idle()):
            self.life.advance(ExecutorEvent.SETTLE)
            self._settled.set_result(None)

    def _shut(self, jobs: Jobs, cancel: bool) -> None:
        self._take()
        if cancel:
            jobs.cancel_waiting()
        self.look()

    def _kill(self, jobs: Jobs, signum: int) -> None:
        self.life.marks.add(Mark.KILLED)
        jobs.supervisor.closing.signal_all(signum)  # calls that no worker has begun end with the last worker

    def seated(self) -> None:
        """Implement `WorkerObserver`: calls that wait may begin there."""
        if self.jobs is not None:
            self.jobs.seated()

    def died(self, member: PoolWorker, *, was_ready: bool) -> None:
        """Implement `WorkerObserver`: break the executor if it is a pool.

        One that was not ready during the start is left to the start, which knows more. But if calls run in other workers, they
        must end at once, and the reason is the death.
        """
        if not self._is_pool:
            return
        is_late = self.life.phase is not ExecutorPhase.STARTING
        if was_ready or is_late or (member.failure is None and self.jobs is not None and self.jobs.are_sent()):
            exitcode, why, *_ = member.end
            self.break_off(ABRUPTLY, the_end(member.name, exitcode, why))

    def break_off(self, text: str, cause: BaseException | None) -> None:
        """Take no more calls, end every call that was handed over, and kill all workers."""
        if not self.life.break_off(text, cause):
            return
        if self.jobs is not None:
            closing = self.jobs.supervisor.closing
            closing.refuse_calls()
            self.jobs.fail_running()
            self._loop.call_soon(closing.kill_all)
        self.look()


def _at_exit() -> None:
    """When the interpreter ends, shut down every executor, wait until its accepted calls are finished, and end the fork server."""
    global is_interpreter_ending
    is_interpreter_ending = True
    portals = list(_portals)
    for portal in portals:
        portal.shut()
    for portal in portals:
        portal.join()
    cool_down()


threading._register_atexit(_at_exit)  # type: ignore[attr-defined]  # as concurrent.futures does: before threads are joined


def _forget_all() -> None:
    """Start anew in a fork: the portals' threads do not exist there, and one of them may have held the lock."""
    global _start_lock
    _start_lock = threading.RLock()
    for portal in _portals:
        portal.forked()
    _portals.clear()


os.register_at_fork(after_in_child=_forget_all)
