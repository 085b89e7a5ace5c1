"""Pack log records into bytes, and unpack them.

A record travels as text and numbers only, so unpacking it needs none of the user's code. The process that logs it formats its
message, its stack and its traceback, without percore's own frames. Values in `extra` travel unchanged if they are numbers, str,
bytes or None, and as their `str` otherwise. All attributes keep the values they had in the process that logged the record, except
`relativeCreated`, which counts from the start of a process.

A packed record has at most RECORD_LIMIT bytes. If it would have more, its longest texts are cut in the middle.
"""

import logging
import marshal
from operator import itemgetter
from typing import Any, Final

from percore._protocol.messages import BrokenFrame
from percore._serialization.exception_state import format_parts
from percore._transport.codec import is_inline_value

RECORD_LIMIT: Final = 1 << 15
"""The largest size of a packed record in bytes."""

_VERSION = 2
_FIELDS = (
    *("name", "levelno", "created", "levelname", "pathname", "filename", "module", "lineno", "funcName", "msecs"),
    *("thread", "threadName", "process", "processName", "stack_info"),
)
LEAST: Final = len(_FIELDS)
"""Fewer bytes than any packed record has: each of its fields takes at least one."""

_OWN = frozenset({"msg", "args", "exc_info", "exc_text", "message", "asctime", "relativeCreated", *_FIELDS})
_SCALARS = frozenset({str, int, float, bool, type(None)})
_fields_of = itemgetter(*_FIELDS)
_formatter = logging.Formatter()


def pack(record: logging.LogRecord) -> bytes:
    """Pack `record` into bytes.

    Raises:
        Exception: the message of the record cannot be formatted.
    """
    known = record.__dict__
    texts = _text(record.getMessage()), _traceback(record)
    extra = {name: value for name, value in known.items() if name not in _OWN}
    try:
        fields = _fields_of(known)
    except KeyError:  # the record was made by hand and lacks an attribute
        fields = tuple(map(known.get, _FIELDS))
    if [*map(type, fields[:3])] == [str, int, float] and _SCALARS.issuperset(map(type, (*fields, *extra, *extra.values()))):
        data = marshal.dumps((*fields, *texts, extra), _VERSION)
        if len(data) <= RECORD_LIMIT:
            return data
    first = _text(fields[0]), int(fields[1]), float(fields[2])
    plain = (*first, *map(_plain, fields[3:]), *texts)
    return _shortened(plain, {_text(name): _plain(value) for name, value in extra.items()})


def unpack(data: bytes) -> logging.LogRecord:
    """Make a record with the record factory of this process, and give it the attributes that it had where it was logged.

    Raises:
        BrokenFrame: `data` did not come from `pack`.
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
    """Return `str(value)` as a plain str, because marshal refuses subclasses."""
    return str.__str__(str(value))


def _plain(value: Any) -> Any:
    """Return `value` if it survives marshal unchanged, and otherwise its `str`."""
    if type(value) is str or is_inline_value(value):
        return value
    try:
        return _text(value)
    except Exception as error:  # do not lose the record because of one attribute
        return f"<{type(value).__qualname__}, whose str raised {type(error).__qualname__}>"


def _traceback(record: logging.LogRecord) -> str | None:
    if record.exc_text:
        return _text(record.exc_text)
    found = record.exc_info
    if not found:
        return None
    # Without an exception, use the formatter's text: exc_info was made by hand, or `exc_info=True` was given outside a handler.
    return _text(_formatter.formatException(found)) if found[1] is None else format_parts(*found).removesuffix("\n")


def _shortened(values: tuple[Any, ...], extra: dict[str, Any]) -> bytes:
    """Pack a record into RECORD_LIMIT bytes. Cut its texts ever shorter, and finally leave out `extra`."""
    limit = RECORD_LIMIT
    while limit > 64:
        cut = {name: _cut(value, limit) for name, value in extra.items()}
        data = marshal.dumps((*(_cut(value, limit) for value in values), cut), _VERSION)
        if len(data) <= RECORD_LIMIT:
            return data
        limit //= 2
    return marshal.dumps((*(_cut(value, limit) for value in values), {}), _VERSION)


def _cut(value: Any, limit: int) -> Any:
    """Cut a text to about `limit` characters. Keep its start and its end, since a traceback ends with the exception."""
    if type(value) is str and len(value) > limit:
        half = limit // 2
        return f"{value[:half]} [{len(value) - 2 * half} characters are left out] {value[-half:]}"
    return value[:limit] if type(value) is bytes else value
