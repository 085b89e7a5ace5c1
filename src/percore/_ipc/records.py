"""Log records to bytes and back.

A record travels as text and numbers alone, so that nobody's code is needed to read it. Its message, its stack and its traceback are
formatted where it was logged; the traceback leaves percore's own frames out. What was given as `extra` travels as it is where it is
a number, a text, bytes or None, and as its `str` otherwise. What a record says of its own process holds in the other one as well,
but for `relativeCreated`, which counts from the start of a process.

A record takes at most RECORD_LIMIT bytes: where it would take more, its longest texts are cut in the middle.
"""

import logging
import marshal
from operator import itemgetter
from typing import Any, Final

from percore._ipc.codec import is_inline_value
from percore._ipc.rebuild import format_parts
from percore._ipc.ring import BrokenFrame

RECORD_LIMIT: Final = 1 << 15
"""Bytes of a packed record."""

_VERSION = 2
_FIELDS = (
    *("name", "levelno", "created", "levelname", "pathname", "filename", "module", "lineno", "funcName", "msecs"),
    *("thread", "threadName", "process", "processName", "stack_info"),
)
_OWN = frozenset({"msg", "args", "exc_info", "exc_text", "message", "asctime", "relativeCreated", *_FIELDS})
_SCALARS = frozenset({str, int, float, bool, type(None)})
_fields_of = itemgetter(*_FIELDS)
_formatter = logging.Formatter()


def pack(record: logging.LogRecord) -> bytes:
    """The bytes of a record.

    Raises:
        Exception: its message cannot be formatted.
    """
    known = record.__dict__
    texts = _text(record.getMessage()), _traceback(record)
    extra = {name: value for name, value in known.items() if name not in _OWN}
    try:
        fields = _fields_of(known)
    except KeyError:  # made by hand
        fields = tuple(map(known.get, _FIELDS))
    if [*map(type, fields[:3])] == [str, int, float] and _SCALARS.issuperset(map(type, (*fields, *extra, *extra.values()))):
        data = marshal.dumps((*fields, *texts, extra), _VERSION)
        if len(data) <= RECORD_LIMIT:
            return data
    first = _text(fields[0]), int(fields[1]), float(fields[2])
    plain = (*first, *map(_plain, fields[3:]), *texts)
    return _shortened(plain, {_text(name): _plain(value) for name, value in extra.items()})


def unpack(data: bytes) -> logging.LogRecord:
    """The record, as the record factory of this process makes it, with everything that was said of it there.

    Raises:
        BrokenFrame: these bytes are none that `pack` gave.
        Exception: the record factory raised.
    """
    try:
        values = marshal.loads(data)
    except (EOFError, ValueError, TypeError) as error:
        raise BrokenFrame(f"log record does not decode: {error}") from error
    if type(values) is not tuple or [*map(type, values)][:3] != [str, int, float] or len(values) != len(_FIELDS) + 3:
        raise BrokenFrame("log record without name, level or time")
    *known, message, exc_text, extra = values
    if type(message) is not str or type(extra) is not dict:
        raise BrokenFrame("log record without message")
    fields = dict(zip(_FIELDS, known, strict=True))
    made = logging.getLogRecordFactory()
    record = made(
        *(fields["name"], fields["levelno"], fields["pathname"], fields["lineno"], message, (), None),
        *(fields["funcName"], fields["stack_info"]),
    )
    record.relativeCreated += (fields["created"] - record.created) * 1000
    record.exc_text = exc_text
    record.__dict__.update(extra)
    record.__dict__.update(fields)
    return record


def _text(value: object) -> str:
    """As `str(value)`, but never one of a subclass, which marshal refuses."""
    return str.__str__(str(value))


def _plain(value: Any) -> Any:
    """A value that marshal takes and gives back as it was."""
    if type(value) is str or is_inline_value(value):
        return value
    try:
        return _text(value)
    except Exception as error:  # a record is not lost for an attribute that perhaps nobody looks at
        return f"<{type(value).__qualname__}, whose str raised {type(error).__qualname__}>"


def _traceback(record: logging.LogRecord) -> str | None:
    if record.exc_text:
        return _text(record.exc_text)
    found = record.exc_info
    if not found:
        return None
    # A formatter's own words, for what is no exception: made by hand, or asked for where none was handled.
    return _text(_formatter.formatException(found)) if found[1] is None else format_parts(*found).removesuffix("\n")


def _shortened(values: tuple[Any, ...], extra: dict[str, Any]) -> bytes:
    """In RECORD_LIMIT bytes: shorter and shorter texts, at the very last nothing that was given as `extra`."""
    limit = RECORD_LIMIT
    while limit > 64:
        cut = {name: _cut(value, limit) for name, value in extra.items()}
        data = marshal.dumps((*(_cut(value, limit) for value in values), cut), _VERSION)
        if len(data) <= RECORD_LIMIT:
            return data
        limit //= 2
    return marshal.dumps((*(_cut(value, limit) for value in values), {}), _VERSION)


def _cut(value: Any, limit: int) -> Any:
    """A text of at most about so many characters: its beginning, and its end, where a traceback names its exception."""
    if type(value) is str and len(value) > limit:
        half = limit // 2
        return f"{value[:half]} [{len(value) - 2 * half} characters are left out] {value[-half:]}"
    return value[:limit] if type(value) is bytes else value
