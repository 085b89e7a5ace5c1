"""The terms of a call: its timeout and the context variables that came with it."""

import asyncio
from collections.abc import Callable, Sequence
from contextvars import Context, ContextVar, copy_context
from importlib import import_module
from time import monotonic
from typing import Any, NamedTuple

from percore._serialization.pickler import load


class Terms(NamedTuple):
    """The terms of a call, as the supervisor sends them.

    Attributes:
        timeout: seconds that the call may run; None means no limit.
        values: values of context variables, by number: a dict of scalars, or a pickle of such a dict; None if none is set.
        is_broadcast: whether the call is a broadcast. If it needs a thread, it runs in a new one outside the pool.
        prefetch: of a stream: how many items it may send at first; 0: it is no stream.
        begin_by: the monotonic time by which the call must begin; None means no limit.
    """

    timeout: float | None = None
    values: dict[int, Any] | bytes | None = None
    is_broadcast: bool = False
    prefetch: int = 0
    begin_by: float | None = None

    def is_too_late(self) -> bool:
        """Whether the call must not begin any more. Call this once its start mark is set: see `Worker.fate`."""
        return self.begin_by is not None and monotonic() >= self.begin_by


class Variables:
    """The context variables of a runner, each imported when its first value arrives."""

    def __init__(self, references: Sequence[tuple[str, str]]) -> None:
        self._references = references
        self._found: dict[int, ContextVar[Any]] = {}

    def context(self, values: dict[int, Any] | bytes) -> Context:
        """Return a copy of the current context with these values set. Runs user code: imports and unpickling."""
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
    """Call a coroutine function under `asyncio.timeout` and return its result."""
    async with asyncio.timeout(seconds):
        return await (fn(*args, **kwargs) if kwargs else fn(*args))
