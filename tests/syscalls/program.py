"""A program that runs one stage of a runner's life while its system calls fail, and then looks whether percore is whole.

    python -m tests.syscalls.program STAGE

It tells its pids (`attach`), waits for a line, runs the stage, tells the outcomes (`stage`), waits for another line, by which no
system call fails any more, uses the runner again, closes it, and tells what is left (`end`).
"""

import asyncio
import json
import os
import signal
import sys
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any, Final

import psutil

import percore
from tests import leaks

BIG = bytes(2 * 1024 * 1024)
CALLS = 20


def negative(number: int) -> int:
    """A plain function."""
    return -number


async def same(value: Any) -> Any:
    """A coroutine function."""
    return value


async def count_up(number: int) -> AsyncIterator[int]:
    """An async generator function."""
    for one in range(number):
        yield one


def tell(word: str, value: object) -> None:
    """Say a line to the judge."""
    line = f"{word} {json.dumps(value)}\n".encode()
    try:
        os.write(1, line)
    except BlockingIOError:  # this one has failed on purpose
        os.write(1, line)


def listen() -> None:
    """Wait for the judge."""
    os.read(0, 1)


async def outcome(name: str, work: Callable[[], Awaitable[Any]], expected: object) -> str:
    """Return the end of some work: "ok", or the type and the text of its error."""
    try:
        value = await work()
    except Exception as error:
        return f"{name}: {'/'.join(cls.__name__ for cls in type(error).__mro__[:-2])}: {str(error)[:300]}"
    return "ok" if value == expected else f"{name}: WRONG {value!r:.80}"


def described(context: dict[str, Any]) -> str:
    """Return what the loop reports, with the place."""
    error = context.get("exception")
    if error is None:
        return str(context["message"])
    return (
        " < ".join(f"{frame.name}:{frame.lineno}" for frame in reversed(traceback.extract_tb(error.__traceback__))) + f": {error!r}"
    )


Stage = Callable[[percore.Runner], Awaitable[list[str]]]


async def starts(runner: percore.Runner) -> list[str]:
    """Start the runner."""
    return [await outcome("start", runner.start, None)]


async def calls(runner: percore.Runner) -> list[str]:
    """Make small calls of both kinds."""
    work = [outcome("plain", partial(runner.run, negative, number), -number) for number in range(CALLS)]
    work += [outcome("coroutine", partial(runner.run, same, number), number) for number in range(CALLS)]
    return await asyncio.gather(*work)


async def big_calls(runner: percore.Runner) -> list[str]:
    """Send and return megabytes."""
    return await asyncio.gather(*(outcome("big", partial(runner.run, same, BIG), BIG) for _ in range(4)))


async def streams_and_shares(runner: percore.Runner) -> list[str]:
    """Take a stream, and share an object."""

    async def stream() -> list[int]:
        return [number async for number in runner.stream(count_up, 50)]

    async def share() -> int:
        shared = await runner.share(list(range(1000)))
        try:
            return await runner.run(sum_of, shared)
        finally:
            shared.close()

    return [await outcome("stream", stream, list(range(50))), await outcome("share", share, 499_500)]


def sum_of(shared: "percore.Shared[list[int]]") -> int:
    """Read a shared object."""
    return sum(shared.value)


async def respawns(runner: percore.Runner) -> list[str]:
    """Lose a worker, and make calls meanwhile."""
    pid = runner.statistics().workers[0].pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    retried = runner.options(retries=3)
    return [await outcome("call", partial(retried.run, negative, 1), -1) for _ in range(CALLS)]


async def reloads(runner: percore.Runner) -> list[str]:
    """Replace each worker."""
    return [await outcome("reload", runner.reload, None)]


async def closes(runner: percore.Runner) -> list[str]:
    """Close the runner while calls run."""
    waiting = [asyncio.ensure_future(outcome("sleep", partial(runner.run, asyncio.sleep, 0.05), None)) for _ in range(4)]
    await asyncio.sleep(0)
    return [await outcome("close", runner.aclose, None), *await asyncio.gather(*waiting)]


STAGES: Final[dict[str, Stage]] = {
    "start": starts,
    "call": calls,
    "big": big_calls,
    "stream": streams_and_shares,
    "respawn": respawns,
    "reload": reloads,
    "close": closes,
}


async def main(stage: str) -> None:
    """Tell the story."""
    errors: list[str] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _loop, context: errors.append(described(context)))
    before = leaks.snapshot()
    runner = percore.Runner(2, threads=4, start_timeout=20, kill_after=2)
    if stage != "start":
        await runner.start()
        await calls(runner)
    tell("attach", [os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True))])
    listen()
    tell("stage", await STAGES[stage](runner))
    listen()
    after = await _after(stage, runner)
    await runner.aclose()
    del runner
    tell("end", {"after": after, "left": leaks.since(before), "errors": errors})


async def _after(stage: str, runner: percore.Runner) -> list[str]:
    """Use percore again: this runner, or another one where it is closed or has failed to start."""
    try:
        is_usable = stage != "close" and bool(await runner.run(negative, 1))
    except (percore.RunnerClosed, percore.RunnerBroken):
        is_usable = False
    if is_usable:
        return [*await calls(runner), *await big_calls(runner)]
    async with percore.Runner(2) as another:
        return await calls(another)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
