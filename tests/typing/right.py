"""Programs that type checkers must accept, and the types that they must see. Never run: `test_typing.py` has them checked."""

import abc
import functools
import json
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from typing import Any, Protocol, assert_type

import percore
from percore import Map, Runner, Shared, Stream


class Session(abc.ABC):
    @abc.abstractmethod
    def get(self, url: str) -> bytes: ...


class Source(Protocol):
    def read(self) -> bytes: ...


class Adder:
    def __call__(self, left: int, right: int = 0) -> int:
        return left + right

    async def add(self, left: int) -> int:
        return left


async def fetch(url: str, depth: int = 0) -> int:
    return len(url) + depth


def parse(page: bytes) -> str | None:
    return page.decode() or None


async def five(a: int, b: str, c: bytes, d: float, e: list[int]) -> str:
    return f"{a}{b}{c!r}{d}{e}"


def six(a: int, b: int, c: int, d: int, e: int, f: int) -> float:
    return a + b + c + d + e + f


def untyped(text: Any) -> Any:
    return text


async def urls() -> AsyncIterator[str]:
    yield "http://localhost"


def host_of(url: str, depth: int = 0) -> str:
    return url[depth:]


async def one(runner: Runner, adder: Adder) -> None:
    assert_type(await runner.run(fetch, "u", depth=1), int)
    assert_type(await runner.run(parse, b""), str | None)
    assert_type(await runner.submit(fetch, "u"), int)
    assert_type(await runner.submit(adder, 1), int)
    assert_type(await runner.options(key="h", retries=1).run(fetch, "u"), int)
    assert_type(await runner.options(key="h", rate=percore.Rate(10, per=1)).run(fetch, "u"), int)
    runner.set_rate("h", percore.Rate(n=1, per=0.5, burst=1), after=2)
    runner.set_rate(("h", 80), None)
    assert_type(await runner.broadcast(fetch, "u"), list[int])
    await runner.reload()
    await runner.resize(4)


async def many(runner: Runner, flag: bool) -> None:
    assert_type(await runner.map(fetch, ["u"]), list[int])
    assert_type(await runner.map(fetch, ["u"], [1]), list[int])
    assert_type(await runner.map(fetch, urls(), range(9), window=3, ordered=False), list[int])
    assert_type(await runner.map(parse, [b""]).collect(), list[str | None])
    assert_type(await runner.map(five, [1], ["b"], [b"c"], [1.5], [[1]]), list[str])
    assert_type(await runner.map(six, [1], [2], [3], [4], [5], [6]), list[float])
    assert_type(await runner.map(six, [1], [2], [3], [4], [5], [6], return_exceptions=True), list[float | BaseException])
    assert_type(await runner.map(fetch, ["u"], return_exceptions=True), list[int | BaseException])
    assert_type(await runner.map(parse, [b""], return_exceptions=True), list[str | BaseException | None])
    assert_type(await runner.map(fetch, ["u"], return_exceptions=False), list[int])
    assert_type(await runner.map(fetch, ["u"], return_exceptions=flag), list[int | BaseException])
    assert_type(await runner.map(fetch, percore.threaded(["u"])), list[int])
    assert_type(await runner.map(fetch, ["u"], progress=True), list[int])
    assert_type(await runner.map_items(parse, [b""], progress="text"), list[tuple[bytes, str | None]])
    assert_type(await runner.starmap(fetch, [["u", 1]], progress=lambda progress: progress.eta), list[int])
    async for size in runner.map(fetch, ["u"]):
        assert_type(size, int)
    async with runner.map(fetch, ["u"]) as sizes:
        assert_type(await anext(sizes), int)
        assert_type(aiter(sizes), AsyncIterator[int])


async def functions_of_every_kind(runner: Runner, adder: Adder) -> None:
    assert_type(await runner.map(len, ["u"]), list[int])
    assert_type(await runner.map(int, ["1"]), list[int])
    assert_type(await runner.map(adder, [1]), list[int])
    assert_type(await runner.map(adder, [1], [2]), list[int])
    assert_type(await runner.map(adder.add, [1]), list[int])
    assert_type(await runner.map(functools.partial(fetch, depth=1), ["u"]), list[int])
    assert_type(await runner.map(lambda value: value * 2, [1]), list[int])
    assert_type(await runner.map(fetch, runner.map(str, [1])), list[int])


async def without_types(runner: Runner, inputs: list[Any], function: Callable[..., int]) -> None:
    assert_type(await runner.map(json.loads, ["1"]), list[Any])
    assert_type(await runner.map(untyped, ["1"]), list[Any])
    assert_type(await runner.map(fetch, inputs), list[int])
    assert_type(await runner.map(function, [1], ["2"]), list[int])


async def keys(runner: Runner) -> None:
    await runner.map(fetch, ["u"], key=host_of)
    await runner.map(fetch, ["u"], [1], key=host_of)
    await runner.map(fetch, ["u"], key=lambda url: url.partition(":")[0])
    await runner.map(fetch, ["u"], key=None)
    await runner.starmap(fetch, [("u", 1)], key=lambda *row: row[0])


async def items(runner: Runner) -> None:
    assert_type(await runner.map_items(fetch, ["u"]), list[tuple[str, int]])
    assert_type(await runner.map_items(len, ["u"]), list[tuple[str, int]])  # the item's type, not the parameter's
    assert_type(await runner.map_items(fetch, ["u"], return_exceptions=True), list[tuple[str, int | BaseException]])
    assert_type(await runner.map_items(fetch, ["u"], [1]), list[tuple[tuple[str, int], int]])
    assert_type(await runner.map_items(six, [1], [2], [3], [4], [5], [6]), list[tuple[tuple[Any, ...], float]])


async def rows(runner: Runner) -> None:
    assert_type(await runner.starmap(fetch, [("u", 1)]), list[int])
    assert_type(await runner.starmap(fetch, [["u", 1]], return_exceptions=True), list[int | BaseException])
    assert_type(
        await runner.options(timeout=1, queue_timeout=2.5, hard_timeout=3).starmap(six, ((1,) * 6 for _ in range(3))), list[float]
    )


def numbers(count: int) -> Iterator[int]:
    yield from range(count)


async def anumbers(count: int, start: int = 0) -> AsyncGenerator[str]:
    for number in range(start, count):
        yield str(number)


async def a_stream(runner: Runner) -> None:
    assert_type(runner.stream(numbers, 3), Stream[int])
    assert_type(runner.stream(anumbers, 3, start=1), Stream[str])
    assert_type(runner.stream(functools.partial(numbers, 3)), Stream[int])
    assert_type(runner.options(prefetch=1, key="key").stream(numbers, count=3), Stream[int])
    async for number in runner.stream(numbers, 3):
        assert_type(number, int)
    async with runner.stream(anumbers, 3) as texts:
        assert_type(await anext(texts), str)
        assert_type(aiter(texts), AsyncIterator[str])
        await texts.aclose()
    assert_type(await runner.map(str, runner.stream(numbers, 3)), list[str])


def covariant(sizes: Map[bool], shared: Shared[bool]) -> tuple[Map[int], Shared[int]]:
    return sizes, shared


async def share(runner: Runner) -> None:
    table = await runner.share({"a": 1})
    assert_type(table, Shared[dict[str, int]])
    assert_type(table.value, dict[str, int])


def state() -> None:
    assert_type(percore.state(), Any)
    assert_type(percore.state(dict), dict[Any, Any])
    assert_type(percore.state(dict[str, int]), dict[str, int])
    assert_type(percore.state(Session), Session)
    assert_type(percore.state(Source), Source)


def an_executor(executor: percore.LoopPoolExecutor) -> None:
    assert_type(executor.submit(fetch, "u").result(), int)
    assert_type(executor.submit(parse, b"").result(), str | None)
    assert_type(executor.map(fetch, ["u"]), Iterator[int])
    assert_type(executor.statistics(), percore.Statistics)
    assert_type(executor.usage(), percore.Usage)


async def sockets(own: socket.socket) -> None:
    async with Runner(2, listen=["127.0.0.1:8080", own]) as runner:
        assert_type(runner.addresses, tuple[str, ...])
    Runner(listen=("unix:/run/app.sock",))
    Runner(max_memory_per_worker=512 * 2**20)
    Runner(harden=True)
    percore.LoopPoolExecutor(harden=True)
    Runner(engine="processes")
    Runner(engine=None)
    Runner(engine="auto")
    Runner(engine=percore.ThreadsEngine(copy="pickle"))
    percore.LoopPoolExecutor(engine="threads")
    Runner(engine=percore.RayEngine("10.0.0.1:6379", workers_per_node=8, resources={"GPU": 1}, lost_after=5))
    assert_type(percore.current_worker().sockets, tuple[socket.socket, ...])


async def inside_a_call() -> None:
    runner = percore.current_runner()
    assert_type(await runner.run(fetch, "u"), int)
    assert_type(await runner.options(key="a", timeout=1).run(parse, b""), str | None)
    assert_type(await runner.submit(fetch, "u"), int)
    assert_type(runner.run_sync(fetch, "u"), int)
    assert_type(await runner.map(fetch, ["u"]), list[int])
    assert_type(list(runner.map(parse, [b""])), list[str | None])
    assert_type(runner.stream(anumbers, 1), percore.NestedStream[str])
