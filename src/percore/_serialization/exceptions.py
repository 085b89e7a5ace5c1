"""Pickle and unpickle the user's exceptions. Each arrives as itself, or as a RemoteError that describes it.

The wire form is the traceback as text and a flat list of *nodes*: one for each exception that is reachable by `__cause__` or as a
member of a group, with members before their group. The worker pickles each node separately and unpickles it again as a test. A node
that fails this becomes a RemoteError in the same place, and the other nodes are not affected. Causes are indexes into the list, so
cycles of causes need no special treatment.

No exception that the user's exception code raises (in `__str__`, `__reduce__`, `__setstate__`), not even SystemExit, leaves this
module.
"""

import asyncio
import functools
import io
import pickle
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, cast

from percore._common.errors import RemoteError, RemoteTraceback, with_article
from percore._serialization.exception_state import (
    CAUSE,
    GROUP_MEMBERS,
    GROUP_MESSAGE,
    SUPPRESS_CONTEXT,
    format_traceback,
    pickles_itself,
    reduce,
    set_state,
    state_of,
    text_of,
    type_name_of,
)
from percore._serialization.pickler import PROTOCOL, File, proxy_table, value_pickler
from percore._serialization.reducers import refresh

F = TypeVar("F", bound=File)

# In the awaiting task these would end the caller's program, or count as a cancellation of that task.
_NEVER_ITSELF = (SystemExit, KeyboardInterrupt, GeneratorExit, asyncio.CancelledError)
# How many characters of the traceback to keep, in turn, if the exception is larger than `max_message`.
_SHORTER = (32768, 1024)
_NO_NODE = -1


class _Node(NamedTuple):
    """One exception on the wire, where it is a plain tuple."""

    payload: bytes | None  # None: the exception arrives as a RemoteError
    type_name: str
    text: str
    why: str  # why it does not arrive as itself, or empty if that is intended
    members: tuple[int, ...]
    cause: int
    suppress_context: bool


class _Made(NamedTuple):
    """An exception to send, and the members to rebuild it from. Without members its payload holds all of it."""

    exc: BaseException
    members: tuple[BaseException, ...]


def dump_exception(exc: BaseException, new_file: Callable[[], F], *, main_by_value: bool, as_itself: bool = False) -> F:
    """Write `exc`, the chain of its causes and its traceback to a file that `new_file` makes, and return the file.

    If the exception is too large for a file, the error that `write` raised (PayloadTooLarge) is sent instead, with the end of the
    traceback of `exc`. With `as_itself`, `exc` arrives as itself even if it is of a class that otherwise becomes a RemoteError,
    such as SystemExit. Never raises an Exception, and leaves `exc` unchanged.
    """
    text = format_traceback(exc)
    refused: Exception | None = None
    for limit in (None, *_SHORTER):
        shown = exc if refused is None else refused
        wire = _encoded(shown, main_by_value, as_itself), text if limit is None else text[-limit:]
        file = new_file()
        try:
            pickle.Pickler(file, PROTOCOL).dump(wire)
        except Exception as error:  # the file raised it: the wire form contains no objects of the user
            file.reset()
            refused = error
        else:
            return file
    return new_file()  # not even a kilobyte fits: `load_exception` recognises an empty file


def passed_on(exc: BaseException, *, as_itself: bool = False) -> BaseException:
    """Return the exception that arrives for `exc` where nothing is pickled: itself, unless a caller must not get its class.

    `as_itself` as for `dump_exception`. Runs no code of the class of `exc` that could raise.
    """
    if as_itself:
        return exc
    if isinstance(exc, StopIteration | StopAsyncIteration):
        return _of_stop(exc)
    if _may_arrive(exc):
        return exc
    text = format_traceback(exc)
    remote = RemoteError(type_name_of(exc), text_of(exc), text)
    CAUSE.__set__(remote, RemoteTraceback(text))
    return remote


def load_exception(data: bytes | memoryview) -> BaseException:
    """Rebuild the exception from `data`, and put its remote traceback at the end of its `__cause__` chain.

    Never raises. An exception that cannot be rebuilt here, for example because only the worker has its class, becomes a
    RemoteError.
    """
    if not len(data):
        return RemoteError("Exception", "the exception is larger than max_message and could not be sent")
    try:
        root: int
        (root, nodes), text = pickle.loads(data)
        made = _decode([_Node(*node) for node in nodes], text)
        _end_chain(made[root], RemoteTraceback(text))
        return made[root]
    except BaseException as error:  # damaged data, or too little memory
        return RemoteError(type_name_of(error), f"the exception could not be unpickled: {text_of(error)}", format_traceback(error))


# Sending


def _encoded(root: BaseException, main_by_value: bool, as_itself: bool) -> tuple[int, list[tuple[Any, ...]]]:
    try:
        return _encode(root, main_by_value, as_itself)
    except BaseException as error:  # code of its class raised, or memory ran out over the nodes
        why = f"{type_name_of(error)}: {text_of(error)}"
        return 0, [tuple(_Node(None, type_name_of(root), text_of(root), why, (), _NO_NODE, suppress_context=False))]


def _encode(root: BaseException, main_by_value: bool, as_itself: bool) -> tuple[int, list[tuple[Any, ...]]]:
    if not as_itself and isinstance(root, StopIteration | StopAsyncIteration):
        root = _of_stop(root)
    order, index = _collect(root)
    nodes = []
    for exc, members in order:
        payload, why = None, ""
        if exc is not root or as_itself or _may_arrive(exc):
            payload, why = _payload(exc, members, main_by_value)
        cause = CAUSE.__get__(exc)
        node = _Node(
            payload=payload,
            type_name=type_name_of(exc),
            text=text_of(exc),
            why=why,
            members=tuple(index[id(member)] for member in members),
            cause=_NO_NODE if cause is None else index[id(cause)],
            suppress_context=SUPPRESS_CONTEXT.__get__(exc),
        )
        nodes.append(tuple(node))
    return index[id(root)], nodes


def _of_stop(stop: StopIteration | StopAsyncIteration) -> RuntimeError:
    """Return what arrives for an exception that no asyncio future accepts, as PEP 479 has it for generators."""
    error = RuntimeError(f"the call raised {type(stop).__qualname__}")
    error.__cause__ = stop
    return error


def _may_arrive(exc: BaseException) -> bool:
    return isinstance(exc, Exception) and not isinstance(exc, _NEVER_ITSELF)


def _collect(root: BaseException) -> tuple[list[_Made], dict[int, int]]:
    """Collect each reachable exception once, members before their group. It does not recurse: chains and groups may be deep."""
    order: list[_Made] = []
    index: dict[int, int] = {}
    roots = [root]
    while roots:
        stack = [_Made(roots.pop(), ())]
        while stack:
            exc, members = stack.pop()
            if id(exc) in index:
                continue
            if not members and (members := _members(exc)):
                stack.append(_Made(exc, members))
                stack.extend(_Made(member, ()) for member in reversed(members))
                continue
            index[id(exc)] = len(order)
            order.append(_Made(exc, members))
            if (cause := CAUSE.__get__(exc)) is not None:
                roots.append(cause)
    return order, index


def _members(exc: BaseException) -> tuple[BaseException, ...]:
    if not isinstance(exc, BaseExceptionGroup) or pickles_itself(type(exc)):
        return ()
    return cast("tuple[BaseException, ...]", GROUP_MEMBERS.__get__(exc))


def _payload(exc: BaseException, members: tuple[BaseException, ...], main_by_value: bool) -> tuple[bytes | None, str]:
    """Return a pickle from which `exc` can be rebuilt and an empty reason, or None and the reason why there is none."""
    thing: object = (type(exc), GROUP_MESSAGE.__get__(exc), state_of(exc)) if members else exc
    try:
        payload = _dumps(thing, main_by_value)
        copy = _rebuild(payload, members)
    except BaseException as error:
        return None, f"{type_name_of(error)}: {text_of(error)}"
    if type(copy) is not type(exc):
        return None, f"unpickling it gives {with_article(type(copy).__qualname__)}"
    return payload, ""


def _dumps(thing: object, main_by_value: bool) -> bytes:
    refresh()
    buffer = io.BytesIO()
    try:
        pickler = _ExceptionPickler(buffer, PROTOCOL)
        pickler.dispatch_table = proxy_table()
        pickler.dump(thing)
    except (pickle.PicklingError, AttributeError, TypeError):
        by_reference = None  # try cloudpickle; if that fails too, its error is reported
    else:
        by_reference = buffer.getvalue()
    if by_reference is not None and not (main_by_value and b"__main__" in by_reference):
        return by_reference
    buffer = io.BytesIO()
    base: Any = value_pickler(main_by_value)
    _by_value(base)(buffer, PROTOCOL).dump(thing)
    return buffer.getvalue()


class _ExceptionPickler(pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        return reduce(obj)


@functools.cache
def _by_value(base: Any) -> type[pickle.Pickler]:
    class ByValue(base):  # type: ignore[misc]
        def reducer_override(self, obj: Any) -> Any:
            reduced = reduce(obj)
            return super().reducer_override(obj) if reduced is NotImplemented else reduced

    return ByValue


def _rebuild(payload: bytes, members: tuple[BaseException, ...]) -> BaseException:
    if not members:
        return cast("BaseException", pickle.loads(payload))
    cls, message, state = pickle.loads(payload)
    group: BaseException = BaseExceptionGroup.__new__(cls, message, members)
    set_state(group, state)
    return group


# Receiving


def _decode(nodes: list[_Node], text: str) -> list[BaseException]:
    made: list[BaseException] = []
    for node in nodes:
        made.append(_make(node, tuple(made[member] for member in node.members), text))
    for node, exc in zip(nodes, made, strict=True):
        if node.cause != _NO_NODE:
            CAUSE.__set__(exc, made[node.cause])  # this sets __suppress_context__ too
        SUPPRESS_CONTEXT.__set__(exc, node.suppress_context)
    return made


def _make(node: _Node, members: tuple[BaseException, ...], text: str) -> BaseException:
    why = node.why
    if node.payload is not None:
        try:
            exc = _rebuild(node.payload, members)
        except BaseException as error:
            why = f"{type_name_of(error)}: {text_of(error)}"
        else:
            if isinstance(exc, BaseException):
                return exc
            why = f"unpickling it gives {with_article(type(exc).__qualname__)}"
    remote = RemoteError(node.type_name, node.text, text)
    if why:
        remote.add_note(f"The exception itself could not be sent: {why}")
    return remote


def _end_chain(exc: BaseException, last: RemoteTraceback) -> None:
    """Append `last` to the chain of causes. If the chain is a cycle, break it and append `last` there.

    As after `raise ... from`, `__suppress_context__` becomes true: tools such as Sentry follow `__cause__` only then.
    """
    seen = {id(exc)}
    while (cause := CAUSE.__get__(exc)) is not None and id(cause) not in seen:
        seen.add(id(cause))
        exc = cause
    CAUSE.__set__(exc, last)
