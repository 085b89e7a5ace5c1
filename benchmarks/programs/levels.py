"""A loop that makes calls, each of which waits and then computes: `levels.py WAIT COMPUTE AT_ONCE SETTLE MEASURE`.

WAIT and COMPUTE are seconds of a call. AT_ONCE is a number of calls at once, or `auto:MOST`. After SETTLE seconds the program
measures for MEASURE seconds, and prints a line of JSON: seconds a call, the 99th percentile of the lateness of callbacks, the calls
at once at the end, and the seconds after which their number was last outside a fifth of that.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time

import uvloop

from benchmarks.calls import steps_for, work
from benchmarks.figures import quantile
from benchmarks.level import Level

BEAT = 0.005


class Load:
    """Calls, always `level` at once."""

    def __init__(self, wait: float, compute: float, level: Level) -> None:
        self.level = level
        self.done = 0
        self.late: list[float] = []
        self._wait = wait
        self._steps = steps_for(compute)
        self._running = 0
        self._room = asyncio.Event()

    async def _call(self) -> None:
        await asyncio.sleep(self._wait)
        work(self._steps)
        self.done += 1
        self._running -= 1
        self._room.set()

    async def keep_going(self) -> None:
        tasks: set[asyncio.Task[None]] = set()
        while True:
            while self._running < self.level.level:
                self._running += 1
                task = asyncio.ensure_future(self._call())
                tasks.add(task)
                task.add_done_callback(tasks.discard)
            self._room.clear()
            await self._room.wait()

    async def beat(self) -> None:
        while True:
            due = time.perf_counter() + BEAT
            await asyncio.sleep(BEAT)
            self.late.append(max(0.0, time.perf_counter() - due))

    async def control(self, history: list[tuple[float, int]]) -> None:
        throughput = 0.0
        while True:
            done, cpu, start, beats = self.done, time.process_time(), time.perf_counter(), len(self.late)
            await asyncio.sleep(self.level.pause(throughput))
            seconds = time.perf_counter() - start
            throughput = (self.done - done) / seconds
            late = quantile(self.late[beats:], 0.95) if len(self.late) > beats else seconds
            self.level.look(throughput, (time.process_time() - cpu) / seconds, late)
            history.append((time.perf_counter(), self.level.level))


async def main(wait: float, compute: float, at_once: str, settle: float, measure: float) -> None:
    is_auto = at_once.startswith("auto:")
    load = Load(wait, compute, Level(int(at_once.removeprefix("auto:"))) if is_auto else Level(int(at_once), int(at_once)))
    history: list[tuple[float, int]] = []
    begun = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(load.keep_going()), group.create_task(load.beat())]
        if is_auto:
            tasks.append(group.create_task(load.control(history)))
        await asyncio.sleep(settle)
        done, start, beats = load.done, time.perf_counter(), len(load.late)
        await asyncio.sleep(measure)
        seconds = time.perf_counter() - start
        calls, late = load.done - done, load.late[beats:]
        for task in tasks:
            task.cancel()
    end = load.level.level
    outside = [at - begun for at, level in history if not 0.8 * end <= level <= 1.2 * end]
    print(json.dumps([seconds / max(1, calls), quantile(late or [seconds], 0.99), end, max(outside, default=0.0)]))


if __name__ == "__main__":
    wait, compute, at_once, settle, measure = sys.argv[1:]
    uvloop.run(main(float(wait), float(compute), at_once, float(settle), float(measure)))
