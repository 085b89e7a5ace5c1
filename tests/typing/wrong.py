"""Mistakes that type checkers must find. Never run: `test_typing.py` has them checked.

Each ignored error is expected: an ignore comment that a checker does not need is an error itself.
"""

import percore
from percore import Map, Runner
from tests.typing.right import fetch, numbers, parse


async def names() -> None:
    percore.Runer()  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]


async def one(runner: Runner) -> None:
    await runner.run(fetch, 1)  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType, reportCallIssue]
    await runner.run(fetch, "u", width=1)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    await runner.run(fetch("u"))  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType, reportCallIssue]
    runner.options(key="h", rate=10)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    runner.set_rate("h", 10)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    percore.Rate(10)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    runner.submit(parse, "u")  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType, reportCallIssue]


async def items(runner: Runner) -> None:
    await runner.map(fetch, [1])  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType, reportCallIssue]
    await runner.map(fetch, ["u"], ["v"])  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType, reportCallIssue]
    await runner.map(parse, ["u"])  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType, reportCallIssue]
    await runner.map(fetch, [1], return_exceptions=True)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType, reportCallIssue]
    await runner.map_items(parse, ["u"])  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType, reportCallIssue]
    await runner.map(fetch, 1)  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType, reportCallIssue]
    await runner.starmap(fetch, [1])  # type: ignore[list-item]  # pyright: ignore[reportArgumentType, reportCallIssue]


async def how_many(runner: Runner) -> None:
    await runner.map(fetch, ["u"], progress="bar")  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType, reportCallIssue]
    await runner.map(fetch)  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]
    await runner.map(fetch, ["u"], [1], [2])  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType, reportCallIssue]
    await runner.map(parse, [b""], [b""])  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType, reportCallIssue]


async def a_stream(runner: Runner) -> None:
    runner.stream(fetch, "u")  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType, reportCallIssue]
    runner.stream(parse, b"")  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType, reportCallIssue]
    runner.stream(numbers, "3")  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType, reportCallIssue]
    for _ in runner.stream(numbers, 3):  # type: ignore[attr-defined]  # pyright: ignore[reportGeneralTypeIssues, reportUnknownVariableType]
        pass
    await runner.stream(numbers, 3)  # type: ignore[misc]  # pyright: ignore[reportGeneralTypeIssues]


async def keywords(runner: Runner) -> None:
    await runner.map(fetch, ["u"], chunksize=10)  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]
    await runner.map(fetch, ["u"], window="3")  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType, reportCallIssue]
    await runner.map(fetch, ["u"], key=len, ordered=1)  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType, reportCallIssue]
    await runner.map(fetch, ["u"], key=int.bit_length)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType, reportCallIssue]
    await runner.map(fetch, ["u"], [1], key=len)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType, reportCallIssue]
    Runner(max_workers=2)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    Runner(listen=[8080])  # type: ignore[list-item]  # pyright: ignore[reportArgumentType]
    Runner(harden="yes")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    Runner(max_memory_per_worker=0.5)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    Runner(engine=percore.RayEngine)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    percore.ThreadsEngine(copy="deep")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    Runner(engine="process")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    Runner(listen=8080)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


def a_map_is_asynchronous(results: Map[int]) -> None:
    for _ in results:  # type: ignore[attr-defined]  # pyright: ignore[reportGeneralTypeIssues, reportUnknownVariableType]
        pass
    list(results)  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType]
    _ = results[0]  # type: ignore[index]  # pyright: ignore[reportIndexIssue, reportUnknownVariableType]


async def errors_in_place(runner: Runner) -> list[int]:
    return await runner.map(fetch, ["u"], return_exceptions=True)  # type: ignore[return-value]  # pyright: ignore[reportReturnType]


def state() -> None:
    percore.state("session")  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType, reportCallIssue]
