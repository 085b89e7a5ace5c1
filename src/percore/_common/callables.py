"""Functions of users: their names, where their calls run, and which of them percore refuses. The same on both sides."""

import functools
import inspect
from collections.abc import Callable
from typing import Any, Final

_LONGEST: Final = 256
"""Characters of a full name."""


def qualified_name(fn: object) -> str:
    """Return the `__qualname__` of the function behind partials, or of the class of a callable object. Never raises."""
    fn = _behind_partials(fn)
    try:
        name = getattr(fn, "__qualname__", None) or type(fn).__qualname__
        return name if type(name) is str else type(fn).__qualname__
    except Exception:  # the user's `__getattr__` raised; the class always has a name
        return type(fn).__qualname__


def _behind_partials(fn: object) -> object:
    for _ in range(20):
        if not isinstance(fn, functools.partial):
            break
        fn = fn.func
    return fn


def full_name(fn: object) -> str:
    """Return module and qualified name of the function behind partials, or of the class of a callable object. Never raises."""
    fn = _behind_partials(fn)
    try:
        module = getattr(fn, "__module__", None) or type(fn).__module__
    except Exception:  # as in `qualified_name`
        module = type(fn).__module__
    return name_in(module, qualified_name(fn))


def name_in(module: object, name: str) -> str:
    """Return the full name of what has this qualified name in this module. The main module has one name in all processes."""
    if type(module) is not str or not module:
        return name[:_LONGEST]
    return f"{'__main__' if module == '__mp_main__' else module}.{name}"[:_LONGEST]


def routines_of(fn: object) -> tuple[Any, Any]:
    """Return the functions that a call of `fn` runs: the one inside its partials, and the `__call__` of its class or None."""
    inner: Any = fn
    while isinstance(inner, functools.partial):
        inner = inner.func
    # The class's __call__ decides how a callable object runs. That of a routine or class says nothing about how it runs.
    return inner, None if inspect.isroutine(inner) or inspect.isclass(inner) else type(inner).__call__


def is_coroutine_call(fn: object) -> bool:
    """Return whether calls of `fn` run in the event loop: it is a coroutine function, and else a plain one.

    Raises:
        TypeError: `fn` is a coroutine (which is closed first), a generator function, or not callable.
    """
    if inspect.iscoroutine(fn):
        fn.close()
        name = getattr(fn, "__qualname__", "fetch")
        raise TypeError(f"give the function and its arguments: runner.run({name}, ...), not runner.run({name}(...))")
    if not callable(fn):
        raise TypeError(f"expected a function, not {fn!r}")
    inner, call = routines_of(fn)
    if inspect.iscoroutinefunction(inner) or inspect.iscoroutinefunction(call):
        return True
    if inspect.isgeneratorfunction(inner) or inspect.isgeneratorfunction(call) or _makes_async_generator(inner, call):
        raise TypeError(
            f"{qualified_name(fn)} is a generator function, and one call gives one result: "
            f"iterate `runner.stream({_own_name(fn)}, ...)` with `async for`"
        )
    return False


def is_async_stream(fn: object) -> bool:
    """Return whether streams of `fn` run in the event loop: it is an async generator function, and else a plain one.

    Raises:
        TypeError: `fn` is no generator function. A coroutine is closed first.
    """
    if inspect.iscoroutine(fn):
        fn.close()
    if inspect.isgenerator(fn) or inspect.isasyncgen(fn) or inspect.iscoroutine(fn):
        name = fn.__qualname__
        raise TypeError(f"give the function and its arguments: runner.stream({name}, ...), not runner.stream({name}(...))")
    inner, call = routines_of(fn)
    if _makes_async_generator(inner, call):
        return True
    if inspect.isgeneratorfunction(inner) or inspect.isgeneratorfunction(call):
        return False
    if not callable(fn):
        raise TypeError(f"expected a generator function, not {fn!r}")
    raise TypeError(
        f"{qualified_name(fn)} is not a generator function, so it has one result: "
        f"`await runner.run({_own_name(fn)}, ...)`, or `runner.map({_own_name(fn)}, ...)` for many calls"
    )


def _makes_async_generator(inner: object, call: object) -> bool:
    return inspect.isasyncgenfunction(inner) or inspect.isasyncgenfunction(call)


def _own_name(fn: object) -> str:
    return qualified_name(fn).rpartition(".")[2]


def check_plain(name: str, fn: Callable[..., object]) -> None:
    """Check that `fn` is a plain function. percore uses its return value and neither awaits nor iterates it.

    Raises:
        TypeError: `fn` is a coroutine function or a generator function.
    """
    for routine in routines_of(fn):
        if inspect.iscoroutinefunction(routine):
            raise TypeError(f"{name} must be a plain function, not an async one: percore calls it and does not await it")
        if inspect.isgeneratorfunction(routine) or inspect.isasyncgenfunction(routine):
            raise TypeError(f"{name} must be a plain function, not a generator function: percore calls it and does not iterate")


def check_awaited(name: str, value: object) -> None:
    """Check that `value`, returned by a function that percore does not await, is not an awaitable.

    Raises:
        TypeError: it is. A coroutine is closed first.
    """
    if hasattr(type(value), "__await__"):
        text = repr(value)
        if inspect.iscoroutine(value):
            value.close()
        raise TypeError(f"{name} must be a plain function: percore does not await {text}, which it returned")
