"""Lifespans that fail, hang or work on in the background, and calls that go with them."""

import asyncio
import atexit
import os
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from contextvars import Context
from typing import Any

import percore
from tests.jobs import BadText, apass_gate, await_, say


async def a_moment() -> None:
    """A call that waits for somebody else, so that a load of such calls leaves CPU time to those that start workers."""
    await asyncio.sleep(0.01)


@asynccontextmanager
async def fails_and_stays(log: str) -> AsyncIterator[None]:
    """The second worker fails to start, and its process does not end by itself."""
    if percore.current_worker().generation == 2:
        atexit.register(threading.Event().wait)
        say(log, "fails")
        raise ConnectionError("no server")
    yield


@asynccontextmanager
async def fails_without_words() -> AsyncIterator[None]:
    """Fail with an error that has no text, not even for its repr()."""
    raise BadText
    yield


@asynccontextmanager
async def stays_at_its_end(log: str) -> AsyncIterator[None]:
    """The first worker never gets through its exit."""
    yield
    if percore.current_worker().generation == 1:
        say(log, "leaves")
        await asyncio.Event().wait()


@asynccontextmanager
async def stays_at_its_start(log: str) -> AsyncIterator[None]:
    """The second worker never gets ready."""
    if percore.current_worker().generation == 2:
        say(log, "enters")
        await asyncio.Event().wait()
    yield


@asynccontextmanager
async def second_waits(log: str, gate: str) -> AsyncIterator[None]:
    """The second worker is ready once the gate is open."""
    if percore.current_worker().generation == 2:
        say(log, "enters")
        await apass_gate(gate)
    yield


# Background work of lifespans


class Writer:
    """Writes into the log what calls put, but not before the lifespan is left."""

    def __init__(self, log: str) -> None:
        self.items: asyncio.Queue[Any] = asyncio.Queue()
        self.is_leaving = asyncio.Event()
        self._log = log

    async def write(self) -> None:
        await self.is_leaving.wait()
        while True:
            item = await self.items.get()
            await asyncio.sleep(0)
            say(self._log, f"wrote {item}")
            self.items.task_done()

    async def drain(self) -> None:
        self.is_leaving.set()
        await self.items.join()


@asynccontextmanager
async def with_task(log: str) -> AsyncIterator[Writer]:
    writer = Writer(log)
    task = asyncio.create_task(writer.write())
    yield writer
    await writer.drain()
    task.cancel()


@asynccontextmanager
async def with_tasks_of_unknown_context(log: str) -> AsyncIterator[Writer]:
    """Its task runs in an empty context; and that one makes another, from a thread of its own."""
    writer, loop = Writer(log), asyncio.get_running_loop()
    tasks: list[Any] = []

    def start() -> None:
        tasks.append(asyncio.run_coroutine_threadsafe(writer.write(), loop))

    async def start_in_thread() -> None:
        thread = threading.Thread(target=start)
        thread.start()
        thread.join()

    await asyncio.create_task(start_in_thread(), context=Context())
    yield writer
    await writer.drain()
    tasks[0].cancel()


@asynccontextmanager
async def with_task_group(log: str) -> AsyncIterator[Writer]:
    writer = Writer(log)
    async with asyncio.TaskGroup() as group:
        task = group.create_task(writer.write())
        yield writer
        await writer.drain()
        task.cancel()
    say(log, "left")


@asynccontextmanager
async def with_anyio_group(log: str) -> AsyncIterator[Writer]:
    import anyio

    writer = Writer(log)
    async with anyio.create_task_group() as group:
        group.start_soon(writer.write)
        yield writer
        await writer.drain()
        group.cancel_scope.cancel()
    say(log, "left")


class Session:
    """Talks to a server, both in tasks of anyio: it pings while it is open, and says goodbye in order."""

    def __init__(self, log: str) -> None:
        import anyio

        self._log = log
        self._anyio = anyio
        self._requests, self._received = anyio.create_memory_object_stream[str](8)
        self._answers: dict[str, asyncio.Future[None]] = {}

    async def __aenter__(self) -> "Session":
        self._group = self._anyio.create_task_group()
        await self._group.__aenter__()
        self._group.start_soon(self._serve)
        self._group.start_soon(self._ping)
        return self

    async def __aexit__(self, *error: Any) -> bool | None:
        await self.request("bye")
        say(self._log, "wrote 0")
        self._group.cancel_scope.cancel()
        try:
            return await self._group.__aexit__(*error)
        finally:
            self._requests.close()
            self._received.close()
            say(self._log, "left")

    async def request(self, text: str) -> None:
        self._answers[text] = answer = asyncio.get_running_loop().create_future()
        await self._requests.send(text)
        await answer

    async def _serve(self) -> None:
        async for text in self._received:
            self._answers.pop(text).set_result(None)

    async def _ping(self) -> None:
        while True:
            await self.request("ping")
            await self._anyio.sleep(0.01)


@asynccontextmanager
async def with_session(log: str) -> AsyncIterator[Session]:
    async with Session(log) as session:
        yield session


async def request(text: str) -> None:
    await percore.state(Session).request(text)


async def put(item: Any) -> None:
    percore.state(Writer).items.put_nowait(item)


@asynccontextmanager
async def with_loop(log: str) -> AsyncIterator[asyncio.AbstractEventLoop]:
    yield asyncio.get_running_loop()
    say(log, "left")


def leave_task_from_thread(log: str, gate: str) -> None:
    """A plain function leaves a task in the loop."""
    asyncio.run_coroutine_threadsafe(await_(log, gate, "task"), percore.state())


# Lifespans that fail while calls run


async def _fail_at(gate: str) -> None:
    await apass_gate(gate)
    raise ConnectionError("the token server is gone")


@asynccontextmanager
async def fails_in_group(log: str, gate: str) -> AsyncIterator[None]:
    """The first worker's task group fails when the gate is open."""
    async with asyncio.TaskGroup() as group:
        if percore.current_worker().generation == 1:
            group.create_task(_fail_at(gate))
        yield
    say(log, "left in order")


@asynccontextmanager
async def fails_in_anyio_group(log: str, gate: str) -> AsyncIterator[None]:
    import anyio

    async with anyio.create_task_group() as group:
        if percore.current_worker().generation == 1:
            group.start_soon(_fail_at, gate)
        yield
    say(log, "left in order")


@asynccontextmanager
async def times_out(log: str, gate: str) -> AsyncIterator[None]:
    """The first worker's lifespan has a time limit, which is over when the gate is open."""
    async with asyncio.timeout(None) as limit:
        task = asyncio.create_task(_expire(limit, gate)) if percore.current_worker().generation == 1 else None
        yield
        assert task is None
    say(log, "left in order")


async def _expire(limit: asyncio.Timeout, gate: str) -> None:
    await apass_gate(gate)
    limit.reschedule(asyncio.get_running_loop().time())


@asynccontextmanager
async def always_fails() -> AsyncIterator[None]:
    """Ready, and lost at once, but for the first worker, which is lost when it is killed."""
    async with asyncio.TaskGroup() as group:
        if percore.current_worker().generation > 1:
            group.create_task(_fail())
        yield


async def _fail() -> None:
    raise ConnectionError("the token server is gone")


async def cancel_all() -> None:
    """Cancel all tasks of the loop, as the ends of programs do."""
    for task in asyncio.all_tasks():
        task.cancel()
    await asyncio.sleep(0)


async def cancel_all_others() -> str:
    """As above, and wait for their ends."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return "alive"


def generation(_: object = None) -> int:
    """Of the worker: with one slot, its name."""
    return percore.current_worker().generation


async def ageneration(_: object = None) -> int:
    return percore.current_worker().generation


@contextmanager
def fails_where(path: str) -> Iterator[None]:
    """Workers of a later generation than the first cannot start while the file exists."""
    if percore.current_worker().generation > 1 and os.path.exists(path):
        raise ConnectionError("the database is away")
    yield None


@contextmanager
def only_the_first(path: str) -> Iterator[None]:
    """Only worker 0 can start while the file exists."""
    if percore.current_worker().index and os.path.exists(path):
        raise ConnectionError("the database is full")
    yield None
