"""The workers' lives: start, replacement and close; what they use when idle; and calls beside other work."""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.bare import bare_loop
from benchmarks.calls import pid_after, same, same_plainly, steps_for, work
from benchmarks.contestants import always, percore_call, playing, runner, timed
from benchmarks.figures import Target, in_mebibytes, in_percent, latencies
from benchmarks.harness import Row, row
from benchmarks.machine import Pin, cpu_of_all, descendants, uss_of
from benchmarks.peers import WORKERS, Pair, awaiting, distex, executors, others
from percore import LoopPoolExecutor

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable
    from concurrent.futures import Executor

    import percore
    from benchmarks.harness import Contestant, Round
    from benchmarks.peers import Call, OpenCall, OpenMap
    from benchmarks.results import Sample

_ROOT = Path(__file__).parents[2]


@row(rounds=11, seconds=25, is_cheap=True)
def start(quick: bool) -> Row:
    """From the start of a fresh program to answers from its two workers.

    A program that imports a library, starts two workers and has both answer calls: the time that a command-line tool takes
    before its first result, imports included. It is timed from outside, from before the start of the process to the moment that
    the program itself prints; its whole duration is there for comparison.

    Everything is compiled beforehand, as installed libraries are: the warm-up leaves bytecode in a folder of the row's own.
    Otherwise a library that runs from its sources, with PYTHONDONTWRITEBYTECODE set, would be compiled again in each of its
    processes, and its peers, which are installed, would not.
    """
    ways = ("percore", "percore, spawn", "ProcessPoolExecutor, forkserver", "ProcessPoolExecutor, spawn", "loky", "aiomultiprocess")
    return Row(
        {way: partial(_program, "start", way) for way in ways},
        [Target("percore", "to answers", "ProcessPoolExecutor, forkserver", at_most=1.0, towards=0.8)],
    )


@row(rounds=11, seconds=25)
def short_programs(quick: bool) -> Row:
    """A program that works for some tenths of a second on two workers, from its start to its results and to its end.

    It compiles 24 modules of the standard library, as a formatter or `compileall -j2` would. So the start and the imports, in the
    program and in its workers, weigh as much as the work. A fork of the program has the program's modules; each way with "fork"
    forks the workers from it, and the others import the modules again.
    """
    ways = (
        *("percore", "percore, max_threads=1", "percore, fork"),
        *("ProcessPoolExecutor, forkserver", "ProcessPoolExecutor, fork"),
    )
    return Row(
        {way: partial(_program, "short", way) for way in ways},
        [Target("percore", "to its end", "ProcessPoolExecutor, forkserver", at_most=1.1)],
    )


@row(rounds=15, seconds=15)
def reopen(quick: bool) -> Row:
    """A program that opens executors one after another: open with two workers, four calls, close.

    The fork servers of percore and of the standard library are kept between the executors; the warm-up starts them.
    """

    def four_calls(make: Callable[[], Executor]) -> float:
        start = time.perf_counter()
        with make() as executor:
            for future in [executor.submit(abs, number) for number in range(4)]:
                future.result()
        return time.perf_counter() - start

    async def once(make: Callable[[], Executor]) -> Sample:
        return {"open, calls, close": await asyncio.to_thread(four_calls, make)}

    makers: dict[str, Callable[[], Executor]] = {
        "percore": partial(LoopPoolExecutor, WORKERS, max_threads=1),
        "ProcessPoolExecutor, forkserver": partial(ProcessPoolExecutor, WORKERS, multiprocessing.get_context("forkserver")),
    }
    return Row(
        {name: always(partial(once, make)) for name, make in makers.items()},
        [Target("percore", "open, calls, close", "ProcessPoolExecutor, forkserver", at_most=1.0)],
    )


@asynccontextmanager
async def _program(name: str, way: str) -> AsyncIterator[Round]:
    command = [sys.executable, "-m", f"benchmarks.programs.{name}", way]
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    run = partial(subprocess.run, command, cwd=_ROOT, env=variables, capture_output=True, text=True, check=False)

    async def once() -> Sample:
        start = time.perf_counter()
        done = await asyncio.to_thread(run)
        end = time.perf_counter()
        if "ModuleNotFoundError" in done.stderr:
            raise ModuleNotFoundError(done.stderr.splitlines()[-1])
        if done.returncode:
            raise RuntimeError(f"the program failed:\n{done.stderr}")
        return {"to answers": float(done.stdout) - start, "to its end": end - start}

    with tempfile.TemporaryDirectory() as variables["PYTHONPYCACHEPREFIX"]:
        yield once


@row(rounds=11, seconds=20, warm_ups=0)
def close(quick: bool) -> Row:
    """Closing a pool of two idle workers: until the last of their processes is gone.

    The duration of the end of `async with` if nothing is left to do. Each pool is opened, makes a call in each worker and is
    then closed; only the closing is timed.
    """
    openings: dict[str, OpenCall] = {
        "percore": partial(percore_call, pid_after, workers=WORKERS),
        "ProcessPoolExecutor": partial(executors.calling, executors.processes, WORKERS, pid_after),
        "loky": partial(executors.calling, executors.loky, WORKERS, pid_after),
        "distex": partial(distex.calling, WORKERS, 2, same),
        "aiomultiprocess": partial(others.aiomultiprocess_calling, WORKERS, 16, same),
    }

    async def once(opening: OpenCall) -> Sample:
        async with opening() as call:
            await asyncio.gather(*(call(0.01) for _ in range(2 * WORKERS)))
            start = time.perf_counter()
        return {"close": time.perf_counter() - start}

    return Row(
        {name: always(partial(once, opening)) for name, opening in openings.items()},
        [Target("percore", "close", at_most=0.050)],
    )


@row(rounds=7, seconds=8, is_cheap=True)
def replacement(quick: bool) -> Row:
    """From the kill of an idle worker to an answer of the one that replaces it, 1 worker.

    The worker is killed with SIGKILL, and at the same moment a call is made: it waits until the death was seen, a new process
    was forked and is ready, and has answered. There is no peer: a pool of the standard library, or loky's, is broken by this,
    and each of the others leaves calls hanging.
    """

    async def once(opened: percore.Runner) -> Sample:
        logging.getLogger("percore").setLevel(logging.ERROR)  # every death is a warning
        return latencies([await _replaced(opened) for _ in range(5 if quick else 40)])

    return Row({"percore": playing(runner(1), once)}, [Target("percore", "p50", at_most=0.010)])


async def _replaced(opened: percore.Runner) -> float:
    pid = await opened.run(os.getpid)
    start = time.perf_counter()
    os.kill(pid, signal.SIGKILL)
    # A call that was sent to the dead worker and had not begun goes to the next.
    while await opened.run(os.getpid) == pid:
        pass
    return time.perf_counter() - start


@row(rounds=5, seconds=30)
def reload(quick: bool) -> Row:
    """A reload of two workers while 10,000 calls a second are made, and the latency of these calls before it and meanwhile.

    Every 5 ms 50 calls are submitted, whether or not those before have ended, for half a second before the reload, during it and
    for a quarter of a second after it. A call that fails, or a moment with fewer than two ready workers, fails the row. The reload
    starts a new fork server, which imports percore anew. "made" is the rate at which the program could submit.
    """
    del quick

    async def once(opened: percore.Runner) -> Sample:
        load = _Load(opened)
        loading = asyncio.create_task(load.run())
        await asyncio.sleep(0.5)
        before, load.seconds = load.seconds, []
        start = time.perf_counter()
        await opened.reload()
        took = time.perf_counter() - start
        during, load.seconds = load.seconds, []
        await asyncio.sleep(0.25)
        load.is_over = True
        await loading
        shown = {
            f"{name} {when}": latencies(seconds)[name]
            for when, seconds in (("before", before), ("meanwhile", during))
            for name in ("p50", "p99")
        }
        return {"reload": took, **shown, "made": load.rate}

    return Row({"percore": playing(runner(WORKERS), once)}, units={"made": "{:,.0f} calls/s".format})


class _Load:
    """Calls at a steady rate."""

    def __init__(self, opened: percore.Runner) -> None:
        self.seconds: list[float] = []
        """How long each call took that has ended."""
        self.is_over = False
        self.rate = 0.0
        self._opened = opened

    async def run(self) -> None:
        """Submit until `is_over`, and wait for the last call. Raises the error of a call."""
        calls, start, ticks = set[asyncio.Future[int]](), time.perf_counter(), 0
        while not self.is_over:
            for number in range(50):
                call = self._opened.submit(same, number)
                call.add_done_callback(partial(self._ended, time.perf_counter()))
                calls.add(call)
                call.add_done_callback(calls.discard)
            ready = sum(worker.state == "ready" for worker in self._opened.statistics().workers)
            if ready < WORKERS:
                raise RuntimeError(f"only {ready} of {WORKERS} workers were ready")
            ticks += 1
            await asyncio.sleep(max(0.0, start + ticks * 0.005 - time.perf_counter()))
        self.rate = ticks * 50 / (time.perf_counter() - start)
        await asyncio.gather(*calls)

    def _ended(self, begun: float, call: asyncio.Future[int]) -> None:
        call.result()
        self.seconds.append(time.perf_counter() - begun)


# Idle


@row(rounds=1, seconds=55, warm_ups=0)
def idle_cpu(quick: bool) -> Row:
    """CPU that a pool of two idle workers takes, of one CPU, over 10 seconds (peers: 5): this process and all it has started.

    A pool that looks for work every few milliseconds costs battery, and wakes CPUs for nothing. The figure comes from the
    kernel's scheduler: the time that each thread has run. Each pool is alone meanwhile.
    """
    share = "of one CPU"
    ours = 2.0 if quick else 10.0
    names = ("ProcessPoolExecutor", "aiomultiprocess", *(() if quick else ("distex", "loky", "mpire", "wool")))
    peers = awaiting(Pair(same, same_plainly))

    async def warm(call: Call) -> None:
        await asyncio.gather(*map(call, range(10)))

    async def once(seconds: float, _: Call) -> Sample:
        pids = [os.getpid(), *descendants()]  # looked up now: that is work of this process
        before, start = cpu_of_all(pids), time.perf_counter()
        await asyncio.sleep(seconds)
        return {share: (cpu_of_all(pids) - before) / (time.perf_counter() - start)}

    def contestant(opening: OpenCall, seconds: float) -> Contestant:
        return playing(opening, partial(once, seconds), warm)

    return Row(
        {
            "percore": contestant(partial(percore_call, workers=WORKERS), ours),
            # No setting changes what a peer does when idle.
            **{name: contestant(next(iter(peers[name].values())), min(ours, 5.0)) for name in names},
        },
        [Target("percore", share, at_most=0.0005)],
        anew=frozenset({"percore", *names}),
        units={share: in_percent},
    )


@row(rounds=7, seconds=25, warm_ups=0)
def worker_memory(quick: bool) -> Row:
    """USS of an idle worker after 100,000 calls, against a bare interpreter with asyncio and uvloop.

    The memory that a worker has for itself alone (USS): the number that counts if there is one for each of many CPUs. It does
    not include pages that a worker shares with its fork server or the system. After the target the next goal is 4 MiB. For
    comparison, the processes of the pools after as many calls, each as its library starts it.
    """
    calls, chunk = range(2000 if quick else 100_000), 1000

    def pool(opening: OpenMap) -> Contestant:
        @asynccontextmanager
        async def contestant() -> AsyncIterator[Round]:
            before = descendants()
            async with opening() as run:
                await run(range(10))
                mine = descendants() - before

                async def once() -> Sample:
                    await run(calls)
                    return {"USS": max(map(uss_of, mine))}  # some start helpers beside the worker, which are smaller

                yield once

        return contestant

    async def bare(pid: int) -> Sample:
        return {"USS": uss_of(pid)}

    return Row(
        {
            "bare interpreter": playing(bare_loop, bare),
            "percore, coroutines": playing(runner(1), partial(_worker_uss, same, calls)),
            "percore, plain calls": playing(runner(1), partial(_worker_uss, same_plainly, calls)),
            "ProcessPoolExecutor": pool(partial(executors.mapping, executors.processes, 1, chunk, same_plainly)),
            "loky": pool(partial(executors.mapping, executors.loky, 1, chunk, same_plainly)),
            "distex": pool(partial(distex.mapping, 1, 2, chunk, same_plainly)),
        },
        [Target("percore, coroutines", "USS", "bare interpreter", at_most=0.6)],
        units={"USS": in_mebibytes},
    )


async def _worker_uss(function: Callable[[int], Any], calls: range, opened: percore.Runner) -> Sample:
    await opened.map(function, calls)
    (worker,) = opened.statistics().workers
    assert worker.pid is not None
    return {"USS": uss_of(worker.pid)}


# Beside other work


@row(seconds=45, pin=Pin.TWO, is_cheap=True)
def run_beside_map(quick: bool) -> Row:
    """How long `await runner.run(coroutine)` takes beside a map of CPU-bound calls of 1 ms that fills both workers.

    A service answers single calls while a bulk map runs in the same pool. The map is endless and CPU-bound: every worker has a
    thread that computes and more items waiting behind it, and the workers and this process share the machine's CPUs. One no-op
    coroutine is awaited at a time. It has to wait for one batch of the map (1 ms of measured work), for the GIL and for a CPU.
    The same calls without the map show their own cost. ProcessPoolExecutor has one queue for all calls: there the map is a
    number of calls that are kept submitted, and the single call waits behind them.
    """
    calls, steps = 20 if quick else 1000, steps_for(0.001)
    return Row(
        {
            "percore, alone": playing(partial(percore_call, workers=WORKERS), partial(_latencies, calls)),
            "percore, beside the map": playing(runner(WORKERS), partial(_beside_map, calls, steps, 500)),
            "ProcessPoolExecutor, beside as much": {
                f"{kept} submitted": playing(
                    partial(executors.opened, executors.processes, WORKERS),
                    partial(_beside_submitted, calls // 20 or 1, steps, kept),
                )
                for kept in (4, 16, 64)
            },
        },
        [Target("percore, beside the map", "p50", at_most=0.010, towards=0.003)],
    )


@row(rounds=7, seconds=50, pin=Pin.TWO)
def loop_beside_threads(quick: bool) -> Row:
    """How soon a worker's loop answers beside six threads that compute, 1 worker, one no-op coroutine at a time.

    The threads and the loop share the worker's GIL. Long calls (100 ms) keep all six threads computing at once; short ones (1
    ms) are the harder case for a loop, because the end of each hands the GIL over again. For comparison: a loop by itself
    beside six such threads in one process, as the time between two of its turns.
    """
    calls, threads = 10 if quick else 200, 6
    ours = {"percore, calls of 100 ms": 0.1, "percore, calls of 1 ms": 0.001}
    return Row(
        {
            **{
                name: playing(runner(1, threads=threads), partial(_beside_map, calls, steps_for(seconds), 2 * threads))
                for name, seconds in ours.items()
            },
            "one process, calls of 100 ms": playing(
                partial(executors.opened, executors.threads, threads),
                partial(_beside_submitted, calls, steps_for(0.1), threads, call=_turn),
            ),
        },
        [Target(name, "p99", at_most=0.050, towards=0.010) for name in ours],
    )


async def _turn(number: int) -> int:
    """The loop waits for a while, as a worker's loop does, and must get the GIL back."""
    await asyncio.sleep(0.001)
    return number


async def _beside_map(calls: int, steps: int, under_way: int, opened: percore.Runner) -> Sample:
    """Single calls beside an endless map, after this many of its results: it has made its batches by then."""

    async def bulk() -> AsyncIterator[None]:
        async with opened.map(work, repeat(steps)) as results:
            async for _ in results:
                yield

    return await _beside(bulk(), under_way, partial(_latencies, calls, partial(opened.run, same)))


async def _beside_submitted(calls: int, steps: int, kept: int, pool: Executor, call: Call | None = None) -> Sample:
    """Single calls beside this many that are kept submitted, so that no process of the pool waits for work."""
    submit = asyncio.get_running_loop().run_in_executor

    async def bulk() -> AsyncIterator[None]:
        pending = {submit(pool, work, steps) for _ in range(kept)}
        while True:
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            pending |= {submit(pool, work, steps) for _ in done}
            yield

    return await _beside(bulk(), 1, partial(_latencies, calls, call or (lambda number: submit(pool, same_plainly, number))))


async def _beside(bulk: AsyncIterator[None], under_way: int, measured: Callable[[], Awaitable[Sample]]) -> Sample:
    """Measures when the bulk has had that many results, while it goes on."""
    begun = asyncio.Event()

    async def run() -> None:
        results = 0
        async for _ in bulk:
            results += 1
            if results == under_way:
                begun.set()

    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(run())
        await begun.wait()
        sample = await measured()
        running.cancel()
    return sample


async def _latencies(calls: int, call: Call) -> Sample:
    return latencies([await timed(call, number) for number in range(calls)])
