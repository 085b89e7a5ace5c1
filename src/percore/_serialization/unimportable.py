"""Find the modules of this program that workers cannot import. Their functions and classes travel by value.

A worker has the program's `sys.path`. So it can import a module if a finder of this program finds it now, in the file that it was
loaded from. No finder finds a module that was made by `exec`, or that a plugin system loaded from a path. The user can add modules
with `cloudpickle.register_pickle_by_value`.
"""

import os
import sys
from collections.abc import Collection
from importlib.machinery import ModuleSpec
from types import FunctionType, ModuleType
from typing import Any, Final

from percore._serialization import reducers

MAIN_NAMES: Final = ("__main__", "__mp_main__")

_judged: Final[dict[str, int]] = {}
"""The modules already checked: by name, the id of the module object."""
_unimportable: Final[dict[str, ModuleType]] = {}
_count = -1


def unimportable() -> dict[str, ModuleType]:
    """Return the loaded modules that workers cannot import, by name.

    In a worker there are none, because a worker does not know what the program can import.
    """
    global _count
    if not reducers.is_worker and len(sys.modules) != _count:
        modules = list(sys.modules.items())
        _count = len(modules)
        for name in [name for name in list(_judged) if name not in sys.modules]:  # another thread may import a module meanwhile
            _judged.pop(name, None)  # another thread may be doing the same
            _unimportable.pop(name, None)
        for name, module in modules:
            if _judged.get(name) != id(module):
                _judged[name] = id(module)
                _unimportable.pop(name, None)
                if _is_unimportable(name, module):
                    _unimportable[name] = module
    return _unimportable


def _judge_anew() -> None:
    """In a fork, check all modules again: a server may have imported them with another `sys.path` before it forked."""
    global _count
    _count = -1
    _judged.clear()
    _unimportable.clear()


os.register_at_fork(after_in_child=_judge_anew)


def needles() -> list[bytes]:
    """Return byte strings, at least one of which occurs in any pickle that names a module whose contents travel by value."""
    # An unimportable module is searched for as the opcode of a short string with its exact name. A registered package also covers
    # the modules inside it, so its bare name is searched for.
    found, registered = unimportable(), _registered()
    if not found and not registered:  # the common case
        return []
    exact = [b"\x8c" + bytes((len(name),)) + name for name in map(str.encode, list(found)) if len(name) < 256]
    return [*exact, *map(str.encode, registered)]


def is_by_value(name: object) -> bool:
    """Whether functions and classes of the module named `name` travel by value."""
    if not isinstance(name, str):
        return False
    return name in unimportable() or any(name == one or name.startswith(f"{one}.") for one in _registered())


def _registered() -> Collection[str]:
    """Return the names of the modules that the user or percore has registered with cloudpickle."""
    # While another thread is importing cloudpickle, the module lacks this function, and nothing can be registered yet.
    registered: Any = getattr(sys.modules.get("cloudpickle"), "list_registry_pickle_by_value", tuple)
    names: Collection[str] = registered()
    return names


def _is_unimportable(name: str, module: object) -> bool:
    if not isinstance(module, ModuleType) or name in MAIN_NAMES or vars(module).get("__name__") != name:
        return False
    spec = vars(module).get("__spec__")
    if not isinstance(spec, ModuleSpec):
        spec = None
    elif (
        not spec.has_location or spec.origin is None or _is_in_place(name, spec)
    ):  # builtin, frozen or a namespace; or in place, which is the usual case
        return False
    return _is_found_nowhere(name, spec) and _is_written_in_python(name, module)


def _is_in_place(name: str, spec: ModuleSpec) -> bool:
    """Whether the module was loaded from a folder that is searched for it. An earlier folder may have one of the same name."""
    package, _, last = name.rpartition(".")
    folder, file = os.path.split(spec.origin or "")
    if spec.submodule_search_locations is not None:
        folder, file = os.path.split(folder)
    path = getattr(sys.modules.get(package), "__path__", ()) if package else sys.path
    return file.partition(".")[0] == last and folder in path


def _is_found_nowhere(name: str, spec: ModuleSpec | None) -> bool:
    package = name.rpartition(".")[0]
    path = getattr(sys.modules.get(package), "__path__", None) if package else None
    if package and path is None:
        return package in _unimportable  # if the parent is no package, it made this module, and will do so in a worker
    try:
        found = next(filter(None, (_find(finder, name, path) for finder in list(sys.meta_path))), None)
    except Exception:  # a finder of the user raised, so this is unknown: let the worker try
        return False
    if found is None:
        return spec is not None or not package  # a module without a spec was made by its package
    is_elsewhere = spec is not None and found.has_location and found.origin != spec.origin
    return is_elsewhere and not _is_same_file(found, spec)


def _find(finder: Any, name: str, path: Any) -> ModuleSpec | None:
    find_spec = getattr(finder, "find_spec", None)
    return None if find_spec is None else find_spec(name, path)


def _is_same_file(one: ModuleSpec, other: ModuleSpec | None) -> bool:
    try:
        return other is not None and os.path.samefile(one.origin or "", other.origin or "")
    except OSError:  # a file is gone, or lies in an archive
        return False


def _is_written_in_python(name: str, module: ModuleType) -> bool:
    """Whether the module has a function that can travel by value. C libraries also create modules without a file."""
    for value in list(vars(module).values()):
        parts = [value, *vars(value).values()] if isinstance(value, type) else [value]
        if any(isinstance(part, FunctionType) and part.__module__ == name for part in parts):
            return True
    return False
