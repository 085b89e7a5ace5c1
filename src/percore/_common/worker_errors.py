"""WorkerDied, RunnerBroken and StartupFailed: the errors of workers that are gone. `_common.errors` shows all classes."""

import signal as _signal
import sys as _sys

from percore._common.errors import PercoreError

try:
    from concurrent.futures.process import BrokenProcessPool
except RuntimeError as error:  # the import registers an exit handler, which Python refuses after the main thread has ended
    raise RuntimeError(
        "percore was first used after the main thread had ended, and Python then refuses to import concurrent.futures. "
        "Import percore earlier: write `from percore import Runner` in code that the main thread runs"
    ) from error

KILLED = "perhaps out of memory, or killed by an operator"
"""A likely reason of SIGKILL, where nothing more is known."""

_HINTS = {
    "SIGKILL": KILLED,
    "SIGSEGV": "a crash in native code",
    "SIGBUS": "a crash in native code, or a full file system under mapped memory",
    "SIGABRT": "native code called abort()",
    "SIGILL": "native code built for another CPU",
}

_MOST_NAMES = 5


def signal_of(exitcode: int | None) -> str | None:
    """Return the name of the signal in an exit code of subprocess (-9 is "SIGKILL"), or None if no signal ended the process."""
    if exitcode is None or exitcode >= 0:
        return None
    try:
        return _signal.Signals(-exitcode).name
    except ValueError:
        return f"signal {-exitcode}"


def how(exitcode: int | None, detail: str = "") -> str:
    """Return an end in words: "by SIGKILL (perhaps out of memory …)", "with exit code 3", "(its node was lost)".

    `detail` says more about it, in place of a likely reason.
    """
    name = signal_of(exitcode)
    if name is None and exitcode is None:
        return f"({detail or 'exit status unknown'})"
    detail = detail or _HINTS.get(name or "", "")
    return (f"with exit code {exitcode}" if name is None else f"by {name}") + (f" ({detail})" if detail else "")


def mebibytes(size: int) -> str:
    """Return a size in bytes as a text such as "12.5 MiB"."""
    return f"{size / 2**20:.1f} MiB"


def frozen_hint() -> str:
    """In a frozen program, return a likely reason why a worker died before it was ready; otherwise an empty string."""
    if not getattr(_sys, "frozen", False):
        return ""
    return (
        "; this program is frozen, and its helpers are the program itself: it has to call multiprocessing.freeze_support() "
        "first of all under `if __name__ == '__main__':`"
    )


def _beside(others: dict[str, int]) -> str:
    """Return in words which calls ran beside another one, the most frequent first: "4 other calls (fetch ×3, parse)"."""
    names = sorted(others, key=lambda name: -others[name])
    shown = [name if others[name] == 1 else f"{name} ×{others[name]}" for name in names[:_MOST_NAMES]]
    more = ["…"] if len(names) > _MOST_NAMES else []
    total = sum(others.values())
    return f"{total} other call{'s' * (total > 1)} ({', '.join(shown + more)})"


class WorkerDied(PercoreError, BrokenProcessPool):
    """The worker that held this call died.

    Attributes:
        pid: process id of the dead worker; None if its process was never started.
        exitcode: the exit code as in subprocess: -9 for SIGKILL, 3 for `os._exit(3)`; None if it is unknown.
        signal: name of the signal, or None.
        call: qualified name of the function.
        age: seconds since the call began in that worker, or None if it had not begun.
        started: whether the call had begun in that worker. It is False only if no other worker will run the call.
        attempts: how many times this call has begun, in any worker. With 0 it has never begun, so repeating it is safe.
        why: why percore itself killed the worker; empty if it died in another way.
        detail: more about the end where it is known, such as the loss of the worker's machine; empty otherwise.
        memory: how many bytes of memory the worker had, as far as percore knows: the most that it had in use at a time, with shared
            memory, if its fork server could tell; else what it had at the last sample of `max_memory_per_worker`; else None.
        others: which other calls ran in the worker when it died: their number by qualified name of the function. One of them may be
            what ended it.
        node: the name of the worker's node; None where the workers run on the program's own machine.
    """

    _fields = ("pid", "exitcode", "call", "age", "started", "attempts", "why", "detail", "others", "memory", "node")

    def __init__(  # noqa: PLR0913, PLR0917  # its fields
        self,
        pid: int | None,
        exitcode: int | None,
        call: str,
        age: float | None = None,
        started: bool = True,
        attempts: int = 1,
        why: str = "",
        detail: str = "",
        others: dict[str, int] | None = None,
        memory: int | None = None,
        node: str | None = None,
    ) -> None:
        self.pid = pid
        self.exitcode = exitcode
        self.signal: str | None = signal_of(exitcode)
        self.call = call
        self.age = age
        self.started = started
        self.attempts = attempts
        self.why = why
        self.detail = detail
        self.others: dict[str, int] = others or {}
        self.memory = memory
        self.node = node
        began = f"while it ran {call}" + (f" for {age:.3g} s" if age is not None else "") if started else f"before it began {call}"
        if self.others:
            began += f"; {_beside(self.others)} ran there, too"
        if not started:
            advice = "No other worker will run it"
        elif attempts > 1:
            advice = f"That was attempt {attempts}; no retries are left"
        else:
            advice = (
                "Not retried: it may have had side effects. If repeating is safe, call it again; "
                "a Runner does that by itself with `runner.options(retries=1)`, except for streams"
            )
        place = "" if node is None else f" on node {node}"
        who = f"the worker{place}" if pid is None else f"worker (pid {pid}{place})"  # None: its process was never started
        if why and exitcode is None and detail:  # it could not be killed
            end = f"was given up by percore ({why}; {detail})"
        else:
            end = f"was killed by percore ({why})" if why else f"died {how(exitcode, detail)}"
        super().__init__(f"{who} {end} {began}. {advice}")


class RunnerBroken(PercoreError, BrokenProcessPool):
    """percore has given up starting workers: they died too often before they began a call, or there was no place for any.

    Attributes:
        deaths: how many times in a row the workers of a slot died; 0 if there was no place for a worker.
        exitcode: the exit code of the last one, as in subprocess; None if it is unknown.
        detail: the last report of a worker, or why there was no place; empty if there is none.
    """

    _fields = ("deaths", "exitcode", "detail")

    def __init__(self, deaths: int, exitcode: int | None, detail: str = "") -> None:
        self.deaths = deaths
        self.exitcode = exitcode
        self.detail = detail
        if not deaths:
            super().__init__(f"there was no place for any worker in time, and no more are started: {detail}")
            return
        super().__init__(
            f"every worker died {deaths} times in a row before it began a call; the last one died {how(exitcode)}. "
            "No more workers are started. Check the lifespan, the imports and the standard error of the workers"
            + (f". The last report:\n{detail}" if detail else "")
        )


class StartupFailed(PercoreError, BrokenProcessPool):
    """The first start failed: a worker could not be started, raised, died, or was not ready within `start_timeout`.

    percore has stopped all other workers. If a worker raised, the `__cause__` chain ends with its traceback.

    Attributes:
        reason: what failed.
        detail: the report of the worker; empty if there is none.
    """

    _fields = ("reason", "detail")

    def __init__(self, reason: str, detail: str = "") -> None:
        self.reason = reason
        self.detail = detail
        super().__init__(reason + (f"\n\n{detail}" if detail else ""))


for _class in (WorkerDied, RunnerBroken, StartupFailed):
    _class.__module__ = "percore"
