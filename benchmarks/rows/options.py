"""What `options(key=...)` and `options(retries=3)` add to an awaited no-op coroutine: 500 awaiters x 40 calls, 2 workers.

The calls of the row awaited_calls, three times: as they are, with a key for each awaiter (500 keys, spread over the
workers by percore), and with retries that never have to happen. A view is made once and then called; what making one for
every call costs, as in `runner.options(key=host).run(fetch, url)`, is shown beside it.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING

import percore
from benchmarks._figures import Target
from benchmarks._harness import Round, Row, Sample
from benchmarks.calls import same

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    CallOne = Callable[[int], Awaitable[int]]
    CallOf = Callable[[percore.Runner, int], CallOne]
    """What the awaiter of this number awaits."""

WORKERS = 2
CALLS = 40


def row(*, quick: bool) -> Row:
    awaiters = 50 if quick else 500
    variants = {"plain": _plain, "key": _keyed, "key, a view for each call": _keyed_anew, "retries=3": _retried}
    return Row(
        contestants={name: partial(_percore, awaiters, variant) for name, variant in variants.items()},
        targets=[Target(name, "plain", "a call", at_most=1.1) for name in ("key", "retries=3")],
        rounds=3 if quick else 15,
        seconds=6 if quick else 25,
    )


def _plain(runner: percore.Runner, _awaiter: int) -> CallOne:
    return partial(runner.run, same)


def _keyed(runner: percore.Runner, awaiter: int) -> CallOne:
    return partial(runner.options(key=awaiter).run, same)


def _keyed_anew(runner: percore.Runner, awaiter: int) -> CallOne:
    return lambda number: runner.options(key=awaiter).run(same, number)


def _retried(runner: percore.Runner, _awaiter: int) -> CallOne:
    return partial(runner.options(retries=3).run, same)


@asynccontextmanager
async def _percore(awaiters: int, call_of: CallOf) -> AsyncIterator[Round]:
    async with percore.Runner(workers=WORKERS) as runner:
        yield partial(_round, [call_of(runner, awaiter) for awaiter in range(awaiters)])


async def _round(calls: list[CallOne]) -> Sample:
    start = time.perf_counter()
    await asyncio.gather(*map(_awaiter, calls))
    return {"a call": (time.perf_counter() - start) / (len(calls) * CALLS)}


async def _awaiter(call: CallOne) -> None:
    for number in range(CALLS):
        if await call(number) != number:
            raise RuntimeError("a call gave the result of another one")
