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

    For the moment of its making the loop's `call_soon` only keeps what it is given, which is then called here. Nothing else can
    come between: making a task runs no user code and this is the loop's own thread.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._overlay = vars(loop)
        self._step: Callable[[], None]
        self._context: Context | None

    def _keep(self, step: Callable[[], None], *, context: Context | None = None) -> None:
        self._step = step
        self._context = context

    def __call__(self, coro: Coroutine[Any, Any, None], name: str, context: Context | None) -> asyncio.Task[None]:
        overlay = self._overlay
        overlay["call_soon"] = self._keep
        try:
            task = Task(coro, loop=self._loop, name=name, context=context)
        finally:
            del overlay["call_soon"]
        if self._context is None:
            self._step()
        else:
            self._context.run(self._step)
        return task
