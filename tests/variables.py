"""Context variables of a module, and functions for workers that read them."""

from collections.abc import Coroutine
from contextvars import ContextVar
from typing import Any

from tests import jobs

name: ContextVar[Any] = ContextVar("name")
level: ContextVar[Any] = ContextVar("level", default=0)


def read() -> tuple[Any, Any]:
    return name.get("unset"), level.get()


async def aread() -> tuple[Any, Any]:
    return read()


def read_for(place: int) -> tuple[int, Any, Any]:
    return place, *read()


async def aread_for(place: int) -> tuple[int, Any, Any]:
    return read_for(place)


def read_later() -> Coroutine[Any, Any, tuple[Any, Any]]:
    return aread()


def change() -> None:
    name.set("changed there")
    level.set(99)


async def achange() -> None:
    change()


async def hold_and_read(log: str, gate: str) -> tuple[Any, Any]:
    await jobs.await_(log, gate, "holds")
    return read()
