"""Every sentence that percore says to its users, with a use that makes percore say it.

A sentence is the text of an error that percore raises, of a warning or of a log message. `…` stands for a part that differs from
case to case. One test finds the sentences of the source that are not listed here, the other one runs each use. Two kinds of texts
are not listed: those about damaged messages and percore's own mistakes (BrokenFrame, IllegalEvent), to which no use leads, and
those in the files of `INTERNAL`.
"""

import ast
import asyncio
import concurrent.futures
import contextvars
import gc
import inspect
import io
import logging
import multiprocessing
import os
import pickle
import re
import resource
import signal
import socket
import sys
import textwrap
import threading
import warnings
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any, Final, TypeAlias

import pytest

import percore
from percore import LoopPoolExecutor, Runner, threaded
from percore._common.engines import EngineChoice
from percore._engines.processes.fork_server_launcher import ForkServerLauncher
from percore._serialization.exceptions import load_exception
from tests import jobs, nested_jobs, nested_walks, variables
from tests.contract import share_jobs
from tests.contract.conftest import worker_of
from tests.fakes import FakeRunner
from tests.waiting import until

pytestmark = pytest.mark.asyncio_only

ROOT: Final = Path(__file__).parents[2]
SOURCE: Final = Path(percore.__file__).parent
ERROR: Final = re.compile(r"(Error|Closed|Full|Failed|TooLarge|Died|RunnerBroken)$")
LOGGING: Final = {"report", "warn", "warning", "error", "info", "debug", "exception"}
INTERNAL: Final = {"fault_points.py", "doorbell.py", "main_module.py"}
"""Files whose texts are for percore's tests, are caught by percore, or are those of runpy."""

threads: Any = threaded
executors: Any = LoopPoolExecutor
runners: Any = Runner
module: Any = percore

Use: TypeAlias = "Callable[[Any], Any] | Program | str"
"""What makes percore say a sentence: a use of an open runner, a program, or the test that has what is needed for it."""


def at(test: str, *needles: str) -> Use:
    """The test that makes percore say a sentence, and what the file of that test says about it."""
    return "\n".join((test, *needles))


# Lifespans, jobs and inputs


@asynccontextmanager
async def session() -> AsyncIterator[int]:
    yield 5


@asynccontextmanager
async def fails_at_start() -> AsyncIterator[None]:
    raise ConnectionError("no such server")
    yield


@asynccontextmanager
async def fails_at_exit() -> AsyncIterator[None]:
    yield
    raise ConnectionError("the server is gone")


@asynccontextmanager
async def never_starts() -> AsyncIterator[None]:
    await asyncio.Event().wait()
    yield


def refuse_thread() -> None:
    raise ConnectionError("no thread here")


def stop_iteration(_: object = None) -> None:
    raise StopIteration(3)


@asynccontextmanager
async def own_task() -> AsyncIterator[Any]:
    yield asyncio.current_task()


async def cancel_lifespan() -> None:
    percore.state().cancel()
    await asyncio.Event().wait()


async def leave_task() -> None:
    jobs._leave(_fail_at_cancel())


async def _fail_at_cancel() -> None:
    try:
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        raise ConnectionError("the clean-up failed") from None


def inputs(error: BaseException) -> Iterator[int]:
    yield 1
    raise error


def closes_badly() -> Iterator[int]:
    try:
        while True:
            yield 1
    finally:
        raise ConnectionError("closing failed")


# Uses


def fake(use: Callable[[Any], Any] = lambda _: None, workers: int = 1, **options: Any) -> Use:
    """A use of another runner, with these options."""

    async def run(_: Runner) -> None:
        async with FakeRunner(workers, **options) as runner:
            await done(use(runner))

    return run


async def done(made: Any) -> None:
    if inspect.isawaitable(made):
        await made


def options(**given: Any) -> Use:
    return lambda _: Runner(**given)


def with_socket(use: Callable[[socket.socket], None] | None, kind: int = socket.SOCK_STREAM) -> Use:
    """A new runner that is given a new socket."""

    def run(_: Runner) -> None:
        with socket.socket(type=kind) as sock:
            if use is not None:
                use(sock)
            FakeRunner(listen=[sock])

    return run


def view(**given: Any) -> Use:
    return lambda runner: runner.options(**given)


def pool(use: Callable[[Any], Any] = lambda _: None, **given: Any) -> Use:
    def run() -> None:
        with LoopPoolExecutor(1, **given) as executor:
            use(executor)

    return lambda _: asyncio.to_thread(run)


async def never_used(runner: Runner) -> None:
    _ = runner.map(jobs.echo, [1])
    del _


@contextmanager
def other_loop() -> Iterator[asyncio.AbstractEventLoop]:
    """A loop that may run within this test's loop."""
    running, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    loop = asyncio.new_event_loop()
    asyncio.tasks._leave_task(running, task)  # since 3.14 a thread has one current task, whatever its loops
    asyncio.events._set_running_loop(None)
    try:
        yield loop
    finally:
        loop.close()
        asyncio.events._set_running_loop(running)
        asyncio.tasks._enter_task(running, task)


def in_other_loop(runner: Runner) -> None:
    with other_loop() as loop:
        loop.run_until_complete(runner.run(jobs.echo, 1))


def without_loop(_: Runner) -> None:
    starting = FakeRunner(1).start()
    running = asyncio.get_running_loop()
    asyncio.events._set_running_loop(None)
    try:
        starting.send(None)
    finally:
        asyncio.events._set_running_loop(running)


def use_closed(shared: Any) -> Any:
    shared.close()
    return shared.value


async def large_context(runner: Runner) -> None:
    token = variables.name.set("x" * 200_000)
    try:
        await runner.run(jobs.aecho, 1)
    finally:
        variables.name.reset(token)


async def twice(runner: Runner) -> None:
    results = runner.map(jobs.echo, [1])
    await results
    await results


async def stream_twice(runner: Runner) -> None:
    stream = runner.stream(jobs.numbers)
    await stream.aclose()
    aiter(stream)


async def never_streamed(runner: Runner) -> None:
    _ = runner.stream(jobs.numbers)
    del _


async def dies(runner: Runner) -> None:
    call = runner.submit(asyncio.sleep, 3600)
    await until(lambda: runner.statistics().running)
    worker_of(runner).kill()
    await call


async def asked_to_end(_: Runner) -> None:
    async with Runner(1) as runner:
        pid = (await runner.run(jobs.where)).pid
        os.kill(pid, signal.SIGTERM)
        while (await runner.run(jobs.where)).pid == pid:
            pass


async def calls(runner: Runner) -> None:
    for _ in range(8):
        await runner.run(jobs.aecho, 1)


async def closed_meanwhile(_: Runner) -> None:
    runner = FakeRunner(1, lifespan=never_starts)
    starting = asyncio.create_task(runner.start())
    await asyncio.sleep(0)
    await runner.aclose(grace=0)
    await starting


async def cut_off(_: Runner) -> None:
    async with FakeRunner(1) as runner:
        call = runner.submit(asyncio.sleep, 3600)
        await runner.aclose(grace=0)
    await call


def interrupted(_: Runner) -> None:
    """A Ctrl-C goes through the loop, and the map tells of it when the loop goes on."""

    async def use() -> None:
        async with FakeRunner(1) as runner:
            await runner.map(jobs.echo, inputs(KeyboardInterrupt()))

    with other_loop() as loop:
        task = loop.create_task(use())
        with suppress(KeyboardInterrupt):
            loop.run_until_complete(task)
        loop.run_until_complete(task)


async def with_shared(runner: Runner, use: Callable[[Any], Any]) -> None:
    await done(use(await runner.share(1)))


async def started_again(runner: Runner) -> None:
    await runner.start()


def usage_in_callback(executor: LoopPoolExecutor) -> None:
    asked: concurrent.futures.Future[percore.Usage] = concurrent.futures.Future()

    def ask(_: object) -> None:
        try:
            asked.set_result(executor.usage())
        except RuntimeError as error:
            asked.set_exception(error)

    executor.submit(asyncio.sleep, 0).add_done_callback(lambda _: executor.submit(jobs.echo, 1).add_done_callback(ask))
    asked.result()


def executor_callback(executor: LoopPoolExecutor) -> None:
    future = executor.submit(jobs.echo, 1)
    future.add_done_callback(lambda _: sys.exit(3))
    future.result()


def too_many_shared(runner: Runner) -> Any:
    return asyncio.gather(*(runner.share(i) for i in range(5)))


async def input_closes_badly(runner: Runner) -> None:
    async for _ in runner.map(jobs.echo, threaded(closes_badly())):
        break
    await until(lambda: all(thread.name != "percore-threaded" for thread in threading.enumerate()))  # it closes the input


async def full(runner: Runner) -> None:
    calls = [runner.submit(jobs.echo, 1) for _ in range(2)]
    await asyncio.gather(*calls)


async def broken_map(runner: Runner) -> None:
    await runner.map(jobs.echo, inputs(StopAsyncIteration()))


class Program:
    """A use that is a program of its own."""

    def __init__(self, code: str, **environment: str) -> None:
        self._code, self._environment = textwrap.dedent(code), environment

    async def said(self) -> str:
        """Run it: what it writes to its standard error."""
        child = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", self._code), stderr=asyncio.subprocess.PIPE, env={**os.environ, **self._environment}
        )
        return (await child.communicate())[1].decode()


def done_with(error: BaseException) -> None:
    raise error


async def with_file(runner: Runner) -> None:
    with io.TextIOWrapper(io.FileIO(__file__)) as file:
        await runner.run(jobs.aecho, (lambda: 0, file))


async def launched_in_vain(_: Runner) -> None:
    """A fork server without descriptors refuses a worker, and gets them back for the next one."""
    async with Runner(1, start_method="forkserver") as runner:
        pid = (await runner.run(jobs.where)).pid
        (server,) = (one.pid for one in (await runner.usage()).processes if one.role == "fork server")
        limits = resource.prlimit(server, resource.RLIMIT_NOFILE)
        used = set(map(int, os.listdir(f"/proc/{server}/fd")))
        room = [fd for fd in range(len(used) + 2) if fd not in used][1]  # for the one descriptor that takes the answer
        resource.prlimit(server, resource.RLIMIT_NOFILE, (room, limits[1]))
        os.kill(pid, signal.SIGKILL)
        await until(lambda: runner.statistics().restarts >= 2)
        resource.prlimit(server, resource.RLIMIT_NOFILE, limits)
        await runner.run(jobs.where)


async def launch_closed(_: Runner) -> None:
    launcher = ForkServerLauncher.open()
    await launcher.aclose()
    launcher.launch(b"", [], lambda _: None)


SENTENCES: Final[dict[str, Use]] = {
    # The import
    "percore runs on Linux and macOS, not on Windows, which lacks the file descriptors and signals that percore "
    "needs. On Windows, use WSL 2": at("tests/e2e/test_hosts.py::test_windows_is_told_what_is_supported", "not on Windows"),
    "module … has no attribute …": lambda _: module.Nothing,
    "a __del__ that a garbage collection has run waits for a call, in the middle of a step of percore that has to end first: "
    "make such calls before, in a `with` block or a method that closes the object": at(
        "tests/unit/test_families.py::test_a_collection_that_waits_for_a_nested_call_in_the_midst_of_another_one_is_refused",
        "that a garbage collection has run waits for a call",
    ),
    "a __del__ that a garbage collection has run waits for an executor, in the middle of a step of percore that has to end first: "
    "wait before, in a `with` block or a method that closes the object": at(
        "tests/unit/test_portal.py::test_a_finalizer_that_waits_in_the_middle_of_a_start_is_refused",
        "that a garbage collection has run waits for an executor",
    ),
    "a span could not be begun": at(
        "tests/contract/test_opentelemetry.py::test_a_span_processor_that_raises_in_workers_costs_no_call_and_no_worker",
        "a span could not be begun",
    ),
    "a span could not be ended": at(
        "tests/contract/test_opentelemetry.py::test_a_span_processor_that_raises_costs_no_call_its_end", "a span could not be ended"
    ),
    "the context of a call could not be written": at(
        "tests/contract/test_opentelemetry.py::test_a_propagator_that_raises_costs_no_call", "the context of a call could not be"
    ),
    "the context of a call could not be read": at(
        "tests/contract/test_opentelemetry.py::test_a_propagator_that_raises_costs_no_call", "the context of a call could not be"
    ),
    "percore.opentelemetry needs OpenTelemetry: pip install percore[otel]": at(
        "tests/unit/test_opentelemetry.py::test_without_opentelemetry_the_import_says_what_to_install", "needs OpenTelemetry"
    ),
    "percore was first used after the main thread had ended, and Python then refuses to import concurrent.futures. Import percore "
    "earlier: write `from percore import Runner` in code that the main thread runs": at(
        "tests/e2e/test_launch.py::test_named_for_the_first_time_when_the_main_thread_has_ended_it_says_what_to_do",
        "write `from percore",
    ),
    "PERCORE_WITHOUT=… names something unknown; known are: …": Program("import percore._common.system", PERCORE_WITHOUT="nothing"),
    # Systems and launches
    'start_method="forkserver" needs pidfd_open and F_SETSIG (Linux 5.3 or newer); use start_method="spawn"': Program(
        "import percore; percore.Runner(1, start_method='forkserver')", PERCORE_WITHOUT="pidfd"
    ),
    'start_method="forkserver" needs pidfds (Linux 5.3); use start_method="spawn" here': Program(
        "from percore._engines.processes.fork_server_launcher import ForkServerLauncher as Launcher; Launcher.open()",
        PERCORE_WITHOUT="pidfd",
    ),
    "this launcher is closed": launch_closed,
    "percore starts its workers with a Python interpreter, and sys.executable is …, which does not look like one; "
    "probably this program embeds Python. Name the interpreter: multiprocessing.set_executable('/usr/bin/python3')": Program(
        """
        import asyncio, sys, percore
        sys.executable = "/usr/bin/blender"
        asyncio.run(percore.Runner(1).start())
        """
    ),
    "this frozen program was started as a helper process of itself and has run its own code instead: call "
    "multiprocessing.freeze_support() first of all under `if __name__ == '__main__':`": at(
        "tests/e2e/test_frozen.py::test_a_frozen_program_without_freeze_support_is_refused_and_told",
        "multiprocessing.freeze_support()",
    ),
    "no room for one message of max_message=… bytes (…): raise the limit (ulimit -v, ulimit -f), or make the runner "
    "with a smaller max_message": Program(
        """
        import asyncio, resource, percore
        resource.setrlimit(resource.RLIMIT_AS, (1 << 32, 1 << 32))
        asyncio.run(percore.Runner(1, max_message=1 << 35).start())
        """
    ),
    "this program may have … files open, and each worker takes about ten: raise the limit (ulimit -n)": Program(
        """
        import asyncio, resource, percore
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
        asyncio.run(percore.Runner(16).start())
        """
    ),
    "the address space has no room for the results of … workers with max_message=… bytes: make the runner with a "
    "smaller max_message or fewer workers, or raise the limit (ulimit -v) if there is one": at(
        "tests/unit/test_links.py::test_what_cannot_fit_is_refused_when_the_memory_is_made", "fewer workers"
    ),
    "could not start the thread that waits for a worker": at(
        "tests/e2e/test_launch.py::test_nothing_leaks_when_nothing_can_be_started"
    ),
    "the fork server does not answer; a new one is started for the next worker": at(
        "tests/e2e/test_launch.py::test_a_stopped_fork_server_holds_up_no_kill"
    ),
    "the worker (pid %d) cannot be watched: %s": at(
        "tests/e2e/test_limits.py::test_r7_a_loop_that_can_watch_no_more_fails_a_start_and_leaves_nothing",
        "cannot be watched",
    ),
    "the fork server could not start a worker: %s": launched_in_vain,
    "no thread can be started: …": at(
        "tests/e2e/test_process_limits.py::test_r8_a_worker_that_can_start_no_thread_says_so_and_starts_them_later",
        "no thread can be started: ",
    ),
    "the fork server (pid %d) died %s, and its workers with it%s": at(
        "tests/e2e/test_fork_server_deaths.py::test_its_own_death_is_named_and_usage_shows_it", "and its workers with it"
    ),
    "the fork server died as soon as it was started…": at(
        "tests/e2e/test_fork_server_deaths.py::test_a_fork_server_that_dies_at_once_tells_why", "died as soon as it was started"
    ),
    # Options of a runner
    "… must be a whole number, not …": options(workers=1.5),
    "… must be …, not …": options(workers=0),
    "… must be a number of seconds, not …": options(kill_after="1"),
    "… must be a positive number of seconds, not …": options(kill_after=-1),
    "… must be a plain function, not an async one: percore calls it and does not await it": options(loop_factory=jobs.aecho),
    "… must be a plain function, not a generator function: percore calls it and does not iterate": options(
        loop_factory=jobs.numbers
    ),
    "… must be callable, such as …=…, not …": options(loop_factory="uvloop"),
    "contextvars must be a list, such as contextvars=[…], not one ContextVar": options(contextvars=contextvars.ContextVar("one")),
    "contextvars must be ContextVars, not …": options(contextvars=[1]),
    "no module that a worker can import has …: make it at the top level of a module, such as `user = "
    "ContextVar('user')`, and pass that one": fake(contextvars=[contextvars.ContextVar("nowhere")]),
    "give the function itself: lifespan=open_session, not lifespan=open_session()": options(lifespan=session()),
    "harden must be True or False, not …": options(harden=1),
    "harden=True needs Linux, and a Python that has ctypes": at(
        "tests/unit/test_options.py::test_hardening_is_a_switch_and_needs_the_system", "harden=True needs Linux"
    ),
    "harden=True: the system refuses prctl(…), errno …": at(
        "tests/unit/test_options.py::test_a_system_that_refuses_prctl_is_named", "the system refuses prctl"
    ),
    'start_method must be "forkserver" or "spawn", not ……': options(start_method="fork"),
    "engine must be …, or an object such as percore.RayEngine(), not …": options(engine="process"),
    "give an object: engine=percore.…(), not engine=percore.…": options(engine=EngineChoice),
    "…() got an unexpected keyword argument …: …": options(max_workers=2),
    'listen must be a list, such as listen=["127.0.0.1:8080"], not …': options(listen="127.0.0.1:8080"),
    'listen takes addresses, such as "127.0.0.1:8080", and sockets, not …': options(listen=[8080]),
    "listen may have … addresses, not …": options(listen=["127.0.0.1:0"] * 65),
    "listen has … twice": options(listen=["127.0.0.1:8080"] * 2),
    'listen: … has no port: write "127.0.0.1:8080", "[::1]:8080" or "unix:/run/app.sock"': options(listen=["127.0.0.1"]),
    'listen: … names no address: write "127.0.0.1:…" for this machine alone, or "0.0.0.0:…" for all who can reach it': options(
        listen=[":8080"]
    ),
    'listen: … has no IP address, and percore looks up no names: write "127.0.0.1:…" or "[::1]:…"': options(
        listen=["localhost:80"]
    ),
    'listen: … must have an absolute path of at most … bytes, such as "unix:/run/app.sock"': options(listen=["unix:app.sock"]),
    "listen has a socket that is closed": with_socket(socket.socket.close),
    "listen takes stream sockets, not …": with_socket(None, socket.SOCK_DGRAM),
    "listen takes bound sockets: call bind() of … first": with_socket(None),
    "percore cannot listen on …: ……": fake(listen=["192.0.2.1:0"]),
    "a file is there that is no socket": fake(listen=[f"unix:{__file__}"]),
    # Options of calls
    "retry_on must be an exception class, a tuple of them or a predicate, not a list": view(retries=1, retry_on=[OSError]),
    "retry_on must be an exception class, a tuple of them or a predicate, not …": view(retries=1, retry_on=5),
    "retry_on must name exception classes, not …": view(retries=1, retry_on=(int,)),
    "retry_on and backoff do nothing without retries, and this runner has none: give both, as in runner.options(retries=3, "
    "retry_on=ConnectionError)": view(retry_on=OSError),
    "… must be zero or more seconds, not …": view(retries=1, backoff=-1),
    "… must be a plain function: percore does not await …, which it returned": fake(
        lambda runner: runner.options(retries=1, retry_on=jobs.later).run(jobs.afail, ValueError("failed"))
    ),
    "a key must be hashable, such as a string, not …": view(key=[]),
    "a key is a value, such as a string, not …: await it first": lambda runner: runner.options(key=runner.map(jobs.echo, [1])),
    "a rate counts the calls of one key, and this call has none: give both, as in runner.options(key=host, "
    "rate=percore.Rate(10, per=1)).run(fetch, url)": lambda runner: runner.options(rate=percore.Rate(1, per=1)).submit(jobs.echo),
    "a rate counts the calls of one key: give the map a function that returns each call's key, as in "
    "runner.options(rate=percore.Rate(10, per=1)).map(fetch, urls, key=host_of)": (
        lambda runner: runner.options(rate=percore.Rate(1, per=1)).map(jobs.echo, [1])
    ),
    "a rate counts the calls of one key, and a broadcast goes to each worker once: call it without rate": (
        lambda runner: runner.options(rate=percore.Rate(1, per=1)).broadcast(jobs.echo)
    ),
    "rate must be a percore.Rate, as in percore.Rate(10, per=1), not …": view(key=1, rate=10),
    "n must be a whole number of calls, not …: for fractions choose another time, as in Rate(1, per=2)": (
        lambda _: percore.Rate(0.5, per=1)  # type: ignore[arg-type]
    ),
    "set_rate is for one key, such as a host: key must not be None": (lambda runner: runner.set_rate(None, percore.Rate(1, per=1))),
    "a broadcast goes to each worker once, so a key, retries, retry_on and backoff do not apply to it: call "
    "runner.broadcast(...), or runner.options(timeout=...).broadcast(...)": (
        lambda runner: runner.options(key=1).broadcast(jobs.echo)
    ),
    "… did not begin within queue_timeout=… s, and never runs": at(
        "tests/contract/test_queue_timeout.py::test_what_waits_too_long_never_runs", "did not begin within queue_timeout"
    ),
    "… ran for longer than timeout=… s": at(
        "tests/contract/test_timeouts.py::test_a_plain_function_s_caller_waits_no_longer", "wait ran for longer than timeout="
    ),
    "the call that waits for this one has run for longer than its timeout": at(
        "tests/contract/test_nested.py::test_a_timeout_reaches_the_nested_calls", "has run for longer than its timeout"
    ),
    "… ran for longer than hard_timeout=… s": at(
        "tests/contract/test_hard_timeout.py::test_a_late_answer_is_a_timeout", "ran for longer than hard_timeout"
    ),
    "the workers (%d) are ready after %s s": fake(),
    'progress must be True, "text" or a function of a percore.Progress, such as progress=print, not …': (
        lambda runner: runner.map(jobs.echo, [1], progress=[])
    ),
    "the progress of %s cannot be shown; its map goes on": (
        lambda runner: runner.map(jobs.echo, [1], progress=lambda progress: progress.no_such_figure)
    ),
    "%s is ready after %s s, as number %d of its slot": fake(),
    "%s starts, as number %d of its slot": fake(),
    "%s has ended after %s s; calls done: %d, failed: %d": fake(),
    "the workers have ended after %s s; calls done: %d, failed: %d, retried: %d; workers replaced: %d": fake(),
    "a call does not end in %s; its replacement starts": at(
        "tests/contract/test_hard_timeout.py::test_what_does_not_end_is_killed", "a call does not end in worker 0"
    ),
    "the runner did not accept the call within queue_timeout=… s": at(
        "tests/contract/test_queue_timeout.py::test_the_wait_for_the_runner_counts", "did not accept the call within queue_timeout"
    ),
    "options(key=...) is for one call; a map takes a function that gives each call's key: map(..., key=host_of)": (
        lambda runner: runner.options(key=1).map(jobs.echo, [1])
    ),
    "the values of the context variables take more than … bytes when they are pickled, and they travel with every call: pass what "
    "is large as an argument, or give `contextvars=` fewer variables": fake(large_context, contextvars=[variables.name]),
    # Functions and inputs
    "give the function and its arguments: runner.run(…, ...), not runner.run(…(...))": lambda runner: runner.submit(jobs.aecho(1)),
    "expected a function, not …": lambda runner: runner.submit(5),
    "… is a generator function, and one call gives one result: iterate `runner.stream(…, ...)` with `async for`": (
        lambda runner: runner.submit(jobs.numbers)
    ),
    "give the function and its arguments: runner.stream(…, ...), not runner.stream(…(...))": (
        lambda runner: runner.stream(jobs.numbers())
    ),
    "expected a generator function, not …": lambda runner: runner.stream(5),
    "… is not a generator function, so it has one result: `await runner.run(…, ...)`, or `runner.map(…, ...)` for many calls": (
        lambda runner: runner.stream(jobs.echo)
    ),
    "percore does not retry a stream, since its consumer has seen some of the items: retries, retry_on and backoff do not apply to "
    "it. Catch the error, and open another stream": lambda runner: runner.options(retries=1).stream(jobs.numbers),
    "timeout limits a call in its worker, and a stream also waits there for its consumer: write `async with asyncio.timeout(...)` "
    "around the `async for`, or inside the generator around its awaits": (
        lambda runner: runner.options(timeout=1).stream(jobs.numbers)
    ),
    "queue_timeout does not apply to a stream, whose consumer waits for items: write `async with asyncio.timeout(...)` around the "
    "wait for the first item": lambda runner: runner.options(queue_timeout=1).stream(jobs.numbers),
    "a stream is used once; call runner.stream(...) again for another round": stream_twice,
    "a stream was never used: iterate it with `async for`": never_streamed,
    "map needs at least one iterable": lambda runner: runner.map(jobs.echo),
    "map needs iterables, not …": lambda runner: runner.map(jobs.echo, 5),
    "starmap needs the arguments of each call as a tuple, not …": lambda runner: runner.starmap(jobs.echo, [5]).collect(),
    "window must be a whole number, not …": lambda runner: runner.map(jobs.echo, [1], window=1.5),
    "window must be at least 1, not …": lambda runner: runner.map(jobs.echo, [1], window=0),
    "key must be a function of the arguments, such as key=host_of, not …": lambda runner: runner.map(jobs.echo, [1], key=5),
    "a map is asynchronous: iterate it with `async for`, or `await` it for a list": lambda runner: list(runner.map(jobs.echo, [1])),
    "a map is used once; call runner.map(...) again for another round": twice,
    "a map was never used: `await` it, or iterate it with `async for`": never_used,
    "this map has no len(): none of its inputs has one": lambda runner: len(runner.map(jobs.echo, inputs(ValueError()))),
    "the input raised …": broken_map,
    "reading the input was interrupted by …": interrupted,
    "threaded() takes a sync iterable; an async one needs no thread: give the map … itself": lambda _: threads(jobs.anumbers()),
    "threaded() takes an iterable, not …": lambda _: threads(5),
    "closing the input %r failed in its thread": input_closes_badly,
    # What cannot be sent
    "… of … works within one event loop: the other process would get an independent copy…. To share an object among the "
    "calls of one worker, make it in the lifespan": lambda runner: runner.run(jobs.aecho, asyncio.Lock()),
    "a memoryview cannot be sent as it is: send pickle.PickleBuffer(view), which arrives as a memoryview without a "
    "copy where it is large, or bytes(view)": lambda runner: runner.run(jobs.aecho, memoryview(b"some")),
    "an open file cannot be sent: send its path, or what is read from it": with_file,
    "… raised …": lambda runner: runner.options(retries=1, retry_on=stop_iteration).run(jobs.afail, ValueError("failed")),
    "the call raised …": lambda runner: runner.run(stop_iteration),
    "the exception is larger than max_message and could not be sent": lambda _: done_with(load_exception(b"")),
    "the exception could not be unpickled: …": lambda _: done_with(load_exception(b"damaged")),
    "the … could not be unpickled here: …": lambda runner: runner.run(jobs.unreadable, 1),
    "a log record of … bytes": at(
        "tests/unit/test_logs.py::test_what_the_ring_can_never_hold_is_refused", "a log record of 65536 bytes"
    ),
    "a worker cannot return …: make it in the program, and give one to the call as an argument": at(
        "tests/e2e/test_multiprocessing.py::test_connections_and_sockets_are_sent_as_multiprocessing_sends_them"
    ),
    "a shared … of multiprocessing cannot be an argument: the other process would get a copy. Use "
    "multiprocessing.shared_memory.SharedMemory, or give it to each worker: LoopPoolExecutor(mp_context=..., initializer=..., "
    "initargs=(array,))": at("tests/e2e/test_multiprocessing.py::test_what_would_arrive_as_a_copy_or_as_a_number_is_refused"),
    "a message (…) of … bytes: the largest that fits into the ring has …": at(
        "tests/unit/test_channel.py::test_a_message_that_can_never_fit_breaks_the_channel_at_once"
    ),
    "there is no room for another pickle of … bytes": at(
        "tests/unit/test_channel.py::test_pickles_of_another_store_are_kept_as_long_as_there_is_room"
    ),
    "the program had no memory for the outcome of a call": at(
        "tests/contract/test_nested_ends.py::test_r4_without_memory_for_its_error_a_nested_call_ends_with_a_memory_error",
        "no memory for the outcome",
    ),
    "a message of at least … bytes does not fit into the memory that is left, … bytes": at(
        "tests/e2e/test_limits.py::test_r4_what_is_larger_than_the_address_space_fails_alone"
    ),
    "percore: a worker uses multiprocessing.shared_memory, which the program had not imported when the worker was "
    "started: shared memory that nobody unlinks is not removed when the program ends. Import "
    "multiprocessing.shared_memory in the program before the runner is started": at(
        "tests/e2e/test_multiprocessing.py::test_shared_memory_imported_after_the_start_is_not_tracked_and_that_is_told",
    ),
    # Workers
    "an internal error while %s; percore goes on": at("tests/contract/test_faults.py::test_a_fault_at_each_step_of_a_burial"),
    "worker %d could not start: %s": at(
        "tests/e2e/test_restarts.py::test_k6_a_lifespan_that_raises_in_a_replacement_is_told_and_tried_again"
    ),
    "worker %d died %d times in a row before it began a call; the runner goes on without it%s": at(
        "tests/e2e/test_restarts.py::test_b4_one_slot_that_fails_is_given_up_and_the_runner_goes_on",
        "the runner goes on without it",
    ),
    "every worker died … times in a row before it began a call; the last one died …. No more workers are started. "
    "Check the lifespan, the imports and the standard error of the workers…": at(
        "tests/e2e/test_restarts.py::test_b2_ten_deaths_in_a_row_break_the_runner", "died 10 times in a row"
    ),
    "the lifespan of %s failed while it served: %s": at(
        "tests/contract/test_lives.py::test_a_lifespan_that_fails_while_calls_run_says_why"
    ),
    "the task that runs the lifespan was cancelled while the worker served": fake(
        lambda runner: runner.run(cancel_lifespan), lifespan=own_task
    ),
    "percore: an exception ended thread %s": at(
        "tests/contract/test_logs.py::test_errors_of_threads_arrive", "an exception ended thread"
    ),
    "worker … could not start: …: …": fake(lifespan=fails_at_start),
    "worker … was killed: …": fake(lifespan=never_starts, start_timeout=0.001),
    "the lifespan must return a context manager, not …: decorate it with contextlib.asynccontextmanager, or "
    "contextlib.contextmanager": (fake(lifespan=jobs.no_manager)),
    "percore: the lifespan of worker %d failed on exit": fake(lifespan=fails_at_exit),
    "percore: %s failed: %r": fake(lambda runner: runner.run(leave_task)),
    "%s died %s": dies,
    "… … …. …": dies,
    "%s was asked to end; its replacement starts": asked_to_end,
    "the … stopped, and the workers in service go on: …": at(
        "tests/contract/test_reload_and_resize.py::test_a_reload_whose_new_worker_cannot_start_raises_and_leaves_the_old_ones",
        "the reload stopped, and the workers in service go on: ",
    ),
    "the … stopped, and the workers in service go on: there was no place for worker … within start_timeout=… s…. A new worker "
    "needs a place beside those that serve": at(
        "tests/contract/test_places.py::test_a_reload_without_a_place_for_a_further_worker_fails_and_the_old_one_goes_on",
        "there was no place for worker 0 within ",
    ),
    "there was no place for worker … within start_timeout=… s": at(
        "tests/contract/test_places.py::test_a_start_that_finds_no_place_in_time_fails", "no place for worker 2 within"
    ),
    "there was no place for any worker in time, and no more are started: …": at(
        "tests/contract/test_places.py::test_without_any_worker_a_place_has_to_come_within_the_time_of_a_start", "RunnerBroken"
    ),
    "there is no place for worker %d yet": at(
        "tests/contract/test_places.py::test_a_start_waits_for_the_places_that_are_missing", "no place for worker 2"
    ),
    "%s has %s of memory, and max_memory_per_worker is %s; its replacement starts": at(
        "tests/contract/test_max_memory.py::test_a_worker_over_the_limit_is_replaced_behind_a_ready_one", "its replacement starts"
    ),
    "%s has %s of memory soon after its start, as the worker before it had, and max_memory_per_worker is %s: replacing workers "
    "does not help. Raise max_memory_per_worker, or load less in the lifespan, in imports and in each call. From now on percore "
    "waits up to %g s before it replaces such a worker": at(
        "tests/contract/test_max_memory.py::test_workers_that_have_too_much_from_their_start_are_told_of_once", "does not help"
    ),
    "the memory of the workers could not be read, so max_memory_per_worker has no effect: %r": at(
        "tests/contract/test_max_memory.py::test_if_nothing_can_be_read_it_says_so_once", "has no effect"
    ),
    "max_memory_per_worker must be a whole number of bytes, such as 512 * 2**20, not …": lambda _: runners(
        max_memory_per_worker=0.5
    ),
    "max_memory_per_worker must be at least … bytes, not …: a worker that has run nothing takes nearly that much. Give the number "
    "of bytes, such as 512 * 2**20": lambda _: runners(max_memory_per_worker=512),
    "%s may begin %d more calls; its replacement starts": fake(calls, max_tasks_per_worker=3),
    "the thread_initializer failed": pool(
        lambda executor: executor.submit(jobs.echo, 1).result(), thread_initializer=refuse_thread
    ),
    "… would block the event loop; in a coroutine …": fake(lambda runner: runner.run(nested_jobs.wrong_face)),
    "… for coroutines; in a plain function, which runs on a thread, …": fake(
        lambda runner: runner.run(nested_jobs.other_wrong_face)
    ),
    "calls would wait for each other for ever: …. Let all calls take their keys in the same order, or give such calls one key "
    "that they have in common": at(
        "tests/contract/test_nested_walks.py::test_callers_that_want_each_others_keys_get_an_error",
        "calls would wait for each other for ever",
    ),
    "a plain function cannot pull an async iterable: make the map in a coroutine, or give it a sync iterable": fake(
        lambda runner: runner.run(nested_walks.async_input_in_a_thread)
    ),
    "another task or thread waits for the next result of this …": fake(lambda runner: runner.run(nested_walks.two_at_once)),
    "a … was never used: iterate it": fake(lambda runner: runner.run(nested_walks.never_used)),
    "a … of a call cannot be pickled: it belongs to that call": fake(lambda runner: runner.run(nested_walks.pickled_map)),
    "a call with the key … would wait for itself: …, which has made it directly or indirectly, holds this key until it ends. "
    "Leave the key out: nested calls belong to the key of their caller": fake(
        lambda runner: runner.options(key="a").run(nested_jobs.with_key, "a")
    ),
    "the key of a nested call is a string, a number, bytes or a tuple of these, not …": fake(
        lambda runner: runner.run(nested_jobs.with_key, frozenset())
    ),
    "percore.current_runner() works in the workers of a Runner, not in those of a LoopPoolExecutor": pool(
        lambda executor: executor.submit(percore.current_runner).result()
    ),
    "percore.current_runner() works only inside a call, not in the lifespan; in a thread that a call has started, use the "
    "runner that the call has got": fake(lambda runner: runner.run(nested_jobs.in_empty_context)),
    "the current runner cannot be pickled: it belongs to one call. Call percore.current_runner() in the other one": fake(
        lambda runner: runner.run(percore.current_runner)
    ),
    "the call that has asked percore.current_runner() for this runner has ended, and its calls end with it": fake(
        lambda runner: runner.run(nested_jobs.after_end)
    ),
    "percore.…() works only in a worker, inside a call": lambda _: percore.current_worker(),
    "a CurrentWorker cannot be changed: it says in which worker a call runs": lambda _: setattr(
        percore.CurrentWorker(0, 1, 2), "index", 1
    ),
    "this runner has no lifespan, and percore.state() needs one: percore.Runner(lifespan=...)": (
        lambda runner: runner.run(percore.state)
    ),
    "the lifespan yields …, not …": fake(lambda runner: runner.run(percore.state, str), lifespan=session),
    "percore.state takes a class, such as aiohttp.ClientSession, not …": fake(
        lambda runner: runner.run(percore.state, 5), lifespan=session
    ),
    # The runner's life
    "a Runner needs a running asyncio event loop, and there is none here: start the program with asyncio.run(main()), or with "
    'anyio.run(main, backend="asyncio"). It does not run under trio': without_loop,
    "a runner can be started once; this one is …": started_again,
    "the runner was closed while it started": closed_meanwhile,
    "the runner was closed before this call could end": cut_off,
    "runner full: max_pending=… calls are pending; submit() never waits, `await runner.run(...)` does": fake(full, max_pending=1),
    "grace must be None or a number of seconds, not …": lambda runner: runner.aclose(grace="soon"),
    "grace must be None or a number of seconds, not nan": lambda runner: runner.aclose(grace=float("nan")),
    "watch_loop() watches the running event loop, and there is none: use it inside a coroutine": (
        lambda _: asyncio.to_thread(percore.watch_loop().__enter__)
    ),
    "the event loop has been blocked for %s s:\n%s": at(
        "tests/unit/test_loop_watch.py::test_a_blocked_loop_is_reported_with_its_stack", "has been blocked for"
    ),
    "the event loop goes on, after %s s": at(
        "tests/unit/test_loop_watch.py::test_a_blocked_loop_is_reported_with_its_stack", "the event loop goes on, after"
    ),
    "the event loop was blocked for %s s, and all threads with it, by code that holds the GIL": at(
        "tests/unit/test_loop_watch.py::test_code_that_holds_the_gil_is_reported_afterwards", "all threads with it"
    ),
    "%s has read nothing for %s s: its event loop is blocked%s": at(
        "tests/contract/test_blocked_loops.py::test_a_blocked_loop_is_reported_with_its_stack_and_its_end", "is blocked by"
    ),
    "%s has read nothing for %s s: %s": at(
        "tests/contract/test_blocked_loops.py::test_a_stopped_worker_is_not_called_blocked", "its process is stopped"
    ),
    "%s goes on, after %s s": at(
        "tests/contract/test_blocked_loops.py::test_a_blocked_loop_is_reported_with_its_stack_and_its_end", "goes on, after"
    ),
    "unclosed …; use `async with`, or await aclose()": Program(
        """
        import asyncio, percore
        async def main():
            await percore.Runner(1).start()
        asyncio.run(main())
        """,
        PYTHONWARNINGS="default",
    ),
    "this runner was started in another thread; call it there, for example with asyncio.run_coroutine_threadsafe": (
        lambda runner: asyncio.to_thread(runner.submit, jobs.echo, 1)
    ),
    "this runner was started in another event loop, and its futures can only be awaited there": in_other_loop,
    "a Runner cannot be pickled: it belongs to the process and the loop that started it. Instead of giving it to a call, make the "
    "calls here, and give the results of one to the next": pickle.dumps,
    "a view of a runner cannot be pickled: it belongs to the process and the loop that started the runner. Instead of"
    " giving it to a call, make the calls here, and give the results of one to the next": (
        lambda runner: pickle.dumps(runner.options(timeout=1))
    ),
    "the event loop that this runner was started in is closed; close the runner before its loop": Program(
        """
        import asyncio, percore
        loop = asyncio.new_event_loop()
        runner = percore.Runner(1)
        loop.run_until_complete(runner.start())
        loop.close()
        runner.submit(abs, -1)
        """
    ),
    "this runner was made before a fork; make a new one in the new process": Program(
        """
        import asyncio, os, percore
        runner = percore.Runner(1)
        if not os.fork():
            asyncio.run(runner.start())
        os.wait()
        """
    ),
    "this runner was started before a fork and works only in the process that started it": at(
        "tests/contract/test_misuse.py::test_x5_after_a_fork", "before a fork"
    ),
    # Shared objects
    "the shared object was closed": lambda runner: with_shared(runner, use_closed),
    "the shared object was closed, or belongs to another program": at(
        "tests/contract/test_share.py::test_a_handle_that_a_call_has_left_behind_says_that_it_is_closed"
    ),
    "… shared objects are open, or closed but still referenced by views; this runner has room for …. Close some, "
    "drop views of closed ones, share several as one (a dict of them), or make the runner"
    " with a smaller max_message, which gives more room": fake(too_many_shared, max_message=1 << 36),
    "a shared object can be … only in the thread that its runner was started in": (
        lambda runner: with_shared(runner, lambda shared: asyncio.to_thread(shared.close))
    ),
    "a Shared can be sent only in the arguments of its own runner's calls; to share several objects, share them as one: `await "
    "runner.share((a, b))`": lambda runner: with_shared(runner, pickle.dumps),
    "a shared object can be closed only in the program that shared it, not in a worker": (
        lambda runner: with_shared(runner, lambda shared: runner.run(share_jobs.close, shared))
    ),
    "the runner was closed before the object was shared": at(
        "tests/contract/test_share.py::test_closing_the_runner_ends_it", "before the object was shared"
    ),
    # Executors
    'broken must be "worker" or "pool", not …': pool(broken="neither"),
    'mp_context must be a context, such as multiprocessing.get_context("spawn"), not …': pool(mp_context="spawn"),
    "… must be a callable": pool(initializer=5),
    "max_workers must be an integer": lambda _: executors(1.5),
    "max_workers must be greater than 0": lambda _: executors(0),
    "max_workers must be at most …": lambda _: executors(1_000_000),
    "max_tasks_per_child must be an integer": pool(max_tasks_per_child=1.5),
    "max_tasks_per_child must be >= 1": pool(max_tasks_per_child=0),
    '… cannot be used with the "fork" start method, which would fork a process that runs threads; use another mp_context': pool(
        max_tasks_per_child=1, mp_context=multiprocessing.get_context("fork")
    ),
    "chunksize must be >= 1.": pool(lambda executor: executor.map(jobs.echo, [1], chunksize=0)),
    "buffersize must be an integer or None": pool(lambda executor: executor.map(jobs.echo, [1], buffersize=1.5)),
    "buffersize must be None or > 0": pool(lambda executor: executor.map(jobs.echo, [1], buffersize=0)),
    "a LoopPoolExecutor cannot be pickled: it belongs to the process that made it. Instead of giving it to a call, make the calls "
    "here, and give the results of one to the next": pool(pickle.dumps),
    "a callback of %r raised": pool(executor_callback),
    "usage() waits for the executor's own thread, which runs this code: a callback of a future, or code that is run while an "
    "object is pickled. Call it in another thread": pool(usage_in_callback),
    "cannot schedule new futures after shutdown": pool(lambda executor: (executor.shutdown(), executor.submit(abs, -1))),
    "cannot schedule new futures after interpreter shutdown": Program(
        """
        import atexit, percore
        percore.LoopPoolExecutor(1).submit(abs, -1).result()
        atexit.register(lambda: percore.LoopPoolExecutor(1).submit(abs, -1))
        """
    ),
    "--port is a number from 0 to 65535, not …": Program(
        "import sys; sys.argv[1:] = ['--port', '70000']; from percore.demo_server import main; main()"
    ),
    # Nodes
    "listen=... needs workers on this machine: other nodes cannot have its sockets. Let each worker open a server of its own in "
    "its lifespan, and put a load balancer before them": at(
        "tests/e2e/test_nodes.py::test_what_cannot_work_on_nodes_is_refused", "needs workers on this machine"
    ),
    "harden=True closes processes of this machine, and not those that run hosts on other nodes: leave it out, and let each node "
    "run programs of one user alone": at(
        "tests/e2e/test_nodes.py::test_what_cannot_work_on_nodes_is_refused", "harden=True closes"
    ),
    # Threads
    **{
        sentence: at(f"tests/contract/test_threads_engine.py::{test}", needle)
        for sentence, test, needle in (
            (
                'engine="threads": only one thread runs at a time, because …',
                "test_one_thread_at_a_time_is_said_once",
                "only one thread runs at a time, because",
            ),
            (
                "an import has turned the GIL on again, so only one thread runs at a time from now on%s",
                "test_an_import_that_turns_the_gil_on_is_named",
                "an import has turned the GIL on again",
            ),
            (
                "no thread can be started for the worker: …",
                "test_without_a_thread_the_start_fails_and_leaves_nothing",
                "no thread can be started for the worker",
            ),
            (
                "the event loop of worker %d raised",
                "test_what_a_task_raises_in_a_worker_s_loop_ends_that_worker_alone",
                "the event loop of worker",
            ),
            (
                "the event loop of a worker raised at its end",
                "test_what_a_loop_raises_at_its_end_ends_in_the_log",
                "raised at its end",
            ),
            ("the channel of worker %d broke", "test_a_channel_that_breaks_ends_its_worker", "the channel of worker 0 broke"),
            (
                'copy must be "never" or "pickle", not …',
                "test_what_a_thread_cannot_keep_is_refused_in_words",
                'copy must be "never" or "pickle"',
            ),
            (
                "mp_context starts processes, and engine=… has none: give one of the two",
                "test_what_a_thread_cannot_keep_is_refused_in_words",
                "mp_context starts processes",
            ),
            (
                'broken="pool" ends all workers, and those of engine=… cannot be ended: use broken="worker"',
                "test_what_a_thread_cannot_keep_is_refused_in_words",
                "cannot be ended",
            ),
            (
                "engine=… is an engine for percore.Runner, not for LoopPoolExecutor",
                "test_an_engine_that_is_for_runners_alone_is_refused_by_executors",
                "is an engine for",
            ),
            (
                "a Shared that a thread has got cannot be pickled: pass it to a call of percore.current_runner()",
                "test_share_gives_the_object_itself_also_after_its_close_to_calls_that_have_it",
                "cannot be pickled",
            ),
        )
    },
    "percore top cannot show this runner: its page could not be written: %s": at(
        "tests/contract/test_publication.py::test_without_a_descriptor_there_is_no_page_and_calls_go_on", "could not be written"
    ),
    "percore top cannot show what workers on nodes use: %s": at(
        "tests/contract/test_publication.py::test_the_page_has_what_workers_on_nodes_use",
    ),
    "a number of seconds from 0.1 to 3600, not …": at(
        "tests/e2e/test_top.py::test_an_interval_that_is_none_is_refused", "a number of seconds from 0.1 to 3600"
    ),
    "a number of samples from 1 to 1000, not …": at(
        "tests/e2e/test_record.py::test_what_cannot_be_recorded_is_told", "from 1 to 1000"
    ),
    "percore.web needs prometheus-client: pip install percore[web]": at(
        "tests/e2e/test_web.py::test_without_prometheus_client_it_says_what_to_install", "pip install percore[web]"
    ),
    "dashboard(...) takes a Runner or a function that returns one, not …": at(
        "tests/e2e/test_web.py::test_what_is_no_runner_is_refused", "a Runner or a function that returns one"
    ),
    "seed must be an int, not …": at("tests/e2e/test_simulate.py::test_wrong_arguments_are_told", "seed must be an int"),
    "deaths must be a number of deaths in a second, 0 or more, not …": at(
        "tests/e2e/test_simulate.py::test_wrong_arguments_are_told", "0 or more"
    ),
    "times must be an int or None, not …": at(
        "tests/e2e/test_testing.py::test_faults_that_are_none_are_told", "times must be an int"
    ),
    "times must be at least 1, not …": at(
        "tests/e2e/test_testing.py::test_faults_that_are_none_are_told", "times must be at least 1"
    ),
    "error must be an exception or its class, not …": at(
        "tests/e2e/test_testing.py::test_faults_that_are_none_are_told", "error must be an exception"
    ),
    "this start failed on purpose, by percore.testing": at(
        "tests/e2e/test_testing.py::test_starts_fail_and_come_late", "failed on purpose"
    ),
    "the runner has workers 0 to …, and no worker …": at(
        "tests/e2e/test_testing.py::test_strikes_that_cannot_hit_are_told", "and no worker 3"
    ),
    "worker … has died, and its replacement has not started": at(
        "tests/e2e/test_testing.py::test_strikes_that_cannot_hit_are_told", "worker 0 has died"
    ),
    "no node can be used: %s": at("tests/e2e/test_nodes.py::test_calls_wait_for_a_node_when_none_is_left", "no node can be used"),
    "… must be a text, not …": at(
        "tests/unit/test_ray_engine.py::test_an_engine_is_validated_when_it_is_made", "address must be a text"
    ),
    (
        "RayEngine cannot use a Ray client (…): its program must run on a node of the cluster, which its workers' nodes can reach. "
        'Start it there, for example with `ray job submit`, and with address="auto"'
    ): at("tests/unit/test_ray_engine.py::test_an_engine_is_validated_when_it_is_made", "cannot use a Ray client"),
    'resources must be a dict, such as {"GPU": 1}, not …': at(
        "tests/unit/test_ray_engine.py::test_an_engine_is_validated_when_it_is_made", "resources must be a dict"
    ),
    'resources must be positive numbers by name, such as {"GPU": 1}, not {…: …}': at(
        "tests/unit/test_ray_engine.py::test_an_engine_is_validated_when_it_is_made", "resources must be positive"
    ),
    "resources cannot contain CPU: each host takes as many CPUs as it has workers; see workers_per_node": at(
        "tests/unit/test_ray_engine.py::test_an_engine_is_validated_when_it_is_made", "cannot contain CPU"
    ),
    'runtime_env must be a dict, such as {"working_dir": "."}, not …': at(
        "tests/unit/test_ray_engine.py::test_an_engine_is_validated_when_it_is_made", "runtime_env must be a dict"
    ),
    'RayEngine needs Ray: pip install "percore[ray]"': at(
        "tests/unit/test_ray_engine.py::test_without_ray_it_says_how_to_install_it", "RayEngine needs Ray"
    ),
    (
        "Ray at … cannot be used: …: …. A program with RayEngine runs on a node of the cluster, with the Ray and the Python of the "
        "cluster, and outside its tasks and actors"
    ): at("tests/ray/ray_cluster.py::test_no_cluster", "cannot be used: ConnectionRefusedError"),
    ("Ray at … did not answer within … s: see whether its head runs (`ray status`), and lets this machine reach all its ports"): at(
        "tests/ray/ray_cluster.py::test_no_cluster", "did not answer within"
    ),
    "Ray did not disconnect this program within %g s: it goes on in a thread": at(
        "tests/unit/test_ray_engine.py::test_a_ray_that_does_not_disconnect_stops_no_close", "did not disconnect"
    ),
    "node … cannot tell: …": at("tests/contract/test_nodes.py::test_a_host_that_cannot_read_usage_says_why", "cannot tell"),
    "node %s (%s) was lost: %s": at("tests/e2e/test_nodes.py::test_a_dead_worker_and_a_dead_host", "was lost"),
    "percore: a peer at %s was dropped: %s": at(
        "tests/unit/test_connection.py::test_a_door_lets_in_who_knows_the_token_and_drops_the_others", "was dropped: "
    ),
}


UNSAID: Final = {
    "… is left to the careful pickler": "percore catches it",
    "… objects cannot be pickled here: nothing is registered with multiprocessing": "a program removed what the library registers",
    "the thread of an executor failed": "a mistake of percore's own",
    "more than … calls of this worker wait for calls that they have made: make fewer calls at once": "thousands of waiting calls",
    "the values of the context variables take more than … bytes when they are pickled": "as in the program",
    "percore: a peer at %s was dropped: another one was proven before": "two programs with one token, at the same moment",
    "the host on node %s did not end within %g s, and was killed": "a mistake of percore's own",
    "the program is gone: %s": "a host says it in the log of its own process",
}
"""Sentences to which no use leads, and why."""


def constants_of(module: ast.Module) -> dict[str, ast.expr]:
    """The values of the module's names in capitals."""
    found = {}
    for node in module.body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0]
            if isinstance(target, ast.Name) and target.id.isupper():
                found[target.id] = node.value
    return found


def sentence_of(node: ast.expr, constants: dict[str, ast.expr]) -> str | None:
    if isinstance(node, ast.Name) and node.id in constants:
        return sentence_of(constants[node.id], constants)
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return (sentence_of(node.left, constants) or "…") + (sentence_of(node.right, constants) or "…")
    return None


def sentences_of_source() -> set[str]:
    modules = [ast.parse(path.read_text()) for path in SOURCE.rglob("*.py") if path.name not in INTERNAL]
    constants = {name: value for module in modules for name, value in constants_of(module).items()}
    found = set()
    for node in (node for module in modules for node in ast.walk(module)):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            name = called.rpartition(".")[2]
            if ERROR.search(name) or name in LOGGING or called == "super().__init__":
                found |= {text for text in (sentence_of(argument, constants) for argument in node.args) if text and " " in text}
    return found


def test_every_sentence_is_listed() -> None:
    found = sentences_of_source()
    assert found == SENTENCES.keys() | UNSAID.keys()


def test_what_other_tests_say_is_there() -> None:
    missing = {}
    for sentence, use in SENTENCES.items():
        if isinstance(use, str):
            test, *needles = use.split("\n")
            path, _, name = test.partition("::")
            text = (ROOT / path).read_text()
            if f"def {name}(" not in text or not all(needle in text for needle in needles):
                missing[sentence] = test
    assert not missing


async def told(use: Callable[[Any], Any], runner: Runner) -> list[str]:
    """What a use of the runner raises, with its causes, and what it warns of."""
    texts = []
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        try:
            await done(use(runner))
            gc.collect()
        except Exception as raised:
            error: BaseException | None = raised
            while error is not None:
                texts.append(str(error))
                error = error.__cause__ or error.__context__
    return texts + [str(warning.message) for warning in seen]


async def test_each_use_makes_percore_say_its_sentence(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "percore")
    missing = {}
    programs = [use for use in SENTENCES.values() if isinstance(use, Program)]
    said = dict(zip(programs, await asyncio.gather(*(use.said() for use in programs)), strict=True))
    for sentence, use in SENTENCES.items():
        if isinstance(use, str):
            continue
        caplog.clear()
        if isinstance(use, Program):
            texts = [said[use]]
        else:
            async with FakeRunner(1) as runner:
                texts = await told(use, runner)
        texts += [record.getMessage() for record in caplog.records]
        pattern = re.compile(re.sub(r"…|%[srd]", ".*", re.escape(sentence).replace("…", "…").replace("\\%", "%")), re.DOTALL)
        if not any(pattern.search(text) for text in texts):
            missing[sentence] = texts
    caplog.clear()
    gc.collect()  # the tracebacks of the records held memory of workers
    assert not missing
