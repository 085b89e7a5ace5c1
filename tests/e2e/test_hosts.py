"""Whatever runs the event loop: percore works in it, beside others of its kind, and leaves nothing when it ends."""

import asyncio
import concurrent.futures
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

import percore
from tests.conftest import LOOP_FACTORIES
from tests.e2e import scripts
from tests.e2e.scripts import TIMEOUT, output_of, python
from tests.faults import Watch

ROOT = Path(__file__).parents[2]

MAIN = """\
import asyncio
import logging
import os
import threading

import percore

# Debugging loops, here and in workers, tell of steps that took long: on a slow machine that is no result.
logging.getLogger("asyncio").addFilter(lambda record: not record.getMessage().startswith("Executing "))


class Odd(Exception):
    pass


def double(n):
    return 2 * n


async def halve(n):
    await asyncio.sleep(0)
    if n % 2:
        raise Odd(n)
    return n // 2


async def main():
    async with percore.Runner(2) as runner:
        doubled = await runner.map(double, range(20))
        halves = [half async for half in runner.map(halve, doubled)]
        assert halves == list(range(20)), halves
        results = await asyncio.gather(*(runner.run(halve, n) for n in range(4)), return_exceptions=True)
        assert [type(result) for result in results] == [int, Odd, int, Odd], results
    return type(asyncio.get_running_loop()).__module__.partition(".")[0]

"""


HOSTS = {
    "asyncio.run": ("print(asyncio.run(main()))", "asyncio"),
    "asyncio.run in debug mode": ("print(asyncio.run(main(), debug=True))", "asyncio"),
    "uvloop.run": ("import uvloop; print(uvloop.run(main()))", "uvloop"),
    "asyncio.Runner twice": ("with asyncio.Runner() as host: print(host.run(main())); assert host.run(main())", "asyncio"),
    "asyncio.Runner with uvloop": (
        "import uvloop; host = asyncio.Runner(loop_factory=uvloop.new_event_loop); print(host.run(main())); host.close()",
        "uvloop",
    ),
    "a bare loop": ("loop = asyncio.new_event_loop(); print(loop.run_until_complete(main())); loop.close()", "asyncio"),
    "another thread": (
        "thread = threading.Thread(target=lambda: print(asyncio.run(main()))); thread.start(); thread.join()",
        "asyncio",
    ),
    "asyncio.to_thread": ("print(asyncio.run(beside_another()))", "['asyncio', 'asyncio']"),
}

IN_EACH = """
async def beside_another():
    return await asyncio.gather(main(), asyncio.to_thread(asyncio.run, main()))

if __name__ == "__main__":
    import sys, traceback
    for name, (host, _) in {hosts!r}.items():
        print("==", name)
        try:
            exec(host)
        except Exception:
            traceback.print_exc(file=sys.stdout)
"""


@pytest.fixture(scope="module")
def in_hosts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What a program has told in each of these hosts, one after the other."""
    told = output_of(MAIN + IN_EACH.format(hosts=HOSTS), tmp_path_factory.mktemp("hosts"))
    return dict(re.findall(r"^== (.*)\n((?:(?!== ).*\n)*)", told, re.MULTILINE))


@pytest.mark.parametrize("host", HOSTS)
def test_a_host_of_the_loop(host: str, in_hosts: dict[str, str]) -> None:
    assert in_hosts[host] == f"{HOSTS[host][1]}\n"


def test_pytest_asyncio(tmp_path: Path) -> None:
    (tmp_path / "test_mine.py").write_text(
        """\
import asyncio
import dataclasses

import percore
import pytest
import pytest_asyncio


@dataclasses.dataclass
class Point:
    x: int


class Odd(Exception):
    pass


async def move(point):
    if point.x < 0:
        raise Odd(point)
    return Point(point.x + 1)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def shared():
    async with percore.Runner(2) as runner:
        yield runner


@pytest_asyncio.fixture
async def runner():
    async with percore.Runner(1) as runner:
        yield runner


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("n", range(3))
async def test_shared(shared, n):
    assert await shared.run(move, Point(n)) == Point(n + 1)
    assert await shared.map(abs, [-1, -n]) == [1, n]


async def test_own(runner):
    with pytest.raises(Odd) as caught:
        await runner.run(move, Point(-1))
    assert caught.value.args == (Point(-1),)
    offset = 5
    assert await runner.run(lambda n: n + offset, 1) == 6
"""
    )
    (tmp_path / "conftest.py").write_text(
        "import asyncio, uvloop\n"
        "uvloop.new_event_loop().close()\n"
        "def pytest_asyncio_loop_factories(config, item):\n"
        "    return {'asyncio': asyncio.new_event_loop, 'uvloop': uvloop.new_event_loop}\n"
    )
    (tmp_path / "pytest.ini").write_text(
        "[pytest]\nasyncio_mode = auto\nasyncio_default_fixture_loop_scope = function\nfilterwarnings = error\n"
    )
    done = python("-m", "pytest", "-q", "-p", "no:cacheprovider", "test_mine.py", cwd=tmp_path)
    assert (done.code, done.err) == (0, ""), done.out
    assert "8 passed in" in done.out, "four under each loop"


async def use(runner: percore.Runner) -> set[int]:
    """Both kinds of calls; the pids they ran in."""
    assert await runner.map(scripts.double, range(50)) == [2 * n for n in range(50)]
    assert await runner.map(scripts.double_in_task, range(50)) == [2 * n for n in range(50)]
    return {await runner.run(scripts.pid), await runner.run(scripts.pid_of_task)}


async def test_two_runners_in_one_loop() -> None:
    async with percore.Runner(1) as one, percore.Runner(1) as two:
        pids = await asyncio.gather(use(one), use(two))
        assert [len(found) for found in pids] == [1, 1]
        assert pids[0] != pids[1]
        with pytest.raises(TypeError, match="a Runner cannot be pickled"):
            await one.run(repr, two)


async def test_a_runner_that_outlives_the_one_it_shares_the_fork_server_with() -> None:
    async with percore.Runner(1) as one:
        async with percore.Runner(1) as two:
            await asyncio.gather(use(one), use(two))
        await use(one)
        async with percore.Runner(1) as three:
            await asyncio.gather(use(one), use(three))


async def test_runners_one_after_the_other() -> None:
    for _ in range(3):
        async with percore.Runner(1) as runner:
            await use(runner)


async def story() -> set[int]:
    async with percore.Runner(1) as runner:
        return await use(runner)


def run_with(factory: Callable[[], asyncio.AbstractEventLoop]) -> set[int]:
    with asyncio.Runner(loop_factory=factory) as host:
        return host.run(story())


@pytest.mark.parametrize("kind", LOOP_FACTORIES)
def test_two_runners_in_two_threads_at_once(kind: str) -> None:
    factory = LOOP_FACTORIES[kind]
    barrier = threading.Barrier(2)

    async def together() -> set[int]:
        async with percore.Runner(2) as runner:
            # Both are open, and both fork servers' users, at the same time.
            await asyncio.get_running_loop().run_in_executor(None, barrier.wait, TIMEOUT)
            found = await use(runner)
            await asyncio.get_running_loop().run_in_executor(None, barrier.wait, TIMEOUT)
            return found

    def run() -> set[int]:
        with asyncio.Runner(loop_factory=factory) as host:
            return host.run(together())

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        first, second = [future.result() for future in [pool.submit(run), pool.submit(run)]]
    assert not first & second


@pytest.mark.parametrize("kind", LOOP_FACTORIES)
def test_a_thread_that_ends_after_it_has_closed_its_runner(kind: str) -> None:
    """Other threads go on: nothing of percore hangs on the thread that first started the fork server."""
    told: list[set[int]] = []
    thread = threading.Thread(target=lambda: told.append(run_with(LOOP_FACTORIES[kind])))
    thread.start()
    thread.join()
    told.append(run_with(LOOP_FACTORIES[kind]))
    assert all(told)
    assert not told[0] & told[1]


@pytest.mark.parametrize("kind", LOOP_FACTORIES)
def test_p5_the_fork_server_survives_the_thread_that_started_it(kind: str) -> None:
    factory = LOOP_FACTORIES[kind]
    opened, may_close = threading.Event(), threading.Event()

    async def second() -> set[int]:
        async with percore.Runner(1) as runner:
            opened.set()
            await asyncio.get_running_loop().run_in_executor(None, may_close.wait, TIMEOUT)
            # A worker that is replaced now comes from the fork server of a thread that is gone.
            (worker,) = runner.statistics().workers
            assert worker.pid is not None
            psutil.Process(worker.pid).kill()
            found = await use(runner)
            assert worker.pid not in found
            return found

    def run_second() -> set[int]:
        with asyncio.Runner(loop_factory=factory) as host:
            return host.run(second())

    async def first(pool: concurrent.futures.Executor) -> "concurrent.futures.Future[set[int]]":
        async with percore.Runner(1) as runner:
            future = pool.submit(run_second)
            await asyncio.get_running_loop().run_in_executor(None, opened.wait, TIMEOUT)
            await use(runner)
            return future

    def run_first(pool: concurrent.futures.Executor, told: list["concurrent.futures.Future[set[int]]"]) -> None:
        with asyncio.Runner(loop_factory=factory) as host:
            told.append(host.run(first(pool)))

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        told: list[concurrent.futures.Future[set[int]]] = []
        starter = threading.Thread(target=run_first, args=(pool, told))
        starter.start()
        starter.join()
        may_close.set()
        assert told[0].result(TIMEOUT)


async def test_from_another_thread_by_run_coroutine_threadsafe() -> None:
    async with percore.Runner(1) as runner:
        loop = asyncio.get_running_loop()

        def in_thread() -> int:
            return asyncio.run_coroutine_threadsafe(runner.run(scripts.double, 4), loop).result(TIMEOUT)

        assert await loop.run_in_executor(None, in_thread) == 8


_LEFT = """\
import asyncio
import builtins
import sys
import percore

loop = asyncio.new_event_loop()
builtins.kept = percore.Runner(2, start_method=sys.argv[1])
loop.run_until_complete(builtins.kept.start())
print(*(worker.pid for worker in builtins.kept.statistics().workers))
loop.close()
"""


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_x3_a_runner_left_to_the_end_of_the_interpreter_is_warned_of_and_nothing_else(method: str, tmp_path: Path) -> None:
    done = python("-W", "always::ResourceWarning", "-c", _LEFT, method, cwd=tmp_path)
    assert done.code == 0
    (line,) = done.err.splitlines()
    assert "ResourceWarning: unclosed <percore.Runner open workers=2 ready=2 in_flight=" in line
    with Watch(map(int, done.out.split())) as workers:
        assert workers.wait_gone(TIMEOUT) == []


def test_windows_is_told_what_is_supported(tmp_path: Path) -> None:
    done = python("-c", "import sys; sys.platform = 'win32'; import percore", cwd=tmp_path)
    assert (done.code, done.out) == (1, "")
    last = done.err.splitlines()[-1]
    assert last.startswith("ImportError: percore runs on Linux and macOS, not on Windows")
    assert "WSL 2" in last


def test_importing_percore_loads_nothing_of_it(tmp_path: Path) -> None:
    program = """\
import sys
import percore
print(sorted(name for name in sys.modules if name.partition(".")[0] in ("percore", "asyncio", "uvloop", "cloudpickle")))
"""
    assert output_of(program, tmp_path) == "['percore']\n"


def test_a_pid_is_known_when_the_runner_is_open_although_the_fork_server_says_nothing_yet() -> None:
    program = """
import asyncio, os, signal
import percore

def children(pid):
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return [int(child) for child in file.read().split()]

async def main():
    async with percore.Runner(1) as runner:
        (server,) = children(os.getpid())
        print(runner.statistics().workers[0].pid in children(server))
        os.kill(server, signal.SIGCONT)

asyncio.run(main())
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"PERCORE_POINTS": "forkserver.forked=stop"},
        capture_output=True,
        text=True,
        timeout=40,
        check=False,
    )
    assert (done.stdout, done.stderr, done.returncode) == ("True\n", "", 0)


FAKE_GEVENT = """
def patch_all():
    print("patched")

def is_module_patched(name):
    return True
"""

GREENLETS = """
import asyncio, os
from gevent import monkey
monkey.patch_all()
import percore

def double(number):
    return 2 * number

async def main():
    async with percore.Runner(1) as runner:
        print(await runner.map(double, range(3)))

if __name__ == "__main__":
    with percore.LoopPoolExecutor(1) as executor:
        print(list(executor.map(double, range(3))), type(executor._portal._loop).__module__)
    asyncio.run(main())
"""


def test_workers_leave_out_what_gevent_would_patch(tmp_path: Path) -> None:
    """With a gevent that patches nothing: the real one is among the programs of tests/programs."""
    (tmp_path / "gevent").mkdir()
    (tmp_path / "gevent" / "__init__.py").touch()
    (tmp_path / "gevent" / "monkey.py").write_text(FAKE_GEVENT)
    told = output_of(GREENLETS, tmp_path)
    assert told == "patched\n[0, 2, 4] asyncio.unix_events\n[0, 2, 4]\n"
