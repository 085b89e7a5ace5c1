"""What tests of arguments have workers do, and what cannot be an argument."""

import asyncio
import io
import threading
from typing import Any


def take(first: Any, second: Any = None, /, *rest: Any, named: Any = None) -> str:
    return type(first).__qualname__


async def atake(first: Any) -> str:
    return type(first).__qualname__


def open_here() -> Any:
    return io.TextIOWrapper(io.BytesIO(b"text"))


def lock_here() -> list[Any]:
    return [asyncio.Lock()]


class Own:
    """It has a lock, in a place where nobody looks for it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()

    def method(self) -> None: ...


class OwnQueue(asyncio.Queue[int]):
    """A subclass of one of asyncio's."""


class BadlyReduced:
    def __reduce__(self) -> str:
        raise TypeError("words of the user's")
