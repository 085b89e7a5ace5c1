"""Calls that wait and compute: an article's workload, and a crawl."""

from __future__ import annotations

import asyncio
import importlib
import io
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvloop

import percore
from benchmarks.calls import page, page_async, same, same_plainly, steps_for
from benchmarks.contestants import always, await_all, mapping, percore_map, playing, sized
from benchmarks.figures import Target
from benchmarks.harness import Row, row
from benchmarks.machine import Pin, usable_cpus
from benchmarks.peers import executors
from benchmarks.peers.split import hand_split
from benchmarks.plots import Plot

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence

    from benchmarks.harness import Contestant
    from benchmarks.peers import OpenMap
    from benchmarks.peers.split import Half
    from benchmarks.results import Sample

PROCESSES = 2
THREADS = (10, 20, 30, 40)
CONCURRENCY = 500
COMPUTING = 0.0008
WARMING = range(8 * max(THREADS))
"""Items with which every thread has made some calls."""


@row(rounds=5, seconds=215, warm_ups=0)
def article(quick: bool) -> Row:
    """An article's workload, 2 processes: 10,000 calls of 20 ms waiting and about 0.8 ms of arithmetic, against a hand split.

    Threads make 5,000 of them in a round, so that there are five rounds; coroutines make all, because a thousand are under way.

    I/O-bound calls that together need more than one CPU. By hand, one starts a process for each CPU, and gives each half of the
    items to that many threads, or to coroutines under a semaphore of 500. percore gets the same numbers of processes, threads
    and coroutines, and hands the items out one by one. The arithmetic is a fixed number of steps, counted once here, and every
    result is compared with its input.

    Calls that start together wake together: so many coroutines then wait for the CPU at once that the next ones, which start
    when these end, go to sleep together as well. The hand split starts 500 at once in each process; a map's default window
    starts small and grows. So for the target percore gets a window that lets it start as many at once; the default window is
    there for comparison.
    """
    calls, of_threads = (1000, 1000) if quick else (10_000, 5000)
    steps = steps_for(COMPUTING)
    pairs: dict[str, OpenMap] = {}
    for threads in THREADS:
        pairs[f"hand split, {threads} threads"] = split_threads(steps, threads)
        pairs[f"percore, {threads} threads"] = percore_threads(steps, threads)
    pairs["hand split, coroutines"] = split_coroutines(steps, CONCURRENCY)
    pairs["percore, coroutines"] = percore_coroutines(steps, CONCURRENCY, calls)
    pairs["percore, coroutines, default window"] = percore_coroutines(steps, CONCURRENCY)
    kinds = [*(f"{threads} threads" for threads in THREADS), "coroutines"]
    return Row(
        {
            name: mapping(opening, range(of_threads if "threads" in name else calls), warm=WARMING)
            for name, opening in pairs.items()
        },
        [Target(f"percore, {kind}", "a call", f"hand split, {kind}", at_most=1.05, towards=1.0) for kind in kinds],
    )


@row(rounds=2, warm_ups=0)
def article_figure(quick: bool) -> Row:
    """The article's figure: seconds for 1,000 of its calls against threads and processes, for each executor.

    The calls of the row article (20 ms waiting, about 0.8 ms of arithmetic), with as many at once as the metric says: in
    threads of one process, in processes, and in threads or coroutines of 2 processes. The plot shows where each stops getting
    faster: threads when one CPU is full, the others when all are.
    """
    calls, sizes = (100, (20,)) if quick else (1000, (10, 20, 40, 60, 80))
    few = [size for size in sizes if size <= 40]  # so many interpreters start, and wait, on two CPUs
    steps = steps_for(COMPUTING)

    def pool(make: executors.Make) -> Callable[[int], OpenMap]:
        return lambda size: partial(executors.mapping, make, size, 1, partial(page, steps=steps))

    def divided(opening: Callable[[int, int], OpenMap]) -> Callable[[int], OpenMap]:
        return lambda size: opening(steps, size // PROCESSES)

    lines: dict[str, tuple[Callable[[int], OpenMap], Sequence[int]]] = {
        "ThreadPoolExecutor": (pool(executors.threads), sizes),
        "ProcessPoolExecutor": (pool(executors.processes), few),
        "InterpreterPoolExecutor": (pool(executors.interpreters), few),
        "loky": (pool(executors.loky), few),
        "hand split, threads": (divided(split_threads), sizes),
        "hand split, coroutines": (divided(split_coroutines), sizes),
        "percore, threads": (divided(percore_threads), sizes),
        "percore, coroutines": (divided(percore_coroutines), sizes),
    }
    items = range(calls)
    return Row(
        {name: sized({size: opening(size) for size in some}, items, [*items]) for name, (opening, some) in lines.items()},
        plot=Plot(
            f"{calls:,} calls that wait 20 ms and compute 0.8 ms: seconds against calls at once",
            x="calls at once",
            y="seconds",
            places={str(size): size for size in sizes},
        ),
    )


@row(rounds=3, seconds=20, warm_ups=0)
def scaling_kinds(quick: bool) -> Row:
    """The article's calls, awaited no-ops and a map of tiny calls, on 1 to as many workers as there are CPUs.

    The program's own loop hands out all calls, on one CPU. Calls with work scale until the workers have no CPU left; calls without
    any scale until that loop is full. So beside the time of a call is the CPU time that the call costs the program's process: its
    inverse is the greatest number of calls in a second, on however many CPUs.
    """
    cpus, steps = usable_cpus(), steps_for(COMPUTING)
    sizes = [size for size in (1, 2, 4, 8, 16, 32, 64) if size <= cpus][: 2 if quick else None]
    part = 20 if quick else 1

    async def awaited(opened: percore.Runner, size: int) -> int:
        return await await_all([partial(opened.run, same)] * (250 * size), max(1, 40 // part))

    async def article(opened: percore.Runner, size: int) -> int:
        return len(await opened.map(partial(page_async, steps=steps), range(2000 * size // part), window=CONCURRENCY * size))

    async def tiny(opened: percore.Runner, _: int) -> int:
        return len(await opened.map(same_plainly, range(1_000_000 // part)))

    def contestant(work: Callable[[percore.Runner, int], Awaitable[int]]) -> Contestant:
        async def once() -> Sample:
            sample: dict[str, float] = {}
            for size in sizes:
                async with percore.Runner(workers=size, concurrency=CONCURRENCY) as opened:
                    await await_all([partial(opened.run, same)] * (4 * size), 25)  # all workers have begun
                    cpu = time.process_time()
                    start = time.perf_counter()
                    calls = await work(opened, size)
                    sample[f"{size}"] = (time.perf_counter() - start) / calls
                    sample[f"{size}, of it CPU here"] = (time.process_time() - cpu) / calls
            return sample

        return always(once)

    return Row(
        {"article": contestant(article), "awaited no-ops": contestant(awaited), "map of tiny calls": contestant(tiny)},
        plot=Plot(
            "Calls in a second against workers: calls of 20 ms with 0.8 ms of arithmetic, awaited no-ops, a map of tiny calls",
            x="workers",
            y="calls in a second",
            places={str(size): size for size in range(1, 257)},
            rates=True,
        ),
    )


@row(rounds=5, seconds=60, warm_ups=0)
def executor_article(quick: bool) -> Row:
    """LoopPoolExecutor: the article's workload on 2 x 40 threads, as a map of it and as a map of a Runner.

    Calls of 20 ms waiting and about 0.8 ms of arithmetic, as in the row article: the cost of the interface of
    concurrent.futures for calls that do something. Every result is compared with its input.
    """
    steps, threads = steps_for(COMPUTING), max(THREADS)

    def make(workers: int) -> percore.LoopPoolExecutor:
        return percore.LoopPoolExecutor(workers, max_threads=threads)

    openings: dict[str, OpenMap] = {
        "percore": partial(executors.mapping, make, PROCESSES, 1, partial(page, steps=steps)),
        "percore.Runner": percore_threads(steps, threads),
    }
    items = range(200 if quick else 10_000)
    return Row(
        {name: mapping(opening, items, warm=WARMING) for name, opening in openings.items()},
        [Target("percore", "a call", "percore.Runner", at_most=1.05)],
    )


def percore_threads(steps: int, threads: int) -> OpenMap:
    return partial(percore_map, partial(page, steps=steps), workers=PROCESSES, threads=threads)


def percore_coroutines(steps: int, concurrency: int, window: int | None = None) -> OpenMap:
    return partial(percore_map, partial(page_async, steps=steps), window, workers=PROCESSES, concurrency=concurrency)


def split_threads(steps: int, threads: int) -> OpenMap:
    return partial(hand_split, partial(half_in_threads, steps, threads), PROCESSES)


def split_coroutines(steps: int, concurrency: int) -> OpenMap:
    return partial(hand_split, partial(half_in_coroutines, steps, concurrency), PROCESSES)


@contextmanager
def half_in_threads(steps: int, threads: int) -> Iterator[Half]:
    """In a process of the hand split: its half on this many threads, which stay from round to round."""
    with ThreadPoolExecutor(threads) as pool:
        yield lambda items: list(pool.map(partial(page, steps=steps), items))


@contextmanager
def half_in_coroutines(steps: int, concurrency: int) -> Iterator[Half]:
    """In a process of the hand split: its half as tasks of one loop, this many at once."""

    async def half(items: Sequence[int]) -> list[int]:
        places = asyncio.Semaphore(concurrency)

        async def one(item: int) -> int:
            async with places:
                return await page_async(item, steps)

        return await asyncio.gather(*map(one, items))

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as loop:
        yield lambda items: loop.run(half(items))


# The crawl

_EXAMPLES = Path(__file__).parents[2] / "examples"
EXCLUDED = "a page, farm excluded"


@row(rounds=5, seconds=75, warm_ups=0, pin=Pin.TWO)
def site_farm(quick: bool) -> Row:
    """The crawler of the examples on the local farm of sites: one plain process against percore with two workers.

    `examples/scrape.py` in both of its ways, for a few seconds each: pages are fetched over HTTP and parsed, and their links
    followed, with the same manners. The farm serves from the same two CPUs, and takes CPU from the crawler: the farm's share of
    both CPUs is taken off the time of the two workers' crawl. One process leaves the farm a CPU of its own.
    """
    farm = OneFarm(**({"modules": 10, "releases": 1, "slow": 0.2} if quick else {"slow": 0.2}))
    seconds = 1.5 if quick else 6.0
    return Row(
        {
            "one process": farm.crawl(seconds, single=True),
            "percore, 2 workers": farm.crawl(seconds, single=False),
        },
        [Target("percore, 2 workers", EXCLUDED, "one process", at_least=0.9 * PROCESSES)],
    )


class OneFarm:
    """A farm for all contestants, from the first that opens to the last that closes: rendering its pages takes a while."""

    def __init__(self, **sizes: float) -> None:
        self._sizes = sizes
        self._users = 0
        self._farm: Any = None

    @asynccontextmanager
    async def used(self) -> AsyncIterator[Any]:
        if not self._users:
            self._farm = _example("farm").Farm(**self._sizes)
        self._users += 1
        try:
            yield self._farm
        finally:
            self._users -= 1
            if not self._users:
                self._farm.close()

    def crawl(self, seconds: float, *, single: bool) -> Contestant:
        async def once(farm: Any) -> Sample:
            farm.forget()
            scrape = _example("scrape")
            options, _ = scrape.read_command_line(["--workers", str(PROCESSES), "--seconds", str(seconds)])
            scraper = scrape.Scraper(options, scrape.Console(file=io.StringIO()), None)
            tally = scrape.Tally("one crawl")
            scraper.tallies.append(tally)
            await (scraper.in_one_process if single else scraper.on_every_cpu)(farm.starts, tally)
            if not tally.pages:
                raise RuntimeError("no page was crawled")
            share = 0.0 if single else farm.usage().cpu / PROCESSES
            return {EXCLUDED: (tally.seconds - share) / tally.pages, "a page": tally.seconds / tally.pages}

        return playing(self.used, once)


def _example(name: str) -> Any:
    """A module of a program, not of a package."""
    if str(_EXAMPLES) not in sys.path:
        sys.path.append(str(_EXAMPLES))  # for the workers too: percore passes it on
    return importlib.import_module(name)
