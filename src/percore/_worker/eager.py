"""Tasks that take their first step at once, instead of an iteration of the loop later.

A coroutine that never suspends is then done when it has been started, which is a third of the way there and back of a call.
"""

import asyncio
import sys
from asyncio import Task
from collections.abc import Callable, Coroutine
from contextvars import Context
from typing import Any, Final, TypeAlias

Starter: TypeAlias = Callable[[Coroutine[Any, Any, None], str, Context | None], asyncio.Task[None]]

_HAS_EAGER_TASKS: Final = sys.version_info >= (3, 12, 1)


def task_starter(loop: asyncio.AbstractEventLoop) -> Starter:
    """What starts a named task on `loop`, in a context or a copy of the current one, eagerly where that is right.

    To be called from a callback of the loop, never inside a task.
    """
    if _HAS_EAGER_TASKS:
        return lambda coro, name, context: asyncio.Task(  # type: ignore[call-arg]  # 3.12+
            coro, loop=loop, name=name, context=context, eager_start=True
        )
    try:
        vars(loop)
    except TypeError:  # its methods cannot be overlaid
        return lambda coro, name, context: loop.create_task(coro, name=name, context=context)
    return _Overlaid(loop)


class _Overlaid:
    """Eager start for Python 3.11, where a new task always asks its loop to take the first step soon.

    For the moment of its making the loop's `call_soon` only keeps that step, which is then called here. This is the loop's own
    thread, but a garbage collection may begin, and a `__del__` that it runs may call something soon, or start another task.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._overlay = vars(loop)
        self._call_soon = loop.call_soon
        self._coro: Coroutine[Any, Any, None] | None = None
        self._step: Callable[[], None]
        self._context: Context | None

    def _keep(self, callback: Callable[..., Any], *args: Any, context: Context | None = None) -> asyncio.Handle | None:
        task = getattr(callback, "__self__", None)
        if type(task) is not Task or task.get_coro() is not self._coro:
            return self._call_soon(callback, *args, context=context)
        self._step = callback
        self._context = context
        return None

    def __call__(self, coro: Coroutine[Any, Any, None], name: str, context: Context | None) -> asyncio.Task[None]:
        overlay = self._overlay
        overlay["call_soon"] = self._keep
        self._coro = coro
        try:
            task = Task(coro, loop=self._loop, name=name, context=context)
        finally:
            del overlay["call_soon"]
        if self._context is None:
            self._step()
        else:
            self._context.run(self._step)
        return task
