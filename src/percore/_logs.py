"""What workers log arrives at the loggers of this process.

Each worker has a ring and a pair of bells for its records (`_worker.logs` tells why). They are read from a callback of the loop and
handed over one by one. User code runs there (filters, handlers, the record factory), between two records and in no critical
section. It may do whatever a callback may, submit calls and close runners included. What it raises is reported as `logging` does.

However much a worker logs, one turn of the loop takes no more of it than a few dozen records; what else there is comes in the next
turn, and the worker waits meanwhile.
"""

import asyncio
import logging
import os
from collections.abc import Callable
from contextlib import ExitStack
from typing import Final

from percore._ipc.doorbell import bell_fds, bell_of
from percore._ipc.memory import Memory
from percore._ipc.records import unpack
from percore._ipc.ring import BrokenFrame, RingReader
from percore._worker.logs import LOG_RING_SIZE, Levels

TURN: Final = 1 << 14
"""Bytes of one worker's records that one turn of the loop begins to handle."""

_reporter: Final = logging.NullHandler()


def levels() -> Levels:
    """What decides in this process, now, whether a record is of interest. For a worker."""
    root = logging.getLogger()
    known = [root, *dict(root.manager.loggerDict).values()]
    loggers = [one for one in known if isinstance(one, logging.Logger)]
    return int(root.manager.disable), tuple(
        (one.name, int(one.level), bool(one.disabled)) for one in loggers if one.level or one.disabled or one is root
    )


class Logs:
    """The records of one worker, at the supervisor's side."""

    def __init__(self, loop: asyncio.AbstractEventLoop, index: int) -> None:
        """Create ring and bells.

        Raises:
            OSError: no descriptors or no address space; nothing is left behind.
        """
        self._loop = loop
        self._index = index
        with ExitStack() as undo:
            self._memory = Memory.create(LOG_RING_SIZE)
            undo.callback(self._memory.close)
            ours, self._theirs = bell_fds()
            undo.pop_all()
        self._bell = bell_of(ours)
        self._ring = RingReader(self._memory.view[:])
        self._on_broken: Callable[[BaseException], None]
        self._told = 0
        self._is_open = self._is_continued = self._bell_waits = False

    @property
    def fds(self) -> tuple[int, ...]:
        """What the worker is to get: the ring's memory, its side of the bells."""
        return (self._memory.fd, *self._theirs)

    def close_fds(self) -> None:
        """The worker has them, or never will."""
        theirs, self._theirs = self._theirs, ()
        for fd in theirs:
            os.close(fd)
        self._memory.close_fds()

    def open(self, on_broken: Callable[[BaseException], None]) -> None:
        """Begin to read. `on_broken`: the worker has written what it never should, and is not read any more."""
        self._on_broken = on_broken
        self._is_open = True
        self._loop.add_reader(self._bell.fileno(), self._on_bell)

    def finish(self) -> None:
        """Handle all that a dead worker has said."""
        self._hear()
        self._deliver(LOG_RING_SIZE)

    def close(self) -> None:
        """Read no more, and let go of everything. Idempotent."""
        self._stop()
        self.close_fds()
        self._bell.close()
        self._ring.release()
        self._memory.close()

    def _stop(self) -> None:
        if self._is_open:
            self._is_open = False
            if not self._loop.is_closed():
                self._loop.remove_reader(self._bell.fileno())
                if self._bell_waits:
                    self._loop.remove_writer(self._bell.out_fileno())

    def _on_bell(self) -> None:
        self._hear()
        if not self._is_continued:
            self._deliver(TURN)

    def _go_on(self) -> None:
        self._is_continued = False
        self._deliver(TURN)

    def _hear(self) -> None:
        if not self._is_open:
            return
        try:
            published, _ = self._bell.read()
            self._ring.publish(published)
        except BlockingIOError:
            return
        except BrokenFrame as error:
            self._break(error)

    def _deliver(self, most: int) -> None:
        ring = self._ring
        begin = ring.read
        try:
            while self._is_open and ring.read != ring.end and ring.read - begin < most:
                self._handle(ring.next())
        except BrokenFrame as error:
            self._break(error)
        finally:  # an interrupt goes on, and what it leaves is handled in the next turn
            if self._is_open:
                # More than this owed, or room for the largest record: who waits for room is told.
                if ring.read - self._told > LOG_RING_SIZE // 4:
                    self._tell()
                if ring.read != ring.end and not self._is_continued:
                    self._is_continued = True
                    self._loop.call_soon(self._go_on)

    def _handle(self, data: memoryview | bytes) -> None:
        """Hand one record over. An Exception of user code is reported; anything else goes on."""
        record = None
        try:
            record = unpack(data)
            record.__dict__["worker"] = self._index
            logger = logging.getLogger(record.name)
            if logger.isEnabledFor(record.levelno):
                logger.handle(record)
        except BrokenFrame:
            raise
        except Exception:
            _reporter.handleError(record or self._unmade())

    def _unmade(self) -> logging.LogRecord:
        return logging.LogRecord("percore", logging.ERROR, __file__, 0, "a record of worker %d", (self._index,), None)

    def _tell(self) -> None:
        consumed = self._ring.read - self._told
        self._told += consumed
        if not self._bell.ring(0, consumed) and not self._bell_waits:
            self._bell_waits = True
            self._loop.add_writer(self._bell.out_fileno(), self._bell_takes_writes)

    def _bell_takes_writes(self) -> None:
        self._loop.remove_writer(self._bell.out_fileno())
        self._bell_waits = False
        self._tell()

    def _break(self, error: BaseException) -> None:
        self._stop()
        self._on_broken(error)
