"""Jobs and a lifespan for workers on a Ray cluster."""

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import percore
from tests import jobs


@asynccontextmanager
async def lifespan() -> AsyncIterator[str]:
    yield "open"


async def state() -> tuple[str, str | None, str]:
    return percore.state(str), percore.current_worker().node, os.environ.get("FLAVOUR", "")


async def nested(value: int) -> int:
    return sum(await percore.current_runner().map(jobs.add, range(value)))


async def for_ever() -> None:
    await asyncio.Event().wait()


def items(count: int) -> Iterator[int]:
    yield from range(count)


def says(text: str) -> None:
    logging.getLogger("job").warning("%s", text)


async def value_of(shared: percore.Shared[bytes]) -> int:
    return len(shared.value)
