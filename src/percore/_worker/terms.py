"""What a call is run under: how long it may take, and the context variables that came with it."""

import asyncio
from collections.abc import Callable, Sequence
from contextvars import Context, ContextVar, copy_context
from importlib import import_module
from typing import Any, NamedTuple

from percore._ipc.pickles import load


class Terms(NamedTuple):
    """As the supervisor tells them.

    Attributes:
        timeout: seconds that the call may run; None: as long as it takes.
        values: of context variables, by number: scalars, or a pickle of all; None: none is set.
        is_beside: a thread of its own is for it, if it needs one.
    """

    timeout: float | None
    values: dict[int, Any] | bytes | None
    is_beside: bool


class Variables:
    """The context variables of a runner, found when the first value comes."""

    def __init__(self, references: Sequence[tuple[str, str]]) -> None:
        self._references = references
        self._found: dict[int, ContextVar[Any]] = {}

    def context(self, values: dict[int, Any] | bytes) -> Context:
        """A copy of the current context in which they have these values. Runs user code: imports, and unpickling."""
        context = copy_context()
        loaded: Any = load(values) if type(values) is bytes else values
        for number, value in loaded.items():
            context.run(self._variable(number).set, value)
        return context

    def _variable(self, number: int) -> ContextVar[Any]:
        variable = self._found.get(number)
        if variable is None:
            module, name = self._references[number]
            variable = self._found[number] = getattr(import_module(module), name)
        return variable


async def within(seconds: float, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
    """The result of a coroutine function, as under `asyncio.timeout`."""
    async with asyncio.timeout(seconds):
        return await (fn(*args, **kwargs) if kwargs else fn(*args))
