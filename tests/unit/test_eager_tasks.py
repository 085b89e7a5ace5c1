"""Tasks that take their first step at once: nothing that is called soon in the midst of making one is lost."""

import asyncio
from collections.abc import Callable
from contextvars import ContextVar, copy_context

import pytest
import uvloop

from percore._worker.eager_tasks import task_starter

LOOPS = pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])

variable: ContextVar[str] = ContextVar("variable", default="unset")


class Name(str):
    """A name that acts when a task is given it: in the midst of making that, as a garbage collection may."""

    __slots__ = ("act",)

    act: Callable[[], object]

    def __str__(self) -> str:
        self.act()
        return "named"


def run(loop: asyncio.AbstractEventLoop, callback: Callable[[], object]) -> None:
    """Call this in a callback of the loop, where no task is the current one."""
    loop.call_soon(callback)
    loop.call_soon(loop.stop)
    loop.run_forever()


def turn(loop: asyncio.AbstractEventLoop) -> None:
    loop.call_soon(loop.stop)
    loop.run_forever()


@LOOPS
def test_what_is_called_soon_while_a_task_is_made_is_called(new_loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    loop = new_loop()
    said: list[object] = []

    async def say(text: str) -> None:
        said.append((text, variable.get()))

    def act() -> None:
        loop.call_soon(said.append, "called")
        loop.call_soon(said.append, "cancelled").cancel()
        tasks.append(loop.create_task(say("another")))

    def start() -> None:
        name = Name("name")
        name.act = act
        context = copy_context()
        context.run(variable.set, "set")
        tasks.append(starter(say("started"), name, context))

    tasks: list[asyncio.Task[None]] = []
    starter = task_starter(loop)
    try:
        run(loop, start)
        turn(loop)
        assert sorted(map(str, said)) == ["('another', 'unset')", "('started', 'set')", "called"]
        assert [task.done() for task in tasks] == [True, True]
        assert tasks[1].get_name() == "named"
        assert loop.call_soon.__self__ is loop  # type: ignore[attr-defined]  # nothing is left in its place
    finally:
        loop.close()


@LOOPS
def test_a_task_that_waits_goes_on(new_loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    loop = new_loop()
    said: list[str] = []

    async def wait() -> None:
        said.append("began")
        await asyncio.sleep(0)
        said.append("went on")

    tasks: list[asyncio.Task[None]] = []
    starter = task_starter(loop)
    try:
        run(loop, lambda: tasks.append(starter(wait(), "waits", None)))
        loop.run_until_complete(tasks[0])
        assert said == ["began", "went on"]
    finally:
        loop.close()
