"""Calls that make maps and streams."""

import asyncio
import os
import warnings
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import percore
from tests.jobs import apass_gate, pass_gate, say
from tests.nested_jobs import echo, fail, until_cancelled


def double(value: int) -> int:
    return 2 * value


async def adouble(value: int) -> int:
    await asyncio.sleep(0)
    return 2 * value


def add(one: int, other: int) -> int:
    return one + other


def fail_at(value: int, bad: int) -> int:
    if value == bad:
        raise ValueError(f"alas {value}")
    return value


def count(numbers: int) -> Iterator[int]:
    yield from range(numbers)


async def acount(numbers: int) -> AsyncIterator[int]:
    for number in range(numbers):
        yield number


def for_ever() -> Iterator[int]:
    number = 0
    while True:
        yield number
        number += 1


async def amap(fn: Any, *inputs: Any, **options: Any) -> list[Any]:
    return [value async for value in percore.current_runner().map(fn, *inputs, **options)]


async def await_map(fn: Any, *inputs: Any, **options: Any) -> list[Any]:
    return await percore.current_runner().map(fn, *inputs, **options)


def map_(fn: Any, *inputs: Any, **options: Any) -> list[Any]:
    return list(percore.current_runner().map(fn, *inputs, **options))


async def aother_maps() -> list[Any]:
    runner = percore.current_runner()
    return [
        [pair async for pair in runner.map_items(double, [1, 2])],
        await runner.map_items(add, [1, 2], [3, 4], return_exceptions=True),
        await runner.starmap(add, [(1, 2), (3, 4)]),
        await runner.map(adouble, acount(5)),
        await runner.map(add, acount(5), [1, 2, 3]),
        sorted(await runner.map(double, range(20), ordered=False)),
        await runner.map(double, []),
        await runner.map(echo, range(4), key=str),
    ]


def other_maps() -> list[Any]:
    runner = percore.current_runner()
    return [
        list(runner.map_items(double, [1, 2])),
        list(runner.map_items(add, [1, 2], [3, 4], return_exceptions=True)),
        list(runner.starmap(add, [(1, 2), (3, 4)])),
        list(runner.map(adouble, range(5))),
        list(runner.map(add, count(5), [1, 2, 3])),
        sorted(runner.map(double, range(20), ordered=False)),
        list(runner.map(double, [])),
        list(runner.map(echo, range(4), key=str)),
    ]


async def afails(bad: int, *, return_exceptions: bool) -> list[Any]:
    """The results up to the first error, then the error's text."""
    found: list[Any] = []
    try:
        async for value in percore.current_runner().starmap(
            fail_at, ((number, bad) for number in range(6)), return_exceptions=return_exceptions
        ):
            found.append(str(value))  # noqa: PERF401  # up to the error
    except ValueError as error:
        found.append(error)
    return list(map(str, found))


def fails(bad: int, *, return_exceptions: bool) -> list[Any]:
    found: list[Any] = []
    try:
        for value in percore.current_runner().starmap(
            fail_at, ((number, bad) for number in range(6)), return_exceptions=return_exceptions
        ):
            found.append(str(value))  # noqa: PERF401  # up to the error
    except ValueError as error:
        found.append(error)
    return list(map(str, found))


def broken_input() -> Iterator[int]:
    yield 1
    yield 2
    raise OSError("no more")


async def abroken_input() -> AsyncIterator[int]:
    yield 1
    yield 2
    raise OSError("no more")


async def of_broken_inputs() -> list[Any]:
    runner, told = percore.current_runner(), []
    for source in (broken_input(), abroken_input()):
        results: list[Any] = []
        try:
            async for value in runner.map(double, source):
                results.append(value)  # noqa: PERF401  # up to the error
        except OSError as error:
            results.append(str(error))
        told.append(results)
    return told


def of_a_broken_input() -> list[Any]:
    results: list[Any] = []
    try:
        results.extend(percore.current_runner().map(double, broken_input()))  # up to the error
    except OSError as error:
        results.append(str(error))
    return results


class Counted:
    """An endless input that knows how much was pulled."""

    def __init__(self) -> None:
        self.pulled = 0
        self.is_closed = False

    def items(self) -> Iterator[int]:
        try:
            while True:
                self.pulled += 1
                yield self.pulled
        finally:
            self.is_closed = True

    async def aitems(self) -> AsyncIterator[int]:
        try:
            while True:
                self.pulled += 1
                yield self.pulled
        finally:
            self.is_closed = True


async def most_in_window(window: int, *, is_async: bool) -> tuple[int, bool]:
    """How many items of an endless input were ever pulled and not returned, and whether it was closed."""
    counted, most, taken = Counted(), 0, 0
    async with percore.current_runner().map(double, counted.aitems() if is_async else counted.items(), window=window) as results:
        async for _ in results:
            most = max(most, counted.pulled - taken)
            taken += 1
            if taken == 100:
                break
    return most, counted.is_closed


def most_in_window_of_a_thread(window: int) -> tuple[int, bool]:
    counted, most, taken = Counted(), 0, 0
    with percore.current_runner().map(double, counted.items(), window=window) as results:
        for _ in results:
            most = max(most, counted.pulled - taken)
            taken += 1
            if taken == 100:
                break
    return most, counted.is_closed


async def amap_down(depth: int) -> int:
    """Go down in maps, of two items each."""
    if not depth:
        return 1
    return sum(await percore.current_runner().map(amap_down, [depth - 1] * 2))


def map_down(depth: int) -> int:
    return sum(percore.current_runner().map(map_down, [depth - 1] * 2)) if depth else 1


async def adown_with(depth: int, data: bytes) -> int:
    """Go down with arguments that lie in a slot."""
    result: Any = await percore.current_runner().run(adown_with, depth - 1, data) if depth else len(data)
    return int(result)


def map_over_slow_input(log: str, gate: str) -> list[Any]:
    """Map over an input whose second item comes only after the gate was opened."""

    def rows() -> Iterator[tuple[str, str]]:
        yield log, "first"
        pass_gate(gate)
        yield log, "second"

    return list(percore.current_runner().starmap(say, rows()))


async def closed_by_its_key() -> list[Any]:
    """A map whose function of keys closes it. The call of that item would never end."""
    results: percore.NestedMap[Any]

    def key(_number: int) -> str:
        results.close()
        return "k"

    results = percore.current_runner().map(until_ended, [1, 2], key=key)
    return [value async for value in results]


async def amap_over_unequal_inputs(log: str, gate: str) -> list[Any]:
    """Map over two inputs, of which the longer one waits for the gate when it is closed."""

    async def short() -> AsyncIterator[int]:
        yield 1

    async def long() -> AsyncIterator[int]:
        try:
            yield 10
            yield 20
        finally:
            try:
                await apass_gate(gate)
            except asyncio.CancelledError:
                say(log, "cut off")
            else:
                say(log, "closed")

    return [value async for value in percore.current_runner().map(add, long(), short())]


def _waiting(log: str, gate: str) -> Iterator[tuple[str, str]]:
    try:
        yield log, gate
        yield log, gate
    finally:
        say(log, "input closed")


async def _awaiting(log: str, gate: str) -> AsyncIterator[tuple[str, str]]:
    try:
        yield log, gate
        yield log, gate
        await asyncio.get_running_loop().create_future()
    finally:
        say(log, "input closed")


def _waiting_map(log: str, gate: str, source: str) -> percore.NestedMap[Any]:
    inputs: Any = _waiting if source == "sync" else _awaiting
    return percore.current_runner().starmap(until_cancelled, inputs(log, gate), window=2)


async def leave_map(log: str, gate: str, other_gate: str, source: str) -> str:
    """Leave a map behind, whose first result a task waits for."""
    results = _waiting_map(log, gate, source)
    first = asyncio.ensure_future(anext(results))
    await apass_gate(other_gate)
    assert not first.done()
    return "left"


async def amap_of_waiting(log: str, gate: str, source: str) -> list[Any]:
    return await _waiting_map(log, gate, source)


def one_of_three(path: str, number: int, _key: str) -> str:
    return die_once(path) if number == 2 else str(number)


def map_with_death(path: str, keys: list[str]) -> list[Any]:
    """Results, or the names of errors, of three items with these keys. The second one dies."""
    runner = percore.current_runner().options(retries=0)
    results = list(
        runner.starmap(
            one_of_three, [(path, number, key) for number, key in enumerate(keys, 1)], key=key_of, return_exceptions=True
        )
    )
    return [result if isinstance(result, str) else (type(result).__name__, str(result)) for result in results]


def map_with_retries(path: str, keys: list[str]) -> list[Any]:
    runner = percore.current_runner().options(retries=3)
    return list(runner.starmap(one_of_three, [(path, number, key) for number, key in enumerate(keys, 1)], key=key_of))


def index() -> int:
    return percore.current_worker().index


def key_of(_path: str, _number: int, key: str) -> str:
    return key


# Streams


async def astream(fn: Any, *args: Any, prefetch: int = 16, key: str | None = None) -> list[Any]:
    return [item async for item in percore.current_runner().options(prefetch=prefetch, key=key).stream(fn, *args)]


def stream(fn: Any, *args: Any, prefetch: int = 16, key: str | None = None) -> list[Any]:
    return list(percore.current_runner().options(prefetch=prefetch, key=key).stream(fn, *args))


async def astream_and_calls(fn: Any, prefetch: int) -> list[Any]:
    """Make a call for each item, while the generator waits."""
    runner = percore.current_runner()
    return [await runner.run(adouble, item) async for item in runner.options(prefetch=prefetch).stream(fn, 10)]


def stream_and_calls(fn: Any, prefetch: int) -> list[Any]:
    runner = percore.current_runner()
    return [runner.run_sync(double, item) for item in runner.options(prefetch=prefetch).stream(fn, 10)]


async def apass_on(depth: int, numbers: int) -> AsyncIterator[int]:
    """A stream of a stream of a stream."""
    if depth:
        async for item in percore.current_runner().options(prefetch=1).stream(pass_on, depth - 1, numbers):
            yield item + 1
    else:
        for number in range(numbers):
            yield number


def pass_on(depth: int, numbers: int) -> Iterator[int]:
    if depth:
        for item in percore.current_runner().options(prefetch=1).stream(apass_on, depth - 1, numbers):
            yield item + 1
    else:
        yield from range(numbers)


def told(log: str, numbers: int) -> Iterator[int]:
    """Tell of each item, and of the end."""
    try:
        for number in range(numbers):
            say(log, str(number))
            yield number
    finally:
        say(log, "closed")


async def atold(log: str, numbers: int) -> AsyncIterator[int]:
    try:
        for number in range(numbers):
            say(log, str(number))
            yield number
    finally:
        say(log, "closed")


async def atake(fn: Any, log: str, gate: str, prefetch: int) -> None:
    """Take one item, and wait."""
    async with percore.current_runner().options(prefetch=prefetch).stream(fn, log, 1000) as items:
        async for _ in items:
            await apass_gate(gate)
            break
    say(log, "over")


def take(fn: Any, log: str, gate: str, prefetch: int) -> None:
    with percore.current_runner().options(prefetch=prefetch).stream(fn, log, 1000) as items:
        for _ in items:
            pass_gate(gate)
            break
    say(log, "over")


async def adrop(fn: Any, log: str) -> str:
    """Drop a stream."""
    async for _ in percore.current_runner().options(prefetch=2).stream(fn, log, 1000):
        break
    return str(await percore.current_runner().run(echo, "dropped"))


def drop(fn: Any, log: str) -> str:
    for _ in percore.current_runner().options(prefetch=2).stream(fn, log, 1000):
        break
    return str(percore.current_runner().run_sync(echo, "dropped"))


def yield_then_fail() -> Iterator[int]:
    yield 1
    fail("alas")


def yield_then_die() -> Iterator[int]:
    yield 1
    os.kill(os.getpid(), 9)


def fail_at_close() -> Iterator[int]:
    try:
        while True:
            yield 1
    finally:
        fail("at the close")


async def aclose_failing() -> str:
    stream = percore.current_runner().stream(fail_at_close)
    await anext(stream)
    try:
        await stream.aclose()
    except ValueError as error:
        return str(error)
    return "nothing"


async def asum_of_large(numbers: int) -> int:
    return sum([len(item) async for item in percore.current_runner().options(prefetch=4).stream(large, numbers)])


def sum_of_large(numbers: int) -> int:
    return sum(len(item) for item in percore.current_runner().options(prefetch=4).stream(large, numbers))


def large(numbers: int) -> Iterator[bytes]:
    for number in range(numbers):
        yield bytes([number % 256]) * (1_000_000 if number % 3 else 10)


def waits_in_a_generator(log: str, gate: str) -> Iterator[int]:
    runner = percore.current_runner()
    try:
        yield 1
        runner.run_sync(until_cancelled, log, gate)
    finally:
        runner.run_sync(say, log, "cleaned up")


async def awaits_in_a_generator(log: str, gate: str) -> AsyncIterator[int]:
    runner = percore.current_runner()
    try:
        yield 1
        await runner.run(until_cancelled, log, gate)
    finally:
        await runner.run(say, log, "cleaned up")


def _two(stream_key: str | None, call_key: str | None, prefetch: int) -> tuple[percore.CurrentRunner, percore.CurrentRunner]:
    runner = percore.current_runner()
    of_stream = runner.options(prefetch=prefetch) if stream_key is None else runner.options(prefetch=prefetch, key=stream_key)
    return of_stream, runner if call_key is None else runner.options(key=call_key)


async def astream_and_key(stream_key: str | None, call_key: str | None, prefetch: int) -> list[int]:
    """Make a call for each item, with this key."""
    of_stream, of_calls = _two(stream_key, call_key, prefetch)
    return [await of_calls.run(double, item) async for item in of_stream.stream(count, 5)]


def stream_and_key(stream_key: str | None, call_key: str | None, prefetch: int) -> list[int]:
    of_stream, of_calls = _two(stream_key, call_key, prefetch)
    return [of_calls.run_sync(double, item) for item in of_stream.stream(count, 5)]


# Retries


def die_once(path: str) -> str:
    """Die at the first attempt."""
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return "alive"
    os.kill(os.getpid(), 9)
    return ""


def fail_until(path: str, attempts: int) -> int:
    """Fail so often."""
    with open(path, "a") as file:
        file.write("x")
        file.flush()
        if file.tell() < attempts:
            raise ConnectionError(file.tell())
        return file.tell()


async def with_options(options: dict[str, Any], fn: Any, *args: Any) -> Any:
    return await percore.current_runner().options(**options).run(fn, *args)


def is_connection(error: BaseException) -> bool:
    return isinstance(error, ConnectionError)


def no_delay(_failed: int) -> float:
    return 0.0


Fn = Callable[..., Any]


async def refused(options: dict[str, Any], verb: str) -> None:
    runner = percore.current_runner().options(**options)
    if verb == "stream":
        _ = runner.stream(count, 1)
    elif verb == "map":
        _ = runner.map(echo, [1])
    else:
        await runner.run(echo, 1)


def calls_in_a_generator(numbers: int) -> Iterator[int]:
    for number in range(numbers):
        yield percore.current_runner().run_sync(double, number)


async def acalls_in_a_generator(numbers: int) -> AsyncIterator[int]:
    for number in range(numbers):
        yield await percore.current_runner().run(double, number)


async def take_key(log: str, gate: str, wanted: str) -> Any:
    say(log, "begun")
    await apass_gate(gate)
    return await percore.current_runner().options(key=wanted).run(echo, "x")


async def for_in_a_coroutine() -> list[int]:
    return list(percore.current_runner().map(double, [1]))


def async_input_in_a_thread() -> list[int]:
    return list(percore.current_runner().map(double, acount(3)))


async def used_twice() -> list[int]:
    results = percore.current_runner().map(double, [1])
    await results
    return await results


async def pickled_map() -> Any:
    results = percore.current_runner().map(double, [1])
    await results.aclose()
    return results


async def two_at_once() -> None:
    results = percore.current_runner().map(until_ended, [1])
    first = asyncio.ensure_future(anext(results))
    await asyncio.sleep(0)
    try:
        await anext(results)
    finally:
        first.cancel()
        await asyncio.wait([first])


async def until_ended(_: int) -> None:
    await asyncio.get_running_loop().create_future()


async def never_used() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        results = percore.current_runner().map(double, [1])
        try:
            results.__del__()
        except RuntimeWarning as error:
            raise RuntimeError(str(error)) from None
