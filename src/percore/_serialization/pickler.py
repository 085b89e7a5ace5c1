"""Pickle the user's objects, decide what can travel by reference, and find out which `__main__` this is.

`dump` tries three picklers, cheapest first:

1. the fast pickler: C pickle with a dispatch table that fails for the types that need care (`reducers`). For ordinary objects, none
   of percore's code runs;
2. after a TypeError, and only if multidict is loaded: C pickle with multidict's proxies (aiohttp's headers) in its dispatch table.
   It is not tried first, because a Python-level table costs a failed look-up for each object that is not in it;
3. the careful pickler, a subclass of cloudpickle's: for lambdas, closures, local classes, everything in a `__main__` or another
   module that workers cannot import, and the types that failed before.

Pickle writes functions and classes of `__main__` by reference, without checking that the other side can import them. If it cannot
(`main_by_value`), `dump` looks for the name `__main__` in the pickle, and uses the careful pickler if it occurs.

The functions here run user code (`__reduce__`, `__getstate__`). Call them outside critical sections.
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

from percore._serialization.reducers import CAREFUL, FAST, REGISTERED, is_current, refresh
from percore._serialization.unimportable import MAIN_NAMES, is_by_value, needles, unimportable

PROTOCOL = 5

# What pickle raises for an object it cannot pickle. Any other error comes from user code or from the file.
CANNOT = (pickle.PicklingError, AttributeError, TypeError)
GLOBAL = 0x93
"""STACK_GLOBAL, the opcode for an object named by its module. A pickle without it holds plain data and needs no check."""


class File(Protocol):
    """The file that a pickler writes to."""

    def write(self, data: Any, /) -> object: ...
    def contains(self, needle: bytes) -> bool: ...
    def reset(self) -> None: ...


class MemoryFile:
    """A file in memory."""

    def __init__(self) -> None:
        self.data = bytearray()

    def write(self, data: bytes | bytearray | memoryview | PickleBuffer, /) -> None:
        """Append `data`."""
        self.data += memoryview(data).cast("B")

    def contains(self, needle: bytes) -> bool:
        """Return whether `needle` was written."""
        return needle in self.data

    def reset(self) -> None:
        """Forget everything written."""
        self.data.clear()


class Beside(Protocol):
    """A file that stores large buffers beside the pickle."""

    buffers: list[memoryview]

    def keep(self, buffer: PickleBuffer) -> bool: ...
    def write_buffers(self) -> None: ...


class FastPickler(Pickler):
    dispatch_table = FAST


Keep = Callable[[PickleBuffer], bool]


def dump(obj: object, file: File, *, main_by_value: bool, beside: Beside | None = None) -> None:
    """Pickle `obj` into `file`. Pass the same file as `beside` to store large buffers beside the pickle.

    After an error `file` has been reset.

    Raises:
        PicklingError, AttributeError, TypeError: neither pickle nor cloudpickle can pickle `obj`.
        BaseException: any exception of the user code that pickling runs, and of `file.write`.
    """
    refresh()
    failed = _dump_fast(obj, file, None if beside is None else beside.keep)
    finish(obj, file, failed, main_by_value=main_by_value, beside=beside)


def _dump_fast(obj: object, file: File, keep: Keep | None) -> type[Exception] | None:
    """Pickle `obj` with the fast pickler. Return the class of its error, or None if it succeeded.

    Only the class is returned: the traceback of a later error must not say that it occurred "during handling" of this one.
    """
    try:
        FastPickler(file, PROTOCOL, buffer_callback=keep).dump(obj)
    except CANNOT as error:
        return type(error)
    except BaseException:
        file.reset()
        raise
    return None


def is_final(pickled: bytes, *, main_by_value: bool) -> bool:
    """Whether a FastPickler's pickle that contains `GLOBAL` can stay as it is. If False, `finish` decides."""
    if not is_current() or (main_by_value and b"__main__" in pickled):
        return False
    names = needles()
    return not names or not any(map(pickled.__contains__, names))


def finish(obj: object, file: File, failed: type[Exception] | None, *, main_by_value: bool, beside: Beside | None = None) -> None:
    """Complete what a FastPickler began: it has pickled `obj` into `file`, or `failed` is the class of its error.

    Pickle `obj` again in another way if that is needed, and then append the buffers to `beside`.

    Raises:
        BaseException: as for `dump`.
    """
    keep = None if beside is None else beside.keep
    # Pickling again runs the user's `__reduce__` once more. So do it only if the older table may have been wrong for this object.
    suspects = refresh()
    if suspects and (failed is not None or any(map(file.contains, suspects))):
        file.reset()
        failed = _dump_fast(obj, file, keep)
    if failed is not None or _has_by_value(file, main_by_value):
        file.reset()
        proxies_may_help = failed is not None and issubclass(failed, TypeError) and _has_proxies()
        _dump_otherwise(obj, file, main_by_value, keep, proxies_may_help)
    if beside is not None and beside.buffers:
        try:
            beside.write_buffers()
        except BaseException:
            file.reset()
            raise


def _has_by_value(file: File, main_by_value: bool) -> bool:
    """Whether the pickle names something that workers cannot import."""
    if main_by_value and file.contains(b"__main__"):
        return True
    names = needles()
    return bool(names) and any(map(file.contains, names))


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


def _has_proxies() -> bool:
    """Whether multidict's proxies may exist. They cannot while another thread is still importing multidict."""
    multidict = sys.modules.get("multidict")
    return hasattr(multidict, "MultiDictProxy") and hasattr(multidict, "CIMultiDictProxy")


@functools.cache
def _proxy_reducers() -> dict[type, Callable[[Any], tuple[Any, ...]]]:
    """The reducers for multidict's proxies, which cannot be pickled: a proxy travels with a copy of its contents."""
    multidict = sys.modules["multidict"]

    def reduce_proxy(proxy: Any) -> tuple[Any, ...]:
        return type(proxy), (proxy.copy(),)

    return {multidict.MultiDictProxy: reduce_proxy, multidict.CIMultiDictProxy: reduce_proxy}


def proxy_table() -> ChainMap[type, Callable[[Any], Any]]:
    """Return the dispatch table of the fast pickler, extended by multidict's proxies once multidict is loaded."""
    own = _proxy_reducers() if _has_proxies() else {}
    return ChainMap(own, FAST)


@functools.cache
def _proxy_pickler() -> type[Pickler]:
    return type("ProxyPickler", (Pickler,), {"dispatch_table": proxy_table()})


def value_pickler(main_by_value: bool) -> type[Pickler]:
    """Return the careful pickler. The first call imports cloudpickle, which takes some 20 ms."""
    import cloudpickle

    for name, module in list(unimportable().items()):
        if sys.modules.get(name) is module:  # else it was removed, and `unimportable` has not noticed yet
            cloudpickle.register_pickle_by_value(module)
    return _value_pickler(main_by_value, _has_proxies())


@functools.cache
def _value_pickler(main_by_value: bool, with_proxies: bool) -> type[Pickler]:
    import cloudpickle

    from percore._serialization import newer

    proxies = _proxy_reducers() if with_proxies else {}

    class ValuePickler(cloudpickle.Pickler):  # type: ignore[misc, unused-ignore]
        # Reducers registered with multiprocessing come last. They may share an object instead of copying it.
        dispatch_table: ClassVar[Any] = ChainMap(CAREFUL, proxies, cloudpickle.Pickler.dispatch_table, REGISTERED)

        def reducer_override(self, obj: Any) -> Any:
            # pickle, and so cloudpickle, sends a function with a cache by its name, even if the other side cannot import that.
            if type(obj) is _Cached and not _is_known_by_name(obj, main_by_value):
                return _with_cache, (obj.__wrapped__, obj.cache_parameters())
            if sys.version_info >= (3, 14):
                if type(obj) is FunctionType and not _is_known_by_name(obj, main_by_value):
                    obj = newer.evaluated(obj)
                elif type(obj) in newer.NEW_TYPES:
                    return newer.reduced(obj, functools.partial(_is_elsewhere, main_by_value))
            return super().reducer_override(obj)

    class MainByReference(ValuePickler):
        # A worker imports this `__main__`, so by reference the helper functions and classes of a closure are the ones in the
        # worker's `__main__`. By value they would be second copies, with separate globals and another identity.
        def reducer_override(self, obj: Any) -> Any:
            if isinstance(obj, type | FunctionType) and obj.__module__ in MAIN_NAMES and _is_found(obj):
                return NotImplemented
            return super().reducer_override(obj)

    return cast("type[Pickler]", ValuePickler if main_by_value else MainByReference)


_Cached: Any = type(functools.cache(lambda: None))


def _with_cache(fn: Callable[..., Any], parameters: dict[str, Any]) -> Any:
    """Wrap `fn` in functools.lru_cache with these parameters and a new, empty cache."""
    return functools.lru_cache(**parameters)(fn)


def _is_known_by_name(obj: Any, main_by_value: bool) -> bool:
    """Whether a worker can import `obj`."""
    return _is_found(obj) and _is_elsewhere(main_by_value, obj.__module__)


def _is_elsewhere(main_by_value: bool, module: str) -> bool:
    """Whether a worker can import the module of this name."""
    return not is_by_value(module) and not (main_by_value and module in MAIN_NAMES)


# Functions


def is_by_reference(fn: object) -> bool:
    """Whether `fn` is pickled as a mere name that workers can import, so that its pickle is the same for each call."""
    if isinstance(fn, MethodType):  # a classmethod is by reference if its class is
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
    except Exception:  # no such module or name, a `__module__` that is no string, or a `__getattr__` that raises
        return False
    return found is obj


# The `__main__` of this process


class MainInfo(NamedTuple):
    """How a worker gets the supervisor's `__main__`.

    `target` is the path of a script or the name of a module, and empty for the other kinds. marshal takes `as_tuple()`.
    """

    kind: Literal["script", "module", "value", "none"]
    target: str

    def as_tuple(self) -> tuple[Literal["script", "module", "value", "none"], str]:
        return self.kind, self.target

    @property
    def by_value(self) -> bool:
        return self.kind not in ("script", "module")


def main_info() -> MainInfo:
    """Return how workers get the present `__main__`: by importing it (a script, `-m module`), or by value."""
    main = sys.modules.get("__main__")
    if main is None:
        return MainInfo("none", "")
    spec = getattr(main, "__spec__", None)
    if spec is not None:
        # The name is "__main__" for a zip app or a directory, and ends in ".__main__" for a package.
        name = str(spec.name)
        return MainInfo("value", "") if name.rpartition(".")[2] == "__main__" else MainInfo("module", name)
    return _script_info(main)


def _script_info(main: ModuleType) -> MainInfo:
    path = getattr(main, "__file__", None)
    if getattr(sys, "frozen", False):  # the program's modules are packed into its executable
        return MainInfo("value", "")
    # `python -i` opens a prompt after the script, where the user may define names that the file does not have.
    if not isinstance(path, str) or hasattr(sys, "ps1") or not os.path.isfile(path):
        return MainInfo("value", "")
    return MainInfo("script", os.path.abspath(path))


def alias_main() -> None:
    """Make `__mp_main__` an alias of `__main__`: workers import the main module by that name, and their pickles contain it."""
    sys.modules.setdefault("__mp_main__", sys.modules["__main__"])
