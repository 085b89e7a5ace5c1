"""Calls that make calls."""

import asyncio
import os
from collections.abc import Callable
from contextvars import Context, ContextVar, copy_context
from typing import Any

import percore
from percore._worker.context import of_id
from tests.jobs import apass_gate, pass_gate, say


async def adown(depth: int) -> int:
    """Go down in coroutines, and return the depth."""
    return 0 if depth == 0 else 1 + await percore.current_runner().run(adown, depth - 1)


def down(depth: int) -> int:
    """Go down in plain functions."""
    return 0 if depth == 0 else 1 + percore.current_runner().run_sync(down, depth - 1)


async def amixed(depth: int) -> int:
    """Go down in both by turns."""
    return 0 if depth == 0 else 1 + await percore.current_runner().run(mixed, depth - 1)


def mixed(depth: int) -> int:
    return 0 if depth == 0 else 1 + percore.current_runner().run_sync(amixed, depth - 1)


def fail(text: str) -> None:
    raise ValueError(text)


async def acall(fn: Any, *args: Any) -> Any:
    return await percore.current_runner().run(fn, *args)


def call(fn: Any, *args: Any) -> Any:
    return percore.current_runner().run_sync(fn, *args)


async def gathered(fn: Any, count: int) -> list[Any]:
    runner = percore.current_runner()
    return await asyncio.gather(*(runner.run(fn, number) for number in range(count)))


async def with_key(key: Any, fn: Any = None) -> Any:
    runner = percore.current_runner().options(key=key)
    return await (runner.run(echo, "x") if fn is None else runner.run(fn))


def of_nothing() -> Context:
    """Return a context of the worker without a call."""
    context = copy_context()
    context.run(of_id.set, None)
    return context


colour: ContextVar[str] = ContextVar("colour")


def colour_of() -> str:
    return colour.get()


async def paint(value: str) -> str:
    colour.set(value)
    return await percore.current_runner().run(colour_of)


async def for_ever(*_: object) -> None:
    await asyncio.get_running_loop().create_future()


async def until_cancelled(log: str, gate: str) -> None:
    say(log, "begun")
    try:
        await apass_gate(gate)
    except asyncio.CancelledError:
        say(log, "cancelled")
        raise


async def leave(log: str, gate: str) -> str:
    """Leave a call behind that has begun."""
    runner = percore.current_runner()
    _ = runner.submit(until_cancelled, log, gate)
    await runner.run(echo, 1)
    return "left"


def die() -> None:
    os.kill(os.getpid(), 9)


def echo(value: Any) -> Any:
    return value


async def wrong_face() -> None:
    percore.current_runner().run_sync(echo, 1)


def other_wrong_face() -> None:
    _ = percore.current_runner().submit(echo, 1)


async def in_empty_context() -> None:
    of_nothing().run(percore.current_runner)


async def after_end() -> None:
    """Use a runner after its call has ended."""
    runner = percore.current_runner()
    runner._family.end()
    await runner.run(echo, 1)


async def two_in_turn(log: str, gate: str, then: str) -> str:
    """Wait for a call, and then for another one, which begins only after the gate was opened."""
    runner = percore.current_runner()
    return str(await runner.run(held, log, gate, "first")) + str(await runner.run(echo, then))


def two_in_turn_on_a_thread(log: str, gate: str, then: str) -> str:
    runner = percore.current_runner()
    return str(runner.run_sync(held, log, gate, "first")) + str(runner.run_sync(echo, then))


def held(log: str, gate: str, value: str) -> str:
    say(log, "begun")
    pass_gate(gate)
    return value


async def aheld(log: str, gate: str, value: str) -> str:
    say(log, "begun")
    await apass_gate(gate)
    return value


async def both(log: str, gate: str) -> list[str]:
    """Make two calls, of which only one finds a place."""
    runner = percore.current_runner()
    return list(await asyncio.gather(*(runner.run(aheld, log, gate, str(number)) for number in range(2))))


async def refused_then_waits(log: str, gate: str) -> None:
    """Make a call that is refused, since this call has its key, and go on."""
    try:
        await with_key("k")
    except ValueError:
        say(log, "refused")
    await apass_gate(gate)


def late_call_and_say(log: str, gate: str, fn: Callable[..., Any]) -> None:
    """Call a function only after the gate was opened, and say by which error the call ends."""
    say(log, "begun")
    pass_gate(gate)
    try:
        percore.current_runner().run_sync(fn)
    except (asyncio.CancelledError, TimeoutError) as error:
        say(log, type(error).__name__)


def call_and_say(log: str, fn: Callable[..., Any]) -> None:
    """Call a function, and say by which TimeoutError the call ends."""
    try:
        percore.current_runner().run_sync(fn)
    except TimeoutError as error:
        say(log, error)
