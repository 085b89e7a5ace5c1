"""What cloudpickle does not know yet of Python 3.14 and 3.15.

- From 3.14 on an annotation is evaluated when somebody asks for it, and may name something that exists for type checkers alone.
  cloudpickle asks for it. If it cannot be evaluated, the function travels with the texts of its annotations, as if its module had
  `from __future__ import annotations`.
- From 3.15 on a module may import lazily: its name is bound to a placeholder until it is used. A placeholder cannot be pickled, and
  does not tell what it imports. So pickling a function by value uses the names of its module that the function refers to, and
  pickling a module by value uses all its names.
- From 3.15 on there are sentinels, which are pickled by name. One of a module that the other process cannot import is made there,
  once for each name. When it comes back, it is the original one again.
"""

import builtins
import dis
import sys
import types
from collections.abc import Callable, Iterator
from inspect import Signature, signature
from types import CodeType, FunctionType
from typing import Any, Final

EVALUATES_LATE: Final = sys.version_info >= (3, 14)
_Sentinel: Final[Any] = getattr(builtins, "sentinel", None)
_LazyImport: Final[Any] = getattr(types, "LazyImportType", None)
NEW_TYPES: Final = frozenset((_Sentinel, _LazyImport)) - {None}
"""Types whose objects `reduced` reduces."""
_made: Final[dict[tuple[str, str], Any]] = {}
"""The sentinels that were made for another process, by module and name."""


# Functions


def evaluated(fn: FunctionType) -> FunctionType:
    """Return `fn`, or a copy of it, as cloudpickle can send it by value.

    Raises:
        BaseException: any error of a lazy import that `fn` uses.
    """
    if _LazyImport is not None:
        _import_lazy(fn)
    try:
        fn.__annotations__  # noqa: B018  # evaluates them
    except Exception:
        return _with_texts(fn)
    return fn


def _import_lazy(fn: FunctionType) -> None:
    """Import what `fn` would import when it uses its global names, and bind the names, as the interpreter does."""
    names = fn.__globals__
    lazy = {name for name, value in list(names.items()) if type(value) is _LazyImport}
    for name in lazy.intersection(_global_names(fn.__code__)) if lazy else ():
        placeholder = names[name]
        if type(placeholder) is _LazyImport:  # otherwise another thread has used it meanwhile
            names[name] = placeholder.resolve()


def _global_names(code: CodeType) -> Iterator[str]:
    for one in dis.get_instructions(code):
        if one.opname == "LOAD_GLOBAL":
            yield one.argval
    for part in code.co_consts:
        if isinstance(part, CodeType):
            yield from _global_names(part)


def _with_texts(fn: FunctionType) -> FunctionType:
    """Return a copy of `fn` whose annotations are texts."""
    annotationlib: Any = __import__("annotationlib")
    copy = FunctionType(fn.__code__, fn.__globals__, fn.__name__, fn.__defaults__, fn.__closure__)
    for name in ("__qualname__", "__module__", "__doc__", "__kwdefaults__"):
        setattr(copy, name, getattr(fn, name))
    vars(copy).update(vars(fn))
    copy.__annotations__ = annotationlib.get_annotations(fn, format=annotationlib.Format.STRING)
    return copy


def signature_of(fn: Any) -> Signature:
    """As `inspect.signature`, without evaluating annotations."""
    if not EVALUATES_LATE:
        return signature(fn)
    annotationlib: Any = __import__("annotationlib")
    formatted: Any = {"annotation_format": annotationlib.Format.STRING}
    return signature(fn, **formatted)


# Objects


def reduced(obj: Any, is_elsewhere: Callable[[str], bool]) -> Any:
    """Reduce an object of `NEW_TYPES`. NotImplemented: pickle reduces it to a name, and checks that its module has it.

    `is_elsewhere`: whether the other process can import a module.

    Raises:
        BaseException: any error of a lazy import.
    """
    if type(obj) is _LazyImport:
        return _itself, (obj.resolve(),)
    module, name = obj.__module__, obj.__name__
    is_known = _made.get((module, name)) is obj or (_of_module(module, name) is obj and not is_elsewhere(module))
    return (_sentinel, (module, name, repr(obj))) if is_known else NotImplemented


def _itself(obj: object) -> object:
    return obj


def _sentinel(module: str, name: str, text: str) -> Any:
    found = _of_module(module, name)
    if type(found) is _Sentinel:
        return found
    made = _Sentinel(name, repr=text)
    made.__module__ = module
    return _made.setdefault((module, name), made)


def _of_module(module: str, name: str) -> Any:
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return found
