"""Multiprocessing by hand: each process gets an equal part of the items over a pipe and sends its results back."""

from __future__ import annotations

import asyncio
import multiprocessing
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
    from contextlib import AbstractContextManager
    from multiprocessing.connection import Connection

    Half = Callable[[Sequence[Any]], list[Any]]
    """Does the calls for these items and gives their results in order."""

    OpenHalf = Callable[[], AbstractContextManager[Half]]
    """In each process: starts what its half needs."""

_CONTEXT = multiprocessing.get_context("forkserver")


@asynccontextmanager
async def hand_split(open_half: OpenHalf, processes: int) -> AsyncIterator[Callable[[Sequence[Any]], Awaitable[list[Any]]]]:
    """A map by hand. `open_half` must be found by its name in the processes."""
    pipes = [_CONTEXT.Pipe() for _ in range(processes)]
    children = [_CONTEXT.Process(target=_serve_half, args=(theirs, open_half), daemon=True) for _, theirs in pipes]
    for child in children:
        child.start()
    for _, theirs in pipes:
        theirs.close()

    async def run(items: Sequence[Any]) -> list[Any]:
        share = -(-len(items) // processes)
        for number, (ours, _) in enumerate(pipes):
            ours.send(items[number * share : (number + 1) * share])
        parts: list[list[Any]] = await asyncio.gather(*(asyncio.to_thread(ours.recv) for ours, _ in pipes))
        return [result for part in parts for result in part]

    try:
        yield run
    finally:
        for ours, _ in pipes:
            ours.close()
        for child in children:
            await asyncio.to_thread(child.join)


def _serve_half(pipe: Connection[list[Any], Sequence[Any]], open_half: OpenHalf) -> None:
    with open_half() as half:
        while True:
            try:
                items = pipe.recv()
            except EOFError:  # the other side has closed its end, or is dead
                return
            pipe.send(half(items))
