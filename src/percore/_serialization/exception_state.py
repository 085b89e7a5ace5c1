"""Take an exception apart and rebuild it, and format one whose own code may fail.

If an exception's class leaves pickling to the standard library, it is rebuilt without calling its `__init__`: `args`, attributes,
slots and the C fields (errno, UnicodeError.start) are restored directly. The standard library calls `cls(*args)` instead. That
fails if `__init__` takes two arguments and passes one to its base, and if `__init__` decorates the message, the message is
decorated twice. If the class defines `__reduce__`, `__reduce_ex__` or `__setstate__`, or has a copyreg entry, that is used.
"""

import copyreg
import os
import sys
import traceback
from collections.abc import Iterator
from types import GetSetDescriptorType, MemberDescriptorType, MethodDescriptorType, TracebackType
from typing import Any, cast

# The interpreter's own descriptors of these fields, which a property of a user's class cannot hide.
ARGS: Any = vars(BaseException)["args"]
CAUSE: Any = vars(BaseException)["__cause__"]
CONTEXT: Any = vars(BaseException)["__context__"]
SUPPRESS_CONTEXT: Any = vars(BaseException)["__suppress_context__"]
_TRACEBACK: Any = vars(BaseException)["__traceback__"]
_QUALNAME: Any = vars(type)["__qualname__"]
_MODULE: Any = vars(type)["__module__"]
GROUP_MESSAGE: Any = vars(BaseExceptionGroup)["message"]
GROUP_MEMBERS: Any = vars(BaseExceptionGroup)["exceptions"]

_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE
_WITHOUT_FIELDS = (object, BaseException, Exception, BaseExceptionGroup)
# The standard pickle omits AttributeError.obj too. It may be any object, such as a session.
_NOT_FIELDS = ("__dict__", "__weakref__", "obj")

# The folder of percore's code as frames name it. In a frozen program `__file__` may name another one.
_OWN = os.path.join(os.path.dirname(os.path.dirname((lambda: None).__code__.co_filename)), "")

# args (None for a group, whose args are its message and members), fields, attributes
State = tuple[tuple[Any, ...] | None, list[tuple[int, str, object]], dict[str, Any]]


def reduce(obj: Any) -> Any:
    """Reduce an exception, or an object that an exception refers to. Picklers call this as their `reducer_override`."""
    if issubclass(type(obj), BaseException):
        if pickles_itself(type(obj)) or issubclass(type(obj), BaseExceptionGroup):
            return NotImplemented
        # The args belong to the state, which is pickled after the object itself, because they may refer back to the object.
        return _new, (type(obj),), state_of(obj), None, None, set_state
    return _reduce_live(obj)


def pickles_itself(cls: type[BaseException]) -> bool:
    """Whether `cls` defines how it is pickled, instead of leaving that to the standard library."""
    standard = _is_builtin(cls.__reduce__) and _is_builtin(cls.__reduce_ex__) and _is_builtin(cls.__setstate__)
    return not standard or cls in copyreg.dispatch_table


def _is_builtin(method: object) -> bool:
    return isinstance(method, MethodDescriptorType) and method.__objclass__.__module__ == "builtins"


def _new(cls: type[BaseException]) -> BaseException:
    """Create an empty exception by the `__new__` of its C class. No user code runs, and OSError gets no arguments to interpret."""
    base: Any = next(base for base in cls.__mro__ if not base.__flags__ & _HEAP_TYPE)
    return cast("BaseException", base.__new__(cls))


def state_of(exc: BaseException) -> State:
    return None if isinstance(exc, BaseExceptionGroup) else ARGS.__get__(exc), list(_fields(exc)), exc.__dict__


def _fields(exc: BaseException) -> Iterator[tuple[int, str, object]]:
    """Yield the slots of the user's classes and the C fields of the builtin ones: place of the class in the MRO, name, value."""
    for place, base in enumerate(type(exc).__mro__):
        if base in _WITHOUT_FIELDS:
            continue
        for name, field in vars(base).items():
            if not isinstance(field, MemberDescriptorType | GetSetDescriptorType) or name in _NOT_FIELDS:
                continue
            try:
                value = field.__get__(exc)
            except (AttributeError, TypeError):  # never set
                continue
            # A C field that was never set reads as None. Setting it to None would change OSError's str.
            if value is not None or base.__flags__ & _HEAP_TYPE:
                yield place, name, value


def set_state(exc: BaseException, state: State) -> None:
    args, fields, attributes = state
    if args is not None:
        ARGS.__set__(exc, args)
    mro = type(exc).__mro__
    for place, name, value in fields:
        # Not setattr: a property or a `__setattr__` of the user's class would run.
        vars(mro[place])[name].__set__(exc, value)
    exc.__dict__.update(attributes)


# Live objects inside an exception


def _reduce_live(obj: object) -> Any:
    """Reduce a live object that aiohttp attaches to its exceptions to the data that makes sense in another process.

    A ClientResponse (in `history`) arrives closed and without its connection, session and body. An SSLContext arrives as a new one
    that trusts no certificate. This applies inside exceptions only: a ClientResponse as a *result* is a mistake of the caller.
    """
    response = getattr(sys.modules.get("aiohttp"), "ClientResponse", None)
    if response is not None and issubclass(type(obj), response):
        state = {name: value for name, value in vars(obj).items() if name in _RESPONSE_FIELDS}
        return _detached_response, (type(obj), state)
    context = getattr(sys.modules.get("ssl"), "SSLContext", None)
    if context is not None and issubclass(type(obj), context):
        return _empty_ssl_context, ()
    return NotImplemented


_RESPONSE_FIELDS = frozenset(
    (
        *("version", "status", "reason", "method", "_url", "_real_url", "_history", "_request_info"),
        *("_headers", "_raw_headers", "_cookies", "_raw_cookie_headers"),
    )
)


def _detached_response(cls: type, state: dict[str, Any]) -> object:
    response: Any = object.__new__(cls)
    # By the defaults of its class the response is closed. Its lazy properties (url, headers) store their values in `_cache`.
    vars(response).update(state, _cache={})
    return response


def _empty_ssl_context() -> object:
    import ssl

    return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)


# Text about an exception, even if the exception's own code fails


def format_traceback(exc: BaseException) -> str:
    """Return the traceback as text, in the standard library's form. Never raises.

    percore's own frames are left out, unless the environment has `PERCORE_TRACEBACKS=full`.
    """
    try:
        return format_parts(type(exc), exc, exc.__traceback__)
    except BaseException as error:  # the exception's own code made the formatter fail
        said = f"{type_name_of(exc)}: {text_of(exc)}\n(its traceback could not be formatted: {type_name_of(error)})\n"
        return _format_frames(exc) + said


def format_parts(kind: type[BaseException], exc: BaseException, frames: TracebackType | None) -> str:
    """Like `format_traceback`, for the parts that `sys.exc_info()` returns. Raises any exception that formatting raises."""
    told = traceback.TracebackException(kind, exc, frames, compact=True)
    if os.environ.get("PERCORE_TRACEBACKS") != "full":
        _leave_out_own_frames(told)
    return "".join(told.format())


def _leave_out_own_frames(told: traceback.TracebackException) -> None:
    """Remove percore's frames from `told`, its causes and contexts and the members of groups.

    If all frames of a traceback are percore's, its innermost one stays.
    """
    left = [told]
    seen: set[int] = set()
    while left:
        part = left.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        part.stack[:] = [frame for frame in part.stack if not frame.filename.startswith(_OWN)] or part.stack[-1:]
        left += [other for other in (part.__cause__, part.__context__, *(part.exceptions or ())) if other is not None]


def _format_frames(exc: BaseException) -> str:
    try:
        return "".join(["Traceback (most recent call last):\n", *traceback.format_tb(_TRACEBACK.__get__(exc))])
    except BaseException:  # not even the frames can be formatted, perhaps for lack of memory
        return ""


def text_of(exc: BaseException) -> str:
    """Return `str(exc)`, always as a plain str. Never raises."""
    try:
        return "".join((str(exc),))  # also turns a subclass of str into a str
    except BaseException:
        return "<exception str() failed>"


def type_name_of(exc: BaseException) -> str:
    """Return the name of the exception's class, as a traceback shows it. Never raises."""
    cls = type(exc)
    name: str = _QUALNAME.__get__(cls)
    try:
        module = _MODULE.__get__(cls)
    except AttributeError:  # the class's `__module__` was deleted
        return name
    return name if type(module) is not str or module in ("builtins", "__main__", "__mp_main__") else f"{module}.{name}"
