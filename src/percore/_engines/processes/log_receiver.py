"""Receives the log records of workers and passes them to the loggers of this process.

Each worker has a separate ring for its records (`_worker_process.log_forwarding` explains why), and the bell of its channel carries
their number. So the supervisor reads records before the messages that were sent after them, and handles a call's records before its
outcome is seen.

The channel's receive step handles the records one by one. User code runs there (filters, handlers, the record factory), outside of
any critical section. It may do whatever a callback may do, including submitting calls and closing runners. Its exceptions are
reported as `logging` reports errors of handlers. However much a worker logs, one turn of the loop handles at most the records in
its ring, some hundred, and the worker waits meanwhile.
"""

import contextlib
import logging
import os
import sys
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Final

from percore._protocol.messages import BrokenFrame
from percore._transport.log_records import unpack
from percore._transport.memory import Memory
from percore._transport.ring import OWED, RingReader
from percore._worker_process.log_forwarding import LOG_RING_SIZE, MAIN_THERE, POSITION, Levels

_reporter: Final = logging.NullHandler()


def levels() -> Levels:
    """Return the current settings that decide in this process whether a record is handled. They are sent to a worker."""
    root = logging.getLogger()
    known = [root, *dict(root.manager.loggerDict).values()]
    loggers = [one for one in known if isinstance(one, logging.Logger)]
    return int(root.manager.disable), tuple(
        (one.name, int(one.level), bool(one.disabled)) for one in loggers if one.level or one.disabled or one is root
    )


def _name_here(name: str) -> str:
    """Translate the name of a worker's logger: the script's `__name__` is MAIN_THERE in a worker and mostly `__main__` here."""
    first, dot, rest = name.partition(".")
    if first != MAIN_THERE:
        return name
    return f"{getattr(sys.modules.get('__main__'), '__name__', '__main__')}{dot}{rest}"


class LogReceiver:
    """The log records of one worker, on the supervisor's side."""

    def __init__(self, index: int, handle_record: Callable[[int, bytes], None] | None = None) -> None:
        """Create the ring, and the pipe by which the supervisor tells the worker how much it has read.

        `handle_record`: gets the index and each record, in place of the loggers of this process.

        Raises:
            OSError: out of descriptors or address space; nothing is left behind.
        """
        self._handle = partial(handle_record or handle, index)
        with ExitStack() as undo:
            self._memory = Memory.create(LOG_RING_SIZE)
            undo.callback(self._memory.close)
            self._their_end, self._pipe = os.pipe()
            undo.pop_all()
        os.set_blocking(self._pipe, False)
        self._ring = RingReader(self._memory.view[:])
        self._told = 0
        self._is_open = True
        self.is_held = False
        """Whether the worker is not told what was read: soon it can log no more, and waits."""

    @property
    def fds(self) -> tuple[int, int]:
        """The descriptors for the worker: the ring's memory, and the read end of the pipe."""
        return self._memory.fd, self._their_end

    def close_fds(self) -> None:
        """Close the descriptors for the worker: it has got them, or failed to start. Idempotent."""
        fd, self._their_end = self._their_end, -1
        if fd >= 0:
            os.close(fd)
        self._memory.close_fds()

    def close(self) -> None:
        """Stop reading and release everything. Idempotent."""
        self.close_fds()
        if self._is_open:
            self._is_open = False
            os.close(self._pipe)
            self._ring.release()
            self._memory.close()

    def receive(self, count: int) -> None:
        """Handle `count` further records of the ring. An Exception of user code is reported; any other BaseException propagates.

        Raises:
            BrokenFrame: the worker has written invalid data, or more than the protocol allows.
        """
        ring = self._ring
        for _ in range(count):
            if not self._is_open:  # user code has closed it
                return
            ring.end = ring.read + ring.size  # only the count of records is known: a wrong count leads to a wrong CRC or no record
            self._handle(bytes(ring.next()))  # a copy: user code may close this, and a view would keep the memory mapped
            # Tell the worker once more than this has been read. Below that the ring still has room for the largest record, so the
            # worker does not have to wait.
            if ring.read - self._told > LOG_RING_SIZE // OWED and not self.is_held and self._is_open:
                self._tell()

    def hold(self, is_held: bool) -> None:
        """Let the worker wait once it has filled the ring, or go on."""
        self.is_held = is_held
        if not is_held and self._is_open and self._ring.read != self._told:
            self._tell()

    def _tell(self) -> None:
        self._told = self._ring.read
        try:
            with contextlib.suppress(BrokenPipeError):  # the worker has died, and these are its last records
                os.write(self._pipe, POSITION.pack(self._told))
        except BlockingIOError:
            raise BrokenFrame("the worker logs more than there was room for") from None


def handle(index: int | None, data: bytes, node: str | None = None) -> None:
    """Handle a record of the worker with this index, on this node of several, by the loggers of this process.

    `index`: None if the record is that of the node's host.

    Raises:
        BrokenFrame: it is no record.
    """
    record = None
    try:
        record = unpack(data)
        record.__dict__["worker"] = index
        record.__dict__.setdefault("pid", record.process)
        if node is not None:
            record.__dict__["node"] = node
        if record.name.startswith(MAIN_THERE):
            record.name = _name_here(record.name)
        logger = logging.getLogger(record.name)
        if logger.isEnabledFor(record.levelno):
            logger.handle(record)
    except BrokenFrame:
        raise
    except Exception:
        if record is None:
            record = logging.LogRecord("percore", logging.ERROR, __file__, 0, "a record of worker %d", (index,), None)
        _reporter.handleError(record)
