"""Workers that are threads, struck at each passing of one place: `python -m tests.sweep.thread_program PLACE`, with PERCORE_POINTS.

It strikes at the first passing, at the second, and so on, in each way, and writes a line for each hit. It raises if a call was
lost, ran twice, ran although its error says that it had not begun, or began after its end was told; if the runner is not whole
afterwards; or if a thread is left.
"""

import asyncio
import sys
import threading
import warnings
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import Any, Final

import percore
from percore import RemoteError, Runner, RunnerClosed, WorkerDied
from percore._common import fault_points
from percore._engines.threads import worker as thread_workers
from percore._worker.context import current_worker
from tests.internals import current_member

MOST: Final = 3
"""Passings of a place at most at which it is struck."""

LIMIT: Final = 20.0

ITEMS: Final = range(100, 140)
"""Of a map."""

NESTED: Final = 1000
"""Added to the number of a call for the one that it makes."""


class Ledger:
    """What ran, as each call enters itself before it does anything else."""

    def __init__(self) -> None:
        self.ran: list[int] = []

    async def task(self, number: int) -> int:
        self.ran.append(number)
        await asyncio.sleep(0)
        return -number

    def thread(self, number: int) -> int:
        self.ran.append(number)
        return -number

    async def nesting(self, number: int) -> int:
        self.ran.append(number)
        found: int = await percore.current_runner().run(self.thread, number + NESTED)
        return found + NESTED

    async def items(self, number: int) -> AsyncIterator[int]:
        self.ran.append(number)
        for _ in range(3):
            yield -number


class Strike:
    """A way to strike the worker whose thread passes the place. Its thread calls `at_place`, the supervisor's loop the rest."""

    def __init__(self, runner: Runner, death: str) -> None:
        self.runner, self.death = runner, death
        self.loop = asyncio.get_running_loop()
        self.held = threading.Event()
        self.is_hit = False
        self.calls: list[asyncio.Future[Any]] = []
        self.closing: asyncio.Task[None] | None = None

    def at_place(self) -> None:
        self.is_hit = True
        if self.death == "interrupt":
            raise KeyboardInterrupt
        if self.death == "cancel":
            self.loop.call_soon_threadsafe(lambda: [call.cancel() for call in self.calls])
        elif self.death == "close":
            self.loop.call_soon_threadsafe(self._close)
        else:
            self.loop.call_soon_threadsafe(self._kill, current_worker().index)
        if self.death == "hold":  # it cannot be killed, and is given up
            self.held.wait(LIMIT)

    def _close(self) -> None:
        self.closing = self.loop.create_task(self.runner.aclose(grace=0))

    def _kill(self, index: int) -> None:
        """Kill the worker that has passed the place: it has had no successor yet."""
        member = current_member(self.runner, index)
        if member is not None:
            member.worker.kill()


DEATHS: Final = ("kill", "hold", "interrupt", "cancel", "close")

GONE_ON: Final = {"cancel": asyncio.CancelledError, "close": RunnerClosed}
"""How a call ends whose caller does not wait for its end."""


async def cell(place: str, death: str, nth: int) -> bool:
    """Strike once. Return whether the place was passed so often."""
    ledger, before = Ledger(), set(threading.enumerate())
    runner = Runner(2, engine="threads", threads=2, concurrency=3, kill_after=0.1)
    await runner.start()
    strike = Strike(runner, death)
    fault_points._passed.clear()
    fault_points._ACTIONS["here"] = strike.at_place
    fault_points._plans[place] = fault_points.Strike("here", nth, "")
    try:
        ends = await asyncio.wait_for(_ends_of(runner, ledger, strike), LIMIT)
    finally:
        fault_points._plans.clear()
    ran = list(ledger.ran)
    _judge(ends, ran, was_closed=strike.closing is not None, was_cancelled=death == "cancel" and strike.is_hit)
    if strike.closing is None:
        again = await asyncio.wait_for(asyncio.gather(*(runner.run(abs, -number) for number in range(20))), LIMIT)
        assert again == [*range(20)]
        ended = [worker.generation for worker in runner.statistics().workers]
        assert sum(ended) - 2 == (strike.is_hit and sum(ended) > 2), ended
    else:
        await strike.closing
    await runner.aclose()
    strike.held.set()
    for thread in set(threading.enumerate()) - before:
        await asyncio.to_thread(thread.join, LIMIT)
    late = [number for number in Counter(ledger.ran) - Counter(ran) if number < NESTED]  # a nested call may outlive its caller
    if death in GONE_ON:  # the worker may begin a call, or the next item of a batch, before it hears of that
        assert all(isinstance(ends[number][0], GONE_ON[death]) for number in late), late
    else:
        assert len(late) <= (death == "hold"), late  # the thread that was held runs on
        assert all(isinstance(end := ends[number][0], WorkerDied) and end.started for number in late), late
    left = [thread.name for thread in set(threading.enumerate()) - before if not thread.name.startswith("asyncio_")]
    assert not left, left
    return strike.is_hit


async def _ends_of(runner: Runner, ledger: Ledger, strike: Strike) -> dict[int, list[Any]]:
    """Make calls of every kind, and return how each of them has ended."""

    async def stream(number: int) -> int:
        found = [item async for item in runner.stream(ledger.items, number)]
        assert found == [-number] * 3
        return -number

    async def mapped() -> list[Any]:
        return await runner.map(ledger.thread, ITEMS, return_exceptions=True)

    kinds: list[Callable[[int], Any]] = [
        lambda number: runner.submit(ledger.task, number),
        lambda number: runner.submit(ledger.thread, number),
        lambda number: runner.submit(ledger.nesting, number),
        lambda number: asyncio.ensure_future(runner.run(ledger.task, number)),
        lambda number: asyncio.ensure_future(stream(number)),
    ]
    calls = {number: kinds[number % len(kinds)](number) for number in range(20)}
    items = asyncio.ensure_future(mapped())
    strike.calls = [*calls.values()]
    ends = await asyncio.gather(*calls.values(), return_exceptions=True)
    found = {number: [end] for number, end in zip(calls, ends, strict=True)}
    try:
        found |= {number: [end] for number, end in zip(ITEMS, await items, strict=True)}
    except RunnerClosed as error:
        found |= {number: [error] for number in ITEMS}
    return found


def _judge(ends: dict[int, list[Any]], ran: list[int], *, was_closed: bool, was_cancelled: bool) -> None:
    for number, (end,) in ends.items():
        times = ran.count(number)
        assert times <= 1, f"{number} ran {times} times"
        if isinstance(end, WorkerDied):
            assert end.started or was_closed, f"{number} had not begun and was not sent to another worker"
            assert end.started or not times, f"{number} had not begun, says its error, and ran"
        elif isinstance(end, RunnerClosed):
            assert was_closed, number
        elif isinstance(end, asyncio.CancelledError):
            assert was_cancelled, number
        elif isinstance(end, RemoteError):  # the KeyboardInterrupt was raised within the call
            assert end.type_name == "KeyboardInterrupt", (number, end)
        else:
            assert (end, times) == (-number, 1), (number, end, times)


def main(place: str) -> None:
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", "only one thread runs at a time|.*engine=.threads", RuntimeWarning)
    thread_workers.PATIENCE = 0.1  # type: ignore[misc]
    for death in DEATHS:
        for nth in range(1, MOST + 1):
            if not asyncio.run(cell(place, death, nth)):
                break
            sys.stdout.write(f"hit {place} {death} {nth}\n")


if __name__ == "__main__":
    main(sys.argv[1])
