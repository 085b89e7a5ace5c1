"""The tables by which picklers treat some types otherwise than pickle would.

pickle has no doubts about these, and what arrives is useless or worse:

- a lock, event or queue of asyncio becomes an independent copy, which synchronises nothing;
- a Connection of multiprocessing becomes the number of a descriptor, which is somebody else's in the other process;
- shared ctypes of multiprocessing (`RawArray`, `RawValue`) become private copies.

`FAST` is the table of the fast picklers: copyreg's, and an entry for each such type that makes them fail. `CAREFUL` says how the
careful pickler, which is tried next, sends or refuses them.

A look-up in a dict costs a pickler nothing for what it knows by itself, and as much as before for the rest. In return a plain dict
does not follow copyreg and the modules that are imported meanwhile: so after a pickle that names any function or class, `refresh`
tells whether the tables were up to date.
"""

import asyncio
import asyncio.mixins
import copyreg
import functools
import io
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, Final, NoReturn

Reducer = Callable[[Any], Any]

FAST: Final[dict[type, Reducer]] = {}
CAREFUL: Final[dict[type, Reducer]] = {}
REGISTERED: Final[dict[type, Reducer]] = {}
"""What programs and libraries have registered with multiprocessing (`ForkingPickler.register`)."""

_lock: Final = threading.RLock()
_modules: int = -1
_live: dict[type, Reducer] = {}
"""multiprocessing's own dict of what is registered with it."""
_copyreg: Final[dict[type, Any]] = {}

is_worker = False
"""Whether this process is a worker, whose descriptors nobody may wait for."""


def become_worker() -> None:
    """This process is a worker: it sends no descriptors."""
    global is_worker
    is_worker = True


def is_current() -> bool:
    """Whether nothing has changed that the tables depend on."""
    # Modules that were imported, classes that were registered: they are seldom taken back.
    return len(sys.modules) == _modules and len(_live) == len(REGISTERED) and copyreg.dispatch_table == _copyreg


def refresh() -> frozenset[bytes]:
    """Bring the tables up to date, and return what a pickle contains that an older `FAST` may have pickled wrongly.

    That is the name of a class whose entry has changed: its pickle names the class. The pickle of a class that was registered with
    copyreg may name any other function, so then it is the empty name, which every pickle contains.
    """
    global _live, _modules
    if is_current():
        return frozenset()
    with _lock:
        modules = len(sys.modules)
        reduction: Any = sys.modules.get("multiprocessing.reduction")
        # Without the name another thread is about to import it: then there will be more modules.
        _live = getattr(getattr(reduction, "ForkingPickler", None), "_extra_reducers", _live)
        has_registered = _update(_copyreg, copyreg.dispatch_table.copy())
        _update(REGISTERED, _live.copy())
        _update(CAREFUL, {cls: reducer for cls, reducer in _careful() if cls not in _copyreg})
        fails = dict.fromkeys(CAREFUL.keys() - _NOT_FAST, _fail)
        changed = _update(FAST, {**_shared_ctypes(), **fails, **_copyreg})
        _modules = modules
    return frozenset((b"",)) if has_registered else frozenset(cls.__name__.encode() for cls in changed)


def _update(table: dict[type, Any], wanted: dict[type, Any]) -> set[type]:
    """Make `table`, which other threads read meanwhile, like `wanted`. The classes whose entries have changed."""
    if table == wanted:
        return set()
    changed = {cls for cls in table.keys() | wanted.keys() if table.get(cls) is not wanted.get(cls)}
    table.update(wanted)
    for cls in table.keys() - wanted.keys():
        del table[cls]
    return changed


def _fail(obj: object) -> NoReturn:
    """In the fast picklers: the careful one knows what to do."""
    raise TypeError(f"{type(obj).__qualname__} is left to the careful pickler")


def _careful() -> Iterator[tuple[type, Reducer]]:
    yield from _FIXED.items()
    yield from dict.fromkeys(_below(asyncio.mixins._LoopBoundMixin), _refuse_asyncio).items()
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


def _refuse_asyncio(obj: object) -> NoReturn:
    _refuse("asyncio", obj)


def _refuse_anyio(obj: object) -> NoReturn:
    _refuse("anyio", obj)


def _refuse(library: str, obj: object) -> NoReturn:
    known = [cls.__name__ for cls in type(obj).__mro__ if cls.__name__ in _INSTEAD]
    advice = f"; {_INSTEAD[known[0]]}" if known else ""
    raise TypeError(
        f"{type(obj).__qualname__} of {library} works within one event loop: the other process would get an independent copy"
        f"{advice}. What the calls of one worker are to have in common is made in the lifespan"
    )


# What belongs to multiprocessing


def _send_descriptor(obj: Any) -> Any:
    """As multiprocessing sends it: the receiver fetches it, once, from a thread of this process."""
    if is_worker:
        raise TypeError(
            f"a worker cannot return a {type(obj).__qualname__}: make it in the program, and give one to the call as an argument"
        )
    reducer = REGISTERED.get(type(obj))
    if reducer is None:
        raise TypeError(f"{type(obj).__qualname__} objects cannot be pickled here: nothing is registered with multiprocessing")
    return reducer(obj)


def _shared_ctypes() -> dict[type, Reducer]:
    """Types of which there may be shared objects."""
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


# What cloudpickle would send as something else


def _refuse_view(_view: memoryview) -> NoReturn:
    """cloudpickle would copy it into bytes, and what arrives would be something else than what was sent."""
    raise TypeError(
        "a memoryview cannot be sent as it is: send pickle.PickleBuffer(view), which arrives as a memoryview without a copy "
        "where it is large, or bytes(view)"
    )


def _refuse_file(file: io.TextIOWrapper) -> Any:
    """cloudpickle would send what it reads from it, as a StringIO."""
    for name in ("stdout", "stderr"):
        if file is getattr(sys, name):
            return getattr, (sys, name)
    raise TypeError("an open file cannot be sent: send its path, or what is read from it")


def _reduce_cached_property(found: Any) -> Any:
    """Up to Python 3.11 it has a lock, for which cloudpickle cannot send a class that has one."""
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
"""The fast picklers fail with these by themselves, or are right."""

refresh()
