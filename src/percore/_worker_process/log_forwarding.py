"""Log records of a worker are sent to the supervisor.

Transport   Log records have their own ring, separate from the channel's rings. The channel's bell announces them, too. When a
            logging call returns, its record is in the ring and the supervisor has been notified. So records logged before a crash
            arrive. The supervisor handles a record before any message that the worker sent after it. At the worker's end no record
            is left to be sent.
Order       One lock is held while a record is copied into the ring. So records arrive in the order in which they were logged,
            whichever threads log them.
Pressure    While the ring is full, a thread that logs waits until the supervisor has read records. This includes the loop's thread.
            Other threads that log wait for the lock. This is the only throttle on a worker that logs faster than the supervisor
            reads, and the ring is the only buffer. The supervisor reports its read position through a pipe; only a waiting thread
            reads from it. (If the bell is a socket, it can be full as well. The thread waits for it in the same way.)
No deadlock A waiting thread needs only the supervisor to go on: it needs no loop, lock or thread of this process. The supervisor
            never waits for a worker when it reads records. If the supervisor dies, its workers die with it.
Re-entrance A signal handler or a `__del__` may log while its thread holds the lock. Its record is queued and written after the
            current one.
Forks       A process that user code forks here shares the ring and must not write to it. So the fork drops the handler and logs as
            an unconfigured process does.
"""

import logging
import os
import select
import struct
import threading
import warnings
from collections import deque
from collections.abc import Callable
from typing import Any, Final, TextIO, TypeAlias

from percore._common.steps import step
from percore._transport.doorbell import MOST_RECORDS, Bell
from percore._transport.log_records import LEAST, RECORD_LIMIT, pack
from percore._transport.ring import HEADER_SIZE, RingWriter, largest_frame

LOG_RING_SIZE: Final = 2 * RECORD_LIMIT
"""Size of a worker's ring for log records, in bytes."""

assert LOG_RING_SIZE // (HEADER_SIZE + LEAST) <= MOST_RECORDS, "the number of unread records could overflow"

MAIN_THERE: Final = "__mp_main__"
"""`__name__` of the program's main module in a worker that imports it."""

POSITION: Final = struct.Struct("<Q")
"""A message through the pipe: how many bytes of the ring the supervisor has read since the start."""

Levels: TypeAlias = tuple[int, tuple[tuple[str, int, bool], ...]]
"""The argument of `logging.disable`, and (name, level, disabled) of each logger that has its own level or is disabled."""

logger: Final = logging.getLogger("percore")
_real_showwarning = warnings.showwarning


@step
class LogWriter:
    """The writing end of a worker's ring for log records."""

    def __init__(self, ring: RingWriter, bell: Bell, pipe: int) -> None:
        """`bell` is the channel's. The supervisor writes its read position to `pipe`."""
        self._ring = ring
        self._bell = bell
        self._pipe = pipe
        self._lock = threading.RLock()
        self._waiting: deque[bytes] = deque()
        self._heard: list[bytes] = []
        """What was read from the pipe and not counted."""
        self._is_writing = False

    def write(self, data: bytes) -> None:
        """Publish one record. From any thread; waits while the ring is full.

        Raises:
            ValueError: the record may never fit into the ring.
        """
        if len(data) > largest_frame(self._ring.size):
            raise ValueError(f"a log record of {len(data)} bytes")
        with self._lock:
            self._waiting.append(data)
            if self._is_writing:  # this thread is writing further down the stack, and writes this record next
                return
            self._is_writing = True
            try:
                while self._waiting:
                    self._put(self._waiting.popleft())
            finally:
                self._is_writing = False

    def _put(self, data: bytes) -> None:
        while self._ring.free() < len(data) + HEADER_SIZE:
            self._hear()
        self._ring.write(data)
        told = self._bell.log(1)
        while not told:
            _wait_to_write(self._bell.out_fileno())
            told = self._bell.log(0)

    def _hear(self) -> None:
        """Wait until the supervisor has read more."""
        if not self._heard:
            # In one step, as Python sees it. A position comes once: an exception between two steps, such as one that a signal
            # handler of the user raises, would lose it, and the next record would wait for ever.
            self._heard += map(os.read, (self._pipe,), (POSITION.size * 512,))
        told = self._heard[-1]
        if not told:  # the supervisor has ended, and its end is about to kill this process: wait
            select.poll().poll()
        position: int = POSITION.unpack(told[-POSITION.size :])[0]
        self._ring.acknowledge(position - self._ring.acknowledged)
        self._heard.clear()


def _wait_to_write(fd: int) -> None:
    poll = select.poll()
    poll.register(fd, select.POLLOUT)
    poll.poll()


class Forwarder(logging.Handler):
    """The handler of a worker's root logger.

    It has no lock of its own: the handler has no state, and `LogWriter` locks the ring. So while one thread waits for room in the
    ring, other threads can still filter and pickle their records.
    """

    def __init__(self, write: Callable[[bytes], None]) -> None:
        super().__init__()
        self._write = write

    def createLock(self) -> None:
        self.lock = None

    def handle(self, record: logging.LogRecord) -> bool:
        passed: Any = self.filter(record)  # since 3.12 a filter may return another record
        if passed:
            self.emit(passed if isinstance(passed, logging.LogRecord) else record)
        return bool(passed)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._write(pack(record))
        except Exception:
            self.handleError(record)


def forward(write: Callable[[bytes], None], levels: Levels) -> None:
    """From now on pass the log records of this process, its warnings, and exceptions that end its threads, to `write`.

    A worker calls this at its start. The root logger then has a handler, so a plain `logging.basicConfig()` in a module imported
    later does nothing, as in any program whose logging is already configured.
    """
    disabled, loggers = levels
    logging.disable(disabled)
    for name, level, is_disabled in loggers:
        first, dot, rest = name.partition(".")
        # The loggers of the program's main module are named `__mp_main__` if the worker imports that module, and `__main__` if its
        # functions are pickled by value.
        for known in (name, f"{MAIN_THERE}{dot}{rest}") if first == "__main__" else (name,):
            one = logging.getLogger(known)
            one.setLevel(level)
            one.disabled = is_disabled
    handler = Forwarder(write)
    logging.getLogger().addHandler(handler)
    warnings.showwarning = _show_warning
    threading.excepthook = _thread_failed
    os.register_at_fork(after_in_child=lambda: _stop(handler))


def _thread_failed(args: threading.ExceptHookArgs, /) -> None:
    """Log an exception that has ended a thread which a call or the lifespan had started."""
    if args.exc_type is SystemExit:
        return
    error = args.exc_value or args.exc_type()
    name = args.thread.name if args.thread is not None else "already forgotten"
    logger.error("percore: an exception ended thread %s", name, exc_info=(args.exc_type, error, args.exc_traceback))


def _show_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, file: TextIO | None = None, line: str | None = None
) -> None:
    """Log a warning as `logging.captureWarnings` does, but with the file and line of the warning in the record."""
    if file is not None:
        _real_showwarning(message, category, filename, lineno, file, line)
        return
    log = logging.getLogger("py.warnings")
    if log.isEnabledFor(logging.WARNING):
        text = warnings.formatwarning(message, category, filename, lineno, line).rstrip("\n")
        log.handle(log.makeRecord(log.name, logging.WARNING, filename, lineno, "%s", (text,), None))


def _stop(handler: Forwarder) -> None:
    """In a fork of the worker, stop forwarding: log, also warnings, as a process does that has not configured logging."""
    logging.getLogger().removeHandler(handler)
    if threading.excepthook is _thread_failed:
        threading.excepthook = threading.__excepthook__
