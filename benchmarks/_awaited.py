"""Calls that are awaited by many at once: what the rows awaited_* and in_flight share."""

from __future__ import annotations

import asyncio
import time
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import percore
from benchmarks.peers import WORKERS, Pair, awaiting

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping, Sequence

    from benchmarks._harness import Contestant, Round, Sample, Settings
    from benchmarks.peers import Call, OpenCall

CALLS = 40
"""Calls that each awaiter makes, one after the other."""

FEWER = {
    "ProcessPoolExecutor": 5,
    "ThreadPoolExecutor": 10,
    "aiomultiprocess": 10,
    "anyio.to_process": 4,
    "loky": 2,
    "mpire": 2,
    "wool": 1,
}
"""The same for those to whom a call costs so much more that they need no more of them to be timed as well."""


@dataclass(frozen=True, slots=True)
class Task:
    """The calls of a row: the function, the argument of each number, and what must come back for it."""

    pair: Pair
    argument: Callable[[int], Any]
    answer: Callable[[Any], Any]


@asynccontextmanager
async def percore_call(pair: Pair) -> AsyncIterator[Call]:
    async with percore.Runner(workers=WORKERS) as runner:
        yield partial(runner.run, pair.coroutine)


@asynccontextmanager
async def task_call(pair: Pair) -> AsyncIterator[Call]:
    """No other process: a task of this loop."""
    loop = asyncio.get_running_loop()

    def call(argument: Any) -> asyncio.Task[Any]:
        return loop.create_task(pair.coroutine(argument))  # type: ignore[arg-type]

    yield call


def contestants(task: Task, awaiters: int, only: Sequence[str] | None = None) -> Mapping[str, Contestant | Settings]:
    """percore, plain tasks, and the peers in each of their settings; `only`: these peers."""
    made: dict[str, Contestant | Settings] = {
        "percore": partial(timed, partial(percore_call, task.pair), task, awaiters, CALLS),
        "asyncio tasks": partial(timed, partial(task_call, task.pair), task, awaiters, CALLS),
    }
    for name, settings in awaiting(task.pair).items():
        if only is None or name in only:
            calls = FEWER.get(name, CALLS)
            made[name] = {setting: partial(timed, opening, task, awaiters, calls) for setting, opening in settings.items()}
    return made


@asynccontextmanager
async def timed(opening: OpenCall, task: Task, awaiters: int, calls: int) -> AsyncIterator[Round]:
    """A contestant: so many awaiters, each with so many calls. Its metric is "a call"."""
    async with opening() as call:

        async def once() -> Sample:
            start = time.perf_counter()
            await asyncio.gather(*(_awaiter(call, task, calls) for _ in range(awaiters)))
            return {"a call": (time.perf_counter() - start) / (awaiters * calls)}

        yield once


async def _awaiter(call: Call, task: Task, calls: int) -> None:
    for number in range(calls):
        argument = task.argument(number)
        if await call(argument) != task.answer(argument):
            raise RuntimeError("a call gave the result of another one")
