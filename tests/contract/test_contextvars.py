"""contextvars: the values of a call's moment are what it sees in its worker."""

import asyncio
import contextvars
import threading
from collections.abc import Iterator
from typing import Any

import pytest

import percore
from tests import jobs, variables
from tests.contract.conftest import MakeRunner, kill_arrived, worker_of
from tests.contract.pipes import Gate, Log
from tests.internals import slots_used
from tests.waiting import until

VARIABLES = (variables.name, variables.level)
READS = pytest.mark.parametrize("fn", [variables.read, variables.aread, variables.read_later])
READS_FOR = pytest.mark.parametrize("fn", [variables.read_for, variables.aread_for])


@pytest.fixture(autouse=True)
def nothing_stays_set() -> Iterator[None]:
    yield
    assert variables.read() == ("unset", 0)


@READS
async def test_values_at_the_call(make: MakeRunner, fn: Any) -> None:
    async with make(2, contextvars=VARIABLES) as runner:
        variables.name.set("first")
        first = [runner.submit(fn) for _ in range(4)]
        variables.name.set("second")
        variables.level.set(2)
        second = runner.run(fn)
        assert await asyncio.gather(*first) == [("first", 0)] * 4
        assert await second == ("second", 2)
        assert await runner.options(retries=1, timeout=1e6).run(fn) == ("second", 2)


@READS
async def test_each_task_has_its_own(make: MakeRunner, fn: Any) -> None:
    async def caller(name: str) -> Any:
        variables.name.set(name)
        await asyncio.sleep(0)
        return await runner.run(fn)

    async with make(2, contextvars=VARIABLES) as runner:
        names = [f"caller {i}" for i in range(20)]
        assert await asyncio.gather(*map(caller, names)) == [(name, 0) for name in names]


@READS
async def test_unset_stays_unset(make: MakeRunner, fn: Any) -> None:
    async with make(contextvars=VARIABLES, threads=1) as runner:
        assert await runner.run(fn) == ("unset", 0)
        token = variables.name.set("set")
        assert await runner.run(fn) == ("set", 0)
        variables.name.reset(token)
        assert await runner.run(fn) == ("unset", 0)
        variables.level.set(5)
        assert await runner.run(fn) == ("unset", 5)


@READS
async def test_variables_that_were_not_given_stay_here(make: MakeRunner, fn: Any) -> None:
    async with make(contextvars=[variables.level]) as runner:
        variables.level.set(5)
        assert (await runner.run(fn))[1] == 5
        token = variables.name.set("here")
        assert (await runner.run(fn))[0] == "unset"
        variables.name.reset(token)


@pytest.mark.parametrize("fn", [variables.change, variables.achange])
async def test_changes_do_not_come_back_and_stay_nowhere(make: MakeRunner, fn: Any) -> None:
    async with make(contextvars=VARIABLES, threads=1) as runner:
        variables.name.set("mine")
        await runner.run(fn)
        await runner.map(fn, *([] for _ in range(1)))
        assert variables.read() == ("mine", 0)
        for reads in (variables.read, variables.aread):
            assert await runner.run(reads) == ("mine", 0)


@READS_FOR
@pytest.mark.parametrize("ordered", [True, False])
async def test_a_map_s_values_are_those_of_when_it_was_made(make: MakeRunner, fn: Any, ordered: bool) -> None:
    async with make(2, contextvars=VARIABLES) as runner:
        token = variables.name.set("made")
        mapped = runner.map(fn, range(300), ordered=ordered)
        pairs = runner.map_items(fn, range(20))
        variables.name.set("used")
        assert sorted(await mapped) == [(i, "made", 0) for i in range(300)]
        assert [pair async for pair in pairs] == [(i, (i, "made", 0)) for i in range(20)]
        variables.name.reset(token)
        assert await runner.map(fn, range(20)) == [(i, "unset", 0) for i in range(20)]


@READS
async def test_in_every_worker_also_after_a_respawn(make: MakeRunner, fn: Any) -> None:
    async with make(2, contextvars=VARIABLES) as runner:
        variables.name.set("everywhere")
        assert await runner.broadcast(fn) == [("everywhere", 0)] * 2
        worker_of(runner, 1).kill()
        await until(lambda: (second := runner.statistics().workers[1]).generation > 1 and second.state == "ready")
        assert await runner.broadcast(fn) == [("everywhere", 0)] * 2


async def test_a_retry_sees_the_same(make: MakeRunner, log: Log, gate: Gate) -> None:
    async with make(contextvars=VARIABLES, retries=1) as runner:
        variables.name.set(["before"])
        call = runner.submit(variables.hold_and_read, log.path, gate.path)
        variables.name.set("after")
        assert await log.next() == "holds"
        worker = worker_of(runner)
        worker.kill()
        await kill_arrived(worker)
        gate.open()
        assert await call == (["before"], 0)


@READS
async def test_values_of_any_kind(make: MakeRunner, fn: Any, subtests: pytest.Subtests) -> None:
    async with make(contextvars=VARIABLES) as runner:
        variables.level.set(1)
        for value in ({"user": [1, 2]}, jobs.Resource("r"), "x" * 20_000, None, float("inf")):
            with subtests.test(type(value).__name__):
                variables.name.set(value)
                assert await runner.run(fn) == (value, 1)
                assert await runner.map(variables.read_for, range(50)) == [(i, value, 1) for i in range(50)]


@pytest.mark.apart(because="each side has objects of its own, made by pickling")
async def test_a_value_is_the_call_s_own(make: MakeRunner) -> None:
    async with make(contextvars=VARIABLES) as runner:
        shared = ["x"]
        variables.name.set(shared)
        call = runner.submit(variables.aread)
        shared.append("later")
        assert await call == (["x"], 0)


# What cannot travel


@pytest.mark.apart(because="each side has objects of its own, made by pickling")
async def test_the_error_names_the_variable_that_cannot_be_pickled(make: MakeRunner) -> None:
    async with make(contextvars=VARIABLES) as runner:
        variables.name.set([1])
        variables.level.set({"a": threading.Lock()})
        for use in (lambda: runner.submit(variables.read), lambda: runner.map(variables.read_for, range(2))):
            with pytest.raises(TypeError, match=r"^the context variable 'level' contains a lock") as caught:
                await use()
            assert isinstance(caught.value.__cause__, TypeError)


@pytest.mark.apart(because="each side has objects of its own, made by pickling")
async def test_a_value_that_cannot_be_pickled_fails_the_call(make: MakeRunner) -> None:
    async with make(contextvars=VARIABLES) as runner:
        token = variables.name.set(jobs.RefusesPickle())
        call = runner.submit(variables.read)
        with pytest.raises(ValueError, match="do not pickle me"):
            await call
        with pytest.raises(ValueError, match="do not pickle me"):
            await runner.run(jobs.aecho, bytes(300_000))
        with pytest.raises(ValueError, match="do not pickle me"):
            _ = runner.map(variables.read_for, range(3))
        with pytest.raises(ValueError, match="do not pickle me"):
            await runner.broadcast(variables.read)
        variables.name.reset(token)
        assert await runner.run(variables.read) == ("unset", 0)
        assert slots_used(runner) == 0


@READS
@pytest.mark.apart(because="each side has objects of its own, made by pickling")
async def test_a_value_that_cannot_be_read_fails_the_call(make: MakeRunner, fn: Any) -> None:
    async with make(contextvars=VARIABLES) as runner:
        variables.name.set(jobs.RefusesUnpickle())
        with pytest.raises(ValueError, match="do not read me"):
            await runner.run(fn)
        results = await runner.map(variables.read_for, range(20), return_exceptions=True)
        assert [str(result) for result in results] == ["do not read me"] * 20
        variables.name.set("fine")
        assert await runner.run(fn) == ("fine", 0)


@pytest.mark.apart(because="each side has objects of its own, made by pickling")
async def test_values_that_are_too_large(make: MakeRunner) -> None:
    async with make(contextvars=VARIABLES) as runner:
        variables.name.set([bytes(10_000_000)])
        with pytest.raises(percore.PayloadTooLarge):
            await runner.run(variables.aread)
        variables.name.set("fine")
        assert await runner.run(variables.aread) == ("fine", 0)


def test_a_variable_that_no_module_has_is_refused() -> None:
    local = contextvars.ContextVar[int]("local")
    with pytest.raises(ValueError, match="top level of a module"):
        percore.Runner(contextvars=[local])


@pytest.mark.parametrize("value", [variables.name, [1], ["name"], 5])
def test_what_is_no_variable_is_refused(value: Any) -> None:
    with pytest.raises(TypeError, match="contextvars must be"):
        percore.Runner(contextvars=value)
