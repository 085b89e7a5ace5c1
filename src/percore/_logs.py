"""What workers log arrives at the loggers of this process.

Each worker has a ring for its records (`_worker.logs` tells why), and its channel's bell tells how many there are. So they are read
before the messages that were sent after them: a call's records have been handled when its outcome is seen.

They are handed over one by one, in the channel's receive. User code runs there (filters, handlers, the record factory), between two
records and in no critical section: it may do whatever a callback may, submit calls and close runners included. What it raises is
reported as `logging` does. However much a worker logs, one turn of the loop takes no more of it than its ring holds, some hundred
records, and the worker waits meanwhile.
"""

import contextlib
import logging
import os
import sys
from contextlib import ExitStack
from typing import Final

from percore._ipc.memory import Memory
from percore._ipc.records import unpack
from percore._ipc.ring import OWED, BrokenFrame, RingReader
from percore._worker.logs import LOG_RING_SIZE, MAIN_THERE, POSITION, Levels

_reporter: Final = logging.NullHandler()


def levels() -> Levels:
    """What decides in this process, now, whether a record is of interest. For a worker."""
    root = logging.getLogger()
    known = [root, *dict(root.manager.loggerDict).values()]
    loggers = [one for one in known if isinstance(one, logging.Logger)]
    return int(root.manager.disable), tuple(
        (one.name, int(one.level), bool(one.disabled)) for one in loggers if one.level or one.disabled or one is root
    )


def _name_here(name: str) -> str:
    """The name here of a logger of a worker: there the script has another `__name__`, unless multiprocessing imported it here."""
    first, dot, rest = name.partition(".")
    if first != MAIN_THERE:
        return name
    return f"{getattr(sys.modules.get('__main__'), '__name__', '__main__')}{dot}{rest}"


class Logs:
    """The records of one worker, at the supervisor's side."""

    def __init__(self, index: int) -> None:
        """Create the ring, and the pipe that tells the worker what has been read.

        Raises:
            OSError: no descriptors or no address space; nothing is left behind.
        """
        self._index = index
        with ExitStack() as undo:
            self._memory = Memory.create(LOG_RING_SIZE)
            undo.callback(self._memory.close)
            self._their_end, self._pipe = os.pipe()
            undo.pop_all()
        os.set_blocking(self._pipe, False)
        self._ring = RingReader(self._memory.view[:])
        self._told = 0
        self._is_open = True

    @property
    def fds(self) -> tuple[int, int]:
        """What the worker is to get: the ring's memory, and its end of the pipe."""
        return self._memory.fd, self._their_end

    def close_fds(self) -> None:
        """The worker has them, or never will."""
        fd, self._their_end = self._their_end, -1
        if fd >= 0:
            os.close(fd)
        self._memory.close_fds()

    def close(self) -> None:
        """Read no more, and let go of everything. Idempotent."""
        self.close_fds()
        if self._is_open:
            self._is_open = False
            os.close(self._pipe)
            self._ring.release()
            self._memory.close()

    def receive(self, count: int) -> None:
        """So many records more are in the ring: hand them over. An Exception of user code is reported; anything else goes on.

        Raises:
            BrokenFrame: the worker has written what it never should.
        """
        ring = self._ring
        for _ in range(count):
            if not self._is_open:  # user code has seen to that
                return
            ring.end = ring.read + ring.size  # it is records that are counted: a wrong count meets a wrong CRC, or no record
            self._handle(bytes(ring.next()))  # a copy: user code may close this, and a view would keep the memory
            # Once more than this is owed, and before that there is room for the largest record: nobody waits for it.
            if ring.read - self._told > LOG_RING_SIZE // OWED and self._is_open:
                self._tell()

    def _handle(self, data: bytes) -> None:
        record = None
        try:
            record = unpack(data)
            record.__dict__["worker"] = self._index
            if record.name.startswith(MAIN_THERE):
                record.name = _name_here(record.name)
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
        self._told = self._ring.read
        try:
            with contextlib.suppress(BrokenPipeError):  # it has died, and these are its last words
                os.write(self._pipe, POSITION.pack(self._told))
        except BlockingIOError:
            raise BrokenFrame("the worker logs more than there was room for") from None
