"""What the tests of percore.testing have workers do, fake ones and processes."""

import asyncio
import os

import percore
import percore.testing


def lose(path: str) -> None:
    """Do the work, and die before the result arrives."""
    with open(path, "a") as file:
        file.write("done")
    if os.path.getsize(path) == 4:
        percore.testing.die()


async def alose(path: str) -> None:
    lose(path)


async def endless() -> None:
    await asyncio.Event().wait()


async def pid() -> int:
    return percore.current_worker().pid


def square(number: int) -> int:
    return number * number


async def asquare(number: int) -> int:
    return number * number


def write(path: str) -> str:
    with open(path, "a") as file:
        file.write("done")
    return path


async def awrite(path: str) -> str:
    return write(path)
