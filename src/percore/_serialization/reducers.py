"""Dispatch tables of the picklers, for types that pickle itself would send wrongly.

pickle accepts objects of these types, but the copy that arrives is useless or harmful:

- a lock, event or queue of asyncio becomes an independent copy, which synchronises nothing;
- a Connection of multiprocessing becomes the number of a descriptor, which belongs to something else in the other process;
- shared ctypes of multiprocessing (`RawArray`, `RawValue`) become private copies.

`FAST` is the table of the fast picklers. It has copyreg's entries, and one for each of these types that makes the pickler fail.
Then the careful pickler is tried. Its table `CAREFUL` has reducers that send such an object or raise an error with advice.

A plain dict adds no cost: a pickler does not look up the types that it handles itself, and would look up the others in copyreg's
table. But a plain dict does not follow changes of copyreg's table, nor modules that are imported later. So after a pickle that
names a function or class, the caller checks with `is_current` or `refresh` whether the tables were up to date.
"""

import copyreg
import functools
import io
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, Final, NoReturn

from percore._common.errors import with_article
from percore._common.steps import step

Reducer = Callable[[Any], Any]

FAST: Final[dict[type, Reducer]] = {}
CAREFUL: Final[dict[type, Reducer]] = {}
REGISTERED: Final[dict[type, Reducer]] = {}
"""The reducers that programs and libraries have registered with multiprocessing (`ForkingPickler.register`)."""

_lock: Final = threading.RLock()
_modules: int = -1
_live: dict[type, Reducer] = {}
"""multiprocessing's own dict of the reducers registered with it."""
_copyreg: Final[dict[type, Any]] = {}

is_worker = False
"""Whether this process is a worker, which sends no descriptors: other processes must not depend on fetching them from a worker."""


def is_current() -> bool:
    """Whether the tables are up to date."""
    # Comparing counts is enough for modules and registered classes, because programs seldom remove any.
    return len(sys.modules) == _modules and len(_live) == len(REGISTERED) and copyreg.dispatch_table == _copyreg


@step
def refresh() -> frozenset[bytes]:
    """Bring the tables up to date. A pickle that contains one of the returned strings may be wrong, if it was made before.

    They are the names of the classes whose entries have changed, because the pickle of an object names its class. The exception is
    a class registered with copyreg: its pickle may name any function instead. Then the empty string is returned, which every pickle
    contains.
    """
    global _live, _modules
    if is_current():
        return frozenset()
    with _lock:
        modules = len(sys.modules)
        reduction: Any = sys.modules.get("multiprocessing.reduction")
        # If the module lacks the name, another thread is still importing it. The number of modules will then change again.
        _live = getattr(getattr(reduction, "ForkingPickler", None), "_extra_reducers", _live)
        has_registered = _update(_copyreg, copyreg.dispatch_table.copy())
        _update(REGISTERED, _live.copy())
        _update(CAREFUL, {cls: reducer for cls, reducer in _careful() if cls not in _copyreg})
        fails = dict.fromkeys(CAREFUL.keys() - _NOT_FAST, _fail)
        changed = _update(FAST, {**_shared_ctypes(), **fails, **_copyreg})
        _modules = modules
    return frozenset((b"",)) if has_registered else frozenset(cls.__name__.encode() for cls in changed)


def _update(table: dict[type, Any], wanted: dict[type, Any]) -> set[type]:
    """Make `table` equal to `wanted`, and return the classes whose entries have changed. Other threads may read it meanwhile."""
    if table == wanted:
        return set()
    changed = {cls for cls in table.keys() | wanted.keys() if table.get(cls) is not wanted.get(cls)}
    table.update(wanted)
    for cls in table.keys() - wanted.keys():
        del table[cls]
    return changed


def _fail(obj: object) -> NoReturn:
    """Make a fast pickler fail, so that the careful one is tried."""
    raise TypeError(f"{type(obj).__qualname__} is left to the careful pickler")


def _careful() -> Iterator[tuple[type, Reducer]]:
    yield from _FIXED.items()
    loop_bound = getattr(sys.modules.get("asyncio.mixins"), "_LoopBoundMixin", None)
    if loop_bound is not None:
        yield from dict.fromkeys(_below(loop_bound), _refuse_asyncio).items()
    anyio = sys.modules.get("anyio")
    for name in _ANYIO:
        base = getattr(anyio, name, None)
        if base is not None:
            yield from dict.fromkeys((base, *_below(base)), _refuse_anyio).items()
    connection: Any = getattr(sys.modules.get("multiprocessing.connection"), "Connection", None)
    if connection is not None:
        yield connection, _send_descriptor
    socket = getattr(sys.modules.get("socket"), "socket", None)
    if socket is not None and socket in REGISTERED:
        yield socket, _send_descriptor
    yield from _shared_ctypes().items()


def _below(base: Any) -> Iterator[Any]:
    for cls in base.__subclasses__():
        yield cls
        yield from _below(cls)


# Locks, events, queues


_INSTEAD: Final = {
    "Lock": "to run calls one after the other, use Runner(per_key=1) and runner.options(key=...)",
    "Semaphore": "to limit calls, use Runner(concurrency=...), Runner(max_pending=...), or per_key with options(key=...)",
    "CapacityLimiter": "to limit calls, use Runner(concurrency=...), Runner(max_pending=...), or per_key with options(key=...)",
    "Event": "to stop a call, cancel it; to tell it something, make another call",
    "Condition": "to stop a call, cancel it; to tell it something, make another call",
    "Barrier": "to wait for several calls, gather them or use runner.map",
    "Queue": "give its items as arguments, or map over them: runner.map(fn, items)",
}
_ANYIO: Final = ("Event", "Lock", "Condition", "Semaphore", "CapacityLimiter")


def _refuse(library: str, obj: object) -> NoReturn:
    known = [cls.__name__ for cls in type(obj).__mro__ if cls.__name__ in _INSTEAD]
    advice = f"; {_INSTEAD[known[0]]}" if known else ""
    raise TypeError(
        f"{type(obj).__qualname__} of {library} works within one event loop: the other process would get an independent copy"
        f"{advice}. To share an object among the calls of one worker, make it in the lifespan"
    )


_refuse_asyncio: Final = functools.partial(_refuse, "asyncio")
_refuse_anyio: Final = functools.partial(_refuse, "anyio")


# Objects of multiprocessing


def _send_descriptor(obj: Any) -> Any:
    """Reduce `obj` as multiprocessing does: the receiver fetches the descriptor, once, from a thread of this process."""
    if is_worker:
        returned = with_article(type(obj).__qualname__)
        raise TypeError(f"a worker cannot return {returned}: make it in the program, and give one to the call as an argument")
    reducer = REGISTERED.get(type(obj))
    if reducer is None:
        raise TypeError(f"{type(obj).__qualname__} objects cannot be pickled here: nothing is registered with multiprocessing")
    return reducer(obj)


def _shared_ctypes() -> dict[type, Reducer]:
    """Return a reducer for each ctypes type that may have objects in shared memory."""
    data: Any = getattr(sys.modules.get("ctypes"), "_SimpleCData", None)
    if data is None or "multiprocessing.sharedctypes" not in sys.modules:
        return {}
    base = data.__mro__[1]  # _ctypes._CData
    return {cls: _reduce_ctype for cls in REGISTERED if issubclass(cls, base)}


def _reduce_ctype(obj: Any) -> Any:
    if hasattr(obj, "_wrapper"):
        raise TypeError(
            f"a shared {type(obj).__qualname__} of multiprocessing cannot be an argument: the other process would get a copy. "
            "Use multiprocessing.shared_memory.SharedMemory, or give it to each worker: "
            "LoopPoolExecutor(mp_context=..., initializer=..., initargs=(array,))"
        )
    return obj.__reduce_ex__(5)


# Objects that cloudpickle would send as another type


def _refuse_view(_view: memoryview) -> NoReturn:
    """Refuse a memoryview: cloudpickle would send a bytes copy, so the receiver would get another type."""
    raise TypeError(
        "a memoryview cannot be sent as it is: send pickle.PickleBuffer(view), which arrives as a memoryview without a copy "
        "where it is large, or bytes(view)"
    )


def _refuse_file(file: io.TextIOWrapper) -> Any:
    """Refuse an open text file except stdout and stderr: cloudpickle would read it and send the content as a StringIO."""
    for name in ("stdout", "stderr"):
        if file is getattr(sys, name):
            return getattr, (sys, name)
    raise TypeError("an open file cannot be sent: send its path, or what is read from it")


def _reduce_cached_property(found: Any) -> Any:
    """Reduce a cached_property: up to Python 3.11 it holds a lock, so cloudpickle could not send a class that has one."""
    return _cached_property, (found.func, found.attrname)


def _cached_property(func: Callable[[Any], Any], name: str | None) -> Any:
    made = functools.cached_property(func)
    made.attrname = name
    return made


_FIXED: Final[dict[type, Reducer]] = {
    memoryview: _refuse_view,
    io.TextIOWrapper: _refuse_file,
    functools.cached_property: _reduce_cached_property,
}
_NOT_FAST: Final = _FIXED.keys()
"""Types that need no entry in `FAST`: C pickle already fails for them, or pickles them correctly."""

refresh()
