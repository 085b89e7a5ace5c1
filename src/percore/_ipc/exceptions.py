"""The user's exceptions as bytes: each arrives as itself, or as a RemoteError that says what it was.

What travels is a flat list of *nodes*, one for each exception that can be reached by `__cause__` and by the members of
groups, members before their group, and the traceback as text. Each node is pickled on its own and read back in the
worker: one that does not survive becomes a RemoteError at its place, and costs the others nothing. Causes are indexes,
so cycles of them need no care.

Nothing an exception's own code does (`__str__`, `__reduce__`, `__setstate__`, SystemExit in any of them) leaves here.
"""

import asyncio
import functools
import io
import pickle
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, cast

from percore._errors import RemoteError, RemoteTraceback
from percore._ipc.pickles import PROTOCOL, File, proxy_table, value_pickler
from percore._ipc.rebuild import (
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
from percore._ipc.reducers import refresh

F = TypeVar("F", bound=File)

# Raised into the awaiting task these would end the caller's program, or be taken for its own cancellation.
_NEVER_ITSELF = (SystemExit, KeyboardInterrupt, GeneratorExit, asyncio.CancelledError)
# Without a bound, then with one: what is left of the traceback when `max_message` refused the exception.
_SHORTER = (32768, 1024)
_NO_NODE = -1


class _Node(NamedTuple):
    """One exception on the wire, as a plain tuple."""

    payload: bytes | None  # None: does not travel as itself
    type_name: str
    text: str
    why: str  # why it does not travel as itself, where that needs saying
    members: tuple[int, ...]
    cause: int
    suppress_context: bool


class _Made(NamedTuple):
    """An exception that is to travel and the members it is rebuilt from (none: its payload is the whole of it)."""

    exc: BaseException
    members: tuple[BaseException, ...]


def dump_exception(exc: BaseException, new_file: Callable[[], F], *, main_by_value: bool, as_itself: bool = False) -> F:
    """Write `exc`, the chain of its causes and its traceback to a new file, and return that.

    What is too large for a file arrives as the error that `write` raised (PayloadTooLarge), with the end of the
    traceback of `exc`. `as_itself`: so does one of a class that otherwise never does.
    Never raises an Exception. Changes nothing of `exc`.
    """
    text = format_traceback(exc)
    refused: Exception | None = None
    for limit in (None, *_SHORTER):
        shown = exc if refused is None else refused
        wire = _encoded(shown, main_by_value, as_itself), text if limit is None else text[-limit:]
        file = new_file()
        try:
            pickle.Pickler(file, PROTOCOL).dump(wire)
        except Exception as error:  # the file's: there is nothing of the user's left in the wire
            file.reset()
            refused = error
        else:
            return file
    return new_file()  # not even a kilobyte: load_exception knows an empty one


def load_exception(data: bytes | memoryview) -> BaseException:
    """Make the exception that `data` tells of, its remote traceback at the end of its `__cause__` chain.

    Never raises: what cannot be made here (a class that only the worker has) becomes a RemoteError.
    """
    if not len(data):
        return RemoteError("Exception", "the exception is larger than max_message and could not be sent")
    try:
        root: int
        (root, nodes), text = pickle.loads(data)
        made = _decode([_Node(*node) for node in nodes], text)
        _end_chain(made[root], RemoteTraceback(text))
        return made[root]
    except BaseException as error:  # a bad frame, or no memory for it
        return RemoteError(type_name_of(error), f"the exception could not be unpickled: {text_of(error)}", format_traceback(error))


# Sending


def _encoded(root: BaseException, main_by_value: bool, as_itself: bool) -> tuple[int, list[tuple[Any, ...]]]:
    try:
        return _encode(root, main_by_value, as_itself)
    except BaseException as error:  # its class fails at being asked what it is, or there are too many nodes for the memory
        why = f"{type_name_of(error)}: {text_of(error)}"
        return 0, [tuple(_Node(None, type_name_of(root), text_of(root), why, (), _NO_NODE, suppress_context=False))]


def _encode(root: BaseException, main_by_value: bool, as_itself: bool) -> tuple[int, list[tuple[Any, ...]]]:
    # A future of asyncio refuses these; PEP 479 says what they become.
    if not as_itself and isinstance(root, StopIteration | StopAsyncIteration):
        root, stop = RuntimeError(f"the call raised {type(root).__qualname__}"), root
        root.__cause__ = stop
    order, index = _collect(root)
    nodes = []
    for exc, members in order:
        payload, why = None, ""
        if exc is not root or as_itself or (isinstance(exc, Exception) and not isinstance(exc, _NEVER_ITSELF)):
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


def _collect(root: BaseException) -> tuple[list[_Made], dict[int, int]]:
    """Everything reachable, members before their group, each once. No recursion: chains and groups may be deep."""
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
    """The pickle of `exc` that gives it back, or None and the reason."""
    thing: object = (type(exc), GROUP_MESSAGE.__get__(exc), state_of(exc)) if members else exc
    try:
        payload = _dumps(thing, main_by_value)
        copy = _rebuild(payload, members)
    except BaseException as error:
        return None, f"{type_name_of(error)}: {text_of(error)}"
    if type(copy) is not type(exc):
        return None, f"unpickling it gives a {type(copy).__qualname__}"
    return payload, ""


def _dumps(thing: object, main_by_value: bool) -> bytes:
    refresh()
    buffer = io.BytesIO()
    try:
        pickler = _ExceptionPickler(buffer, PROTOCOL)
        pickler.dispatch_table = proxy_table()
        pickler.dump(thing)
    except (pickle.PicklingError, AttributeError, TypeError):
        by_reference = None  # cloudpickle's turn; if it fails too, its error is the one that counts
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
            why = f"unpickling it gives a {type(exc).__qualname__}"
    remote = RemoteError(node.type_name, node.text, text)
    if why:
        remote.add_note(f"The exception itself could not be sent: {why}")
    return remote


def _end_chain(exc: BaseException, last: RemoteTraceback) -> None:
    """Make `last` the end of the chain of causes; where the chain comes back to itself, it ends instead."""
    seen = {id(exc)}
    while (cause := CAUSE.__get__(exc)) is not None and id(cause) not in seen:
        seen.add(id(cause))
        exc = cause
    suppress_context = SUPPRESS_CONTEXT.__get__(exc)
    CAUSE.__set__(exc, last)
    SUPPRESS_CONTEXT.__set__(exc, suppress_context)
