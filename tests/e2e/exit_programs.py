"""Programs that end in the midst of it, each in its way: python -m tests.e2e.exit_programs STORY LOOP"""

import asyncio
import inspect
import os
import resource
import sys
import threading
from typing import Any, NoReturn

import percore
from tests.e2e.fault_programs import new_loop, run

KILL_AFTER = 0.2
_kept: list[Any] = []


async def stay() -> None:
    await asyncio.Event().wait()


def stay_in_thread() -> None:
    threading.Event().wait()


async def started() -> "percore.Runner":
    """A runner with calls that will not end by themselves, and some that nobody cancels."""
    runner = percore.Runner(2, threads=2, kill_after=KILL_AFTER)
    await runner.start()
    _kept.extend([runner, *(runner.submit(stay) for _ in range(300)), *(runner.submit(stay_in_thread) for _ in range(20))])
    await asyncio.sleep(0)
    return runner


async def by_sys_exit() -> None:
    async with _Started():
        sys.exit(3)


async def by_an_error() -> None:
    async with _Started():
        raise LookupError("the user's own")


async def by_os_exit() -> None:
    async with _Started():
        os._exit(4)


async def by_sys_exit_in_a_callback() -> None:
    async with _Started():
        asyncio.get_running_loop().call_soon(sys.exit, 5)
        await stay()


async def by_abort() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    async with _Started():
        os.abort()


async def by_its_last_line() -> None:
    """The loop is closed, and the interpreter ends, with a runner that is open."""
    await started()


class _Started:
    async def __aenter__(self) -> None:
        self._runner = await started()

    async def __aexit__(self, *error: Any) -> None:
        await self._runner.__aexit__(*error)


def in_a_daemon_thread(loop: str) -> NoReturn:
    """The main thread ends while the runner's loop runs in a daemon thread."""
    is_started = threading.Event()

    async def main() -> None:
        async with _Started():
            is_started.set()
            await stay()

    threading.Thread(target=run, args=(loop, main()), daemon=True).start()
    is_started.wait()
    sys.exit(6)


def by_stopping_the_loop(name: str) -> NoReturn:
    loop = new_loop(name)
    task = loop.create_task(started())
    task.add_done_callback(lambda _: loop.stop())
    loop.run_forever()
    assert len(_kept) == 321
    sys.exit(7)


async def _after_the_main_thread(*, closes: bool) -> None:
    main_thread = threading.main_thread()
    main_thread.join()
    runner = percore.Runner(2)
    await runner.start()
    numbers = await runner.map(abs, range(-100, 0))
    os.write(1, f"sum {sum(numbers)}\n".encode())
    if closes:
        await runner.aclose()
    _kept.append(runner)


def after_the_main_thread(loop: str) -> None:
    """The interpreter waits for this thread, and runs what is registered with atexit later."""
    threading.Thread(target=lambda: run(loop, _after_the_main_thread(closes=True))).start()


def after_the_main_thread_and_left_open(loop: str) -> None:
    threading.Thread(target=lambda: run(loop, _after_the_main_thread(closes=False))).start()


def main(story: str, loop: str) -> None:
    function = globals()[story]
    # Both import what they take: some of the standard library cannot be imported once the main thread has ended.
    new_loop(loop).close()
    assert isinstance(percore.Runner, type)
    if inspect.iscoroutinefunction(function):
        run(loop, function())
    else:
        function(loop)


if __name__ == "__main__":
    main(*sys.argv[1:])
