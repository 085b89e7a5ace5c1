"""Programs in surroundings that containers and careless hosts give them: python -m tests.e2e.container_programs STORY ARGUMENTS

Each tells what it found in lines of JSON; the judge is outside.
"""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import psutil

import percore
from tests.e2e import fault_calls as calls
from tests.e2e.fault_programs import run, say, telling

MOUNT = 'mount -t tmpfs -o size=64m tmpfs /dev/shm && exec "$@"'
UNSHARE = {
    "pid": ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"],
    "shm": ["unshare", "--mount", "sh", "-c", MOUNT, "sh"],
}


def unshared(kind: str, *arguments: str) -> None:
    """Become a program in a namespace of its own."""
    command = [*UNSHARE[kind], sys.executable, "-m", "tests.e2e.container_programs", *arguments]
    os.execvp(command[0], command)


def zombies() -> list[int]:
    """Children of this process that nobody has reaped."""
    found = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):
            if child.status() == psutil.STATUS_ZOMBIE:
                found.append(child.pid)
    return found


async def code_of_death(runner: "percore.Runner", *call: Any) -> int | None:
    try:
        await runner.run(*call)
    except percore.WorkerDied as error:
        return error.exitcode
    raise AssertionError("the worker did not die")


async def serves(runner: "percore.Runner") -> bool:
    return await runner.map(calls.accept, range(100)) == [1] * 100


async def kill_fork_server(runner: "percore.Runner") -> list[int | None]:
    """Codes of the workers that go with it."""
    futures = [runner.submit(calls.stay, "/dev/null") for _ in range(2)]
    pids = {pid for pid, *_ in await asyncio.gather(*(runner.run(who) for _ in range(50)))}
    server = psutil.Process(pids.pop()).parent()
    assert server is not None
    assert server.ppid() == os.getpid()
    server.kill()
    await asyncio.wait(futures)
    errors = [future.exception() for future in futures]
    assert all(isinstance(error, percore.WorkerDied) for error in errors), errors
    return [error.exitcode for error in errors if isinstance(error, percore.WorkerDied)]


async def who() -> tuple[int]:
    return (os.getpid(),)


async def program(*command: str) -> int:
    return await (await asyncio.create_subprocess_exec(*command)).wait()


# PID 1


def first_process(loop: str, method: str) -> None:
    assert os.getpid() == 1
    run(loop, _first_process(method))


async def _first_process(method: Any) -> None:
    child = subprocess.Popen(["true"])  # noqa: ASYNC220  # whom nobody watches
    codes = []
    async with percore.Runner(2, start_method=method) as runner:
        codes.append(await code_of_death(runner, calls.kill_self, signal.SIGKILL))
        codes.append(await code_of_death(runner, calls.exit_with, 3))
        if method == "forkserver":
            for _ in range(3):
                codes += await kill_fork_server(runner)
        say("codes", codes)
        say("program", await program("sh", "-c", "exit 7"))
        say("serves", await serves(runner))
    say("left", [pid for pid in zombies() if pid != child.pid])
    say("child", child.wait())


# Process ids that come again


def bystander(loop: str, method: str) -> None:
    run(loop, _bystander(method))


async def _bystander(method: Any) -> None:
    for way in ("reload", "close") if method == "forkserver" else ("close",):
        runner = percore.Runner(2, start_method=method, blocked_after=0.1, kill_after=0.5)
        await runner.start()
        pid = runner.statistics().workers[0].pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        _gone(pid, method)
        other = _with_pid(pid)  # the program has not heard of the death: its loop has not run
        say(way, other is not None)
        if other is None:
            await runner.aclose()
            continue
        if way == "reload":
            await runner.reload()
            assert await serves(runner)
            await runner.usage()
        await runner.aclose(grace=0)
        say("lives", other.poll() is None)
        other.kill()
        other.communicate()


def _gone(pid: int, method: str) -> None:
    """Wait until a dead worker is reaped: by the fork server, or by careless code of the program."""
    if method == "spawn":
        os.waitpid(pid, 0)
    while os.path.exists(f"/proc/{pid}"):
        time.sleep(0.001)


def _with_pid(pid: int) -> "subprocess.Popen[bytes] | None":
    """Start a process with this pid. None: the system does not let this program choose."""
    for _ in range(100):
        try:
            with open("/proc/sys/kernel/ns_last_pid", "w") as file:
                file.write(str(pid - 1))
        except OSError:
            return None
        process = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
        if process.pid == pid:
            return process
        process.kill()
        process.communicate()
    return None


# Children that somebody else reaps


def thief(loop: str, method: str) -> None:
    """A thread that reaps every child there is, as an init or a careless library does."""
    is_over = threading.Event()

    def steal() -> None:
        while not is_over.is_set():
            with contextlib.suppress(ChildProcessError):
                os.waitpid(-1, 0)
            time.sleep(0.001)

    thread = threading.Thread(target=steal)
    thread.start()
    try:
        run(loop, _robbed(method))
    finally:
        is_over.set()
        thread.join()


async def _robbed(method: Any) -> None:
    async with percore.Runner(2, start_method=method) as runner:
        codes = [await code_of_death(runner, calls.kill_self, signal.SIGKILL) for _ in range(2)]
        codes += [await code_of_death(runner, calls.exit_with, 3) for _ in range(2)]
        say("codes", codes)
        say("serves", await serves(runner))


def ignored(loop: str, method: str) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    run(loop, _robbed(method))


def beside(loop: str, method: str) -> None:
    """The user's own programs, while workers die."""
    run(loop, _beside(method))


async def _beside(method: Any) -> None:
    async with percore.Runner(2, start_method=method) as runner:
        programs = [asyncio.create_task(program("sh", "-c", f"exit {code}")) for code in range(20)]
        deaths = [await code_of_death(runner, calls.kill_self, signal.SIGKILL) for _ in range(2)]
        say("programs", [await task for task in programs])
        say("codes", deaths)
    say("left", zombies())


# Little room, little time


def small_shm(loop: str) -> None:
    size = os.statvfs("/dev/shm")
    say("size", size.f_blocks * size.f_frsize)
    run(loop, _small_shm())


async def _small_shm() -> None:
    data = b"percore " * (12 << 20)
    async with percore.Runner(1) as runner:
        say("same", await runner.run(give_back, data) == data)
        say("names", os.listdir("/dev/shm"))


def give_back(data: bytes) -> bytes:
    return data


def in_cgroup(procs: str, *arguments: str) -> None:
    """Become a program in that control group."""
    with open(procs, "w", encoding="ascii") as file:
        file.write(str(os.getpid()))
    os.execv(sys.executable, [sys.executable, "-m", "tests.e2e.container_programs", *arguments])


def starved(loop: str, gate: str) -> None:
    """Begins when the gate gives a byte: by then it gets hardly any time."""
    run(loop, _starved(gate))


async def _starved(gate: str) -> None:
    async with percore.Runner(lifespan=telling, kill_after=1000) as runner:
        before = runner.statistics().workers
        say("workers", len(before))
        with open(gate, "rb", buffering=0) as file:  # noqa: ASYNC230  # the judge's word, before there is anything to do
            file.read(1)
        results = [await runner.map(calls.accept, range(300)), await runner.map(_in_task, range(50))]
        say("results", results == [[1] * 300, [1] * 50])
        after = runner.statistics()
        say("same", [worker.pid for worker in after.workers] == [worker.pid for worker in before])
        say("restarts", after.restarts)


async def _in_task(number: int) -> int:
    await asyncio.sleep(0)
    return 1


# Nothing of the program is in its workers


def forks(loop: str, method: str) -> None:
    """Threads run, the loop runs: nobody may fork this process."""
    os.register_at_fork(before=lambda: say("forked"))
    with _busy_threads():
        run(loop, _several_starts(method))
    say("over")


@contextlib.contextmanager
def _busy_threads() -> Iterator[None]:
    is_over = threading.Event()
    threads = [threading.Thread(target=is_over.wait) for _ in range(3)]
    for thread in threads:
        thread.start()
    yield
    is_over.set()
    for thread in threads:
        thread.join()


async def _several_starts(method: Any) -> None:
    async with percore.Runner(2, start_method=method, max_tasks_per_worker=20) as runner:
        await code_of_death(runner, calls.kill_self, signal.SIGKILL)
        say("serves", await serves(runner))
        pids = await runner.run(threads_of_family, method)
        say("threads", pids)


def threads_of_family(method: str) -> list[int]:
    """Threads of the process that forks: this worker's parent, if it is no supervisor."""
    return [len(os.listdir(f"/proc/{os.getppid()}/task"))] if method == "forkserver" else []


def handlers(loop: str, method: str) -> None:
    """The user's handlers and wake-up descriptor are for the user's process."""
    signal.signal(signal.SIGTERM, lambda *_: say("handled", [os.getpid(), "SIGTERM"]))
    signal.signal(signal.SIGUSR2, lambda *_: say("handled", [os.getpid(), "SIGUSR2"]))
    run(loop, _handlers(method))


async def _handlers(method: Any) -> None:
    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, lambda: say("handled", [os.getpid(), "SIGHUP"]))
    async with percore.Runner(1, start_method=method) as runner:
        ends = [await code_of_death(runner, strike, signum) for signum in (signal.SIGUSR2, signal.SIGHUP, signal.SIGKILL)]
        say("codes", ends)
        say("drained", await runner.run(strike, signal.SIGTERM))
        say("serves", await serves(runner))
    for signum in (signal.SIGTERM, signal.SIGUSR2, signal.SIGHUP):
        os.kill(os.getpid(), signum)
    await asyncio.sleep(0.01)  # a turn of the loop in which its own handler is called


async def strike(signum: int) -> str:
    """Send this to itself. What is not killed by it ends in order."""
    os.kill(os.getpid(), signum)
    if signum != signal.SIGTERM:
        await asyncio.Event().wait()
    return "in order"


def main(story: str, *arguments: str) -> None:
    globals()[story](*arguments)


if __name__ == "__main__":
    main(*sys.argv[1:])
