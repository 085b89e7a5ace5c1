"""Mistakes get a sentence, at the line that makes them."""

import asyncio
import gc
import inspect
import os
import pickle
import threading
import warnings
from collections.abc import Callable
from typing import Any, cast

import pytest

import percore
from percore import Runner
from tests import jobs
from tests.contract.conftest import MakeRunner
from tests.contract.pipes import Gate, Log

USES: dict[str, Callable[[Runner], object]] = {
    "submit": lambda runner: runner.submit(jobs.echo, 1),
    "map": lambda runner: runner.map(jobs.echo, [1]),
    "statistics": lambda runner: runner.statistics(),
}
ELSEWHERE = {name: use for name, use in USES.items() if name != "statistics"}
"""Those that belong to the runner's loop and thread."""
every_use = pytest.mark.parametrize("use", USES)


@every_use
async def test_x4_before_start(make: MakeRunner, use: str) -> None:
    with pytest.raises(percore.RunnerClosed, match="not started"):
        USES[use](make())


async def test_x4_run_before_start(make: MakeRunner) -> None:
    with pytest.raises(percore.RunnerClosed, match="async with"):
        await make().run(jobs.echo)


@every_use
async def test_x4_after_close(make: MakeRunner, use: str) -> None:
    async with make() as runner:
        pass
    with pytest.raises(percore.RunnerClosed, match="closed"):
        USES[use](runner)
    with pytest.raises(percore.RunnerClosed, match="closed"):
        await runner.run(jobs.echo)


async def test_x4_a_runner_is_started_once(make: MakeRunner) -> None:
    async with make() as runner:
        with pytest.raises(RuntimeError, match="started once"):
            await runner.start()
    with pytest.raises(RuntimeError, match="started once"):
        await runner.start()


def test_x4_without_asyncio(make: MakeRunner) -> None:
    """As trio does: it drives a coroutine without a loop of asyncio."""
    runner = make()
    for starting in (runner.start(), runner.__aenter__()):
        with pytest.raises(
            RuntimeError, match=r"needs a running asyncio event loop.*anyio\.run\(main, backend=\"asyncio\"\).*trio"
        ):
            starting.send(None)


async def test_a_call_names_its_function(make: MakeRunner, log: Log, gate: Gate) -> None:
    async with make(1) as runner:
        held = runner.submit(jobs.await_, log.path, gate.path, 0)
        assert repr(held).startswith("<Call of await_ pending")
        await log.next()
        gate.open()
        await held
        assert repr(held).startswith("<Call of await_ finished result=")
        failing: asyncio.Future[Any] = runner.submit(jobs.fail, ValueError("it failed"))
        await asyncio.wait([failing])
        assert repr(failing).startswith("<Call of fail finished exception=")
        failing.exception()


async def test_an_exception_that_nobody_retrieves_names_the_function(make: MakeRunner) -> None:
    told: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: told.append(context))
    async with make(1) as runner:
        await asyncio.wait([runner.submit(jobs.fail, ValueError("it failed"))])
    gc.collect()
    (context,) = told
    assert context["message"] == "Call exception was never retrieved"
    assert repr(context["future"]).startswith("<Call of fail finished exception=")


def test_x4_from_another_loop(make: MakeRunner) -> None:
    ours, other = asyncio.new_event_loop(), asyncio.new_event_loop()
    runner = make()
    ours.run_until_complete(runner.start())

    async def use() -> None:
        for call in ELSEWHERE.values():
            with pytest.raises(RuntimeError, match="another event loop"):
                call(runner)
        with pytest.raises(RuntimeError, match="another event loop"):
            await runner.run(jobs.echo)
        with pytest.raises(RuntimeError, match="another event loop"):
            await runner.aclose()

    other.run_until_complete(use())
    ours.run_until_complete(runner.aclose())
    for loop in (ours, other):
        loop.close()


async def test_x4_from_another_thread(make: MakeRunner) -> None:
    async with make() as runner:
        texts: list[str] = []

        def use() -> None:
            for call in ELSEWHERE.values():
                try:
                    call(runner)
                except RuntimeError as error:
                    texts.append(str(error))

        thread = threading.Thread(target=use)
        thread.start()
        thread.join()
        assert len(texts) == len(ELSEWHERE)
        assert all("another thread" in text for text in texts)
        assert await runner.run(jobs.aecho, 1) == 1


async def test_x5_after_a_fork(make: MakeRunner) -> None:
    async with make() as runner:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # 3.12 on: this process has threads. The child uses none
            pid = os.fork()
        if not pid:
            os._exit(_count_refusals(runner))
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == len(USES)  # noqa: ASYNC222  # it exits at once
        assert await runner.run(jobs.aecho, 1) == 1


def _count_refusals(runner: Runner) -> int:
    refusals = 0
    for call in USES.values():
        try:
            call(runner)
        except RuntimeError as error:
            refusals += "before a fork" in str(error)
        except BaseException:
            return 99
    return refusals


@pytest.mark.parametrize("verb", ["submit", "map"])
async def test_a_coroutine_object_is_closed_and_refused(make: MakeRunner, verb: str) -> None:
    async with make() as runner:
        coroutine: Any = jobs.aecho(1)
        with pytest.raises(TypeError, match=r"runner\.run\(aecho, \.\.\.\), not runner\.run\(aecho\(\.\.\.\)\)"):
            getattr(runner, verb)(coroutine, [1])
        with pytest.raises(RuntimeError, match="cannot reuse already awaited"):
            coroutine.send(None)
        again: Any = jobs.aecho(1)
        with pytest.raises(TypeError, match=r"not runner\.run"):
            await runner.run(again)


@pytest.mark.parametrize("fn", [jobs.numbers, jobs.anumbers])
async def test_a_generator_function_is_refused(make: MakeRunner, fn: Any) -> None:
    async with make() as runner:
        with pytest.raises(TypeError, match="numbers is a generator function"):
            _ = runner.submit(fn)
        with pytest.raises(TypeError, match="generator function"):
            await runner.run(fn)
        with pytest.raises(TypeError, match="generator function"):
            _ = runner.map(fn, [1])


@pytest.mark.parametrize("fn", [None, 5, "fetch"])
async def test_what_cannot_be_called_is_refused(make: MakeRunner, fn: Any) -> None:
    async with make() as runner:
        with pytest.raises(TypeError, match="expected a function"):
            _ = runner.submit(fn)
        with pytest.raises(TypeError, match="expected a function"):
            _ = runner.map(fn, [1])


async def test_a_map_wants_iterables(make: MakeRunner) -> None:
    number: Any = 5
    async with make() as runner:
        with pytest.raises(TypeError, match="at least one iterable"):
            _ = runner.map(jobs.echo)  # type: ignore[call-overload]
        with pytest.raises(TypeError, match="map needs iterables, not 5"):
            _ = runner.map(jobs.add, [1], number)
        window: Any
        for window in (0, -1):
            with pytest.raises(ValueError, match="window must be at least 1"):
                _ = runner.map(jobs.echo, [1], window=window)
        for window in (1.5, True, "3"):
            with pytest.raises(TypeError, match="window must be a whole number"):
                _ = runner.map(jobs.echo, [1], window=window)


def test_a_bad_option_is_named(subtests: pytest.Subtests) -> None:
    for option, value, error in [
        ("workers", 0, ValueError),
        ("workers", 1.5, TypeError),
        ("workers", True, TypeError),
        ("concurrency", 0, ValueError),
        ("concurrency", "9", TypeError),
        ("threads", 0, ValueError),
        ("threads", -1, ValueError),
        ("lifespan", 5, TypeError),
        ("loop_factory", "uvloop", TypeError),
        ("start_method", "fork", ValueError),
        ("start_method", 5, ValueError),
        ("max_message", 10, ValueError),
        ("max_message", 1 << 40, ValueError),
        ("start_timeout", 0, ValueError),
        ("start_timeout", float("nan"), ValueError),
        ("kill_after", float("inf"), ValueError),
        ("kill_after", "1", TypeError),
    ]:
        with subtests.test(option=option, value=value, error=error), pytest.raises(error, match=option):
            Runner(**cast(Any, {option: value}))


def test_an_unknown_option_is_refused() -> None:
    with pytest.raises(TypeError, match="chunksize"):
        Runner(chunksize=5)  # type: ignore[call-arg]


@pytest.mark.apart(because="each side has objects of its own, made by pickling")
async def test_x4_a_runner_cannot_be_pickled(make: MakeRunner) -> None:
    async with make() as runner:
        with pytest.raises(TypeError, match="cannot be pickled"):
            pickle.dumps(runner)
        with pytest.raises(TypeError, match="cannot be pickled"):
            await runner.run(jobs.echo, runner)


async def test_keywords_of_other_pools_get_advice(make: MakeRunner) -> None:
    for keyword, advice in {
        "max_workers": "write workers=",
        "initializer": "lifespan=",
        "wrokers": r"did you mean workers=\? it takes workers, ",
    }.items():
        with pytest.raises(TypeError, match=rf"^Runner\(\) got an unexpected keyword argument '{keyword}': .*{advice}"):
            make(**{keyword: 2})
    async with make() as runner:
        verbs: tuple[Any, ...] = (runner.map, runner.map_items, runner.starmap, runner.options().map)
        for verb in verbs:
            name = rf"^Runner\.{verb.__name__}\(\) got an unexpected keyword argument"
            with pytest.raises(TypeError, match=rf"{name} 'chunksize': there is no chunk size to tune, "):
                verb(jobs.echo, [1], chunksize=10)
            with pytest.raises(TypeError, match=rf"{name} 'timeout': for each call write runner\.options\(timeout="):
                verb(jobs.echo, [1], timeout=1)
            with pytest.raises(
                TypeError,
                match=rf"{name} 'orderd': did you mean ordered=\? it takes ordered, window, key, return_exceptions, progress$",
            ):
                verb(jobs.echo, [1], orderd=True)
        with pytest.raises(
            TypeError, match=r"^Runner\.options\(\) got .* 'timout': did you mean timeout=\? it takes key, retries, "
        ):
            runner.options(timout=1)  # type: ignore[call-arg]
        with pytest.raises(TypeError, match=r"^Runner\.options\(\) got .* 'colour': it takes key, retries, "):
            runner.options(colour=1)  # type: ignore[call-arg]
        with pytest.raises(TypeError, match=r"^Runner\.map\(\) missing 1 required positional argument: 'fn'"):
            runner.map()  # type: ignore[call-overload]
        for name in ("run", "submit", "broadcast"):
            with pytest.raises(TypeError, match=rf"^Runner\.{name}\(\) missing 1 required positional argument: 'fn'"):
                getattr(runner, name)()
        for name, argument in ("resize", "workers"), ("share", "obj"):
            with pytest.raises(TypeError, match=rf"^Runner\.{name}\(\) missing 1 required positional argument: '{argument}'"):
                getattr(runner, name)()


def test_signatures_say_what_there_is() -> None:
    options = "ordered: 'bool' = True, window: 'int | None' = None"
    assert str(inspect.signature(percore.Runner.map)).startswith(
        f"(self, fn: 'Callable[..., Any]', /, *iterables: 'AnyItems', {options}"
    )
    assert next(iter(inspect.signature(percore.Runner).parameters)) == "workers"
    assert "kwargs" not in inspect.signature(percore.Runner).parameters
