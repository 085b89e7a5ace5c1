"""One exception taken apart and made again, and what can be said about one that breaks.

An exception whose class leaves pickling to the standard library is made without calling its `__init__`: `args`,
attributes, slots and the C fields (errno, UnicodeError.start) are put back as they were. The standard way calls
`cls(*args)`, which fails for an `__init__` of two arguments that gives one to its base, and decorates twice the message
of one that decorates it. A class with a `__reduce__`, `__reduce_ex__`, `__setstate__` or copyreg entry of its own is
taken at its word.
"""

import copyreg
import os
import sys
import traceback
from collections.abc import Iterator
from types import GetSetDescriptorType, MemberDescriptorType, MethodDescriptorType, TracebackType
from typing import Any, cast

# The fields as the interpreter keeps them, whatever properties a user's class puts in front of them.
ARGS: Any = vars(BaseException)["args"]
CAUSE: Any = vars(BaseException)["__cause__"]
SUPPRESS_CONTEXT: Any = vars(BaseException)["__suppress_context__"]
_TRACEBACK: Any = vars(BaseException)["__traceback__"]
_QUALNAME: Any = vars(type)["__qualname__"]
_MODULE: Any = vars(type)["__module__"]
GROUP_MESSAGE: Any = vars(BaseExceptionGroup)["message"]
GROUP_MEMBERS: Any = vars(BaseExceptionGroup)["exceptions"]

_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE
_WITHOUT_FIELDS = (object, BaseException, Exception, BaseExceptionGroup)
# AttributeError.obj: the standard pickle leaves it behind too; it may be anything, a session for example.
_NOT_FIELDS = ("__dict__", "__weakref__", "obj")

# Where percore's own code lies, as frames name it: in a frozen program that is not where `__file__` says.
_OWN = os.path.join(os.path.dirname(os.path.dirname((lambda: None).__code__.co_filename)), "")

# args (None: a group's are its message and members), fields, attributes
State = tuple[tuple[Any, ...] | None, list[tuple[int, str, object]], dict[str, Any]]


def reduce(obj: Any) -> Any:
    """A pickler's `reducer_override` for an exception and for what hangs on it (other exceptions, live things)."""
    if issubclass(type(obj), BaseException):
        if pickles_itself(type(obj)) or issubclass(type(obj), BaseExceptionGroup):
            return NotImplemented
        # The args come with the state, when the pickler already knows the object: they may lead back to it.
        return _new, (type(obj),), state_of(obj), None, None, set_state
    return _reduce_live(obj)


def pickles_itself(cls: type[BaseException]) -> bool:
    """Whether this class has a way of its own to be pickled, instead of the standard library's."""
    standard = _is_builtin(cls.__reduce__) and _is_builtin(cls.__reduce_ex__) and _is_builtin(cls.__setstate__)
    return not standard or cls in copyreg.dispatch_table


def _is_builtin(method: object) -> bool:
    return isinstance(method, MethodDescriptorType) and method.__objclass__.__module__ == "builtins"


def _new(cls: type[BaseException]) -> BaseException:
    """An empty exception, made by its C class: no user code, and no arguments, which OSError would interpret."""
    base: Any = next(base for base in cls.__mro__ if not base.__flags__ & _HEAP_TYPE)
    return cast("BaseException", base.__new__(cls))


def state_of(exc: BaseException) -> State:
    return None if isinstance(exc, BaseExceptionGroup) else ARGS.__get__(exc), list(_fields(exc)), exc.__dict__


def _fields(exc: BaseException) -> Iterator[tuple[int, str, object]]:
    """Slots of the user's classes and C fields of the builtin ones, each by the place of its class in the MRO."""
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
            # A C field that was never set reads as None; setting None would show in OSError's str.
            if value is not None or base.__flags__ & _HEAP_TYPE:
                yield place, name, value


def set_state(exc: BaseException, state: State) -> None:
    args, fields, attributes = state
    if args is not None:
        ARGS.__set__(exc, args)
    mro = type(exc).__mro__
    for place, name, value in fields:
        # Not setattr: a property or a `__setattr__` of the user's may stand in front of it.
        vars(mro[place])[name].__set__(exc, value)
    exc.__dict__.update(attributes)


# Live things inside an exception


def _reduce_live(obj: object) -> Any:
    """How the live things that aiohttp hangs on its exceptions travel with them: as what can be read of them elsewhere.

    A ClientResponse (in `history`) arrives closed and without its connection, session and body; an SSLContext arrives
    as a new one that trusts nobody. Only in exceptions: a ClientResponse as a *result* is a mistake.
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
    # The class's own defaults say "closed". `_cache` is where its lazy properties (url, headers) keep values.
    vars(response).update(state, _cache={})
    return response


def _empty_ssl_context() -> object:
    import ssl

    return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)


# Words about an exception, whatever its own code does


def format_traceback(exc: BaseException) -> str:
    """The traceback as text, in the standard library's form, without percore's own frames. Never raises.

    `PERCORE_TRACEBACKS=full` keeps them.
    """
    try:
        return format_parts(type(exc), exc, exc.__traceback__)
    except BaseException as error:  # an exception that breaks the formatter itself
        said = f"{type_name_of(exc)}: {text_of(exc)}\n(its traceback could not be formatted: {type_name_of(error)})\n"
        return _format_frames(exc) + said


def format_parts(kind: type[BaseException], exc: BaseException, frames: TracebackType | None) -> str:
    """As `format_traceback`, of what `sys.exc_info()` gives. Raises what formatting it does."""
    told = traceback.TracebackException(kind, exc, frames, compact=True)
    if os.environ.get("PERCORE_TRACEBACKS") != "full":
        _leave_out_own_frames(told)
    return "".join(told.format())


def _leave_out_own_frames(told: traceback.TracebackException) -> None:
    """Of it, its causes and contexts and members of groups. Where all frames are percore's, the innermost one stays."""
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
    except BaseException:  # what kept the traceback from being formatted lies deeper: no memory, perhaps
        return ""


def text_of(exc: BaseException) -> str:
    """`str(exc)`, always a plain string. Never raises."""
    try:
        return "".join((str(exc),))  # also turns a subclass of str into a str
    except BaseException:
        return "<exception str() failed>"


def type_name_of(exc: BaseException) -> str:
    """The class as a traceback names it. Never raises."""
    cls = type(exc)
    name: str = _QUALNAME.__get__(cls)
    try:
        module = _MODULE.__get__(cls)
    except AttributeError:  # the class has none any more
        return name
    return name if type(module) is not str or module in ("builtins", "__main__", "__mp_main__") else f"{module}.{name}"
