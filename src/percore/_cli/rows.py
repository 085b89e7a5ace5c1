"""The rows of `percore bench`: each does the same work with percore and with the standard library."""

from __future__ import annotations

import asyncio
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeAlias

from percore._cli import bench_calls

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    import percore

Work: TypeAlias = "Callable[[int], Awaitable[None]]"
"""Does a number of items, and returns when they are done."""

_STEPS: Final = 50_000
_LARGE: Final = bytes(4 << 20)
_LATE: Final = 8


@dataclass(frozen=True, slots=True)
class Contestant:
    """One way to do the work of a row.

    Attributes:
        name: the way, as its user writes it.
        work: does it.
    """

    name: str
    work: Work


@dataclass(frozen=True, slots=True)
class Row:
    """What is compared.

    Attributes:
        title: what each item is.
        unit: what is counted per second.
        first: how many items to try first, to learn how long they take.
        contestants: the ways to do it, percore's first.
    """

    title: str
    unit: str
    first: int
    contestants: tuple[Contestant, ...]


class Pools:
    """The pools that the rows use, with their workers started."""

    def __init__(self, runner: percore.Runner, pool: ProcessPoolExecutor, workers: int) -> None:
        self._runner = runner
        self._pool = pool
        self._workers = workers

    def rows(self) -> tuple[Row, ...]:
        """Return the rows, in the order in which to run them."""
        theirs = "ProcessPoolExecutor"
        return (
            Row(
                "tiny functions, mapped",
                "calls",
                2_000,
                (
                    Contestant("runner.map", self._map(bench_calls.nothing)),
                    Contestant(f"{theirs}.map", self._pool_map(1)),
                    Contestant(f"{theirs}.map, chunksize=256", self._pool_map(256)),
                ),
            ),
            Row(
                "functions of a few ms of CPU, mapped",
                "calls",
                20,
                (Contestant("runner.map", self._map_work), Contestant(f"{theirs}.map", self._pool_work)),
            ),
            Row(
                "one small call after the other",
                "calls",
                100,
                (Contestant("await runner.run", self._one_by_one), Contestant("run_in_executor", self._pool_one_by_one)),
            ),
            Row(
                "4 MiB there and back",
                "calls",
                _LATE,
                (Contestant("runner.map", self._large), Contestant(f"{theirs}.map", self._pool_large)),
            ),
            Row(
                "coroutines with 0.2 ms of CPU each",
                "calls",
                500,
                (Contestant("runner.map", self._map(bench_calls.wait)), Contestant("asyncio, one process", self._here)),
            ),
        )

    def _map(self, fn: Callable[[int], object]) -> Work:
        async def work(count: int) -> None:
            await self._runner.map(fn, range(count))

        return work

    def _pool_map(self, chunksize: int) -> Work:
        async def work(count: int) -> None:
            await asyncio.to_thread(lambda: list(self._pool.map(bench_calls.nothing, range(count), chunksize=chunksize)))

        return work

    async def _map_work(self, count: int) -> None:
        await self._runner.map(bench_calls.work, [_STEPS] * count)

    async def _pool_work(self, count: int) -> None:
        await asyncio.to_thread(lambda: list(self._pool.map(bench_calls.work, [_STEPS] * count)))

    async def _one_by_one(self, count: int) -> None:
        for number in range(count):
            await self._runner.run(bench_calls.nothing, number)

    async def _pool_one_by_one(self, count: int) -> None:
        loop = asyncio.get_running_loop()
        for number in range(count):
            await loop.run_in_executor(self._pool, bench_calls.nothing, number)

    async def _large(self, count: int) -> None:
        async for _ in self._runner.map(bench_calls.same, [_LARGE] * count):
            pass

    async def _pool_large(self, count: int) -> None:
        def work() -> None:
            for _ in self._pool.map(bench_calls.same, [_LARGE] * count):
                pass

        await asyncio.to_thread(work)

    async def _here(self, count: int) -> None:
        await asyncio.gather(*(bench_calls.wait(number) for number in range(count)))


@contextmanager
def standard_pool(workers: int) -> Iterator[ProcessPoolExecutor]:
    """Make a ProcessPoolExecutor, and start its workers before anything is measured."""
    with ProcessPoolExecutor(workers) as pool:
        list(pool.map(bench_calls.work, [_STEPS] * 4 * workers))
        yield pool
