"""percore's own words, at the logger `percore`."""

import logging
from typing import Final

_logger: Final = logging.getLogger("percore")
_reporter: Final = logging.NullHandler()
PREFIX: Final = "percore: "
"""Logging that nobody has configured writes the text alone: it must say by itself who is speaking."""


def report(level: int, text: str, *args: object, exc_info: BaseException | None = None) -> None:
    """Log, whatever the user's handlers and filters do.

    They are called in the midst of supervision, which has to go on: what they raise is told as `logging` tells errors of handlers.
    """
    text = PREFIX + text
    try:
        _logger.log(level, text, *args, exc_info=exc_info, stacklevel=2)
    except Exception:
        _reporter.handleError(logging.LogRecord(_logger.name, level, __file__, 0, text, args, None))
