"""The libraries that percore is measured against. Each is started outside the timing, and reaped afterwards.

There are two ways to use one: a call that is awaited, and a map over many items. Each peer comes in at least three settings. Its
processes are spawned, or forked from a fork server, but never forked from here: such a child would hold the sockets of the
other contestants open.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

Function = Callable[[Any], Any]

Call = Callable[[Any], Awaitable[Any]]
"""One call: the awaitable result for this argument."""

OpenCall = Callable[[], AbstractAsyncContextManager[Call]]

MapAll = Callable[[Sequence[Any]], Awaitable[list[Any]]]
"""Many calls: the results of these items, in order."""

OpenMap = Callable[[], AbstractAsyncContextManager[MapAll]]

WORKERS = 2

RESTLESS = frozenset({"aiomultiprocess", "mpire", "wool"})
"""They look for work every few milliseconds, even when they have none."""

from benchmarks.peers import distex, executors, others  # noqa: E402


@dataclass(frozen=True, slots=True)
class Pair:
    """The same function as a coroutine function, and as a plain one for peers that cannot take that."""

    coroutine: Function
    plain: Function


def awaiting(pair: Pair, workers: int = WORKERS) -> dict[str, Mapping[str, OpenCall]]:
    """Each peer's way to await one call, in several settings, the likely best first, with at least as many processes as percore."""
    pool = partial(partial, executors.calling)
    sizes, plain, coroutine = range(workers, workers + 3), pair.plain, pair.coroutine
    return {
        "ThreadPoolExecutor": {f"{n} threads": pool(executors.threads, n, plain) for n in (2, 8, 32)},
        "ProcessPoolExecutor": {f"{n} processes": pool(executors.processes, n, plain) for n in sizes},
        "InterpreterPoolExecutor": {f"{n} interpreters": pool(executors.interpreters, n, plain) for n in sizes},
        "loky": {f"{n} processes": pool(executors.loky, n, plain) for n in sizes},
        "multiprocessing.Pool": {f"{n} processes": partial(others.pool_calling, n, plain) for n in sizes},
        "aiomultiprocess": {
            f"childconcurrency={n}": partial(others.aiomultiprocess_calling, workers, n, coroutine) for n in (16, 64, 256)
        },
        "distex": {f"qsize={n}": partial(distex.calling, workers, n, coroutine) for n in (64, 16, 2)},
        "mpire": {f"n_jobs={n}": partial(others.mpire_calling, n, plain) for n in sizes},
        "anyio.to_process": {f"{n} processes": partial(others.anyio_calling, n, plain) for n in sizes},
        "wool": {f"spawn={n}": partial(others.wool_calling, n, coroutine) for n in sizes},
    }


def mapping(pair: Pair, chunks: Sequence[int]) -> dict[str, Mapping[str, OpenMap]]:
    """Each peer's way to map a function over many items, with several chunks. anyio and wool have no map."""
    pool, plain = partial(partial, executors.mapping), pair.plain
    return {
        "ThreadPoolExecutor": {f"{n} threads": pool(executors.threads, n, 1, plain) for n in (2, 8, 32)},
        "ProcessPoolExecutor": {f"chunks of {n}": pool(executors.processes, WORKERS, n, plain) for n in chunks},
        "InterpreterPoolExecutor": {f"chunks of {n}": pool(executors.interpreters, WORKERS, n, plain) for n in chunks},
        "loky": {f"chunks of {n}": pool(executors.loky, WORKERS, n, plain) for n in chunks},
        "multiprocessing.Pool": {f"chunks of {n}": partial(others.pool_mapping, WORKERS, n, plain) for n in chunks},
        "joblib": {f"batches of {n}": partial(others.joblib_mapping, WORKERS, n, plain) for n in (*chunks, "auto")},
        "aiomultiprocess": {
            f"childconcurrency={n}": partial(others.aiomultiprocess_mapping, WORKERS, n, pair.coroutine) for n in (16, 64, 256)
        },
        "distex": {
            f"chunks of {n}, qsize={kept}": partial(distex.mapping, WORKERS, kept, n, plain) for n in chunks for kept in (2, 8)
        },
        "mpire": {f"chunks of {n}": partial(others.mpire_mapping, WORKERS, n, plain) for n in chunks},
    }
