"""A formatter for log records of the program, of percore and of workers, which have different attributes, and a filter.

"formatters": {"all": {"class": "percore.logging.Formatter", "format": "%(levelname)s %(origin)s: %(message)s"}}
"filters": {"workers": {"()": "percore.logging.WorkerFilter"}}
"""

import logging
import os
import sys
from collections.abc import Mapping
from copy import copy
from typing import Any, Final, Literal

__all__ = ["Formatter", "WorkerFilter"]

_DEFAULTS: Final = {
    "%": "%(asctime)s %(levelname)s %(name)s [%(origin)s] %(message)s",
    "{": "{asctime} {levelname} {name} [{origin}] {message}",
    "$": "$asctime $levelname $name [$origin] $message",
}


class Formatter(logging.Formatter):
    """A `logging.Formatter` whose format may name a worker, for records with and without one.

    Each record gets these attributes, if it does not have them:

    worker: the index of the worker that has logged the record or that the record is about; "-" if there is none. If workers are
        threads of the program (`engine="threads"`), it is found where a record is formatted in the thread that has logged it.
        If another thread formats it, as behind a `QueueHandler`, add a `WorkerFilter` to the handler that gets it first.
    pid: the process id of that worker, or of the program.
    origin: "worker 0", or "program".

    The record itself stays as it is, so that other handlers see what they would see without this formatter.
    """

    def __init__(
        self,
        fmt: str | None = None,
        datefmt: str | None = None,
        style: Literal["%", "{", "$"] = "%",
        validate: bool = True,
        *,
        defaults: Mapping[str, Any] | None = None,
    ) -> None:
        """As for `logging.Formatter`. Default of `fmt`: time, level, logger, origin and message.

        Raises:
            ValueError: `style` is unknown, or `fmt` is not a format of this style.
        """
        super().__init__(_DEFAULTS.get(style) if fmt is None else fmt, datefmt, style, validate, defaults=defaults)

    def format(self, record: logging.LogRecord) -> str:
        """Return the text of a record."""
        worker = vars(record)["worker"] if "worker" in vars(record) else _worker_here()
        shown = copy(record)  # its attributes are for this formatter alone
        shown.worker = "-" if worker is None else worker
        shown.origin = "program" if worker is None else f"worker {worker}"
        if getattr(record, "pid", None) is None:
            shown.pid = record.process or os.getpid()
        text = super().format(shown)
        record.exc_text = shown.exc_text  # the text of the traceback, which logging keeps for the next formatter
        return text


class WorkerFilter(logging.Filter):
    """Gives `worker` and `pid` to the records of workers that are threads of the program (`engine="threads"`).

    Add it to a handler. It runs in the thread that logs: so a `QueueHandler` passes the attributes on, and any formatter has them.
    Records of workers that are processes have them without it. Records of the program, and those that have a `worker`, stay as they
    are. It passes every record, or, as `logging.Filter`, those of the logger `name` and of the loggers below it.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether the record is of the logger `name`."""
        if "worker" not in vars(record) and (worker := _worker_here()) is not None:
            record.worker, record.pid = worker, record.process or os.getpid()
        return bool(super().filter(record))


def _worker_here() -> int | None:
    """Return the index of the worker that this code runs in, if any."""
    module = sys.modules.get("percore._worker.context")  # where it is not loaded, there is no worker
    here = None if module is None else module.current()
    index: int | None = None if here is None else here.worker.index
    return index
