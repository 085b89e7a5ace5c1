"""Start workers as processes of a multiprocessing context ("fork", "forkserver" or "spawn"), for an executor's `mp_context`.

A worker is dead when its pidfd becomes readable. multiprocessing's sentinel is less exact: it fires for living processes when their
fork server is killed, and processes that a worker has forked keep it open. It is used only where the system has no pidfds. The exit
code comes from multiprocessing, which reaps its children itself.

Each worker has a lifeline, as under every launcher. The read end is not a held descriptor (see `descriptors.hold`): a fork closes
all held descriptors, and under "fork" the worker needs this one.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from multiprocessing import process as of_multiprocessing
from multiprocessing import reduction
from typing import TYPE_CHECKING, Any

from percore._common.system import HAS_PIDFD
from percore._engines.processes.descriptors import Fd, above_streams, hold, let_go
from percore._engines.processes.launch import Watched, exit_code
from percore._serialization.advice import Nowhere
from percore._serialization.pickler import main_info, value_pickler
from percore._serialization.reducers import REGISTERED
from percore._worker_process.multiprocessing_entry import begin, received
from percore._worker_process.world import HELD_BACK

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from multiprocessing.context import BaseContext
    from multiprocessing.process import BaseProcess

    from percore._protocol.worker_start import Given

_running: set[BaseProcess] = set()

_ONLY_INHERITED = ("multiprocessing.synchronize", "multiprocessing.sharedctypes")
"""Modules of which one is loaded if there is any object that only a process of multiprocessing can get, and only at its start."""

_UNKNOWN = 255  # multiprocessing's own code for an unknown exit code


def needs_inheritance(initializer: Callable[..., object] | None, initargs: tuple[Any, ...]) -> bool:
    """Return whether these contain a lock, queue or value of multiprocessing, which only its own processes can inherit.

    If such objects may exist, this pickles what it is given, in order to look into it.
    """
    if any(_is_of_multiprocessing(arg) for arg in initargs):
        return True
    if initializer is None or not any(name in sys.modules for name in _ONLY_INHERITED):
        return False
    base: Any = value_pickler(main_info().by_value)

    class Finder(base):  # type: ignore[misc]
        def reducer_override(self, obj: Any) -> Any:
            if _is_of_multiprocessing(obj):
                raise _Found
            return super().reducer_override(obj)

    try:
        Finder(Nowhere(), buffer_callback=lambda _: None).dump((initializer, initargs))
    except _Found:
        return True
    except Exception as error:  # it cannot be pickled: the start of the workers reports that
        return isinstance(error, RuntimeError) and "inheritance" in str(error)  # a subclass of a user, for example of Queue
    return False


class _Found(BaseException):
    """An object of multiprocessing was found."""


def _is_of_multiprocessing(obj: object) -> bool:
    # Shared ctypes have classes of any module, and this attribute.
    return type(obj).__module__.partition(".")[0] == "multiprocessing" or (type(obj) in REGISTERED and hasattr(obj, "_wrapper"))


class _Passed(list[int]):
    """Descriptors among the arguments of a process. A forked process inherits them; otherwise they are sent with the pickle."""

    def __reduce__(self) -> tuple[Any, ...]:
        return received, ([reduction.DupFd(number) for number in self],)


class MultiprocessLauncher:
    """Starts workers as processes of one context."""

    def __init__(self, context: BaseContext, given: Given) -> None:
        """`given`: the initializer and its arguments, which travel with each process."""
        self._context: Any = context
        self._given = given
        self._method: str = context.get_start_method()

    def launch(self, boot: bytes, fds: Sequence[int], on_exit: Callable[[int | None], None]) -> MultiprocessProcess:
        """As `Launcher.launch`. An exception from pickling the initializer or its arguments propagates."""
        read_end, lifeline = _lifeline()
        try:
            args = (boot, _Passed([read_end, *fds]), self._given, self._method == "fork")
            process = self._context.Process(target=begin, args=args, daemon=True)
            self._start(process)
            try:
                return MultiprocessProcess(asyncio.get_running_loop(), process, lifeline, on_exit)
            except BaseException:
                process.kill()
                process.join()
                raise
        except BaseException:
            let_go(lifeline)
            raise
        finally:
            os.close(read_end)

    def _start(self, process: BaseProcess) -> None:
        if self._method == "forkserver":  # this may also start the fork server itself, which would keep these signals blocked
            process.start()
            return
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, HELD_BACK)
        try:
            process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def renew(self) -> None:
        """Do nothing: an executor has no reload."""

    def helpers(self) -> dict[int, str]:
        """Return no helpers: every process that this launcher starts is a worker."""
        return {}

    async def aclose(self) -> None:
        """Drop the references to the initializer and its arguments."""
        self._given = (None, ())


def _lifeline() -> tuple[int, Fd]:
    """Make a pipe above the standard streams. Return its read end, which is not held, and its write end, which is.

    Raises:
        OSError: no descriptor is left; nothing is left open.
    """
    read_end, write_end = os.pipe()
    try:
        read_end = above_streams(read_end)
    except BaseException:
        os.close(write_end)
        raise
    try:
        return read_end, hold(Fd(above_streams(write_end)))
    except BaseException:
        os.close(read_end)
        raise


class MultiprocessProcess(Watched):
    """A process that multiprocessing has started."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, process: BaseProcess, lifeline: Fd, on_exit: Callable[[int | None], None]
    ) -> None:
        super().__init__(loop, on_exit)
        self.process = process
        _running.add(process)
        self._lifeline = lifeline
        assert process.pid is not None
        try:
            number = os.pidfd_open(process.pid) if HAS_PIDFD else os.dup(process.sentinel)
        except ProcessLookupError:  # already dead, and reaped by multiprocessing's fork server
            self.pid = process.pid
            loop.call_soon(lambda: self._finish(self._known_code(None)))
        else:
            self._watch(process.pid, hold(Fd(above_streams(number))))

    def kill(self, signum: int = signal.SIGKILL) -> None:
        """Send a signal. Once the process is gone, do nothing."""
        if HAS_PIDFD:
            super().kill(signum)
        elif not self._gone and self.process.exitcode is None and self.pid is not None:
            os.kill(self.pid, signum)

    def _known_code(self, pidfd: Fd | None) -> int | None:
        self.process.join(0)
        code = self.process.exitcode
        return code if code is not None or pidfd is None or not HAS_PIDFD else exit_code(pidfd.number)

    def _cut(self) -> None:
        let_go(self._lifeline)

    def _release(self) -> None:
        super()._release()
        self._cut()
        popen: Any = self.process._popen  # type: ignore[attr-defined]
        if popen.returncode is None:  # if it stayed None, multiprocessing would signal this pid when the interpreter ends
            popen.returncode = _UNKNOWN
        self.process.join(0)
        _running.discard(self.process)


def _disown_all() -> None:
    """Make multiprocessing forget the workers in a fork. Otherwise it would signal and join them when the fork ends."""
    children: set[BaseProcess] = of_multiprocessing._children  # type: ignore[attr-defined]
    children -= _running
    _running.clear()


os.register_at_fork(after_in_child=_disown_all)
