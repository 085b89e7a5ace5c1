"""Maps over many items: their cost, their balance, their window and their memory."""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import pickle
import random
import time
from contextlib import asynccontextmanager, contextmanager
from functools import cache, partial
from itertools import count
from typing import TYPE_CHECKING, Any

from benchmarks.calls import Bits, last, last_async, same, same_plainly, spin, spin_all, steps_for, work
from benchmarks.contestants import (
    WrongResult,
    check,
    map_seconds,
    mapping,
    percore_map,
    plain_loop,
    playing,
    runner,
    settings,
    sized,
)
from benchmarks.figures import Target, in_items, in_mebibytes, in_seconds, in_times
from benchmarks.harness import Row, row
from benchmarks.machine import usable_cpus, uss_of
from benchmarks.peers import RESTLESS, WORKERS, Pair, distex, executors
from benchmarks.peers import mapping as peers_mapping
from benchmarks.peers.split import hand_split
from benchmarks.plots import Plot

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator, Sequence

    import percore
    from benchmarks.harness import Contestant
    from benchmarks.peers import MapAll, OpenMap
    from benchmarks.peers.split import Half
    from benchmarks.results import Sample


@row(rounds=7, seconds=80, is_cheap=True)
def map_tiny(quick: bool) -> Row:
    """A map of a million tiny plain calls, 2 workers, nothing tuned, against the pools at several chunksizes each.

    The cost of a map's call without work. The pools put as many items into a message as their user asks for, and are as good as
    that guess: each is tried with several chunksizes, distex also with more messages kept at each worker, and plays with the
    best. percore is told nothing: it measures the calls while they run, and makes its batches by that. The results come as a
    list, in order, and are compared with the items. Pools whose calls cost tens of microseconds get fewer items. The split by
    hand and the plain loop show what no pool can reach: such calls need none.
    """
    items = range(200_000 if quick else 1_000_000)
    fewer = {"ThreadPoolExecutor": 50, "aiomultiprocess": 200, "joblib": 5, "mpire": 20}
    peers = peers_mapping(Pair(same, same_plainly), (10_000, 3000, 30_000))
    return Row(
        {
            "percore": mapping(partial(percore_map, same_plainly, workers=WORKERS), items),
            "hand split": mapping(partial(hand_split, loop_half, WORKERS), items),
            "a plain loop": mapping(partial(plain_loop, same_plainly), items),
            **settings(peers, lambda name, opening: mapping(opening, range(len(items) // fewer.get(name, 1)))),
        },
        [
            Target("percore", "a call", "ProcessPoolExecutor", at_least=1.2),
            Target("percore", "a call", "distex", at_least=1.0, towards=1.5),
        ],
        anew=RESTLESS & peers.keys(),
    )


@contextmanager
def loop_half() -> Iterator[Half]:
    """In a process of the hand split: its half, in a loop."""
    yield lambda items: [same_plainly(item) for item in items]


# Balance

LEAST, MOST = 1e-6, 0.1
OVER = "over balance"


@row(seconds=85, warm_ups=0)
def map_mixed(quick: bool) -> Row:
    """A map of plain calls that cost from 1 us to 100 ms of CPU, 2 workers, against a perfect balance.

    Nobody can know beforehand which items are the long ones, and a batch that looked short may end with the longest. Each call
    uses that much CPU time of its thread, and returns how much it really was. In a perfect balance all workers end at the same
    moment: after the sum of the CPU times of this round, divided by the number of workers. The figure is the duration of the
    map over that, and so includes everything that percore adds.

    The costs are spread evenly over the magnitudes, and are the same in every round: as many of about 10 us as of about 10 ms.
    For comparison there are two pools with several chunks (few items in a message balance best there), and the costs dealt out
    by hand to two processes that do nothing else: that part of the difference is the machine's.
    """
    costs = costs_of(100 if quick else 600)
    contestant = partial(_balanced, costs)
    pools: dict[str, Callable[[int], OpenMap]] = {
        "ProcessPoolExecutor": lambda chunk: partial(executors.mapping, executors.processes, WORKERS, chunk, spin),
        "distex": lambda chunk: partial(distex.mapping, WORKERS, 2, chunk, spin),
    }
    return Row(
        {
            "percore": contestant(partial(percore_map, spin, workers=WORKERS)),
            "dealt out by hand": contestant(_dealt_by_hand),
            **{name: {f"chunks of {n}": contestant(pool(n)) for n in (1, 4, 16)} for name, pool in pools.items()},
        },
        [Target("percore", OVER, at_most=1.10, towards=1.03)],
        units={OVER: in_times},
    )


def _balanced(costs: Sequence[float], opening: OpenMap) -> Contestant:
    async def once(run: MapAll) -> Sample:
        start = time.perf_counter()
        used = await run(costs)
        seconds = time.perf_counter() - start
        if len(used) != len(costs) or sum(used) < sum(costs):
            raise WrongResult("not every call has used its CPU time")
        return {OVER: seconds / (sum(used) / WORKERS), "all calls": seconds}

    return playing(opening, once, lambda run: run([0.001] * 64))


def costs_of(calls: int) -> list[float]:
    """Seconds, log-uniform, the same every time."""
    dice = random.Random(4)
    return [LEAST * (MOST / LEAST) ** dice.random() for _ in range(calls)]


@asynccontextmanager
async def _dealt_by_hand() -> AsyncIterator[MapAll]:
    async with executors.mapping(executors.processes, WORKERS, 1, spin_all) as run:

        async def deal(costs: Sequence[float]) -> list[float]:
            return [used for part in await run(dealt(costs)) for used in part]

        yield deal


def dealt(costs: Sequence[float]) -> list[list[float]]:
    """The costs in as many parts as there are workers: from the highest on, each goes to the part that has least."""
    parts: list[list[float]] = [[] for _ in range(WORKERS)]
    for cost in sorted(costs, reverse=True):
        min(parts, key=sum).append(cost)
    return parts


@row(rounds=3, seconds=40, warm_ups=0)
def scaling(quick: bool) -> Row:
    """Scaling over workers: a map of calls that compute for 1 ms, on 1 to twice as many workers as there are CPUs.

    With a worker for each CPU such a map should be as many times as fast as with one. Further workers bring nothing, and should
    cost nothing.
    """
    cpus, steps = usable_cpus(), steps_for(0.001)
    sizes = [1, 2] if quick else sorted({1, 2, cpus // 2 or 1, cpus, cpus + 1, 2 * cpus})
    items = [steps] * (50 if quick else 1000)
    chunk = 10  # keeps two messages ahead at each worker, and still divides well
    openings: dict[str, Callable[[int], OpenMap]] = {
        "percore": lambda n: partial(percore_map, work, workers=n),
        "ProcessPoolExecutor": lambda n: partial(executors.mapping, executors.processes, n, chunk, work),
        "loky": lambda n: partial(executors.mapping, executors.loky, n, chunk, work),
        "InterpreterPoolExecutor": lambda n: partial(executors.mapping, executors.interpreters, n, chunk, work),
        "distex": lambda n: partial(distex.mapping, n, 2, chunk, work),
        "ThreadPoolExecutor": lambda n: partial(executors.mapping, executors.threads, n, 1, work),
    }
    expected = [work(steps)] * len(items)
    return Row(
        {
            name: sized({size: opening(size) for size in sizes}, items, expected, per=len(items))
            for name, opening in openings.items()
        },
        plot=Plot(
            "A map of calls of 1 ms: calls in a second against workers",
            x="workers",
            y="calls in a second",
            places={str(size): size for size in range(1, 257)},  # the record may be another machine's
            rates=True,
        ),
    )


# Window and memory

DURATIONS = (1e-6, 1e-5, 1e-4, 1e-3, 0.01, 0.1, 1.0)


@row(rounds=3, seconds=35, warm_ups=0)
def map_window(quick: bool) -> Row:
    """The number of items that a map holds, by the duration of its calls: 1 us to 1 s, plain and as coroutines, 2 workers.

    A map's window follows its calls: twice the number that the workers can run at once if calls are long, more if they are
    short, so that no worker waits for its next item, and at most 16,384. It is measured from outside: the input counts the
    items that were pulled from it, the `async for` counts the results, and the figure is the greatest difference. Each map runs
    for a moment, or for the time of some calls, and is then left.
    """
    durations = DURATIONS[:-2] if quick else DURATIONS
    moment = 0.1 if quick else 0.5

    async def once(function: Callable[[float], object], opened: percore.Runner) -> Sample:
        return {in_seconds(seconds): await _window(opened, function, seconds, moment) for seconds in durations}

    return Row(
        {
            "plain calls": playing(runner(WORKERS), partial(once, last)),
            "coroutines": playing(runner(WORKERS), partial(once, last_async)),
        },
        units={in_seconds(seconds): in_items for seconds in durations},
        plot=Plot(
            f"The default window of a map, {WORKERS} workers",
            x="duration of a call",
            y="items pulled, without a result",
            places={in_seconds(seconds): seconds for seconds in DURATIONS},
            say_x=in_seconds,
        ),
    )


async def _window(opened: percore.Runner, function: Callable[[float], object], seconds: float, moment: float) -> int:
    pulled = results = most = 0

    def items() -> Iterator[float]:
        nonlocal pulled, most
        for pulled in count(1):
            most = max(most, pulled - results)
            yield seconds

    end = time.perf_counter() + max(moment, 2 * seconds)
    async with opened.map(function, items()) as mapped:
        async for _ in mapped:
            results += 1
            if time.perf_counter() > end:
                break
    return most


@row(rounds=5, seconds=25)
def map_memory(quick: bool) -> Row:
    """The memory that `async for` over a map of a million ints adds to the supervisor, 2 workers, when it is warm.

    A map holds its window, and neither the million items nor their results. The figure is the memory of this process alone
    (USS), as growth since the map began: a hundred times during the map, and when it has ended. The warm-up round is a map of
    the same length: memory that percore keeps for the next map is no growth.
    """
    calls, looks = 50_000 if quick else 1_000_000, 100

    async def once(opened: percore.Runner) -> Sample:
        gc.collect()
        before = highest = uss_of()
        wanted = count()
        async for result in opened.map(same_plainly, range(calls)):
            check(result, next(wanted))
            if result % (calls // looks) == 0:
                highest = max(highest, uss_of())
        check(next(wanted), calls)
        gc.collect()
        return {"at most": highest - before, "afterwards": uss_of() - before}

    metrics = ("at most", "afterwards")
    return Row(
        {"percore": playing(runner(WORKERS), once)},
        [Target("percore", metric, at_most=2 << 20) for metric in metrics],
        units=dict.fromkeys(metrics, in_mebibytes),
    )


# A bound object

CALL, WITH_WORK = "a call", "a call, its work in the limit"


@row(rounds=7, seconds=80, warm_ups=0)
def stuck_in_a_pickle(quick: bool) -> Row:
    """A map of a bound method whose object holds a dict of about 40 MB, over 1,000,000 ints, 2 workers.

    multiprocessing.Pool sends the object along with every chunk, and so becomes several times slower than one process. percore
    sends a function, with the object that it is bound to, once to each worker. The limit is what no library can avoid: one
    dumps and one loads of the object, and a map of as many calls of a tiny function, measured in the same rounds. A call of
    this method takes longer than one of the tiny function, which is no cost of the pickle; so a second limit adds the time of
    these calls in one process, divided by the workers. The pools get the same method with large chunks, which is the best for
    them short of a global.
    """
    entries, calls = (1 << 13, 20_000) if quick else (1 << 20, 1_000_000)
    tasks = partial(bits_of, entries, calls)
    chunks = {f"{parts} chunks": calls // parts for parts in (2, 4, 8)}
    return Row(
        {
            "percore": _bound(tasks, lambda bits: partial(percore_map, bits.ones, workers=WORKERS)),
            "limit": playing(partial(percore_map, same_plainly, workers=WORKERS), partial(_limit, tasks), _warmed(tasks)),
            "one process": _bound(tasks, lambda bits: partial(plain_loop, bits.ones)),
            "multiprocessing.Pool": {name: _bound(tasks, partial(_pool, chunk)) for name, chunk in chunks.items()},
            "ProcessPoolExecutor": {name: _bound(tasks, partial(_executor, chunk)) for name, chunk in chunks.items()},
        },
        [Target("percore", metric, "limit", at_most=1.10) for metric in (CALL, WITH_WORK)],
    )


Tasks = tuple[Bits, list[int], list[int]]


@cache
def bits_of(entries: int, calls: int) -> Tasks:
    """The object, the items (all over its dict) and the result of each. Made when the first contestant opens."""
    bits = Bits(entries)
    items = [number * 7919 % entries for number in range(calls)]
    return bits, items, [bits.ones(item) for item in items]


def _warmed(tasks: Callable[[], Tasks]) -> Callable[[MapAll], Any]:
    return lambda run: run(tasks()[1][: len(tasks()[1]) // 20])


def _bound(tasks: Callable[[], Tasks], opening_of: Callable[[Bits], OpenMap]) -> Contestant:
    async def once(run: MapAll) -> Sample:
        _, items, expected = tasks()
        seconds = await map_seconds(run, items, expected) / len(items)
        return {CALL: seconds, WITH_WORK: seconds}

    return playing(lambda: opening_of(tasks()[0])(), once, _warmed(tasks))


async def _limit(tasks: Callable[[], Tasks], run: MapAll) -> Sample:
    bits, items, expected = tasks()
    start = time.perf_counter()
    pickle.loads(pickle.dumps(bits, protocol=5))
    limit = time.perf_counter() - start + await map_seconds(run, items, items)
    work = await map_seconds(_in_turn(bits), items, expected)
    return {CALL: limit / len(items), WITH_WORK: (limit + work / WORKERS) / len(items)}


def _in_turn(bits: Bits) -> MapAll:
    async def run(items: Sequence[int]) -> list[int]:
        return [bits.ones(item) for item in items]

    return run


def _pool(chunk: int, bits: Bits) -> OpenMap:
    @asynccontextmanager
    async def opened() -> AsyncIterator[MapAll]:
        with multiprocessing.get_context("forkserver").Pool(WORKERS) as pool:
            yield lambda items: asyncio.to_thread(pool.map, bits.ones, items, chunk)
            pool.close()
            await asyncio.to_thread(pool.join)

    return opened


def _executor(chunk: int, bits: Bits) -> OpenMap:
    return partial(executors.mapping, executors.processes, WORKERS, chunk, bits.ones)
