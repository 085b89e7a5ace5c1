"""Programs that leave percore where nobody should: python -m tests.e2e.misuse_programs STORY ARGUMENTS"""

import asyncio
import contextlib
import faulthandler
import gc
import itertools
import json
import multiprocessing
import os
import select
import signal
import sys
import warnings
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any

import percore
from tests import jobs
from tests.e2e import nested_calls
from tests.e2e.fault_programs import new_loop, run, say
from tests.internals import channel_of, members_of
from tests.waiting import until

LIMIT = 20.0

faulthandler.register(signal.SIGUSR1, all_threads=True)

_kept: list[Any] = []


# Forks of the program


def forked(loop: str, how: str, gate: str) -> None:
    run(loop, _forked(how, gate))


async def _forked(how: str, gate: str) -> None:
    with contextlib.ExitStack() as forks:
        async with percore.Runner(2, concurrency=1000, threads=4) as runner:
            waiting = [runner.submit(fn, os.devnull, gate, number) for fn in (jobs.wait, jobs.await_) for number in range(450)]
            stream = aiter(runner.map(jobs.echo, itertools.count(), key=str))
            ended = [runner.submit(jobs.aecho, number) for number in range(100)]
            await asyncio.sleep(0)  # they are sent
            _wait_until_all_have_answered(runner)  # what a fork reads now, nobody reads here
            fork = forks.enter_context(_Fork(how, lambda: _use_in_fork(runner, [*waiting, *ended], how)))
            if fork.is_child:  # it goes on as its copy of the program does
                return
            if how == "lives":
                await _lose_a_worker(runner)
            _open(gate)
            async with asyncio.timeout(LIMIT):
                values = await asyncio.gather(*waiting, *ended, return_exceptions=True)
                items = [await anext(stream) for _ in range(100)]
            await stream.aclose()  # type: ignore[attr-defined]  # it is a generator
            counted = runner.statistics()
        lost = [value for value in values if isinstance(value, percore.WorkerDied)]
        right = zip(values, [*range(450), *range(450), *range(100)], strict=True)
        kept = [value for value, expected in right if value == expected]
        say("parent", [len(kept) + len(lost) == 1000, items == list(range(100))])
        say("counted", [len(lost) == counted.failed, counted.restarts])
        say("closed")


def _open(gate: str) -> None:
    Path(gate).write_text("!")


def _wait_until_all_have_answered(runner: "percore.Runner") -> None:
    """Until every worker has results in its ring, and has rung, and nobody here has heard of it."""
    for member in members_of(runner):
        channel = channel_of(member)
        at = channel.rx.read % channel.rx.size
        while not any(channel.rx._view[at : at + 8]):
            os.sched_yield()
        poll = select.poll()
        poll.register(channel._bell.fileno(), select.POLLIN)
        assert poll.poll(LIMIT * 1000)


async def _lose_a_worker(runner: "percore.Runner") -> None:
    """A worker dies, and another one comes, while a fork of the program has whatever it has inherited."""
    pid = runner.statistics().workers[0].pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    async with asyncio.timeout(LIMIT):
        while runner.statistics().restarts == 0:
            await runner.run(jobs.aecho)


class _Fork:
    """A fork of this program in the midst of everything, of which nothing is heard here but its end."""

    def __init__(self, how: str, use: Callable[[], None]) -> None:
        self._how = how
        self._use = use
        self._may_end, self._end = os.pipe()
        self.is_child = False

    def __enter__(self) -> "_Fork":
        warnings.simplefilter("ignore", DeprecationWarning)  # 3.12 on: there may be threads
        if self._how.startswith("multiprocessing"):
            process = multiprocessing.get_context("fork").Process(target=self._use)
            process.start()
            process.join()
            say("fork", process.exitcode)
            process.close()
            return self
        self._pid = os.fork()
        self.is_child = not self._pid
        if self.is_child:
            self._be_child()
        elif self._how != "lives":
            self._wait()
        return self

    def _be_child(self) -> None:
        self._use()
        if self._how == "lives":
            os.close(self._end)
            os.read(self._may_end, 1)
        if self._how in ("lives", "gc"):
            os._exit(0)
        if self._how == "sys.exit":
            sys.exit(3)

    def _wait(self) -> None:
        say("fork", os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1]))

    def __exit__(self, *_: object) -> None:
        os.close(self._end)
        os.close(self._may_end)
        if self._how == "lives":
            self._wait()


def _use_in_fork(runner: "percore.Runner", futures: "list[asyncio.Future[Any]]", how: str) -> None:
    """Everything that a fork can do with its copy of a runner."""
    uses: list[Callable[[], object]] = [
        lambda: runner.submit(jobs.echo),
        lambda: runner.map(jobs.echo, [1]),
        runner.statistics,
        runner.options,
        lambda: _driven(runner.run(jobs.echo)),
        lambda: _driven(runner.aclose()),
        lambda: _driven(runner.start()),
    ]
    refusals = 0
    for use in uses:
        try:
            use()
        except RuntimeError:
            refusals += 1
    for future in futures:
        future.cancel()
    say("refused", [refusals == len(uses), _inherited()])
    if how in ("gc", "multiprocessing gc"):
        futures.clear()
        del runner, futures, uses
        gc.collect()
    if how == "multiprocessing exit":
        sys.exit(3)


def _driven(coroutine: Any) -> None:
    """The first step of a coroutine, whatever loop there is."""
    try:
        coroutine.send(None)
    finally:
        coroutine.close()


def _inherited() -> list[str]:
    """Descriptors by which this process could hear of, or be heard by, the workers of the other."""
    found = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{number}")
            if "pidfd" in target:
                found.append(target)
    return found


# Runners that are left open


def left_with_threads() -> None:
    """As `left`, to the end of the interpreter, with workers that are threads."""
    warnings.simplefilter("always", ResourceWarning)
    warnings.filterwarnings("ignore", "engine=.threads.: only one thread", RuntimeWarning)
    runner = percore.Runner(2, engine="threads")
    loop = asyncio.new_event_loop()
    loop.run_until_complete(runner.start())
    loop.close()
    _kept.append(runner)


def left(loop_name: str, method: Any, how: str) -> None:
    """The loop of an open runner is closed, and then the runner is dropped, or kept to the end of the interpreter."""
    warnings.simplefilter("always", ResourceWarning)
    loop = new_loop(loop_name)
    runner, futures = loop.run_until_complete(_start_and_submit(method))
    pids = [worker.pid for worker in runner.statistics().workers]
    before = [future._state for future in futures]
    loop.close()
    say("workers", pids)
    if how == "kept":
        _kept.extend([runner, futures])
        return
    if how == "used":
        say("refused", [_refuses(partial(runner.submit, jobs.echo)), _refuses(partial(_close, runner))])
    del runner
    gc.collect()
    say("untouched", [future._state for future in futures] == before)
    run(loop_name, _another(method))


async def _start_and_submit(method: Any) -> "tuple[percore.Runner, list[asyncio.Future[Any]]]":
    runner = percore.Runner(2, start_method=method, threads=2)
    await runner.start()
    futures = [runner.submit(fn) for fn in (nested_calls.stay, nested_calls.stay_in_thread) * 50]
    assert await runner.run(jobs.aecho, 1) == 1
    return runner, futures


async def _another(method: Any) -> None:
    async with percore.Runner(1, start_method=method) as runner:
        say("another", await runner.run(jobs.aecho, 7))


def _close(runner: "percore.Runner") -> None:
    _driven(runner.aclose())


def _refuses(use: Callable[[], object]) -> bool:
    try:
        use()
    except RuntimeError:
        return True
    return False


# Runners within workers


async def nested() -> None:
    async with percore.Runner(2, kill_after=1) as runner:
        call = asyncio.ensure_future(runner.run(nested_calls.nest, 2))
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
        await runner.aclose(grace=0)
        say("ended", type(call.exception()).__name__)


async def nested_and_staying() -> None:
    async with percore.Runner(2, kill_after=0.5) as runner:
        await runner.run(nested_calls.nest, 2)


async def nested_and_left_open() -> None:
    async with percore.Runner(1) as runner:
        say("left", await runner.run(nested_calls.leave_open))
        say("nested", await runner.map(nested_calls.twice_in_nested, range(4)))


def on_terminal(story: str, loop: str) -> None:
    run(loop, globals()[story]())


# Odd surroundings


def without_streams(loop: str, method: str, result: str) -> None:
    """Descriptors 0 to 2 are closed before anything of percore has any."""
    for number in range(3):
        os.close(number)
    told: list[Any] = []
    run(loop, _work(method, told))
    Path(result).write_text(json.dumps(told))


def with_closed_objects(loop: str, method: str, result: str) -> None:
    """`sys.stdout` and the like are closed, or gone; the descriptors with them."""
    sys.stdin.close()
    sys.stdout.close()
    sys.stderr = None  # as where there is no console
    told: list[Any] = []
    run(loop, _work(method, told))
    Path(result).write_text(json.dumps(told))


def gone_away(loop: str, method: str, result: str) -> None:
    """The working directory changes while the runner is open, and is deleted."""
    folder = Path(result).parent / "deleted"
    folder.mkdir()
    told: list[Any] = []
    run(loop, _work(method, told, partial(_go_and_delete, folder)))
    os.chdir("/")
    Path(result).write_text(json.dumps(told))


def _go_and_delete(folder: Path) -> None:
    os.chdir(folder)
    folder.rmdir()


def with_all_warnings(loop: str, method: str, result: str) -> None:
    told: list[Any] = []
    run(loop, _not_timed(_work(method, told)))
    Path(result).write_text(json.dumps(told))


async def _not_timed(work: Coroutine[Any, Any, None]) -> None:
    """In debug mode a loop warns of every step of 0.1 seconds, which on a busy machine any step may take."""
    asyncio.get_running_loop().slow_callback_duration = LIMIT
    await work


async def _work(method: Any, told: list[Any], between: Callable[[], object] = int) -> None:
    """Some of everything, in workers of the first start and in replacements."""
    async with percore.Runner(2, start_method=method) as runner:
        for turn in range(2):
            data = bytes(300_000)
            assert await runner.run(jobs.length, data) == len(data)
            assert await runner.run(jobs.apattern, 300_000) == jobs.pattern(300_000)
            assert await runner.map(jobs.echo, range(1000)) == list(range(1000))
            told.append([await runner.run(nested_calls.read_stdin), (await runner.run(nested_calls.streams))[0]])
            if not turn:
                between()
                for worker in runner.statistics().workers:
                    os.kill(worker.pid or 0, signal.SIGTERM)
                async with asyncio.timeout(LIMIT):
                    await until(lambda: all(worker.generation > 1 for worker in runner.statistics().workers))
                    await runner.run(jobs.aecho)
        told.append(runner.statistics().failed)


def much_on_stderr(loop: str, method: str, size: str) -> None:
    run(loop, _much_on_stderr(method, int(size)))


async def _much_on_stderr(method: Any, size: int) -> None:
    async with percore.Runner(2, start_method=method) as runner:
        say("written", await runner.map(nested_calls.write_to_stderr, [size] * 3))


if __name__ == "__main__":
    warnings.simplefilter("error", append=True)
    globals()[sys.argv[1]](*sys.argv[2:])
