"""percore's log messages, written to the logger `percore`."""

import logging
from typing import Final

_logger: Final = logging.getLogger("percore")
_reporter: Final = logging.NullHandler()
PREFIX: Final = "percore: "
"""Prefix of each message. Without configuration, `logging` writes only the text, which must name its source."""


def report(level: int, text: str, *args: object, exc_info: BaseException | None = None) -> None:
    """Log a message. An Exception from the user's handlers or filters is not raised, since supervision must go on.

    It is reported in the way `logging` reports errors of handlers.
    """
    text = PREFIX + text
    try:
        _logger.log(level, text, *args, exc_info=exc_info, stacklevel=2)
    except Exception:
        _reporter.handleError(logging.LogRecord(_logger.name, level, __file__, 0, text, args, None))
