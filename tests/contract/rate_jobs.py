"""Functions that tell when they began."""

from collections.abc import AsyncIterator, Iterator

import percore
from tests.jobs import apass_gate, pass_gate, say
from tests.marks import began


async def atold(_: object = None) -> int:
    return began()


def told(_: object = None) -> int:
    return began()


def told_twice(_: object = None) -> Iterator[int]:
    yield began()
    yield began()


async def atold_twice(_: object = None) -> AsyncIterator[int]:
    yield began()
    yield began()


async def ahold(log: str, gate: str, name: object) -> int:
    """Say so, wait for the gate, and tell."""
    say(log, name)
    await apass_gate(gate)
    return began()


def hold(log: str, gate: str, name: object) -> int:
    say(log, name)
    pass_gate(gate)
    return began()


async def asay(log: str, name: object) -> None:
    say(log, name)


async def call_of_key(key: str, count: int) -> list[int]:
    """Make calls of a key from inside a call."""
    view = percore.current_runner().options(key=key)
    return [await view.run(atold) for _ in range(count)]
