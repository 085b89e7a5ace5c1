"""The user's objects as bytes: how they are pickled, what can go by reference, which `__main__` this is.

Three ways are tried, cheapest first:

1. the C pickler with a table in which some types fail that have to be sent with care (`reducers`): nothing of ours runs for an
   ordinary object;
2. after a TypeError, and only where multidict is loaded, the C pickler with multidict's proxies (aiohttp's headers) in
   its dispatch table. Not tried first: a table of our own costs a failed look-up for each object that is not in it;
3. the careful pickler, which is cloudpickle's: lambdas, closures, local classes, everything of a `__main__` and of other
   modules that no worker can import, and the types that failed before.

Pickle writes what lives in `__main__` by reference without asking whether the other side can import it. Where it cannot
(`main_by_value`), the name `__main__` in the bytes sends the object on to way 3.

The functions here run user code (`__reduce__`, `__getstate__`): call them outside critical sections.
"""

import functools
import os
import pickle
import sys
from collections import ChainMap
from collections.abc import Callable
from pickle import PickleBuffer, Pickler
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, cast

from percore._ipc.modules import MAIN_NAMES, is_by_value, needles, unimportable
from percore._ipc.reducers import CAREFUL, FAST, REGISTERED, is_current, refresh

PROTOCOL = 5

# What pickle says when it does not know how. Anything else comes from user code or from the file.
CANNOT = (pickle.PicklingError, AttributeError, TypeError)
GLOBAL = 0x93
"""STACK_GLOBAL, the opcode for whatever is named by its module. A pickle without it is one of plain data: nothing can be wrong."""


class File(Protocol):
    """What a pickler writes to."""

    def write(self, data: Any, /) -> object: ...
    def contains(self, needle: bytes) -> bool: ...
    def reset(self) -> None: ...


class Beside(Protocol):
    """A file that takes large buffers beside the pickle."""

    buffers: list[memoryview]

    def keep(self, buffer: PickleBuffer) -> bool: ...
    def write_buffers(self) -> None: ...


class FastPickler(Pickler):
    dispatch_table = FAST


Keep = Callable[[PickleBuffer], bool]


def dump(obj: object, file: File, *, main_by_value: bool, beside: Beside | None = None) -> None:
    """Pickle `obj` into `file`. `beside`: the same file, if large buffers are to go beside the pickle.

    Raises:
        PicklingError, AttributeError, TypeError: neither pickle nor cloudpickle can pickle it.
        BaseException: whatever user code on the way raises, and whatever `file.write` raises.

    After an error the file has been reset.
    """
    refresh()
    failed = _dump_fast(obj, file, None if beside is None else beside.keep)
    finish(obj, file, failed, main_by_value=main_by_value, beside=beside)


def _dump_fast(obj: object, file: File, keep: Keep | None) -> type[Exception] | None:
    """What it has failed with. A class alone: the next error is not to be reported as one "during handling" of this one."""
    try:
        FastPickler(file, PROTOCOL, buffer_callback=keep).dump(obj)
    except CANNOT as error:
        return type(error)
    except BaseException:
        file.reset()
        raise
    return None


def is_final(pickled: bytes, *, main_by_value: bool) -> bool:
    """Whether a pickle of a FastPickler with `GLOBAL` in it can stay as it is. False: `finish` decides."""
    return is_current() and not (main_by_value and b"__main__" in pickled) and not any(map(pickled.__contains__, needles()))


def finish(obj: object, file: File, failed: type[Exception] | None, *, main_by_value: bool, beside: Beside | None = None) -> None:
    """What there is to do when a FastPickler has pickled `obj` into `file`, or has `failed` to.

    Raises:
        BaseException: as `dump`.
    """
    keep = None if beside is None else beside.keep
    # Only what the older table may have got wrong is pickled again: that runs the user's `__reduce__` once more.
    suspects = refresh()
    if suspects and (failed is not None or any(map(file.contains, suspects))):
        file.reset()
        failed = _dump_fast(obj, file, keep)
    if failed is not None or _has_by_value(file, main_by_value):
        file.reset()
        proxies_may_help = failed is not None and issubclass(failed, TypeError) and "multidict" in sys.modules
        _dump_otherwise(obj, file, main_by_value, keep, proxies_may_help)
    if beside is not None and beside.buffers:
        try:
            beside.write_buffers()
        except BaseException:
            file.reset()
            raise


def _has_by_value(file: File, main_by_value: bool) -> bool:
    """Whether it names something that no worker can import."""
    return (main_by_value and file.contains(b"__main__")) or any(map(file.contains, needles()))


def _dump_otherwise(obj: object, file: File, main_by_value: bool, keep: Keep | None, proxies_may_help: bool) -> None:
    if proxies_may_help and _dump_with_proxies(obj, file, main_by_value, keep):
        return
    try:
        value_pickler(main_by_value)(file, PROTOCOL, buffer_callback=keep).dump(obj)
    except BaseException:
        file.reset()
        raise


load: Callable[[Any], object] = pickle.loads


def _dump_with_proxies(obj: object, file: File, main_by_value: bool, keep: Keep | None) -> bool:
    try:
        _proxy_pickler()(file, PROTOCOL, buffer_callback=keep).dump(obj)
    except CANNOT:
        file.reset()
        return False
    except BaseException:
        file.reset()
        raise
    if _has_by_value(file, main_by_value):
        file.reset()
        return False
    return True


@functools.cache
def _proxy_reducers() -> dict[type, Callable[[Any], tuple[Any, ...]]]:
    """How multidict's proxies, which refuse to be pickled, travel: as a copy of what they show."""
    multidict = sys.modules["multidict"]

    def reduce_proxy(proxy: Any) -> tuple[Any, ...]:
        return type(proxy), (proxy.copy(),)

    return {multidict.MultiDictProxy: reduce_proxy, multidict.CIMultiDictProxy: reduce_proxy}


def proxy_table() -> ChainMap[type, Callable[[Any], Any]]:
    """The table of the fast pickler, with multidict's proxies above it once multidict is loaded."""
    own = _proxy_reducers() if "multidict" in sys.modules else {}
    return ChainMap(own, FAST)


@functools.cache
def _proxy_pickler() -> type[Pickler]:
    return type("ProxyPickler", (Pickler,), {"dispatch_table": proxy_table()})


def value_pickler(main_by_value: bool) -> type[Pickler]:
    """cloudpickle's pickler; it is imported here, when it is first needed (some 20 ms)."""
    import cloudpickle

    for name, module in list(unimportable().items()):
        if sys.modules.get(name) is module:  # else it is gone, which is known when others have come
            cloudpickle.register_pickle_by_value(module)
    return _value_pickler(main_by_value, "multidict" in sys.modules)


@functools.cache
def _value_pickler(main_by_value: bool, with_proxies: bool) -> type[Pickler]:
    import cloudpickle

    proxies = _proxy_reducers() if with_proxies else {}

    class ValuePickler(cloudpickle.Pickler):  # type: ignore[misc, unused-ignore]
        # What is registered with multiprocessing comes last: it may share what it sends, and is for what cannot be sent otherwise.
        dispatch_table: ClassVar[Any] = ChainMap(CAREFUL, proxies, cloudpickle.Pickler.dispatch_table, REGISTERED)

        def reducer_override(self, obj: Any) -> Any:
            # pickle, and so cloudpickle, sends a function with a cache by its name, wherever that leads.
            if type(obj) is _Cached and not _is_known_by_name(obj, main_by_value):
                return _with_cache, (obj.__wrapped__, obj.cache_parameters())
            return super().reducer_override(obj)

    class MainByReference(ValuePickler):
        # A worker imports this `__main__`: a closure's helper functions and classes are then the worker's own, as
        # everywhere else. By value they would be second copies, with globals and an identity of their own.
        def reducer_override(self, obj: Any) -> Any:
            if isinstance(obj, type | FunctionType) and obj.__module__ in MAIN_NAMES and _is_found(obj):
                return NotImplemented
            return super().reducer_override(obj)

    return cast("type[Pickler]", ValuePickler if main_by_value else MainByReference)


_Cached: Any = type(functools.cache(lambda: None))


def _with_cache(fn: Callable[..., Any], parameters: dict[str, Any]) -> Any:
    """A function of functools.cache or functools.lru_cache, with a cache of its own."""
    return functools.lru_cache(**parameters)(fn)


def _is_known_by_name(obj: Any, main_by_value: bool) -> bool:
    """Whether a worker can import it."""
    return _is_found(obj) and not is_by_value(obj.__module__) and not (main_by_value and obj.__module__ in MAIN_NAMES)


# Functions


def qualified_name(fn: object) -> str:
    """The `__qualname__` behind partials and bound methods, that of its class for a callable object. Never raises."""
    for _ in range(20):
        if not isinstance(fn, functools.partial):
            break
        fn = fn.func
    try:
        name = getattr(fn, "__qualname__", None) or type(fn).__qualname__
        return name if type(name) is str else type(fn).__qualname__
    except Exception:  # a `__getattr__` of the user's: the class has a name in any case
        return type(fn).__qualname__


def is_by_reference(fn: object) -> bool:
    """Whether pickling `fn` gives a mere name that a worker can import: nothing of it can change between two calls."""
    if isinstance(fn, MethodType):  # a classmethod: as stateless as its class
        owner = fn.__self__
        return isinstance(owner, type) and is_by_reference(owner) and getattr(owner, fn.__name__, None) == fn
    if not isinstance(fn, FunctionType | BuiltinFunctionType | type) or not _is_found(fn):
        return False
    if fn.__module__ in MAIN_NAMES:
        return main_info().kind in ("script", "module")
    return not is_by_value(fn.__module__)


def _is_found(obj: Any) -> bool:
    try:
        found: Any = sys.modules[obj.__module__]
        for part in obj.__qualname__.split("."):
            found = getattr(found, part)
    except Exception:  # no such module or name, a `__module__` that is no string, a `__getattr__` that fails: not found
        return False
    return found is obj


# Which `__main__` is this


class MainInfo(NamedTuple):
    """What a worker needs to know of the supervisor's `__main__`; a plain tuple of strings for marshal (`as_tuple`)."""

    kind: Literal["script", "module", "value", "none"]
    target: str

    def as_tuple(self) -> tuple[Literal["script", "module", "value", "none"], str]:
        return self.kind, self.target

    @property
    def by_value(self) -> bool:
        return self.kind not in ("script", "module")


def main_info() -> MainInfo:
    """Look at `__main__` as it is now: can a worker import it (a script, `-m module`), or does it go by value?"""
    main = sys.modules.get("__main__")
    if main is None:
        return MainInfo("none", "")
    spec = getattr(main, "__spec__", None)
    if spec is not None:
        # A zip app and a directory are "__main__"; running a package ends in ".__main__".
        name = str(spec.name)
        return MainInfo("value", "") if name.rpartition(".")[2] == "__main__" else MainInfo("module", name)
    return _script_info(main)


def _script_info(main: ModuleType) -> MainInfo:
    path = getattr(main, "__file__", None)
    if getattr(sys, "frozen", False):  # its files are packed into the program
        return MainInfo("value", "")
    # A prompt after the script (`python -i`) defines names that the file does not have.
    if not isinstance(path, str) or hasattr(sys, "ps1") or not os.path.isfile(path):
        return MainInfo("value", "")
    return MainInfo("script", os.path.abspath(path))


def alias_main() -> None:
    """Let objects of a worker's imported main (`__mp_main__.X`) be found here, in `__main__`."""
    sys.modules.setdefault("__mp_main__", sys.modules["__main__"])
