"""What percore is measured against: each library in a module, started outside the timing and reaped afterwards.

Here are the two ways in which rows use them all: a call that is awaited, and a map over many items. Each peer is there in
at least three settings. Peers' processes are spawned, or forked from a fork server, never from here: a fork of this
process would hold the sockets of the other contestants open.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from benchmarks.peers import aiomultiprocess, anyio, distex, executors, mpire, wool

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

    from benchmarks._harness import Round, Sample

Call = Callable[[Any], Awaitable[Any]]
"""One call: what to await for this argument."""

OpenCall = Callable[[], AbstractAsyncContextManager[Call]]

MapAll = Callable[[Sequence[Any]], Awaitable[list[Any]]]
"""Many calls: the results of these items, in order."""

OpenMap = Callable[[], AbstractAsyncContextManager[MapAll]]

WORKERS = 2

RESTLESS = frozenset({"aiomultiprocess", "mpire", "wool"})
"""Those that do something even when they have nothing to do: they look for work every few milliseconds."""


@dataclass(frozen=True, slots=True)
class Pair:
    """The same function as a coroutine function, and as a plain one for those who cannot take that."""

    coroutine: Callable[[Any], Awaitable[Any]]
    plain: Callable[[Any], Any]


def awaiting(pair: Pair, workers: int = WORKERS) -> dict[str, Mapping[str, OpenCall]]:
    """Each peer's way to await one call, in several settings, the likely best first. A peer with processes has as many as
    percore, or more."""
    calling = executors.calling
    sizes = (workers, workers + 1, workers + 2)
    return {
        "ThreadPoolExecutor": {f"{n} threads": partial(calling, executors.threads, n, pair.plain) for n in (2, 8, 32)},
        "ProcessPoolExecutor": {f"{n} processes": partial(calling, executors.processes, n, pair.plain) for n in sizes},
        "InterpreterPoolExecutor": {f"{n} interpreters": partial(calling, executors.interpreters, n, pair.plain) for n in sizes},
        "loky": {f"{n} processes": partial(calling, executors.loky, n, pair.plain) for n in sizes},
        "aiomultiprocess": {
            f"childconcurrency={n}": partial(aiomultiprocess.calling, workers, n, pair.coroutine) for n in (16, 64, 256)
        },
        "distex": {f"qsize={n}": partial(distex.calling, workers, n, pair.coroutine) for n in (64, 16, 2)},
        "mpire": {f"n_jobs={n}": partial(mpire.calling, n, pair.plain) for n in sizes},
        "anyio.to_process": {f"{n} processes": partial(anyio.calling, n, pair.plain) for n in sizes},
        "wool": {f"spawn={n}": partial(wool.calling, n, pair.coroutine) for n in sizes},
    }


def mapping(pair: Pair, chunks: Sequence[int]) -> dict[str, Mapping[str, OpenMap]]:
    """Each peer's way to map a function over many items, with several chunks; anyio and wool have none."""
    mapped = executors.mapping
    return {
        "ThreadPoolExecutor": {f"{n} threads": partial(mapped, executors.threads, n, 1, pair.plain) for n in (2, 8, 32)},
        "ProcessPoolExecutor": {f"chunks of {n}": partial(mapped, executors.processes, WORKERS, n, pair.plain) for n in chunks},
        "InterpreterPoolExecutor": {
            f"chunks of {n}": partial(mapped, executors.interpreters, WORKERS, n, pair.plain) for n in chunks
        },
        "loky": {f"chunks of {n}": partial(mapped, executors.loky, WORKERS, n, pair.plain) for n in chunks},
        "aiomultiprocess": {
            f"childconcurrency={n}": partial(aiomultiprocess.mapping, WORKERS, n, pair.coroutine) for n in (16, 64, 256)
        },
        "distex": {
            f"chunks of {n}, qsize={kept}": partial(distex.mapping, WORKERS, kept, n, pair.plain) for n in chunks for kept in (2, 8)
        },
        "mpire": {f"chunks of {n}": partial(mpire.mapping, WORKERS, n, pair.plain) for n in chunks},
    }


@asynccontextmanager
async def timed_map(open_map: OpenMap, items: Sequence[Any], expected: list[Any] | None = None) -> AsyncIterator[Round]:
    """A contestant: the map over these items, whose results are compared with what is expected, else with the items.

    Its metric is "a call".
    """
    wanted = list(items) if expected is None else expected
    async with open_map() as run:

        async def once() -> Sample:
            start = time.perf_counter()
            results = await run(items)
            seconds = time.perf_counter() - start
            if results != wanted:
                raise RuntimeError("the results are not those of these items")
            return {"a call": seconds / len(items)}

        yield once
