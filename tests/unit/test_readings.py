"""Readings of an executor's usage: each ends, whatever becomes of the loop."""

import asyncio
from concurrent.futures import Future

import pytest

from percore import Usage
from percore._executor.readings import Readings

EMPTY = Usage(())


async def empty() -> Usage:
    return EMPTY


async def test_readings_wait_for_the_launch_and_the_end_of_the_loop_for_them() -> None:
    readings = Readings()
    early = readings.add()
    readings.take()
    await readings.settle()
    assert not early.done()
    readings.open(empty)
    late = readings.add()
    readings.take()
    await readings.settle()
    assert early.result() is late.result() is EMPTY


async def test_an_error_of_the_reading_is_that_of_the_asker() -> None:
    async def fail() -> Usage:
        raise OSError("no /proc")

    readings = Readings()
    asked = readings.add()
    readings.open(fail)
    await readings.settle()
    with pytest.raises(OSError, match="no /proc"):
        asked.result()


def test_what_a_loop_leaves_behind_ends() -> None:
    readings = Readings()
    never: Future[None] = Future()

    async def wait() -> Usage:
        await asyncio.wrap_future(never)
        return EMPTY

    async def leave() -> list["Future[Usage]"]:
        begun = readings.add()
        readings.open(wait)
        await asyncio.sleep(0)
        return [begun, readings.add()]

    with asyncio.Runner() as runner:
        asked = runner.run(leave())
        readings.fail(RuntimeError("over"))
        assert [str(future.exception(0)) for future in asked] == ["over", "over"]
