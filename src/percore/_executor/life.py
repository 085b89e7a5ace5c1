"""The life of an executor: its phases, and the error for calls that it does not accept or will not run. Decisions only.

    unused ──use──▶ starting ──ready──▶ running ──settle──▶ closing ──end──▶ over
                        └──────────fail─────────────────────▲

Its thread may also end by an error of percore in any phase, so `end` may follow every other event.

Only the executor's thread changes the phase. An executor also has marks. Each is a reason to take no new calls:

    SHUT     shutdown was called, or the executor was collected. Accepted calls are finished.
    KILLED   the workers got a signal and are not replaced. Calls that no worker has begun end with the last worker.
    BROKEN   a worker of a pool died, an initializer failed, or no worker could be started. All calls end.

Any thread may add a mark at any time, and no mark is ever removed. So no thread can undo another's decision, and no lock is needed.
"""

from copy import copy
from enum import Enum
from typing import Final

from percore._common.errors import IllegalEvent, RemoteTraceback

ABRUPTLY: Final = "a worker process ended abruptly while the call was running or waiting; the pool is broken"
AFTER_SHUTDOWN: Final = "cannot schedule new futures after shutdown"


class ExecutorPhase(Enum):
    """The phases of an executor, as in the diagram above."""

    UNUSED = "unused"
    STARTING = "starting"
    RUNNING = "running"
    CLOSING = "closing"
    OVER = "over"


class ExecutorEvent(Enum):
    """An event that changes the phase."""

    USE = "use"
    """The thread begins, because of the first call."""

    READY = "ready"
    """All workers are ready."""

    FAIL = "fail"
    """The workers could not be started."""

    SETTLE = "settle"
    """There is nothing left to wait for: see `ExecutorLife.may_settle`."""

    END = "end"
    """All workers have ended, and the thread ends."""


class Mark(Enum):
    """A reason to take no new calls, as in the table above."""

    SHUT = "shut"
    KILLED = "killed"
    BROKEN = "broken"


_FOLLOWING: Final[dict[ExecutorPhase, dict[ExecutorEvent, ExecutorPhase]]] = {
    ExecutorPhase.UNUSED: {ExecutorEvent.USE: ExecutorPhase.STARTING},
    ExecutorPhase.STARTING: {
        ExecutorEvent.READY: ExecutorPhase.RUNNING,
        ExecutorEvent.FAIL: ExecutorPhase.CLOSING,
        ExecutorEvent.END: ExecutorPhase.OVER,
    },
    ExecutorPhase.RUNNING: {ExecutorEvent.SETTLE: ExecutorPhase.CLOSING, ExecutorEvent.END: ExecutorPhase.OVER},
    ExecutorPhase.CLOSING: {ExecutorEvent.END: ExecutorPhase.OVER},
    ExecutorPhase.OVER: {},
}


class ExecutorLife:
    """The phase and the marks of one executor."""

    __slots__ = ("_cause", "marks", "phase", "text")

    def __init__(self) -> None:
        self.phase = ExecutorPhase.UNUSED
        self.marks: set[Mark] = set()
        self.text = ""
        """Why the executor is broken; empty if it is not."""
        self._cause: BaseException | None = None

    def advance(self, event: ExecutorEvent) -> None:
        """Take `event`. Call it only in the executor's thread.

        Raises:
            IllegalEvent: the event is not allowed in this phase.
        """
        following = _FOLLOWING[self.phase].get(event)
        if following is None:
            raise IllegalEvent(f"{event.value} in phase {self.phase.value}")
        self.phase = following

    def break_off(self, text: str, cause: BaseException | None) -> bool:
        """Add BROKEN, for this reason. Return False if the executor was broken before."""
        if self.text:
            return False
        self._cause = cause
        self.text = text or "the workers could not be started"
        self.marks.add(Mark.BROKEN)
        return True

    def may_settle(self, *, is_idle: bool) -> bool:
        """Return whether a running executor has nothing left to wait for. `is_idle`: every accepted future has its outcome."""
        return self.phase is ExecutorPhase.RUNNING and (Mark.BROKEN in self.marks or (Mark.SHUT in self.marks and is_idle))

    def refusal(self) -> BaseException:
        """Return the error for a new call. There is a mark."""
        if not self.text:
            return RuntimeError(AFTER_SHUTDOWN)
        from concurrent.futures.process import BrokenProcessPool  # imported by now; the first call need not wait for it

        error = BrokenProcessPool(self.text)
        error.__cause__ = self._cause
        return error

    def last_word(self) -> BaseException:
        """Return the error for an accepted call that will not run any more: one of its own, as `result()` adds to its traceback."""
        from concurrent.futures.process import BrokenProcessPool

        if isinstance(self._cause, BrokenProcessPool):
            error = copy(self._cause)
            error.__cause__ = self._cause.__cause__
            return error
        return BrokenProcessPool(ABRUPTLY) if not self.text and Mark.KILLED in self.marks else self.refusal()

    def __str__(self) -> str:
        return "broken" if self.text else "shut down" if self.marks else "open"


def the_end(worker: str, exitcode: int | None, why: str) -> RemoteTraceback:
    """Return the cause of the errors of a pool that a dead worker has broken, as ProcessPoolExecutor has one since Python 3.15."""
    from percore._common.worker_errors import how

    return RemoteTraceback(f"{worker} terminated abruptly {how(exitcode, why)}")
