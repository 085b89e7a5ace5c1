"""Programs that work for long audit themselves, and note what percore and the loop report as mistakes."""

import logging
import os
from collections.abc import Callable


class Complaints(logging.Handler):
    """Notes errors of percore itself and those that a loop reports. All runners that start from now on audit themselves."""

    def __init__(self, note: Callable[[str], object]) -> None:
        super().__init__(logging.ERROR)
        self._note = note
        os.environ["PERCORE_DEBUG"] = "1"
        for name in ("percore", "asyncio"):  # the default handler of a loop's exceptions logs them
            logging.getLogger(name).addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Note the message, and the exception."""
        self._note(f"{record.getMessage()} {record.exc_info[1]!r}" if record.exc_info else record.getMessage())
