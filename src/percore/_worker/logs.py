"""What a worker logs goes to the supervisor.

Theory of operation:

Way         Records have a ring of their own, apart from the channel's; the channel's bell tells of them, too. A record is in the
            ring, and the supervisor told of it, when the call that logged it returns. So what was logged before a crash arrives,
            what was logged before a message was sent is handled before it, and at the worker's end nothing is left to be sent.
Order       One lock, held while a record is copied into the ring. So records arrive in the order in which they were logged, by
            whatever threads.
Pressure    Where the ring is full, who logs waits until the supervisor has read, the loop's thread included; others wait for the
            lock. That is all that holds a worker back which logs faster than the supervisor can handle, and all that is kept.
            What has been read is told through a pipe, from which only who waits reads. (Where a bell is a socket, that can be full
            as well, and is waited for in the same way.)
No deadlock Who waits, waits for the supervisor alone: no loop, no lock and no thread of this process is needed for it to go on. The
            supervisor's reading waits for nothing of a worker. A supervisor that has died takes its workers along.
Re-entrance A signal handler or a `__del__` may log while its thread holds the lock. Such a record is kept, and follows the one that
            is being written.
Forks       A process that user code forks here shares the ring and must not write to it: it gets its logging back as it was.
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

from percore._ipc.doorbell import Bell
from percore._ipc.records import RECORD_LIMIT, pack
from percore._ipc.ring import HEADER_SIZE, RingWriter, largest_frame

LOG_RING_SIZE: Final = 2 * RECORD_LIMIT
"""Bytes of a worker's ring for records."""

MAIN_THERE: Final = "__mp_main__"
"""`__name__` of the program's script in a worker."""

POSITION: Final = struct.Struct("<Q")
"""What goes through the pipe: all bytes that were ever read."""

Levels: TypeAlias = tuple[int, tuple[tuple[str, int, bool], ...]]
"""What `logging.disable` was given; and of each logger that has a level of its own or is disabled: name, level, disabled."""

logger: Final = logging.getLogger("percore")
_real_showwarning = warnings.showwarning


class LogWriter:
    """The writing end of a worker's records."""

    def __init__(self, ring: RingWriter, bell: Bell, pipe: int) -> None:
        """`bell`: of the channel. `pipe`: where the supervisor tells what it has read."""
        self._ring = ring
        self._bell = bell
        self._pipe = pipe
        self._lock = threading.RLock()
        self._waiting: deque[bytes] = deque()
        self._is_writing = False

    def write(self, data: bytes) -> None:
        """Publish one record. From any thread; waits while the ring is full.

        Raises:
            ValueError: it might wait for room for ever.
        """
        if len(data) > largest_frame(self._ring.size):
            raise ValueError(f"a log record of {len(data)} bytes")
        with self._lock:
            self._waiting.append(data)
            if self._is_writing:  # this very thread, further down the stack, which takes it next
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
        told = os.read(self._pipe, POSITION.size * 512)
        if not told:  # the supervisor is gone, and this process with it
            select.poll().poll()
        position: int = POSITION.unpack(told[-POSITION.size :])[0]
        self._ring.acknowledge(position - self._ring.acknowledged)


def _wait_to_write(fd: int) -> None:
    poll = select.poll()
    poll.register(fd, select.POLLOUT)
    poll.poll()


class Forwarder(logging.Handler):
    """The handler of a worker's root logger.

    It has no lock: whoever waits for room in the ring would keep the others from being told so, and there is nothing to protect.
    """

    def __init__(self, write: Callable[[bytes], None]) -> None:
        super().__init__()
        self._write = write

    def createLock(self) -> None:
        self.lock = None

    def handle(self, record: logging.LogRecord) -> bool:
        passed: Any = self.filter(record)  # since 3.12 it may be another record
        if passed:
            self.emit(passed if isinstance(passed, logging.LogRecord) else record)
        return bool(passed)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._write(pack(record))
        except Exception:
            self.handleError(record)


def forward(write: Callable[[bytes], None], levels: Levels) -> None:
    """From now on hand what this process logs or warns of, and errors that end its threads, to `write`. For a worker's start.

    The root logger has a handler then, so that a plain `logging.basicConfig()` of a module imported here does nothing, as in any
    program whose logging is set up.
    """
    disabled, loggers = levels
    logging.disable(disabled)
    for name, level, is_disabled in loggers:
        first, dot, rest = name.partition(".")
        # The script's loggers have another name if a worker imports the script, and the same one if its functions come by value.
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
    """An exception has ended a thread that a call, or the lifespan, has started."""
    if args.exc_type is SystemExit:
        return
    error = args.exc_value or args.exc_type()
    name = args.thread.name if args.thread is not None else "already forgotten"
    logger.error("percore: an exception ended thread %s", name, exc_info=(args.exc_type, error, args.exc_traceback))


def _show_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, file: TextIO | None = None, line: str | None = None
) -> None:
    """As `logging.captureWarnings`, but the record tells where the warning is from."""
    if file is not None:
        _real_showwarning(message, category, filename, lineno, file, line)
        return
    log = logging.getLogger("py.warnings")
    if log.isEnabledFor(logging.WARNING):
        text = warnings.formatwarning(message, category, filename, lineno, line).rstrip("\n")
        log.handle(log.makeRecord(log.name, logging.WARNING, filename, lineno, "%s", (text,), None))


def _stop(handler: Forwarder) -> None:
    """In a fork of the worker: log, also what is warned of, as a process does that nobody has set up."""
    logging.getLogger().removeHandler(handler)
    if threading.excepthook is _thread_failed:
        threading.excepthook = threading.__excepthook__
